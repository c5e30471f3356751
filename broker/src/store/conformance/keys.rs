//! Ordering keys: the items of a key are handed out one at a time, in the order of their pushes.

use std::sync::Arc;

use super::{Env, env::*};
use crate::{
    domain::{Delivery, Eligibility, ItemState, Limit, OrderingKey, Outcome, Queue},
    store::Rollback,
};

/// Takes the only item that is ready.
async fn only(env: &Env, queue: &Arc<Queue>, expected: &str) -> Delivery {
    let mut taken = env.take(queue, 100).await;
    assert_eq!(payloads(&taken), [expected]);
    taken.remove(0)
}

async fn push_key(env: &Env, queue: &Arc<Queue>, names: &[&str]) {
    env.push(queue, names.iter().map(|name| keyed(name, "k")).collect()).await;
}

pub async fn one_at_a_time_in_order(env: &Env) {
    let queue = env.queue("q").await;
    let names: Vec<String> = (0..30).map(|n| n.to_string()).collect();
    let mut last = None;
    for (n, name) in names.iter().enumerate() {
        let pushed = env.push_one(&queue, keyed(name, "k")).await;
        assert!(pushed.sequence > last);
        last = pushed.sequence;
        assert_eq!(pushed.eligible_time.is_none(), n > 0);
    }
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.blocked), (1, 29));
    for name in &names {
        let delivery = only(env, &queue, name).await;
        assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    }
    assert!(env.list(&queue, None).await.is_empty());
}

pub async fn keys_do_not_wait_for_each_other(env: &Env) {
    let queue = env.queue("q").await;
    let items = vec![
        keyed("a1", "a"),
        keyed("a2", "a"),
        keyed("b1", "b"),
        item("free"),
        keyed("b2", "b"),
        keyed("a3", "a"),
    ];
    let pushed = env.push(&queue, items).await;
    assert_eq!(env.get(&queue, pushed[1].id).await.state, ItemState::Blocked);
    assert_eq!(env.get(&queue, pushed[1].id).await.eligible_time, None);
    let taken = env.take(&queue, 10).await;
    assert_eq!(payloads(&taken), ["a1", "b1", "free"]);
    // All items are committed in one call, and each key continues.
    assert_eq!(env.commit(&queue, &taken).await, [Outcome::Ok; 3]);
    let taken = env.take(&queue, 10).await;
    let mut got = payloads(&taken);
    got.sort();
    assert_eq!(got, ["a2", "b2"]);
    env.commit(&queue, &taken).await;
    assert_eq!(env.drain(&queue).await, ["a3"]);
}

pub async fn the_same_key_in_two_queues_is_two_keys(env: &Env) {
    let (a, b) = (env.queue("a").await, env.queue("b").await);
    push_key(env, &a, &["1"]).await;
    push_key(env, &b, &["2"]).await;
    assert_eq!(env.drain(&a).await, ["1"]);
    assert_eq!(env.drain(&b).await, ["2"]);
}

pub async fn a_thousand_blocked_items_are_delivered_in_order(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..1_001).map(|n| keyed(&n.to_string(), "k")).collect()).await;
    assert_eq!(env.store.depth(&queue).await.unwrap().blocked, 1_000);
    env.push_plain(&queue, &["free"]).await;
    let taken = env.take(&queue, 5).await;
    assert_eq!(payloads(&taken), ["0", "free"]);
    env.commit(&queue, &taken).await;
    for n in 1..60 {
        let delivery = only(env, &queue, &n.to_string()).await;
        env.commit_one(&queue, &delivery).await;
    }
    assert_eq!(env.store.depth(&queue).await.unwrap().blocked, 1_000 - 60);
}

pub async fn a_retry_keeps_its_key_blocked(env: &Env) {
    let queue = env.queue("q").await;
    push_key(env, &queue, &["1", "2"]).await;
    env.push(&queue, vec![keyed("other", "l")]).await;
    let taken = env.take(&queue, 10).await;
    assert_eq!(payloads(&taken), ["1", "other"]);
    assert_eq!(env.roll_back(&queue, &taken[0], seconds(60), 2, None).await, Outcome::Ok);
    env.commit_one(&queue, &taken[1]).await;
    assert!(env.drain(&queue).await.is_empty());
    env.pass(seconds(61));
    let delivery = only(env, &queue, "1").await;
    // A lapsed lease counts as a retry too.
    env.pass(LEASE + seconds(1));
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    let delivery = only(env, &queue, "2").await;
    env.pass(LEASE + seconds(1));
    let again = only(env, &queue, "2").await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::LeaseLost);
    assert_eq!(env.commit_one(&queue, &again).await, Outcome::Ok);
}

