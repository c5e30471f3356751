//! Operator calls while consumers work.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use super::*;
use crate::{
    domain::{Cause, Clock, Demand, LimitReason, NewItem, Outcome, Signal, Timestamp, Topic},
    engine::{Identity, Limits, MAY_CREATE_ALL, RollbackRequest},
    metrics::Metrics,
    signals::{LocalSignals, Notice},
    store::{
        Appeared, RedriveFilter, Reservation, Rollback, RollbackTo, Selection, sqlite::SqliteStore,
    },
};

fn named(name: &str) -> QueueName {
    QueueName::parse("queue", name).unwrap()
}

/// Creates a queue, and one dead letter of it in `dead`.
async fn dead_letter_of(engine: &Arc<Engine>, origin: &str, dead: &QueueName, max_depth: u64) {
    let origin = named(origin);
    let mut queue = Queue::with_defaults(origin.clone(), Timestamp(0));
    (queue.dead_letter_queue, queue.max_depth) = (Some(dead.clone()), NonZeroU64::new(max_depth));
    let queue = match engine.create_queue(queue.clone(), MAY_CREATE_ALL).await {
        Ok(queue) => Arc::new(queue),
        Err(error) => panic!("{error}"),
    };
    engine.push(&origin, vec![NewItem::default()], None).await.unwrap();
    let demand = Demand {
        max_items: 1,
        max_bytes: usize::MAX,
        may_exceed: true,
        lease: Duration::from_secs(30),
        consumer: None,
        spare: false,
    };
    let mut reserver = engine.store().reserver(&origin);
    let reserved = reserver.reserve(&queue, &[demand], Appeared::Nothing).await.unwrap();
    let receipt = reserved.deliveries[0].1.receipt.clone();
    let reason = LimitReason::Rejected;
    let to = RollbackTo::DeadLetter { to: dead.clone(), failed_attempts: 1, reason };
    let rollback = Rollback { held: Reservation { queue, receipt }, to, reason: None };
    engine.store().rollback(vec![rollback]).await.unwrap();
    engine.stats.depths.forget_count(&origin); // the engine has not seen the item leave
}

async fn ready(engine: &Engine, name: &QueueName) -> u64 {
    let queue = engine.get_queue(name).await.unwrap();
    engine.store().depth(&queue).await.unwrap().ready
}

/// Dead letters whose origin is now in another group stay in their queue, and do not block others.
#[tokio::test]
async fn a_redrive_skips_an_origin_in_another_group() {
    let engine = engine();
    let dead = named("dead");
    for origin in ["away", "here"] {
        dead_letter_of(&engine, origin, &dead, 0).await;
    }
    engine.delete_queue(&named("away"), true).await.unwrap();
    let mut anew = Queue::with_defaults(named("away"), Timestamp(0));
    anew.group = GroupName::parse("group", "elsewhere").unwrap();
    engine.create_queue(anew, MAY_CREATE_ALL).await.unwrap();

    let all = || RedriveFilter::default();
    assert_eq!(engine.redrive_items(&dead, None, all(), 0, 0).await.unwrap(), 1);
    assert_eq!((ready(&engine, &named("here")).await, ready(&engine, &dead).await), (1, 1));
    // A redrive that names such a queue is refused.
    let only = RedriveFilter { origin_queue: Some(named("away")), ..all() };
    let refused = engine.redrive_items(&dead, None, only, 0, 0).await.unwrap_err();
    assert!(matches!(refused, EngineError::DifferentGroup { .. }), "{refused}");
}

/// A redrive does not create a deleted queue again, without its settings, and continues with others.
#[tokio::test]
async fn a_redrive_passes_over_an_origin_that_was_deleted() {
    let engine = engine();
    let dead = named("dead");
    for origin in ["away", "here"] {
        dead_letter_of(&engine, origin, &dead, 0).await;
    }
    engine.delete_queue(&named("away"), true).await.unwrap();
    let all = || RedriveFilter::default();
    assert_eq!(engine.redrive_items(&dead, None, all(), 0, 0).await.unwrap(), 1);
    assert_eq!((ready(&engine, &named("here")).await, ready(&engine, &dead).await), (1, 1));
    let only = RedriveFilter { origin_queue: Some(named("away")), ..all() };
    let refused = engine.redrive_items(&dead, None, only, 0, 0).await.unwrap_err();
    assert!(matches!(refused, EngineError::QueueNotFound(_)), "{refused}");
    // A target that is named is created as by a push.
    let to = Some(named("new"));
    assert_eq!(engine.redrive_items(&dead, to, all(), 0, 0).await.unwrap(), 1);
    assert_eq!(ready(&engine, &named("new")).await, 1);
}

