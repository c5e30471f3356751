//! Figures as they are told, over a real store.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::{
    domain::{Clock, NewItem},
    engine::Limits,
    signals::LocalSignals,
    store::sqlite::SqliteStore,
};

fn engine() -> (Arc<Engine>, Arc<Metrics>) {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let metrics = Arc::new(Metrics::new());
    let signals = Arc::new(LocalSignals::new());
    (Engine::new(Arc::new(store), signals, Arc::clone(&metrics), Limits::default()), metrics)
}

fn name(name: &str) -> QueueName {
    QueueName::parse("queue", name).unwrap()
}

/// Totals never go back and never run ahead, however often they are written meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_never_go_back_while_they_are_flushed() {
    let (engine, _) = engine();
    let (queue, pushes) = (name("q"), 300);
    let done = Arc::new(AtomicBool::new(false));
    engine.push(&queue, vec![NewItem::default()], None).await.unwrap();
    let flushing = tokio::spawn({
        let (engine, done) = (Arc::clone(&engine), Arc::clone(&done));
        async move {
            while !done.load(Ordering::Relaxed) {
                engine.flush_totals().await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    });
    let reading = tokio::spawn({
        let (engine, done, queue) = (Arc::clone(&engine), Arc::clone(&done), queue.clone());
        async move {
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let pushed = engine.queue_stats(&queue).await.unwrap().totals.pushed;
                assert!(pushed >= last && pushed <= pushes + 1, "{pushed} after {last}");
                last = pushed;
            }
        }
    });
    for _ in 0..pushes {
        engine.push(&queue, vec![NewItem::default()], None).await.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    flushing.await.unwrap();
    reading.await.unwrap();
    assert_eq!(engine.queue_stats(&queue).await.unwrap().totals.pushed, pushes + 1);
}
