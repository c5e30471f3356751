//! Direct pushes of which several are in flight: their order, their places, and what becomes of those behind one that fails.

use std::time::Duration;

use tokio::sync::Notify;

use super::*;
use crate::{
    domain::{ItemId, Queue, QueueName},
    engine::consumers::{
        ConsumerId, Inbox,
        tests::{delivery, settings},
    },
};

const NOW: Timestamp = Timestamp(1_000);
const BYTES: usize = 10;
/// The id of the last item that was pushed before.
const LAST: ItemId = ItemId([100; 12]);

/// Returns a dispatcher of a queue that is known to be empty.
fn empty() -> Dispatcher {
    let queue = Arc::new(Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), NOW));
    let dispatcher = Dispatcher::new(queue.name.clone(), Arc::default());
    {
        let mut state = dispatcher.state.lock();
        (state.queue, state.dirty, state.seen_empty) = (Some(queue), false, true);
        state.next_due.told(None, Timestamp(0), Timestamp(0));
    }
    dispatcher
}

/// Adds a stream that waits for items.
fn waits(dispatcher: &Dispatcher, max_in_flight: usize, max_bytes: usize) -> ConsumerId {
    let settings = settings(max_in_flight, max_bytes, Duration::from_secs(1));
    let id = dispatcher.add_stream(settings, Arc::new(Notify::new()));
    assert!(received(dispatcher, id).is_empty());
    id
}

/// Returns the items that the stream is handed.
fn received(dispatcher: &Dispatcher, id: ConsumerId) -> Vec<u8> {
    match dispatcher.look_into_inbox(id, NOW).0 {
        Inbox::Items(items) => items.iter().map(|one| number(&one.item.id)).collect(),
        _ => Vec::new(),
    }
}

fn number(id: &ItemId) -> u8 {
    id.0[0]
}

/// Begins a push of items of ten bytes.
fn begin(dispatcher: &Dispatcher, items: usize) -> Option<u64> {
    begin_of(dispatcher, items, BYTES)
}

fn begin_of(dispatcher: &Dispatcher, items: usize, bytes: usize) -> Option<u64> {
    let sizes = vec![ItemSize { payload: bytes, message: bytes }; items];
    let (token, mark) = (|| LeaseToken([1; 12]), || IdMark::behind(LAST));
    dispatcher.begin_direct_push(&sizes, NOW, token, mark).map(|(number, _)| number)
}

/// Ends a push that brought these items. Returns true if items go back into the queue.
fn end(dispatcher: &Dispatcher, number: u64, items: &[u8]) -> bool {
    let brought = items.iter().map(|item| delivery(*item, 1, BYTES)).collect();
    dispatcher.end_direct_push(number, Some(brought), true, NOW)
}

fn returning(dispatcher: &Dispatcher) -> Vec<u8> {
    dispatcher.take_returning(NOW).iter().map(|one| number(&one.receipt.item)).collect()
}

#[test]
fn nothing_goes_directly_while_a_delayed_item_may_become_eligible_at_any_moment() {
    let dispatcher = empty();
    waits(&dispatcher, 8, usize::MAX);
    let due = NOW + Duration::from_millis(10);
    dispatcher.state.lock().next_due.add(due);
    assert!(begin(&dispatcher, 1).is_some(), "before");
    let begin = || {
        let sizes = [ItemSize { payload: BYTES, message: BYTES }];
        let (token, mark) = (|| LeaseToken([1; 12]), || IdMark::behind(LAST));
        dispatcher.begin_direct_push(&sizes, due, token, mark).is_some()
    };
    assert!(!begin(), "it has come");
    assert!(dispatcher.state.lock().next_due.take(due));
    assert!(!begin(), "what follows it is not known");
    dispatcher.state.lock().next_due.told(None, due, due);
    assert!(begin(), "nothing follows it");
}

#[test]
fn what_is_stored_first_waits_for_what_began_first() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second, third] = [1, 2, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!end(&dispatcher, second, &[2, 3]));
    assert!(received(&dispatcher, id).is_empty());
    assert!(!end(&dispatcher, first, &[1]));
    assert_eq!(received(&dispatcher, id), [1, 2, 3]);
    assert!(!end(&dispatcher, third, &[4]));
    assert_eq!(received(&dispatcher, id), [4]);
}

