//! Reserve: which items a consumer gets, in which order, and for how long.

use std::time::Duration;

use super::{Env, env::*};
use crate::{
    domain::{ConsumerName, Delivery, Demand, Eligibility, ItemState, NewItem, Outcome},
    store::{Appeared, EndedDelivery, Rollback, RollbackTo},
};

pub async fn items_are_handed_out_in_the_order_of_their_pushes(env: &Env) {
    let queue = env.queue("q").await;
    let mut expected = Vec::new();
    for call in 0..20 {
        let batch: Vec<String> = (0..10).map(|n| format!("{call}.{n}")).collect();
        env.push(&queue, batch.iter().map(|payload| item(payload)).collect()).await;
        expected.extend(batch);
    }
    let mut got = Vec::new();
    for _ in 0..29 {
        got.extend(payloads(&env.take(&queue, 7).await));
    }
    assert_eq!(got, expected);
}

pub async fn priority_comes_before_age(env: &Env) {
    let queue = env.queue("q").await;
    let items = [("a", 0), ("b", 9), ("c", 5), ("d", 9), ("e", 0), ("f", 1)];
    env.push(&queue, items.iter().map(|(payload, level)| urgent(payload, *level)).collect()).await;
    assert_eq!(payloads(&env.take(&queue, 4).await), ["b", "d", "c", "f"]);
    // A later, more urgent item overtakes the remaining ones.
    env.push_one(&queue, urgent("g", 3)).await;
    assert_eq!(env.drain(&queue).await, ["g", "a", "e"]);
}

pub async fn a_delayed_urgent_item_does_not_block_others(env: &Env) {
    let queue = env.queue("q").await;
    for n in 0..50 {
        let urgent = crate::domain::NewItem {
            eligibility: Eligibility::After(seconds(60)),
            ..urgent(&n.to_string(), 9)
        };
        env.push_one(&queue, urgent).await;
    }
    env.push_plain(&queue, &["now"]).await;
    assert_eq!(env.drain(&queue).await, ["now"]);
    env.pass(seconds(61));
    assert_eq!(env.take(&queue, 100).await.len(), 51); // the lease of the first item has lapsed too
}

pub async fn delayed_items_queue_by_eligible_time(env: &Env) {
    let queue = env.queue("q").await;
    env.push_one(&queue, delayed("c", seconds(30))).await;
    env.push_one(&queue, delayed("a", seconds(10))).await;
    env.push_one(&queue, delayed("b", seconds(20))).await;
    env.pass(seconds(31));
    env.push_one(&queue, item("d")).await;
    assert_eq!(env.drain(&queue).await, ["a", "b", "c", "d"]);
}

pub async fn a_delivery_describes_its_lease(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push_one(&queue, item("x")).await;
    let before = env.now();
    let delivery = env.take_one(&queue).await;
    let stored = env.get(&queue, pushed.id).await;
    assert_eq!(*delivery.item, stored);
    assert_eq!(stored.state, ItemState::Reserved);
    assert_eq!((stored.attempt, stored.deliveries), (1, 1));
    assert_eq!(stored.consumer.as_ref().map(ConsumerName::as_str), Some("tester"));
    assert_eq!(stored.eligible_time, Some(delivery.lease_expire_time));
    assert!(delivery.lease_expire_time >= before + LEASE);
    assert!(delivery.lease_expire_time <= env.now() + LEASE);
    assert_eq!(Some(delivery.previous_eligible_time), pushed.eligible_time);
    let receipt = &delivery.receipt;
    assert_eq!((receipt.item, receipt.deliveries, receipt.attempt), (pushed.id, 1, 1));
    assert_eq!((&receipt.queue, &receipt.group), (&queue.name, &queue.group));
    assert_eq!(receipt.token.broker(), env.store.broker_id());
}

