//! Moves and `CommitAndPush` that take effect in part.

use sluicegate_checker::{
    Rule,
    history::{Delivery, Listed, Outcome, PushEntry, QueueAtRest, Request, Response, State, What},
};

use crate::story::{LEASE, Story, delivery, item};

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
