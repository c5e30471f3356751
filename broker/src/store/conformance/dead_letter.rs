//! Dead letters: an item becomes one exactly at the limit, whichever way its attempts failed.

use std::sync::Arc;

use super::{Env, env::*};
use crate::{
    domain::{AtLimit, Cause, DedupId, FailureOutcome, Item, ItemState, Limit, Outcome, Queue},
    store::{RedriveFilter, Selection},
};

async fn pair(env: &Env, max_attempts: u32) -> (Arc<Queue>, Arc<Queue>) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| {
        queue.max_attempts = Some(Limit::of(max_attempts));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    (env.queue_with("q", set).await, dead)
}

pub async fn lapsed_leases_dead_letter_at_exactly_the_limit(env: &Env) {
    let (queue, dead) = pair(env, 3).await;
    let pushed = env.push_one(&queue, urgent("x", 4)).await;
    for attempt in 1..=3 {
        let delivery = env.take_one(&queue).await;
        assert_eq!((delivery.item.attempt, delivery.item.deliveries), (attempt, attempt));
        env.pass(LEASE + seconds(1));
    }
    let reserved = env.reserve(&queue, &[demand(10)]).await;
    assert!(reserved.deliveries.is_empty());
    assert_eq!(reserved.at_limit.total(), 1);
    assert_eq!(env.store.get_item(&queue, pushed.id).await.unwrap(), None);
    let item = env.get(&dead, pushed.id).await;
    assert_eq!((item.state, item.deliveries, item.attempt), (ItemState::Ready, 3, 1));
    assert_eq!(item.dead_letter_attempts, 3);
    assert_eq!(item.dead_letter_time, item.due_time);
    assert_eq!(item.origin_queue.as_ref(), Some(&queue.name));
    assert_eq!(item.queue, dead.name);
    assert_eq!(item.last_reason, "lease lapsed");
    assert_eq!(item.priority.level(), 4);
    assert_eq!(env.drain(&dead).await, ["x"]);
}

pub async fn rollbacks_and_lapses_count_alike(env: &Env) {
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
    // A known reason is kept.
    assert_eq!(env.get(&dead, pushed.id).await.last_reason, "failed");
    // The receipt of the last attempt finds an item without a lease.
    assert_eq!(env.commit_one(&queue, &third).await, Outcome::LeaseLost);
}

pub async fn a_lapsed_last_attempt_still_commits(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    env.push_one(&queue, item("x")).await;
    let only = env.take_one(&queue).await;
    env.pass(LEASE + seconds(1));
    assert_eq!(env.commit_one(&queue, &only).await, Outcome::Ok);
    assert!(env.drain(&queue).await.is_empty());
    assert!(env.list(&dead, None).await.is_empty());
}

