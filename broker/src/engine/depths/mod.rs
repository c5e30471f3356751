//! How many items each queue holds: counted in the store, and corrected by what this broker itself
//! has changed since.
//!
//! Counting is linear in a queue's depth, so a count of a deep queue is used for up to [`MAX_AGE`], and
//! one count serves all who ask meanwhile. A shallow queue is counted for whoever asks. Either way a caller
//! sees its own last change: the count began after that change was answered, or the correction holds it.
//! What happens while a deep queue is being counted may be in the count and in the correction; the next
//! count puts that right.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::task::TaskTracker;

use crate::{
    domain::{Depth, Queue, QueueName, Totals},
    store::{self, Store},
};

use super::Result;

/// The oldest a depth may be that is shown.
const MAX_AGE: Duration = Duration::from_secs(1);
/// A queue of at most this many items is counted for whoever asks.
const SHALLOW: u64 = 5_000;
/// How old the count may be that pushes are checked against, at least.
const LIMIT_AGE: Duration = Duration::from_millis(500);
/// Checks of `max_depth` count during at most one part in so many of the time.
const LIMIT_SHARE: u32 = 10;
/// Queues that are counted at the same time.
const COUNTED_AT_A_TIME: usize = 8;

/// How the number of a queue's items in each state changed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) ready: i64,
    pub(super) delayed: i64,
    pub(super) reserved: i64,
    pub(super) blocked: i64,
    pub(super) processed: i64,
}

impl Change {
    /// What happened, as a change of depth. Pushed and returned items count as ready. Expired items are
    /// left out: counts leave them out from the moment at which they expire.
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

    /// Items came into the queue, ready.
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

    /// The depth after this change. What one state lacks is taken from the next: a lease that lapsed
    /// or a delay that passed since the count has put items where they were not counted.
    fn applied_to(self, depth: &Depth) -> Depth {
        let mut missing = 0;
        let mut shift = |counted: u64, change: i64| {
            let now = counted.cast_signed() + change - missing;
            missing = (-now).max(0);
            now.max(0).cast_unsigned()
        };
        // Twice around: what the last state lacks is taken from the first.
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

/// A count, and what is to be known to use it later.
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

    /// [`MAX_AGE`], unless counting takes so long that the store would do nothing else.
    fn max_age(&self) -> Duration {
        MAX_AGE.max(self.took * 2)
    }
}

struct State {
    /// What this broker has changed.
    changed: Change,
    /// Grows with whatever is known to have happened in the queue, here or on another broker.
    version: u64,
    /// Counts that began before are void.
    not_before: Option<Instant>,
    counted: Option<Counted>,
}

/// What is known of one queue.
struct Known {
    state: Mutex<State>,
    /// One count at a time; whoever waits for its turn looks first whether the one before will do.
    counting: tokio::sync::Mutex<()>,
}

/// A depth, and what was known of the queue when it was counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Seen {
    /// The depth.
    pub(super) depth: Depth,
    /// If [`Depths::version`] still answers this, nothing is known to have happened since.
    pub(super) version: u64,
    /// How long the store took to count.
    pub(super) took: Duration,
}

/// Who counts.
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

/// The depths of all queues that somebody has asked for.
pub(super) struct Depths {
    counter: Box<dyn Counter>,
    tasks: TaskTracker,
    known: Mutex<HashMap<QueueName, Arc<Known>>>,
    counts: Semaphore,
}

impl Depths {
    pub(super) fn new(counter: impl Counter, tasks: TaskTracker) -> Arc<Self> {
        let counts = Semaphore::new(COUNTED_AT_A_TIME);
        Arc::new(Self { counter: Box::new(counter), tasks, known: Mutex::default(), counts })
    }

    /// The store has answered a change of this broker's.
    pub(super) fn changed(&self, queue: &QueueName, change: impl FnOnce() -> Change) {
        if let Some(known) = self.known.lock().get(queue).cloned() {
            let mut state = known.state.lock();
            state.changed = state.changed.plus(change());
            state.version += 1;
        }
    }

    /// Something happened that this broker cannot put a figure to: on another broker, perhaps.
    pub(super) fn stirred(&self, queue: &QueueName) {
        self.changed(queue, Change::default);
    }

    /// Something happened in any queue.
    pub(super) fn all_stirred(&self) {
        for known in self.known.lock().values() {
            known.state.lock().version += 1;
        }
    }

    /// The queue changed so much that it has to be counted again.
    pub(super) fn forget_count(&self, queue: &QueueName) {
        if let Some(known) = self.known.lock().get(queue) {
            let mut state = known.state.lock();
            state.version += 1;
            state.counted = None;
            state.not_before = Some(Instant::now());
        }
    }

    /// The queue is no longer there.
    pub(super) fn forget(&self, queue: &QueueName) {
        self.known.lock().remove(queue);
    }

    /// Grows with whatever is known to have happened in the queue; `None` if nobody has asked for its depth.
    pub(super) fn version(&self, queue: &QueueName) -> Option<u64> {
        let known = self.known.lock().get(queue).cloned()?;
        let version = known.state.lock().version;
        Some(version)
    }

    /// The queues that somebody has asked for.
    pub(super) fn queues(&self) -> Vec<QueueName> {
        self.known.lock().keys().cloned().collect()
    }

    /// The queue's depth as far as it is known, whatever its age.
    pub(super) fn last(&self, queue: &QueueName) -> Option<Depth> {
        let known = self.known.lock().get(queue).cloned()?;
        let state = known.state.lock();
        state.counted.map(|counted| state.corrected(&counted))
    }

    /// The queue's depth, at most [`MAX_AGE`] old, with the caller's own last change.
    pub(super) async fn depth(&self, queue: &Arc<Queue>) -> Result<Depth> {
        let known = self.known_of(queue);
        let arrival = Instant::now();
        Ok(self.seen(&known, queue, Counted::is_shallow, arrival).await?.depth)
    }

    /// The queue's depth, at most [`MAX_AGE`] old, for whoever asks again and again. One count serves
    /// all who ask within that time.
    pub(super) async fn watched(&self, queue: &Arc<Queue>) -> Result<Seen> {
        let known = self.known_of(queue);
        self.seen(&known, queue, |_| false, Instant::now()).await
    }

    /// True if so many items fit below the queue's `max_depth`, as far as is known. The queue is
    /// counted in the background while it seems to have room; only a push that seems not to fit waits for
    /// a count, and not for each push another.
    pub(super) async fn has_room(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        items: usize,
    ) -> Result<bool> {
        let known = self.known_of(queue);
        let fits = |depth: &Depth| depth.unsettled() + items as u64 <= queue.max_depth;
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
        // Something may have been settled elsewhere.
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

    /// A depth that is fit to be shown: the last one if it is young enough, else a new one. `anew` says of a
    /// count that its like has to be made for whoever arrives.
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

    /// Counts the queue; the caller has seen to it that nobody else does.
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

    /// `fresh`: the count began after the caller came, and holds all that the caller can know of.
    fn seen(&self, counted: &Counted, fresh: bool) -> Seen {
        let depth = if fresh { counted.depth } else { self.corrected(counted) };
        Seen { depth, version: counted.version, took: counted.took }
    }
}

#[cfg(test)]
mod tests;
