//! Figures: totals, gathered here and added to the store's once a second, and what is told of a queue.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use crate::{
    domain::{Depth, QueueName, Totals},
    metrics::Metrics,
    store::Store,
};

use super::{
    Engine, Result,
    depths::{Change, Depths},
};

/// A queue's depth and totals.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueStats {
    /// The queue.
    pub queue: QueueName,
    /// What is in it.
    pub depth: Depth,
    /// What happened in it, over all brokers; other brokers' last second may be missing.
    pub totals: Totals,
    /// Open streams and waiting calls on this broker.
    pub consumers: u32,
}

pub(super) struct Figures {
    pub(super) depths: Arc<Depths>,
    /// Not yet in the store.
    totals: Mutex<HashMap<QueueName, Totals>>,
    /// Held while totals are on their way to the store, and shared by those who read them there: what is
    /// on its way is in neither place, or in both.
    flushing: tokio::sync::RwLock<()>,
}

impl Figures {
    pub(super) fn new(store: Arc<dyn Store>, tasks: TaskTracker) -> Self {
        Self {
            depths: Depths::new(store, tasks),
            totals: Mutex::default(),
            flushing: tokio::sync::RwLock::default(),
        }
    }

    pub(super) fn forget(&self, queue: &QueueName) {
        self.depths.forget(queue);
        self.totals.lock().remove(queue);
    }
}

impl Engine {
    /// Notes what happened in a queue.
    pub(super) fn count(&self, queue: &QueueName, change: &Totals) {
        if *change == Totals::default() {
            return;
        }
        self.measure(queue, change);
        self.figures.totals.lock().entry(queue.clone()).or_default().add(change);
        self.figures.depths.changed(queue, || {
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
        note(change.dead_lettered, Metrics::dead_lettered);
        note(change.expired, Metrics::expired);
    }

    /// Adds to the store's totals what was gathered since the last call.
    pub async fn flush_totals(&self) -> Result<()> {
        let _alone = self.figures.flushing.write().await;
        let gathered = mem::take(&mut *self.figures.totals.lock());
        if gathered.is_empty() {
            return Ok(());
        }
        // Put back unless the store has taken it, also if this call is given up half-way.
        let mut pending =
            Pending { figures: &self.figures, changes: gathered.into_iter().collect() };
        self.store.add_totals(pending.changes.clone()).await?;
        pending.changes.clear();
        Ok(())
    }

    /// A queue's depth and totals.
    pub async fn queue_stats(&self, name: &QueueName) -> Result<QueueStats> {
        let queue = self.queues.get(name).await?;
        let (depth, totals) =
            tokio::try_join!(self.figures.depths.depth(&queue), self.totals(name))?;
        Ok(QueueStats { queue: name.clone(), depth, totals, consumers: self.consumers(name) })
    }

    async fn totals(&self, name: &QueueName) -> Result<Totals> {
        let _settled = self.figures.flushing.read().await;
        let mut totals = self.store.totals(name).await?;
        if let Some(more) = self.figures.totals.lock().get(name) {
            totals.add(more);
        }
        Ok(totals)
    }

    /// Open streams and waiting calls of the queue on this broker.
    pub(super) fn consumers(&self, queue: &QueueName) -> u32 {
        self.dispatcher(queue).map_or(0, |dispatcher| dispatcher.consumers())
    }
}

/// Totals on their way to the store. Should the store have taken them without an answer, a second
/// is counted twice: the lesser evil, and only in figures.
struct Pending<'a> {
    figures: &'a Figures,
    changes: Vec<(QueueName, Totals)>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut totals = self.figures.totals.lock();
        for (queue, change) in self.changes.drain(..) {
            totals.entry(queue).or_default().add(&change);
        }
    }
}

#[cfg(test)]
mod tests;
