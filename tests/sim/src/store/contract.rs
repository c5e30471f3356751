//! Implements the traits of a store.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sluicegate_broker::{
    domain::{
        Demand, Depth, IdMark, Item, ItemId, ItemState, OperationId, Outcome, Pushed, Queue,
        QueueName, Schedule, ScheduleChange, ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
    store::{
        Advance, Appeared, BrokerReport, BrokerReportStore, Capabilities, Claim, Created, Deleted,
        Extension, FiguresPlace, FiguresStore, ItemAdmin, ItemDeleted, ItemStore, KeptFigures,
        Links, Move, Operation, OperationPlace, OperationStore, Page, Purged, Push, QueueStore,
        ReceiptKeyStore, RedriveFilter, Redriven, Reservation, Reserved, Reserver, Result,
        Rollback, ScheduleStore, Selection, SettingsChanges, SettingsWatch, StatsStore, Store,
        StoredReceiptKey,
    },
};

use super::{Inner, Link, ModelStore, World, items};

#[async_trait]
impl<L: Link> Store for ModelStore<L> {
    fn describe(&self) -> String {
        "model".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { shared: true, durable: true, one_order: false }
    }

    fn now(&self) -> Timestamp {
        self.inner.link.now()
    }

    fn broker_id(&self) -> [u8; 4] {
        self.inner.broker
    }

    fn measure(&self, _metrics: &Arc<Metrics>) {}

    async fn ping(&self) -> Result<()> {
        self.inner.call("ping", |_, _| ()).await
    }
}

#[async_trait]
impl<L: Link> ItemStore for ModelStore<L> {
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>> {
        let in_order = self.inner.pushing.lock().await;
        self.inner.link.request("push").await?;
        let (pushed, claims) = self.inner.step(|world, now| world.push(&items, now));
        drop(in_order);
        let answered = self.inner.link.answer("push").await;
        if answered.is_err() && self.inner.link.is_alive() {
            let mut world = self.inner.shared.world.lock();
            for claim in claims {
                world.undo(claim);
            }
        }
        answered.map(|()| pushed)
    }

    fn mark(&self) -> IdMark {
        self.inner.step(|world, _| world.mark())
    }

    fn reserver(&self, queue: &QueueName) -> Box<dyn Reserver> {
        let key = (queue.clone(), self.inner.broker);
        *self.inner.shared.world.lock().reservers.entry(key).or_default() += 1;
        let (inner, queue) = (Arc::clone(&self.inner), queue.clone());
        Box::new(ModelReserver { inner, queue, unanswered: Vec::new() })
    }

    async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>> {
        let commit =
            |world: &mut World, now| items.iter().map(|held| world.commit(held, now)).collect();
        self.inner.call("commit", commit).await
    }

    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>> {
        let roll_back =
            |world: &mut World, now| items.iter().map(|item| world.roll_back(item, now)).collect();
        self.inner.call("rollback", roll_back).await
    }

    fn choose_id(&self) -> Option<ItemId> {
        Some(World::id(self.inner.step(|world, _| world.next_row())))
    }

    async fn extend(&self, items: Vec<Extension>) -> Result<Vec<Outcome>> {
        let asked = self.now();
        let extend = |world: &mut World, now| {
            items.iter().map(|item| world.extend(item, asked, now)).collect()
        };
        self.inner.call("extend", extend).await
    }

    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>> {
        let moved =
            |world: &mut World, now| items.iter().map(|item| world.move_item(item, now)).collect();
        self.inner.call("move_items", moved).await
    }

    async fn commit_and_push(
        &self,
        held: Reservation,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        let both = |world: &mut World, now| world.commit_and_push(&held, &items, now);
        self.inner.call("commit_and_push", both).await
    }

    async fn lease_ends(&self, items: Vec<Reservation>) -> Result<Vec<Option<Timestamp>>> {
        let ends = |world: &mut World, now| {
            items.iter().map(|held| world.lease_end(&held.receipt, now)).collect()
        };
        self.inner.call("lease_ends", ends).await
    }

    async fn unblocked(&self) -> Vec<QueueName> {
        self.inner.unblocked().await
    }
}

/// Reserves items. A claim whose answer did not arrive is undone before the next one, or at the
/// end, as a store must.
struct ModelReserver<L: Link> {
    inner: Arc<Inner<L>>,
    queue: QueueName,
    unanswered: Vec<items::Claim>,
}

#[async_trait]
impl<L: Link> Reserver for ModelReserver<L> {
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved> {
        let inner = Arc::clone(&self.inner);
        inner.link.request("reserve").await?;
        let reserved = inner.step(|world, now| {
            for claim in self.unanswered.drain(..) {
                world.undo(claim);
            }
            let named = appeared
                .item()
                .and_then(|id| world.reserve_named(queue, demands, inner.broker, id, now));
            let (reserved, claims) =
                named.unwrap_or_else(|| world.reserve(queue, demands, inner.broker, now));
            self.unanswered = claims;
            reserved
        });
        inner.link.answer("reserve").await?;
        self.unanswered.clear();
        Ok(reserved)
    }