/// A redrive fills a queue up to its limit, and fails if there is no room at all.
#[tokio::test]
async fn a_redrive_keeps_to_max_depth() {
    let engine = engine();
    let (dead, full) = (named("dead"), named("full"));
    dead_letter_of(&engine, "full", &dead, 3).await;
    for origin in ["b", "c", "d", "e"] {
        dead_letter_of(&engine, origin, &dead, 0).await;
    }
    let redrive = async || {
        engine.redrive_items(&dead, Some(full.clone()), RedriveFilter::default(), 0, 0).await
    };
    assert_eq!(redrive().await.unwrap(), 3);
    let refused = redrive().await.unwrap_err();
    assert!(matches!(refused, EngineError::QueueFull { .. }), "{refused}");
    assert_eq!((ready(&engine, &full).await, ready(&engine, &dead).await), (3, 2));
}

/// A dead-letter queue that another broker deletes is created again for the next dead letter, so that
/// no dead letter goes into a queue that does not exist.
#[tokio::test]
async fn a_deleted_dead_letter_queue_comes_back_with_the_next_dead_letter() {
    let engine = engine();
    let (queue, dead) = (named("q"), named("q.dead"));
    for _ in 0..2 {
        engine.push(&queue, vec![NewItem::default()], None).await.unwrap();
        let taken =
            engine.reserve(&queue, 1, Duration::ZERO, None, Identity::default()).await.unwrap();
        let rejected = RollbackRequest {
            receipt: taken[0].receipt.clone(),
            delay: None,
            reason: String::new(),
            cause: Cause::Reject,
        };
        assert_eq!(engine.rollback(vec![rejected]).await.unwrap(), [Outcome::DeadLettered]);
        let there = engine.get_queue(&dead).await.unwrap();
        assert_eq!(engine.store().depth(&there).await.unwrap().ready, 1);
        // Another broker does not know that the queue is in use, if that has only just been created.
        let links = engine.store().links().await.unwrap();
        engine.store().delete_queue(&there, true, links).await.unwrap();
        let signal = Signal::new(dead.clone(), Topic::Settings, None);
        engine.receive(&Notice::Signal(signal));
    }
}

/// Queues that are created at the same time do not make each other fail.
#[tokio::test]
async fn queues_are_created_side_by_side() {
    let engine = engine();
    let create = |n: usize| {
        let queue = Queue::with_defaults(named(&format!("q{n}")), Timestamp(0));
        let engine = Arc::clone(&engine);
        tokio::spawn(async move { engine.create_queue(queue, MAY_CREATE_ALL).await })
    };
    for created in (0..32).map(create).collect::<Vec<_>>() {
        created.await.unwrap().unwrap();
    }
}

fn engine() -> Arc<Engine> {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let signals = Arc::new(LocalSignals::new());
    Engine::new(Arc::new(store), signals, Arc::new(Metrics::new()), Limits::default())
}

/// Commits items as soon as they are ready.
async fn commit_without_end(engine: Arc<Engine>, queue: Arc<Queue>) {
    let demand = Demand {
        max_items: 1_000,
        max_bytes: usize::MAX,
        may_exceed: true,
        lease: Duration::from_secs(30),
        consumer: None,
        spare: false,
    };
    let mut reserver = engine.store().reserver(&queue.name);
    loop {
        let reserve = reserver.reserve(&queue, std::slice::from_ref(&demand), Appeared::Nothing);
        let reserved = reserve.await.unwrap();
        let held = reserved.deliveries.iter().map(|(_, delivery)| Reservation {
            queue: Arc::clone(&queue),
            receipt: delivery.receipt.clone(),
        });
        engine.store().commit(held.collect()).await.unwrap();
        tokio::task::yield_now().await;
    }
}

/// A replay over an open range ends although items are processed again meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_ends_though_items_are_processed_again_meanwhile() {
    const ITEMS: usize = 700;
    let engine = engine();
    let name = QueueName::parse("queue", "q").unwrap();
    let mut queue = Queue::with_defaults(name.clone(), Timestamp(0));
    queue.retention = Duration::from_hours(1);
    let queue = Arc::new(engine.create_queue(queue, MAY_CREATE_ALL).await.unwrap());
    engine.push(&name, vec![NewItem::default(); ITEMS], None).await.unwrap();
    let consumer = tokio::spawn(commit_without_end(Arc::clone(&engine), Arc::clone(&queue)));
    let processed = async || engine.store().depth(&queue).await.unwrap().processed;
    tokio::time::timeout(Duration::from_mins(1), async {
        while processed().await < ITEMS as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("processed items");
    tokio::time::sleep(Duration::from_millis(5)).await; // in a later millisecond than the last item
    let all = Selection::Processed { start: Timestamp(0), end: crate::domain::FOREVER };
    let replayed = tokio::time::timeout(Duration::from_mins(1), engine.replay_items(&name, all, 0));
    assert_eq!(replayed.await.expect("an end").unwrap(), ITEMS as u64);
    consumer.abort();
}
