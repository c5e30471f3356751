//! The parameters and results of a store's calls.

use std::{sync::Arc, time::Duration};

use crate::domain::{
    ConsumerName, Delivery, Headers, ItemId, ItemState, LeaseToken, LimitReason, NewItem, Priority,
    Queue, QueueName, Receipt, Timestamp,
};

/// An item to store.
#[derive(Debug, Clone)]
pub struct Push {
    /// The item's queue.
    pub queue: Arc<Queue>,
    /// The item.
    pub item: NewItem,
    /// Name of the producer.
    pub producer: Option<ConsumerName>,
    /// How long to remember the `dedup_id`, if not for the queue's `dedup_window`.
    pub dedup_window: Option<Duration>,
    /// If given, the item is stored as already reserved.
    pub first_lease: Option<Box<FirstLease>>,
    /// The item's id, if the store has [chosen](super::ItemStore::choose_id) it before the write.
    pub id: Option<ItemId>,
}

impl Push {
    /// Returns a push with the queue's settings, of no named producer.
    pub fn new(queue: Arc<Queue>, item: NewItem) -> Self {
        Self { queue, item, producer: None, dedup_window: None, first_lease: None, id: None }
    }
}

/// A lease under which an item is stored, because its consumer is known before its push. Only for
/// items for which [`NewItem::may_start_reserved`] returns true. Items of one call may be under the
/// same lease.
#[derive(Debug, Clone)]
pub struct FirstLease {
    /// The token of the lease, which the caller makes.
    pub token: LeaseToken,
    /// How long the lease lasts. It begins when the item is stored.
    pub lasts: Duration,
    /// Name of the consumer.
    pub consumer: Option<ConsumerName>,
}

impl FirstLease {
    /// Returns a lease that lasts so long from when its item is stored.
    pub fn new(token: LeaseToken, lasts: Duration, consumer: Option<ConsumerName>) -> Box<Self> {
        Box::new(Self { token, lasts, consumer })
    }
}

/// The result of a reserve.
#[derive(Debug, Default)]
pub struct Reserved {
    /// The deliveries, in hand-out order, each with the index of the demand to which it was
    /// assigned.
    pub deliveries: Vec<(usize, Delivery)>,
    /// Number of items with a lapsed lease that were at a limit. [`Queue::at_limit`] says where
    /// they went.
    pub at_limit: AtLimitCounts,
    /// True if items at a limit were found while their destination is unknown
    /// ([`crate::domain::AtLimit::Unknown`]). Nothing was handed out. The caller determines the
    /// destination and reserves again.
    pub limit_unknown: bool,
    /// Number of expired items that were found and removed.
    pub expired: u64,
    /// Number of items that were found damaged, set aside and logged.
    pub damaged: u64,
    /// True if there may be more ready items: the caller reserves again rather than waits.
    pub more: bool,
    /// True if this is the item of [`Appeared::Item`], and nothing else of the queue was looked at.
    pub is_named: bool,
}

/// Number of items that left their queue at a limit, by limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtLimitCounts {
    /// Items at the limit of attempts.
    pub max_attempts: u64,
    /// Items at the limit of deliveries.
    pub max_deliveries: u64,
}

impl AtLimitCounts {
    /// Returns the sum.
    pub const fn total(&self) -> u64 {
        self.max_attempts + self.max_deliveries
    }

    /// Adds items. A lapsed lease is never [`LimitReason::Rejected`].
    pub(crate) fn add(&mut self, reason: LimitReason, items: u64) {
        match reason {
            LimitReason::MaxDeliveries => self.max_deliveries += items,
            LimitReason::MaxAttempts | LimitReason::Rejected => self.max_attempts += items,
        }
    }
}

/// A receipt to commit, extend or check, with its queue's settings.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// The queue from which the item was reserved.
    pub queue: Arc<Queue>,
    /// Identifies the reservation.
    pub receipt: Receipt,
}

/// A new end of a lease.
#[derive(Debug, Clone)]
pub struct Extension {
    /// Whose lease it is.
    pub held: Reservation,
    /// The new end.
    pub until: Timestamp,
    /// True if the broker renews the lease, and nobody has asked for this end: a lease that ends later stays as it is.
    pub is_renewal: bool,
}

