//! Operator calls that change many items: redrive, replay, purge, delete. They work in batches, on what was there at a given time.
//! So they end, although items keep coming, and can be begun anew without doing anything twice.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, TryStreamExt, stream};

use crate::{
    domain::{ItemFilter, ItemId, ItemState, Queue, QueueName, Timestamp},
    engine::{
        Engine, EngineError, MAY_CREATE_ALL, Result,
        batches::{BATCH, Batches, Progress},
        depths::Change,
    },
    store::{RedriveFilter, Redriven, Selection},
};

/// How many items are read or deleted at a time that take a call each.
pub(super) const AT_A_TIME: usize = 16;
/// The most items that are read at a time to be matched. They may be large.
pub(super) const READ: usize = 64;

/// Which items of a dead-letter queue to move back, and where to.
#[derive(Debug, Clone)]
pub(in crate::engine) struct Redrive {
    /// The dead-letter queue.
    pub(in crate::engine) queue: QueueName,
    /// `None`: each to the queue it came from.
    pub(in crate::engine) to: Option<QueueName>,
    pub(in crate::engine) filter: RedriveFilter,
}

/// How far a redrive got in one queue.
enum Reached {
    /// There are no more items, or the redrive is to end.
    End,
    /// The target has no room.
    Full,
}

impl Engine {
    /// Makes processed items ready again, at most `max_items` (0: all).
    pub(crate) async fn replay_items(
        &self,
        queue: &QueueName,
        selection: Selection,
        max_items: u64,
    ) -> Result<u64> {
        let progress = Progress::default();
        let mut batches = Batches::new(&progress, max_items, 0);
        self.replay(queue, selection, self.now(), &mut batches).await?;
        Ok(progress.done())
    }

    /// Makes items ready again that were processed by `begun`.
    pub(in crate::engine) async fn replay(
        &self,
        queue: &QueueName,
        selection: Selection,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let settings = self.queues.get(queue).await?;
        // Items that are processed again after the start of the replay are not replayed a second time.
        let (selection, is_one_step) = match selection {
            Selection::Processed { start, end } => {
                let end = end.min(begun + Duration::from_millis(1));
                (Selection::Processed { start, end }, false)
            }
            ids @ Selection::Ids(_) => (ids, true),
        };
        while let Some(batch) = batches.next().await {
            let batch = if is_one_step { batches.left() } else { batch };
            let replayed = self.store.replay(&settings, &selection, batch).await?;
            batches.did(replayed);
            if replayed > 0 {
                self.stats.depths.forget_count(queue);
                self.notify_inserted(queue, None);
            }
            if is_one_step || replayed < batch {
                break;
            }
        }
        Ok(())
    }

    /// Returns those of the items that were processed by `begun`, and not again since.
    pub(in crate::engine) async fn processed_by(
        &self,
        queue: &Queue,
        ids: Vec<ItemId>,
        begun: Timestamp,
    ) -> Result<Vec<ItemId>> {
        let read = |id| async move {
            let item = self.store.get_item(queue, id).await?;
            let processed = item.and_then(|item| item.process_time).filter(|at| *at <= begun);
            Ok(processed.map(|_| id))
        };
        let found = stream::iter(ids).map(read).buffered(AT_A_TIME);
        found.try_filter_map(|id| std::future::ready(Ok(id))).try_collect().await
    }

    /// Moves items out of a dead-letter queue: to `to`, or each item to the queue it came from.
    /// Moves at most `max_items` (0: all), at most `rate` per second (0: no limit), and fills a
    /// queue up to its `max_depth`. An origin that was deleted is not created again, because the new
    /// queue would have none of the settings of the old one.
    pub(crate) async fn redrive_items(
        self: &Arc<Self>,
        queue: &QueueName,
        to: Option<QueueName>,
        filter: RedriveFilter,
        max_items: u64,
        rate: u32,
    ) -> Result<u64> {
        self.check_open()?;
        let progress = Progress::default();
        let redrive = Redrive { queue: queue.clone(), to, filter };
        let mut batches = Batches::new(&progress, max_items, rate);
        let full = self.redrive(redrive, self.now(), &mut batches).await?;
        match full {
            Some(full) if progress.done() == 0 => Err(full),
            _ => Ok(progress.done()),
        }
    }

