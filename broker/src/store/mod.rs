//! The storage boundary. [`Store`] is the trait that every backend implements: each method is one
//! atomic transition over a batch, with a result per item. The domain decides what happens to an
//! item, and backends translate the decision.
//!
//! # Layout
//! [`Store`] combines one trait per subject: [`ItemStore`], [`ItemAdmin`], [`QueueStore`],
//! [`StatsStore`], [`ScheduleStore`], [`TemplateStore`], [`ReceiptKeyStore`], [`BrokerReportStore`], [`OperationStore`] and
//! [`FiguresStore`]. `types` holds their parameters and results, `reports` what brokers report about themselves,
//! `operations` long work of operators and `stored_work` its text, `figures` past figures of queues, `error` their
//! errors, `decorator` a store around another one, used by [`timed()`] to measure each call, and
//! `unblocked` the notifications of a store's own upkeep. `conformance` is the test suite for every
//! store. [`mongo`] and [`sqlite`] are the backends.
//!
//! # Contract
//! The conformance suite checks the following rules, which every backend keeps:
//! * An `Ok` result means that the change is durable. The one exception is a reserve, which a power
//!   failure may undo if it also ends the broker: then the lease never existed, and its receipt is
//!   stale. After an `Unavailable` error the outcome is unknown. Repeating the call is safe for
//!   settles, and for pushes whose items have a `dedup_id`.
//! * A receipt is valid until its item is reserved again, rolled back, settled or deleted, whatever
//!   the time: a lapsed lease can still be settled.
//! * Receipts and ids are unique across queues and groups. Results are in the order of the
//!   requests.
//! * A future may be dropped at any time without harm to the store. The change may have happened
//!   then. A backend runs an operation that must not stop half-way in a task of its own. A sequence
//!   of several calls is its caller's to finish: `docs/decisions/0014-calls-run-to-their-end.md`
//!   says who drops what.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub(crate) mod decorator;
mod error;
mod figures;
pub mod mongo;
pub(crate) mod operations;
pub(crate) mod reports;
pub mod sqlite;
mod stored_work;
mod timed;
mod types;
mod unblocked;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    domain::{
        Demand, Depth, IdMark, Item, ItemId, ItemState, OperationId, Outcome, Pattern, Pushed,
        Queue, QueueName, QueueTemplate, Schedule, ScheduleChange, ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
};

pub(crate) use self::reports::broker_text;
pub use self::{
    error::{Result, StoreError},
    figures::{FiguresPlace, KeptFigures, QueueFigures},
    operations::{Advance, Claim, Operation, OperationPlace, OperationState, Work},
    reports::{BrokerReport, ConsumerKind, ConsumerReport},
    timed::timed,
    types::{
        Appeared, AtLimitCounts, Capabilities, Created, Deleted, EndedDelivery, Extension,
        FirstLease, ItemDeleted, Links, MAX_NAMED_BYTES, Move, Page, Purged, Push, RedriveFilter,
        Redriven, Reservation, Reserved, Rollback, RollbackTo, Selection, SettingsChanges,
        StoredReceiptKey,
    },
};

/// Durable queues: everything that a backend provides, and what identifies a deployment of it.
#[async_trait]
pub trait Store:
    ItemStore
    + ItemAdmin
    + QueueStore
    + StatsStore
    + ScheduleStore
    + TemplateStore
    + ReceiptKeyStore
    + BrokerReportStore
    + OperationStore
    + FiguresStore
{
    /// Returns the name of this store for logs and the start-up banner, without credentials.
    fn describe(&self) -> String;

    /// Returns what this deployment can do. The result does not change while the store is open.
    fn capabilities(&self) -> Capabilities;

    /// Returns the store's time. All brokers on one store agree on it to within milliseconds.
    fn now(&self) -> Timestamp;

    /// Returns the first four bytes of every lease token that this broker issues.
    fn broker_id(&self) -> [u8; 4];

    /// Sets where to record what only the store knows: how many items share a write, and how long
    /// housekeeping takes. Only the first call has an effect.
    fn measure(&self, metrics: &Arc<Metrics>);

    /// Succeeds if the store can be reached and written to.
    async fn ping(&self) -> Result<()>;

    /// Waits for the work that goes on without callers, such as undoing claims whose items reached nobody, and stops
    /// what the store does by itself. Waits without limit for a store that cannot be reached. A store without such work
    /// returns at once.
    async fn close(&self) {}
}

