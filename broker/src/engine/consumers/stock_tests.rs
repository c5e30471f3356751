//! What is reserved ahead, and who receives it.

use std::time::Duration;

use super::{
    tests::{call, delivery, stream_for},
    *,
};
use crate::domain::{ItemSize, Priority, assign};

const NOW: Timestamp = Timestamp(1_000_000);
const LEASE: Duration = Duration::from_secs(30);

fn after(millis: u64) -> Timestamp {
    NOW + Duration::from_millis(millis)
}

/// An item under a lease of [`LEASE`].
fn reserved(item: u8) -> Delivery {
    Delivery { lease_expire_time: NOW + LEASE, ..delivery(item, 1, 5) }
}

/// Returns consumers that have taken 100 items one by one in the last 50 ms.
fn busy() -> Consumers {
    let mut consumers = Consumers::default();
    take_hundred(&mut consumers, NOW);
    consumers
}

fn take_hundred(consumers: &mut Consumers, since: Timestamp) {
    for n in 0..100 {
        let (id, _answered) = call(consumers, LEASE);
        consumers.hand(id, vec![reserved(n)], since + Duration::from_micros(u64::from(n) * 10));
    }
}

/// Returns how many items the next round reserves ahead.
fn ahead(consumers: &mut Consumers, now: Timestamp) -> usize {
    let mut round = consumers.demands();
    consumers.add_stock(&mut round, now);
    let demands = round.claimants.iter().zip(&round.demands);
    demands.filter(|(claimant, _)| claimant.id == STOCK).map(|(_, demand)| demand.max_items).sum()
}

/// Puts these items in stock.
fn stock_up(consumers: &mut Consumers, items: Vec<Delivery>) {
    assert_eq!(ahead(consumers, after(60)), 20);
    consumers.hand(STOCK, items, after(60));
}

/// Returns consumers with four items in stock.
fn stocked() -> Consumers {
    let mut consumers = busy();
    stock_up(&mut consumers, items(1..=4));
    consumers
}

#[test]
fn what_consumers_take_in_ten_milliseconds_is_reserved_ahead() {
    let mut consumers = busy();
    assert_eq!(ahead(&mut consumers, after(10)), 0, "the first window is not over");
    assert_eq!(ahead(&mut consumers, after(60)), 20);
    consumers.hand(STOCK, (0..20).map(reserved).collect(), after(60));
    assert_eq!(ahead(&mut consumers, after(61)), 0, "enough are in stock");
    for _ in 0..10 {
        let (id, mut answered) = call(&mut consumers, LEASE);
        assert!(consumers.serve(id, after(61)));
        assert_eq!(answered.try_recv().unwrap().unwrap().len(), 1);
    }
    assert_eq!(ahead(&mut consumers, after(61)), 10, "half of them are taken");
    assert_eq!(ahead(&mut consumers, after(300)), 0, "nobody takes anything any more");
}

#[test]
fn consumers_of_many_items_and_short_leases_reserve_for_themselves() {
    let mut consumers = Consumers::default();
    let id = stream_for(&mut consumers, 100, LEASE);
    consumers.hand(id, (0..100).map(reserved).collect(), NOW);
    assert_eq!(ahead(&mut consumers, after(60)), 0);
    let mut consumers = Consumers::default();
    for n in 0..100 {
        let (id, _answered) = call(&mut consumers, Duration::from_secs(1));
        consumers.hand(id, vec![reserved(n)], NOW);
    }
    assert_eq!(ahead(&mut consumers, after(60)), 0);
}

#[test]
fn items_in_stock_are_handed_out_in_their_order() {
    let mut consumers = busy();
    let id = stream_for(&mut consumers, 3, LEASE);
    stock_up(&mut consumers, items(1..=4));
    assert!(consumers.serve(id, after(61)));
    let (Inbox::Items(items), _) = consumers.look_into_inbox(id, after(61)) else {
        panic!("there are items")
    };
    assert_eq!(items.iter().map(|item| item.item.id.0[0]).collect::<Vec<_>>(), [1, 2, 3]);
    consumers.look_into_inbox(id, after(61));
    assert!(!consumers.serve(id, after(61)), "the stream is full");
    consumers.settled(&items[1].receipt, after(61));
    let (Inbox::Items(items), _) = consumers.look_into_inbox(id, after(61)) else {
        panic!("the place is filled again")
    };
    assert_eq!(items[0].item.id.0[0], 4);
    assert!(consumers.stock.is_empty());
}