#[test]
fn reserves_wait_for_all_that_are_in_flight() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    dispatcher.inserted(Some(NOW), NOW);
    let next_round = || {
        let queue = dispatcher.state.lock().queue.clone().unwrap();
        dispatcher.next_round(&queue, NOW)
    };
    assert!(next_round().is_none());
    end(&dispatcher, first, &[1]);
    assert!(next_round().is_none());
    end(&dispatcher, second, &[2]);
    assert_eq!(received(&dispatcher, id), [1, 2]);
    assert!(received(&dispatcher, id).is_empty());
    assert!(next_round().is_some());
}

/// Begins a reserve of what the queue is told to have.
fn reserve(dispatcher: &Dispatcher) {
    dispatcher.inserted(Some(NOW), NOW);
    let queue = dispatcher.state.lock().queue.clone().unwrap();
    assert!(dispatcher.next_round(&queue, NOW).is_some());
}

#[test]
fn what_begins_behind_a_reserve_waits_for_its_end() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    reserve(&dispatcher);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!end(&dispatcher, first, &[1]));
    assert!(received(&dispatcher, id).is_empty());
    assert!(!dispatcher.end_reserve(false, true, NOW));
    assert_eq!(received(&dispatcher, id), [1]);
    assert!(!end(&dispatcher, second, &[2]));
    assert_eq!(received(&dispatcher, id), [2]);
}

#[test]
fn what_begins_behind_a_reserve_goes_behind_what_that_leaves() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    reserve(&dispatcher);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!end(&dispatcher, first, &[1]));
    assert!(dispatcher.end_reserve(true, true, NOW));
    assert!(end(&dispatcher, second, &[2]));
    assert_eq!((returning(&dispatcher), received(&dispatcher, id)), (vec![1, 2], vec![]));
}

#[test]
fn nothing_begins_behind_a_reserve_that_may_leave_something_or_has_been_overtaken() {
    let dispatcher = empty();
    waits(&dispatcher, 8, usize::MAX);
    reserve(&dispatcher);
    dispatcher.inserted(Some(NOW), NOW);
    assert_eq!(begin(&dispatcher, 1), None, "what was stored since is ahead of it");
    dispatcher.end_reserve(true, true, NOW);
    dispatcher.state.lock().seen_empty = false;
    reserve(&dispatcher);
    assert_eq!(begin(&dispatcher, 1), None, "the last reserve left something");
}

#[test]
fn behind_a_reserve_that_chooses_among_streams_nothing_begins() {
    let dispatcher = empty();
    let ids = [8, 8].map(|max_in_flight| waits(&dispatcher, max_in_flight, usize::MAX));
    reserve(&dispatcher);
    assert_eq!(begin(&dispatcher, 1), None);
    dispatcher.remove_stream(ids[0]);
    assert!(begin(&dispatcher, 1).is_some());
}

#[test]
fn what_is_deleted_while_it_waits_is_not_handed_out() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    reserve(&dispatcher);
    let number = begin(&dispatcher, 2).unwrap();
    assert!(!end(&dispatcher, number, &[1, 2]));
    dispatcher.deleted(delivery(1, 1, BYTES).item.id);
    assert!(!dispatcher.end_reserve(false, true, NOW));
    assert_eq!(received(&dispatcher, id), [2]);
}

#[test]
fn an_announced_item_that_a_reserve_brings_is_not_claimed_again() {
    let dispatcher = empty();
    waits(&dispatcher, 8, usize::MAX);
    reserve(&dispatcher);
    let [found, other] = [1, 2].map(|item| delivery(item, 1, BYTES));
    dispatcher.announced(found.item.id, NOW, NOW);
    dispatcher.state.lock().found(&[(0, other)]);
    assert!(dispatcher.state.lock().has_news());
    dispatcher.state.lock().found(&[(0, found)]);
    assert!(!dispatcher.state.lock().has_news());
}

