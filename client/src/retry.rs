//! How long to wait before the next try: of calls and connections, and of items.

use std::{fmt, time::Duration};

use tonic::Status;

use crate::error::retry_delay;

/// Exponential back-off with jitter: each delay is drawn at random from the upper half of `initial * 2^n`, at most `max`, so
/// that many clients do not try again at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backoff {
    /// The first delay. Default 50 ms.
    pub initial: Duration,
    /// The longest delay. Default 5 s.
    pub max: Duration,
    /// How long to keep trying one call. Default 60 s.
    pub give_up_after: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(50),
            max: Duration::from_secs(5),
            give_up_after: Duration::from_secs(60),
        }
    }
}

impl Backoff {
    /// Returns the delay before repetition `tries`, counted from 0, and at least what `RetryInfo` in `status` asks for.
    pub(crate) fn delay(&self, tries: u32, status: Option<&Status>) -> Duration {
        let delay = sluicegate_proto::backoff::Backoff::new(self.initial, self.max).delay(tries);
        delay.max(status.and_then(retry_delay).unwrap_or_default())
    }
}

/// An error of a handler that says how the item is to be tried again.
///
/// A consumer finds it as the error itself, boxed, inside an `anyhow::Error` (with context or not), and among the sources of
/// an error. Any other error rolls the item back by the queue's retry policy, with the error's text as reason.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_client::Retry;
///
/// let error = Retry::new("mail server is busy").after(Duration::from_secs(30)).keep_attempt();
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "it does nothing unless the handler returns it"]
pub struct Retry {
    pub(crate) reason: String,
    pub(crate) delay: Option<Duration>,
    pub(crate) keep_attempt: bool,
    pub(crate) dead_letter: bool,
}

impl Retry {
    /// Rolls the item back for this reason, which is kept as `last_reason`, up to 1,024 bytes of it.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), delay: None, keep_attempt: false, dead_letter: false }
    }

    /// Dead-letters the item now, whatever its attempt, for this reason.
    pub fn dead_letter(reason: impl Into<String>) -> Self {
        Self { dead_letter: true, ..Self::new(reason) }
    }

    /// Makes the item eligible after this long, whatever the queue's retry policy says; at most 10 years. Undoes
    /// [`Retry::dead_letter`].
    pub fn after(mut self, delay: Duration) -> Self {
        (self.delay, self.dead_letter) = (Some(delay), false);
        self
    }

    /// Does not count this as a failed attempt. Undoes [`Retry::dead_letter`].
    pub fn keep_attempt(mut self) -> Self {
        (self.keep_attempt, self.dead_letter) = (true, false);
        self
    }
}

impl fmt::Display for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Retry {}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    #[test]
    fn the_delay_the_broker_asks_for_is_kept() {
        let details = ErrorDetails::with_retry_info(Some(Duration::from_secs(9)));
        let status = Status::with_error_details(Code::Unavailable, "", details);
        assert_eq!(Backoff::default().delay(0, Some(&status)), Duration::from_secs(9));
    }
}
