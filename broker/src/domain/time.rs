//! Instants and the clock. Time is the store's: all brokers on one store agree on it.

use std::{
    ops::{Add, Sub},
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// An instant: milliseconds since the Unix epoch, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub i64);

/// An instant past all others: 4999-12-31T00:00:00Z. Stores may use the years that follow, up to
/// 9999, which every language can read, for what has no time of its own.
pub const FOREVER: Timestamp = Timestamp(95_617_497_600_000);

/// The longest delay and time to live: ten years.
pub const MAX_SPAN: Duration = Duration::from_hours(87672);

impl Timestamp {
    /// Milliseconds since the Unix epoch.
    pub const fn millis(self) -> i64 {
        self.0
    }

    /// How long until `later`; zero if that is past.
    pub fn until(self, later: Self) -> Duration {
        Duration::from_millis(u64::try_from(later.0 - self.0).unwrap_or(0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    /// Saturates at [`FOREVER`]. Parts of a millisecond are rounded up: nothing is early.
    fn add(self, span: Duration) -> Self {
        let millis = span.as_nanos().div_ceil(1_000_000);
        let millis = i64::try_from(millis).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(millis).min(FOREVER.0))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Self;
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

/// A clock that runs evenly between corrections, can be disciplined by a server's time, and that
/// tests can move.
#[derive(Debug)]
pub struct Clock {
    origin: Instant,
    /// Unix time in milliseconds at `origin`, as believed now.
    epoch: AtomicI64,
}

impl Clock {
    /// A clock set by this machine's time.
    pub fn system() -> Self {
        Self { origin: Instant::now(), epoch: AtomicI64::new(system_millis()) }
    }

    /// The time now.
    pub fn now(&self) -> Timestamp {
        Timestamp(self.epoch.load(Ordering::Relaxed) + self.origin.elapsed().as_millis() as i64)
    }

    /// Sets the clock: it is `now` at this instant.
    pub fn set(&self, now: Timestamp) {
        self.epoch.store(now.0 - self.origin.elapsed().as_millis() as i64, Ordering::Relaxed);
    }

    /// Moves the clock forward; for tests.
    pub fn advance(&self, by: Duration) {
        self.epoch.fetch_add(by.as_millis() as i64, Ordering::Relaxed);
    }

    /// This machine's time, whatever the clock says.
    pub fn machine_time() -> Timestamp {
        Timestamp(system_millis())
    }
}

fn system_millis() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}