    async fn next_eligible(
        &mut self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        let next = |world: &mut World, _| world.next_eligible(&queue.name, after);
        self.inner.call("next_eligible", next).await
    }
}

impl<L: Link> Drop for ModelReserver<L> {
    fn drop(&mut self) {
        let mut world = self.inner.shared.world.lock();
        let key = (self.queue.clone(), self.inner.broker);
        if let Some(count) = world.reservers.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                world.reservers.remove(&key);
            }
        }
        if self.inner.link.is_alive() {
            for claim in self.unanswered.drain(..) {
                world.undo(claim);
            }
        }
    }
}

#[async_trait]
impl<L: Link> ItemAdmin for ModelStore<L> {
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>> {
        let list = |world: &mut World, now| world.list(queue, state, cursor, limit, now);
        self.inner.call("list_items", list).await?
    }

    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>> {
        self.inner.call("get_item", |world, now| world.get_item(queue, id, now)).await
    }

    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted> {
        let delete = |world: &mut World, now| world.delete_item(queue, id, only_if, now);
        self.inner.call("delete_item", delete).await
    }

    async fn purge(&self, queue: &Queue) -> Result<u64> {
        self.inner.call("purge", |world, now| world.purge(&queue.name, false, now)).await
    }

    async fn purge_step(&self, queue: &Queue, created_by: Timestamp) -> Result<Purged> {
        let step = |world: &mut World, now| world.purge_step(&queue.name, created_by, now);
        self.inner.call("purge_step", step).await
    }

    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64> {
        self.inner.call("replay", |world, now| world.replay(queue, selection, limit, now)).await
    }

    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>> {
        self.inner.call("origins", |world, now| world.origins(&queue.name, now)).await
    }

    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        cursor: Option<&str>,
        limit: u64,
    ) -> Result<Redriven> {
        let redrive = |world: &mut World, now| world.redrive(queue, to, filter, cursor, limit, now);
        self.inner.call("redrive", redrive).await?
    }
}

#[async_trait]
impl<L: Link> QueueStore for ModelStore<L> {
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>> {
        self.inner.call("create_queue", |world, _| world.create_queue(queue)).await
    }

    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>> {
        self.inner.call("get_queue", |world, _| world.queues.get(name).cloned()).await
    }

    async fn get_queues(&self, names: &[QueueName]) -> Result<Vec<Queue>> {
        let get = |world: &mut World, _| {
            names.iter().filter_map(|name| world.queues.get(name).cloned()).collect()
        };
        self.inner.call("get_queues", get).await
    }

    async fn list_queues(
        &self,
        prefix: &str,
        after: Option<&QueueName>,
        limit: usize,
    ) -> Result<Vec<Queue>> {
        let list = |world: &mut World, _| {
            let behind = |queue: &&Queue| {
                queue.name.as_str().starts_with(prefix)
                    && after.is_none_or(|after| queue.name > *after)
            };
            world.queues.values().filter(behind).take(limit).cloned().collect()
        };
        self.inner.call("list_queues", list).await
    }

    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>> {
        self.inner.call("update_queue", |world, _| world.update_queue(queue)).await
    }

    async fn links(&self) -> Result<Links> {
        self.inner.call("links", |world, _| Links(world.links)).await
    }

    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>> {
        let sources = |world: &mut World, _| {
            let is_source = |queue: &&Queue| queue.dead_letter_queue.as_ref() == Some(name);
            world.queues.values().filter(is_source).take(100).cloned().collect()
        };
        self.inner.call("dead_letter_sources", sources).await
    }

    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>> {
        self.inner.call("link_queue", |world, _| world.link_queue(queue, links)).await
    }

    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted> {
        let delete = |world: &mut World, now| world.delete_queue(queue, force, links, now);
        self.inner.call("delete_queue", delete).await
    }

    fn watch_settings(&self) -> Box<dyn SettingsWatch> {
        Box::new(ModelWatch { inner: Arc::clone(&self.inner), seen: None })
    }
}

struct ModelWatch<L> {
    inner: Arc<Inner<L>>,
    /// How many changes were reported.
    seen: Option<usize>,
}

#[async_trait]
impl<L: Link> SettingsWatch for ModelWatch<L> {
    async fn changes(&mut self) -> Result<SettingsChanges> {
        let mut seen = self.seen;
        let changes =
            self.inner.call("settings_changes", |world, _| world.settings_since(&mut seen)).await?;
        self.seen = seen;
        Ok(changes)
    }
}

#[async_trait]
impl<L: Link> StatsStore for ModelStore<L> {
    async fn depth(&self, queue: &Queue) -> Result<Depth> {
        self.inner.call("depth", |world, now| world.depth(&queue.name, now)).await
    }

    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()> {
        self.inner.call("add_totals", |world, _| world.add_totals(changes)).await
    }

    async fn totals(&self, queue: &QueueName) -> Result<Totals> {
        let totals = |world: &mut World, _| world.totals.get(queue).copied().unwrap_or_default();
        self.inner.call("totals", totals).await
    }

    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>> {
        let all = |world: &mut World, _| {
            world.totals.iter().map(|(queue, totals)| (queue.clone(), *totals)).collect()
        };
        self.inner.call("all_totals", all).await
    }

    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool> {
        let broker = self.inner.broker;
        self.inner.call("lead", |world, now| world.lead(task, broker, lasting, now)).await
    }
}

