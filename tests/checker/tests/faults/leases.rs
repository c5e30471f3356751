//! Leases that overlap, receipts that settle too much, and answers that are not true.

use sluicegate_checker::{
    Rule,
    history::{Consume, Delivery, NewItem, OnDisconnect, Outcome, Request, Response, What},
};

use crate::story::{LEASE, MS, Story, back, commit, consume, delivery, item};

#[test]
fn two_leases_overlap() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).at(500).reserve(delivery("a", 2));
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn two_leases_overlap_by_a_slow_clock() {
    let mut story = Story::default();
    story.tell(What::ClockSlow { begins: true }).push(item("a")).reserve(delivery("a", 1));
    story.at(500).reserve(delivery("a", 2));
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn two_leases_overlap_after_clocks_have_followed_a_step() {
    let mut story = Story::default();
    for begins in [true, false] {
        story.tell(What::ClocksFollow { begins });
    }
    story.push(item("a")).reserve(delivery("a", 1)).at(500).reserve(delivery("a", 2));
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn an_expired_item_is_committed_after_clocks_have_followed_a_step() {
    let mut story = Story::default();
    for begins in [true, false] {
        story.tell(What::ClocksFollow { begins });
    }
    story.push(NewItem { ttl: Some(150 * MS), ..item("a") }).reserve(delivery("a", 1));
    story.at(200).commit("a/1", Outcome::Gone).at(210).commit("a/1", Outcome::Ok);
    story.breaks(Rule::StaleReceipt, "a/1", 4);
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

#[test]
fn a_kept_lease_is_overlapped_while_its_stream_lives() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.deliver(stream, delivery("a", 1)).at(500);
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.at(9_000).deliver(stream, delivery("b", 1)).unknown(stream);
    story.breaks(Rule::LeaseOverlap, "a", 2);
}

#[test]
fn a_kept_lease_is_said_to_be_lost_while_its_stream_lives() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.deliver(stream, delivery("a", 1)).at(500).commit("a/1", Outcome::LeaseLost);
    story.at(9_000).deliver(stream, delivery("b", 1)).unknown(stream);
    story.breaks(Rule::Outcome, "a", 3);
}

#[test]
fn a_kept_lease_lapses_while_its_stream_lives_and_no_attempt_is_counted() {
    let mut story = Story::default();
    let keep = Consume { on_disconnect: OnDisconnect::KeepLease, ..consume(10) };
    let stream = story.start(Request::Consume(keep));
    story.push(item("a")).push(item("b")).deliver(stream, delivery("a", 1));
    story.tell(What::Disturbed { begins: true, fault: "the store is slow".to_owned() });
    story.at(LEASE + 100).reserve(Delivery { attempt: 1, ..delivery("a", 2) });
    story.at(LEASE + 9_000).deliver(stream, delivery("b", 1)).unknown(stream);
    story.breaks(Rule::Attempts, "a", 2);
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
    delivered_again_at(LEASE + 100, true).breaks(Rule::LeaseOverlap, "a", 2);
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
