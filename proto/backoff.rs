//! Exponential back-off: the delays between the attempts of brokers and clients.

use std::time::Duration;

/// Delays that double with each failure, up to a bound.
///
/// Each delay is drawn at random from the upper half of its range. Processes that failed together
/// therefore do not retry together, and a caller that stops after some number of attempts has
/// waited at least a known time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
}

impl Backoff {
    /// Returns delays of which the first is at most `initial` and none is longer than `max`.
    #[must_use]
    pub const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max }
    }

    /// Returns the delay after a failure that followed `failures` earlier failures in a row: 0 for
    /// the first one.
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