#[test]
fn only_who_asks_on_the_same_terms_is_served() {
    let mut consumers = busy();
    let stream = stream_for(&mut consumers, 1, LEASE);
    consumers.streams.get_mut(&stream).unwrap().settings.auto_commit = true;
    let many = stream_for(&mut consumers, 9, LEASE);
    stock_up(&mut consumers, items(1..=4));
    assert!(!consumers.serve(stream, after(61)), "these are committed by a round");
    assert!(!consumers.serve(many, after(61)), "it takes many");
    let (id, _answered) = call(&mut consumers, LEASE * 2);
    assert!(!consumers.serve(id, after(61)), "another lease");
    let (id, _answered) = call(&mut consumers, LEASE);
    assert!(consumers.serve(id, after(61)));
}

#[test]
fn who_takes_part_in_a_round_is_served_by_the_round_and_others_at_its_end() {
    let mut consumers = busy();
    let (first, mut first_answered) = call(&mut consumers, LEASE);
    let mut round = consumers.demands();
    consumers.add_stock(&mut round, after(60));
    consumers.begin_round(&round);
    let (second, mut second_answered) = call(&mut consumers, LEASE);
    consumers.hand(STOCK, vec![reserved(2)], after(61));
    assert!(!consumers.serve(first, after(61)));
    consumers.hand(first, vec![reserved(1)], after(61));
    consumers.end_round(&round, true, after(61));
    assert_eq!(first_answered.try_recv().unwrap().unwrap()[0].item.id.0[0], 1);
    assert_eq!(second_answered.try_recv().unwrap().unwrap()[0].item.id.0[0], 2);
    assert!(consumers.calls.get(second).is_none());
}

#[test]
fn what_nobody_takes_is_returned_and_a_pause_follows() {
    let mut consumers = stocked();
    assert_eq!(consumers.stock.next_unused(), Some(after(160)));
    assert!(consumers.stock.take_unused(after(159)).is_empty());
    take_hundred(&mut consumers, after(150));
    let unused = consumers.stock.take_unused(after(160));
    assert_eq!(unused.len(), 4);
    assert!(unused.iter().all(|item| !item.is_sent()));
    // A reserve that was under way has found items behind these.
    consumers.stock.add(items(50..=51), after(161));
    assert!(consumers.stock.is_empty());
    assert_eq!(consumers.stock.take_unused(after(161)).len(), 2);
    consumers.stock.open();
    assert_eq!(ahead(&mut consumers, after(210)), 0);
    take_hundred(&mut consumers, after(10_000));
    assert_eq!(ahead(&mut consumers, after(10_060)), 20);
}

#[test]
fn a_deleted_item_leaves_the_stock() {
    let mut consumers = stocked();
    consumers.deleted(reserved(2).item.id);
    assert_eq!(consumers.stock.take_all().len(), 3);
}

#[test]
fn what_is_withdrawn_is_handed_to_nobody() {
    let mut consumers = stocked();
    let (id, _answered) = call(&mut consumers, LEASE);
    consumers.stock.withdraw(after(61));
    assert!(!consumers.serve(id, after(61)));
    // A reserve that was under way brings more.
    consumers.hand(STOCK, vec![reserved(5)], after(61));
    assert!(!consumers.serve(id, after(61)));
    assert_eq!(consumers.stock.take_unused(after(61)).len(), 5);
}

#[test]
fn a_pause_takes_what_is_in_stock() {
    assert_eq!(stocked().take_unsent().len(), 4);
}

#[test]
fn a_stock_that_hides_items_from_others_is_returned() {
    let mut consumers = stocked();
    assert!(consumers.take_returning(after(61)).is_empty(), "nobody asks");
    let (_id, _answered) = call(&mut consumers, LEASE * 2);
    assert_eq!(consumers.take_returning(after(61)).len(), 4);
}

#[test]
fn items_of_several_priorities_are_not_reserved_ahead() {
    let mut consumers = stocked();
    let mut urgent = reserved(9);
    urgent.item.priority = Priority::parse("priority", 7).unwrap();
    consumers.hand(STOCK, vec![urgent], after(60));
    consumers.stock.take_all();
    assert_eq!(ahead(&mut consumers, after(60)), 0);
}

