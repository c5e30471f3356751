//! Polls of a queue, and of the reservations its streams hold, that no signal caused. While a queue
//! is quiet, polls become rarer. Their times are random, and are counted from the last poll
//! whatever else happens in between.

use std::time::Duration;

use rand::Rng;
use tokio::time::Instant;

use crate::engine::Engine;

/// Checks of the held reservations that signals cause take at most one part in so many of the time.
const RECONCILE_PART: u32 = 9;
/// How long a signal waits at most for the next check.
const MAX_RECONCILE_PAUSE: Duration = Duration::from_secs(1);

/// The times of a dispatcher's polls.
pub(super) struct Polls {
    min: Duration,
    max: Duration,
    /// Pause between two polls while signals are healthy.
    current: Duration,
    looked: Instant,
    reconciled: Instant,
    /// How long the last check of the held reservations took.
    reconcile_took: Duration,
    /// The random factor of the current pauses.
    spread: f64,
}

impl Polls {
    pub(super) fn new(engine: &Engine) -> Self {
        let (min, max) = (engine.limits.poll_min, engine.limits.poll_max);
        let now = Instant::now();
        let reconcile_took = Duration::ZERO;
        Self {
            min,
            max,
            current: min,
            looked: now,
            reconciled: now,
            reconcile_took,
            spread: spread(),
        }
    }

    /// Records that a reserve returned items.
    pub(super) fn found(&mut self) {
        self.current = self.min;
    }

    /// Records a reserve.
    pub(super) fn looked(&mut self) {
        (self.looked, self.spread) = (Instant::now(), spread());
    }

    /// Records a reserve that a poll caused.
    pub(super) fn missed(&mut self) {
        self.looked();
        self.current = (self.current * 2).min(self.max);
    }

    /// Records a check of the held reservations that began at `begun`.
    pub(super) fn reconciled(&mut self, begun: Instant) {
        self.reconciled = Instant::now();
        self.reconcile_took = self.reconciled - begun;
    }

    /// Returns when to poll the queue next.
    pub(super) fn next_poll(&self, signals_healthy: bool) -> Instant {
        let longest = if signals_healthy { self.current } else { self.min };
        self.looked + longest.mul_f64(self.spread)
    }

    /// Returns when to check the held reservations after a signal. `scarce` says that streams have
    /// little room until this is done. A check reads everything that is held, and nothing is handed out meanwhile.
    pub(super) fn next_reconcile_after_signal(&self, scarce: bool) -> Instant {
        let pause = if scarce { self.reconcile_took * RECONCILE_PART } else { MAX_RECONCILE_PAUSE };
        self.reconciled + pause.min(MAX_RECONCILE_PAUSE)
    }

    /// Returns when to check the held reservations next if there is no signal.
    pub(super) fn next_reconcile(&self, signals_healthy: bool) -> Instant {
        let longest = if signals_healthy { self.max } else { self.min };
        self.reconciled + longest.mul_f64(self.spread)
    }
}

fn spread() -> f64 {
    rand::rng().random_range(0.5..=1.0)
}
