//! Queues: their settings and their statistics.

use std::{collections::BTreeMap, num::NonZeroU64, time::Duration};

use super::{AtLimit, FailureDefaults, GroupName, Limit, NewItem, QueueName, Timestamp};

/// How long a failed item waits before its next attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// Delay after the first failed attempt.
    pub initial_delay: Duration,
    /// Factor from one delay to the next, at least 1.
    pub multiplier: f64,
    /// Upper bound of the delay.
    pub max_delay: Duration,
    /// The random share of each delay, 0 to 1.
    pub jitter: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            initial_delay: Duration::ZERO,
            multiplier: 2.0,
            max_delay: Duration::from_hours(1),
            jitter: 0.0,
        }
    }
}

impl RetryPolicy {
    /// Returns the delay after the failure of `attempt` (1 is the first); `random` is within 0 to 1.
    pub fn delay(&self, attempt: u32, random: f64) -> Duration {
        if self.initial_delay.is_zero() {
            return Duration::ZERO; // zero times infinity is not a number
        }
        let exponent = attempt.saturating_sub(1).min(1_000) as i32;
        let full = self.initial_delay.as_secs_f64() * self.multiplier.powi(exponent);
        let full = full.min(self.max_delay.as_secs_f64()); // infinity ends here too
        Duration::from_secs_f64(full * (1.0 - self.jitter * random))
    }
}

/// A queue and its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Queue {
    /// Its name.
    pub name: QueueName,
    /// Its group.
    pub group: GroupName,
    /// Lease if a consumer asks for none; `None`: the broker's default.
    pub lease: Option<Duration>,
    /// The attempt whose failure dead-letters an item; `None`: the broker's default.
    pub max_attempts: Option<Limit>,
    /// The delivery after which an unsettled item is dead-lettered; `None`: the broker's default.
    pub max_deliveries: Option<Limit>,
    /// The destination of items at a limit; `None`: see [`Queue::dead_letter_target`].
    pub dead_letter_queue: Option<QueueName>,
    /// If true, items at a limit are discarded instead.
    pub discard_failed: bool,
    /// Delay of failed items; `None`: the broker's default.
    pub retry_policy: Option<RetryPolicy>,
    /// Time to live of items pushed without one.
    pub default_ttl: Option<Duration>,
    /// How long committed items are kept; zero: not at all.
    pub retention: Duration,
    /// How long a deduplication id is remembered.
    pub dedup_window: Duration,
    /// The most unsettled items; `None`: no limit.
    pub max_depth: Option<NonZeroU64>,
    /// If true, items get sequence numbers.
    pub sequenced: bool,
    /// If true, nothing is handed out.
    pub paused: bool,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// When it was created.
    pub create_time: Timestamp,
    /// When the queue was last known to be used. A queue that nobody uses for long is deleted. `None`: an operator has
    /// created or changed the queue, and it stays.
    pub unused_since: Option<Timestamp>,
    /// Increases with each change of the settings, and so fences updates.
    pub revision: i64,
    /// The broker's values for what the settings leave open. Never stored.
    pub defaults: FailureDefaults,
    /// The destination of items at a limit, as determined by the broker. Never stored.
    pub at_limit: AtLimit,
}

impl Queue {
    /// Default of `dedup_window`: five minutes.
    pub const DEFAULT_DEDUP_WINDOW: Duration = Duration::from_mins(5);

    /// Returns a queue with the default settings, as a push or a dead letter creates it.
    pub(crate) fn created_by_use(name: QueueName, now: Timestamp) -> Self {
        Self { unused_since: Some(now), ..Self::with_defaults(name, now) }
    }

    /// Returns true if the item takes a sequence number in this queue.
    pub(crate) fn numbers(&self, item: &NewItem) -> bool {
        self.sequenced || item.ordering_key.is_some()
    }