#[test]
fn an_item_goes_back_if_its_call_has_gone() {
    let mut consumers = stocked();
    let (id, answered) = call(&mut consumers, LEASE);
    drop(answered);
    assert!(!consumers.serve(id, after(61)));
    let items = consumers.stock.take_all();
    assert_eq!(items.iter().map(|held| held.receipt.item.0[0]).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

/// As the dispatcher does: assigns the items to the demands and hands them out.
fn run_round(consumers: &mut Consumers, items: &[Delivery], now: Timestamp) {
    let mut round = consumers.demands();
    consumers.add_stock(&mut round, now);
    consumers.begin_round(&round);
    let size = |one: &Delivery| ItemSize {
        payload: one.item.payload.len(),
        message: one.item.message_bytes(),
    };
    let to = assign(&items.iter().map(size).collect::<Vec<_>>(), &round.demands);
    let mut each: Vec<Vec<Delivery>> = round.claimants.iter().map(|_| Vec::new()).collect();
    for (item, to) in items.iter().zip(to) {
        let lease = round.demands[to].lease;
        each[to].push(Delivery { lease_expire_time: now + lease, ..item.clone() });
    }
    for (claimant, items) in round.claimants.iter().zip(each).filter(|(_, some)| !some.is_empty()) {
        assert!(consumers.hand(claimant.id, items, now).is_empty());
    }
    consumers.end_round(&round, true, now);
}

fn items(numbers: impl IntoIterator<Item = u8>) -> Vec<Delivery> {
    numbers.into_iter().map(reserved).collect()
}

/// Others may ask on other terms between a demand and its items.
#[test]
fn items_in_stock_have_the_lease_of_whoever_receives_them() {
    let mut consumers = busy();
    let (_, mut first) = call(&mut consumers, LEASE * 10);
    run_round(&mut consumers, &items(1..=6), after(60));
    assert_eq!(first.try_recv().unwrap().unwrap()[0].lease_expire_time, after(60) + LEASE * 10);
    let (second, _answered) = call(&mut consumers, LEASE * 10);
    assert!(!consumers.serve(second, after(60)), "it asked for another lease");
    let (third, mut answered) = call(&mut consumers, LEASE);
    assert!(consumers.serve(third, after(60)));
    assert_eq!(answered.try_recv().unwrap().unwrap()[0].lease_expire_time, after(60) + LEASE);
}

#[test]
fn the_byte_limit_of_a_stream_holds_for_what_comes_from_stock() {
    let mut consumers = busy();
    let id = stream_for(&mut consumers, 8, LEASE);
    let large = |n| Delivery { lease_expire_time: NOW + LEASE, ..delivery(n, 1, 100) };
    stock_up(&mut consumers, (1..=8).map(large).collect());
    consumers.streams.get_mut(&id).unwrap().settings.max_in_flight_bytes = 250;
    consumers.serve(id, after(61));
    assert_eq!(consumers.streams[&id].in_flight.len(), 2);
}

#[test]
fn who_waits_comes_before_the_stock_and_receives_the_first_items() {
    let mut consumers = busy();
    let id = stream_for(&mut consumers, 8, LEASE);
    run_round(&mut consumers, &items(1..=20), after(60));
    let (Inbox::Items(received), _) = consumers.look_into_inbox(id, after(61)) else {
        panic!("there are items")
    };
    let received: Vec<u8> = received.iter().map(|item| item.item.id.0[0]).collect();
    assert_eq!(received, [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn nothing_is_reserved_ahead_for_pops() {
    let mut consumers = Consumers::default();
    for n in 0..100 {
        let (id, _answered) = call(&mut consumers, LEASE);
        consumers.calls.commits(id);
        consumers.hand(id, vec![reserved(n)], NOW);
    }
    assert_eq!(ahead(&mut consumers, after(60)), 0);
}

#[test]
fn a_stream_that_begins_to_wait_receives_what_is_in_stock() {
    let mut consumers = busy();
    let id = stream_for(&mut consumers, 8, LEASE);
    consumers.streams.get_mut(&id).unwrap().hungry = false; // as it is when it is opened
    stock_up(&mut consumers, items(1..=4));
    assert!(matches!(consumers.look_into_inbox(id, after(61)).0, Inbox::Items(_)));
}

#[test]
fn items_that_are_too_large_are_not_asked_for_again_at_once() {
    let mut consumers = busy();
    let mut round = consumers.demands();
    consumers.add_stock(&mut round, after(60));
    consumers.begin_round(&round);
    consumers.end_round(&round, false, after(61));
    assert_eq!(ahead(&mut consumers, after(61)), 0);
}
