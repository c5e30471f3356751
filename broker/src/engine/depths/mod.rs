//! The number of items in each queue, counted in the store and corrected by this broker's own
//! changes since the count.
//!
//! The cost of a count is linear in a queue's depth. A count of a deep queue is therefore used for
//! up to [`MAX_AGE`], and one count serves all callers within that time. A shallow queue is counted
//! for every caller. In both cases a caller sees its own last change: either the count began after
//! that change was acknowledged, or the correction includes the change. A change made while a deep
//! queue is being counted may be in both the count and the correction. The next count corrects
//! that.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    domain::{Depth, Queue, QueueName, Totals},
    store::{self, Store},
    tasks::Tasks,
};

use super::Result;

/// Greatest age of a depth that is shown.
const MAX_AGE: Duration = Duration::from_secs(1);
/// A queue of at most this many items is counted for every caller.
const SHALLOW: u64 = 5_000;
/// Pushes are checked against a count that may always be this old.
const LIMIT_AGE: Duration = Duration::from_millis(500);
/// Counts for checks of `max_depth` take at most one part in this many of the time.
const LIMIT_SHARE: u32 = 10;
/// Number of queues that are counted at the same time.
const COUNTED_AT_A_TIME: usize = 8;

/// The change of the number of a queue's items in each state.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) ready: i64,
    pub(super) delayed: i64,
    pub(super) reserved: i64,
    pub(super) blocked: i64,
    pub(super) processed: i64,
}

impl Change {
    /// Returns the change of depth that results from `totals`. Pushed and rolled-back items count
    /// as ready. Expired items are left out, because counts leave them out from the moment of their
    /// expiry.
    pub(super) fn of(totals: &Totals, keeps_history: bool) -> Self {
        let count = |items: u64| i64::try_from(items).unwrap_or(i64::MAX);
        let ended = totals.committed + totals.discarded;
        let settled = count(ended + totals.moved + totals.dead_lettered);
        Self {
            ready: count(totals.pushed) + count(totals.rolled_back) - count(totals.delivered),
            reserved: count(totals.delivered) - count(totals.rolled_back) - settled,
            processed: if keeps_history { count(ended) } else { 0 },
            ..Self::default()
        }
    }

    /// Returns the change of depth from items that came into the queue ready.
    pub(super) fn arrived(items: u64) -> Self {
        Self { ready: i64::try_from(items).unwrap_or(i64::MAX), ..Self::default() }
    }

    fn plus(self, more: Self) -> Self {
        Self {
            ready: self.ready + more.ready,
            delayed: self.delayed + more.delayed,
            reserved: self.reserved + more.reserved,
            blocked: self.blocked + more.blocked,
            processed: self.processed + more.processed,
        }
    }

    fn minus(self, less: Self) -> Self {
        Self {
            ready: self.ready - less.ready,
            delayed: self.delayed - less.delayed,
            reserved: self.reserved - less.reserved,
            blocked: self.blocked - less.blocked,
            processed: self.processed - less.processed,
        }
    }

    /// Returns the depth after this change. What one state lacks is taken from the next, because
    /// leases that lapsed and delays that passed since the count have moved items to states in
    /// which they were not counted.
    fn applied_to(self, depth: &Depth) -> Depth {
        let mut missing = 0;
        let mut shift = |counted: u64, change: i64| {
            let now = counted.cast_signed() + change - missing;
            missing = (-now).max(0);
            now.max(0).cast_unsigned()
        };
        // A second pass takes from the first states what the last one lacks.
        let reserved = shift(depth.reserved, self.reserved);
        let ready = shift(depth.ready, self.ready);
        let delayed = shift(depth.delayed, self.delayed);
        let blocked = shift(depth.blocked, self.blocked);
        let reserved = shift(reserved, 0);
        let ready = shift(ready, 0);
        let processed = depth.processed.saturating_add_signed(self.processed);
        let oldest_ready = depth.oldest_ready.filter(|_| ready > 0);
        Depth { ready, delayed, reserved, blocked, processed, oldest_ready, ..*depth }
    }
}

/// A count, and what its later correction needs.
#[derive(Debug, Clone, Copy)]
struct Counted {
    depth: Depth,
    began: Instant,
    took: Duration,
    /// [`State::changed`] when the count began.
    changed: Change,
    /// [`State::version`] when the count began.
    version: u64,
}

impl Counted {
    fn is_shallow(&self) -> bool {
        self.depth.unsettled() + self.depth.processed <= SHALLOW
    }