pub async fn a_dead_letter_unblocks_the_next_item(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| {
        queue.max_attempts = Some(Limit::of(1));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    let queue = env.queue_with("q", set).await;
    let names = ["1", "2", "3", "4"];
    let pushed = env.push(&queue, names.map(|name| keyed(name, "k")).to_vec()).await;
    let delivery = only(env, &queue, "1").await;
    env.bury(&queue, &delivery, None).await;
    only(env, &queue, "2").await;
    env.pass(LEASE + seconds(1));
    // The next reserve notices the limit, and unblocks the next item immediately.
    let delivery = only(env, &queue, "3").await;
    // In the dead-letter queue, the items keep their keys and numbers, but do not block one
    // another.
    let buried = env.take(&dead, 10).await;
    assert_eq!(payloads(&buried), ["1", "2"]);
    for (delivery, pushed) in buried.iter().zip(&pushed) {
        assert_eq!(delivery.item.ordering_key, OrderingKey::new("k"));
        assert_eq!(delivery.item.sequence, pushed.sequence);
    }
    // Settling the dead letters unblocks nothing in the queue.
    env.commit(&dead, &buried).await;
    assert!(env.drain(&queue).await.is_empty());
    env.commit_one(&queue, &delivery).await;
    only(env, &queue, "4").await;
}

pub async fn a_dead_letter_through_another_broker_unblocks_the_next_item(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| queue.dead_letter_queue = Some(dead.name.clone());
    let queue = env.queue_with("q", set).await;
    push_key(env, &queue, &["1", "2"]).await;
    let delivery = only(env, &queue, "1").await;
    let to = last(&queue, &delivery);
    let rollback = Rollback { held: held(&queue, &delivery), to, reason: None };
    assert_eq!(env.other.rollback(vec![rollback]).await.unwrap(), [Outcome::DeadLettered]);
    only(env, &queue, "2").await;
}

pub async fn a_settled_dead_letter_unblocks_nothing(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| queue.dead_letter_queue = Some(dead.name.clone());
    let queue = env.queue_with("q", set).await;
    // The dead-letter queue has items of its own with the same key.
    push_key(env, &dead, &["own 1", "own 2"]).await;
    push_key(env, &queue, &["1"]).await;
    let delivery = only(env, &queue, "1").await;
    env.bury(&queue, &delivery, None).await;
    let taken = env.take(&dead, 10).await;
    assert_eq!(payloads(&taken), ["own 1", "1"]);
    env.commit_one(&dead, &taken[1]).await;
    assert!(env.drain(&dead).await.is_empty());
    env.commit_one(&dead, &taken[0]).await;
    only(env, &dead, "own 2").await;
}

pub async fn a_discarded_item_unblocks_the_next_item(env: &Env) {
    for retention in [0, 1_000] {
        let set = |queue: &mut Queue| {
            (queue.max_attempts, queue.discard_failed) = (Some(Limit::of(1)), true);
            queue.retention = seconds(retention);
        };
        let queue = env.queue_with(&format!("q{retention}"), set).await;
        push_key(env, &queue, &["1", "2", "3"]).await;
        let delivery = only(env, &queue, "1").await;
        env.bury(&queue, &delivery, None).await;
        only(env, &queue, "2").await;
        env.pass(LEASE + seconds(1));
        only(env, &queue, "3").await;
    }
}

pub async fn a_deleted_item_unblocks_the_next_item(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push(&queue, ["1", "2", "3", "4"].map(|name| keyed(name, "k")).to_vec()).await;
    assert!(env.delete(&queue, pushed[1].id).await); // a blocked item unblocks nothing
    let delivery = only(env, &queue, "1").await;
    assert!(env.drain(&queue).await.is_empty());
    assert!(env.delete(&queue, pushed[0].id).await); // while reserved
    only(env, &queue, "3").await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Gone);
    assert!(env.drain(&queue).await.is_empty());
}

pub async fn an_expired_item_unblocks_the_next_item(env: &Env) {
    let queue = env.queue("q").await;
    let short = |name: &str| crate::domain::NewItem { ttl: Some(seconds(10)), ..keyed(name, "k") };
    env.push(&queue, vec![short("1"), short("2"), keyed("3", "k"), keyed("4", "k")]).await;
    env.pass(seconds(11));
    // This item was pushed before the expiry was noticed. It waits behind those that have not
    // expired.
    push_key(env, &queue, &["5"]).await;
    env.take(&queue, 1).await; // finds the expired items; the unblocked one is returned now or next
    env.upkeep().await;
    env.pass(LEASE + seconds(1));
    for expected in ["3", "4", "5"] {
        let delivery = only(env, &queue, expected).await;
        env.commit_one(&queue, &delivery).await;
    }
}

/// Nobody else tells the caller that the next item is ready.
pub async fn a_reserve_that_removes_an_expired_item_asks_for_another_reserve(env: &Env) {
    let queue = env.queue("q").await;
    let short = crate::domain::NewItem { ttl: Some(seconds(10)), ..keyed("1", "k") };
    env.push(&queue, vec![short, keyed("2", "k")]).await;
    env.pass(seconds(11));
    assert_eq!(payloads(&env.take(&queue, 1).await), ["2"]);
}

