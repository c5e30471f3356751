//! Which brokers there are, and their consumers. Each broker reports itself to the store every few seconds, if anything
//! has changed, so that every broker can show all of them. A report that is lost, late or too old costs only what is
//! shown.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::{Engine, Result};
use crate::{
    domain::{QueueName, Timestamp},
    store::BrokerReport,
};

/// How often a broker looks whether there is something to report.
pub(super) const REPORT: Duration = Duration::from_secs(3);
/// A report that has not changed is written again after this time.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a report counts. A broker that was killed is shown for this long.
const LASTING: Duration = Duration::from_secs(45);
/// A broker that has reported nothing for this long is not well, or gone.
const SILENCE: Duration = Duration::from_secs(25);
/// A report takes at most one part in this many of the time.
const SHARE: u32 = 500;
/// The most consumers of one broker that are reported.
const MAX_CONSUMERS: usize = 10_000;
/// One read of all reports serves everyone who asks within this time.
const READ_AGE: Duration = Duration::from_secs(1);
/// Counting the consumers of other brokers takes at most one part in this many of the time.
const COUNT_SHARE: u32 = 100;
/// How long who asks for figures waits for the consumers of other brokers to be counted.
const COUNT_LIMIT: Duration = Duration::from_secs(1);
/// How long a broker that ends waits for its report to be withdrawn.
const WITHDRAWAL: Duration = Duration::from_secs(1);

pub(super) struct Presence {
    start_time: Timestamp,
    address: OnceLock<SocketAddr>,
    host: String,
    last: Mutex<Option<Last>>,
    read: tokio::sync::Mutex<Option<(Instant, Arc<Vec<Broker>>)>>,
    pub(super) elsewhere: Mutex<Elsewhere>,
}

/// The consumers of other brokers as last counted.
#[derive(Default)]
pub(super) struct Elsewhere {
    pub(super) by_queue: HashMap<QueueName, u32>,
    /// When they are counted again; `None` if they never were.
    pub(super) due: Option<Instant>,
}

/// The last report that the store has taken.
struct Last {
    report: BrokerReport,
    at: Instant,
    took: Duration,
}

/// A broker as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broker {
    /// What it reported last.
    pub report: BrokerReport,
    /// False if nothing was heard of it for a while, because it cannot write to the store or was killed.
    pub reports: bool,
}

impl Presence {
    pub(super) fn new(start_time: Timestamp) -> Self {
        Self {
            start_time,
            address: OnceLock::new(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            last: Mutex::default(),
            read: tokio::sync::Mutex::default(),
            elsewhere: Mutex::default(),
        }
    }
}

impl Engine {
    /// Sets the address that is shown for this broker. Only the first call has an effect.
    pub(crate) fn serves_at(&self, address: SocketAddr) {
        let _ = self.presence.address.set(address); // the first one stays
    }

    /// Returns this broker without its consumers.
    pub(crate) fn this_broker(&self) -> BrokerReport {
        let address = self.presence.address.get();
        BrokerReport {
            broker: self.store.broker_id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: self.presence.host.clone(),
            address: address.map(ToString::to_string).unwrap_or_default(),
            start_time: self.presence.start_time,
            report_time: self.now(),
            signals_healthy: self.signals.healthy(),
            draining: self.is_draining(),
            consumers: Vec::new(),
            left_out: 0,
        }
    }

    /// Returns the number of this broker's open streams and waiting calls.
    pub(crate) fn all_consumers(&self) -> u64 {
        self.all_dispatchers().iter().map(|dispatcher| u64::from(dispatcher.consumers())).sum()
    }

    /// Returns the number of the queue's open streams and waiting calls on all brokers, as of the last
    /// [`Engine::notice_consumers`].
    pub(super) fn consumers_of_all_brokers(&self, queue: &QueueName) -> u32 {
        let elsewhere = self.presence.elsewhere.lock().by_queue.get(queue).copied();
        self.consumers(queue).saturating_add(elsewhere.unwrap_or_default())
    }

