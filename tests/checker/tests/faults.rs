//! For each rule the shortest histories that break it.

use std::collections::HashSet;

use sluicegate_checker::{
    Rule,
    history::{
        Consume, Delivery, Figures, Listed, NewItem, OnDisconnect, Outcome, PushEntry, QueueAtRest,
        Request, Response, RollbackItem, Settings, State, What,
    },
};

use crate::story::{
    LEASE, MS, Story, back, commit, consume, consume_100_bytes, dedup, delivery, extend, item,
    keyed, large, push, pushed, reserve,
};

#[test]
fn an_answered_push_is_lost() {
    let mut story = Story::default();
    let report = story.push(item("a")).rest().breaks(Rule::Lost, "a", 3);
    let text = report.to_string();
    for said in ["Lost: a (a)", "Push to work, 1 items, a", "pushed 1, a", "at rest"] {
        assert!(text.contains(said), "{said} is not in\n{text}");
    }
}

#[test]
fn an_item_is_lost_though_its_settle_changed_nothing() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100).reserve(delivery("a", 2));
    story.commit("a/1", Outcome::LeaseLost).rest().breaks(Rule::Lost, "a", 4);
}

#[test]
fn more_is_lost_than_a_cut_pop_may_take() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let call = story.start(Request::Pop { queue: "work".to_owned(), max_items: 1, wait: 0 });
    story.unknown(call).rest().breaks(Rule::Lost, "b", 3);
}

#[test]
fn history_that_nobody_has_committed() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    at_rest(&mut story, State::Processed).breaks(Rule::Lost, "a", 2);
}

/// At rest, the item `a` is in this state.
fn at_rest(story: &mut Story, state: State) -> &mut Story {
    let items = vec![Listed { id: "a".to_owned(), name: "a".to_owned(), state }];
    let queue = QueueAtRest { queue: "work".to_owned(), items, figures: None };
    story.tell(What::Rest { queues: vec![queue] })
}

#[test]
fn an_item_that_nobody_pushed() {
    let mut story = Story::default();
    story.reserve(delivery("a", 1)).breaks(Rule::Invented, "a", 1);
}

#[test]
fn an_item_of_a_refused_push() {
    let mut story = Story::default();
    let call = story.start(push(vec![item("a")]));
    story.refused(call).reserve(delivery("a", 1)).breaks(Rule::Invented, "a", 1);
    let mut story = Story::default();
    let call = story.start(push(vec![item("a")]));
    story.reserve(delivery("a", 1)).refused(call).breaks(Rule::Invented, "a", 3);
}

#[test]
fn the_content_of_another_item() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let mixed = Delivery { name: "b".to_owned(), ..delivery("a", 1) };
    story.reserve(mixed).breaks(Rule::Invented, "a", 2);
}

#[test]
fn one_push_stores_two_items() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let second = Delivery { name: "a".to_owned(), ..delivery("second", 1) };
    story.reserve(second).breaks(Rule::Doubled, "a", 2);
}

#[test]
fn a_deduplication_id_stores_two_items() {
    let mut story = Story::default();
    let again = Response::Pushed(vec![pushed("second")]);
    story.push(dedup("a")).call(push(vec![dedup("a")]), again);
    story.breaks(Rule::Doubled, "a", 3);
}

#[test]
fn a_deduplication_id_that_nobody_pushed_before() {
    let mut story = Story::default();
    let result = sluicegate_checker::history::Pushed { deduplicated: true, ..pushed("a") };
    story.call(push(vec![dedup("a")]), Response::Pushed(vec![result]));
    story.breaks(Rule::Doubled, "a", 2);
}

#[test]
fn a_retried_push_is_stored_twice() {
    let mut story = Story::default();
    let lost = story.start(push(vec![dedup("a")]));
    story.unknown(lost).push(dedup("a")).reserve(delivery("a", 1));
    let second = Delivery { name: "a".to_owned(), ..delivery("second", 1) };
    story.reserve(second).breaks(Rule::Doubled, "a", 3);
}

#[test]
fn two_leases_overlap() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(500).reserve(delivery("a", 2));
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn two_leases_overlap_beside_a_stream_that_lives() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume(10)));
    story.deliver(stream, delivery("a", 1)).at(500);
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.at(9_000).deliver(stream, delivery("b", 1)).unknown(stream);
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

/// A consumer extends a lease to 30 s on a stream that keeps leases, and the item is delivered again after this time.
fn delivered_again_at(ms: u64, renew: bool) -> Story {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, renew, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.push(item("a")).deliver(stream, delivery("a", 1));
    let extend = Request::Extend { receipts: vec!["a/1".to_owned()], lease: 30_000 * MS };
    story.call(extend, Response::Extended(vec![(Outcome::Ok, Some(30_000 * MS))]));
    story.ok(stream, Response::Done).at(ms).reserve(delivery("a", 2));
    story
}

