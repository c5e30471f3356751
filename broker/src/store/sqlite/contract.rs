//! Implements the traits of a store for [`SqliteStore`], but for operations and templates, which are in `operations` and `templates`. Each method calls the operation in the module of its subject,
//! which the writer or a reader runs.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    domain::{
        Demand, Depth, IdMark, Item, ItemId, ItemState, Outcome, Pushed, Queue, QueueName,
        Schedule, ScheduleChange, ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
    store::{
        Appeared, BrokerReport, BrokerReportStore, Capabilities, Created, Deleted, Extension,
        FiguresPlace, FiguresStore, ItemAdmin, ItemDeleted, ItemStore, KeptFigures, Links, Move,
        Page, Purged, Push, QueueStore, ReceiptKeyStore, RedriveFilter, Redriven, Reservation,
        Reserved, Reserver, Result, Rollback, ScheduleStore, Selection, SettingsChanges,
        SettingsWatch, StatsStore, Store, StoreError, StoredReceiptKey,
        sqlite::{
            Inner, SqliteStore,
            admin::{self, Before, CHUNK, Purge, Reached},
            browse::{self, Position},
            figures, push, queues, receipt_keys, reserve, schedules, settle,
            tx::{Tx, View},
            writer::Kind,
        },
    },
};

/// Number of passes after which a queue that is pushed to faster than it is emptied is deleted with everything in it.
const MAX_PASSES: u32 = 8;

#[async_trait]
impl Store for SqliteStore {
    fn describe(&self) -> String {
        self.inner.description.clone()
    }

    /// A file has one broker.
    fn capabilities(&self) -> Capabilities {
        Capabilities { shared: false, durable: self.inner.readers.is_some(), one_order: true }
    }

    fn now(&self) -> Timestamp {
        self.inner.clock.now_by_machine()
    }

    fn broker_id(&self) -> [u8; 4] {
        self.inner.broker
    }

    fn measure(&self, metrics: &Arc<Metrics>) {
        self.inner.writer.measure(metrics);
    }

    async fn ping(&self) -> Result<()> {
        self.inner
            .write(|tx| {
                tx.conn
                    .prepare_cached("UPDATE meta SET value = ?1 WHERE key = 'pinged'")?
                    .execute([tx.now.0])
                    .map(drop)
            })
            .await
    }
}

fn bytes_of(items: &[Push]) -> usize {
    items.iter().map(|push| push.item.size().message).sum()
}

#[async_trait]
impl ItemStore for SqliteStore {
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>> {
        let Some(queue) = items.first().map(|push| push.queue.name.clone()) else {
            return Ok(Vec::new());
        };
        let kind = Kind::Push { queue, items: items.len(), bytes: bytes_of(&items) };
        let late = Arc::clone(&self.inner.late);
        let work = move |tx: &Tx<'_>| {
            late.ensure(tx, items.iter().map(|push| &*push.queue))?;
            push::push(tx, &items)
        };
        self.inner.writer.call(kind, work).await
    }

    fn mark(&self) -> IdMark {
        IdMark::behind(self.inner.writer.last_id())
    }

    fn reserver(&self, _queue: &QueueName) -> Box<dyn Reserver> {
        Box::new(SqliteReserver { inner: Arc::clone(&self.inner) })
    }

    async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>> {
        let kind = Kind::Commit(items.len());
        self.inner.writer.call(kind, move |tx| settle::commit(tx, &items)).await
    }

    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>> {
        let kind = Kind::Settle(items.len());
        let work =
            move |tx: &Tx<'_>| items.iter().map(|item| settle::roll_back(tx, item)).collect();
        self.inner.writer.call(kind, work).await
    }

    async fn extend(&self, items: Vec<Extension>) -> Result<Vec<Outcome>> {
        let kind = Kind::Settle(items.len());
        let work = move |tx: &Tx<'_>| items.iter().map(|item| settle::extend(tx, item)).collect();
        self.inner.writer.call(kind, work).await
    }

    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>> {
        let (kind, late) = (Kind::Settle(items.len()), Arc::clone(&self.inner.late));
        let work = move |tx: &Tx<'_>| {
            late.ensure(tx, items.iter().map(|item| &*item.to))?;
            items.iter().map(|item| settle::move_item(tx, item)).collect()
        };
        self.inner.writer.call(kind, work).await
    }

    async fn commit_and_push(
        &self,
        held: Reservation,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        let kind = Kind::SettleAndPush { bytes: bytes_of(&items) };
        let late = Arc::clone(&self.inner.late);
        let work = move |tx: &Tx<'_>| {
            late.ensure(tx, items.iter().map(|push| &*push.queue))?;
            settle::commit_and_push(tx, &held, &items)
        };
        self.inner.writer.call(kind, work).await
    }

    async fn lease_ends(&self, items: Vec<Reservation>) -> Result<Vec<Option<Timestamp>>> {
        self.inner
            .read_items(move |view| {
                items.iter().map(|held| settle::lease_end(view, &held.receipt)).collect()
            })
            .await
    }

    async fn unblocked(&self) -> Vec<QueueName> {
        self.inner.writer.unblocked.take().await
    }
}

