//! Where items live. [`Store`] is the boundary: each method is one atomic transition over a batch, with a result per
//! item. Backends translate; the domain decides what becomes of an item.
//!
//! # Layout
//! [`Store`] is the sum of one trait per subject: [`ItemStore`], [`ItemAdmin`], [`QueueStore`], [`StatsStore`] and
//! [`ScheduleStore`]. `types` holds what they take and return, `error` why they fail, `decorator` a store around
//! another one, of which [`timed()`] measures each call, `unblocked` what a store's upkeep has to say. `conformance` is the
//! suite that every store has to pass. [`mongo`] and [`sqlite`] are the backends.
//!
//! # Contract
//! Rules that every backend keeps (the conformance suite checks them):
//! * An `Ok` answer means that the change is durable. Only a reserve may be undone by a power cut that ends the
//!   broker too: then the lease never was, and its receipt is stale. After an `Unavailable` error the outcome is
//!   unknown; repeating the call is safe for settles, and for pushes whose items carry a `dedup_id`.
//! * A receipt is valid until its item is reserved anew, rolled back, settled or deleted, whatever the clock says: a
//!   lease that has merely lapsed still settles.
//! * Receipts and ids are unique across queues and groups; results come in the order of the requests.
//! * Futures may be dropped at any time without harm to the store; the change may then have happened. A backend whose
//!   operation must not end half-way runs it in a task of its own. Sequences of several calls are their caller's to
//!   finish: `docs/decisions/0014-calls-run-to-their-end.md` says who drops what.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub(crate) mod decorator;
mod error;
pub mod mongo;
pub mod sqlite;
mod timed;
mod types;
mod unblocked;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    domain::{
        Demand, Depth, Item, ItemId, ItemState, Outcome, Pushed, Queue, QueueName, Schedule,
        ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
};

pub use self::{
    error::{Result, StoreError},
    timed::timed,
    types::{
        Appeared, AtLimitCounts, Capabilities, Created, Deleted, ItemDeleted, Links, Move, Page,
        Push, RedriveFilter, Reservation, Reserved, Rollback, RollbackTo, Selection,
        SettingsChanges,
    },
};

/// Durable queues: all that a backend provides, and what names one deployment of it.
#[async_trait]
pub trait Store: ItemStore + ItemAdmin + QueueStore + StatsStore + ScheduleStore {
    /// Returns the name of this store for logs and the start-up banner, with no credentials in it.
    fn describe(&self) -> String;

    /// Says what this deployment can do. The answer does not change while the store is open.
    fn capabilities(&self) -> Capabilities;

    /// Returns the store's time: all brokers on one store agree on it to within milliseconds.
    fn now(&self) -> Timestamp;

    /// Returns the four bytes that begin every lease token this broker makes.
    fn broker_id(&self) -> [u8; 4];

    /// Says where to note what the store alone knows: how many items share a write, how long housekeeping takes.
    /// The first call counts.
    fn measure(&self, metrics: &Arc<Metrics>);

    /// Succeeds if the store can be reached and written to.
    async fn ping(&self) -> Result<()>;
}

/// Items on their way from producers to consumers: the hot path.
#[async_trait]
pub trait ItemStore: Send + Sync + 'static {
    /// Stores items. Concurrent calls are group-committed: each is answered when its own items are durable.
    /// Items with an `ordering_key` behind an unsettled one of the same key become blocked.
    ///
    /// Calls that one task starts one after another are stored in that order, even while none is answered yet, and
    /// those of one queue become visible in it: never a later item before an earlier one. Only items with a place in
    /// an order (a key, a queue with sequence numbers) and those without may pass each other.
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>>;

    /// Returns what hands out this queue's items. A broker has one per queue that is consumed through it. The first
    /// reserve of each looks from the start of the queue: hints that came before it need not be told.
    ///
    /// While there is one, the store looks after the queue by itself: it gives their turn to ordering keys whose turn was
    /// lost between two writes (a broker killed after settling one item and before unblocking the next, an item that
    /// expired), and tells of it by [`Self::unblocked`].
    fn reserver(&self, queue: &QueueName) -> Box<dyn Reserver>;

    /// Deletes items, or keeps them as history; keeps a tombstone while a `dedup_id` must be remembered.
    /// `Ok`, `LeaseLost` or `Gone` for each, exactly.
    async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>>;

    /// Rolls items back. `Ok`, `DeadLettered`, `LeaseLost` or `Gone` for each.
    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>>;

    /// Sets the end of each lease. `Ok`, `LeaseLost` or `Gone` for each.
    async fn extend(&self, items: Vec<(Reservation, Timestamp)>) -> Result<Vec<Outcome>>;

    /// Moves items into other queues of their group: one update each. `Ok`, `LeaseLost` or `Gone` for each.
    /// The id stays, `attempt` is 1 again, `deliveries` goes on.
    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>>;

    /// Commits one item and pushes others, all or nothing, across groups too.
    /// Unless the outcome is `Ok` nothing is pushed and the list is empty.
    async fn commit_and_push(
        &self,
        held: Reservation,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)>;

    /// Says which of these reservations still hold their item.
    async fn holds(&self, items: Vec<Reservation>) -> Result<Vec<bool>>;

    /// Waits until the store itself has made items ready, as when the one before them expired, and returns in
    /// which queues. Each such queue is told once; a store that does nothing by itself never returns.
    async fn unblocked(&self) -> Vec<QueueName>;
}

