//! Dead letters: reached at exactly the limit, whichever way the attempts failed.

use std::sync::Arc;

use super::{Env, env::*};
use crate::domain::{ItemState, Outcome, Queue};

async fn pair(env: &Env, max_attempts: u32) -> (Arc<Queue>, Arc<Queue>) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| {
        queue.max_attempts = max_attempts;
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    (env.queue_with("q", set).await, dead)
}

pub(crate) async fn lapsed_leases_lead_there_at_exactly_the_limit(env: &Env) {
    let (queue, dead) = pair(env, 3).await;
    let pushed = env.push_one(&queue, urgent("x", 4)).await;
    for attempt in 1..=3 {
        let delivery = env.take_one(&queue).await;
        assert_eq!((delivery.item.attempt, delivery.item.deliveries), (attempt, attempt));
        env.pass(LEASE + seconds(1));
    }
    let reserved = env.reserve(&queue, &[want(10)]).await;
    assert!(reserved.deliveries.is_empty());
    assert_eq!(reserved.dead_lettered, 1);
    assert_eq!(env.store.get_item(&queue, pushed.id).await.unwrap(), None);
    let item = env.get(&dead, pushed.id).await;
    assert_eq!((item.state, item.deliveries), (ItemState::Ready, 3));
    assert_eq!(item.origin_queue.as_ref(), Some(&queue.name));
    assert_eq!(item.queue, dead.name);
    assert_eq!(item.last_reason, "lease lapsed");
    assert_eq!(item.priority.level(), 4);
    assert_eq!(env.drain(&dead).await, ["x"]);
}

pub(crate) async fn rollbacks_and_lapses_count_alike(env: &Env) {
    let (queue, dead) = pair(env, 3).await;
    let pushed = env.push_one(&queue, item("x")).await;
    let first = env.take_one(&queue).await;
    env.fail(&queue, &first).await;
    let second = env.take_one(&queue).await;
    assert_eq!(second.item.attempt, 2);
    env.pass(LEASE + seconds(1));
    let third = env.take_one(&queue).await;
    assert_eq!(third.item.attempt, 3);
    env.pass(LEASE + seconds(1));
    assert!(env.drain(&queue).await.is_empty());
    // A reason that is known is kept.
    assert_eq!(env.get(&dead, pushed.id).await.last_reason, "failed");
    // The receipt of the last attempt finds the item under no lease any more.
    assert_eq!(env.commit_one(&queue, &third).await, Outcome::LeaseLost);
}

pub(crate) async fn a_lapsed_last_attempt_still_commits(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    env.push_one(&queue, item("x")).await;
    let only = env.take_one(&queue).await;
    env.pass(LEASE + seconds(1));
    assert_eq!(env.commit_one(&queue, &only).await, Outcome::Ok);
    assert!(env.drain(&queue).await.is_empty());
    assert!(env.list(&dead, None).await.is_empty());
}

pub(crate) async fn a_buried_item_is_as_it_was(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    let new = crate::domain::NewItem {
        headers: [("a".to_owned(), "b".to_owned())].into(),
        content_type: "text/plain".to_owned(),
        dedup_id: "d".to_owned(),
        ttl: Some(seconds(1_000)),
        ..urgent("x", 2)
    };
    let pushed = env.push_one(&queue, new.clone()).await;
    let before = env.get(&queue, pushed.id).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.bury(&queue, &delivery, Some("broken")).await, Outcome::DeadLettered);
    assert_eq!(env.bury(&queue, &delivery, Some("again")).await, Outcome::LeaseLost);
    let item = env.get(&dead, pushed.id).await;
    assert_eq!((&item.payload, &item.headers), (&new.payload, &new.headers));
    assert_eq!((&item.content_type, &item.dedup_id), (&new.content_type, &new.dedup_id));
    assert_eq!((item.priority, item.expire_time), (before.priority, before.expire_time));
    assert_eq!((item.create_time, item.sequence), (before.create_time, before.sequence));
    assert_eq!(item.last_reason, "broken");
    assert_eq!(env.store.depth(&queue).await.unwrap().unsettled(), 0);
    assert_eq!(env.store.depth(&dead).await.unwrap().ready, 1);
}

pub(crate) async fn without_a_dead_letter_queue_items_are_dropped(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.max_attempts = 1).await;
    env.push_plain(&queue, &["a", "b"]).await;
    let taken = env.take(&queue, 2).await;
    assert_eq!(env.bury(&queue, &taken[0], Some("broken")).await, Outcome::DeadLettered);
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Outcome::Gone);
    env.pass(LEASE + seconds(1));
    let reserved = env.reserve(&queue, &[want(5)]).await;
    assert!(reserved.deliveries.is_empty());
    assert_eq!(reserved.dead_lettered, 1);
    assert!(env.list(&queue, None).await.is_empty());
}

pub(crate) async fn dropped_items_become_history_where_that_is_kept(env: &Env) {
    let set = |queue: &mut Queue| {
        queue.max_attempts = 1;
        queue.retention = seconds(1_000);
    };
    let queue = env.queue_with("q", set).await;
    env.push_plain(&queue, &["a", "b"]).await;
    let taken = env.take(&queue, 2).await;
    assert_eq!(env.bury(&queue, &taken[0], Some("broken")).await, Outcome::DeadLettered);
    env.pass(LEASE + seconds(1));
    assert!(env.drain(&queue).await.is_empty());
    let history = env.list(&queue, Some(ItemState::Processed)).await;
    assert_eq!(history.iter().map(payload).collect::<Vec<_>>(), ["b", "a"]);
}

pub(crate) async fn zero_attempts_means_no_limit(env: &Env) {
    let (queue, dead) = pair(env, 0).await;
    env.push_one(&queue, item("x")).await;
    for attempt in 1..=20 {
        assert_eq!(env.take_one(&queue).await.item.attempt, attempt);
        env.pass(LEASE + seconds(1));
    }
    assert!(env.list(&dead, None).await.is_empty());
}

pub(crate) async fn the_dead_do_not_hide_the_living(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    env.push(&queue, (0..150).map(|n| item(&n.to_string())).collect()).await;
    assert_eq!(env.take(&queue, 150).await.len(), 150);
    env.pass(LEASE + seconds(1));
    env.push_plain(&queue, &["alive"]).await;
    let mut dead_lettered = 0;
    let delivery = loop {
        let reserved = env.reserve(&queue, &[want(1)]).await;
        dead_lettered += reserved.dead_lettered;
        if let Some((_, delivery)) = reserved.deliveries.into_iter().next() {
            break delivery;
        }
        assert!(reserved.more);
    };
    assert_eq!(payload(&delivery.item), "alive");
    while env.store.depth(&dead).await.unwrap().ready < 150 {
        let reserved = env.reserve(&queue, &[want(1)]).await;
        assert!(reserved.dead_lettered > 0);
        dead_lettered += reserved.dead_lettered;
    }
    assert_eq!(dead_lettered, 150);
}
