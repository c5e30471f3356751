//! Streams: what they may hold, and what becomes of it.

use sluicegate_checker::history::{
    Consume, Delivery, NewItem, OnDisconnect, Outcome, Request, Response, What,
};

use crate::story::{
    LEASE, MS, Story, commit, consume, consume_100_bytes, delivery, extend, flow, item, large,
};

#[test]
fn a_broken_stream_frees_its_items_at_once() {
    let mut story = Story::default();
    story.push(item("a"));
    let stream = story.start(Request::Consume(consume(10)));
    story.at(10).deliver(stream, delivery("a", 1));
    // The client notices later than the broker.
    story.at(50).reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.at(90).unknown(stream).commit("a/2", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_stream_receives_as_much_as_it_has_room_for() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b")).push(item("c"));
    let stream = story.start(Request::Consume(consume(1)));
    story.deliver(stream, delivery("a", 1));
    let call = story.start(commit("a/1"));
    story.at(10).deliver(stream, delivery("b", 1));
    story.ok(call, Response::Settled(vec![Outcome::Ok]));
    // The lease lapses, which frees the place too.
    story.at(LEASE + 100).deliver(stream, delivery("c", 1)).commit("c/1", Outcome::Ok);
    story.commit("b/1", Outcome::Ok).ok(stream, Response::Done).rest().is_clean();
}

#[test]
fn a_stream_receives_as_many_bytes_as_it_has_room_for() {
    let mut story = Story::default();
    ["a", "b", "c", "d"].into_iter().fold(&mut story, |story, name| story.push(item(name)));
    let stream = story.start(Request::Consume(consume_100_bytes()));
    story.deliver(stream, large("a", 60)).deliver(stream, large("b", 40));
    story.commit("b/1", Outcome::Ok);
    // What is being committed takes no room, and a larger item is alone.
    let call = story.start(commit("a/1"));
    story.at(10).deliver(stream, large("c", 500));
    story.ok(call, Response::Settled(vec![Outcome::Ok])).commit("c/1", Outcome::Ok);
    story.deliver(stream, large("d", 100)).commit("d/1", Outcome::Ok);
    story.ok(stream, Response::Done).rest().is_clean();
}

/// The answer of the store to the broker takes its time, while the item is deleted.
#[test]
fn what_was_reserved_before_it_was_deleted_may_be_sent_later() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    let delete = Request::DeleteItem { queue: "work".to_owned(), id: "a".to_owned() };
    story.push(item("a")).at(5_000).call(delete, Response::Done).at(8_000);
    let late = Delivery { lease_end: (4_000 + LEASE) * MS, ..delivery("a", 1) };
    story.deliver(stream, late).ok(stream, Response::Done).rest().is_clean();
}

/// A broker that shuts down takes back what a stream keeps, also what may be committed.
#[test]
fn a_broker_takes_back_what_may_be_committed() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume_100_bytes() };
    let stream = story.start(Request::Consume(keep));
    story.push(item("a")).push(item("b")).deliver(stream, large("a", 60));
    let call = story.start(commit("a/1"));
    story.at(10).deliver(stream, large("b", 60)).commit("b/1", Outcome::Ok).unknown(call);
    story.unknown(stream).at(LEASE + 100).reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.commit("a/2", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_broker_takes_back_what_a_stream_keeps_before_its_end_is_read() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.push(item("a")).deliver(stream, delivery("a", 1)).at(500);
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) }).at(600).unknown(stream);
    story.commit("a/2", Outcome::Ok).rest().is_clean();
}