#[async_trait]
impl<L: Link> ScheduleStore for ModelStore<L> {
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>> {
        self.inner.call("create_schedule", |world, _| world.create_schedule(schedule)).await
    }

    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>> {
        self.inner.call("get_schedule", |world, _| world.schedules.get(name).cloned()).await
    }

    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
        payloads: bool,
    ) -> Result<Vec<Schedule>> {
        let list = |world: &mut World, _| {
            let behind = |schedule: &&Schedule| after.is_none_or(|after| schedule.name > *after);
            let page = world.schedules.values().filter(behind).take(limit).cloned();
            let shown = |mut schedule: Schedule| {
                if !payloads {
                    schedule.item.payload.clear();
                }
                schedule
            };
            page.map(shown).collect()
        };
        self.inner.call("list_schedules", list).await
    }

    async fn update_schedule(
        &self,
        name: &ScheduleName,
        change: &ScheduleChange,
    ) -> Result<Option<Schedule>> {
        let update = |world: &mut World, _| {
            let schedule = world.schedules.get_mut(name)?;
            change.apply(schedule);
            Some(schedule.clone())
        };
        self.inner.call("update_schedule", update).await
    }

    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>> {
        let pause = |world: &mut World, _| world.pause_schedule(name, paused, done_until);
        self.inner.call("pause_schedule", pause).await
    }

    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()> {
        self.inner.call("tick_done", |world, _| world.tick_done(name, tick)).await
    }

    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool> {
        let delete = |world: &mut World, _| world.schedules.remove(name).is_some();
        self.inner.call("delete_schedule", delete).await
    }
}

#[async_trait]
impl<L: Link> ReceiptKeyStore for ModelStore<L> {
    async fn receipt_keys(&self) -> Result<Vec<StoredReceiptKey>> {
        let keys = |world: &mut World, _| world.receipt_keys.values().rev().cloned().collect();
        self.inner.call("receipt_keys", keys).await
    }

    async fn add_receipt_key(&self, key: &StoredReceiptKey) -> Result<()> {
        self.inner.call("add_receipt_key", |world, _| world.add_receipt_key(key)).await
    }
}

#[async_trait]
impl<L: Link> BrokerReportStore for ModelStore<L> {
    async fn report_broker(&self, report: &BrokerReport, lasting: Duration) -> Result<()> {
        let report = |world: &mut World, now| world.report_broker(report, lasting, now);
        self.inner.call("report_broker", report).await
    }

    async fn broker_reports(&self) -> Result<Vec<BrokerReport>> {
        self.inner.call("broker_reports", World::broker_reports).await
    }
}

#[async_trait]
impl<L: Link> OperationStore for ModelStore<L> {
    async fn create_operation(&self, operation: &Operation) -> Result<Created<Operation>> {
        self.inner.call("create_operation", |world, _| world.operations.create(operation)).await
    }

    async fn get_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.inner.call("get_operation", |world, _| world.operations.get(id)).await
    }

    async fn list_operations(
        &self,
        after: Option<OperationPlace>,
        limit: usize,
    ) -> Result<Vec<Operation>> {
        self.inner.call("list_operations", |world, _| world.operations.list(after, limit)).await
    }

    async fn running_operations(&self) -> Result<u64> {
        self.inner.call("running_operations", |world, _| world.operations.running()).await
    }

    async fn claim_operation(&self, claim: Claim, lasting: Duration) -> Result<Option<Operation>> {
        let take = |world: &mut World, now| world.operations.claim(claim, lasting, now);
        self.inner.call("claim_operation", take).await
    }

    async fn advance_operation(
        &self,
        id: OperationId,
        claim: Claim,
        advance: &Advance,
        lasting: Duration,
    ) -> Result<Option<Operation>> {
        let note =
            |world: &mut World, now| world.operations.advance(id, claim, advance, lasting, now);
        self.inner.call("advance_operation", note).await
    }

    async fn cancel_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.inner.call("cancel_operation", |world, now| world.operations.cancel(id, now)).await
    }

    async fn delete_operations(&self, ended_before: Timestamp, keep: usize) -> Result<()> {
        let delete = |world: &mut World, _| world.operations.delete(ended_before, keep);
        self.inner.call("delete_operations", delete).await
    }
}

#[async_trait]
impl<L: Link> FiguresStore for ModelStore<L> {
    async fn keep_figures(&self, figures: &KeptFigures, lasting: Duration) -> Result<()> {
        let keep = |world: &mut World, _| world.keep_figures(figures, lasting);
        self.inner.call("keep_figures", keep).await
    }

    async fn kept_figures(
        &self,
        after: Option<FiguresPlace>,
        limit: usize,
    ) -> Result<Vec<KeptFigures>> {
        let kept = |world: &mut World, now| world.kept_figures(after, limit, now);
        self.inner.call("kept_figures", kept).await
    }
}