#[async_trait]
impl ItemAdmin for SqliteStore {
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>> {
        let position = match cursor {
            Some(cursor) => Position::decode(cursor, state).ok_or(StoreError::BadCursor)?,
            None => Position::start(state),
        };
        let queue = queue.clone();
        let _page = self.inner.pages.acquire().await; // never closed
        self.inner.read_items(move |view| browse::list(view, &queue, state, position, limit)).await
    }

    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>> {
        let queue = queue.clone();
        self.inner.read_items(move |view| browse::get(view, &queue, id)).await
    }

    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted> {
        let queue = queue.clone();
        self.inner.write_items(move |tx| admin::delete_item(tx, &queue, id, only_if)).await
    }

    async fn purge(&self, queue: &Queue) -> Result<u64> {
        self.inner.purge_all(queue, Purge::Unreserved).await
    }

    async fn purge_step(&self, queue: &Queue, created_by: Timestamp) -> Result<Purged> {
        let (queue, before) = (queue.clone(), Before::created(created_by));
        let step = move |tx: &Tx<'_>| admin::purge_chunk(tx, &queue, before, Purge::Unreserved);
        let (deleted, items) = self.inner.write_items(step).await?;
        Ok(Purged { items, more: deleted > 0 })
    }

    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64> {
        let mut total = 0;
        loop {
            let (queue, selection) = (queue.clone(), selection.clone());
            let chunk = (limit - total).min(CHUNK as u64);
            let replayed = self
                .inner
                .write_items(move |tx| admin::replay_chunk(tx, &queue, &selection, chunk as usize))
                .await?;
            total += replayed;
            if replayed < chunk || total >= limit {
                return Ok(total);
            }
        }
    }

    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>> {
        let queue = queue.clone();
        self.inner.read_items(move |view| admin::origins(view, &queue)).await
    }

    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        cursor: Option<&str>,
        limit: u64,
    ) -> Result<Redriven> {
        let mut from = match cursor {
            Some(cursor) => Reached::decode(cursor).ok_or(StoreError::BadCursor)?,
            None => Reached::START,
        };
        let mut items = 0;
        while items < limit {
            let (queue, to, filter) = (queue.clone(), to.clone(), filter.clone());
            let (left, late) = (limit - items, Arc::clone(&self.inner.late));
            let (moved, reached) = self
                .inner
                .write_items(move |tx| {
                    late.ensure(tx, std::iter::once(&*to))?;
                    admin::redrive_chunk(tx, &queue, &to, &filter, left, from)
                })
                .await?;
            items += moved;
            match reached {
                Some(reached) => from = reached,
                None => return Ok(Redriven { items, next: None }),
            }
        }
        Ok(Redriven { items, next: Some(from.encode()) })
    }
}

#[async_trait]
impl QueueStore for SqliteStore {
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>> {
        let queue = queue.clone();
        self.inner.write(move |tx| queues::create(tx, queue)).await
    }

    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>> {
        let name = name.clone();
        self.inner.read(move |view| queues::get(view, &name)).await
    }