/// The path of items from producers to consumers, on which speed matters most.
#[async_trait]
pub trait ItemStore: Send + Sync + 'static {
    /// Stores items of one queue. Concurrent calls are group-committed: each returns when its own items are
    /// durable. An item becomes blocked if an unsettled item of the same `ordering_key` exists.
    ///
    /// Calls that one task starts one after another are stored in that order, even if none has
    /// returned yet, and become visible in that order within each queue: never a later item before
    /// an earlier one. Only ordered items (with an ordering key, or in a queue with sequence
    /// numbers) and unordered items may overtake one another, unless the store has
    /// [`one_order`](Capabilities::one_order).
    ///
    /// An item with a [`first_lease`](Push::first_lease) is stored as reserved, in the same write:
    /// nobody ever sees it ready. It is as after a reserve, with one delivery, and its place is that
    /// of its push. A duplicate gets no lease. If the outcome of the push is unknown, the store
    /// itself ends a lease that took effect, in the background, as if there had been none.
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>>;

    /// Chooses the id of an item that is about to be pushed, so that other brokers can be told of it before it is stored
    /// ([`Appeared::Item`]). `None`: the store has no use for that.
    fn choose_id(&self) -> Option<ItemId> {
        None
    }

    /// Marks a place in the order of the pushes through this store: before it are the items whose pushes have ended, behind it those whose pushes begin
    /// from now on.
    fn mark(&self) -> IdMark;

    /// Returns the handle that reserves this queue's items. A broker has one handle per queue that
    /// it delivers from. The first reserve of a handle scans from the start of the queue, so that
    /// earlier hints need not be passed on.
    ///
    /// While the handle exists, the store maintains the queue on its own. It unblocks ordering keys
    /// whose next item was left blocked between two writes, as when a broker was killed after
    /// settling one item and before unblocking the next, or when an item expired.
    /// [`Self::unblocked`] reports this.
    fn reserver(&self, queue: &QueueName) -> Box<dyn Reserver>;

    /// Deletes items, or keeps them as history. Keeps a tombstone for as long as a `dedup_id` must
    /// be remembered. The outcome of each item is exact: `Ok`, `LeaseLost` or `Gone`.
    async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>>;

    /// Rolls items back. Returns `Ok`, `DeadLettered`, `LeaseLost` or `Gone` for each.
    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>>;

    /// Sets the end of each lease. Returns `Ok`, `LeaseLost` or `Gone` for each.
    async fn extend(&self, items: Vec<Extension>) -> Result<Vec<Outcome>>;

    /// Moves items into other queues of their group, each in one update. Returns `Ok`, `LeaseLost`
    /// or `Gone` for each. An item keeps its id, its `attempt` starts again at 1, and its
    /// `deliveries` continue.
    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>>;

    /// Commits one item and pushes others, all or nothing, even across groups. Unless the outcome
    /// is `Ok`, nothing is pushed and the list is empty.
    async fn commit_and_push(
        &self,
        held: Reservation,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)>;

    /// Returns for each of these reservations when its lease ends or has ended, or `None` if it no
    /// longer holds its item. Another broker may have extended the lease.
    async fn lease_ends(&self, items: Vec<Reservation>) -> Result<Vec<Option<Timestamp>>>;

    /// Waits until the store itself has made items ready, as when an expired item blocked them, and
    /// returns their queues. Each such queue is returned once. A store without upkeep of its own
    /// never returns.
    async fn unblocked(&self) -> Vec<QueueName>;
}

/// Reserves the items of one queue, one call at a time. The exclusive handle is all the
/// synchronization that a backend needs for cursors and other state about the head of the queue.
#[async_trait]
pub trait Reserver: Send {
    /// Reserves items from the head of the queue and assigns them to `demands` by
    /// [`crate::domain::assign`]. Lapsed leases found on the way count as failed attempts
    /// ([`Queue::failure_outcome`]), and expired items are removed. [`Queue::at_limit`] says where
    /// items at a limit go. While that is unknown, they stay where they are.
    ///
    /// `queue` has the current settings. `appeared` is what other brokers have signalled since the
    /// last call. A backend may ignore this hint if it finds the items without it sooner or later.
    /// The store already knows what this broker itself wrote. A hint must be passed again if its
    /// call failed.
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved>;

    /// Returns when the first item of the queue that was not eligible at `after` becomes eligible,
    /// by the end of its delay or its lease. The time may be too early if a lease was settled or
    /// extended meanwhile.
    async fn next_eligible(&mut self, queue: &Queue, after: Timestamp)
    -> Result<Option<Timestamp>>;
}

