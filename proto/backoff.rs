//! Exponential back-off: how brokers and clients space out what they try again.

use std::time::Duration;

/// Delays that double with each failure, up to a bound.
///
/// Each is drawn at random from the upper half of its range. So processes that failed together do not come back
/// together, and a caller that stops after some number of tries has waited a known time at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
}

impl Backoff {
    /// The first delay is at most `initial`, and no delay is longer than `max`.
    #[must_use]
    pub const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max }
    }

    /// Returns how long to wait after `failures` earlier failures in a row: 0 after the first one.
    #[must_use]
    pub fn delay(&self, failures: u32) -> Duration {
        let longest = self.initial.saturating_mul(1 << failures.min(20)).min(self.max);
        longest.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        for (failures, most) in [(0, 50), (1, 100), (4, 800), (7, 5_000), (u32::MAX, 5_000)] {
            let (delay, most) = (backoff.delay(failures), Duration::from_millis(most));
            assert!(delay >= most / 2 && delay <= most, "{failures}: {delay:?}");
        }
    }
}
