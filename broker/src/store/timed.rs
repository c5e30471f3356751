//! A [`Store`] that notes how long each call of another one takes, and whether it failed.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;

use super::{
    Created, Deleted, Held, ItemDeleted, Links, Move, Page, Push, RedriveFilter, Reserved, Result,
    Rollback, Selection, SettingsChanges, SettingsMark, Store,
};
use crate::{
    domain::{
        Depth, Item, ItemId, ItemState, Outcome, Pushed, Queue, QueueName, Schedule, ScheduleName,
        Timestamp, Totals, Want,
    },
    metrics::Metrics,
};

/// A store whose calls are measured. A call that its caller gives up is not counted. Reserves also tell how long
/// their items have waited.
pub struct Timed {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
}

impl Timed {
    /// Measures the calls of `store`.
    pub fn new(store: Arc<dyn Store>, metrics: Arc<Metrics>) -> Self {
        store.measure(&metrics);
        Self { store, metrics }
    }

    async fn time<T>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let start = Instant::now();
        let answer = answer.await;
        self.metrics.store_call(call, start.elapsed(), answer.is_err());
        answer
    }
}

/// Implements the trait: each method listed is passed on and measured under its name.
macro_rules! pass_on {
    ($(async fn $call:ident(&self $(, $argument:ident: $type:ty)*) -> $answer:ty;)*) => {
        #[async_trait]
        impl Store for Timed {
            fn describe(&self) -> String {
                self.store.describe()
            }

            fn now(&self) -> Timestamp {
                self.store.now()
            }

            fn broker_id(&self) -> [u8; 4] {
                self.store.broker_id()
            }

            fn measure(&self, metrics: &Arc<Metrics>) {
                self.store.measure(metrics);
            }

            fn look_again(&self, queue: &QueueName, since: Option<Timestamp>) {
                self.store.look_again(queue, since);
            }

            async fn reserve(&self, queue: &Arc<Queue>, wants: &[Want]) -> Result<Reserved> {
                let reserved = self.time("reserve", self.store.reserve(queue, wants)).await?;
                let since =
                    reserved.deliveries.iter().map(|(_, delivery)| delivery.previous_eligible_time);
                let now = self.store.now();
                self.metrics.delivery_delays(&queue.name, since.map(|since| since.until(now)));
                Ok(reserved)
            }

            /// Not measured: it waits for something to happen.
            async fn unblocked(&self) -> Vec<QueueName> {
                self.store.unblocked().await
            }

            $(async fn $call(&self $(, $argument: $type)*) -> $answer {
                self.time(stringify!($call), self.store.$call($($argument),*)).await
            })*
        }
    };
}

pass_on! {
    async fn ping(&self) -> Result<()>;
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>>;
    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>>;
    async fn list_queues(&self, after: Option<&QueueName>, limit: usize) -> Result<Vec<Queue>>;
    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>>;
    async fn links(&self) -> Result<Links>;
    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>>;
    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>>;
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted>;
    async fn settings_changes(&self, mark: &mut SettingsMark) -> Result<SettingsChanges>;
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>>;
    async fn next_eligible(&self, queue: &Queue, after: Timestamp) -> Result<Option<Timestamp>>;
    async fn commit(&self, items: Vec<Held>) -> Result<Vec<Outcome>>;
    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>>;
    async fn extend(&self, items: Vec<Held>, until: Vec<Timestamp>) -> Result<Vec<Outcome>>;
    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>>;
    async fn commit_and_push(
        &self,
        held: Held,
        items: Vec<Push>
    ) -> Result<(Outcome, Vec<Pushed>)>;
    async fn holds(&self, items: Vec<Held>) -> Result<Vec<bool>>;
    async fn repair(&self, queue: &Queue) -> Result<u64>;
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize
    ) -> Result<Page<Item>>;
    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>>;
    async fn delete_item(&self, queue: &Queue, id: ItemId, only_if: Option<ItemState>) -> Result<ItemDeleted>;
    async fn purge(&self, queue: &Queue) -> Result<u64>;
    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64>;
    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>>;
    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        limit: u64
    ) -> Result<u64>;
    async fn depth(&self, queue: &Queue) -> Result<Depth>;
    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()>;
    async fn totals(&self, queue: &QueueName) -> Result<Totals>;
    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>>;
    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool>;
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>>;
    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>>;
    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize
    ) -> Result<Vec<Schedule>>;
    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp
    ) -> Result<Option<Schedule>>;
    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()>;
    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{domain::Clock, store::sqlite::SqliteStore};

    #[tokio::test]
    async fn every_call_is_measured_under_its_name() {
        let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
        let metrics = Arc::new(Metrics::new());
        let timed = Timed::new(Arc::new(store), Arc::clone(&metrics));
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
