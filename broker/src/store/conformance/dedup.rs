//! Deduplication: a push that is repeated while its id is remembered stores nothing.

use std::{sync::Arc, time::Duration};

use super::{Env, env::*};
use crate::{
    domain::{OrderingKey, Outcome, Pushed, Queue},
    store::Push,
};

/// Pushes the item `d` again and checks that it is recognised as `first`.
async fn is_known(env: &Env, queue: &Arc<Queue>, first: &Pushed) {
    let again = env.push_one(queue, dedup("again", "d")).await;
    assert!(again.deduplicated);
    assert_eq!((again.id, again.sequence), (first.id, first.sequence));
    assert_eq!(again.eligible_time, None);
}

pub async fn a_repeated_push_returns_the_first_item(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.sequenced = true).await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    assert!(!first.deduplicated);
    is_known(env, &queue, &first).await;
    let other = env.other.push(vec![push_of(&queue, dedup("y", "d"))]).await.unwrap()[0];
    assert_eq!((other.deduplicated, other.id), (true, first.id));
    assert!(!env.push_one(&queue, dedup("y", "D")).await.deduplicated);
    assert_eq!(env.drain(&queue).await, ["x", "y"]);
}

pub async fn ids_are_of_their_queue(env: &Env) {
    let (a, b) = (env.queue("a").await, env.queue("b").await);
    let first = env.push_one(&a, dedup("x", "d")).await;
    let second = env.push_one(&b, dedup("x", "d")).await;
    assert!(!second.deduplicated);
    assert_ne!(first.id, second.id);
}

pub async fn duplicates_within_one_batch_count(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.sequenced = true).await;
    let items = vec![
        item("1"),
        dedup("2", "d"),
        dedup("3", "d"),
        item("4"),
        dedup("5", "e"),
        dedup("6", "d"),
    ];
    let pushed = env.push(&queue, items).await;
    let flags: Vec<bool> = pushed.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(flags, [false, false, true, false, false, true]);
    assert_eq!((pushed[2].id, pushed[5].id), (pushed[1].id, pushed[1].id));
    assert_eq!(env.drain(&queue).await, ["1", "2", "4", "5"]);
    // An id known before the batch, among new ones.
    let pushed = env.push(&queue, vec![item("7"), dedup("8", "e"), item("9")]).await;
    let flags: Vec<bool> = pushed.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(flags, [false, true, false]);
    assert_eq!(env.drain(&queue).await, ["7", "9"]);
}

pub async fn racing_pushes_store_one(env: &Env) {
    let queue = env.queue("q").await;
    for round in 0..10 {
        let racers: Vec<_> = (0..8)
            .map(|n| {
                let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
                let items = vec![
                    push_of(&queue, dedup(&format!("{round}a"), &format!("a{round}"))),
                    push_of(&queue, dedup(&format!("{round}b"), &format!("b{round}"))),
                ];
                tokio::spawn(async move { store.push(items).await.unwrap() })
            })
            .collect();
        let mut all = Vec::new();
        for racer in racers {
            all.push(racer.await.unwrap());
        }
        for place in 0..2 {
            let winners: Vec<_> = all.iter().filter(|pushed| !pushed[place].deduplicated).collect();
            assert_eq!(winners.len(), 1);
            assert!(all.iter().all(|pushed| pushed[place].id == winners[0][place].id));
        }
    }
    assert_eq!(env.store.depth(&queue).await.unwrap().ready, 20);
}

pub async fn an_id_outlives_its_item(env: &Env) {
    let queue = env.queue("q").await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    let delivery = env.take_one(&queue).await;
    is_known(env, &queue, &first).await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    is_known(env, &queue, &first).await;
    // The tombstone is not an item.
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Gone);
    assert_eq!(env.store.get_item(&queue, first.id).await.unwrap(), None);
    assert!(env.list(&queue, None).await.is_empty());
    assert!(!env.delete(&queue, first.id).await);
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!(depth, crate::domain::Depth::default());
    assert!(env.drain(&queue).await.is_empty());
}

pub async fn an_id_in_history_is_known(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(10)).await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    is_known(env, &queue, &first).await;
    env.pass(seconds(11)); // after the retention, within the window
    is_known(env, &queue, &first).await;
    assert!(env.list(&queue, None).await.is_empty());
}

