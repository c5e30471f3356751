//! Consumers that wait in vain.

use sluicegate_checker::{
    Rule,
    history::{Consume, OnDisconnect, Outcome, Request, Response},
};

use crate::story::{Story, consume, consume_100_bytes, delivery, item, keyed, large, reserve};

#[test]
fn a_stream_that_holds_no_bytes_is_not_woken() {
    let mut story = Story::default();
    let stream = story.start(Request::Consume(consume_100_bytes()));
    story.push(item("a")).at(30_000).deliver(stream, large("a", 200));
    story.breaks(Rule::NotWoken, "a", 4);
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