/// Hands out the items of one queue, one call at a time: watermarks and whatever else a backend remembers of a queue's
/// head need no more care than that.
#[async_trait]
pub trait Reserver: Send {
    /// Reserves items from the head of the queue and deals them to `demands` by [`crate::domain::assign`].
    /// Lapsed leases met on the way count as failed attempts ([`Queue::failure_outcome`]); expired items are removed.
    /// Items at a limit go where [`Queue::at_limit`] says, and stay where they are while that is unknown.
    ///
    /// `queue` has the settings of the moment. `appeared` is what other brokers' signals told since the call before: a
    /// hint that a backend may ignore, if it finds the items without it, sooner or later. What this broker itself
    /// wrote, the store knows. A hint whose call failed has to be given again.
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved>;

    /// Returns when the first item of the queue that was not eligible at `after` becomes so: delayed, or its
    /// lease ends. Sooner, perhaps, if a lease was settled or prolonged meanwhile.
    async fn next_eligible(&mut self, queue: &Queue, after: Timestamp)
    -> Result<Option<Timestamp>>;
}

/// Items as operators see them.
#[async_trait]
pub trait ItemAdmin: Send + Sync + 'static {
    /// Lists items in hand-out order, then blocked ones, then history (latest first); of one state or of all.
    /// Reserved ones, the first to lapse first, stand somewhere behind the ready ones of their priority.
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>>;

    /// Returns one item of the queue.
    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>>;

    /// Deletes one item of the queue. If `only_if` names another state than the item's, nothing changes, and the
    /// item's state is returned.
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

    /// Returns the queues from which the ready items of a dead-letter queue came.
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
}

/// Queues: their settings, and the links to their dead-letter queues.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// Creates a queue, with `revision` 1; returns the existing one if there is one.
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>>;

    /// Returns a queue's settings.
    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>>;

    /// Lists queues by name, from the one after `after`, at most `limit`.
    async fn list_queues(&self, after: Option<&QueueName>, limit: usize) -> Result<Vec<Queue>>;

    /// Replaces the settings of a queue that is still at `queue.revision`, and adds one to that.
    /// `None` if it is not there or has another revision: read it and try again.
    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>>;

    /// Returns the present state of all links to dead-letter queues. Read it before what is decided by it.
    async fn links(&self) -> Result<Links>;

    /// Returns the queues whose `dead_letter_queue` is this one, at most a hundred of them.
    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>>;

    /// Creates a queue of `revision` 0, or replaces the settings of one that is still at
    /// `queue.revision`, if the links are still `links`; they change by that. `None` if not.
    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>>;

    /// Deletes a queue that is still at `queue.revision` and the links still `links`, with all its history,
    /// tombstones and counters. With `force` its items are deleted too; without, it must hold none,
    /// which is tested in the very step that deletes the queue. An item whose push is answered after
    /// that step is never lost: it is in the queue made anew, by whoever pushes to it or by the store.
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted>;

    /// Returns a watch over the settings of all queues, from its first call on.
    fn watch_settings(&self) -> Box<dyn SettingsWatch>;
}

/// Tells whose settings change.
#[async_trait]
pub trait SettingsWatch: Send {
    /// Returns which queues' settings have changed since the call before, at a cost that goes with how many
    /// have; any may have before the first. A change may be told twice. After an error nothing is passed over.
    async fn changes(&mut self) -> Result<SettingsChanges>;
}

/// Numbers about queues, and what brokers agree on.
#[async_trait]
pub trait StatsStore: Send + Sync + 'static {
    /// Counts a queue's items. Linear in their number: callers remember the answer.
    async fn depth(&self, queue: &Queue) -> Result<Depth>;

    /// Adds to the queues' totals, durably.
    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()>;

    /// Returns a queue's totals.
    async fn totals(&self, queue: &QueueName) -> Result<Totals>;

    /// Returns the totals of all queues in which something has happened: one read, by which a broker notices
    /// what others do.
    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>>;

    /// Makes this broker the one that does a task for all, or keeps it so, for the given time; zero gives
    /// the task up. False if another broker has it. The time ends early rather than late: whoever
    /// has not renewed it by then must have stopped.
    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool>;
}

/// Schedules.
#[async_trait]
pub trait ScheduleStore: Send + Sync + 'static {
    /// Creates a schedule; returns the existing one if there is one.
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>>;

    /// Returns a schedule.
    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>>;

    /// Lists schedules by name, from the one after `after`, at most `limit`.
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
