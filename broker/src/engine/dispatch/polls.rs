//! Looks at a queue, and at what its streams hold, that no signal asked for: more and more seldom while
//! all is quiet, at random times, counted from the last look whatever else happens in between.

use std::time::Duration;

use rand::Rng;
use tokio::time::Instant;

use crate::engine::Engine;

/// When to look without being told.
pub(super) struct Polls {
    min: Duration,
    max: Duration,
    /// How long after a look the next one is due while signals are healthy.
    current: Duration,
    looked: Instant,
    reconciled: Instant,
    /// The random part of the present pauses.
    spread: f64,
}

impl Polls {
    pub(super) fn new(engine: &Engine) -> Self {
        let (min, max) = (engine.limits.poll_min, engine.limits.poll_max);
        let now = Instant::now();
        Self { min, max, current: min, looked: now, reconciled: now, spread: spread() }
    }

    /// The store was looked at, and brought something.
    pub(super) fn found(&mut self) {
        self.current = self.min;
    }

    /// The store was looked at.
    pub(super) fn looked(&mut self) {
        (self.looked, self.spread) = (Instant::now(), spread());
    }

    /// The poll itself caused a look.
    pub(super) fn missed(&mut self) {
        self.looked();
        self.current = (self.current * 2).min(self.max);
    }

    /// It was found out which reservations are still held.
    pub(super) fn reconciled(&mut self) {
        self.reconciled = Instant::now();
    }

    /// When to look at the queue.
    pub(super) fn next_look(&self, signals_healthy: bool) -> Instant {
        let longest = if signals_healthy { self.current } else { self.min };
        self.looked + longest.mul_f64(self.spread)
    }

    /// When to find out which reservations are still held.
    pub(super) fn next_reconcile(&self, signals_healthy: bool) -> Instant {
        let longest = if signals_healthy { self.max } else { self.min };
        self.reconciled + longest.mul_f64(self.spread)
    }
}

fn spread() -> f64 {
    rand::rng().random_range(0.5..=1.0)
}