/// Its consumer settles the item, or sees that it is delivered again, before it hears that its broker was shut down.
#[test]
fn what_a_broker_took_back_lost_its_lease_and_no_attempt() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let fault = |begins| What::Disturbed { begins, fault: "a broker is shut down".to_owned() };
    let stream = story.start(Request::Consume(keep));
    story.push(item("a")).push(item("b"));
    story.deliver(stream, delivery("a", 1)).deliver(stream, delivery("b", 1));
    story.tell(fault(true)).at(100).commit("a/1", Outcome::LeaseLost).at(LEASE + 100);
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.reserve(Delivery { attempt: 1, ..delivery("b", 2) });
    story.commit("a/2", Outcome::Ok).commit("b/2", Outcome::Ok);
    story.unknown(stream).tell(fault(false)).rest().is_clean();
}

/// It was reserved and sent before it expired, and the network stood still.
#[test]
fn what_was_sent_in_time_may_arrive_late_in_a_fault() {
    let mut story = Story::default();
    let fault = |begins| What::Disturbed { begins, fault: "the network stands still".to_owned() };
    let stream = story.start(Request::Consume(consume(10)));
    story.tell(fault(true)).push(NewItem { ttl: Some(1_000 * MS), ..item("a") });
    let late = Delivery { lease_end: (500 + LEASE) * MS, ..delivery("a", 1) };
    story.at(8_000).deliver(stream, late).commit("a/1", Outcome::Ok).tell(fault(false));
    story.ok(stream, Response::Done).rest().is_clean();
}

#[test]
fn a_stream_that_holds_bytes_may_have_no_room() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume_100_bytes() };
    let stream = story.start(Request::Consume(Consume { lease: 60_000 * MS, ..keep }));
    story.push(item("a")).push(item("b"));
    story.deliver(stream, Delivery { lease_end: 60_000 * MS, ..large("a", 60) });
    story.at(40_000).commit("a/1", Outcome::Ok).deliver(stream, large("b", 60));
    story.commit("b/1", Outcome::Ok).ok(stream, Response::Done).rest().is_clean();
}

#[test]
fn a_lease_that_is_extended_after_its_end_takes_no_place() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume(1)));
    story.deliver(stream, delivery("a", 1)).at(LEASE - 1_000);
    let extension = story.start(extend("a/1"));
    let extended = (Outcome::Ok, Some((2 * LEASE + 500) * MS));
    story.at(LEASE + 500).ok(extension, Response::Extended(vec![extended]));
    story.deliver(stream, delivery("b", 1)).is_clean();
}

#[test]
fn a_slow_reader_may_receive_late() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(1_000 * MS), ..item("a") });
    let slow = Consume { slow: true, on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(slow));
    let late = Delivery { lease_end: 900 * MS, ..delivery("a", 1) };
    story.at(9_000).deliver(stream, late).ok(stream, Response::Done).rest().is_clean();
}

#[test]
fn what_went_unsent_under_a_short_lease_comes_later() {
    for (slow, lease) in [(false, 100 * MS), (true, LEASE * MS)] {
        let mut story = Story::default();
        let stream = story.start(Request::Consume(Consume { slow, lease, ..consume(10) }));
        story.push(item("a")).push(item("b"));
        story.deliver(stream, delivery("b", 1)).deliver(stream, delivery("a", 1));
        story.commit("a/1", Outcome::Ok).commit("b/1", Outcome::Ok).rest().is_clean();
    }
}

#[test]
fn a_stream_may_be_halted_and_resumed() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b")).push(item("c"));
    let stream = story.start(Request::Consume(consume(2)));
    let halt = story.start(flow(stream, 0));
    // What was sent before the answer arrives before it.
    story.deliver(stream, delivery("a", 1)).ok(halt, Response::Done).at(40_000);
    // It does not wait meanwhile, and what is sent after the request for more may come before its answer.
    let more = story.start(flow(stream, 3));
    story.deliver(stream, delivery("b", 1)).deliver(stream, delivery("c", 1));
    story.ok(more, Response::Done);
    for name in ["a", "b", "c"] {
        story.commit(&format!("{name}/1"), Outcome::Ok);
    }
    story.ok(stream, Response::Done).rest().is_clean();
}
