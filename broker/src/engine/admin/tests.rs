//! Operator calls while consumers work.

use std::time::Duration;

use super::*;
use crate::{
    domain::{Clock, Demand, LimitReason, NewItem, Timestamp},
    engine::Limits,
    metrics::Metrics,
    signals::LocalSignals,
    store::{Appeared, Reservation, Rollback, RollbackTo, sqlite::SqliteStore},
};

/// Dead letters whose origin is now in another group stay in their queue, and do not block others.
#[tokio::test]
async fn a_redrive_skips_an_origin_in_another_group() {
    let engine = engine();
    let named = |name: &str| QueueName::parse("queue", name).unwrap();
    let (dead, demand) = (
        named("dead"),
        Demand {
            max_items: 1,
            max_bytes: usize::MAX,
            may_exceed: true,
            lease: Duration::from_secs(30),
            consumer: None,
        },
    );
    for origin in ["away", "here"].map(named) {
        let mut queue = Queue::with_defaults(origin.clone(), Timestamp(0));
        queue.dead_letter_queue = Some(dead.clone());
        let queue = Arc::new(engine.create_queue(queue).await.unwrap());
        engine.push(&origin, vec![NewItem::default()], None).await.unwrap();
        let demands = std::slice::from_ref(&demand);
        let mut reserver = engine.store().reserver(&origin);
        let reserved = reserver.reserve(&queue, demands, Appeared::Nothing).await.unwrap();
        let receipt = reserved.deliveries[0].1.receipt.clone();
        let reason = LimitReason::Rejected;
        let to = RollbackTo::DeadLetter { to: dead.clone(), failed_attempts: 1, reason };
        let rollback = Rollback { held: Reservation { queue, receipt }, to, reason: None };
        engine.store().rollback(vec![rollback]).await.unwrap();
    }
    engine.delete_queue(&named("away"), true).await.unwrap();
    let mut anew = Queue::with_defaults(named("away"), Timestamp(0));
    anew.group = GroupName::parse("group", "elsewhere").unwrap();
    engine.create_queue(anew).await.unwrap();

    let all = || RedriveFilter::default();
    assert_eq!(engine.redrive_items(&dead, None, all(), 0, 0).await.unwrap(), 1);
    let ready = async |name: &QueueName| {
        let queue = engine.get_queue(name).await.unwrap();
        engine.store().depth(&queue).await.unwrap().ready
    };
    assert_eq!((ready(&named("here")).await, ready(&dead).await), (1, 1));
    // A redrive that names such a queue is refused.
    let only = RedriveFilter { origin_queue: Some(named("away")), ..all() };
    let refused = engine.redrive_items(&dead, None, only, 0, 0).await.unwrap_err();
    assert!(matches!(refused, EngineError::DifferentGroup { .. }), "{refused}");
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
    let queue = Arc::new(engine.create_queue(queue).await.unwrap());
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
