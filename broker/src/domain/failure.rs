//! Decides what happens to an item that was handed out and returns unsettled.

use std::{num::NonZeroU32, time::Duration};

use super::{Queue, QueueName, RetryPolicy};

/// The number of attempts or deliveries at which an item is dead-lettered, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit(Option<NonZeroU32>);

impl Limit {
    /// Returns the limit at `number`. 0 means none, on the wire, in settings and in the stores.
    pub const fn of(number: u32) -> Self {
        Self(NonZeroU32::new(number))
    }

    /// Returns the number, 0 for none.
    pub fn number(self) -> u32 {
        self.0.map_or(0, NonZeroU32::get)
    }

    /// Returns true if `count` is at or beyond the limit.
    pub fn is_reached(self, count: u32) -> bool {
        self.0.is_some_and(|limit| count >= limit.get())
    }
}

/// The broker's defaults for queues without settings of their own.
#[derive(Debug, Clone, PartialEq)]
pub struct FailureDefaults {
    /// The attempt whose failure dead-letters the item.
    pub max_attempts: Limit,
    /// The delivery after which an unsettled item is dead-lettered.
    pub max_deliveries: Limit,
    /// Delay of failed items.
    pub retry_policy: RetryPolicy,
}

impl Default for FailureDefaults {
    fn default() -> Self {
        Self {
            max_attempts: Limit::of(25),
            max_deliveries: Limit::of(100),
            retry_policy: RetryPolicy {
                initial_delay: Duration::from_secs(1),
                multiplier: 2.0,
                max_delay: Duration::from_mins(5),
                jitter: 0.2,
            },
        }
    }
}

/// The reason why an item returns unsettled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The consumer reported a failed attempt, or the stream ended and had asked that this counts
    /// as one.
    Rollback,
    /// The consumer rolled the item back without a failed attempt.
    Release,
    /// The consumer rejected the item, so that it is never retried.
    Reject,
    /// The lease ended. The lease was the delay, so the item is ready immediately.
    Lapse,
    /// The stream that held the item ended, as far as is known through no fault of the item.
    Disconnect,
    /// The item did not reach a consumer, or the broker rolls it back in order to shut down.
    /// Nothing is counted.
    Undelivered,
}

/// The reason why an item is dead-lettered or discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitReason {
    /// Its last allowed attempt failed.
    MaxAttempts,
    /// It was handed out as often as allowed.
    MaxDeliveries,
    /// Its consumer rejected it.
    Rejected,
}

impl LimitReason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::MaxAttempts, Self::MaxDeliveries, Self::Rejected];

    /// Returns the name of the reason in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MaxAttempts => "max_attempts",
            Self::MaxDeliveries => "max_deliveries",
            Self::Rejected => "rejected",
        }
    }
}

/// What happens to an item that returns unsettled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureOutcome {
    /// It stays in its queue.
    Retry {
        /// The number of its next attempt.
        attempt: u32,
        /// The delay before that attempt.
        delay: Duration,
    },
    /// It leaves its queue; [`Queue::at_limit`] says where it goes.
    Limit {
        /// The limit that was reached.
        reason: LimitReason,
        /// The number of its failed attempts.
        failed_attempts: u32,
    },
}

/// The destination of a queue's items at a limit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AtLimit {
    /// Not known yet: whether the dead-letter queue exists must be checked first.
    #[default]
    Unknown,
    /// This queue, which exists and is in the same group.
    DeadLetter(QueueName),
    /// None: they are discarded, because the settings of the queue say so.
    Discard,
    /// None: they stay and are retried. Limits have no effect.
    Nowhere,
}

/// Suffix of the name of a dead-letter queue if the settings name none.
const SUFFIX: &str = ".dead";

impl Queue {
    /// Returns the limit of attempts in force.
    pub fn attempt_limit(&self) -> Limit {
        self.max_attempts.unwrap_or(self.defaults.max_attempts)
    }

    /// Returns the limit of deliveries in force.
    pub fn delivery_limit(&self) -> Limit {
        self.max_deliveries.unwrap_or(self.defaults.max_deliveries)
    }

    /// Returns true if items may be reserved before a consumer asks for them. Those that a broker holds when it is killed
    /// lose an attempt and a delivery by it, and some queues allow one only.
    pub fn may_reserve_ahead(&self) -> bool {
        !self.attempt_limit().is_reached(1) && !self.delivery_limit().is_reached(1)
    }

