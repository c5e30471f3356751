//! Counts and limits of items, and of what a stream holds.

use sluicegate_checker::{
    Rule,
    history::{CallId, Delivery, Outcome, Request, Response, RollbackItem, Settings},
};

use crate::story::{
    LEASE, MS, Story, back, commit, consume, consume_100_bytes, dead_letter, delivery, extend,
    flow, item, large, reserve,
};

#[test]
fn counts_are_wrong() {
    // The first delivery is the second.
    let mut story = Story::default();
    story.push(item("a")).reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.breaks(Rule::Attempts, "a", 2);
    // The same after a call that was answered in time, or came before the item.
    for (pushed, answered) in [(0, LEASE / 2), (LEASE + 10, LEASE + 10)] {
        let mut story = Story::default();
        let call = story.start(reserve(1, 0));
        story.at(pushed);
        if pushed == 0 {
            story.push(item("a"));
        }
        story.at(answered).ok(call, Response::Deliveries(Vec::new()));
        if pushed > 0 {
            story.push(item("a"));
        }
        story.reserve(delivery("a", 2)).breaks(Rule::Attempts, "a", 2);
    }
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
    story.at(LEASE + 100).reserve(dead_letter("a", 2, "work", 1)).breaks(Rule::Limits, "a", 3);
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

/// A stream that may have one item in flight is sent five, while commits of four are under way. Two of them are refused.
fn five_deliveries() -> (Story, [CallId; 2]) {
    let mut story = Story::default();
    ["y", "z", "a", "b", "c"].into_iter().fold(&mut story, |story, name| story.push(item(name)));
    let stream = story.start(Request::Consume(consume(1)));
    let [third, fourth, first, second] = ["y", "z", "a", "b"].map(|name| {
        story.deliver(stream, delivery(name, 1));
        story.start(commit(&format!("{name}/1")))
    });
    story.at(100).deliver(stream, delivery("c", 1)).refused(third).refused(fourth);
    (story, [first, second])
}

/// Commits what is left of five items, of which two commits were refused.
fn commit_the_rest(story: &mut Story) {
    ["b/1", "c/1", "y/1", "z/1"]
        .into_iter()
        .fold(story, |story, receipt| story.commit(receipt, Outcome::Ok));
}

#[test]
fn a_stream_holds_too_much_while_commits_take_long() {
    // Both are refused, or turn out to have changed nothing.
    let (mut story, [first, second]) = five_deliveries();
    story.refused(first).refused(second).breaks(Rule::Limits, "work", 10);
    let (mut story, [first, second]) = five_deliveries();
    story.unknown(first).unknown(second).at(LEASE + 200);
    story.reserve(delivery("a", 2)).reserve(delivery("b", 2)).breaks(Rule::Limits, "work", 10);
    // One of them may have taken effect before.
    let (mut story, [first, second]) = five_deliveries();
    story.ok(first, Response::Settled(vec![Outcome::Ok])).refused(second);
    commit_the_rest(&mut story);
    story.rest().is_clean();
    let (mut story, [first, second]) = five_deliveries();
    story.unknown(first).refused(second);
    commit_the_rest(&mut story);
    story.rest().is_clean();
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

/// A stream that may hold 100 bytes is sent a fifth item, while commits of four are under way. Two of them, of items of 100 bytes, are refused.
fn five_deliveries_of(sizes: [usize; 3]) -> (Story, [CallId; 2]) {
    let mut story = Story::default();
    ["y", "z", "a", "b", "c"].into_iter().fold(&mut story, |story, name| story.push(item(name)));
    let stream = story.start(Request::Consume(consume_100_bytes()));
    let [first, second, last] = sizes;
    let commits = [("y", 100), ("z", 100), ("a", first), ("b", second)].map(|(name, bytes)| {
        story.deliver(stream, large(name, bytes));
        story.start(commit(&format!("{name}/1")))
    });
    let [third, fourth, first, second] = commits;
    story.at(100).deliver(stream, large("c", last)).refused(third).refused(fourth);
    (story, [first, second])
}

#[test]
fn a_stream_holds_too_many_bytes_while_commits_take_long() {
    // Both are refused, or turn out to have changed nothing.
    let (mut story, [first, second]) = five_deliveries_of([100, 101, 1]);
    story.refused(first).refused(second);
    let report = story.breaks(Rule::Limits, "work", 10).to_string();
    assert!(report.contains("held 401 bytes besides the newest item"), "{report}");
    let (mut story, [first, second]) = five_deliveries_of([100, 101, 1]);
    story.unknown(first).unknown(second).at(LEASE + 200);
    story.reserve(delivery("a", 2)).reserve(delivery("b", 2)).breaks(Rule::Limits, "work", 10);
    // One of them may have taken effect before.
    let (mut story, [first, second]) = five_deliveries_of([100, 101, 1]);
    story.ok(first, Response::Settled(vec![Outcome::Ok])).refused(second);
    commit_the_rest(&mut story);
    story.rest().is_clean();
    // The last item may be larger.
    let (mut story, [first, second]) = five_deliveries_of([100, 100, 500]);
    story.refused(first).refused(second).commit("a/1", Outcome::Ok);
    commit_the_rest(&mut story);
    story.rest().is_clean();
}

/// A stream that holds an item, and the answer to a flow.
fn flow_of(max_in_flight: u32) -> (Story, CallId) {
    let mut story = Story::default();
    story.push(item("a")).push(item("b")).push(item("c"));
    let stream = story.start(Request::Consume(consume(3)));
    story.deliver(stream, delivery("a", 1)).call(flow(stream, max_in_flight), Response::Done);
    (story, stream)
}

#[test]
fn a_stream_receives_more_than_its_flow_lets_it() {
    let (mut story, stream) = flow_of(0);
    story.commit("a/1", Outcome::Ok).deliver(stream, delivery("b", 1));
    let report = story.breaks(Rule::Limits, "work", 3).to_string();
    assert!(report.contains("after the answer to a flow of 0"), "{report}");
    let (mut story, stream) = flow_of(1);
    story.deliver(stream, delivery("b", 1)).breaks(Rule::Limits, "work", 3);
    // Until it is answered, a flow may be in force or the one before.
    let (mut story, stream) = flow_of(2);
    let first = story.start(flow(stream, 0));
    let second = story.start(flow(stream, 1));
    story.deliver(stream, delivery("b", 1)).ok(first, Response::Done);
    story.deliver(stream, delivery("c", 1)).ok(second, Response::Done);
    story.breaks(Rule::Limits, "work", 4);
}

#[test]
fn what_a_lone_consumer_was_not_sent_is_counted() {
    for (attempt, number) in [(2, 2), (1, 2)] {
        let mut story = Story::default();
        let stream = story.start(Request::Consume(consume(10)));
        story.push(item("a"));
        story.call(flow(stream, 0), Response::Done).call(flow(stream, 10), Response::Done);
        story.deliver(stream, Delivery { attempt, ..delivery("a", number) });
        story.breaks(Rule::Attempts, "a", 2);
    }
}
