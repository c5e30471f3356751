//! Operator calls: queues and their contents.

use std::{sync::Arc, time::Duration};

use sluicegate_proto::backoff::Backoff;

use crate::{
    domain::{GroupName, Invalid, Item, ItemId, ItemState, Queue, QueueName},
    engine::{
        Engine, EngineError, MAY_CREATE_ALL, MayCreate, Result, dead_letter_links, depths::Change,
    },
    store::{Deleted, ItemDeleted, Page, RedriveFilter, Redriven, Selection},
};

/// How often an update is retried when other brokers change the same settings, or links to
/// dead-letter queues.
const UPDATE_TRIES: u32 = 20;
/// Pauses between the tries, so that callers that collided do not collide again.
const UPDATE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_millis(100));
/// How long a change of a link waits for those that came before it.
const LONGEST_TURN: Duration = Duration::from_secs(2);
/// Items per step of a redrive or a replay.
const STEP: u64 = 500;

/// Waits before a retry; not before the first try.
async fn pause_before(tries: u32) {
    if let Some(failures) = tries.checked_sub(1) {
        tokio::time::sleep(UPDATE_BACKOFF.delay(failures)).await;
    }
}

impl Engine {
    /// Creates a queue. If a queue with the same name and settings exists, that queue is returned.
    pub(crate) async fn create_queue(
        &self,
        queue: Queue,
        may_create: MayCreate<'_>,
    ) -> Result<Queue> {
        self.check_open()?;
        self.check_settings(&queue)?;
        let wanted = Queue { create_time: self.now(), ..queue };
        let _turn = self.turn_to_link().await;
        for tries in 0..UPDATE_TRIES {
            pause_before(tries).await;
            let links = self.store.links().await?;
            if let Some(there) = self.store.get_queue(&wanted.name).await? {
                if !there.same_settings(&wanted) {
                    return Err(EngineError::QueueExists(there.name));
                }
                if there.unused_since.is_none() {
                    return Ok(there);
                }
                // An operator wants the queue: from now on it stays, used or not.
                let kept = Queue { unused_since: None, ..there };
                if let Some(queue) = self.store.update_queue(&kept).await? {
                    self.queues.replace(queue.clone());
                    return Ok(queue);
                }
                continue;
            }
            self.check_create(&wanted.name, may_create).await?;
            dead_letter_links::check_group(&*self.store, &wanted.name, &wanted.group).await?;
            self.check_link(&wanted).await?;
            if let Some(queue) = self.store.link_queue(&wanted, links).await? {
                dead_letter_links::confirm_group(&*self.store, &queue).await?;
                self.overview.created(&queue.name);
                self.queues.replace(queue.clone());
                self.notify_settings(&queue.name);
                return Ok(queue);
            }
        }
        Err(EngineError::Conflict(wanted.name))
    }

    /// Returns a queue's settings, read from the store.
    pub(crate) async fn get_queue(&self, name: &QueueName) -> Result<Queue> {
        let queue = self.store.get_queue(name).await?;
        queue.ok_or_else(|| EngineError::QueueNotFound(name.clone()))
    }

    /// Returns queues whose names begin with `prefix`, in the order of their names.
    pub(crate) async fn list_queues(
        &self,
        prefix: &str,
        after: Option<&QueueName>,
        limit: usize,
    ) -> Result<Vec<Queue>> {
        Ok(self.store.list_queues(prefix, after, limit).await?)
    }

    /// Changes a queue's settings. Every broker applies the change within a second.
    pub(crate) async fn update_queue(
        &self,
        name: &QueueName,
        change: &(dyn Fn(&mut Queue) -> Result<(), Invalid> + Send + Sync),
    ) -> Result<Queue> {
        self.check_open()?;
        let mut turn = None;
        for tries in 0..UPDATE_TRIES {
            pause_before(tries).await;
            let links = self.store.links().await?;
            let before = self.get_queue(name).await?;
            // An update may set a value that is already in force as a default.
            let before = before.in_force(&self.limits.failure_defaults);
            let mut wanted = before.clone();
            change(&mut wanted)?;
            if wanted == before {
                return Ok(before);
            }
            wanted.unused_since = None;
            self.check_settings(&wanted)?;
            let updated =
                if dead_letter_links::target(&wanted) == dead_letter_links::target(&before) {
                    self.store.update_queue(&wanted).await?
                } else {
                    if turn.is_none() {
                        turn = Some(self.turn_to_link().await);
                        continue; // others have changed links meanwhile
                    }
                    self.check_link(&wanted).await?;
                    self.store.link_queue(&wanted, links).await?
                };
            if let Some(queue) = updated {
                self.queues.replace(queue.clone());
                self.notify_settings(name);
                return Ok(queue);
            }
        }
        Err(EngineError::Conflict(name.clone()))
    }