    /// Returns the retry policy in force.
    pub fn retry_policy_in_force(&self) -> &RetryPolicy {
        self.retry_policy.as_ref().unwrap_or(&self.defaults.retry_policy)
    }

    /// Returns true if the name ends with `.dead`.
    pub fn is_for_dead_letters(&self) -> bool {
        self.name.as_str().ends_with(SUFFIX)
    }

    /// Returns the queue that receives items at a limit, whether it exists or not. `None` means
    /// that the items are discarded, or that they stay. A queue whose own name ends with `.dead`
    /// has no such queue unless it names one, so that chains of queues do not grow. Neither has a
    /// queue whose name leaves no room for the suffix.
    pub fn dead_letter_target(&self) -> Option<QueueName> {
        if self.discard_failed {
            return None;
        }
        if let Some(named) = &self.dead_letter_queue {
            return Some(named.clone());
        }
        if self.is_for_dead_letters() {
            return None;
        }
        QueueName::parse("dead_letter_queue", &format!("{}{SUFFIX}", self.name)).ok()
    }

    /// Fills in the broker's part: its defaults, and what the settings alone say about
    /// [`Queue::at_limit`].
    #[must_use]
    pub fn in_force(self, defaults: &FailureDefaults) -> Self {
        let at_limit = match self.dead_letter_target() {
            _ if self.discard_failed => AtLimit::Discard,
            Some(_) => AtLimit::Unknown,
            None => AtLimit::Nowhere,
        };
        Self { defaults: defaults.clone(), at_limit, ..self }
    }