/// Items as seen by operators.
#[async_trait]
pub trait ItemAdmin: Send + Sync + 'static {
    /// Lists items, of one state or of all: first in hand-out order, then blocked items, then
    /// history (latest first). Reserved items, in the order in which their leases end, are
    /// somewhere behind the ready items of their priority.
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>>;

    /// Returns one item of the queue.
    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>>;

    /// Deletes one item of the queue. If `only_if` names a state that the item is not in, nothing
    /// is changed and the item's state is returned.
    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted>;

    /// Deletes all items that are not reserved, history included.
    async fn purge(&self, queue: &Queue) -> Result<u64>;

    /// One step of a purge in steps: deletes some of the items that were first pushed by `created_by` and are not reserved,
    /// history included. Each step takes a bounded time, however many items there are.
    async fn purge_step(&self, queue: &Queue, created_by: Timestamp) -> Result<Purged>;

    /// Makes processed items ready again with `attempt` 1, the oldest first, at most `limit`.
    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64>;

    /// Returns the queues from which the ready items of a dead-letter queue came.
    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>>;

    /// Moves ready items of a dead-letter queue to `to`, which is of the same group, with `attempt`
    /// 1, in hand-out order, at most `limit`. Items that return to the queue they came from keep
    /// their sequence numbers. A redrive in steps passes each step the cursor of the step before,
    /// so that nothing is read twice. Items with given ids are read by these.
    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        cursor: Option<&str>,
        limit: u64,
    ) -> Result<Redriven>;
}

/// Queues: their settings, and the links to their dead-letter queues.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// Creates a queue with `revision` 1, or returns the existing one.
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>>;

    /// Returns a queue's settings.
    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>>;

    /// Returns those of the queues that exist, in one read, in no particular order.
    async fn get_queues(&self, names: &[QueueName]) -> Result<Vec<Queue>>;

    /// Lists queues whose names begin with `prefix` by name, starting after `after`, at most `limit`.
    async fn list_queues(
        &self,
        prefix: &str,
        after: Option<&QueueName>,
        limit: usize,
    ) -> Result<Vec<Queue>>;

    /// Replaces the settings of a queue that is still at `queue.revision`, and increments the
    /// revision. Returns `None` if the queue does not exist or has another revision. The caller
    /// then reads it and tries again.
    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>>;

    /// Returns the current state of all links to dead-letter queues. Callers read it before they
    /// read what they base a decision on.
    async fn links(&self) -> Result<Links>;

    /// Returns the queues whose `dead_letter_queue` is this one, at most a hundred of them.
    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>>;

    /// If the links are still `links`, creates a queue whose `revision` is 0, or replaces the
    /// settings of a queue that is still at `queue.revision`, and changes the links. Returns `None`
    /// otherwise.
    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>>;

    /// If the queue is still at `queue.revision` and the links are still `links`, deletes the queue
    /// with its history, tombstones and counters. With `force`, its items are deleted too. Without,
    /// the queue must hold none, which is checked in the same step that deletes the queue. An item
    /// whose push returns after that step is never lost: the queue exists again, created by the
    /// pushing broker or by the store.
    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted>;

    /// Returns a watch over the settings of all queues, beginning with its first call.
    fn watch_settings(&self) -> Box<dyn SettingsWatch>;
}

/// Reports which settings change.
#[async_trait]
pub trait SettingsWatch: Send {
    /// Returns the queues whose settings have changed since the last call. The cost is proportional
    /// to their number. Before the first call any settings may have changed. A change may be
    /// reported twice. After an error no change is skipped.
    async fn changes(&mut self) -> Result<SettingsChanges>;
}

/// Figures about queues, and agreements among brokers.
#[async_trait]
pub trait StatsStore: Send + Sync + 'static {
    /// Counts a queue's items. The cost is linear in their number, so callers cache the result.
    async fn depth(&self, queue: &Queue) -> Result<Depth>;

    /// Adds to the queues' totals, durably.
    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()>;

    /// Returns a queue's totals.
    async fn totals(&self, queue: &QueueName) -> Result<Totals>;

    /// Returns the totals of all queues with any activity, in one read, by which a broker notices
    /// what other brokers do.
    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>>;

    /// Assigns a task of all brokers to this one for the given time, or prolongs the assignment.
    /// Zero gives the task up. Returns false if another broker has the task. The time ends early
    /// rather than late: a broker that has not renewed the assignment by then must have stopped.
    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool>;
}

/// Schedules.
#[async_trait]
pub trait ScheduleStore: Send + Sync + 'static {
    /// Creates a schedule, or returns the existing one.
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>>;

    /// Returns a schedule.
    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>>;

    /// Lists schedules by name, starting after `after`, at most `limit`. Without `payloads`, those
    /// of their items are empty, and are not read.
    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
        payloads: bool,
    ) -> Result<Vec<Schedule>>;

    /// Changes a schedule. Changes of different settings that are made at the same time all take effect.
    async fn update_schedule(
        &self,
        name: &ScheduleName,
        change: &ScheduleChange,
    ) -> Result<Option<Schedule>>;

    /// Pauses or resumes a schedule. Ticks up to `done_until` count as done.
    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>>;

    /// Records that the tick was pushed, unless a later one is recorded already.
    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()>;

    /// Deletes a schedule. Returns false if it does not exist.
    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool>;
}

