//! A store that records how long each call of another store takes, and whether the call failed.

use std::{future::Future, sync::Arc, time::Instant};

use super::{
    Reserved, Result, Store,
    decorator::{Around, Decorated},
};
use crate::{
    domain::{QueueName, Timestamp},
    metrics::Metrics,
};

/// Measures the calls of `store`. A call whose future is dropped is not counted. Reserves also
/// record how long their items have waited.
pub fn timed(store: Arc<dyn Store>, metrics: Arc<Metrics>) -> Arc<dyn Store> {
    store.measure(&metrics);
    Arc::new(Decorated { store, around: Arc::new(Timing { metrics }) })
}

struct Timing {
    metrics: Arc<Metrics>,
}

impl Around for Timing {
    async fn around<T: Send>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let start = Instant::now();
        let answer = answer.await;
        self.metrics.store_call(call, start.elapsed(), answer.is_err());
        answer
    }

    fn reserved(&self, queue: &QueueName, reserved: &Reserved, now: Timestamp) {
        let since = reserved.deliveries.iter().map(|(_, delivery)| delivery.previous_eligible_time);
        self.metrics.delivery_delays(queue, since.map(|since| since.until(now)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        domain::{Clock, Queue},
        store::sqlite::SqliteStore,
    };

    #[tokio::test]
    async fn every_call_is_measured_under_its_name() {
        let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
        let metrics = Arc::new(Metrics::new());
        let timed = timed(Arc::new(store), Arc::clone(&metrics));
        timed.ping().await.unwrap();
        timed.ping().await.unwrap();
        timed.links().await.unwrap();
        let queue = Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), timed.now());
        timed.list_items(&queue, None, Some("no cursor"), 1).await.unwrap_err();
        let page = metrics.encode().unwrap();
        for line in [
            "sluicegate_store_call_duration_seconds_count{call=\"ping\"} 2",
            "sluicegate_store_call_duration_seconds_count{call=\"links\"} 1",
            "sluicegate_store_call_duration_seconds_count{call=\"list_items\"} 1",
            "sluicegate_store_errors_total{call=\"list_items\"} 1",
        ] {
            assert!(page.lines().any(|shown| shown == line), "{line} in {page}");
        }
        assert!(!page.contains("sluicegate_store_errors_total{call=\"ping\"}"), "{page}");
    }
}