    /// Returns a queue with the default settings, as an operator creates it.
    pub fn with_defaults(name: QueueName, now: Timestamp) -> Self {
        Self {
            name,
            group: GroupName::default(),
            lease: None,
            max_attempts: None,
            max_deliveries: None,
            dead_letter_queue: None,
            discard_failed: false,
            retry_policy: None,
            default_ttl: None,
            retention: Duration::ZERO,
            dedup_window: Self::DEFAULT_DEDUP_WINDOW,
            max_depth: None,
            sequenced: false,
            paused: false,
            labels: BTreeMap::new(),
            create_time: now,
            unused_since: None,
            revision: 0,
            defaults: FailureDefaults::default(),
            at_limit: AtLimit::Unknown,
        }
    }

    /// Returns true if committed items are kept.
    pub fn keeps_history(&self) -> bool {
        !self.retention.is_zero()
    }

    /// Returns true if the user's settings are the same, whatever the broker added.
    pub fn same_settings(&self, other: &Self) -> bool {
        let plain = |queue: &Self| Self {
            create_time: Timestamp::default(),
            unused_since: None,
            revision: 0,
            paused: false,
            defaults: FailureDefaults::default(),
            at_limit: AtLimit::Unknown,
            ..queue.clone()
        };
        plain(self) == plain(other)
    }
}

/// The number of a queue's items in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Depth {
    /// Eligible now, items with a lapsed lease included.
    pub ready: u64,
    /// Eligible later.
    pub delayed: u64,
    /// Leased.
    pub reserved: u64,
    /// Waiting for an earlier item of their ordering key.
    pub blocked: u64,
    /// Kept as history.
    pub processed: u64,
    /// When the first item in hand-out order became eligible.
    pub oldest_ready: Option<Timestamp>,
    /// When the next item becomes eligible or the next lease ends.
    pub next_eligible: Option<Timestamp>,
}

impl Depth {
    /// Returns the number of items that are not settled.
    pub fn unsettled(&self) -> u64 {
        self.ready + self.delayed + self.reserved + self.blocked
    }
}

/// What has happened in a queue since its creation, or a change to be added to that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Items stored by pushes.
    pub pushed: u64,
    /// Times an item was handed out.
    pub delivered: u64,
    /// Items committed.
    pub committed: u64,
    /// Items rolled back by a consumer, or by the broker for one.
    pub rolled_back: u64,
    /// Items moved to another queue.
    pub moved: u64,
    /// Items moved to the dead-letter queue.
    pub dead_lettered: u64,
    /// Items found expired.
    pub expired: u64,
    /// Items committed when they were handed out. Also counted in `committed`.
    pub popped: u64,
    /// Items discarded at a limit.
    pub discarded: u64,
}