    async fn get_queues(&self, names: &[QueueName]) -> Result<Vec<Queue>> {
        let names = names.to_vec();
        let read = move |view: &View<'_>| {
            names.iter().filter_map(|name| queues::get(view, name).transpose()).collect()
        };
        self.inner.read(read).await
    }

    async fn list_queues(
        &self,
        prefix: &str,
        after: Option<&QueueName>,
        limit: usize,
    ) -> Result<Vec<Queue>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.inner.read(move |view| queues::list(view, &prefix, after.as_ref(), limit)).await
    }

    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>> {
        let queue = queue.clone();
        self.inner.write(move |tx| queues::update(tx, queue)).await
    }

    async fn links(&self) -> Result<Links> {
        self.inner.read(queues::links).await
    }

    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>> {
        let name = name.clone();
        self.inner.read(move |view| queues::dead_letter_sources(view, &name)).await
    }

    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>> {
        let (queue, deletions) = (queue.clone(), Arc::clone(&self.inner.deletions));
        self.inner
            .write(move |tx| {
                let target = queue.dead_letter_target();
                if target.is_some_and(|target| deletions.includes(&target)) {
                    return Ok(None);
                }
                queues::link(tx, queue, links)
            })
            .await
    }

    /// Deletes in steps, so that other calls are served in between. A broker that ends on the way leaves a queue with
    /// fewer items.
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted> {
        let mut total = 0;
        let mut passes = 0;
        let _under_way = if force {
            let (queue, deletions) = (queue.clone(), Arc::clone(&self.inner.deletions));
            let begin = move |tx: &Tx<'_>| {
                let current = queues::is_current(tx, &queue, links)?;
                Ok(if current { deletions.begin(&queue.name) } else { None })
            };
            match self.inner.write(begin).await? {
                Some(deletion) => Some(deletion),
                None => return Ok(Deleted::Overtaken),
            }
        } else {
            None
        };
        loop {
            if force {
                total += self.inner.purge_all(queue, Purge::Everything).await?;
                self.inner.forget_all(queue).await?;
                passes += 1;
            }
            // Items that arrived during a pass are left to the next pass, which is shorter, unless pushes outrun it.
            let all = passes == MAX_PASSES;
            let (queue, late_arrivals) = (queue.clone(), Arc::clone(&self.inner.late));
            let step = self
                .inner
                .write_items(move |tx| {
                    // With force, what the caller read counts at the first step.
                    let current = if force {
                        queues::get(tx, &queue.name)?.is_some()
                    } else {
                        queues::is_current(tx, &queue, links)?
                    };
                    if !current {
                        return Ok(Err(Deleted::Overtaken));
                    }
                    if !force && admin::holds_items(tx, &queue)? {
                        return Ok(Err(Deleted::NotEmpty));
                    }
                    let step = admin::delete_queue(tx, &queue, all)?;
                    late_arrivals.queue_deleted();
                    Ok(Ok(step))
                })
                .await?;
            match step {
                Err(refused) => return Ok(refused),
                Ok((late, done)) => {
                    total += late;
                    if done {
                        return Ok(Deleted::Done(total));
                    }
                }
            }
        }
    }

    fn watch_settings(&self) -> Box<dyn SettingsWatch> {
        Box::new(SqliteSettingsWatch { inner: Arc::clone(&self.inner), seen: None })
    }
}

#[async_trait]
impl StatsStore for SqliteStore {
    async fn depth(&self, queue: &Queue) -> Result<Depth> {
        let queue = queue.clone();
        self.inner.read_items(move |view| browse::depth(view, &queue)).await
    }

    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()> {
        self.inner.write(move |tx| queues::add_totals(tx, &changes)).await
    }

    async fn totals(&self, queue: &QueueName) -> Result<Totals> {
        let queue = queue.clone();
        self.inner.read(move |view| queues::totals(view, &queue)).await
    }

    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>> {
        self.inner.read(queues::all_totals).await
    }