pub async fn demands_share_items_within_their_limits(env: &Env) {
    let queue = env.queue("q").await;
    let names: Vec<String> = (0..9).map(|n| n.to_string()).collect();
    env.push(&queue, names.iter().map(|name| item(name)).collect()).await;
    let named = |name: &str, max_items, lease| Demand {
        lease,
        consumer: Some(ConsumerName::parse("consumer", name).unwrap()),
        ..demand(max_items)
    };
    let demands = [named("a", 1, seconds(10)), named("b", 3, seconds(20)), named("c", 2, LEASE)];
    let reserved = env.reserve(&queue, &demands).await;
    let assigned: Vec<(usize, String)> =
        reserved.deliveries.iter().map(|(claimant, d)| (*claimant, payload(&d.item))).collect();
    let expected = [(0, "0"), (1, "1"), (2, "2"), (1, "3"), (2, "4"), (1, "5")];
    assert_eq!(assigned, expected.map(|(claimant, payload)| (claimant, payload.to_owned())));
    assert!(reserved.more);
    for (claimant, delivery) in &reserved.deliveries {
        assert_eq!(delivery.item.consumer, demands[*claimant].consumer);
        let lease = delivery.lease_expire_time.0 - env.now().0;
        let asked = demands[*claimant].lease.as_millis() as i64;
        assert!(lease <= asked && lease > asked - 5_000, "{lease} of {asked}");
        assert_eq!(env.get(&queue, delivery.item.id).await, *delivery.item);
    }
    assert_eq!(env.drain(&queue).await, ["6", "7", "8"]);
}

pub async fn items_of_one_reserve_are_stored_under_the_names_of_their_consumers(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..6).map(|n| item(&n.to_string())).collect()).await;
    let named = |name: &str| ConsumerName::parse("consumer", name).unwrap();
    let demands = [Some(named("a")), Some(named("b")), None, Some(named("b"))]
        .map(|consumer| Demand { consumer, ..demand(2) });
    let reserved = env.reserve(&queue, &demands).await;
    assert_eq!(reserved.deliveries.len(), 6);
    for (claimant, delivery) in &reserved.deliveries {
        let stored = env.get(&queue, delivery.item.id).await;
        assert_eq!(stored.consumer, demands[*claimant].consumer, "of the demand {claimant}");
    }
}

pub async fn bytes_are_bounded_but_a_large_item_gets_through(env: &Env) {
    let queue = env.queue("q").await;
    let large = "x".repeat(1_000);
    env.push_plain(&queue, &[&large, "aaaa", "bbbb", "cccc", "dddd", &large, "e"]).await;
    let bounded = |max_bytes, may_exceed| Demand { max_bytes, may_exceed, ..demand(100) };
    // No demand here may exceed its bytes. The order is kept, so that nothing is handed out.
    let reserved = env.reserve(&queue, &[bounded(10, false)]).await;
    assert!(reserved.deliveries.is_empty() && reserved.more);
    let reserved = env.reserve(&queue, &[bounded(10, true)]).await;
    assert_eq!(reserved.deliveries.len(), 1);
    assert_eq!(reserved.deliveries[0].1.item.payload.len(), 1_000);
    assert!(reserved.more);
    let reserved = env.reserve(&queue, &[bounded(10, false), bounded(8, true)]).await;
    let got: Vec<_> = reserved.deliveries.iter().map(|(to, d)| (*to, payload(&d.item))).collect();
    let expected = [(0, "aaaa"), (1, "bbbb"), (0, "cccc"), (1, "dddd")];
    assert_eq!(got, expected.map(|(to, payload)| (to, payload.to_owned())));
    assert_eq!(env.drain(&queue).await, [large, "e".to_owned()]);
}

pub async fn more_is_true_while_there_is_more(env: &Env) {
    let queue = env.queue("q").await;
    assert!(!env.reserve(&queue, &[demand(5)]).await.more);
    env.push(&queue, (0..3_000).map(|n| item(&n.to_string())).collect()).await;
    let mut got = 0;
    while got < 2_999 {
        let reserved = env.reserve(&queue, &[demand((2_999 - got).min(700))]).await;
        assert!(!reserved.deliveries.is_empty());
        assert!(reserved.more, "after {got}");
        got += reserved.deliveries.len();
    }
    assert_eq!(env.drain(&queue).await, ["2999"]);
    assert!(!env.reserve(&queue, &[demand(5)]).await.more);
}