    /// Moves items out of a dead-letter queue that were ready by `begun`. Returns an error about a target that had no room for all.
    pub(in crate::engine) async fn redrive(
        self: &Arc<Self>,
        redrive: Redrive,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<Option<EngineError>> {
        let Redrive { queue, to, filter } = redrive;
        let from = self.queues.get(&queue).await?;
        let filter = RedriveFilter { ready_by: Some(begun), ..filter };
        let is_named = to.is_some();
        let each_to_its_origin = !is_named && filter.origin_queue.is_none();
        let mut full = None;
        for (target, filter) in self.redrive_targets(&from, to, filter).await? {
            let found = if is_named {
                self.queue_or_create(&target, MAY_CREATE_ALL).await
            } else {
                self.queues.get(&target).await
            };
            let to = match found {
                Err(EngineError::QueueNotFound(origin)) if each_to_its_origin => {
                    tracing::warn!(queue = %from.name, %origin, "dead letters stay: their origin was deleted");
                    continue;
                }
                Err(EngineError::QueueNotFound(origin)) if !is_named => {
                    if self.is_foreign(&from, &origin).await? {
                        continue;
                    }
                    return Err(EngineError::QueueNotFound(origin));
                }
                found => found?,
            };
            if to.group != from.group {
                if each_to_its_origin {
                    tracing::warn!(queue = %from.name, origin = %to.name, "dead letters stay: their origin is of another group now");
                    continue;
                }
                if !is_named && self.is_foreign(&from, &to.name).await? {
                    continue;
                }
                return Err(EngineError::DifferentGroup {
                    from: from.group.clone(),
                    to: to.group.clone(),
                });
            }
            if let Reached::Full = self.redrive_to(&from, &to, &filter, batches).await?
                && (is_named || !self.is_foreign(&from, &to.name).await?)
            {
                full = Some(EngineError::queue_full(&to));
            }
        }
        Ok(full)
    }

    /// Returns true if no item in the queue came from there. Whoever names such a queue is not told whether it is there.
    async fn is_foreign(&self, from: &Queue, origin: &QueueName) -> Result<bool> {
        Ok(!self.store.origins(from).await?.contains(origin))
    }

    /// Returns where the items go, and which of them go there.
    async fn redrive_targets(
        &self,
        from: &Queue,
        to: Option<QueueName>,
        filter: RedriveFilter,
    ) -> Result<Vec<(QueueName, RedriveFilter)>> {
        if let Some(target) = to.or_else(|| filter.origin_queue.clone()) {
            return Ok(vec![(target, filter)]);
        }
        let of = |origin: QueueName| {
            let filter = RedriveFilter { origin_queue: Some(origin.clone()), ..filter.clone() };
            (origin, filter)
        };
        Ok(self.store.origins(from).await?.into_iter().map(of).collect())
    }

    async fn redrive_to(
        self: &Arc<Self>,
        from: &Arc<Queue>,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        batches: &mut Batches<'_>,
    ) -> Result<Reached> {
        let mut cursor = None;
        while let Some(mut step) = batches.next().await {
            self.check_open()?;
            if !self.stats.depths.has_room(to, step as usize).await? {
                step = 1; // what is left of the room
                if !self.stats.depths.has_room(to, 1).await? {
                    return Ok(Reached::Full);
                }
            }
            // The step runs to its end, and wakes consumers, even if the caller hangs up.
            let (engine, from, to) = (Arc::clone(self), Arc::clone(from), Arc::clone(to));
            let filter = filter.clone();
            let moving = self
                .tasks
                .run(async move { engine.redrive_step(&from, &to, &filter, cursor, step).await });
            let Redriven { items, next } =
                moving.await.map_err(|_| EngineError::ShuttingDown)??;
            batches.did(items);
            if next.is_none() {
                break;
            }
            cursor = next;
        }
        Ok(Reached::End)
    }

    async fn redrive_step(
        &self,
        from: &Arc<Queue>,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        cursor: Option<String>,
        limit: u64,
    ) -> Result<Redriven> {
        let step = self.store.redrive(from, to, filter, cursor.as_deref(), limit).await;
        let step = step.inspect_err(|error| self.wake_if_unknown(error, [&to.name]))?;
        if step.items > 0 {
            self.stats.depths.forget_count(&from.name);
            self.stats.depths.changed(&to.name, || Change::arrived(step.items));
            self.notify_inserted(&to.name, None);
        }
        Ok(step)
    }

    /// Deletes all items that are not reserved, at once.
    pub(crate) async fn purge_queue(&self, name: &QueueName) -> Result<u64> {
        self.check_open()?;
        let queue = self.queues.get(name).await?;
        let purged = self.store.purge(&queue).await?;
        self.notify_settings(name);
        Ok(purged)
    }

    /// Deletes the items that were first pushed by `begun` and are not reserved, in steps.
    pub(in crate::engine) async fn purge(
        &self,
        name: &QueueName,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let queue = self.queues.get(name).await?;
        while batches.next().await.is_some() {
            self.check_open()?;
            let purged = self.store.purge_step(&queue, begun).await?;
            batches.did(purged.items);
            self.notify_settings(name);
            if !purged.more {
                break;
            }
        }
        Ok(())
    }

    /// Deletes the items that match and were first pushed by `begun`.
    pub(in crate::engine) async fn delete_items(
        &self,
        name: &QueueName,
        state: Option<ItemState>,
        filter: &ItemFilter,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let queue = self.queues.get(name).await?;
        let mut matching = Matching::new(filter, begun, state);
        let mut found = Vec::new();
        while let Some(batch) = batches.next().await {
            self.check_open()?;
            // Of a deep queue, few items may match: the pages of a batch can be all of it.
            while found.len() < batch as usize
                && !batches.is_stopped()
                && matching.next(self, &queue, &mut found).await?
            {}
            if found.is_empty() {
                break;
            }
            let batch: Vec<ItemId> = found.drain(..found.len().min(batch as usize)).collect();
            let delete = |id| async move {
                match self.delete_item(name, id, state).await {
                    Ok(()) => Ok(1),
                    // Somebody else was faster.
                    Err(
                        EngineError::ItemNotFound { .. } | EngineError::ItemInOtherState { .. },
                    ) => Ok(0),
                    Err(error) => Err(error),
                }
            };
            let mut deletes = stream::iter(batch).map(delete).buffer_unordered(AT_A_TIME);
            while let Some(deleted) = deletes.try_next().await? {
                batches.did(deleted);
            }
        }
        Ok(())
    }
}

/// Reads the items of a queue that match, in the order of the list.
pub(in crate::engine) struct Matching {
    filter: ItemFilter,
    state: Option<ItemState>,
    cursor: Option<String>,
    is_at_end: bool,
    step: usize,
}

impl Matching {
    /// Reads items that were first pushed by `begun`.
    pub(in crate::engine) fn new(
        filter: &ItemFilter,
        begun: Timestamp,
        state: Option<ItemState>,
    ) -> Self {
        let end = begun + Duration::from_millis(1);
        let created_before = Some(filter.created_before.map_or(end, |before| before.min(end)));
        let filter = ItemFilter { created_before, ..filter.clone() };
        Self { filter, state, cursor: None, is_at_end: false, step: READ }
    }

    /// Reads some items, and adds the ids of those that match. Returns false at the end of the queue.
    pub(in crate::engine) async fn next(
        &mut self,
        engine: &Engine,
        queue: &Queue,
        found: &mut Vec<ItemId>,
    ) -> Result<bool> {
        const SMALL: usize = 1 << 20;
        if self.is_at_end {
            return Ok(false);
        }
        let cursor = self.cursor.as_deref();
        let page = engine.store.list_items(queue, self.state, cursor, self.step).await?;
        let matching = page.entries.iter().filter(|item| self.filter.matches(item));
        found.extend(matching.map(|item| item.id));
        // Small items are read in larger steps.
        let bytes: usize = page.entries.iter().map(|item| item.payload.len()).sum();
        self.step = if bytes < SMALL { (self.step * 2).min(BATCH as usize) } else { READ };
        self.is_at_end = page.next.is_none();
        self.cursor = page.next;
        Ok(!self.is_at_end)
    }
}