pub async fn a_dead_letter_keeps_its_content(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    let new = crate::domain::NewItem {
        headers: [("a".to_owned(), "b".to_owned())].into(),
        content_type: "text/plain".to_owned(),
        dedup_id: DedupId::new("d"),
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

fn discarding(queue: &mut Queue) {
    (queue.max_attempts, queue.discard_failed) = (Some(Limit::of(1)), true);
}

pub async fn a_queue_that_discards_drops_items_at_the_limit(env: &Env) {
    let queue = env.queue_with("q", discarding).await;
    env.push_plain(&queue, &["a", "b"]).await;
    let taken = env.take(&queue, 2).await;
    assert_eq!(env.bury(&queue, &taken[0], Some("broken")).await, Outcome::DeadLettered);
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Outcome::Gone);
    env.pass(LEASE + seconds(1));
    let reserved = env.reserve(&queue, &[demand(5)]).await;
    assert!(reserved.deliveries.is_empty());
    assert_eq!(reserved.at_limit.total(), 1);
    assert!(env.list(&queue, None).await.is_empty());
}

pub async fn discarded_items_become_history_if_it_is_kept(env: &Env) {
    let set = |queue: &mut Queue| {
        discarding(queue);
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
    // History says why, as a dead letter does.
    let told = |item: &Item| (item.last_reason.clone(), item.dead_letter_attempts);
    let told: Vec<_> = history.iter().map(told).collect();
    assert_eq!(told, [("lease lapsed".to_owned(), 1), ("broken".to_owned(), 1)]);
    assert!(history.iter().all(|item| item.dead_letter_time == item.process_time));
    let ids = Selection::Ids(history.iter().map(|item| item.id).collect());
    assert_eq!(env.store.replay(&queue, &ids, 9).await.unwrap(), 2);
    let again = env.take(&queue, 9).await;
    let anew = |item: &Item| item.dead_letter_time.is_none() && item.dead_letter_attempts == 0;
    assert!(again.len() == 2 && again.iter().all(|delivery| anew(&delivery.item)), "{again:?}");
}

pub async fn zero_attempts_means_no_limit(env: &Env) {
    let (queue, dead) = pair(env, 0).await;
    env.push_one(&queue, item("x")).await;
    for attempt in 1..=20 {
        assert_eq!(env.take_one(&queue).await.item.attempt, attempt);
        env.pass(LEASE + seconds(1));
    }
    assert!(env.list(&dead, None).await.is_empty());
}

pub async fn items_at_a_limit_do_not_hide_others(env: &Env) {
    let (queue, dead) = pair(env, 1).await;
    env.push(&queue, (0..150).map(|n| item(&n.to_string())).collect()).await;
    assert_eq!(env.take(&queue, 150).await.len(), 150);
    env.pass(LEASE + seconds(1));
    env.push_plain(&queue, &["alive"]).await;
    let mut dead_lettered = 0;
    let delivery = loop {
        let reserved = env.reserve(&queue, &[demand(1)]).await;
        dead_lettered += reserved.at_limit.total();
        if let Some((_, delivery)) = reserved.deliveries.into_iter().next() {
            break delivery;
        }
        assert!(reserved.more);
    };
    assert_eq!(payload(&delivery.item), "alive");
    while env.store.depth(&dead).await.unwrap().ready < 150 {
        let reserved = env.reserve(&queue, &[demand(1)]).await;
        assert!(reserved.at_limit.total() > 0);
        dead_lettered += reserved.at_limit.total();
    }
    assert_eq!(dead_lettered, 150);
}

/// An item at a limit does not leave its queue before its destination is known. No items are handed
/// out that would hide it.
pub async fn items_at_a_limit_stay_while_their_destination_is_unknown(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.max_attempts = Some(Limit::of(1))).await;
    assert_eq!(queue.at_limit, AtLimit::Unknown);
    env.push_plain(&queue, &["failing", "well"]).await;
    env.take_one(&queue).await;
    env.pass(LEASE + seconds(1));
    for _ in 0..2 {
        let reserved = env.reserve(&queue, &[demand(10)]).await;
        assert!(reserved.limit_unknown && reserved.more && reserved.deliveries.is_empty());
        assert_eq!(reserved.at_limit.total(), 0);
    }
    let dead = env.queue("q.dead").await;
    let at_limit = AtLimit::DeadLetter(dead.name.clone());
    let queue = Arc::new(Queue { at_limit, ..(*queue).clone() });
    assert_eq!(env.drain(&queue).await, ["well"]);
    assert_eq!(env.drain(&dead).await, ["failing"]);
}

/// An item at a limit without a destination is not lost, but retried.
pub async fn a_limit_without_a_destination_has_no_effect(env: &Env) {
    let queue = env.queue_with("q.dead", |queue| queue.max_attempts = Some(Limit::of(1))).await;
    env.push_plain(&queue, &["x"]).await;
    for attempt in 1..=4 {
        assert_eq!(env.take_one(&queue).await.item.attempt, attempt);
        env.pass(LEASE + seconds(1));
    }
}

/// An item that crashes its consumers is dead-lettered, although none of its attempts was ever
/// counted.
pub async fn an_item_handed_out_as_often_as_allowed_is_dead_lettered(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| {
        (queue.max_attempts, queue.max_deliveries) = (Some(Limit::of(0)), Some(Limit::of(3)));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    let queue = env.queue_with("q", set).await;
    let pushed = env.push_one(&queue, item("x")).await;
    for deliveries in 1..=2 {
        let delivery = env.take_one(&queue).await;
        let receipt = &delivery.receipt;
        assert_eq!((receipt.attempt, receipt.deliveries_here()), (1, deliveries));
        let failure_outcome =
            queue.failure_outcome(Cause::Disconnect, 1, receipt.deliveries_here(), 0.0);
        assert_eq!(failure_outcome, FailureOutcome::Retry { attempt: 1, delay: seconds(0) });
        env.roll_back(&queue, &delivery, seconds(0), 1, None).await;
    }
    env.take_one(&queue).await;
    env.pass(LEASE + seconds(1));
    let reserved = env.reserve(&queue, &[demand(10)]).await;
    assert_eq!((reserved.at_limit.max_deliveries, reserved.at_limit.max_attempts), (1, 0));
    assert_eq!(env.get(&dead, pushed.id).await.origin_queue.as_ref(), Some(&queue.name));
}

/// An item that passes through several queues, or in circles, by moves does not use up its
/// deliveries.
pub async fn deliveries_are_counted_from_an_items_arrival(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| {
        queue.max_deliveries = Some(Limit::of(2));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    let queue = env.queue_with("q", set).await;
    let pushed = env.push_one(&queue, item("x")).await;
    for round in 1..=3 {
        let delivery = env.take_one(&queue).await;
        let counts = (delivery.item.deliveries, delivery.receipt.deliveries_here());
        assert_eq!(counts, (round, 1));
        assert_eq!(env.move_one(&queue, &delivery, &queue).await, Outcome::Ok);
    }
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.bury(&queue, &delivery, None).await, Outcome::DeadLettered);
    let filter = RedriveFilter::default();
    assert_eq!(env.store.redrive(&dead, &queue, &filter, None, 10).await.unwrap().items, 1);
    let item = env.get(&queue, pushed.id).await;
    assert_eq!((item.dead_letter_time, item.dead_letter_attempts), (None, 0));
    let delivery = env.take_one(&queue).await;
    assert_eq!((delivery.item.deliveries, delivery.receipt.deliveries_here()), (5, 1));
}