pub async fn an_item_that_expires_under_its_lease_unblocks_the_next_item(env: &Env) {
    let queue = env.queue("q").await;
    let short = crate::domain::NewItem { ttl: Some(seconds(10)), ..keyed("1", "k") };
    env.push(&queue, vec![short, keyed("2", "k")]).await;
    let delivery = only(env, &queue, "1").await;
    env.pass(seconds(11));
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Gone);
    env.upkeep().await;
    only(env, &queue, "2").await;
}

pub async fn an_unblocked_item_waits_for_its_own_eligible_time(env: &Env) {
    let queue = env.queue("q").await;
    let late =
        crate::domain::NewItem { eligibility: Eligibility::After(seconds(60)), ..keyed("2", "k") };
    env.push(&queue, vec![keyed("1", "k"), late, keyed("3", "k")]).await;
    let delivery = only(env, &queue, "1").await;
    env.commit_one(&queue, &delivery).await;
    assert!(env.drain(&queue).await.is_empty());
    assert_eq!(env.store.depth(&queue).await.unwrap().delayed, 1);
    env.pass(seconds(61));
    let delivery = only(env, &queue, "2").await;
    env.commit_one(&queue, &delivery).await;
    only(env, &queue, "3").await;
}

pub async fn priority_does_not_break_the_order_of_a_key(env: &Env) {
    let queue = env.queue("q").await;
    let urgent = crate::domain::NewItem {
        ordering_key: OrderingKey::new("k"),
        ..crate::store::conformance::env::urgent("2", 9)
    };
    env.push(&queue, vec![keyed("1", "k"), urgent, item("free")]).await;
    let taken = env.take(&queue, 10).await;
    assert_eq!(payloads(&taken), ["1", "free"]);
    env.commit(&queue, &taken).await;
    only(env, &queue, "2").await;
}

pub async fn a_replayed_item_is_blocked_by_its_key(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    push_key(env, &queue, &["1", "2"]).await;
    let first = only(env, &queue, "1").await;
    env.commit_one(&queue, &first).await;
    let second = only(env, &queue, "2").await;
    let selection = crate::store::Selection::Ids(vec![first.item.id]);
    assert_eq!(env.store.replay(&queue, &selection, 10).await.unwrap(), 1);
    let item = env.get(&queue, first.item.id).await;
    assert_eq!((item.state, item.sequence), (ItemState::Blocked, first.item.sequence));
    assert!(env.drain(&queue).await.is_empty());
    env.commit_one(&queue, &second).await;
    let first = only(env, &queue, "1").await;
    env.commit_one(&queue, &first).await;
    // An item that is replayed with no other before it is ready immediately.
    assert_eq!(env.store.replay(&queue, &selection, 10).await.unwrap(), 1);
    only(env, &queue, "1").await;
}

pub async fn a_moved_item_unblocks_the_next_item_and_is_last_in_its_new_queue(env: &Env) {
    let (queue, to) = (env.queue("q").await, env.queue("to").await);
    push_key(env, &queue, &["1", "2"]).await;
    push_key(env, &to, &["a"]).await;
    let there = env.push_one(&to, keyed("b", "k")).await.sequence;
    let delivery = only(env, &queue, "1").await;
    assert_eq!(env.move_one(&queue, &delivery, &to).await, Outcome::Ok);
    only(env, &queue, "2").await;
    let moved = env.get(&to, delivery.item.id).await;
    assert_eq!((moved.state, moved.attempt), (ItemState::Blocked, 1));
    assert!(moved.sequence > there);
    for expected in ["a", "b", "1"] {
        let delivery = only(env, &to, expected).await;
        env.commit_one(&to, &delivery).await;
    }
}

pub async fn racing_pushes_of_one_key_leave_one_ready(env: &Env) {
    let queue = env.queue("q").await;
    let racers: Vec<_> = (0..16)
        .map(|n| {
            let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
            let items = vec![push_of(&queue, keyed(&n.to_string(), "k"))];
            tokio::spawn(async move { store.push(items).await.unwrap()[0] })
        })
        .collect();
    let mut pushed = Vec::new();
    for racer in racers {
        pushed.push(racer.await.unwrap());
    }
    pushed.sort_by_key(|pushed| pushed.sequence);
    let sequences: Vec<_> = pushed.iter().map(|pushed| pushed.sequence).collect();
    assert!(sequences.is_sorted_by(|a, b| a < b), "{sequences:?}");
    for expected in &pushed {
        let taken = env.take(&queue, 100).await;
        assert_eq!(taken.iter().map(|d| d.item.id).collect::<Vec<_>>(), [expected.id]);
        env.commit(&queue, &taken).await;
    }
}
