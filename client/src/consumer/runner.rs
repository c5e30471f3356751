//! The runner: starts handlers, renews leases, passes decisions on, and shuts down.
//!
//! The runner only ever waits for all of its inputs at once, so neither the feed nor the settler can block it.

use std::{
    collections::{HashMap, VecDeque},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    decision::{Decision, Settle},
    feed::{self, Event, Feed},
    options::{Options, Renewal},
    settle::{Counters, MAX_SETTLES, Settler, Summary},
    stream::StreamFeed,
};
use crate::{
    client::Client,
    error::{Error, Result},
    item::{Delivery, to_proto_duration},
    proto::{ExtendRequest, ExtendResult, Outcome},
    retry::Retry,
};

/// A running handler.
pub(super) type Work = BoxFuture<'static, Decision>;
/// Requests to renew leases that have not been answered: when each was sent, and the results.
type Renewing = JoinSet<(Instant, Vec<ExtendResult>)>;
type Handler = Arc<dyn Fn(Delivery) -> Work + Send + Sync>;

/// Delay of items rolled back at the end of a stream that cannot be halted, so that they are not delivered on it again.
const ROLLBACK_DELAY: Duration = Duration::from_millis(250);
/// The length that is assumed of a lease until it is known.
const ASSUMED_LEASE: Duration = Duration::from_secs(30);
/// How long the last settles may take, beyond the grace of the handlers.
const SETTLE_GRACE: Duration = Duration::from_secs(5);

/// A reservation that is not settled yet.
struct Held {
    /// Cancelled when the broker has revoked the lease, or when the lease has ended without renewal.
    lost: CancellationToken,
    /// When the lease ends, if that is known.
    until: Option<Instant>,
    /// The stream is gone, and with it the broker's renewal.
    orphan: bool,
}

pub(super) struct Runner {
    client: Client,
    options: Arc<Options>,
    handler: Handler,
    counters: Arc<Counters>,
    running: JoinSet<(String, Decision)>,
    waiting: VecDeque<Delivery>,
    held: HashMap<String, Held>,
    outbox: VecDeque<Settle>,
    lease: Duration,
    /// The length of the lease is known, not assumed.
    lease_known: bool,
    started: u64,
    last_activity: Instant,
}

/// The other tasks of a consumer. Dropping it ends them.
struct Tasks {
    events: mpsc::Receiver<Event>,
    settles: mpsc::Sender<Settle>,
    halt: CancellationToken,
    feed_stop: CancellationToken,
    feed: TaskTracker,
    settler_stop: CancellationToken,
    settler: TaskTracker,
}

/// What events change while a consumer runs.
struct Progress {
    renewal: Interval,
    lease_check: Interval,
    /// The feed may still send events.
    feeding: bool,
    /// No further delivery can come, which only a ConsumeStream can know.
    halted: bool,
    failure: Option<Error>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.feed_stop.cancel();
        self.settler_stop.cancel();
    }
}

impl Runner {
    pub(super) fn new(client: Client, options: Arc<Options>, handler: Handler) -> Self {
        Self {
            client,
            handler,
            counters: Arc::default(),
            running: JoinSet::new(),
            waiting: VecDeque::new(),
            held: HashMap::new(),
            outbox: VecDeque::new(),
            lease: options.lease.unwrap_or(ASSUMED_LEASE),
            lease_known: options.lease.is_some(),
            started: 0,
            last_activity: Instant::now(),
            options,
        }
    }