    /// Returns [`MAX_AGE`], or more if counting takes so long that the store would do little else.
    fn max_age(&self) -> Duration {
        MAX_AGE.max(self.took * 2)
    }
}

struct State {
    /// Sum of this broker's changes.
    changed: Change,
    /// Increases with every known change in the queue, on this broker or another one.
    version: u64,
    /// Counts that began before this time are void.
    not_before: Option<Instant>,
    counted: Option<Counted>,
}

/// The state of one queue's depth.
struct Known {
    state: Mutex<State>,
    /// Allows one count at a time. A caller that waited for the lock first checks whether the last
    /// count will do.
    counting: tokio::sync::Mutex<()>,
}

/// A depth, and the state of the queue when it was counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Seen {
    /// The depth.
    pub(super) depth: Depth,
    /// While [`Depths::version`] returns this value, nothing is known to have changed.
    pub(super) version: u64,
    /// How long the store took to count.
    pub(super) took: Duration,
}

/// Source of counts.
#[async_trait]
pub(super) trait Counter: Send + Sync + 'static {
    async fn count(&self, queue: &Queue) -> store::Result<Depth>;
}

#[async_trait]
impl Counter for Arc<dyn Store> {
    async fn count(&self, queue: &Queue) -> store::Result<Depth> {
        self.depth(queue).await
    }
}

/// The depths of all queues for which anybody has asked.
pub(super) struct Depths {
    counter: Box<dyn Counter>,
    tasks: Tasks,
    known: Mutex<HashMap<QueueName, Arc<Known>>>,
    counts: Semaphore,
}

impl Depths {
    pub(super) fn new(counter: impl Counter, tasks: Tasks) -> Arc<Self> {
        let counts = Semaphore::new(COUNTED_AT_A_TIME);
        Arc::new(Self { counter: Box::new(counter), tasks, known: Mutex::default(), counts })
    }

    /// Records a change of this broker that the store has acknowledged.
    pub(super) fn changed(&self, queue: &QueueName, change: impl FnOnce() -> Change) {
        if let Some(known) = self.known.lock().get(queue).cloned() {
            let mut state = known.state.lock();
            state.changed = state.changed.plus(change());
            state.version += 1;
        }
    }

    /// Records that something happened whose effect on the depth is unknown, as on another broker.
    pub(super) fn stirred(&self, queue: &QueueName) {
        self.changed(queue, Change::default);
    }

    /// Records that something may have happened in every queue.
    pub(super) fn all_stirred(&self) {
        for known in self.known.lock().values() {
            known.state.lock().version += 1;
        }
    }

    /// Drops the count of a queue that changed too much for a correction.
    pub(super) fn forget_count(&self, queue: &QueueName) {
        if let Some(known) = self.known.lock().get(queue) {
            let mut state = known.state.lock();
            state.version += 1;
            state.counted = None;
            state.not_before = Some(Instant::now());
        }
    }

    /// Drops a queue that no longer exists.
    pub(super) fn forget(&self, queue: &QueueName) {
        self.known.lock().remove(queue);
    }

    /// Returns the version, which increases with every known change; `None` if nobody has asked for
    /// the queue's depth.
    pub(super) fn version(&self, queue: &QueueName) -> Option<u64> {
        let known = self.known.lock().get(queue).cloned()?;
        let version = known.state.lock().version;
        Some(version)
    }

    /// Returns the queues for which anybody has asked.
    pub(super) fn queues(&self) -> Vec<QueueName> {
        self.known.lock().keys().cloned().collect()
    }

    /// Returns the last count of the queue as it was, and when it began.
    pub(super) fn last_count(&self, queue: &QueueName) -> Option<(Seen, Instant)> {
        let known = self.known.lock().get(queue).cloned()?;
        let state = known.state.lock();
        state.counted.map(|counted| (state.seen(&counted, true), counted.began))
    }

    /// Returns the last known depth of the queue, however old.
    pub(super) fn last(&self, queue: &QueueName) -> Option<Depth> {
        let known = self.known.lock().get(queue).cloned()?;
        let state = known.state.lock();
        state.counted.map(|counted| state.corrected(&counted))
    }

    /// Returns the queue's depth, at most [`MAX_AGE`] old and including the caller's own last
    /// change.
    pub(super) async fn depth(&self, queue: &Arc<Queue>) -> Result<Depth> {
        let known = self.known_of(queue);
        let arrival = Instant::now();
        Ok(self.seen(&known, queue, Counted::is_shallow, arrival).await?.depth)
    }

