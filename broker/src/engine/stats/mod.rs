//! Figures: totals, gathered here and added to the store's once a second, and what is told of a queue.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use crate::{
    domain::{Depth, QueueName, Totals},
    engine::{
        Engine, Result,
        depths::{Change, Depths},
    },
    metrics::Metrics,
    store::Store,
};

/// A queue's depth and totals.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QueueStats {
    /// The queue.
    pub queue: QueueName,
    /// What is in it.
    pub depth: Depth,
    /// What happened in it, over all brokers; other brokers' last second may be missing.
    pub totals: Totals,
    /// Open streams and waiting calls on this broker.
    pub consumers: u32,
}

/// Totals that are not yet in the store.
#[derive(Default)]
struct Gathered {
    pending: HashMap<QueueName, Totals>,
    /// On their way there.
    flushing: HashMap<QueueName, Totals>,
}

pub(super) struct Stats {
    pub(super) depths: Arc<Depths>,
    totals: Mutex<Gathered>,
    /// Held while totals are on their way to the store, and shared by those who read them there: what is
    /// on its way is in neither place, or in both.
    flushing: tokio::sync::RwLock<()>,
}

impl Stats {
    pub(super) fn new(store: Arc<dyn Store>, tasks: TaskTracker) -> Self {
        Self {
            depths: Depths::new(store, tasks),
            totals: Mutex::default(),
            flushing: tokio::sync::RwLock::default(),
        }
    }

    pub(super) fn forget(&self, queue: &QueueName) {
        self.depths.forget(queue);
        self.totals.lock().pending.remove(queue);
    }

    /// Adds what is not yet in the store to what is there. Nothing moves between the two meanwhile.
    pub(super) fn with_pending(
        &self,
        queue: &QueueName,
        stored: impl FnOnce() -> Totals,
    ) -> Totals {
        let gathered = self.totals.lock();
        let mut totals = stored();
        for more in [&gathered.pending, &gathered.flushing] {
            if let Some(more) = more.get(queue) {
                totals.add(more);
            }
        }
        totals
    }

    /// While this is held, no totals are on their way to the store.
    pub(super) async fn not_flushing(&self) -> tokio::sync::RwLockReadGuard<'_, ()> {
        self.flushing.read().await
    }
}

impl Engine {
    /// Notes what happened in a queue.
    pub(super) fn count(&self, queue: &QueueName, change: &Totals) {
        if *change == Totals::default() {
            return;
        }
        self.measure(queue, change);
        self.stats.totals.lock().pending.entry(queue.clone()).or_default().add(change);
        self.stats.depths.changed(queue, || {
            Change::of(change, self.queues.known(queue).is_some_and(|queue| queue.keeps_history()))
        });
    }

    fn measure(&self, queue: &QueueName, change: &Totals) {
        let note = |items: u64, note: fn(&Metrics, &QueueName, u64)| {
            if items > 0 {
                note(&self.metrics, queue, items);
            }
        };
        note(change.pushed, Metrics::pushed);
        note(change.delivered, Metrics::delivered);
        note(change.committed, Metrics::committed);
        note(change.rolled_back, Metrics::rolled_back);
        note(change.moved, Metrics::moved);
        note(change.expired, Metrics::expired);
    }

    /// Adds to the store's totals what was gathered since the last call.
    pub(crate) async fn flush_totals(&self) -> Result<()> {
        self.log_failures(false);
        let _alone = self.stats.flushing.write().await;
        let changes: Vec<_> = {
            let mut gathered = self.stats.totals.lock();
            gathered.flushing = mem::take(&mut gathered.pending);
            gathered.flushing.iter().map(|(queue, change)| (queue.clone(), *change)).collect()
        };
        if changes.is_empty() {
            return Ok(());
        }
        // Back to the others unless the store has taken them, also if this call is given up half-way.
        let _back = PutBack(&self.stats);
        self.store.add_totals(changes.clone()).await?;
        let mut gathered = self.stats.totals.lock();
        self.overview.flushed(&changes);
        gathered.flushing.clear();
        Ok(())
    }

    /// A queue's depth and totals.
    pub(crate) async fn queue_stats(&self, name: &QueueName) -> Result<QueueStats> {
        let queue = self.queues.get(name).await?;
        let (depth, totals) = tokio::try_join!(self.stats.depths.depth(&queue), self.totals(name))?;
        Ok(QueueStats { queue: name.clone(), depth, totals, consumers: self.consumers(name) })
    }

    async fn totals(&self, name: &QueueName) -> Result<Totals> {
        let _settled = self.stats.not_flushing().await;
        let stored = self.store.totals(name).await?;
        Ok(self.stats.with_pending(name, || stored))
    }

    /// Open streams and waiting calls of the queue on this broker.
    pub(super) fn consumers(&self, queue: &QueueName) -> u32 {
        self.dispatcher(queue).map_or(0, |dispatcher| dispatcher.consumers())
    }
}

/// Puts back the totals that did not reach the store. Should the store have taken them without an answer, a
/// second is counted twice: the lesser evil, and only in figures.
struct PutBack<'a>(&'a Stats);

impl Drop for PutBack<'_> {
    fn drop(&mut self) {
        let mut gathered = self.0.totals.lock();
        for (queue, change) in mem::take(&mut gathered.flushing) {
            gathered.pending.entry(queue).or_default().add(&change);
        }
    }
}

#[cfg(test)]
mod tests;