    fn spawn_tasks(&self) -> Tasks {
        let (events_in, events) = mpsc::channel(16);
        let (settles, settles_out) = mpsc::channel(MAX_SETTLES);
        let (halt, feed_stop, settler_stop) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let (feed_tasks, settler_tasks) = (TaskTracker::new(), TaskTracker::new());
        let feed = Feed {
            client: self.client.clone(),
            options: self.options.clone(),
            events: events_in,
            halt: halt.clone(),
        };
        let settler = Settler {
            client: self.client.clone(),
            options: self.options.clone(),
            counters: self.counters.clone(),
        };
        let (stop, stopped) = (feed_stop.clone(), settler_stop.clone());
        if self.options.streaming {
            let (fallback, fallback_out) = mpsc::channel(MAX_SETTLES);
            let counters = self.counters.clone();
            let feed = StreamFeed { feed, settles: settles_out, fallback, counters };
            feed_tasks.spawn(async move { stop.run_until_cancelled(feed.run()).await });
            settler_tasks
                .spawn(async move { stopped.run_until_cancelled(settler.run(fallback_out)).await });
        } else {
            feed_tasks.spawn(async move { stop.run_until_cancelled(feed::run_unary(feed)).await });
            settler_tasks
                .spawn(async move { stopped.run_until_cancelled(settler.run(settles_out)).await });
        }
        feed_tasks.close();
        settler_tasks.close();
        Tasks {
            events,
            settles,
            halt,
            feed_stop,
            feed: feed_tasks,
            settler_stop,
            settler: settler_tasks,
        }
    }

    pub(super) async fn run(mut self) -> Result<Summary> {
        let mut tasks = self.spawn_tasks();
        let mut renewing = Renewing::new();
        let mut stopping = false;
        let mut deadline = Instant::now();
        // A child: ending by itself must not end others that share the token.
        let shutdown = self.options.shutdown.child_token();
        let mut progress = Progress {
            renewal: renewal_interval(self.lease),
            lease_check: interval(self.lease / 10, LEASE_CHECK),
            feeding: true,
            halted: false,
            failure: None,
        };
        let streaming = self.options.streaming;
        loop {
            if !stopping && self.wants_to_end() {
                shutdown.cancel();
            }
            if stopping {
                if streaming {
                    self.roll_back_waiting(Duration::ZERO);
                }
            } else {
                self.start_waiting();
            }
            self.flush(&tasks.settles);
            if stopping
                && self.running.is_empty()
                && self.outbox.is_empty()
                && (progress.halted || !streaming)
            {
                break;
            }
            let idle = self.is_idle() && !stopping;
            let idle_deadline = self.idle_deadline();
            tokio::select! {
                () = shutdown.cancelled(), if !stopping => {
                    stopping = true;
                    deadline = Instant::now() + self.options.grace;
                    tasks.halt.cancel();
                }
                () = tokio::time::sleep_until(deadline), if stopping => break,
                Some(done) = self.running.join_next() => {
                    self.last_activity = Instant::now();
                    // A handler's task ends early only when it is dropped at the deadline, after this loop.
                    if let Ok((receipt, decision)) = done {
                        self.decided(receipt, decision);
                    }
                }
                event = tasks.events.recv(), if progress.feeding => {
                    self.on_event(event, &mut progress, &mut renewing, &shutdown);
                }
                slot = tasks.settles.reserve(), if !self.outbox.is_empty() => match (slot, self.outbox.pop_front()) {
                    (Ok(slot), Some(settle)) => slot.send(settle),
                    _ => break, // the settler is gone: nothing can be settled
                },
                _ = progress.renewal.tick() => self.renew(&mut renewing),
                _ = progress.lease_check.tick() => self.lose_ended(),
                Some(renewed) = renewing.join_next() => {
                    if let Ok((asked, results)) = renewed {
                        self.renewed(asked, results);
                    }
                }
                () = tokio::time::sleep_until(idle_deadline), if idle => shutdown.cancel(),
            }
        }
        self.finish(tasks).await;
        match progress.failure {
            Some(error) => Err(error),
            None => Ok(self.counters.summary()),
        }
    }

    /// Handles what the feed says; `None` once the feed has ended.
    fn on_event(
        &mut self,
        event: Option<Event>,
        progress: &mut Progress,
        renewing: &mut Renewing,
        shutdown: &CancellationToken,
    ) {
        match event {
            Some(Event::Lease(lease)) => {
                (self.lease, self.lease_known) = (lease, true);
                progress.renewal = renewal_interval(lease);
                progress.lease_check = interval(lease / 10, LEASE_CHECK);
            }
            Some(Event::Revoked(receipt)) => self.lost(&receipt),
            Some(Event::Deliveries(deliveries)) => self.delivered(deliveries),
            Some(Event::Halted) => progress.halted = true,
            Some(Event::Lost) => {
                self.orphan();
                // The answer says immediately which items the broker has rolled back.
                self.renew(renewing);
            }
            Some(Event::Failed(error)) => {
                self.orphan();
                progress.failure = Some(error);
                progress.halted = true;
                shutdown.cancel();
            }
            // The feed ends on its own only after `Failed` or a halt.
            None => {
                (progress.feeding, progress.halted) = (false, true);
                shutdown.cancel();
            }
        }
    }