    /// A file has one broker.
    async fn lead(&self, _task: &'static str, _lasting: Duration) -> Result<bool> {
        Ok(true)
    }
}

#[async_trait]
impl ScheduleStore for SqliteStore {
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>> {
        let schedule = schedule.clone();
        self.inner.write(move |tx| schedules::create(tx, schedule)).await
    }

    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>> {
        let name = name.clone();
        self.inner.read(move |view| schedules::get(view, &name)).await
    }

    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
        payloads: bool,
    ) -> Result<Vec<Schedule>> {
        let after = after.cloned();
        self.inner.read(move |view| schedules::list(view, after.as_ref(), limit, payloads)).await
    }

    async fn update_schedule(
        &self,
        name: &ScheduleName,
        change: &ScheduleChange,
    ) -> Result<Option<Schedule>> {
        let (name, change) = (name.clone(), change.clone());
        self.inner.write(move |tx| schedules::update(tx, &name, &change)).await
    }

    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>> {
        let name = name.clone();
        self.inner.write(move |tx| schedules::pause(tx, &name, paused, done_until)).await
    }

    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()> {
        let name = name.clone();
        self.inner.write(move |tx| schedules::tick_done(tx, &name, tick)).await
    }

    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool> {
        let name = name.clone();
        self.inner.write(move |tx| schedules::delete(tx, &name)).await
    }
}

/// A file has one broker, which knows itself.
#[async_trait]
impl BrokerReportStore for SqliteStore {
    async fn report_broker(&self, _report: &BrokerReport, _lasting: Duration) -> Result<()> {
        Ok(())
    }

    async fn broker_reports(&self) -> Result<Vec<BrokerReport>> {
        Ok(Vec::new())
    }
}

/// Reserves items. Each scan starts at the start of the index, which costs nothing here. The transaction that ends an
/// item unblocks the next one of its key, and the writer sweeps the whole file. So a reserver has nothing to remember
/// of a queue.
struct SqliteReserver {
    inner: Arc<Inner>,
}

#[async_trait]
impl Reserver for SqliteReserver {
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        _appeared: Appeared,
    ) -> Result<Reserved> {
        let (queue, demands, broker) = (queue.clone(), demands.to_vec(), self.inner.broker);
        let work = move |tx: &Tx<'_>| reserve::reserve(tx, &queue, &demands, broker);
        self.inner.writer.call(Kind::Reserve, work).await
    }

    async fn next_eligible(
        &mut self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        let queue = queue.clone();
        self.inner.read_ahead(move |view| browse::next_eligible(view, &queue, after)).await
    }
}

/// Watches settings, which change through this broker alone. The broker knows its own changes.
struct SqliteSettingsWatch {
    inner: Arc<Inner>,
    /// The links as of the last call. Each change of settings changes them.
    seen: Option<Links>,
}

#[async_trait]
impl SettingsWatch for SqliteSettingsWatch {
    async fn changes(&mut self) -> Result<SettingsChanges> {
        let links = self.inner.read(queues::links).await?;
        let known = self.seen.replace(links) == Some(links);
        Ok(if known { SettingsChanges::Of(Vec::new()) } else { SettingsChanges::Unknown })
    }
}

#[async_trait]
impl ReceiptKeyStore for SqliteStore {
    async fn receipt_keys(&self) -> Result<Vec<StoredReceiptKey>> {
        self.inner.read(receipt_keys::list).await
    }

    async fn add_receipt_key(&self, key: &StoredReceiptKey) -> Result<()> {
        let key = key.clone();
        self.inner.write(move |tx| receipt_keys::add(tx, &key)).await
    }
}

#[async_trait]
impl FiguresStore for SqliteStore {
    async fn keep_figures(&self, figures: &KeptFigures, lasting: Duration) -> Result<()> {
        let kept = figures.clone();
        self.inner.write(move |tx| figures::keep(tx, &kept, lasting)).await
    }

    async fn kept_figures(
        &self,
        after: Option<FiguresPlace>,
        limit: usize,
    ) -> Result<Vec<KeptFigures>> {
        self.inner.read(move |view| figures::list(view, after, limit)).await
    }
}
