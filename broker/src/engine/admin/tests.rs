//! What operators do while others work.

use std::time::Duration;

use super::*;
use crate::{
    domain::{Clock, NewItem, Timestamp, Want},
    engine::Limits,
    metrics::Metrics,
    signals::LocalSignals,
    store::{Held, sqlite::SqliteStore},
};

fn engine() -> Arc<Engine> {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let signals = Arc::new(LocalSignals::new());
    Engine::new(Arc::new(store), signals, Arc::new(Metrics::new()), Limits::default())
}

/// Commits whatever is ready, at once.
async fn commit_without_end(engine: Arc<Engine>, queue: Arc<Queue>) {
    let want = Want {
        max_items: 1_000,
        max_bytes: usize::MAX,
        may_exceed: true,
        lease: Duration::from_secs(30),
        consumer: None,
    };
    loop {
        let reserved = engine.store().reserve(&queue, std::slice::from_ref(&want)).await.unwrap();
        let held = reserved.deliveries.iter().map(|(_, delivery)| Held {
            queue: Arc::clone(&queue),
            receipt: delivery.receipt.clone(),
        });
        engine.store().commit(held.collect()).await.unwrap();
        tokio::task::yield_now().await;
    }
}

/// A replay over an open range ends, though items are processed again meanwhile.
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
    tokio::time::sleep(Duration::from_millis(5)).await; // in another millisecond than the last
    let all = Selection::Processed { start: Timestamp(0), end: crate::domain::FOREVER };
    let replayed = tokio::time::timeout(Duration::from_mins(1), engine.replay_items(&name, all, 0));
    assert_eq!(replayed.await.expect("an end").unwrap(), ITEMS as u64);
    consumer.abort();
}