#[test]
fn a_lease_that_was_extended_overlaps() {
    delivered_again_at(LEASE + 100, false).breaks(Rule::LeaseOverlap, "a", 2);
    delivered_again_at(LEASE - 100, true).breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn a_rollback_that_changed_nothing_excuses_no_overlap() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let call = story.start(Request::Rollback { items: vec![back("a/1")] });
    story.at(500).reserve(delivery("a", 2));
    story.ok(call, Response::Settled(vec![Outcome::LeaseLost]));
    story.breaks(Rule::LeaseOverlap, "a", 3);
}

#[test]
fn a_reservation_is_handed_out_twice() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).reserve(delivery("a", 1));
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn a_committed_item_is_delivered() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    story.at(LEASE + 100).reserve(delivery("a", 2)).breaks(Rule::AfterCommit, "a", 3);
}

#[test]
fn a_popped_item_is_delivered_again() {
    let mut story = Story::default();
    story.push(item("a"));
    let pop = Request::Pop { queue: "work".to_owned(), max_items: 1, wait: 0 };
    story.call(pop, Response::Deliveries(vec![delivery("a", 1)]));
    story.reserve(delivery("a", 2)).breaks(Rule::AfterCommit, "a", 3);
}

#[test]
fn a_committed_item_is_still_there() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    at_rest(&mut story, State::Ready).breaks(Rule::AfterCommit, "a", 2);
}

#[test]
fn a_deleted_item_is_delivered() {
    let mut story = Story::default();
    let delete = Request::DeleteItem { queue: "work".to_owned(), id: "a".to_owned() };
    story.push(item("a")).call(delete, Response::Done).reserve(delivery("a", 1));
    story.breaks(Rule::AfterCommit, "a", 3);
}

#[test]
fn a_deleted_item_is_reserved_and_delivered() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    let delete = Request::DeleteItem { queue: "work".to_owned(), id: "a".to_owned() };
    story.push(item("a")).call(delete, Response::Done).at(5_000).deliver(stream, delivery("a", 1));
    story.breaks(Rule::AfterCommit, "a", 3);
}

#[test]
fn a_stale_receipt_is_answered_ok() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100).reserve(delivery("a", 2));
    story.commit("a/1", Outcome::Ok).breaks(Rule::StaleReceipt, "a", 4);
}

#[test]
fn a_receipt_settles_twice() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    let report = story.commit("a/1", Outcome::Ok).report();
    assert_eq!(report.rules(), [Rule::StaleReceipt], "{report}");
}

#[test]
fn a_rolled_back_receipt_is_extended() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).rollback(back("a/1"), Outcome::Ok);
    let extend = Request::Extend { receipts: vec!["a/1".to_owned()], lease: 1_000 * MS };
    story.call(extend, Response::Extended(vec![(Outcome::Ok, Some(2_000 * MS))]));
    story.breaks(Rule::StaleReceipt, "a", 4);
}

#[test]
fn gone_is_answered_for_what_is_there() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Gone);
    story.breaks(Rule::Outcome, "a", 3);
}

#[test]
fn gone_is_answered_and_the_item_comes_again() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let call = story.start(commit("a/1"));
    story.unknown(call).commit("a/1", Outcome::Gone);
    story.at(LEASE + 100).reserve(delivery("a", 2)).breaks(Rule::Outcome, "a", 3);
}

#[test]
fn lease_lost_is_answered_for_a_valid_lease() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::LeaseLost);
    story.breaks(Rule::Outcome, "a", 3);
}

#[test]
fn lease_lost_is_answered_after_the_commit() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    let report = story.commit("a/1", Outcome::LeaseLost).report();
    assert_eq!(report.rules(), [Rule::Outcome], "{report}");
}

#[test]
fn an_item_is_revoked_twice() {
    let mut story = Story::default();
    story.push(item("a"));
    let stream = story.start(Request::Consume(consume(10)));
    story.deliver(stream, delivery("a", 1));
    for _ in 0..2 {
        story.tell(What::Revoked { call: stream, receipt: "a/1".to_owned() });
    }
    story.breaks(Rule::Outcome, "a", 2);
}

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
        let result = sluicegate_checker::history::Pushed { sequence, ..pushed(name) };
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
fn an_expired_item_is_delivered() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(100 * MS), ..item("a") }).at(500).reserve(delivery("a", 1));
    story.breaks(Rule::Expired, "a", 4);
}

#[test]
fn a_paused_queue_delivers() {
    let mut story = Story::default();
    story.push(item("a"));
    story.call(Request::PauseQueue { queue: "work".to_owned() }, Response::Done);
    story.at(5_000).reserve(delivery("a", 1)).breaks(Rule::Paused, "a", 2);
}