pub async fn small_reserves_in_a_row_miss_nothing(env: &Env) {
    let queue = env.queue("q").await;
    let numbers = 0..200;
    env.push(&queue, numbers.map(|n| item(&n.to_string())).collect()).await;
    let mut next = 0;
    // A store may have prefetched some of the following items.
    let mut in_order = async |count: usize| {
        for delivery in env.take(&queue, count).await {
            assert_eq!(payload(&delivery.item), next.to_string());
            next += 1;
        }
        next
    };
    for count in [1, 1, 2, 3, 5, 1, 1, 1] {
        in_order(count).await;
    }
    let first = env.list(&queue, Some(ItemState::Ready)).await;
    assert_eq!(payload(&first[0]), "15");

    // Items pushed behind all others, and before them.
    env.push_plain(&queue, &["last"]).await;
    in_order(2).await;
    env.push_one(&queue, urgent("urgent", 7)).await;
    assert_eq!(payloads(&env.take(&queue, 1).await), ["urgent"]);
    in_order(2).await;
    let later = delayed("later", seconds(1));
    env.push_one(&queue, NewItem { priority: urgent("", 7).priority, ..later }).await;
    in_order(2).await;
    env.pass(seconds(2));
    assert_eq!(payloads(&env.take(&queue, 1).await), ["later"]);

    // Items taken by another broker, and deleted ones.
    let gone = in_order(3).await;
    let others = env.other.reserve(&queue, &[demand(2)]).await.unwrap().deliveries;
    let others: Vec<_> = others.into_iter().map(|(_, delivery)| delivery).collect();
    assert_eq!(payloads(&others), [gone.to_string(), (gone + 1).to_string()]);
    let ahead = env.list(&queue, Some(ItemState::Ready)).await;
    assert!(env.delete(&queue, ahead[0].id).await);
    let taken = env.take(&queue, 2).await;
    assert_eq!(payloads(&taken), [(gone + 3).to_string(), (gone + 4).to_string()]);

    // The item returns to its place before all waiting items.
    let eligible_time = taken[0].previous_eligible_time;
    let to = RollbackTo::Queue { eligible_time, attempt: 1, ended: EndedDelivery::Counted };
    let back = Rollback { held: held(&queue, &taken[0]), to, reason: None };
    assert_eq!(env.store.rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(payloads(&env.take(&queue, 1).await), [(gone + 3).to_string()]);
    let rest = env.drain(&queue).await;
    let expected = (gone + 5..200).map(|n| n.to_string()).chain(["last".to_owned()]);
    assert_eq!(rest, expected.collect::<Vec<_>>());
}

pub async fn an_empty_demand_reserves_nothing(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a"]).await;
    assert!(env.reserve(&queue, &[]).await.deliveries.is_empty());
    assert_eq!(env.drain(&queue).await, ["a"]);
}

pub async fn two_valid_leases_never_overlap(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..400).map(|n| item(&n.to_string())).collect()).await;
    let consumers = [env.store.clone(), env.other.clone()].map(|store| {
        let queue = queue.clone();
        tokio::spawn(async move {
            let mut got = Vec::new();
            loop {
                let reserved = store.reserve(&queue, &[demand(13)]).await.unwrap();
                if reserved.deliveries.is_empty() && !reserved.more {
                    return got;
                }
                got.extend(reserved.deliveries.into_iter().map(|(_, delivery)| delivery));
            }
        })
    });
    let mut all = Vec::new();
    for consumer in consumers {
        all.extend(consumer.await.unwrap());
    }
    let mut ids: Vec<_> = all.iter().map(|delivery| delivery.item.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), all.len()), (400, 400));
    assert!(env.commit(&queue, &all).await.iter().all(|outcome| *outcome == Outcome::Ok));
}

pub async fn a_lapsed_lease_is_a_failed_attempt(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push_one(&queue, item("x")).await;
    let first = env.take_one(&queue).await;
    assert!(env.drain(&queue).await.is_empty());
    env.pass(LEASE);
    env.pass(Duration::from_millis(1));
    assert_eq!(env.get(&queue, pushed.id).await.state, ItemState::Ready);
    assert_eq!(env.store.depth(&queue).await.unwrap().ready, 1);

    let second = env.take_one(&queue).await;
    assert_eq!((second.item.attempt, second.item.deliveries), (2, 2));
    assert_eq!((second.receipt.attempt, second.receipt.deliveries), (2, 2));
    assert_eq!(second.previous_eligible_time, first.lease_expire_time);
    assert_ne!(second.receipt.token, first.receipt.token);
    assert_eq!(env.get(&queue, pushed.id).await, *second.item);
    assert_eq!(env.commit_one(&queue, &first).await, Outcome::LeaseLost);
    assert_eq!(env.commit_one(&queue, &second).await, Outcome::Ok);
    assert!(env.drain(&queue).await.is_empty());
}

pub async fn many_lapsed_items_are_handed_out_in_order(env: &Env) {
    let queue = env.queue("q").await;
    let names: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    env.push(&queue, names.iter().map(|name| item(name)).collect()).await;
    assert_eq!(env.take(&queue, 300).await.len(), 300);
    env.push_plain(&queue, &["later"]).await;
    env.pass(LEASE + seconds(1));
    let again = env.take(&queue, 301).await;
    assert_eq!(again.iter().filter(|delivery| delivery.item.attempt == 2).count(), 300);
    assert_eq!(payload(&again[0].item), "later"); // a lapsed item is ordered by the end of its lease
    assert_eq!(payloads(&again[1..]), names);
}

