//! The life of an item, from push to settle.
//!
//! | module | subject |
//! |---|---|
//! | `push` | pushes |
//! | `dispatch`, `consumers`, `subscription` | delivery: one dispatcher per consumed queue reserves items and assigns them to consumers with room |
//! | `settle` | commit, roll back, move, extend |
//! | `rollback` | items that return to their queue because they reached nobody, or because their stream ended |
//! | `receipt_keys` | keys with which receipts are signed |
//! | `failures`, `dead_letter_links` | items at a limit, and dead-letter queues |
//! | `settings_cache` | cached settings of queues |
//! | `created_by_use`, `templates` | queues that use creates, and their settings |
//! | `admin`, `schedules` | operator calls |
//! | `operations`, `batches` | long work of operators, which brokers continue for each other |
//! | `stats`, `depths`, `overview`, `watch` | totals, depths, all queues together, and the notification of changes |
//! | `presence` | which brokers there are, and their consumers |
//! | `unsent` | what streams are assigned and not sent, in all |
//! | `unused_queues` | deletion of queues that use created and nobody uses |
//! | [`background`] | background work |

mod admin;
pub(crate) mod background;
mod batches;
mod committing;
mod consumers;
mod created_by_use;
mod dead_letter_links;
mod depths;
mod dispatch;
mod error;
mod failures;
pub(crate) mod operations;
mod overview;
mod presence;
mod push;
mod receipt_keys;
mod rollback;
mod schedules;
mod settings_cache;
mod settle;
mod stats;
mod subscription;
mod templates;
#[cfg(test)]
mod tests;
mod unsent;
mod unused_queues;
mod watch;

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{FailureDefaults, ItemId, QueueName, ReceiptKeys, Signal, Timestamp, Topic},
    essential::essential,
    metrics::Metrics,
    signals::{Notice, Signals},
    store::{Store, timed},
    tasks::Tasks,
};

use consumers::UnsentBytes;
use dispatch::{Dispatcher, direct::PushesInFlight};
use failures::FailureLog;
use overview::Overview;
use presence::Presence;
use rollback::PendingRollbacks;
use schedules::RefusedTicks;
use settings_cache::Queues;
use stats::Stats;
use unused_queues::UnusedQueues;
use watch::Watched;

pub(crate) use consumers::{InForce, RevokeReason, Revoked};
pub(crate) use error::{EngineError, Result};
pub(crate) use operations::NewOperation;
pub(crate) use overview::{Gauges, QueueNames};
pub(crate) use presence::Broker;
pub(crate) use rollback::OnDisconnect;
pub(crate) use schedules::check_cron;
pub(crate) use settle::{MoveRequest, RollbackRequest};
pub(crate) use stats::QueueStats;
pub(crate) use subscription::{
    ConsumeOptions, Delivered, Flow, Identity, Received, Retirement, Subscription,
};

/// Allows or refuses to create the queue beside those that exist. Asked only if the queue does not exist.
pub(crate) type MayCreate<'a> = &'a (dyn Fn(&QueueName, &QueueNames) -> Result<()> + Send + Sync);

/// Allows everyone to create every queue.
pub(crate) const MAY_CREATE_ALL: MayCreate<'static> = &|_, _| Ok(());

/// The values that the broker's configuration sets.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Largest payload in bytes.
    pub max_payload_bytes: usize,
    /// The lease if neither the consumer nor the queue specifies one.
    pub default_lease: Duration,
    /// Longest lease, and the longest time for which a `renew` stream keeps one item.
    pub max_lease: Duration,
    /// If true, queues are created when they are first pushed to.
    pub auto_create_queues: bool,
    /// Most queues, except for dead-letter queues that the broker creates by itself; 0: no limit.
    pub max_queues: u32,
    /// How long a queue that no operator created or changed may be empty and unused until it is deleted; zero: forever.
    pub unused_queue_ttl: Duration,
    /// Shortest pause between two fallback polls of an idle queue.
    pub poll_min: Duration,
    /// Longest pause between two fallback polls of an idle queue.
    pub poll_max: Duration,
    /// Most bytes that streams are assigned and not sent, as their clients do not read.
    pub max_unsent_bytes: usize,
    /// How long a large push waits at most until it can go directly.
    pub max_push_wait: Duration,
    /// How long consumers may take at shutdown to settle the items they hold.
    pub drain: Duration,
    /// Limits and delays of queues that do not set them.
    pub failure_defaults: FailureDefaults,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 3 << 20,
            default_lease: Duration::from_secs(30),
            max_lease: Duration::from_hours(12),
            auto_create_queues: true,
            max_queues: 10_000,
            unused_queue_ttl: Duration::from_hours(7 * 24),
            poll_min: Duration::from_secs(1),
            poll_max: Duration::from_secs(15),
            max_unsent_bytes: 256 << 20,
            max_push_wait: Duration::from_millis(100),
            drain: Duration::from_secs(3),
            failure_defaults: FailureDefaults::default(),
        }
    }
}