    /// Decides what happens to an item that returns from its `attempt`, handed out `deliveries`
    /// times in this queue. `random` is between 0 and 1. A limit is reached at exactly its number.
    pub fn failure_outcome(
        &self,
        cause: Cause,
        attempt: u32,
        deliveries: u32,
        random: f64,
    ) -> FailureOutcome {
        let failed = match cause {
            Cause::Rollback | Cause::Reject | Cause::Lapse => true,
            Cause::Release | Cause::Disconnect | Cause::Undelivered => false,
        };
        let reason = match cause {
            Cause::Undelivered => None,
            Cause::Reject => Some(LimitReason::Rejected),
            _ if failed && self.attempt_limit().is_reached(attempt) => {
                Some(LimitReason::MaxAttempts)
            }
            _ if self.delivery_limit().is_reached(deliveries) => Some(LimitReason::MaxDeliveries),
            _ => None,
        };
        let failed_attempts = attempt.saturating_sub(u32::from(!failed));
        match reason {
            Some(reason) if self.at_limit != AtLimit::Nowhere => {
                FailureOutcome::Limit { reason, failed_attempts }
            }
            _ => {
                let waits = matches!(cause, Cause::Rollback | Cause::Reject);
                let delay = if waits {
                    self.retry_policy_in_force().delay(attempt, random)
                } else {
                    Duration::ZERO
                };
                FailureOutcome::Retry { attempt: attempt.saturating_add(u32::from(failed)), delay }
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

    fn retry(attempt: u32, delay: u64) -> FailureOutcome {
        FailureOutcome::Retry { attempt, delay: Duration::from_secs(delay) }
    }

    fn limit(reason: LimitReason, failed_attempts: u32) -> FailureOutcome {
        FailureOutcome::Limit { reason, failed_attempts }
    }

    /// A queue without settings of its own delays retries, and its items end at the broker's
    /// limits.
    #[test]
    fn a_queue_without_settings_has_the_brokers_defaults() {
        let queue = queue("q");
        let failure_outcome =
            |attempt, deliveries| queue.failure_outcome(Cause::Rollback, attempt, deliveries, 0.0);
        assert_eq!(
            [1, 2, 3, 24].map(|n| failure_outcome(n, n)),
            [retry(2, 1), retry(3, 2), retry(4, 4), retry(25, 300)]
        );
        assert_eq!(failure_outcome(25, 25), limit(LimitReason::MaxAttempts, 25));
        assert_eq!(failure_outcome(3, 99), retry(4, 4));
        assert_eq!(failure_outcome(3, 100), limit(LimitReason::MaxDeliveries, 3));
        let most_jitter = queue.failure_outcome(Cause::Rollback, 1, 1, 1.0);
        assert_eq!(
            most_jitter,
            FailureOutcome::Retry { attempt: 2, delay: Duration::from_millis(800) }
        );
    }

    #[test]
    fn a_queue_in_force_has_the_defaults_of_its_broker() {
        let defaults = FailureDefaults { max_attempts: Limit::of(7), ..FailureDefaults::default() };
        let queue = queue("q").in_force(&defaults);
        assert_eq!(queue.attempt_limit().number(), 7);
        assert_eq!(queue.at_limit, AtLimit::Unknown);
        assert_eq!([0, 1, 25].map(|number| Limit::of(number).number()), [0, 1, 25]);
    }

    #[test]
    fn limits_are_reached_exactly_and_can_be_lifted() {
        let queue = Queue {
            max_attempts: Some(Limit::of(3)),
            max_deliveries: Some(Limit::of(5)),
            ..queue("q")
        };
        assert_eq!(queue.failure_outcome(Cause::Rollback, 2, 4, 0.0), retry(3, 2));
        assert_eq!(
            queue.failure_outcome(Cause::Rollback, 3, 3, 0.0),
            limit(LimitReason::MaxAttempts, 3)
        );
        assert_eq!(
            queue.failure_outcome(Cause::Lapse, 3, 3, 0.0),
            limit(LimitReason::MaxAttempts, 3)
        );
        let unlimited =
            Queue { max_attempts: Some(Limit::of(0)), max_deliveries: Some(Limit::of(0)), ..queue };
        assert_eq!(
            unlimited.failure_outcome(Cause::Lapse, 1_000_000, 1_000_000, 0.0),
            retry(1_000_001, 0)
        );
    }

    /// A broker that is killed costs what it has reserved ahead an attempt and a delivery, and nobody has seen the item.
    #[test]
    fn items_that_have_one_attempt_or_delivery_are_not_reserved_ahead() {
        let queue = |attempts, deliveries| Queue {
            max_attempts: Some(Limit::of(attempts)),
            max_deliveries: Some(Limit::of(deliveries)),
            ..queue("q")
        };
        for (attempts, deliveries) in [(0, 0), (2, 2), (25, 100), (0, 2), (2, 0)] {
            assert!(queue(attempts, deliveries).may_reserve_ahead(), "{attempts} {deliveries}");
        }
        for (attempts, deliveries) in [(1, 1), (1, 0), (0, 1), (1, 100), (25, 1)] {
            assert!(!queue(attempts, deliveries).may_reserve_ahead(), "{attempts} {deliveries}");
        }
    }

    #[test]
    fn reasons_are_named_as_documented() {
        let names = LimitReason::ALL.map(LimitReason::as_str);
        assert_eq!(names, ["max_attempts", "max_deliveries", "rejected"]);
    }

    #[test]
    fn whether_an_attempt_counts_depends_on_the_cause() {
        let queue = Queue {
            max_attempts: Some(Limit::of(3)),
            max_deliveries: Some(Limit::of(5)),
            ..queue("q")
        };
        for cause in [Cause::Release, Cause::Disconnect] {
            assert_eq!(
                queue.failure_outcome(cause, 3, 4, 0.0),
                retry(3, 0),
                "{cause:?} is no failed attempt"
            );
            assert_eq!(
                queue.failure_outcome(cause, 3, 5, 0.0),
                limit(LimitReason::MaxDeliveries, 2)
            );
        }
        assert_eq!(
            queue.failure_outcome(Cause::Lapse, 2, 2, 0.0),
            retry(3, 0),
            "the lease was its delay"
        );
        assert_eq!(queue.failure_outcome(Cause::Undelivered, 3, 9, 0.0), retry(3, 0));
        assert_eq!(
            queue.failure_outcome(Cause::Reject, 1, 1, 0.0),
            limit(LimitReason::Rejected, 1)
        );
    }

    /// There is no chain of dead-letter queues, and no item is discarded for lack of a queue.
    #[test]
    fn default_dead_letter_queues_form_no_chain() {
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
        assert_eq!(dead.failure_outcome(Cause::Rollback, 25, 100, 0.0), retry(26, 300));
        assert_eq!(dead.failure_outcome(Cause::Reject, 1, 1, 0.0), retry(2, 1));
        assert_eq!(dead.failure_outcome(Cause::Lapse, 99, 99, 0.0), retry(100, 0));
    }
}