    /// Waits for other changes of links by this broker to end, because the store takes one at a time.
    /// If the store stalls under one of them, the others are tried all the same: the store refuses
    /// what would collide.
    async fn turn_to_link(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        tokio::time::timeout(LONGEST_TURN, self.linking.lock()).await.ok()
    }

    /// Pauses or resumes deliveries.
    pub(crate) async fn pause_queue(&self, name: &QueueName, paused: bool) -> Result<Queue> {
        let set = move |queue: &mut Queue| {
            queue.paused = paused;
            Ok(())
        };
        self.update_queue(name, &set).await
    }

    /// Deletes a queue, with `force` even if it holds items, but never a dead-letter queue that is
    /// in use.
    pub(crate) async fn delete_queue(&self, name: &QueueName, force: bool) -> Result<u64> {
        self.check_open()?;
        // A deletion with `force` may take minutes, so it does not hold up other changes of links.
        for tries in 0..UPDATE_TRIES {
            pause_before(tries).await;
            let links = self.store.links().await?;
            let queue = self.get_queue(name).await?;
            dead_letter_links::check_unused(&*self.store, name).await?;
            match self.store.delete_queue(&queue, force, links).await? {
                Deleted::Done(deleted) => {
                    self.queue_deleted(name);
                    return Ok(deleted);
                }
                Deleted::NotEmpty => {
                    let items = self.store.depth(&queue).await?.unsettled().max(1);
                    return Err(EngineError::QueueNotEmpty { queue: name.clone(), items });
                }
                Deleted::Overtaken => {}
            }
        }
        Err(EngineError::Conflict(name.clone()))
    }

    /// Forgets a queue that this broker has deleted, and tells the others.
    pub(super) fn queue_deleted(&self, name: &QueueName) {
        self.queues.forget(name);
        self.forget_stats(name);
        self.notify_settings(name);
    }

    /// Deletes all items that are not reserved.
    pub(crate) async fn purge_queue(&self, name: &QueueName) -> Result<u64> {
        self.check_open()?;
        let queue = self.queues.get(name).await?;
        let purged = self.store.purge(&queue).await?;
        self.notify_settings(name);
        Ok(purged)
    }