    /// Rolls back what is left, waits until all is settled, and only then closes the stream: the broker settles for itself
    /// what is unsettled when a stream ends.
    async fn finish(&mut self, mut tasks: Tasks) {
        self.running.abort_all();
        while self.running.join_next().await.is_some() {}
        let streaming = self.options.streaming;
        let delay = if streaming { Duration::ZERO } else { ROLLBACK_DELAY };
        self.roll_back_waiting(delay);
        let unfinished: Vec<String> = self.held.keys().cloned().collect();
        for receipt in unfinished {
            let retry = Retry::new("the consumer was shut down").after(delay).keep_attempt();
            self.decided(receipt, Decision::Rollback(retry));
        }
        let settling = async {
            for settle in self.outbox.drain(..) {
                if tasks.settles.send(settle).await.is_err() {
                    return;
                }
            }
            // Closes the channel; a stream feed then ends when it has all answers.
            let (closed, _) = mpsc::channel(1);
            tasks.settles = closed;
            if streaming {
                // Late deliveries must not block the feed; the broker rolls them back when the stream ends.
                while tasks.events.recv().await.is_some() {}
                tasks.feed.wait().await;
            }
            tasks.settler.wait().await;
        };
        if tokio::time::timeout(SETTLE_GRACE, settling).await.is_err() {
            tracing::error!(queue = self.options.queue, "gave up settling at shutdown");
        }
        tasks.feed_stop.cancel();
        tasks.settler_stop.cancel();
        tasks.feed.wait().await;
        tasks.settler.wait().await;
    }

    fn wants_to_end(&self) -> bool {
        self.options.limit.is_some_and(|limit| self.started >= limit)
    }

    fn is_idle(&self) -> bool {
        self.options.idle_exit.is_some() && self.running.is_empty() && self.waiting.is_empty()
    }

    fn idle_deadline(&self) -> Instant {
        self.last_activity + self.options.idle_exit.unwrap_or_default()
    }

    fn delivered(&mut self, deliveries: Vec<crate::proto::Delivery>) {
        self.last_activity = Instant::now();
        for delivery in deliveries.into_iter().filter_map(Delivery::from_proto) {
            if delivery.receipt().is_empty() {
                Counters::add(&self.counters.committed, 1);
            } else {
                let until = self.lease_known.then(|| self.last_activity + self.lease);
                let held = Held { lost: delivery.lost_token(), until, orphan: false };
                self.held.insert(delivery.receipt().to_owned(), held);
            }
            self.waiting.push_back(delivery);
        }
    }

    fn start_waiting(&mut self) {
        while self.running.len() < self.options.concurrency() && !self.wants_to_end() {
            let Some(delivery) = self.waiting.pop_front() else {
                return;
            };
            self.started += 1;
            Counters::add(&self.counters.started, 1);
            let (handler, receipt) = (self.handler.clone(), delivery.receipt().to_owned());
            self.running.spawn(async move {
                // The handler owns what it works on; nothing that it may have left inconsistent is used again.
                let work = AssertUnwindSafe(async move { handler(delivery).await });
                let decision =
                    work.catch_unwind().await.unwrap_or_else(|panic| Decision::from_panic(&*panic));
                (receipt, decision)
            });
        }
    }

    /// Rolls back what was not started.
    fn roll_back_waiting(&mut self, delay: Duration) {
        for delivery in std::mem::take(&mut self.waiting) {
            let retry = Retry::new("not started").after(delay).keep_attempt();
            self.decided(delivery.receipt().to_owned(), Decision::Rollback(retry));
        }
    }