/// The broker without its network interfaces, created once and shared by all of them.
pub(crate) struct Engine {
    store: Arc<dyn Store>,
    signals: Arc<dyn Signals>,
    metrics: Arc<Metrics>,
    limits: Limits,
    queues: Queues,
    stats: Stats,
    overview: Overview,
    presence: Presence,
    watched: Watched,
    unused_queues: UnusedQueues,
    failure_log: FailureLog,
    dispatchers: Mutex<HashMap<QueueName, Arc<Dispatcher>>>,
    pending_rollbacks: PendingRollbacks,
    pushes_in_flight: PushesInFlight,
    unsent: Arc<UnsentBytes>,
    receipt_keys: RwLock<Arc<ReceiptKeys>>,
    /// Cancelled when no more items are to be handed out.
    draining: CancellationToken,
    /// Cancelled when streams are to end.
    stopping: CancellationToken,
    tasks: Tasks,
    /// Held while a link to a dead-letter queue is changed, see [`Engine::turn_to_link`].
    linking: tokio::sync::Mutex<()>,
    /// Held while a template, a schedule or an operation is added, see [`Engine::turn_to_add`].
    adding: tokio::sync::Mutex<()>,
    /// Notified when a schedule is created or changed on this broker.
    schedules_changed: tokio::sync::Notify,
    refused_ticks: Mutex<RefusedTicks>,
    /// Notified when an operation is started on this broker.
    operation_started: tokio::sync::Notify,
}