/// How a delivery counts that a rollback ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EndedDelivery {
    /// In `deliveries`, and for `max_deliveries`.
    Counted,
    /// In `deliveries` only: the broker took the item from its consumer, to shut down.
    Withdrawn,
    /// Not at all: the item never reached a consumer.
    Unsent {
        /// The lease that had lapsed when this reservation began. Its receipt is valid again until
        /// the item is reserved anew.
        former_lease: Option<LeaseToken>,
    },
}

/// What a rollback does with its item.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RollbackTo {
    /// The item returns to its queue.
    Queue {
        /// When the item is eligible.
        eligible_time: Timestamp,
        /// The number of the item's next attempt.
        attempt: u32,
        /// How the delivery that ends counts.
        ended: EndedDelivery,
    },
    /// The item goes to this dead-letter queue, which exists and is in the same group. It is ready
    /// there with `attempt` 1.
    DeadLetter {
        /// The queue.
        to: QueueName,
        /// Number of the item's failed attempts.
        failed_attempts: u32,
        /// The limit that was reached, for metrics.
        reason: LimitReason,
    },
    /// The item is removed as by a commit, into history if the queue has `retention`. There it
    /// says why, as a dead letter does.
    Discard {
        /// Number of the item's failed attempts.
        failed_attempts: u32,
        /// The limit that was reached, for metrics.
        reason: LimitReason,
    },
}

/// A rollback of one item.
#[derive(Debug, Clone)]
pub struct Rollback {
    /// The reservation.
    pub held: Reservation,
    /// What happens to the item.
    pub to: RollbackTo,
    /// The new `last_reason`; `None` keeps the old one.
    pub reason: Option<String>,
}

/// A move of one item.
#[derive(Debug, Clone)]
pub struct Move {
    /// The reservation.
    pub held: Reservation,
    /// The destination. The caller has checked that it is in the same group.
    pub to: Arc<Queue>,
    /// The new payload, if any.
    pub payload: Option<bytes::Bytes>,
    /// The new media type, if any.
    pub content_type: Option<String>,
    /// Headers to be merged into those of the item.
    pub headers: Headers,
    /// The new priority, if any.
    pub priority: Option<Priority>,
    /// When the item is eligible.
    pub eligible_time: Timestamp,
}

/// A page of a list, and where the next page starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<T> {
    /// The entries of the page.
    pub entries: Vec<T>,
    /// Cursor of the next page; `None` at the end. Opaque and safe in a URL.
    pub next: Option<String>,
}

/// The processed items to replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// Items with these ids.
    Ids(Vec<ItemId>),
    /// Items processed in this period.
    Processed {
        /// Inclusive.
        start: Timestamp,
        /// Exclusive.
        end: Timestamp,
    },
}

/// The items of a dead-letter queue to redrive. All conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RedriveFilter {
    /// Only items with these ids, if any are given.
    pub ids: Vec<ItemId>,
    /// Only items dead-lettered from this queue.
    pub origin_queue: Option<QueueName>,
    /// Only items whose `last_reason` contains this text. Empty: all.
    pub reason_contains: String,
    /// Only items whose `last_reason` is this.
    pub reason: Option<String>,
    /// Only items created at or after this time.
    pub created_from: Option<Timestamp>,
    /// Only items created before this time.
    pub created_before: Option<Timestamp>,
    /// Only items that were ready by this time, so that items that fail again during the redrive
    /// are not moved twice.
    pub ready_by: Option<Timestamp>,
}

/// The result of one step of a redrive.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Redriven {
    /// Number of items that were moved.
    pub items: u64,
    /// Cursor of the next step; `None` at the end of the queue. Opaque.
    pub next: Option<String>,
}

/// The result of one step of a purge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Purged {
    /// Number of items that were deleted and had not expired.
    pub items: u64,
    /// True if there may be more to delete.
    pub more: bool,
}

/// The largest payload, in bytes, of an item that is announced by its id ([`Appeared::Item`]). Larger ones take their time anyway, and
/// reserves know for how many bytes there is room.
pub const MAX_NAMED_BYTES: usize = 32 << 10;