    fn decided(&mut self, receipt: String, decision: Decision) {
        // Nothing to settle if it was committed on delivery.
        if self.held.remove(&receipt).is_some() {
            self.outbox.push_back(Settle { receipt, decision });
        }
    }

    /// Passes on what the channel has room for; the rest waits in `run`.
    fn flush(&mut self, settles: &mpsc::Sender<Settle>) {
        while !self.outbox.is_empty() {
            let Ok(slot) = settles.try_reserve() else {
                return;
            };
            if let Some(settle) = self.outbox.pop_front() {
                slot.send(settle);
            }
        }
    }

    /// The stream is gone: rolls back what was not started, if the broker has not done so; running handlers continue.
    fn orphan(&mut self) {
        self.roll_back_waiting(Duration::ZERO);
        // The broker may have renewed them just now.
        let until = self.lease_known.then(|| Instant::now() + self.lease);
        for held in self.held.values_mut() {
            (held.orphan, held.until) = (true, until);
        }
    }

    /// Renews the leases that the broker does not renew.
    fn renew(&self, renewing: &mut Renewing) {
        if self.options.renewal == Renewal::Off || !renewing.is_empty() {
            return;
        }
        let all = self.options.renewal == Renewal::Client;
        let receipts: Vec<String> = self
            .held
            .iter()
            .filter(|(_, held)| (all || held.orphan) && !held.lost.is_cancelled())
            .map(|(receipt, _)| receipt.clone())
            .collect();
        let lease = self.options.lease.map(to_proto_duration);
        for receipts in receipts.chunks(MAX_SETTLES) {
            let client = self.client.clone();
            let message = ExtendRequest { receipts: receipts.to_vec(), lease };
            renewing.spawn(async move {
                let asked = Instant::now();
                let request = client.request(message);
                let results = match client.queue_service().extend(request).await {
                    Ok(response) => response.into_inner().results,
                    Err(status) => {
                        // The next tick comes before the lease ends.
                        tracing::warn!(%status, "leases could not be renewed");
                        Vec::new()
                    }
                };
                (asked, results)
            });
        }
    }

    fn renewed(&mut self, asked: Instant, results: Vec<ExtendResult>) {
        for result in results {
            match result.outcome() {
                Outcome::LeaseLost | Outcome::Gone => self.lost(&result.receipt),
                Outcome::Ok if self.lease_known => {
                    if let Some(held) = self.held.get_mut(&result.receipt) {
                        held.until = Some(asked + self.lease);
                    }
                }
                _ => {}
            }
        }
    }

    /// The reservation no longer holds its item: notifies the handler, or starts none.
    fn lost(&mut self, receipt: &str) {
        if let Some(held) = self.held.get(receipt) {
            held.lost.cancel();
            let waiting = self.waiting.len();
            self.waiting.retain(|delivery| delivery.receipt() != receipt);
            if self.waiting.len() < waiting {
                self.held.remove(receipt); // there is nothing to settle
            }
        }
    }

    /// Notifies handlers whose leases have ended without renewal. For leases that the broker renews, the broker does so.
    fn lose_ended(&mut self) {
        let now = Instant::now();
        let ours = self.options.renewal != Renewal::Broker;
        let ended =
            |held: &Held| (ours || held.orphan) && held.until.is_some_and(|until| until <= now);
        let ended: Vec<String> = self
            .held
            .iter()
            .filter(|(_, held)| !held.lost.is_cancelled() && ended(held))
            .map(|(receipt, _)| receipt.clone())
            .collect();
        for receipt in ended {
            self.lost(&receipt);
        }
    }
}

/// Longest interval between checks for leases that have ended.
const LEASE_CHECK: Duration = Duration::from_secs(1);
/// Shortest interval between lease checks or renewals.
const SHORTEST: Duration = Duration::from_millis(20);

/// Returns an interval of a third of a lease: one renewal may fail without harm.
fn renewal_interval(lease: Duration) -> Interval {
    interval(lease / 3, Duration::MAX)
}

fn interval(period: Duration, longest: Duration) -> Interval {
    let period = period.clamp(SHORTEST, longest);
    let mut interval = tokio::time::interval_at(Instant::now() + period, period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}