#[test]
fn counts_are_wrong() {
    // The first delivery is the second.
    let mut story = Story::default();
    story.push(item("a")).reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.breaks(Rule::Attempts, "a", 2);
    // A lapse is no failed attempt, or two.
    for attempt in [1, 3] {
        let mut story = Story::default();
        story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100);
        story.reserve(Delivery { attempt, ..delivery("a", 2) }).breaks(Rule::Attempts, "a", 2);
    }
    // A rollback that keeps the attempt counts.
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    story.rollback(RollbackItem { keep_attempt: true, ..back("a/1") }, Outcome::Ok);
    story.reserve(delivery("a", 2)).breaks(Rule::Attempts, "a", 3);
    // Two receipts, one number.
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100);
    let same = Delivery { receipt: "other".to_owned(), ..delivery("a", 1) };
    story.reserve(same).breaks(Rule::Attempts, "a", 2);
}

#[test]
fn limits_are_missed() {
    let limited = Settings { max_attempts: 2, max_deliveries: 3, ..Settings::default() };
    let once = || {
        let mut story = Story::default();
        story.set("work", limited.clone()).push(item("a")).reserve(delivery("a", 1));
        story
    };
    // Too early.
    let mut story = once();
    story.rollback(back("a/1"), Outcome::DeadLettered).breaks(Rule::Limits, "a", 3);
    // Too late.
    let mut story = once();
    story.rollback(back("a/1"), Outcome::Ok).reserve(delivery("a", 2));
    story.rollback(back("a/2"), Outcome::Ok).breaks(Rule::Limits, "a", 3);
    // Delivered beyond it.
    let mut story = once();
    story.at(LEASE + 100).reserve(delivery("a", 2));
    story.at(2 * LEASE + 200).reserve(delivery("a", 3)).breaks(Rule::Limits, "a", 2);
    // Handed out too often.
    let mut story = once();
    for number in 1..=3 {
        let kept = RollbackItem { keep_attempt: true, ..back(&format!("a/{number}")) };
        story.rollback(kept, Outcome::Ok);
        story.reserve(Delivery { attempt: 1, ..delivery("a", number + 1) });
    }
    story.breaks(Rule::Limits, "a", 2);
    // In the dead-letter queue without a reason.
    let mut story = once();
    let dead = Delivery {
        queue: "work.dead".to_owned(),
        attempt: 1,
        origin_queue: "work".to_owned(),
        dead_letter_attempts: 1,
        ..delivery("a", 2)
    };
    story.at(LEASE + 100).reserve(dead).breaks(Rule::Limits, "a", 3);
}

#[test]
fn a_stream_receives_too_much() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume(1)));
    story.deliver(stream, delivery("a", 1)).deliver(stream, delivery("b", 1));
    story.breaks(Rule::Limits, "work", 3);
    // After an extension that came in time.
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume(1)));
    story.deliver(stream, delivery("a", 1)).at(LEASE - 1_000);
    let extended = (Outcome::Ok, Some((2 * LEASE - 1_000) * MS));
    story.call(extend("a/1"), Response::Extended(vec![extended]));
    story.at(LEASE + 500).deliver(stream, delivery("b", 1)).breaks(Rule::Limits, "work", 3);
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let both = vec![story.leased(delivery("a", 1)), story.leased(delivery("b", 1))];
    story.call(reserve(1, 0), Response::Deliveries(both)).breaks(Rule::Limits, "work", 2);
}

/// A stream that may hold 100 bytes, and is sent two items.
fn two_deliveries(first: usize, second: usize) -> Story {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume_100_bytes()));
    story.deliver(stream, large("a", first)).deliver(stream, large("b", second));
    story
}

#[test]
fn a_stream_receives_too_many_bytes() {
    // Together, behind a larger one, and a larger one that is not alone.
    for (first, second) in [(60, 41), (101, 1), (1, 101)] {
        two_deliveries(first, second).breaks(Rule::Limits, "work", 3);
    }
    // After a commit that was refused.
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let stream = story.start(Request::Consume(consume_100_bytes()));
    story.deliver(stream, large("a", 60));
    let call = story.start(commit("a/1"));
    story.refused(call).deliver(stream, large("b", 41)).breaks(Rule::Limits, "work", 3);
}

#[test]
fn a_stream_that_holds_no_bytes_is_not_woken() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume_100_bytes()));
    story.push(item("a")).at(30_000).deliver(stream, large("a", 200));
    story.breaks(Rule::NotWoken, "a", 4);
}

fn moved(to_queue: &str) -> Request {
    Request::Move { receipt: "a/1".to_owned(), to_queue: to_queue.to_owned(), delay: 0 }
}

#[test]
fn a_moved_item_is_where_it_was() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    story.call(moved("next"), Response::Settled(vec![Outcome::Ok]));
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) }).breaks(Rule::Atomic, "a", 2);
}