/// Templates: settings of queues that come into being by use. There are few of them.
#[async_trait]
pub trait TemplateStore: Send + Sync + 'static {
    /// Creates a template with `revision` 1, or returns the existing one of its pattern.
    async fn create_template(&self, template: &QueueTemplate) -> Result<Created<QueueTemplate>>;

    /// Returns a template.
    async fn get_template(&self, pattern: &Pattern) -> Result<Option<QueueTemplate>>;

    /// Returns all templates by pattern, as they are now: none whose creation was answered is missing.
    async fn list_templates(&self) -> Result<Vec<QueueTemplate>>;

    /// Replaces the settings and the `update_time` of a template that is still at `template.revision`, and increments the
    /// revision. Returns `None` if the template does not exist or has another revision.
    async fn update_template(&self, template: &QueueTemplate) -> Result<Option<QueueTemplate>>;

    /// Deletes a template. Returns false if it does not exist.
    async fn delete_template(&self, pattern: &Pattern) -> Result<bool>;
}

/// How many receipt keys a store keeps.
pub const RECEIPT_KEYS: u32 = 3;

/// Keys with which the brokers of this store sign receipts.
#[async_trait]
pub trait ReceiptKeyStore: Send + Sync + 'static {
    /// Returns the keys, the newest first.
    async fn receipt_keys(&self) -> Result<Vec<StoredReceiptKey>>;

    /// Adds a key, unless there is one of its number, and deletes those that are older than the last [`RECEIPT_KEYS`] up to
    /// this number.
    async fn add_receipt_key(&self, key: &StoredReceiptKey) -> Result<()>;
}

/// What each broker of this store reports about itself, for the others to show.
#[async_trait]
pub trait BrokerReportStore: Send + Sync + 'static {
    /// Replaces what this broker has reported. The report is returned for `lasting`, which bounds for how long a killed
    /// broker is shown. Zero withdraws it. The only loss-tolerant write of a store: a report need not survive a failover,
    /// because the next one follows soon. A store with one broker keeps nothing.
    async fn report_broker(&self, report: &BrokerReport, lasting: Duration) -> Result<()>;

    /// Returns the last report of each broker, in no particular order.
    async fn broker_reports(&self) -> Result<Vec<BrokerReport>>;
}

/// Operations. Each is run by the one broker that holds its claim. A claim ends at a time of the store, unless its holder
/// prolongs it; any broker may then claim the operation anew.
#[async_trait]
pub trait OperationStore: Send + Sync + 'static {
    /// Stores a running operation that nobody has claimed, or returns the existing one of its id.
    async fn create_operation(&self, operation: &Operation) -> Result<Created<Operation>>;

    /// Returns an operation. One that only a newer version understands is not returned, here and below.
    async fn get_operation(&self, id: OperationId) -> Result<Option<Operation>>;

    /// Lists operations, the newest first, behind `after`, at most `limit`.
    async fn list_operations(
        &self,
        after: Option<OperationPlace>,
        limit: usize,
    ) -> Result<Vec<Operation>>;

    /// Returns the number of running operations.
    async fn running_operations(&self) -> Result<u64>;

    /// Claims the oldest running operation that nobody has a claim on, for `lasting`.
    async fn claim_operation(&self, claim: Claim, lasting: Duration) -> Result<Option<Operation>>;

    /// Notes how far an operation is, and prolongs the claim to `lasting` from now; zero ends it. Returns the operation as it is
    /// then, or `None` if another broker has claimed it or it is gone, in which case nothing is changed.
    async fn advance_operation(
        &self,
        id: OperationId,
        claim: Claim,
        advance: &Advance,
        lasting: Duration,
    ) -> Result<Option<Operation>>;

    /// Cancels an operation, if it is running. Returns it as it is then.
    async fn cancel_operation(&self, id: OperationId) -> Result<Option<Operation>>;

    /// Deletes operations that ended before this time, and those beyond the `keep` that ended last.
    async fn delete_operations(&self, ended_before: Timestamp, keep: usize) -> Result<()>;
}

/// Past figures of queues, for charts. Any number of brokers may keep figures of the same queues: each adds its own and
/// replaces none of others. Who reads unites them.
#[async_trait]
pub trait FiguresStore: Send + Sync + 'static {
    /// Keeps figures for `lasting` from their time on, in place of those with the same time, step and broker.
    async fn keep_figures(&self, figures: &KeptFigures, lasting: Duration) -> Result<()>;

    /// Returns the first `limit` figures that last, after the given place, in the order of time, step and broker. What a
    /// newer version has written differently is left out.
    async fn kept_figures(
        &self,
        after: Option<FiguresPlace>,
        limit: usize,
    ) -> Result<Vec<KeptFigures>>;
}
