//! Items that are lost, invented, doubled, or there after they have gone.

use sluicegate_checker::{
    Rule,
    history::{Delivery, Listed, Outcome, Pushed, QueueAtRest, Request, Response, State, What},
};

use crate::story::{LEASE, Story, consume, dedup, delivery, item, push, pushed};

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
    let result = Pushed { deduplicated: true, ..pushed("a") };
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