pub async fn an_id_survives_move_and_dead_letter(env: &Env) {
    let to = env.queue("to").await;
    let set = |queue: &mut Queue| queue.dead_letter_queue = Some(to.name.clone());
    let queue = env.queue_with("q", set).await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.move_one(&queue, &delivery, &to).await, Outcome::Ok);
    is_known(env, &queue, &first).await;
    // The id is not known in the queue that the item was moved to.
    assert!(!env.push_one(&to, dedup("y", "d")).await.deduplicated);
    // The item is moved back to the queue of its id.
    let delivery = env.take_one(&to).await;
    assert_eq!(payload(&delivery.item), "x");
    assert_eq!(env.move_one(&to, &delivery, &queue).await, Outcome::Ok);
    is_known(env, &queue, &first).await;

    let delivery = env.take_one(&queue).await;
    assert_eq!(env.bury(&queue, &delivery, None).await, Outcome::DeadLettered);
    is_known(env, &queue, &first).await;
    let buried = env.take(&to, 9).await;
    assert_eq!(buried.len(), 2);
    assert!(env.commit(&to, &buried).await.iter().all(|outcome| *outcome == Outcome::Ok));
    is_known(env, &queue, &first).await;
}

pub async fn an_id_survives_its_items_expiry(env: &Env) {
    let queue = env.queue("q").await;
    let new = crate::domain::NewItem { ttl: Some(seconds(10)), ..dedup("x", "d") };
    let first = env.push_one(&queue, new).await;
    env.pass(seconds(11));
    is_known(env, &queue, &first).await;
    assert!(env.drain(&queue).await.is_empty());
    is_known(env, &queue, &first).await;
}

pub async fn an_id_is_forgotten_when_its_window_ends(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.dedup_window = seconds(60)).await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    env.pass(seconds(40));
    is_known(env, &queue, &first).await; // this does not prolong the window
    env.pass(seconds(21));
    let second = env.push_one(&queue, dedup("y", "d")).await; // although the first item still exists
    assert!(!second.deduplicated);
    is_known(env, &queue, &second).await;
    assert_eq!(env.drain(&queue).await, ["x", "y"]);
    env.pass(seconds(61));
    assert!(!env.push_one(&queue, dedup("z", "d")).await.deduplicated);
}

pub async fn a_tombstone_is_forgotten_when_its_window_ends(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.dedup_window = seconds(60)).await;
    env.push_one(&queue, dedup("x", "d")).await;
    let delivery = env.take_one(&queue).await;
    env.commit_one(&queue, &delivery).await;
    env.pass(seconds(61));
    assert!(!env.push_one(&queue, dedup("y", "d")).await.deduplicated);
    assert_eq!(env.drain(&queue).await, ["y"]);
}

pub async fn a_push_can_have_a_window_of_its_own(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.dedup_window = seconds(60)).await;
    let long =
        Push { dedup_window: Some(Duration::from_mins(10)), ..push_of(&queue, dedup("x", "d")) };
    let first = env.store.push(vec![long]).await.unwrap()[0];
    env.pass(seconds(500));
    is_known(env, &queue, &first).await;
    env.pass(seconds(101));
    assert!(!env.push_one(&queue, dedup("y", "d")).await.deduplicated);
}

pub async fn a_deleted_item_releases_its_dedup_id(env: &Env) {
    let queue = env.queue("q").await;
    let first = env.push_one(&queue, dedup("x", "d")).await;
    assert!(env.delete(&queue, first.id).await);
    let second = env.push_one(&queue, dedup("y", "d")).await;
    assert!(!second.deduplicated);
    assert_eq!(env.store.purge(&queue).await.unwrap(), 1);
    assert!(!env.push_one(&queue, dedup("z", "d")).await.deduplicated);
    assert_eq!(env.drain(&queue).await, ["z"]);
}

pub async fn duplicates_take_no_sequence_number_and_block_nothing(env: &Env) {
    let queue = env.queue("q").await;
    let new = |payload: &str, id: &str| crate::domain::NewItem {
        ordering_key: OrderingKey::new("k"),
        ..dedup(payload, id)
    };
    let first = env.push_one(&queue, new("1", "a")).await;
    assert!(env.push_one(&queue, new("1 again", "a")).await.deduplicated);
    let second = env.push_one(&queue, new("2", "b")).await;
    assert!(second.sequence > first.sequence);
    let delivery = env.take_one(&queue).await;
    env.commit_one(&queue, &delivery).await;
    assert_eq!(env.drain(&queue).await, ["2"]);
}
