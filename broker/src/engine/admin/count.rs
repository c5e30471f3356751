//! Dry runs: how many items a redrive, replay, purge or delete would change now.

use std::collections::HashSet;

use futures_util::{StreamExt, TryStreamExt, stream};

use super::bulk::{AT_A_TIME, Matching, READ, Redrive};
use crate::{
    domain::{Item, ItemFilter, ItemState, Queue, QueueName, Timestamp},
    engine::{Engine, EngineError, Result, batches::Batches},
    store::Selection,
};

impl Engine {
    /// Counts the items that a redrive would move.
    pub(in crate::engine) async fn count_redrive(
        &self,
        redrive: &Redrive,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let Redrive { queue, to, filter } = redrive;
        let from = self.queues.get(queue).await?;
        let reachable = if to.is_none() && filter.origin_queue.is_none() {
            Some(self.reachable_origins(&from).await?)
        } else {
            None
        };
        let conditions = ItemFilter {
            origin_queue: filter.origin_queue.clone(),
            reason_contains: filter.reason_contains.clone(),
            reason: filter.reason.clone(),
            created_from: filter.created_from,
            created_before: filter.created_before,
            ..ItemFilter::default()
        };
        let is_moved = |item: &Item| {
            item.state == ItemState::Ready
                && item.eligible_time.is_some_and(|at| at <= begun)
                && conditions.matches(item)
                && reachable.as_ref().is_none_or(|origins| {
                    item.origin_queue.as_ref().is_some_and(|origin| origins.contains(origin))
                })
        };
        if filter.ids.is_empty() {
            return self.count_items(&from, ItemState::Ready, is_moved, batches).await;
        }
        let ids: HashSet<_> = filter.ids.iter().copied().collect();
        let from = &from;
        let mut found = stream::iter(ids)
            .map(|id| async move { self.store.get_item(from, id).await })
            .buffer_unordered(AT_A_TIME);
        while let Some(item) = found.try_next().await? {
            let is_counted = item.as_ref().is_some_and(&is_moved);
            batches.did(u64::from(is_counted).min(batches.left()));
        }
        Ok(())
    }

    /// Returns the queues to which dead letters can return.
    async fn reachable_origins(&self, from: &Queue) -> Result<HashSet<QueueName>> {
        let mut reachable = HashSet::new();
        for origin in self.store.origins(from).await? {
            match self.queues.get(&origin).await {
                Ok(queue) if queue.group == from.group => drop(reachable.insert(origin)),
                Ok(_) | Err(EngineError::QueueNotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(reachable)
    }

    /// Counts the items that a replay would make ready.
    pub(in crate::engine) async fn count_replay(
        &self,
        queue: &QueueName,
        selection: &Selection,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let queue = self.queues.get(queue).await?;
        match selection {
            Selection::Ids(ids) => {
                let ids: HashSet<_> = ids.iter().copied().collect();
                let ids = ids.into_iter().collect();
                let found = self.processed_by(&queue, ids, begun).await?.len() as u64;
                batches.did(found.min(batches.left()));
                Ok(())
            }
            Selection::Processed { start, end } => {
                let is_replayed = |item: &Item| {
                    item.process_time.is_some_and(|at| at >= *start && at < *end && at <= begun)
                };
                self.count_items(&queue, ItemState::Processed, is_replayed, batches).await
            }
        }
    }

    /// Counts the items that a purge would delete.
    pub(in crate::engine) async fn count_purge(
        &self,
        queue: &QueueName,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let queue = self.queues.get(queue).await?;
        let depth = self.store.depth(&queue).await?;
        batches.did(depth.unsettled().saturating_sub(depth.reserved) + depth.processed);
        Ok(())
    }

    /// Counts the items that a deletion would delete.
    pub(in crate::engine) async fn count_delete(
        &self,
        queue: &QueueName,
        state: Option<ItemState>,
        filter: &ItemFilter,
        begun: Timestamp,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let queue = self.queues.get(queue).await?;
        let mut matching = Matching::new(filter, begun, state);
        while batches.next().await.is_some() {
            let mut found = Vec::new();
            let more = matching.next(self, &queue, &mut found).await?;
            batches.did((found.len() as u64).min(batches.left()));
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// Counts the items in a state that are as `is_counted` says.
    async fn count_items(
        &self,
        queue: &Queue,
        state: ItemState,
        is_counted: impl Fn(&Item) -> bool + Send + Sync,
        batches: &mut Batches<'_>,
    ) -> Result<()> {
        let mut cursor = None;
        while batches.next().await.is_some() {
            let page = self.store.list_items(queue, Some(state), cursor.as_deref(), READ).await?;
            let counted = page.entries.iter().filter(|item| is_counted(item)).count() as u64;
            batches.did(counted.min(batches.left()));
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        Ok(())
    }
}
