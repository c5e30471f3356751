//! Work on many items, in batches: how many it may still touch, how fast, how far it is, and whether it is to stop.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// The most items of a batch.
pub(super) const BATCH: u64 = 500;

/// How far work is, and whether it is to stop.
#[derive(Debug, Default)]
pub(super) struct Progress {
    done: AtomicU64,
    stop: CancellationToken,
}

impl Progress {
    /// Returns the progress of work of which so many items are done. Cancelling `stop` ends it between two batches.
    pub(super) fn new(done: u64, stop: CancellationToken) -> Self {
        Self { done: AtomicU64::new(done), stop }
    }

    /// Returns how many items are done.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Adds to the number of items that are done.
    pub(super) fn add(&self, items: u64) {
        self.done.fetch_add(items, Ordering::Relaxed);
    }

    /// Begins to count anew.
    pub(super) fn restart(&self) {
        self.done.store(0, Ordering::Relaxed);
    }

    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Waits, unless the work is stopped before.
    pub(super) async fn pause(&self, pause: Duration) {
        let _ = tokio::time::timeout(pause, self.stop.cancelled()).await;
    }
}

/// Gives work one batch after the other.
pub(super) struct Batches<'a> {
    progress: &'a Progress,
    max_items: u64,
    batch: u64,
    ticks: Option<Interval>,
}

impl<'a> Batches<'a> {
    /// Allows at most `max_items` (0: all), those that are done included, and `rate` per second (0: no limit). With a limit of
    /// the rate there are ten batches per second, or one item at a time for lower rates.
    pub(super) fn new(progress: &'a Progress, max_items: u64, rate: u32) -> Self {
        let max_items = if max_items == 0 { u64::MAX } else { max_items };
        let (batch, ticks) = match u64::from(rate) {
            0 => (BATCH, None),
            rate => {
                let batch = (rate / 10).clamp(1, BATCH);
                let mut ticks = interval(Duration::from_secs_f64(batch as f64 / rate as f64));
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                (batch, Some(ticks))
            }
        };
        Self { progress, max_items, batch, ticks }
    }

    /// Waits until the next batch may begin, and returns how many items it may have. `None`: there are enough, or the work is to
    /// stop.
    pub(super) async fn next(&mut self) -> Option<u64> {
        if self.left() == 0 {
            return None;
        }
        if let Some(ticks) = &mut self.ticks {
            tokio::select! {
                biased;
                () = self.progress.stop.cancelled() => {}
                _ = ticks.tick() => {}
            }
        }
        (!self.progress.is_stopped()).then(|| self.batch.min(self.left()))
    }

    /// Returns how many more items there may be in all.
    pub(super) fn left(&self) -> u64 {
        self.max_items.saturating_sub(self.progress.done())
    }

    /// Returns true if the work is to stop.
    pub(super) fn is_stopped(&self) -> bool {
        self.progress.is_stopped()
    }

    /// Adds to the number of items that are done.
    pub(super) fn did(&self, items: u64) {
        self.progress.add(items);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn batches_keep_to_the_limit_and_to_the_rate() {
        let progress = Progress::default();
        let mut all = Batches::new(&progress, 0, 0);
        assert_eq!(all.next().await, Some(BATCH));
        let mut few = Batches::new(&progress, 3, 0);
        assert_eq!(few.next().await, Some(3));
        few.did(2);
        assert_eq!(few.next().await, Some(1));
        few.did(1);
        assert_eq!(few.next().await, None);
        // What was done before counts.
        let progress = Progress::new(40, CancellationToken::new());
        let mut slow = Batches::new(&progress, 140, 20);
        let begun = tokio::time::Instant::now();
        while let Some(items) = slow.next().await {
            slow.did(items);
        }
        assert_eq!(
            (progress.done(), begun.elapsed().as_millis() / 100),
            (140, 49),
            "50 batches of 2"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_waits_for_its_rate_stops_at_once() {
        let progress = Progress::default();
        let mut one_a_second = Batches::new(&progress, 0, 1);
        assert_eq!(one_a_second.next().await, Some(1));
        let begun = tokio::time::Instant::now();
        let (next, ()) = tokio::join!(one_a_second.next(), async { progress.stop() });
        assert_eq!((next, begun.elapsed()), (None, Duration::ZERO));
    }
}