#[test]
fn half_of_the_room_is_for_the_reserve_that_is_ahead() {
    let dispatcher = empty();
    waits(&dispatcher, 4, usize::MAX);
    reserve(&dispatcher);
    assert_eq!(begin(&dispatcher, 3), None);
    assert!(begin(&dispatcher, 2).is_some());
    let dispatcher = empty();
    waits(&dispatcher, 1, usize::MAX);
    reserve(&dispatcher);
    assert_eq!(begin(&dispatcher, 1), None);
}

#[test]
fn a_push_whose_duplicates_bring_nothing_holds_up_nothing() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!end(&dispatcher, first, &[]));
    assert!(!end(&dispatcher, second, &[2]));
    assert_eq!(received(&dispatcher, id), [2]);
}

/// Whether it is stored or not is not known: its items may come into the queue again.
#[test]
fn items_behind_a_push_that_failed_go_back_into_the_queue() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second, third] = [1, 1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!end(&dispatcher, second, &[2]));
    assert!(dispatcher.end_direct_push(first, None, false, NOW));
    assert_eq!(returning(&dispatcher), [2]);
    dispatcher.state.lock().dirty = false; // as after a reserve
    assert_eq!(begin(&dispatcher, 1), None, "the third one is in flight");
    assert!(end(&dispatcher, third, &[3]));
    assert_eq!((returning(&dispatcher), received(&dispatcher, id)), (vec![3], vec![]));
    dispatcher.state.lock().dirty = false;
    let next = begin(&dispatcher, 1).expect("all have ended");
    assert!(!end(&dispatcher, next, &[4]));
    assert_eq!(received(&dispatcher, id), [4]);
}

/// The flow was lowered meanwhile.
#[test]
fn items_behind_those_that_a_stream_cannot_receive_go_back_into_the_queue() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second] = [4, 1].map(|items| begin(&dispatcher, items).unwrap());
    drop(dispatcher.state.lock().consumers.set_max_in_flight(id, 3, NOW));
    assert!(end(&dispatcher, first, &[1, 2, 3, 4]));
    assert!(end(&dispatcher, second, &[5]));
    let back = returning(&dispatcher);
    assert!(back.ends_with(&[4, 5]), "{back:?}");
    let kept: Vec<u8> = (1..=5).filter(|item| !back.contains(item)).collect();
    assert_eq!(received(&dispatcher, id), kept);
}

#[test]
fn a_clock_that_was_set_back_lets_a_push_hold_up_reserves_no_longer() {
    let dispatcher = empty();
    waits(&dispatcher, 8, usize::MAX);
    begin(&dispatcher, 1).unwrap();
    let mut state = dispatcher.state.lock();
    let hold = state.direct.held_until().unwrap().0 - NOW.0;
    let back = Timestamp(NOW.0 - 60_000);
    state.give_up_if_overdue(back);
    assert_eq!(state.direct.held_until(), Some(Timestamp(back.0 + hold)));
    state.give_up_if_overdue(Timestamp(back.0 + hold));
    assert_eq!(state.direct.held_until(), None);
}

#[test]
fn what_is_coming_takes_places_until_it_is_there() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 4, 100);
    let first = begin(&dispatcher, 3).unwrap();
    assert_eq!(begin(&dispatcher, 2), None, "there is one place");
    assert_eq!(begin_of(&dispatcher, 1, 71), None, "there are 70 bytes");
    let second = begin_of(&dispatcher, 1, 70).unwrap();
    assert_eq!(begin(&dispatcher, 1), None);
    assert!(!end(&dispatcher, first, &[]));
    let third = begin(&dispatcher, 3).expect("its places are free again");
    assert!(!end(&dispatcher, second, &[1]));
    assert!(!end(&dispatcher, third, &[2, 3, 4]));
    assert_eq!(received(&dispatcher, id), [1, 2, 3, 4]);
}

#[test]
fn streams_take_turns_for_items_that_are_in_flight() {
    let dispatcher = empty();
    let ids = [waits(&dispatcher, 8, usize::MAX), waits(&dispatcher, 8, usize::MAX)];
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    end(&dispatcher, first, &[1]);
    end(&dispatcher, second, &[2]);
    assert!(ids.iter().all(|id| received(&dispatcher, *id).len() == 1));
}