    /// Returns items of a queue, in one state or in all states.
    pub(crate) async fn list_items(
        &self,
        queue: &QueueName,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>> {
        let queue = self.queues.get(queue).await?;
        Ok(self.store.list_items(&queue, state, cursor, limit).await?)
    }

    /// Returns one item.
    pub(crate) async fn get_item(&self, queue: &QueueName, id: ItemId) -> Result<Item> {
        let settings = self.queues.get(queue).await?;
        let item = self.store.get_item(&settings, id).await?;
        item.ok_or_else(|| EngineError::ItemNotFound { queue: queue.clone(), id: id.to_string() })
    }

    /// Deletes one item. With `only_if`, the item is deleted only if it is in that state.
    pub(crate) async fn delete_item(
        &self,
        queue: &QueueName,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<()> {
        let settings = self.queues.get(queue).await?;
        let (queue_name, item) = (queue.clone(), id.to_string());
        match self.store.delete_item(&settings, id, only_if).await? {
            ItemDeleted::Done => {}
            ItemDeleted::NotFound => {
                return Err(EngineError::ItemNotFound { queue: queue_name, id: item });
            }
            ItemDeleted::OtherState(state) => {
                return Err(EngineError::ItemInOtherState { queue: queue_name, id: item, state });
            }
        }
        self.stats.depths.forget_count(queue);
        // A stream may have held the item, and the item may have blocked others of its ordering
        // key.
        self.publish(queue, crate::domain::Topic::Settle, None);
        if let Some(dispatcher) = self.dispatcher(queue) {
            dispatcher.deleted(id);
        }
        self.notify_inserted(queue, None);
        Ok(())
    }

    /// Makes processed items ready again, at most `max_items` (0: all).
    pub(crate) async fn replay_items(
        &self,
        queue: &QueueName,
        selection: Selection,
        max_items: u64,
    ) -> Result<u64> {
        let settings = self.queues.get(queue).await?;
        let limit = if max_items == 0 { u64::MAX } else { max_items };
        // Items that are processed again after the start of the replay are not replayed a second
        // time.
        let begun = self.now() + Duration::from_millis(1);
        let selection = match selection {
            Selection::Processed { start, end } => {
                Selection::Processed { start, end: end.min(begun) }
            }
            ids @ Selection::Ids(_) => ids,
        };
        let replayed = match &selection {
            Selection::Ids(_) => self.store.replay(&settings, &selection, limit).await?,
            Selection::Processed { .. } => {
                let mut replayed = 0;
                loop {
                    let step = STEP.min(limit - replayed);
                    let now = self.store.replay(&settings, &selection, step).await?;
                    replayed += now;
                    if now < step || replayed == limit {
                        break replayed;
                    }
                    self.notify_inserted(queue, None);
                }
            }
        };
        if replayed > 0 {
            self.stats.depths.forget_count(queue);
            self.notify_inserted(queue, None);
        }
        Ok(replayed)
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
        let from = self.queues.get(queue).await?;
        let limit = if max_items == 0 { u64::MAX } else { max_items };
        let filter = RedriveFilter { ready_by: Some(self.now()), ..filter };
        let mut targets = Vec::new();
        let each_to_its_origin = to.is_none() && filter.origin_queue.is_none();
        let is_named = to.is_some();
        match (to, filter.origin_queue.clone()) {
            (Some(to), _) => targets.push((to, filter)),
            (None, Some(origin)) => targets.push((origin, filter)),
            (None, None) => {
                for origin in self.store.origins(&from).await? {
                    let filter =
                        RedriveFilter { origin_queue: Some(origin.clone()), ..filter.clone() };
                    targets.push((origin, filter));
                }
            }
        }
        let (mut redriven, mut full) = (0, None);
        for (target, filter) in targets {
            if redriven == limit {
                break;
            }
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
                found => found?,
            };
            if to.group != from.group {
                if each_to_its_origin {
                    tracing::warn!(queue = %from.name, origin = %to.name, "dead letters stay: their origin is of another group now");
                    continue;
                }
                return Err(EngineError::DifferentGroup {
                    from: from.group.clone(),
                    to: to.group.clone(),
                });
            }
            let (moved, is_full) =
                self.redrive_to(&from, &to, &filter, limit - redriven, rate).await?;
            redriven += moved;
            if is_full {
                full = Some(EngineError::queue_full(&to));
            }
        }
        match full {
            Some(full) if redriven == 0 => Err(full),
            _ => Ok(redriven),
        }
    }

    /// Returns how many items were moved, and true if the target had no room for more.
    async fn redrive_to(
        self: &Arc<Self>,
        from: &Arc<Queue>,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        limit: u64,
        rate: u32,
    ) -> Result<(u64, bool)> {
        // With a rate limit, ten steps are done per second, or one item at a time for lower rates.
        let (step, pause) = match u64::from(rate) {
            0 => (STEP, None),
            rate => {
                let step = (rate / 10).clamp(1, STEP);
                (step, Some(Duration::from_secs_f64(step as f64 / rate as f64)))
            }
        };
        let mut ticks = pause.map(tokio::time::interval);
        let (mut redriven, mut cursor) = (0, None);
        while redriven < limit {
            if let Some(ticks) = &mut ticks {
                ticks.tick().await;
            }
            self.check_open()?;
            let mut step = step.min(limit - redriven);
            if !self.stats.depths.has_room(to, step as usize).await? {
                step = 1; // what is left of the room
                if !self.stats.depths.has_room(to, 1).await? {
                    return Ok((redriven, true));
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
            redriven += items;
            if next.is_none() {
                break;
            }
            cursor = next;
        }
        Ok((redriven, false))
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

    fn check_settings(&self, queue: &Queue) -> Result<(), Invalid> {
        if let Some(lease) = queue.lease {
            self.check_lease("queue.lease", lease)?;
        }
        if queue.dead_letter_queue.as_ref() == Some(&queue.name) {
            return Err(Invalid::new("queue.dead_letter_queue", "a queue cannot be its own"));
        }
        if queue.discard_failed && queue.dead_letter_queue.is_some() {
            let why =
                "not together with dead_letter_queue: items at a limit go one way or the other";
            return Err(Invalid::new("queue.discard_failed", why));
        }
        Ok(())
    }

    /// Checks the queue's dead-letter links, and creates its dead-letter queue if that does not
    /// exist.
    async fn check_link(&self, queue: &Queue) -> Result<()> {
        dead_letter_links::check_ring(&*self.store, queue).await?;
        self.ensure_dead_letter_queue(queue).await
    }

    /// Creates the dead-letter queue if it is named and does not exist. It must be in the same
    /// group.
    async fn ensure_dead_letter_queue(&self, queue: &Queue) -> Result<()> {
        dead_letter_links::check_target_group(&*self.store, queue).await?;
        let Some(name) = &queue.dead_letter_queue else { return Ok(()) };
        dead_letter_links::check_group(&*self.store, name, &queue.group).await?;
        let group = self.make_dead_letter_queue(name, queue).await?;
        let from = GroupName::clone(&queue.group);
        if group == from { Ok(()) } else { Err(EngineError::DifferentGroup { from, to: group }) }
    }
}

#[cfg(test)]
mod tests;
