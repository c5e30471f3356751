//! Operator calls: queues and their contents. Calls that change many items are in `bulk`.

pub(super) mod bulk;
mod count;

use std::time::Duration;

use sluicegate_proto::backoff::Backoff;

use crate::{
    domain::{GroupName, Invalid, Item, ItemId, ItemState, Queue, QueueName},
    engine::{Engine, EngineError, MayCreate, Result, dead_letter_links},
    store::{Deleted, ItemDeleted, Page, StoreError},
};

/// How often an update is retried when other brokers change the same settings, or links to
/// dead-letter queues.
pub(super) const UPDATE_TRIES: u32 = 20;
/// Pauses between the tries, so that callers that collided do not collide again.
const UPDATE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_millis(100));
/// How long a change waits for those that came before it.
const LONGEST_TURN: Duration = Duration::from_secs(2);

/// Waits before a retry; not before the first try.
pub(super) async fn pause_before(tries: u32) {
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
        self.check_settings(&queue).map_err(|e| e.within("queue"))?;
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
            let _creation = self.check_create(&wanted.name, may_create).await?;
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
            self.check_settings(&wanted).map_err(|e| e.within("queue"))?;
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
    pub(super) async fn turn_to_link(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        tokio::time::timeout(LONGEST_TURN, self.linking.lock()).await.ok()
    }

    /// Waits for other templates, schedules and operations to be added by this broker, so that those that are counted are all, and there
    /// are never more than may be. Fails if the store stalls under one of them.
    pub(super) async fn turn_to_add(&self) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        tokio::time::timeout(LONGEST_TURN, self.adding.lock()).await.map_err(|_| {
            let reason = format!("earlier calls have waited for it for {LONGEST_TURN:?}");
            StoreError::Unavailable { reason, source: None }.into()
        })
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

    /// Checks settings, of a queue or a template. Errors name the setting.
    pub(super) fn check_settings(&self, queue: &Queue) -> Result<(), Invalid> {
        if let Some(lease) = queue.lease {
            self.check_lease("lease", lease)?;
        }
        if queue.dead_letter_queue.as_ref() == Some(&queue.name) {
            return Err(Invalid::new("dead_letter_queue", "a queue cannot be its own"));
        }
        if queue.discard_failed && queue.dead_letter_queue.is_some() {
            let why =
                "not together with dead_letter_queue: items at a limit go one way or the other";
            return Err(Invalid::new("discard_failed", why));
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
    pub(super) async fn ensure_dead_letter_queue(&self, queue: &Queue) -> Result<()> {
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
