//! What becomes of an item that was handed out and comes back unsettled.

use std::time::Duration;

use super::{Queue, QueueName, RetryPolicy};

/// What queues do that leave it open; settings of the broker.
#[derive(Debug, Clone, PartialEq)]
pub struct FailureDefaults {
    /// The attempt whose failure dead-letters; 0 for never.
    pub max_attempts: u32,
    /// The delivery after which an unsettled item is dead-lettered; 0 for never.
    pub max_deliveries: u32,
    /// Delay of failed items.
    pub retry_policy: RetryPolicy,
}

impl Default for FailureDefaults {
    fn default() -> Self {
        Self {
            max_attempts: 25,
            max_deliveries: 100,
            retry_policy: RetryPolicy {
                initial_delay: Duration::from_secs(1),
                multiplier: 2.0,
                max_delay: Duration::from_mins(5),
                jitter: 0.2,
            },
        }
    }
}

/// Why an item comes back unsettled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its consumer says that the attempt failed; so does the end of a stream that counts as a failure.
    Rollback,
    /// Its consumer gives it back with no failed attempt.
    Release,
    /// Its consumer says: never again.
    Reject,
    /// Its lease ended. The lease was its delay: it is ready at once.
    Lapse,
    /// The stream that held it ended, through no fault of the item's as far as is known.
    Disconnect,
    /// It did not reach a consumer, or the broker takes it back to shut down: nothing is counted.
    Undelivered,
}

/// Why an item is dead-lettered or discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitReason {
    /// Its last allowed attempt failed.
    MaxAttempts,
    /// It was handed out as often as allowed.
    MaxDeliveries,
    /// Its consumer asked for it.
    Rejected,
}

impl LimitReason {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::MaxAttempts, Self::MaxDeliveries, Self::Rejected];

    /// The reason as metrics and logs name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MaxAttempts => "max_attempts",
            Self::MaxDeliveries => "max_deliveries",
            Self::Rejected => "rejected",
        }
    }
}

/// What becomes of an item that comes back unsettled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It stays in its queue.
    Retry {
        /// The number of its next attempt.
        attempt: u32,
        /// How long it waits.
        delay: Duration,
    },
    /// It leaves its queue; [`Queue::at_limit`] says for where.
    Limit {
        /// Why.
        reason: LimitReason,
        /// How many of its attempts have failed.
        failed_attempts: u32,
    },
}

/// Where the items of a queue go that are at a limit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AtLimit {
    /// Not known yet: whether the dead-letter queue is there has to be looked into first.
    #[default]
    Unknown,
    /// Into this queue, which is there and of the same group.
    DeadLetter(QueueName),
    /// Away, as the queue's settings ask.
    Discard,
    /// Nowhere: they stay, and are tried again and again. Limits have no effect.
    Nowhere,
}

/// What the name of a dead-letter queue ends with that nobody named.
const SUFFIX: &str = ".dead";

impl Queue {
    /// The limit of attempts in force; 0: none.
    pub fn attempt_limit(&self) -> u32 {
        self.max_attempts.unwrap_or(self.defaults.max_attempts)
    }

    /// The limit of deliveries in force; 0: none.
    pub fn delivery_limit(&self) -> u32 {
        self.max_deliveries.unwrap_or(self.defaults.max_deliveries)
    }

    /// The policy by which failed items wait.
    pub fn retry_policy_in_force(&self) -> &RetryPolicy {
        self.retry_policy.as_ref().unwrap_or(&self.defaults.retry_policy)
    }

    /// The queue that receives items at a limit, whether it is there or not. `None`: items are discarded, or they
    /// stay. A queue whose own name ends with `.dead` has none unless it names one, so that no chain of queues
    /// grows; nor has one whose name leaves no room for the suffix.
    pub fn dead_letter_target(&self) -> Option<QueueName> {
        if self.discard_failed {
            return None;
        }
        if let Some(named) = &self.dead_letter_queue {
            return Some(named.clone());
        }
        if self.name.as_str().ends_with(SUFFIX) {
            return None;
        }
        QueueName::parse("dead_letter_queue", &format!("{}{SUFFIX}", self.name)).ok()
    }

    /// Fills in the broker's part: its defaults, and what can be said of [`Queue::at_limit`] by the settings alone.
    #[must_use]
    pub fn in_force(self, defaults: &FailureDefaults) -> Self {
        let at_limit = match self.dead_letter_target() {
            _ if self.discard_failed => AtLimit::Discard,
            Some(_) => AtLimit::Unknown,
            None => AtLimit::Nowhere,
        };
        Self { defaults: defaults.clone(), at_limit, ..self }
    }