impl Totals {
    /// Adds `more` to the totals.
    pub fn add(&mut self, more: &Self) {
        self.pushed += more.pushed;
        self.delivered += more.delivered;
        self.committed += more.committed;
        self.rolled_back += more.rolled_back;
        self.moved += more.moved;
        self.dead_lettered += more.dead_lettered;
        self.expired += more.expired;
        self.popped += more.popped;
        self.discarded += more.discarded;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::OrderingKey;

    #[test]
    fn delays_grow_up_to_their_bound() {
        let policy = RetryPolicy {
            initial_delay: Duration::from_secs(1),
            multiplier: 3.0,
            max_delay: Duration::from_secs(20),
            jitter: 0.5,
        };
        let millis = |attempt, random| policy.delay(attempt, random).as_millis();
        assert_eq!([1, 2, 3, 4, 9].map(|n| millis(n, 0.0)), [1_000, 3_000, 9_000, 20_000, 20_000]);
        assert_eq!(millis(2, 1.0), 1_500);
        assert_eq!(millis(u32::MAX, 0.0), 20_000);
        let at_once = RetryPolicy { initial_delay: Duration::ZERO, ..policy };
        assert_eq!(at_once.delay(u32::MAX, 0.0), Duration::ZERO);
    }

    fn queue() -> Queue {
        Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), Timestamp(5))
    }

    /// A queue that an operator creates stays; a queue that use creates may be deleted when it is unused.
    #[test]
    fn only_what_use_created_may_be_unused() {
        let (queue, name) = (queue(), QueueName::parse("queue", "q").unwrap());
        assert_eq!((queue.create_time, queue.unused_since), (Timestamp(5), None));
        let by_use = Queue::created_by_use(name, Timestamp(5));
        assert_eq!(by_use, Queue { unused_since: Some(Timestamp(5)), ..queue });
    }

    #[test]
    fn items_with_an_ordering_key_and_all_of_a_sequenced_queue_have_numbers() {
        let sequenced = Queue { sequenced: true, ..queue() };
        let plain = NewItem::default();
        let keyed = NewItem { ordering_key: OrderingKey::new("k"), ..plain.clone() };
        assert!(!queue().numbers(&plain) && queue().numbers(&keyed));
        assert!(sequenced.numbers(&plain) && sequenced.numbers(&keyed));
    }

    #[test]
    fn history_is_kept_for_the_retention() {
        assert!(!queue().keeps_history());
        assert!(Queue { retention: Duration::from_millis(1), ..queue() }.keeps_history());
    }

    /// Whoever creates a queue that is there is told whether it has these settings: those of the user alone.
    #[test]
    fn settings_are_the_same_whatever_the_broker_added() {
        let queue = queue();
        let added = Queue {
            create_time: Timestamp(9),
            unused_since: Some(Timestamp(9)),
            revision: 3,
            paused: true,
            defaults: FailureDefaults { max_attempts: Limit::of(7), ..queue.defaults.clone() },
            at_limit: AtLimit::Nowhere,
            ..queue.clone()
        };
        assert!(queue.same_settings(&added) && added.same_settings(&queue));
        let dead_letter_queue = QueueName::parse_optional("queue", "dead").unwrap();
        let others = [
            Queue { group: GroupName::parse("group", "g").unwrap(), ..queue.clone() },
            Queue { lease: Some(Duration::from_secs(1)), ..queue.clone() },
            Queue { max_attempts: Some(Limit::of(0)), ..queue.clone() },
            Queue { max_deliveries: Some(Limit::of(0)), ..queue.clone() },
            Queue { dead_letter_queue, ..queue.clone() },
            Queue { discard_failed: true, ..queue.clone() },
            Queue { retry_policy: Some(RetryPolicy::default()), ..queue.clone() },
            Queue { default_ttl: Some(Duration::from_secs(1)), ..queue.clone() },
            Queue { retention: Duration::from_secs(1), ..queue.clone() },
            Queue { dedup_window: Duration::ZERO, ..queue.clone() },
            Queue { max_depth: NonZeroU64::new(1), ..queue.clone() },
            Queue { sequenced: true, ..queue.clone() },
            Queue { labels: [(String::from("a"), String::new())].into(), ..queue.clone() },
        ];
        for other in others {
            assert!(!queue.same_settings(&other), "{other:?}");
        }
    }

    #[test]
    fn every_item_but_those_of_history_is_unsettled() {
        let depth = Depth {
            ready: 3,
            delayed: 50,
            reserved: 700,
            blocked: 11_000,
            processed: 130_000,
            ..Depth::default()
        };
        assert_eq!(depth.unsettled(), 11_753);
    }

    #[test]
    fn totals_add_up_each_by_itself() {
        let totals = |by: u64| Totals {
            pushed: by,
            delivered: 2 * by,
            committed: 3 * by,
            rolled_back: 4 * by,
            moved: 5 * by,
            dead_lettered: 6 * by,
            expired: 7 * by,
            popped: 8 * by,
            discarded: 9 * by,
        };
        let mut sum = totals(100);
        sum.add(&totals(1));
        assert_eq!(sum, totals(101));
        sum.add(&Totals::default());
        assert_eq!(sum, totals(101));
    }
}