#[test]
fn an_item_is_in_two_queues() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let call = story.start(moved("next"));
    let at = |queue: &str| QueueAtRest {
        queue: queue.to_owned(),
        items: vec![Listed { id: "a".to_owned(), name: "a".to_owned(), state: State::Ready }],
        figures: None,
    };
    story.unknown(call).tell(What::Rest { queues: vec![at("work"), at("next")] });
    let report = story.report();
    assert_eq!(report.rules(), [Rule::Atomic], "{report}");
}

/// A `CommitAndPush` of `b` and `c` by the receipt of `a` has an unknown outcome.
fn half_told() -> Story {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let entry = |name| PushEntry { queue: "work".to_owned(), item: item(name) };
    let pushes = vec![entry("b"), entry("c")];
    let call = story.start(Request::CommitAndPush { receipt: "a/1".to_owned(), pushes });
    story.unknown(call);
    story
}

#[test]
fn a_commit_and_push_commits_nothing() {
    let mut story = half_told();
    story.reserve(delivery("b", 1)).at(LEASE + 100).reserve(delivery("a", 2));
    story.breaks(Rule::Atomic, "a", 3);
    let mut story = half_told();
    story.at(LEASE + 100).reserve(delivery("a", 2)).reserve(delivery("b", 1));
    story.breaks(Rule::Atomic, "b", 3);
}

#[test]
fn a_commit_and_push_pushes_a_part() {
    let mut story = half_told();
    story.reserve(delivery("b", 1)).commit("b/1", Outcome::Ok).rest();
    story.breaks(Rule::Atomic, "CommitAndPush", 3);
}

#[test]
fn a_commit_and_push_by_a_stale_receipt_pushes() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100).reserve(delivery("a", 2));
    let pushes = vec![PushEntry { queue: "work".to_owned(), item: item("b") }];
    let call = story.start(Request::CommitAndPush { receipt: "a/1".to_owned(), pushes });
    story.reserve(delivery("b", 1));
    story.ok(call, Response::CommittedAndPushed(Outcome::LeaseLost, Vec::new()));
    story.breaks(Rule::Atomic, "b", 3);
}

#[test]
fn a_stream_is_not_woken() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume(10)));
    story.push(item("a")).at(30_000).deliver(stream, delivery("a", 1));
    story.breaks(Rule::NotWoken, "a", 4);
}

#[test]
fn a_waiting_call_is_answered_with_nothing() {
    let mut story = Story::default();
    story.push(item("a"));
    let call = story.start(reserve(1, 30_000));
    story.at(30_000).ok(call, Response::Deliveries(Vec::new()));
    story.at(30_500).reserve(delivery("a", 1)).breaks(Rule::NotWoken, "a", 4);
}

#[test]
fn the_next_item_of_a_key_wakes_nobody() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.push(keyed("a")).push(keyed("b")).deliver(stream, delivery("a", 1));
    story.commit("a/1", Outcome::Ok).at(30_000).deliver(stream, delivery("b", 1));
    story.breaks(Rule::NotWoken, "b", 4);
}

#[test]
fn totals_go_back() {
    let mut story = Story::default();
    let stats = || Request::GetQueueStats { queue: "work".to_owned() };
    let figures = |pushed| Response::Stats(Figures { pushed, ..Figures::default() });
    story.call(stats(), figures(2)).call(stats(), figures(1)).breaks(Rule::Figures, "work", 3);
}

#[test]
fn figures_do_not_add_up() {
    for figures in [
        Figures { ready: 1, pushed: 1, ..Figures::default() },
        Figures { pushed: 2, ..Figures::default() },
        Figures { pushed: 1, committed: 1, ..Figures::default() },
    ] {
        let mut story = Story::default();
        story.push(NewItem { ttl: Some(MS), ..item("a") }).at(500);
        let queue = "work".to_owned();
        let queue = QueueAtRest { queue, items: Vec::new(), figures: Some(figures) };
        story.tell(What::Rest { queues: vec![queue] }).breaks(Rule::Figures, "work", 1);
    }
}

#[test]
fn a_history_contradicts_itself() {
    let mut story = Story::default();
    story.rest().ok(7, Response::Done).breaks(Rule::Recording, "history", 1);
}

/// The faults of this file and of schedules.rs break every rule there is.
#[test]
fn every_rule_has_a_fault() {
    let source = [include_str!("faults.rs"), include_str!("schedules.rs")].concat();
    let named: HashSet<&Rule> =
        Rule::ALL.iter().filter(|rule| source.contains(&format!("Rule::{rule}"))).collect();
    let missing: Vec<&Rule> = Rule::ALL.iter().filter(|rule| !named.contains(rule)).collect();
    assert!(missing.is_empty(), "no history breaks {missing:?}");
}
