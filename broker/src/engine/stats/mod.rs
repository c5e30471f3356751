//! Figures: totals, which are gathered here and added to the store once a second, and the stats of
//! queues.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;

use crate::{
    domain::{Depth, QueueName, Totals},
    engine::{
        Engine, Result,
        depths::{Change, Depths},
    },
    metrics::Metrics,
    store::Store,
    tasks::Tasks,
};

/// A queue's depth and totals.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QueueStats {
    /// The queue.
    pub queue: QueueName,
    /// The number of items in each state.
    pub depth: Depth,
    /// What happened in the queue, over all brokers. The last second of other brokers may be
    /// missing.
    pub totals: Totals,
    /// Number of open streams and waiting calls on this broker.
    pub consumers: u32,
    /// The same on all brokers; those of other brokers as of some seconds ago.
    pub consumers_of_all_brokers: u32,
}

/// Totals that are not yet in the store.
#[derive(Default)]
struct Gathered {
    pending: HashMap<QueueName, Totals>,
    /// Totals that are being written to the store.
    flushing: HashMap<QueueName, Totals>,
}

pub(super) struct Stats {
    pub(super) depths: Arc<Depths>,
    totals: Mutex<Gathered>,
    /// Held while totals are written to the store, and shared by readers of the stored totals.
    /// Totals being written may be in both places or in neither.
    flushing: tokio::sync::RwLock<()>,
}

impl Stats {
    pub(super) fn new(store: Arc<dyn Store>, tasks: Tasks) -> Self {
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

    /// Adds the totals that are not yet in the store to the stored ones. Nothing moves from one to
    /// the other meanwhile.
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

    /// Returns a guard. While it is held, no totals are written to the store.
    pub(super) async fn not_flushing(&self) -> tokio::sync::RwLockReadGuard<'_, ()> {
        self.flushing.read().await
    }
}

impl Engine {
    /// Records what happened in a queue.
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

    /// Adds the totals gathered since the last call to those in the store.
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
        // Totals that the store has not taken are gathered again, even if this call is cancelled.
        let _back = PutBack(&self.stats);
        self.store.add_totals(changes.clone()).await?;
        let mut gathered = self.stats.totals.lock();
        self.overview.flushed(&changes);
        gathered.flushing.clear();
        Ok(())
    }

    /// Returns a queue's depth and totals.
    pub(crate) async fn queue_stats(&self, name: &QueueName) -> Result<QueueStats> {
        let queue = self.queues.get(name).await?;
        let consumers = async {
            self.notice_consumers().await;
            Ok(())
        };
        let counted =
            tokio::try_join!(self.stats.depths.depth(&queue), self.totals(name), consumers);
        let (depth, totals, ()) = counted?;
        Ok(self.stats_with(name, depth, totals))
    }

    /// Returns the stats of a queue with its consumers as they are known now.
    pub(super) fn stats_with(&self, name: &QueueName, depth: Depth, totals: Totals) -> QueueStats {
        let consumers_of_all_brokers = self.consumers_of_all_brokers(name);
        let (queue, consumers) = (name.clone(), self.consumers(name));
        QueueStats { queue, depth, totals, consumers, consumers_of_all_brokers }
    }

    async fn totals(&self, name: &QueueName) -> Result<Totals> {
        let _settled = self.stats.not_flushing().await;
        let stored = self.store.totals(name).await?;
        Ok(self.stats.with_pending(name, || stored))
    }

    /// Returns the number of the queue's open streams and waiting calls on this broker.
    pub(super) fn consumers(&self, queue: &QueueName) -> u32 {
        self.dispatcher(queue).map_or(0, |dispatcher| dispatcher.consumers())
    }
}

/// On drop, returns totals that did not reach the store to the gathered ones. If the store took
/// them but the acknowledgement was lost, that second is counted twice. This is the lesser evil,
/// and affects figures only.
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