    /// Counts the consumers of other brokers, unless that was done a moment ago: one read serves everyone who asks for figures, of
    /// however many queues. If it fails, what was known before stays.
    pub(super) async fn notice_consumers(&self) {
        let begun = Instant::now();
        {
            let mut elsewhere = self.presence.elsewhere.lock();
            if elsewhere.due.is_some_and(|due| due > begun) {
                return;
            }
            // Nobody else counts meanwhile.
            elsewhere.due = Some(begun + COUNT_LIMIT + REPORT);
        }
        let read = timeout(COUNT_LIMIT, self.store.broker_reports()).await;
        let counted = match read {
            Ok(Ok(reports)) => Some(by_queue(&reports, self.store.broker_id())),
            Ok(Err(error)) => {
                tracing::debug!(%error, "could not count the consumers of other brokers");
                None
            }
            Err(_) => None,
        };
        let mut elsewhere = self.presence.elsewhere.lock();
        elsewhere.due = Some(Instant::now() + REPORT.max(begun.elapsed() * COUNT_SHARE));
        if let Some(counted) = counted {
            elsewhere.by_queue = counted;
        }
    }

    /// Returns this broker with its consumers.
    fn report(&self) -> BrokerReport {
        let mut report = self.this_broker();
        for dispatcher in self.all_dispatchers() {
            let before = report.consumers.len();
            dispatcher.report(MAX_CONSUMERS, &mut report.consumers);
            let reported = report.consumers.len() - before;
            report.left_out += u64::from(dispatcher.consumers()).saturating_sub(reported as u64);
        }
        report.consumers.sort_by(|a, b| (&a.queue, a.number).cmp(&(&b.queue, b.number)));
        report
    }

    /// Writes this broker's report, if it has changed or was last written long ago. A write whose outcome is unknown is
    /// repeated.
    pub(crate) async fn report_presence(&self) -> Result<()> {
        let begun = Instant::now();
        let is_early = |last: &Last| last.at.elapsed() < HEARTBEAT.min(last.took * SHARE);
        if self.presence.last.lock().as_ref().is_some_and(is_early) {
            return Ok(());
        }
        let report = self.report();
        let is_same =
            |last: &Last| last.at.elapsed() < HEARTBEAT && says_the_same(&last.report, &report);
        if self.presence.last.lock().as_ref().is_some_and(is_same) {
            return Ok(());
        }
        self.store.report_broker(&report, LASTING).await?;
        let took = begun.elapsed();
        *self.presence.last.lock() = Some(Last { report, at: begun, took });
        Ok(())
    }

    /// Withdraws this broker's report. If the store does not answer soon, the report ends by itself.
    pub(super) async fn withdraw_report(&self) {
        if self.presence.last.lock().take().is_some() {
            let report = self.this_broker();
            let withdrawn = self.store.report_broker(&report, Duration::ZERO);
            let _ = timeout(WITHDRAWAL, withdrawn).await;
        }
    }

    /// Returns all brokers with their consumers, in a fixed order: this one as it is, the others as they reported.
    pub(crate) async fn brokers(&self) -> Result<Arc<Vec<Broker>>> {
        let mut read = self.presence.read.lock().await;
        if let Some((at, brokers)) = &*read
            && at.elapsed() < READ_AGE
        {
            return Ok(Arc::clone(brokers));
        }
        let at = Instant::now();
        let (now, own) = (self.now(), self.store.broker_id());
        let mut reports = self.store.broker_reports().await?;
        reports.retain(|report| report.broker != own);
        reports.push(self.report());
        reports.sort_by_key(|report| report.broker);
        let shown = |report: BrokerReport| {
            let reports = report.report_time + SILENCE > now;
            Broker { report, reports }
        };
        let brokers = Arc::new(reports.into_iter().map(shown).collect());
        *read = Some((at, Arc::clone(&brokers)));
        Ok(brokers)
    }
}

/// Counts the consumers of all brokers but `own`.
pub(super) fn by_queue(reports: &[BrokerReport], own: [u8; 4]) -> HashMap<QueueName, u32> {
    let mut counts = HashMap::new();
    for report in reports.iter().filter(|report| report.broker != own) {
        // A consumer may be in two parts of a report that was read while it was written.
        let consumers: HashSet<_> =
            report.consumers.iter().map(|consumer| (&consumer.queue, consumer.number)).collect();
        for (queue, _) in consumers {
            *counts.entry(queue.clone()).or_default() += 1;
        }
    }
    counts
}

/// Returns true if two reports differ in nothing but their time.
fn says_the_same(before: &BrokerReport, after: &BrokerReport) -> bool {
    let of_broker =
        |report: &BrokerReport| (report.signals_healthy, report.draining, report.left_out);
    of_broker(before) == of_broker(after) && before.consumers == after.consumers
}
