//! Where items live. [`Store`] is the boundary: each method is one atomic transition over a batch,
//! with a result per item. Backends translate; what an item's fate is, the domain decides.
//!
//! Rules every backend keeps (the conformance suite checks them):
//! * An `Ok` answer means the change is durable. Only a reserve's may be undone by a power cut that ends the
//!   broker too: then the lease never was, and its receipt is stale. After an `Unavailable` error the outcome is unknown;
//!   repeating the call is safe for settles, and for pushes whose items carry a `dedup_id`.
//! * A receipt is valid until its item is reserved anew, given back, settled or deleted, whatever
//!   the clock says: a lease that has merely lapsed still settles.
//! * Receipts and ids are unique across queues and groups; results come in the order of the requests.
//! * Futures may be dropped at any time without harm to the store; the change may then have happened.

#[cfg(test)]
pub(crate) mod conformance;
pub mod mongo;
pub mod sqlite;
mod timed;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    domain::{
        ConsumerName, Delivery, Depth, Headers, Item, ItemId, ItemState, LimitReason, NewItem,
        Outcome, Priority, Pushed, Queue, QueueName, Receipt, Schedule, ScheduleName, Timestamp,
        Totals, Want,
    },
    metrics::Metrics,
};

pub use timed::Timed;

/// Why a store could not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It can not be reached, or did not answer in time: the outcome is unknown.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// What the driver said.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// It has no room for what was to be stored; nothing was. What is there can be taken and settled.
    #[error("the store is full: {reason}")]
    Full {
        /// What there is no room on.
        reason: String,
    },
    /// What is stored is not what was stored: it is not answered with.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// What is wrong with it.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// This deployment of the store can not do that; the message says what to change.
    #[error("{0}")]
    Unsupported(String),
    /// A page token or cursor that this store did not give out.
    #[error("not a page token of this broker")]
    BadCursor,
    /// Anything else: a defect, here or in the store.
    #[error("the store failed: {reason}")]
    Internal {
        /// What the driver said.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

/// Result of a store call.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

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
pub struct Held {
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
    pub held: Held,
    /// Where it goes.
    pub to: RollbackTo,
    /// Why; `None` leaves `last_reason` as it is.
    pub reason: Option<String>,
}

/// An item to move.
#[derive(Debug, Clone)]
pub struct Move {
    /// The reservation.
    pub held: Held,
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

/// How far changes of queues' settings have been read; see [`Store::settings_changes`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SettingsMark {
    /// The time or number up to which all changes were read.
    at: i64,
    /// Changes read before that may still be found again: the queue, when, and its revision.
    seen: std::collections::HashSet<(QueueName, i64, i64)>,
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

/// Durable queues.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// What to call this store in logs and on the start-up banner, with no credentials in it.
    fn describe(&self) -> String;

    /// The store's time: all brokers on one store agree on it to within milliseconds.
    fn now(&self) -> Timestamp;

    /// The four bytes that begin every lease token this broker makes.
    fn broker_id(&self) -> [u8; 4];

    /// Says where to note what the store alone knows: how many items share a write, how long housekeeping takes.
    /// The first call counts.
    fn measure(&self, metrics: &Arc<Metrics>);

    /// Answers if the store can be reached and written to.
    async fn ping(&self) -> Result<()>;

    // Queues.

    /// Creates a queue, with `revision` 1; answers the one that is there if there is one.
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>>;

    /// A queue's settings.
    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>>;

    /// Queues by name, from the one after `after`, at most `limit`.
    async fn list_queues(&self, after: Option<&QueueName>, limit: usize) -> Result<Vec<Queue>>;

    /// Replaces the settings of a queue that is still at `queue.revision`, and adds one to that.
    /// `None` if it is not there or has another revision: read it and try again.
    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>>;

    /// The present state of all links to dead-letter queues. Read it before what is decided by it.
    async fn links(&self) -> Result<Links>;

    /// The queues whose `dead_letter_queue` is this one, at most a hundred of them.
    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>>;

    /// Creates a queue of `revision` 0, or replaces the settings of one that is still at
    /// `queue.revision`, if the links are still `links`; they change by that. `None` if not.
    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>>;

    /// Deletes a queue that is still at `queue.revision` and the links still `links`, with all its history,
    /// tombstones and counters. With `force` its items are deleted too; without, it must hold none,
    /// which is tested in the very step that deletes the queue. An item whose push is answered after
    /// that step is never lost: it is in the queue made anew, by whoever pushes to it or by the store.
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted>;

    /// Which queues' settings have changed since the mark was made, at a cost that goes with how many
    /// have; moves the mark on. A change may be told twice.
    async fn settings_changes(&self, mark: &mut SettingsMark) -> Result<SettingsChanges>;

    // Items: the hot path.

    /// Stores items. Concurrent calls are group-committed: each is answered when its own items are durable.
    /// Items with an `ordering_key` behind an unsettled one of the same key become blocked.
    ///
    /// Calls that one task starts one after another are stored in that order, though none is answered yet, and of one
    /// queue they become visible in it: never a later item before an earlier one.
    /// Only items with a place in an order (a key, a queue with sequence numbers) and those without may
    /// pass each other.
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>>;

    /// Reserves items from the head of the queue and deals them to `wants` by [`crate::domain::assign`].
    /// Lapsed leases met on the way count as failed attempts ([`Queue::fate`]); expired items are removed.
    /// Items at a limit go where [`Queue::at_limit`] says, and stay where they are while that is unknown.
    /// Called by one task per queue and broker at a time.
    async fn reserve(&self, queue: &Arc<Queue>, wants: &[Want]) -> Result<Reserved>;

    /// When the first item of the queue that was not eligible at `after` becomes so: delayed, or its
    /// lease ends. Sooner, perhaps, if a lease was settled or prolonged meanwhile.
    async fn next_eligible(&self, queue: &Queue, after: Timestamp) -> Result<Option<Timestamp>>;

    /// A hint, from this broker or another, that items eligible from `since` on have appeared in the
    /// queue; `None`: it is not known from when on, look from the start. Cheap.
    fn look_again(&self, queue: &QueueName, since: Option<Timestamp>);

    /// Deletes items, or keeps them as history; keeps a tombstone while a `dedup_id` must be remembered.
    /// `Ok`, `LeaseLost` or `Gone` for each, exactly.
    async fn commit(&self, items: Vec<Held>) -> Result<Vec<Outcome>>;

    /// Gives items back. `Ok`, `DeadLettered`, `LeaseLost` or `Gone` for each.
    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>>;

    /// Sets the leases' ends. `Ok`, `LeaseLost` or `Gone` for each.
    async fn extend(&self, items: Vec<Held>, until: Vec<Timestamp>) -> Result<Vec<Outcome>>;

    /// Puts items into other queues of their group: one update each. `Ok`, `LeaseLost` or `Gone` for each.
    /// The id stays, `attempt` is 1 again, `deliveries` goes on.
    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>>;

    /// Commits one item and pushes others, all or nothing, across groups too.
    /// Unless the outcome is `Ok` nothing is pushed and the list is empty.
    async fn commit_and_push(&self, held: Held, items: Vec<Push>)
    -> Result<(Outcome, Vec<Pushed>)>;

    /// Which of these reservations still hold their item.
    async fn holds(&self, items: Vec<Held>) -> Result<Vec<bool>>;

    /// Makes ready the first item of ordering keys whose turn was lost between two writes
    /// (a broker killed after settling one item and before waking the next, an item that expired).
    /// Answers how many. Looks at a bounded number of items, each call at the ones that follow.
    async fn repair(&self, queue: &Queue) -> Result<u64>;

    /// Waits until the store itself has made items ready, as when the one before them expired, and answers in
    /// which queues. Each such queue is told once; a store that does nothing by itself never answers.
    async fn unblocked(&self) -> Vec<QueueName>;

    // Items: for operators.

    /// Items in hand-out order, then blocked ones, then history (latest first); of one state or of all.
    /// Reserved ones, the first to lapse first, stand somewhere behind the ready ones of their level.
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>>;

    /// One item of the queue.
    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>>;

    /// Deletes one item of the queue; of `only_if` another state is answered instead, and nothing changed.
    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted>;

    /// Deletes all items that are not reserved, history included.
    async fn purge(&self, queue: &Queue) -> Result<u64>;

    /// Makes processed items ready again with `attempt` 1, the oldest first; at most `limit`.
    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64>;

    /// The queues from which the ready items of a dead-letter queue came.
    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>>;

    /// Moves ready items of a dead-letter queue to `to`, of the same group, with `attempt` 1, in
    /// hand-out order; at most `limit`. Items keep their sequence numbers if `to` is where they came from.
    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        limit: u64,
    ) -> Result<u64>;

    // Figures.

    /// Counts a queue's items. Linear in their number: callers remember the answer.
    async fn depth(&self, queue: &Queue) -> Result<Depth>;

    /// Adds to the queues' totals, durably.
    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()>;

    /// A queue's totals.
    async fn totals(&self, queue: &QueueName) -> Result<Totals>;

    /// The totals of all queues in which something has happened: one read, by which a broker notices
    /// what others do.
    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>>;

    /// Makes this broker the one that does a task for all, or keeps it so, for the given time; zero gives
    /// the task up. False if another broker has it. The time ends early rather than late: whoever
    /// has not renewed it by then must have stopped.
    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool>;

    // Schedules.

    /// Creates a schedule; answers the one that is there if there is one.
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>>;

    /// A schedule.
    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>>;

    /// Schedules by name, from the one after `after`, at most `limit`.
    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
    ) -> Result<Vec<Schedule>>;

    /// Pauses or resumes a schedule; ticks up to `done_until` are dealt with.
    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>>;

    /// Notes that the tick was pushed, unless a later one was noted before.
    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()>;

    /// Deletes a schedule; false if it was not there.
    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool>;
}
