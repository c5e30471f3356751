//! Items that come out of order, early, late, or from a paused queue.

use sluicegate_checker::{
    Rule,
    history::{
        Delivery, NewItem, Outcome, Pushed, Request, Response, RollbackItem, Settings, What,
    },
};

use crate::story::{
    LEASE, MS, Story, back, commit, consume, delivery, flow, item, keyed, push, pushed,
};

#[test]
fn a_key_is_delivered_out_of_order() {
    let mut story = Story::default();
    story.push(keyed("a")).push(keyed("b")).reserve(delivery("b", 1));
    story.breaks(Rule::KeyOrder, "b", 4);
}

#[test]
fn a_key_is_passed_by_while_its_head_is_retried() {
    let mut story = Story::default();
    story.push(keyed("a")).push(keyed("b")).reserve(delivery("a", 1));
    let later = RollbackItem { delay: Some(5_000 * MS), ..back("a/1") };
    story.rollback(later, Outcome::Ok).reserve(delivery("b", 1));
    story.breaks(Rule::KeyOrder, "b", 5);
}

#[test]
fn two_items_of_a_key_are_held_at_a_time() {
    let mut story = Story::default();
    let calls = ["a", "b"].map(|name| (name, story.start(push(vec![keyed(name)]))));
    for (name, call) in calls {
        story.ok(call, Response::Pushed(vec![pushed(name)]));
    }
    story.reserve(delivery("b", 1)).reserve(delivery("a", 1)).breaks(Rule::KeyOrder, "a", 5);
}

#[test]
fn a_commit_that_changed_nothing_excuses_no_successor() {
    let mut story = Story::default();
    story.push(keyed("a")).push(keyed("b")).reserve(delivery("a", 1));
    let call = story.start(commit("a/1"));
    story.at(LEASE + 100).reserve(delivery("b", 1)).reserve(delivery("a", 2));
    story.ok(call, Response::Settled(vec![Outcome::LeaseLost]));
    let report = story.report();
    assert_eq!(report.rules(), [Rule::KeyOrder], "{report}");
}

#[test]
fn sequence_numbers_fall() {
    let sequenced = Settings { sequenced: true, ..Settings::default() };
    let numbered = |name: &str, sequence| {
        let result = Pushed { sequence, ..pushed(name) };
        (push(vec![item(name)]), Response::Pushed(vec![result]))
    };
    for (first, second, events) in [(2, 1, 3), (1, 1, 3), (1, 0, 3)] {
        let mut story = Story::default();
        story.set("work", sequenced.clone());
        for (name, sequence) in [("a", first), ("b", second)] {
            let (request, response) = numbered(name, sequence);
            story.call(request, response);
        }
        story.breaks(Rule::SequenceOrder, "b", events);
    }
    // Of two at a time, none gets the number of the other.
    let mut story = Story::default();
    story.set("work", sequenced);
    let calls = ["a", "b"].map(|name| (name, story.start(push(vec![item(name)]))));
    for (name, call) in calls {
        story.ok(call, numbered(name, 1).1);
    }
    story.breaks(Rule::SequenceOrder, "b", 3);
}

#[test]
fn a_lone_consumer_receives_what_was_pushed_last_first() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    story.push(item("a")).push(item("b"));
    story.deliver(stream, delivery("b", 1)).deliver(stream, delivery("a", 1));
    story.breaks(Rule::PushOrder, "a", 5);
}

#[test]
fn a_lone_consumer_that_was_halted_receives_what_was_pushed_last_first() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    story.push(item("a")).call(flow(stream, 0), Response::Done).push(item("b"));
    story.call(flow(stream, 10), Response::Done);
    story.deliver(stream, delivery("b", 1)).deliver(stream, delivery("a", 1));
    story.breaks(Rule::PushOrder, "a", 5);
}

#[test]
fn batches_of_a_push_stream_pass_each_other() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    let batch =
        |name| Request::Push { queue: "work".to_owned(), items: vec![item(name)], stream: Some(1) };
    let calls = ["a", "b"].map(|name| (name, story.start(batch(name))));
    for (name, call) in calls {
        story.ok(call, Response::Pushed(vec![pushed(name)]));
    }
    story.deliver(stream, delivery("b", 1)).deliver(stream, delivery("a", 1));
    story.breaks(Rule::PushOrder, "a", 5);
}

#[test]
fn a_delayed_item_comes_early() {
    let mut story = Story::default();
    story.push(NewItem { delay: 5_000 * MS, ..item("a") }).reserve(delivery("a", 1));
    story.breaks(Rule::TooEarly, "a", 2);
}

#[test]
fn a_rolled_back_item_comes_early() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let later = RollbackItem { delay: Some(5_000 * MS), ..back("a/1") };
    story.rollback(later, Outcome::Ok).reserve(delivery("a", 2)).breaks(Rule::TooEarly, "a", 2);
}

#[test]
fn an_item_is_reserved_in_a_fault_after_it_expired() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    story.push(NewItem { ttl: Some(100 * MS), ..item("a") });
    story.tell(What::Disturbed { begins: true, fault: "the store is slow".to_owned() });
    story.at(500).deliver(stream, delivery("a", 1)).breaks(Rule::Expired, "a", 4);
}

/// By its lease it was reserved when it had expired, although less time has passed since its push.
#[test]
fn an_item_is_reserved_when_it_has_expired() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(5_000 * MS), ..item("a") });
    story.reserve(Delivery { lease_end: (6_000 + LEASE) * MS, ..delivery("a", 1) });
    story.breaks(Rule::Expired, "a", 4);
}

#[test]
fn an_expired_item_is_delivered() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(100 * MS), ..item("a") }).at(500).reserve(delivery("a", 1));
    story.breaks(Rule::Expired, "a", 4);
}

#[test]
fn an_item_is_sent_as_its_lease_ends() {
    let sent_at = |sent: u64| {
        let mut story = Story::default();
        let stream = story.start(Request::Consume(consume(10)));
        let lease_end = (LEASE + 1) * MS;
        story.push(item("a")).at(LEASE);
        story.deliver(stream, Delivery { lease_end, sent: Some(sent * MS), ..delivery("a", 1) });
        story
    };
    sent_at(LEASE - 900).breaks(Rule::TooLate, "a", 2);
    sent_at(LEASE + 500).breaks(Rule::TooLate, "a", 2);
    sent_at(LEASE - 1_000).is_clean(); // and is under way for a second
}

#[test]
fn a_paused_queue_delivers() {
    let mut story = Story::default();
    story.push(item("a"));
    story.call(Request::PauseQueue { queue: "work".to_owned() }, Response::Done);
    story.at(5_000).reserve(delivery("a", 1)).breaks(Rule::Paused, "a", 2);
}
