//! Counters and measurements for `/metrics`. The broker creates one [`Metrics`] at start and passes
//! it to every part that records something. There are no globals.

use std::{
    collections::HashSet,
    fmt::{self, Write as _},
    sync::atomic::AtomicU64,
    time::Duration,
};

use parking_lot::RwLock;
#[cfg(feature = "otlp")]
use prometheus_client::encoding::prometheus_protobuf::{self, prometheus_data_model::MetricFamily};
use prometheus_client::{
    encoding::{EncodeLabelValue, LabelValueEncoder, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Metric, Registry, Unit},
};

use crate::domain::{Depth, LimitReason, QueueName, Topic};

/// The most queues with labels of their own; the others share the label value `other`.
pub const MAX_QUEUE_LABELS: usize = 1_000;

/// Media type of [`Metrics::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The reason why the dispatcher of a queue scanned the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something became eligible on this broker, or a consumer got room.
    Local,
    /// Another broker's signal.
    Signal,
    /// Another broker's announcement of an item, which was claimed by its id: the queue was not looked at.
    Announcement,
    /// An item's eligible time came.
    Timer,
    /// The fallback poll.
    Poll,
}

/// The value of a `queue` label; `None` is `other`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct QueueLabel(Option<QueueName>);

impl EncodeLabelValue for QueueLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.0.as_ref().map_or("other", QueueName::as_str))
    }
}

type Word = [(&'static str, &'static str); 1];
type ByQueue = [(&'static str, QueueLabel); 1];
type Counters<L> = Family<L, Counter>;
type Histograms = Family<Word, Histogram, fn() -> Histogram>;

/// The broker's metrics: cheap to record, shared by reference.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// The queues that have labels of their own.
    queues: RwLock<HashSet<QueueName>>,
    pushed: Counters<ByQueue>,
    deduplicated: Counters<ByQueue>,
    delivered: Counters<ByQueue>,
    committed: Counters<ByQueue>,
    rolled_back: Counters<ByQueue>,
    moved: Counters<ByQueue>,
    dead_lettered: Counters<(ByQueue, Word)>,
    discarded: Counters<(ByQueue, Word)>,
    expired: Counters<ByQueue>,
    damaged: Counters<ByQueue>,
    depth: Family<(ByQueue, Word), Gauge>,
    oldest_ready: Family<ByQueue, Gauge<f64, AtomicU64>>,
    counts_queues: Gauge,
    delivery_delay: Family<ByQueue, Histogram, fn() -> Histogram>,
    store_calls: Histograms,
    store_errors: Counters<Word>,
    batches: Histograms,
    sweeps: Histogram,
    streams: Family<Word, Gauge>,
    wakes: Counters<Word>,
    signals_sent: Counters<Word>,
    signals_coalesced: Counters<Word>,
    signals_heard: Counters<Word>,
    signals_dropped: Counters<Word>,
    signals_missed: Counter,
    calls_refused: Counters<Word>,
    unread_bytes: Gauge,
    sqlite_log_bytes: Gauge,
    sqlite_syncs: Histogram,
}

/// 0.1 ms to 26 s.
fn latencies() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 4.0, 10))
}

