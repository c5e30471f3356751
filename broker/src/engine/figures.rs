//! Figures: totals, gathered here and added to the store's once a second, and depths, remembered
//! in proportion to what counting them costs.

use std::{
    collections::HashMap,
    future::Future,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    domain::{Depth, Queue, QueueName, Totals},
    metrics::Metrics,
    store::StoreError,
};

use super::{Engine, Result};

/// A count is remembered for this many times what it took.
const REMEMBER_FACTOR: u32 = 20;
/// A count that took less than this is always made anew.
const CHEAP: Duration = Duration::from_millis(5);
/// How old the count may be that a push is checked against.
const LIMIT_AGE: Duration = Duration::from_millis(500);
/// The same, where counting is dear.
const MAX_LIMIT_AGE: Duration = Duration::from_secs(1);

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

#[derive(Default)]
pub(super) struct Figures {
    /// Not yet in the store.
    totals: Mutex<HashMap<QueueName, Totals>>,
    depths: Mutex<HashMap<QueueName, Counted>>,
}

#[derive(Clone, Copy)]
struct Counted {
    depth: Depth,
    at: Instant,
    cost: Duration,
    /// Pushed here since.
    pushed_since: u64,
}

impl Figures {
    pub(super) fn forget(&self, queue: &QueueName) {
        self.forget_depth(queue);
        self.totals.lock().remove(queue);
    }

    pub(super) fn forget_depth(&self, queue: &QueueName) {
        self.depths.lock().remove(queue);
    }

    fn remembered(
        &self,
        queue: &QueueName,
        max_age: impl Fn(&Counted) -> Duration,
    ) -> Option<Counted> {
        self.depths.lock().get(queue).filter(|c| c.at.elapsed() <= max_age(c)).copied()
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
        if change.pushed > 0
            && let Some(counted) = self.figures.depths.lock().get_mut(queue)
        {
            counted.pushed_since += change.pushed;
        }
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

    /// Awaits a call of the store and notes how long it took.
    pub(super) async fn timed<T>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let start = Instant::now();
        let answer = answer.await;
        self.metrics.store_call(call, start.elapsed(), answer.is_err());
        answer
    }

    /// Adds to the store's totals what was gathered since the last call.
    pub async fn flush_totals(&self) -> Result<()> {
        let gathered = mem::take(&mut *self.figures.totals.lock());
        if gathered.is_empty() {
            return Ok(());
        }
        let changes: Vec<_> = gathered.into_iter().collect();
        if let Err(error) = self.store.add_totals(changes.clone()).await {
            // Kept for the next try. Should this one have reached the store all the same, its second
            // is counted twice: the lesser evil, and only in figures.
            let mut totals = self.figures.totals.lock();
            for (queue, change) in &changes {
                totals.entry(queue.clone()).or_default().add(change);
            }
            return Err(error.into());
        }
        Ok(())
    }

    /// A queue's depth and totals.
    pub async fn queue_stats(&self, name: &QueueName) -> Result<QueueStats> {
        let queue = self.queues.get(name).await?;
        let depth = self.depth(&queue).await?;
        let mut totals = self.store.totals(name).await?;
        if let Some(more) = self.figures.totals.lock().get(name) {
            totals.add(more);
        }
        let consumers = self.dispatcher(name).map_or(0, |dispatcher| dispatcher.consumers());
        Ok(QueueStats { queue: name.clone(), depth, totals, consumers })
    }

    async fn depth(&self, queue: &Arc<Queue>) -> Result<Depth> {
        let worth = |c: &Counted| {
            if c.cost < CHEAP { Duration::ZERO } else { c.cost * REMEMBER_FACTOR }
        };
        if let Some(counted) = self.figures.remembered(&queue.name, worth) {
            return Ok(counted.depth);
        }
        self.count_depth(queue).await
    }

    /// Unsettled items, counted at most a moment ago, with what was pushed here since.
    pub(super) async fn depth_for_limit(&self, queue: &Arc<Queue>) -> Result<u64> {
        let worth = |c: &Counted| (c.cost * REMEMBER_FACTOR).clamp(LIMIT_AGE, MAX_LIMIT_AGE);
        if let Some(counted) = self.figures.remembered(&queue.name, worth) {
            let depth = counted.depth.unsettled() + counted.pushed_since;
            if depth < queue.max_depth || counted.cost >= CHEAP {
                return Ok(depth);
            }
            // It looks full: make sure, since something may have been settled meanwhile.
        }
        Ok(self.count_depth(queue).await?.unsettled())
    }

    async fn count_depth(&self, queue: &Arc<Queue>) -> Result<Depth> {
        let at = Instant::now();
        let depth = self.store.depth(queue).await?;
        let counted = Counted { depth, at: Instant::now(), cost: at.elapsed(), pushed_since: 0 };
        self.figures.depths.lock().insert(queue.name.clone(), counted);
        self.metrics.depth(&queue.name, &depth);
        Ok(depth)
    }
}