impl Engine {
    /// Returns an engine on a store. No task runs until a call or [`background::start`] starts one.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        signals: Arc<dyn Signals>,
        metrics: Arc<Metrics>,
        limits: Limits,
    ) -> Arc<Self> {
        let tasks = Tasks::default();
        let store = timed(store, Arc::clone(&metrics));
        Arc::new(Self {
            overview: Overview::default(),
            presence: Presence::new(store.now()),
            watched: Watched::default(),
            unused_queues: UnusedQueues::default(),
            stats: Stats::new(Arc::clone(&store), tasks.clone()),
            queues: Queues::new(Arc::clone(&store), limits.failure_defaults.clone()),
            unsent: Arc::new(UnsentBytes::new(limits.max_unsent_bytes)),
            store,
            signals,
            metrics,
            limits,
            failure_log: FailureLog::default(),
            dispatchers: Mutex::default(),
            pending_rollbacks: PendingRollbacks::default(),
            pushes_in_flight: PushesInFlight::default(),
            receipt_keys: RwLock::new(Arc::new(ReceiptKeys::new([]))),
            draining: CancellationToken::new(),
            stopping: CancellationToken::new(),
            tasks,
            linking: tokio::sync::Mutex::default(),
            adding: tokio::sync::Mutex::default(),
            schedules_changed: tokio::sync::Notify::new(),
            refused_ticks: Mutex::default(),
            operation_started: tokio::sync::Notify::new(),
        })
    }

    /// Returns the configured values.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the store's time.
    pub(crate) fn now(&self) -> Timestamp {
        self.store.now()
    }

    /// Returns the store, for background tasks and probes.
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Returns the signals, for background tasks and probes.
    pub(crate) fn signals(&self) -> &Arc<dyn Signals> {
        &self.signals
    }

    /// First half of shutdown: stops handing out items, gives consumers time to settle the items
    /// they hold, and then ends their streams with [`EngineError::ShuttingDown`]. The items that
    /// streams still hold are rolled back, whether their clients read or not.
    pub(crate) async fn drain(self: &Arc<Self>) {
        self.draining.cancel();
        let settled = async {
            for dispatcher in self.all_dispatchers() {
                dispatcher.drained().await;
            }
        };
        // Items held past the limit are rolled back without a failed attempt.
        let _ = tokio::time::timeout(self.limits.drain, settled).await;
        self.stopping.cancel();
        for dispatcher in self.all_dispatchers() {
            if let Some((queue, held)) = dispatcher.end_all(&EngineError::ShuttingDown) {
                self.release_held(&queue, held);
            }
        }
    }

    /// Second half of shutdown, after all streams and calls have ended: waits for running tasks and
    /// writes the totals.
    pub(crate) async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.log_failures(true);
        if let Err(error) = self.flush_totals().await {
            tracing::warn!(%error, "the totals of the last second are lost");
        }
        self.stop_counting().await;
        self.withdraw_report().await;
    }

    /// Returns true from the start of shutdown on.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits for the start of shutdown.
    pub(crate) async fn until_draining(&self) {
        self.draining.cancelled().await;
    }

    /// Refuses new work during shutdown.
    fn check_open(&self) -> Result<()> {
        if self.draining.is_cancelled() { Err(EngineError::ShuttingDown) } else { Ok(()) }
    }

    /// Handles a signal of another broker.
    pub(crate) fn receive(&self, notice: &Notice) {
        match notice {
            Notice::Signal(Signal { queue, topic: Topic::Insert, since, item }) => {
                self.stats.depths.stirred(queue);
                if let Some(dispatcher) = self.dispatcher(queue) {
                    match item.zip(*since) {
                        Some((item, since)) => dispatcher.announced(item, since, self.now()),
                        None => dispatcher.inserted_elsewhere(*since, self.now()),
                    }
                }
            }
            Notice::Signal(Signal { queue, topic: Topic::Settings, .. }) => {
                self.queues.forget(queue);
                self.stats.depths.forget_count(queue);
                self.overview.names_changed();
                if let Some(dispatcher) = self.dispatcher(queue) {
                    dispatcher.look_from_start(self.now());
                }
            }
            Notice::Signal(Signal { queue, topic: Topic::Settle, .. }) => {
                self.stats.depths.stirred(queue);
                if let Some(dispatcher) = self.dispatcher(queue) {
                    dispatcher.settled_elsewhere(self.now());
                }
            }
            Notice::Signal(Signal { queue, topic: Topic::Wanted, .. }) => {
                if let Some(dispatcher) = self.dispatcher(queue) {
                    dispatcher.wanted_elsewhere();
                }
            }
            Notice::Missed => self.rescan_all(),
        }
    }

    /// Makes every consumed queue reserve again, because signals may have been lost.
    pub(crate) fn rescan_all(&self) {
        self.queues.forget_all();
        self.stats.depths.all_stirred();
        self.overview.names_changed();
        for dispatcher in self.all_dispatchers() {
            dispatcher.look_from_start(self.now());
            dispatcher.settled_elsewhere(self.now());
        }
    }

    /// Wakes the queue's consumers on all brokers for items that are eligible from `since` on.
    fn notify_inserted(&self, queue: &QueueName, since: Option<Timestamp>) {
        self.notify_inserted_item(queue, since, None);
    }

    /// Like [`Self::notify_inserted`]. If it is one `item`, other brokers may claim it by its id.
    fn notify_inserted_item(
        &self,
        queue: &QueueName,
        since: Option<Timestamp>,
        item: Option<ItemId>,
    ) {
        if let Some(dispatcher) = self.dispatcher(queue) {
            dispatcher.inserted(since, self.now());
        }
        let (queue, topic) = (queue.clone(), Topic::Insert);
        self.signals.publish(Signal { queue, topic, since, item });
    }

    /// Wakes the consumers of a queue in which the store itself made items ready.
    pub(crate) fn unblocked(&self, queue: &QueueName) {
        self.notify_inserted(queue, None);
    }

    /// Tells the other brokers that the queue's settings have changed.
    fn notify_settings(&self, queue: &QueueName) {
        self.stats.depths.forget_count(queue);
        self.overview.names_changed();
        if let Some(dispatcher) = self.dispatcher(queue) {
            dispatcher.inserted(None, self.now());
        }
        self.publish(queue, Topic::Settings, None);
    }

    fn publish(&self, queue: &QueueName, topic: Topic, since: Option<Timestamp>) {
        self.signals.publish(Signal::new(queue.clone(), topic, since));
    }

    fn dispatcher(&self, queue: &QueueName) -> Option<Arc<Dispatcher>> {
        self.dispatchers.lock().get(queue).cloned()
    }

    fn all_dispatchers(&self) -> Vec<Arc<Dispatcher>> {
        self.dispatchers.lock().values().cloned().collect()
    }

    /// Runs `add` on the queue's dispatcher, which is started if there is none. The lock of the
    /// registry is held meanwhile, so that the dispatcher cannot end while `add` runs.
    fn with_dispatcher<T>(
        self: &Arc<Self>,
        queue: &QueueName,
        add: impl FnOnce(&Arc<Dispatcher>) -> T,
    ) -> T {
        let mut dispatchers = self.dispatchers.lock();
        let dispatcher = dispatchers.entry(queue.clone()).or_insert_with(|| {
            let dispatcher = Arc::new(Dispatcher::new(queue.clone(), Arc::clone(&self.unsent)));
            let engine = Arc::clone(self);
            let run = dispatch::run::run(engine, Arc::clone(&dispatcher));
            self.tasks.spawn(essential("dispatcher", run));
            dispatcher
        });
        add(dispatcher)
    }

    /// Removes an unused dispatcher. Returns false if the dispatcher is in use again.
    fn retire(&self, dispatcher: &Arc<Dispatcher>) -> bool {
        let mut dispatchers = self.dispatchers.lock();
        if dispatcher.is_used() {
            return false;
        }
        dispatchers.remove(dispatcher.queue());
        true
    }
}