    /// Returns the queue's depth, at most [`MAX_AGE`] old, for repeated calls. One count serves all
    /// callers within that time.
    pub(super) async fn watched(&self, queue: &Arc<Queue>) -> Result<Seen> {
        let known = self.known_of(queue);
        self.seen(&known, queue, |_| false, Instant::now()).await
    }

    /// Returns true if `items` more items seem to fit below the queue's `max_depth`. While the
    /// queue seems to have room, it is counted in the background. Only a push that seems not to fit
    /// waits for a count, and successive pushes share counts.
    pub(super) async fn has_room(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        items: usize,
    ) -> Result<bool> {
        let Some(max_depth) = queue.max_depth else { return Ok(true) };
        let known = self.known_of(queue);
        let fits = |depth: &Depth| depth.unsettled() + items as u64 <= max_depth.get();
        let last = {
            let state = known.state.lock();
            state.counted.map(|counted| (counted, state.corrected(&counted)))
        };
        let Some((counted, depth)) = last else {
            let seen = self.seen(&known, queue, |_| false, Instant::now()).await?;
            return Ok(fits(&seen.depth));
        };
        let pause = counted.took * LIMIT_SHARE;
        let age = counted.began.elapsed();
        if fits(&depth) {
            if age >= pause.max(LIMIT_AGE) {
                self.count_in_background(&known, queue);
            }
            return Ok(true);
        }
        if age < pause {
            return Ok(false);
        }
        // Items may have been settled on another broker.
        let seen = self.seen(&known, queue, |_| true, Instant::now()).await?;
        Ok(fits(&seen.depth))
    }

    fn known_of(&self, queue: &Arc<Queue>) -> Arc<Known> {
        let new = || {
            let state =
                State { changed: Change::default(), version: 0, not_before: None, counted: None };
            Arc::new(Known { state: Mutex::new(state), counting: tokio::sync::Mutex::new(()) })
        };
        Arc::clone(self.known.lock().entry(queue.name.clone()).or_insert_with(new))
    }

    /// Returns the last count if it is recent enough, else a new one. `anew` returns true for a
    /// count that must be repeated for every caller.
    async fn seen(
        &self,
        known: &Known,
        queue: &Arc<Queue>,
        anew: impl Fn(&Counted) -> bool,
        arrival: Instant,
    ) -> Result<Seen> {
        let fit = || {
            let state = known.state.lock();
            let counted = state.counted.filter(|counted| {
                counted.began >= arrival
                    || (!anew(counted) && counted.began.elapsed() <= counted.max_age())
            })?;
            Some(state.seen(&counted, counted.began >= arrival))
        };
        if let Some(seen) = fit() {
            return Ok(seen);
        }
        let _turn = known.counting.lock().await;
        if let Some(seen) = fit() {
            return Ok(seen);
        }
        self.count(known, queue).await
    }

    /// Counts the queue. The caller holds the lock that allows one count at a time.
    async fn count(&self, known: &Known, queue: &Arc<Queue>) -> Result<Seen> {
        let _permit = self.counts.acquire().await; // never closed
        let (changed, version) = {
            let state = known.state.lock();
            (state.changed, state.version)
        };
        let began = Instant::now();
        let depth = self.counter.count(queue).await?;
        let counted = Counted { depth, began, took: began.elapsed(), changed, version };
        let mut state = known.state.lock();
        if state.not_before.is_none_or(|since| since <= began) {
            state.counted = Some(counted);
        }
        Ok(state.seen(&counted, true))
    }

    fn count_in_background(self: &Arc<Self>, known: &Arc<Known>, queue: &Arc<Queue>) {
        if known.counting.try_lock().is_err() {
            return;
        }
        let (depths, known, queue) = (Arc::clone(self), Arc::clone(known), Arc::clone(queue));
        self.tasks.spawn(async move {
            let Ok(_turn) = known.counting.try_lock() else { return };
            if let Err(error) = depths.count(&known, &queue).await {
                tracing::debug!(queue = %queue.name, %error, "could not count");
            }
        });
    }
}

impl State {
    fn corrected(&self, counted: &Counted) -> Depth {
        self.changed.minus(counted.changed).applied_to(&counted.depth)
    }

    /// `fresh` says that the count began after the caller arrived, so that it includes everything
    /// the caller knows.
    fn seen(&self, counted: &Counted, fresh: bool) -> Seen {
        let depth = if fresh { counted.depth } else { self.corrected(counted) };
        Seen { depth, version: counted.version, took: counted.took }
    }
}

#[cfg(test)]
mod tests;