#[test]
fn few_small_pushes_and_all_large_ones_are_in_flight_together() {
    let dispatcher = empty();
    waits(&dispatcher, 100, usize::MAX);
    assert_eq!((0..9).filter_map(|_| begin(&dispatcher, 1)).count(), FEW);
    assert_eq!((0..9).filter_map(|_| begin_of(&dispatcher, 1, LARGE)).count(), 9);
    assert_eq!(begin(&dispatcher, 1), None);
}

/// One that takes too long holds up neither reserves nor the items of those behind it, which these find, and takes no places.
#[test]
fn a_push_that_takes_too_long_is_waited_for_no_longer() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second, third] = [6, 1, 1].map(|items| begin(&dispatcher, items).unwrap());
    let queue = dispatcher.state.lock().queue.clone().unwrap();
    dispatcher.begin_step(&queue, NOW + Duration::from_millis(4_999));
    dispatcher.inserted(Some(NOW), NOW);
    assert!(dispatcher.next_round(&queue, NOW).is_none());
    assert_eq!(dispatcher.next_timer(), Some(NOW + Duration::from_secs(5)));
    let later = NOW + Duration::from_secs(5);
    dispatcher.begin_step(&queue, later);
    let (round, _) = dispatcher.next_round(&queue, later).expect("reserves go on");
    assert_eq!(round.demands[0].max_items, 8);
    assert!(end(&dispatcher, second, &[2]), "it does not wait for the first one");
    assert!(end(&dispatcher, first, &[1]));
    assert!(end(&dispatcher, third, &[3]));
    assert_eq!((returning(&dispatcher), received(&dispatcher, id)), (vec![2, 1, 3], vec![]));
}

/// What waits is back in the queue before its lease has ended, though nothing else happens. The lease lasts a second.
#[test]
fn what_waits_does_so_for_half_of_its_lease_at_most() {
    let dispatcher = empty();
    waits(&dispatcher, 8, usize::MAX);
    let [_first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert_eq!(dispatcher.next_timer(), None, "nothing waits");
    assert!(!end(&dispatcher, second, &[2]));
    let half = NOW + Duration::from_millis(500);
    assert_eq!(dispatcher.next_timer(), Some(half));
    let queue = dispatcher.state.lock().queue.clone().unwrap();
    dispatcher.begin_step(&queue, half);
    assert_eq!(returning(&dispatcher), [2]);
}

#[test]
fn what_is_in_flight_is_bounded_in_bytes() {
    let dispatcher = empty();
    waits(&dispatcher, 100, usize::MAX);
    assert!(begin_of(&dispatcher, 1, MOST_BYTES - LARGE).is_some());
    assert_eq!(begin_of(&dispatcher, 1, LARGE + 1), None);
    assert!(begin_of(&dispatcher, 1, LARGE).is_some());
    assert_eq!(begin(&dispatcher, 1), None);
}

/// The first of two pushes is stored, and the second one is not: the items of the first are handed out.
#[test]
fn items_before_a_push_that_failed_are_handed_out() {
    let dispatcher = empty();
    let id = waits(&dispatcher, 8, usize::MAX);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    assert!(!dispatcher.end_direct_push(second, None, true, NOW));
    assert_eq!(begin(&dispatcher, 1), None);
    assert!(!end(&dispatcher, first, &[1]));
    assert_eq!(received(&dispatcher, id), [1]);
    assert!(received(&dispatcher, id).is_empty());
    assert!(begin(&dispatcher, 1).is_some());
}

/// A stream that ends leaves nothing behind, and no number runs below zero.
#[test]
fn a_stream_may_end_while_items_are_coming() {
    let dispatcher = empty();
    let gone = waits(&dispatcher, 8, usize::MAX);
    let [first, second] = [1, 1].map(|items| begin(&dispatcher, items).unwrap());
    dispatcher.remove_stream(gone);
    let id = waits(&dispatcher, 8, usize::MAX);
    assert!(end(&dispatcher, first, &[1]));
    assert!(end(&dispatcher, second, &[2]));
    assert_eq!((returning(&dispatcher), received(&dispatcher, id)), (vec![1, 2], vec![]));
}