/// A large number of lapsed leases return in order, though not all in one call, and count as ready
/// immediately.
pub async fn thousands_of_lapsed_items_are_handed_out_in_order(env: &Env) {
    let queue = env.queue("q").await;
    let mut expected = Vec::new();
    for level in [7, 2] {
        let names: Vec<String> = (0..2_500).map(|n| format!("{level}/{n}")).collect();
        for lot in names.chunks(500) {
            env.push(&queue, lot.iter().map(|name| urgent(name, level)).collect()).await;
            assert_eq!(env.take(&queue, lot.len()).await.len(), lot.len());
        }
        expected.extend(names);
    }
    env.pass(LEASE + seconds(1));
    let first = env.other.reserve(&queue, &[demand(1)]).await.unwrap();
    assert!(first.more);
    let mut again = vec![first.deliveries[0].1.clone()];
    assert_eq!(env.list(&queue, Some(ItemState::Ready)).await.len(), expected.len() - 1);
    again.extend(env.take(&queue, expected.len() - 1).await);
    assert_eq!(payloads(&again), expected);
    assert!(again.iter().all(|delivery| delivery.item.attempt == 2));
}

pub async fn the_next_eligible_time_is_that_of_delays_and_leases(env: &Env) {
    let queue = env.queue("q").await;
    assert_eq!(env.next_eligible(&queue).await, None);
    let late = env.push_one(&queue, delayed("late", seconds(100))).await;
    assert_eq!(env.next_eligible(&queue).await, late.eligible_time);
    let urgent = crate::domain::NewItem {
        eligibility: Eligibility::After(seconds(50)),
        ..urgent("soon", 4)
    };
    let soon = env.push_one(&queue, urgent).await;
    assert_eq!(env.next_eligible(&queue).await, soon.eligible_time);
    env.push_one(&queue, item("now")).await;
    let delivery = env.take_one(&queue).await;
    let lease_end = Some(delivery.lease_expire_time);
    assert_eq!(env.next_eligible(&queue).await, lease_end);
    assert_eq!(env.store.depth(&queue).await.unwrap().next_eligible, lease_end);
    env.commit_one(&queue, &delivery).await;
    assert_eq!(env.store.depth(&queue).await.unwrap().next_eligible, soon.eligible_time);
    assert!(env.next_eligible(&queue).await.is_some_and(|next| Some(next) <= soon.eligible_time));
    // An item that has become eligible since the reserve began is not skipped.
    let looked = env.now();
    env.pass(seconds(60));
    assert_eq!(env.store.next_eligible(&queue, looked).await.unwrap(), soon.eligible_time);
    assert_eq!(env.next_eligible(&queue).await, late.eligible_time);
}

/// Expired items at the head are removed and reported, so that they can be counted.
pub async fn expired_items_found_by_a_reserve_are_reported(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, vec![mortal("a", seconds(1)), mortal("b", seconds(1)), item("c")]).await;
    env.pass(seconds(2));
    let (mut expired, mut delivered) = (0, Vec::new());
    loop {
        let reserved = env.store.reserve(&queue, &[demand(10)]).await.unwrap();
        expired += reserved.expired;
        delivered.extend(reserved.deliveries.into_iter().map(|(_, delivery)| delivery));
        if !reserved.more {
            break;
        }
    }
    assert_eq!((payloads(&delivered), expired), (vec!["c".to_owned()], 2));
}

/// A caller that wants one item does not wait until thousands of expired items are removed in small
/// steps.
/// A reserve that removes items and hands out others ends there: what it looked for next would take their place.
pub async fn items_beside_expired_ones_are_handed_out_before_those_behind_them(env: &Env) {
    let queue = env.queue("q").await;
    let new = vec![mortal("a", seconds(10)), item("b"), item("c"), item("d")];
    env.push(&queue, new).await;
    env.pass(seconds(11));
    assert_eq!(payloads(&env.take(&queue, 2).await), ["b", "c"]);
    assert_eq!(payloads(&env.take(&queue, 2).await), ["d"]);
}