/// A hint about items that appeared in a queue through other brokers, according to their signals.
/// An earlier time includes all later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Appeared {
    /// Items eligible from any time on.
    FromStart,
    /// Items eligible from this time on.
    Since(Timestamp),
    /// One item, which may not be stored yet, in a queue that the caller knows to be empty but for it.
    Item {
        /// The item.
        id: ItemId,
        /// It is eligible from this time on.
        since: Timestamp,
    },
    /// No items.
    #[default]
    Nothing,
}

impl Appeared {
    /// Returns the content of a signal. `None` means that the time is unknown.
    pub fn of(since: Option<Timestamp>) -> Self {
        since.map_or(Self::FromStart, Self::Since)
    }

    /// Merges another hint into this one.
    pub fn add(&mut self, other: Self) {
        *self = match (self.since(), other.since()) {
            (None, None) => Self::Nothing,
            (None, Some(since)) | (Some(since), None) => Self::of(since),
            (Some(one), Some(other)) => Self::of(one.min(other)),
        };
    }

    /// Returns the item, if it is one.
    pub const fn item(self) -> Option<ItemId> {
        match self {
            Self::Item { id, .. } => Some(id),
            Self::FromStart | Self::Since(_) | Self::Nothing => None,
        }
    }

    /// Returns from when on items have appeared, as [`Self::of`] takes it, or `None` if there are none.
    pub fn since(self) -> Option<Option<Timestamp>> {
        match self {
            Self::FromStart => Some(None),
            Self::Since(since) | Self::Item { since, .. } => Some(Some(since)),
            Self::Nothing => None,
        }
    }
}

/// The queues whose settings have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingsChanges {
    /// Any settings may have changed.
    Unknown,
    /// The settings of these queues changed, or the queues were created or deleted.
    Of(Vec<QueueName>),
}

/// Identifies a state of all links from queues to their dead-letter queues. Each change of a link
/// and each deletion of a queue changes the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links(pub i64);

/// The result of deleting a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// The queue was deleted with this many items.
    Done(u64),
    /// The queue holds items. Nothing was changed.
    NotEmpty,
    /// The queue or the links have changed since they were read. Nothing was changed.
    Overtaken,
}

/// The result of creating something that may exist already.
#[derive(Debug, Clone, PartialEq)]
pub enum Created<T> {
    /// It was created.
    New(T),
    /// It existed already, with these settings.
    Existing(T),
}

/// The result of deleting an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemDeleted {
    /// The item was deleted.
    Done,
    /// The item does not exist.
    NotFound,
    /// The item is in this state instead of the requested one. Nothing was changed.
    OtherState(ItemState),
}

/// The capabilities of one deployment of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Several brokers can use the store at the same time.
    pub shared: bool,
    /// The stored data survives the broker.
    pub durable: bool,
    /// Pushes of items with and without sequence numbers do not overtake each other.
    pub one_order: bool,
}

/// A key as it is kept. Its debug form does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredReceiptKey {
    /// Its number; a newer key has a higher one.
    pub number: u32,
    /// The key itself.
    pub secret: [u8; 32],
    /// When it was made.
    pub created: Timestamp,
}

impl std::fmt::Debug for StoredReceiptKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "receipt key {} of {:?}", self.number, self.created)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_hints_the_earliest_counts_and_no_single_item() {
        let since = |time| Appeared::Since(Timestamp(time));
        let item = |time| Appeared::Item { id: ItemId([1; 12]), since: Timestamp(time) };
        for (one, other, both) in [
            (Appeared::Nothing, Appeared::Nothing, Appeared::Nothing),
            (Appeared::Nothing, since(5), since(5)),
            (since(5), since(3), since(3)),
            (since(5), Appeared::FromStart, Appeared::FromStart),
            (item(5), Appeared::Nothing, since(5)),
            (item(5), since(7), since(5)),
            (item(5), item(3), since(3)),
            (item(5), Appeared::FromStart, Appeared::FromStart),
        ] {
            for (mut hint, added) in [(one, other), (other, one)] {
                hint.add(added);
                assert_eq!(hint, both, "{one:?} and {other:?}");
            }
        }
    }
}