    /// What becomes of an item that comes back from its `attempt`, handed out `deliveries` times in this queue;
    /// `random` is within 0 to 1. A limit is reached at exactly its number.
    pub fn fate(&self, cause: Cause, attempt: u32, deliveries: u32, random: f64) -> Fate {
        let failed = match cause {
            Cause::Rollback | Cause::Reject | Cause::Lapse => true,
            Cause::Release | Cause::Disconnect | Cause::Undelivered => false,
        };
        let reached = |limit: u32, count: u32| limit > 0 && count >= limit;
        let reason = match cause {
            Cause::Undelivered => None,
            Cause::Reject => Some(LimitReason::Rejected),
            _ if failed && reached(self.attempt_limit(), attempt) => Some(LimitReason::MaxAttempts),
            _ if reached(self.delivery_limit(), deliveries) => Some(LimitReason::MaxDeliveries),
            _ => None,
        };
        let failed_attempts = attempt.saturating_sub(u32::from(!failed));
        match reason {
            Some(reason) if self.at_limit != AtLimit::Nowhere => {
                Fate::Limit { reason, failed_attempts }
            }
            _ => {
                let waits = matches!(cause, Cause::Rollback | Cause::Reject);
                let delay = if waits {
                    self.retry_policy_in_force().delay(attempt, random)
                } else {
                    Duration::ZERO
                };
                Fate::Retry { attempt: attempt.saturating_add(u32::from(failed)), delay }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Timestamp;

    fn queue(name: &str) -> Queue {
        Queue::with_defaults(QueueName::parse("queue", name).unwrap(), Timestamp(0))
    }

    fn retry(attempt: u32, delay: u64) -> Fate {
        Fate::Retry { attempt, delay: Duration::from_secs(delay) }
    }

    fn limit(reason: LimitReason, failed_attempts: u32) -> Fate {
        Fate::Limit { reason, failed_attempts }
    }

    /// Issue 9, point 3: a queue that says nothing backs off, and its items end at the broker's limits.
    #[test]
    fn a_queue_that_says_nothing_has_the_brokers_defaults() {
        let queue = queue("q");
        let fate = |attempt, deliveries| queue.fate(Cause::Rollback, attempt, deliveries, 0.0);
        assert_eq!(
            [1, 2, 3, 24].map(|n| fate(n, n)),
            [retry(2, 1), retry(3, 2), retry(4, 4), retry(25, 300)]
        );
        assert_eq!(fate(25, 25), limit(LimitReason::MaxAttempts, 25));
        assert_eq!(fate(3, 99), retry(4, 4));
        assert_eq!(fate(3, 100), limit(LimitReason::MaxDeliveries, 3));
        let most_jitter = queue.fate(Cause::Rollback, 1, 1, 1.0);
        assert_eq!(most_jitter, Fate::Retry { attempt: 2, delay: Duration::from_millis(800) });
    }

    #[test]
    fn limits_are_reached_exactly_and_can_be_lifted() {
        let queue = Queue { max_attempts: Some(3), max_deliveries: Some(5), ..queue("q") };
        assert_eq!(queue.fate(Cause::Rollback, 2, 4, 0.0), retry(3, 2));
        assert_eq!(queue.fate(Cause::Rollback, 3, 3, 0.0), limit(LimitReason::MaxAttempts, 3));
        assert_eq!(queue.fate(Cause::Lapse, 3, 3, 0.0), limit(LimitReason::MaxAttempts, 3));
        let unlimited = Queue { max_attempts: Some(0), max_deliveries: Some(0), ..queue };
        assert_eq!(unlimited.fate(Cause::Lapse, 1_000_000, 1_000_000, 0.0), retry(1_000_001, 0));
    }

    #[test]
    fn what_counts_depends_on_the_cause() {
        let queue = Queue { max_attempts: Some(3), max_deliveries: Some(5), ..queue("q") };
        for cause in [Cause::Release, Cause::Disconnect] {
            assert_eq!(queue.fate(cause, 3, 4, 0.0), retry(3, 0), "{cause:?} is no failed attempt");
            assert_eq!(queue.fate(cause, 3, 5, 0.0), limit(LimitReason::MaxDeliveries, 2));
        }
        assert_eq!(queue.fate(Cause::Lapse, 2, 2, 0.0), retry(3, 0), "the lease was its delay");
        assert_eq!(queue.fate(Cause::Undelivered, 3, 9, 0.0), retry(3, 0));
        assert_eq!(queue.fate(Cause::Reject, 1, 1, 0.0), limit(LimitReason::Rejected, 1));
    }

    /// No chain of dead-letter queues, and nothing is dropped where there is nowhere to go.
    #[test]
    fn dead_letter_queues_nobody_named_end_with_the_first() {
        let target = |queue: &Queue| queue.dead_letter_target().map(|name| name.to_string());
        assert_eq!(target(&queue("q")).as_deref(), Some("q.dead"));
        assert_eq!(target(&queue("q.dead")), None);
        assert_eq!(target(&queue(&"x".repeat(123))), Some(format!("{}.dead", "x".repeat(123))));
        assert_eq!(target(&queue(&"x".repeat(124))), None);
        let dead_letter_queue = QueueName::parse_optional("queue", "other").unwrap();
        assert_eq!(
            target(&Queue { dead_letter_queue, ..queue("q.dead") }).as_deref(),
            Some("other")
        );
        let discarding = Queue { discard_failed: true, ..queue("q") };
        assert_eq!(target(&discarding), None);

        let defaults = FailureDefaults::default();
        assert_eq!(queue("q").in_force(&defaults).at_limit, AtLimit::Unknown);
        assert_eq!(discarding.in_force(&defaults).at_limit, AtLimit::Discard);
        let dead = queue("q.dead").in_force(&defaults);
        assert_eq!(dead.at_limit, AtLimit::Nowhere);
        assert_eq!(dead.fate(Cause::Rollback, 25, 100, 0.0), retry(26, 300));
        assert_eq!(dead.fate(Cause::Reject, 1, 1, 0.0), retry(2, 1));
        assert_eq!(dead.fate(Cause::Lapse, 99, 99, 0.0), retry(100, 0));
    }
}