pub async fn many_expired_items_are_removed_in_large_steps(env: &Env) {
    let queue = env.queue("q").await;
    for _ in 0..3 {
        env.push(&queue, (0..1_000).map(|_| mortal("x", seconds(1))).collect()).await;
    }
    env.pass(seconds(2));
    let (mut expired, mut largest) = (0, 0);
    while expired < 3_000 {
        let reserved = env.store.reserve(&queue, &[demand(1)]).await.unwrap();
        assert!(reserved.deliveries.is_empty());
        expired += reserved.expired;
        largest = reserved.expired.max(largest);
    }
    assert!(largest >= 500, "at most {largest} of {expired} in one call");
}

/// The time since which an item has waited is known while it is reserved too.
pub async fn a_reserved_item_keeps_its_due_time(env: &Env) {
    let queue = env.queue("q").await;
    let due_while_reserved = async |delivery: &Delivery| {
        let stored = env.get(&queue, delivery.item.id).await;
        assert_eq!(stored.state, ItemState::Reserved);
        assert_eq!(delivery.item.due_time, stored.due_time);
        stored.due_time.unwrap()
    };
    let plain = env.push_one(&queue, item("plain")).await;
    env.pass(seconds(5));
    let first = env.take_one(&queue).await;
    assert_eq!(due_while_reserved(&first).await, plain.eligible_time.unwrap());
    // After a rollback with a delay,
    let later = env.now() + seconds(100);
    env.roll_back(&queue, &first, seconds(100), 2, None).await;
    let delayed = env.get(&queue, plain.id).await;
    assert_eq!((delayed.state, delayed.due_time), (ItemState::Delayed, delayed.eligible_time));
    assert!(delayed.due_time.unwrap() >= later);
    env.pass(seconds(150));
    let second = env.take_one(&queue).await;
    assert_eq!(due_while_reserved(&second).await, delayed.due_time.unwrap());
    // and after the end of a lease.
    env.pass(LEASE + seconds(10));
    let third = env.take_one(&queue).await;
    assert_eq!(due_while_reserved(&third).await, second.lease_expire_time);
    env.commit_one(&queue, &third).await;

    let delayed = NewItem { eligibility: Eligibility::After(seconds(50)), ..item("delayed") };
    let pushed = env.push_one(&queue, delayed).await;
    env.pass(seconds(60));
    let taken = env.take_one(&queue).await;
    assert_eq!(due_while_reserved(&taken).await, pushed.eligible_time.unwrap());

    env.push(&queue, vec![keyed("a", "k"), keyed("b", "k")]).await;
    let a = env.take_one(&queue).await;
    let blocked = env.list(&queue, Some(ItemState::Blocked)).await.remove(0);
    assert_eq!(blocked.due_time, None);
    env.pass(seconds(5));
    let before = env.now();
    env.commit_one(&queue, &a).await;
    let b = env.take_one(&queue).await;
    assert!(due_while_reserved(&b).await >= before);
    let moved_to = env.queue("other").await;
    env.pass(seconds(5));
    let before = env.now();
    assert_eq!(env.move_one(&queue, &taken, &moved_to).await, Outcome::Ok);
    let mut order = move_of(&queue, &b, &moved_to);
    order.eligible_time = before;
    assert_eq!(env.store.move_items(vec![order]).await.unwrap(), [Outcome::Ok]);
    for delivery in env.take(&moved_to, 2).await {
        let stored = env.get(&moved_to, delivery.item.id).await;
        assert_eq!(delivery.item.due_time, stored.due_time);
        if delivery.item.id == b.item.id {
            assert!(stored.due_time.unwrap() >= before);
        }
    }
}

/// Nobody keeps the hints that arrive while a queue has no consumers.
pub async fn the_next_consumer_needs_no_hint(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b"]).await;
    env.pass(seconds(5));
    let (demands, nothing) = ([demand(2)], Appeared::Nothing);
    let mut first = env.other.reserver(&queue.name);
    let taken = first.reserve(&queue, &demands, nothing).await.unwrap().deliveries;
    assert_eq!(taken.len(), 2);
    assert!(first.reserve(&queue, &demands, nothing).await.unwrap().deliveries.is_empty());
    drop(first);
    let back = taken.iter().map(|(_, delivery)| Rollback {
        held: held(&queue, delivery),
        to: RollbackTo::Queue {
            eligible_time: delivery.previous_eligible_time,
            attempt: 1,
            ended: EndedDelivery::Unsent { former_lease: None },
        },
        reason: None,
    });
    assert_eq!(env.store.rollback(back.collect()).await.unwrap(), [Outcome::Ok; 2]);
    let mut next = env.other.reserver(&queue.name);
    let again = next.reserve(&queue, &demands, nothing).await.unwrap().deliveries;
    assert_eq!(again.len(), 2);
}