/// 1 to 8,192 items.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 14))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Returns metrics that are all zero.
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("sluicegate");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The broker's version", build);
        let mut new = Registration(&mut registry);
        Self {
            queues: RwLock::default(),
            pushed: new.metric("items_pushed", "Items stored by pushes"),
            deduplicated: new.metric("items_deduplicated", "Pushed items that were there before"),
            delivered: new.metric("items_delivered", "Times an item was handed out"),
            committed: new.metric("items_committed", "Items committed"),
            rolled_back: new.metric("items_rolled_back", "Items rolled back by consumers or by the broker"),
            moved: new.metric("items_moved", "Items moved to another queue"),
            dead_lettered: new.metric("items_dead_lettered", "Items dead-lettered, by reason"),
            discarded: new.metric("items_discarded", "Items discarded at a limit, by reason"),
            expired: new.metric("items_expired", "Items found expired"),
            damaged: new.metric(
                "items_damaged",
                "Items found to be no longer what was stored, and set aside",
            ),
            depth: new.metric(
                "queue_items",
                "Items in the queue by state; only on the broker that counts the queues for all",
            ),
            counts_queues: new.metric(
                "counts_queues",
                "1 on the broker that counts the queues for all brokers of its store, 0 on the others",
            ),
            oldest_ready: new.seconds(
                "queue_oldest_ready_timestamp",
                "Since when the queue's first item has been eligible, Unix time, as last counted",
                Family::default(),
            ),
            delivery_delay: new.seconds(
                "delivery_delay",
                "From when an item was eligible until it was handed out",
                Family::new_with_constructor(latencies),
            ),
            store_calls: new.seconds(
                "store_call_duration",
                "How long calls of the store took",
                Family::new_with_constructor(latencies),
            ),
            store_errors: new.metric("store_errors", "Calls of the store that failed"),
            batches: new.given(
                "store_batch_items",
                "Items that shared one write to the store",
                Family::new_with_constructor(sizes),
            ),
            sweeps: new.seconds("sweep_duration", "How long housekeeping took", latencies()),
            streams: new.metric("streams_open", "Streams open now"),
            wakes: new.metric("dispatcher_wakes", "Reserves from the store by what caused them"),
            signals_sent: new.metric("signals_sent", "Signals sent to other brokers"),
            signals_coalesced: new.metric(
                "signals_coalesced",
                "Signals that were merged with others of the same window",
            ),
            signals_heard: new.metric("signals_heard", "Signals received from other brokers"),
            signals_dropped: new.metric("signals_dropped", "Signals that could not be sent"),
            signals_missed: new.metric(
                "signals_missed",
                "Times signals may have been missed, so that all queues were scanned",
            ),
            calls_refused: new.metric(
                "calls_refused",
                "Calls that were refused for want of a token or a permission, by reason",
            ),
            unread_bytes: new.metric(
                "unread_answer_bytes",
                "Bytes of large answers that clients have not read",
            ),
            sqlite_log_bytes: new.metric(
                "sqlite_log_bytes",
                "Length of the log beside the SQLite file; 0 on MongoDB",
            ),
            sqlite_syncs: new.seconds("sqlite_sync_duration", "Syncs of SQLite's log", latencies()),
            registry,
        }
    }

    /// Returns all metrics in the OpenMetrics text format.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }

    /// Returns all metrics as messages, under the names that they have on the page.
    #[cfg(feature = "otlp")]
    pub(crate) fn families(&self) -> Result<Vec<MetricFamily>, fmt::Error> {
        prometheus_protobuf::encode(&self.registry)
    }

    /// Counts items that a push stored.
    pub(crate) fn pushed(&self, queue: &QueueName, items: u64) {
        self.count(&self.pushed, queue, items);
    }

    /// Counts pushed items that were recognised as duplicates.
    pub(crate) fn deduplicated(&self, queue: &QueueName, items: u64) {
        self.count(&self.deduplicated, queue, items);
    }

    /// Counts items that were handed out.
    pub(crate) fn delivered(&self, queue: &QueueName, items: u64) {
        self.count(&self.delivered, queue, items);
    }

    /// Counts items that were committed.
    pub(crate) fn committed(&self, queue: &QueueName, items: u64) {
        self.count(&self.committed, queue, items);
    }

    /// Counts items that were rolled back.
    pub(crate) fn rolled_back(&self, queue: &QueueName, items: u64) {
        self.count(&self.rolled_back, queue, items);
    }

    /// Counts items that were moved out of the queue.
    pub(crate) fn moved(&self, queue: &QueueName, items: u64) {
        self.count(&self.moved, queue, items);
    }

    /// Counts items that were dead-lettered.
    pub(crate) fn dead_lettered(&self, queue: &QueueName, reason: LimitReason, items: u64) {
        self.count_by_reason(&self.dead_lettered, queue, reason, items);
    }

    /// Counts items that were discarded at a limit.
    pub(crate) fn discarded(&self, queue: &QueueName, reason: LimitReason, items: u64) {
        self.count_by_reason(&self.discarded, queue, reason, items);
    }

    fn count_by_reason(
        &self,
        family: &Counters<(ByQueue, Word)>,
        queue: &QueueName,
        reason: LimitReason,
        items: u64,
    ) {
        let labels = ([("queue", self.label(queue))], [("reason", reason.as_str())]);
        family.get_or_create(&labels).inc_by(items);
    }

    /// Counts items that were found expired.
    pub(crate) fn expired(&self, queue: &QueueName, items: u64) {
        self.count(&self.expired, queue, items);
    }

    /// Counts items that were found damaged.
    pub(crate) fn damaged(&self, queue: &QueueName, items: u64) {
        self.count(&self.damaged, queue, items);
    }

    /// Records the depth of a queue. Queues past [`MAX_QUEUE_LABELS`] are left out, because depths
    /// do not add up.
    pub(crate) fn depth(&self, queue: &QueueName, depth: &Depth) {
        let queue = [("queue", self.label(queue))];
        if queue[0].1.0.is_none() {
            return;
        }
        for (state, items) in [
            ("ready", depth.ready),
            ("delayed", depth.delayed),
            ("reserved", depth.reserved),
            ("blocked", depth.blocked),
            ("processed", depth.processed),
        ] {
            let labels = (queue.clone(), [("state", state)]);
            self.depth.get_or_create(&labels).set(items as i64);
        }
        match depth.oldest_ready {
            Some(since) => {
                self.oldest_ready.get_or_create(&queue).set(since.millis() as f64 / 1000.0);
            }
            None => {
                self.oldest_ready.remove(&queue);
            }
        }
    }

    /// Records whether this broker is the one that counts the queues for all brokers.
    pub(crate) fn counts_queues(&self, counts: bool) {
        self.counts_queues.set(i64::from(counts));
    }

    /// Removes all depths, because another broker counts the queues, so that a sum over brokers is
    /// correct.
    pub(crate) fn forget_depths(&self) {
        self.depth.clear();
        self.oldest_ready.clear();
    }

    /// The queues that have labels of their own.
    pub(crate) fn queues(&self) -> HashSet<QueueName> {
        self.queues.read().clone()
    }

    /// Removes the metrics of a deleted queue, which makes room for those of another one.
    pub(crate) fn forget(&self, queue: &QueueName) {
        if !self.queues.write().remove(queue) {
            return;
        }
        let labels = [("queue", QueueLabel(Some(queue.clone())))];
        for family in [
            &self.pushed,
            &self.deduplicated,
            &self.delivered,
            &self.committed,
            &self.rolled_back,
            &self.moved,
            &self.expired,
            &self.damaged,
        ] {
            family.remove(&labels);
        }
        self.oldest_ready.remove(&labels);
        self.delivery_delay.remove(&labels);
        for reason in LimitReason::ALL {
            for family in [&self.dead_lettered, &self.discarded] {
                family.remove(&(labels.clone(), [("reason", reason.as_str())]));
            }
        }
        for state in ["ready", "delayed", "reserved", "blocked", "processed"] {
            self.depth.remove(&(labels.clone(), [("state", state)]));
        }
    }

    /// Records how long after its eligible time each item was handed out.
    pub(crate) fn delivery_delays(
        &self,
        queue: &QueueName,
        delays: impl ExactSizeIterator<Item = Duration>,
    ) {
        if delays.len() == 0 {
            return;
        }
        let delivery_delay = self.delivery_delay.get_or_create(&[("queue", self.label(queue))]);
        for delay in delays {
            delivery_delay.observe(delay.as_secs_f64());
        }
    }

    /// Records a call of the store that ended; `call` is the name of the method.
    pub(crate) fn store_call(&self, call: &'static str, took: Duration, failed: bool) {
        self.store_calls.get_or_create(&[("call", call)]).observe(took.as_secs_f64());
        if failed {
            self.store_errors.get_or_create(&[("call", call)]).inc();
        }
    }

    /// Records how many items shared one write; `call` is `push` or `settle`.
    pub(crate) fn batch(&self, call: &'static str, items: usize) {
        self.batches.get_or_create(&[("call", call)]).observe(items as f64);
    }

    /// Records how long one round of housekeeping took.
    pub(crate) fn swept(&self, took: Duration) {
        self.sweeps.observe(took.as_secs_f64());
    }

    /// Counts a stream as open until the guard is dropped; `rpc` is its name, for example `Consume`.
    pub(crate) fn stream_opened(&self, rpc: &'static str) -> OpenStream {
        let streams = self.streams.get_or_create_owned(&[("rpc", rpc)]);
        streams.inc();
        OpenStream(streams)
    }

    /// Counts a reserve of a dispatcher.
    pub(crate) fn woken(&self, by: Wake) {
        let cause = match by {
            Wake::Local => "local",
            Wake::Signal => "signal",
            Wake::Announcement => "announcement",
            Wake::Timer => "timer",
            Wake::Poll => "poll",
        };
        self.wakes.get_or_create(&[("cause", cause)]).inc();
    }

    /// Counts a signal that was sent to the other brokers.
    pub(crate) fn signal_sent(&self, topic: Topic) {
        self.signals_sent.get_or_create(&[("topic", topic.word())]).inc();
    }

    /// Counts a signal that was merged with one that waits to be sent.
    pub(crate) fn signal_coalesced(&self, topic: Topic) {
        self.signals_coalesced.get_or_create(&[("topic", topic.word())]).inc();
    }

    /// Counts a signal received from another broker.
    pub(crate) fn signal_received(&self, topic: Topic) {
        self.signals_heard.get_or_create(&[("topic", topic.word())]).inc();
    }

    /// Counts a signal that could not be sent.
    pub(crate) fn signal_dropped(&self, topic: Topic) {
        self.signals_dropped.get_or_create(&[("topic", topic.word())]).inc();
    }

    /// Counts that signals may have been missed.
    pub(crate) fn signals_missed(&self) {
        self.signals_missed.inc();
    }

    /// Records how much of large answers is not read.
    pub(crate) fn unread_bytes(&self, bytes: usize) {
        self.unread_bytes.set(bytes as i64);
    }

    /// Records how long the log beside the SQLite file is.
    pub(crate) fn sqlite_log_bytes(&self, bytes: u64) {
        self.sqlite_log_bytes.set(bytes.try_into().unwrap_or(i64::MAX));
    }

    /// Records how long the disk took to sync the log beside the SQLite file.
    pub(crate) fn sqlite_synced(&self, took: Duration) {
        self.sqlite_syncs.observe(took.as_secs_f64());
    }

    /// Counts a call that was refused: for want of a token or a permission, or because there were too many.
    pub(crate) fn call_refused(&self, reason: &'static str) {
        self.calls_refused.get_or_create(&[("reason", reason)]).inc();
    }

    fn count(&self, family: &Counters<ByQueue>, queue: &QueueName, items: u64) {
        if items > 0 {
            family.get_or_create(&[("queue", self.label(queue))]).inc_by(items);
        }
    }

    /// Returns the label of a queue: its own while there is room, else `other`.
    fn label(&self, queue: &QueueName) -> QueueLabel {
        if self.queues.read().contains(queue) {
            return QueueLabel(Some(queue.clone()));
        }
        let mut queues = self.queues.write();
        if queues.len() >= MAX_QUEUE_LABELS && !queues.contains(queue) {
            return QueueLabel(None);
        }
        queues.insert(queue.clone());
        QueueLabel(Some(queue.clone()))
    }
}

/// An open stream, for as long as it is held.
#[derive(Debug)]
pub struct OpenStream(Gauge);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Creates and registers metrics in one step.
struct Registration<'a>(&'a mut Registry);

impl Registration<'_> {
    fn metric<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.given(name, help, M::default())
    }

    fn given<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    fn seconds<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register_with_unit(name, help, Unit::Seconds, metric.clone());
        metric
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{count_one_of_each, recorded};
