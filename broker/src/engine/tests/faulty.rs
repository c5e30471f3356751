//! A store whose calls can be held up and made to fail, before or after they take effect.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;

#[allow(clippy::wildcard_imports)] // all that the trait speaks of
use crate::{
    domain::*,
    metrics::Metrics,
    store::{sqlite::SqliteStore, *},
};

/// What happens to calls of one method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Fault {
    #[default]
    None,
    /// They take effect, and are answered when the fault is gone.
    HeldAfter,
    /// They do not take effect before the fault is gone.
    HeldBefore,
    /// They fail and have no effect.
    Fails,
}

/// The store under all of it.
pub(super) struct Faulty {
    inner: SqliteStore,
    faults: watch::Sender<HashMap<&'static str, Fault>>,
    /// How many calls of each method were begun, and how many of them have taken effect.
    calls: Mutex<HashMap<&'static str, (usize, usize)>>,
    seen: watch::Sender<()>,
}

impl Faulty {
    pub(super) fn new(clock: Arc<Clock>) -> Self {
        Self {
            inner: SqliteStore::open("sqlite::memory:", clock).unwrap(),
            faults: watch::Sender::default(),
            calls: Mutex::default(),
            seen: watch::Sender::default(),
        }
    }

    /// From now on.
    pub(super) fn set(&self, call: &'static str, fault: Fault) {
        self.faults.send_modify(|faults| _ = faults.insert(call, fault));
    }

    /// How many calls of a method were begun.
    pub(super) fn begun(&self, call: &'static str) -> usize {
        self.calls.lock().get(call).map_or(0, |calls| calls.0)
    }

    /// Waits until so many calls of a method were begun.
    pub(super) async fn until_begun(&self, call: &'static str, count: usize) {
        self.until(|| self.begun(call) >= count).await;
    }

    /// Waits until so many calls of a method have taken effect.
    pub(super) async fn until_done(&self, call: &'static str, count: usize) {
        self.until(|| self.calls.lock().get(call).is_some_and(|calls| calls.1 >= count)).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        let mut seen = self.seen.subscribe();
        let waiting = async {
            while !is_so() {
                seen.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_mins(1), waiting).await.expect("the call comes");
    }

    fn fault(&self, call: &'static str) -> Fault {
        self.faults.borrow().get(call).copied().unwrap_or_default()
    }

    async fn gone(&self, call: &'static str, fault: Fault) {
        let mut faults = self.faults.subscribe();
        let is_gone = |faults: &HashMap<_, _>| faults.get(call).copied() != Some(fault);
        faults.wait_for(is_gone).await.unwrap();
    }

    async fn around<T>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        self.calls.lock().entry(call).or_default().0 += 1;
        self.seen.send_replace(());
        self.gone(call, Fault::HeldBefore).await;
        if self.fault(call) == Fault::Fails {
            return Err(StoreError::Unavailable {
                reason: "as the test asks".into(),
                source: None,
            });
        }
        let answer = answer.await;
        self.calls.lock().entry(call).or_default().1 += 1;
        self.seen.send_replace(());
        self.gone(call, Fault::HeldAfter).await;
        answer
    }
}

#[async_trait]
impl Store for Faulty {
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
    fn broker_id(&self) -> [u8; 4] {
        self.inner.broker_id()
    }
    fn measure(&self, metrics: &Arc<Metrics>) {
        self.inner.measure(metrics);
    }
    async fn ping(&self) -> Result<()> {
        self.inner.ping().await
    }
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>> {
        self.inner.create_queue(queue).await
    }
    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>> {
        self.inner.get_queue(name).await
    }
    async fn list_queues(&self, after: Option<&QueueName>, limit: usize) -> Result<Vec<Queue>> {
        self.inner.list_queues(after, limit).await
    }
    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>> {
        self.inner.update_queue(queue).await
    }
    async fn links(&self) -> Result<Links> {
        self.inner.links().await
    }
    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>> {
        self.inner.dead_letter_sources(name).await
    }
    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>> {
        self.inner.link_queue(queue, links).await
    }
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted> {
        self.inner.delete_queue(queue, force, links).await
    }
    async fn settings_changes(&self, mark: &mut SettingsMark) -> Result<SettingsChanges> {
        self.inner.settings_changes(mark).await
    }
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>> {
        self.inner.push(items).await
    }
    async fn reserve(&self, queue: &Arc<Queue>, wants: &[Want]) -> Result<Reserved> {
        self.around("reserve", self.inner.reserve(queue, wants)).await
    }
    async fn next_eligible(&self, queue: &Queue, after: Timestamp) -> Result<Option<Timestamp>> {
        self.inner.next_eligible(queue, after).await
    }
    fn look_again(&self, queue: &QueueName, since: Option<Timestamp>) {
        self.inner.look_again(queue, since);
    }
    async fn commit(&self, items: Vec<Held>) -> Result<Vec<Outcome>> {
        self.around("commit", self.inner.commit(items)).await
    }
    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>> {
        self.around("rollback", self.inner.rollback(items)).await
    }
    async fn extend(&self, items: Vec<Held>, until: Vec<Timestamp>) -> Result<Vec<Outcome>> {
        self.inner.extend(items, until).await
    }
    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>> {
        self.inner.move_items(items).await
    }
    async fn commit_and_push(
        &self,
        held: Held,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        self.inner.commit_and_push(held, items).await
    }
    async fn holds(&self, items: Vec<Held>) -> Result<Vec<bool>> {
        self.around("holds", self.inner.holds(items)).await
    }
    async fn repair(&self, queue: &Queue) -> Result<u64> {
        self.inner.repair(queue).await
    }
    async fn unblocked(&self) -> Vec<QueueName> {
        self.inner.unblocked().await
    }
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>> {
        self.inner.list_items(queue, state, cursor, limit).await
    }
    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>> {
        self.inner.get_item(queue, id).await
    }
    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted> {
        self.inner.delete_item(queue, id, only_if).await
    }
    async fn purge(&self, queue: &Queue) -> Result<u64> {
        self.inner.purge(queue).await
    }
    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64> {
        self.inner.replay(queue, selection, limit).await
    }
    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>> {
        self.inner.origins(queue).await
    }
    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        limit: u64,
    ) -> Result<u64> {
        self.inner.redrive(queue, to, filter, limit).await
    }
    async fn depth(&self, queue: &Queue) -> Result<Depth> {
        self.inner.depth(queue).await
    }
    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()> {
        self.inner.add_totals(changes).await
    }
    async fn totals(&self, queue: &QueueName) -> Result<Totals> {
        self.inner.totals(queue).await
    }
    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>> {
        self.inner.all_totals().await
    }
    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool> {
        self.inner.lead(task, lasting).await
    }
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>> {
        self.inner.create_schedule(schedule).await
    }
    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>> {
        self.inner.get_schedule(name).await
    }
    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
    ) -> Result<Vec<Schedule>> {
        self.inner.list_schedules(after, limit).await
    }
    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>> {
        self.inner.pause_schedule(name, paused, done_until).await
    }
    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()> {
        self.inner.tick_done(name, tick).await
    }
    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool> {
        self.inner.delete_schedule(name).await
    }
}
