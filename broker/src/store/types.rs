//! What callers give a store, and what a store returns.

use std::{sync::Arc, time::Duration};

use crate::domain::{
    ConsumerName, Delivery, Headers, ItemId, ItemState, LimitReason, NewItem, Priority, Queue,
    QueueName, Receipt, Timestamp,
};

/// An item to store.
#[derive(Debug, Clone)]
pub struct Push {
    /// The queue it goes to. Items of several queues and groups may share a call.
    pub queue: Arc<Queue>,
    /// The item.
    pub item: NewItem,
    /// Who pushes it.
    pub producer: Option<ConsumerName>,
    /// Remember the `dedup_id` this long instead of the queue's `dedup_window`.
    pub dedup_window: Option<Duration>,
}

/// What a reserve found.
#[derive(Debug, Default)]
pub struct Reserved {
    /// The deliveries, in hand-out order, each with the index of the want it was dealt to.
    pub deliveries: Vec<(usize, Delivery)>,
    /// Items with a lapsed lease that were at a limit: what became of them is [`Queue::at_limit`].
    pub at_limit: AtLimitCounts,
    /// True if items at a limit were met but it is not known where they go ([`crate::domain::AtLimit::Unknown`]). Nothing was
    /// handed out: look into that and ask again.
    pub limit_unknown: bool,
    /// Items found expired and removed.
    pub expired: u64,
    /// Items found to be no longer what was stored: set aside, and logged.
    pub damaged: u64,
    /// True if there may be more ready items: ask again rather than wait.
    pub more: bool,
}

/// How many items left their queue at a limit, by limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtLimitCounts {
    /// At the limit of attempts.
    pub max_attempts: u64,
    /// At the limit of deliveries.
    pub max_deliveries: u64,
}

impl AtLimitCounts {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.max_attempts + self.max_deliveries
    }

    /// Counts items; nothing that lapses is rejected.
    pub(crate) fn add(&mut self, reason: LimitReason, items: u64) {
        match reason {
            LimitReason::MaxDeliveries => self.max_deliveries += items,
            LimitReason::MaxAttempts | LimitReason::Rejected => self.max_attempts += items,
        }
    }
}

/// A receipt to commit, prolong or test, with its queue's settings.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// The queue the item was reserved from.
    pub queue: Arc<Queue>,
    /// Names the reservation.
    pub receipt: Receipt,
}

/// What a rollback makes of its item.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RollbackTo {
    /// Back into its queue.
    Queue {
        /// Eligible from then on.
        eligible_time: Timestamp,
        /// The number of its next attempt.
        attempt: u32,
        /// It never reached a consumer, or its broker shuts down: this time does not count for `max_deliveries`.
        undelivered: bool,
    },
    /// Into this dead-letter queue, which is there and of the same group: ready, with `attempt` 1.
    DeadLetter {
        /// The queue.
        to: QueueName,
        /// How many of its attempts have failed.
        failed_attempts: u32,
        /// Why; for whoever counts.
        reason: LimitReason,
    },
    /// Away, as a commit: into history if the queue has `retention`.
    Discard {
        /// Why; for whoever counts.
        reason: LimitReason,
    },
}

/// An item to give back.
#[derive(Debug, Clone)]
pub struct Rollback {
    /// The reservation.
    pub held: Reservation,
    /// Where it goes.
    pub to: RollbackTo,
    /// Why; `None` leaves `last_reason` as it is.
    pub reason: Option<String>,
}

/// An item to move.
#[derive(Debug, Clone)]
pub struct Move {
    /// The reservation.
    pub held: Reservation,
    /// The queue it goes to; of the same group, which the caller has checked.
    pub to: Arc<Queue>,
    /// Its new payload, if any.
    pub payload: Option<bytes::Bytes>,
    /// Its new media type, if any.
    pub content_type: Option<String>,
    /// Merged into its headers.
    pub headers: Headers,
    /// Its new priority, if any.
    pub priority: Option<Priority>,
    /// Eligible from then on.
    pub eligible_time: Timestamp,
}

/// A page of something, and where the next one starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<T> {
    /// What is on it.
    pub entries: Vec<T>,
    /// Opaque; `None` at the end. Safe in a URL.
    pub next: Option<String>,
}

/// Which processed items to replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// These.
    Ids(Vec<ItemId>),
    /// Those processed from `start` on (included) and before `end`.
    Processed {
        /// Included.
        start: Timestamp,
        /// Excluded.
        end: Timestamp,
    },
}

/// Which items of a dead-letter queue to redrive: all conditions hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RedriveFilter {
    /// Only these, if any are given.
    pub ids: Vec<ItemId>,
    /// Only items dead-lettered from this queue.
    pub origin_queue: Option<QueueName>,
    /// Only items whose `last_reason` contains this; empty: any.
    pub reason_contains: String,
    /// Only items created from then on.
    pub created_from: Option<Timestamp>,
    /// Only items created before.
    pub created_before: Option<Timestamp>,
    /// Only items that were ready by then: what fails again meanwhile is not taken twice.
    pub ready_by: Option<Timestamp>,
}

/// What has appeared in a queue by the doing of other brokers, as far as their signals tell: a hint. The earlier of two
/// includes the later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Appeared {
    /// Items eligible from any time on.
    FromStart,
    /// Items eligible from then on.
    Since(Timestamp),
    /// Nothing.
    #[default]
    Nothing,
}

impl Appeared {
    /// Returns what a signal says; `None`: it is not known from when on.
    pub fn of(since: Option<Timestamp>) -> Self {
        since.map_or(Self::FromStart, Self::Since)
    }

    /// Adds another hint.
    pub fn add(&mut self, other: Self) {
        *self = (*self).min(other);
    }
}

/// Which queues' settings have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingsChanges {
    /// Any may have.
    Unknown,
    /// Those of these queues, or they came or went.
    Of(Vec<QueueName>),
}

/// Names a state of all links from queues to their dead-letter queues: each change of a link and each
/// deletion of a queue makes it another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links(pub i64);

/// What became of the deletion of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// It is gone, with so many items.
    Done(u64),
    /// It holds items and is as it was.
    NotEmpty,
    /// The queue, or links, changed since they were read: nothing was done.
    Overtaken,
}

/// The answer to creating something that may be there already.
#[derive(Debug, Clone, PartialEq)]
pub enum Created<T> {
    /// It is new.
    New(T),
    /// It was there before, as this.
    Existing(T),
}

/// What became of an item to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemDeleted {
    /// It is deleted.
    Done,
    /// It is not there.
    NotFound,
    /// It is in this state, not in that which was asked for; nothing was changed.
    OtherState(ItemState),
}

/// What one deployment of a store can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Several brokers may work on it at once.
    pub shared: bool,
    /// What is stored outlives the broker.
    pub durable: bool,
}
