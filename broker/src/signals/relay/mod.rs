//! The common part of signals over Redis and MongoDB: coalescing, and one task each that sends and
//! receives. Each task reconnects until it succeeds.

mod outbox;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sluicegate_proto::backoff::Backoff;
use tokio::{
    sync::{broadcast, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::outbox::Outbox;
use super::{Notice, Signals, message::Message};
use crate::{
    domain::{ItemId, QueueName, Signal, Timestamp, Topic},
    essential::essential,
    metrics::Metrics,
    tasks::Tasks,
};

/// How many notices a subscriber may lag behind before it has to treat the lag as [`Notice::Missed`].
const NOTICES: usize = 1024;
/// The most messages sent in one go.
const BATCH: usize = 512;
/// Time limit of each step: connecting, subscribing, sending a batch, the response to a ping.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long `close` waits for what is still to be sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long opening waits to find out whether the server can be reached.
const FIRST_TIMEOUT: Duration = Duration::from_secs(3);
/// Pauses between attempts to connect.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
/// A connection that lived this long does not count as a failed attempt.
const LIVED: Duration = Duration::from_secs(5);

/// Why a connection could not be made or was lost, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Lost(pub(super) String);

/// Does one step, and gives up after [`STEP_TIMEOUT`].
pub(super) async fn bounded<T>(step: impl Future<Output = Result<T, Lost>>) -> Result<T, Lost> {
    timeout(STEP_TIMEOUT, step).await.unwrap_or_else(|_| Err(Lost("no answer".to_owned())))
}

/// A server that passes messages between brokers.
#[async_trait]
pub(super) trait Transport: Send + Sync + 'static {
    /// A connection for sending.
    type Outlet: Send;

    /// Returns the name for logs, without credentials.
    fn describe(&self) -> String;

    /// Connects for sending, and checks that the server responds.
    async fn connect(&self) -> Result<Self::Outlet, Lost>;

    /// Sends messages. After an error the outlet is dropped, and some or all may not have been sent.
    async fn send(&self, outlet: &mut Self::Outlet, messages: &[Message]) -> Result<(), Lost>;

    /// Connects for receiving, calls [`Receiving::listening`] when nothing can be missed any more, and
    /// then [`Receiving::received`] with each message. Returns within 5 s after the connection is lost.
    async fn receive(&self, receiving: &Receiving) -> Lost;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Unknown,
    Up,
    Down,
}

#[derive(Debug, Clone, Copy)]
struct Health {
    sending: Link,
    receiving: Link,
}

/// Receives a transport's messages.
pub(super) struct Receiving {
    /// The transport, as logs call it.
    signals: String,
    broker: [u8; 4],
    notices: broadcast::Sender<Notice>,
    health: watch::Sender<Health>,
    outbox: Arc<Outbox>,
    metrics: Arc<Metrics>,
}

impl Receiving {
    /// Records that the transport receives everything from now on. Earlier messages may have been
    /// missed.
    pub(super) fn listening(&self) {
        self.went_up("received", |health| &mut health.receiving);
        self.missed();
    }

    /// Passes a message on, unless this broker sent it.
    pub(super) fn received(&self, from: [u8; 4], message: Message) {
        if from == self.broker {
            return;
        }
        match message {
            Message::Missed => self.missed(),
            Message::Signal(signal) => {
                self.metrics.signal_received(signal.topic);
                if signal.topic == Topic::Wanted {
                    self.outbox.wanted(&signal);
                }
                // An error only means that there is no receiver yet.
                let _ = self.notices.send(Notice::Signal(signal));
            }
        }
    }

    fn missed(&self) {
        self.metrics.signals_missed();
        let _ = self.notices.send(Notice::Missed);
    }

    /// Records and logs that one direction works. The log has one line per change.
    fn went_up(&self, direction: &str, link: impl Fn(&mut Health) -> &mut Link) {
        let mut before = Link::Unknown;
        self.health.send_modify(|health| {
            before = std::mem::replace(link(health), Link::Up);
        });
        if before == Link::Down {
            info!(signals = self.signals, "signals are {direction} again");
        }
    }

    /// Records and logs that one direction is lost. Repeated attempts are logged for debugging
    /// only.
    fn went_down(&self, direction: &str, lost: &Lost, link: impl Fn(&mut Health) -> &mut Link) {
        let mut before = Link::Unknown;
        self.health.send_modify(|health| {
            before = std::mem::replace(link(health), Link::Down);
        });
        let signals = &self.signals;
        if before == Link::Down {
            debug!(signals, error = %lost, "signals are still not {direction}");
        } else {
            warn!(
                signals,
                error = %lost,
                "signals are not {direction}: consumers are woken by polls until they are"
            );
        }
    }
}

struct Shared<T> {
    transport: T,
    outbox: Arc<Outbox>,
    /// True if the other brokers are to be told that they missed signals.
    dropped: AtomicBool,
    receiving: Receiving,
    closing: CancellationToken,
}

/// [`Signals`] over a [`Transport`].
pub(super) struct Relay<T: Transport> {
    shared: Arc<Shared<T>>,
    tasks: Tasks,
}

impl<T: Transport> Relay<T> {
    /// Starts sending and receiving, and waits a moment to find out whether the server can be reached.
    /// If it cannot, this is logged, and connecting is tried again until `close`.
    pub(super) async fn start(transport: T, broker: [u8; 4], metrics: Arc<Metrics>) -> Self {
        let health = Health { sending: Link::Unknown, receiving: Link::Unknown };
        let outbox = Arc::new(Outbox::default());
        let shared = Arc::new(Shared {
            outbox: Arc::clone(&outbox),
            dropped: AtomicBool::new(false),
            receiving: Receiving {
                signals: transport.describe(),
                broker,
                notices: broadcast::Sender::new(NOTICES),
                health: watch::Sender::new(health),
                outbox,
                metrics,
            },
            closing: CancellationToken::new(),
            transport,
        });
        let tasks = Tasks::default();
        let mut health = shared.receiving.health.subscribe();
        tasks.spawn(essential("sending signals", Arc::clone(&shared).send_always()));
        tasks.spawn(essential("receiving signals", Arc::clone(&shared).receive_always()));
        tasks.close();
        let known = health.wait_for(|h| h.sending != Link::Unknown && h.receiving != Link::Unknown);
        let _ = timeout(FIRST_TIMEOUT, known).await; // still connecting is as good as not there
        Self { shared, tasks }
    }
}

impl<T: Transport> Shared<T> {
    fn can_send(&self) -> bool {
        self.receiving.health.borrow().sending == Link::Up
    }

    /// Sends until the relay closes, reconnecting whenever necessary.
    async fn send_always(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            let started = Instant::now();
            let connected = tokio::select! {
                biased;
                connected = bounded(self.transport.connect()) => connected,
                () = self.closing.cancelled() => return,
            };
            let lost = match connected {
                Ok(mut outlet) => match self.send_over(&mut outlet).await {
                    Ok(()) => return,
                    Err(lost) => lost,
                },
                Err(lost) => lost,
            };
            self.receiving.went_down("sent", &lost, |health| &mut health.sending);
            if started.elapsed() > LIVED {
                failures = 0;
            }
            tokio::select! {
                biased;
                () = sleep(BACKOFF.delay(failures)) => failures += 1,
                () = self.closing.cancelled() => return,
            }
        }
    }

    /// Sends over one connection until it is lost, or until the relay closes and everything is sent.
    async fn send_over(&self, outlet: &mut T::Outlet) -> Result<(), Lost> {
        self.receiving.went_up("sent", |health| &mut health.sending);
        loop {
            if self.dropped.swap(false, Ordering::AcqRel) {
                self.send_bounded(outlet, &[Message::Missed]).await?;
            }
            let closing = self.closing.is_cancelled();
            let (batch, next_close) = self.outbox.take(closing);
            if !batch.is_empty() {
                for part in batch.chunks(BATCH) {
                    self.send_bounded(outlet, part).await?;
                }
                continue;
            }
            if closing {
                return Ok(());
            }
            let window_closes = async {
                match next_close {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.outbox.wake.notified() => {}
                () = window_closes => {}
                () = self.closing.cancelled() => {}
            }
        }
    }

    async fn send_bounded(&self, outlet: &mut T::Outlet, messages: &[Message]) -> Result<(), Lost> {
        let result = bounded(self.transport.send(outlet, messages)).await;
        for message in messages {
            match message {
                Message::Signal(signal) if result.is_ok() => {
                    self.receiving.metrics.signal_sent(signal.topic);
                }
                Message::Signal(signal) => self.receiving.metrics.signal_dropped(signal.topic),
                Message::Missed => {}
            }
        }
        if result.is_err() {
            self.dropped.store(true, Ordering::Release);
        }
        result
    }

    /// Receives until the relay closes, reconnecting whenever necessary.
    async fn receive_always(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            let started = Instant::now();
            let lost = tokio::select! {
                biased;
                lost = self.transport.receive(&self.receiving) => lost,
                () = self.closing.cancelled() => return,
            };
            self.receiving.went_down("received", &lost, |health| &mut health.receiving);
            if started.elapsed() > LIVED {
                failures = 0;
            }
            tokio::select! {
                biased;
                () = sleep(BACKOFF.delay(failures)) => failures += 1,
                () = self.closing.cancelled() => return,
            }
        }
    }
}

#[async_trait]
impl<T: Transport> Signals for Relay<T> {
    fn describe(&self) -> String {
        self.shared.transport.describe()
    }

    fn publish(&self, signal: Signal) {
        let shared = &self.shared;
        let topic = signal.topic;
        if !shared.can_send() || shared.closing.is_cancelled() {
            if topic != Topic::Wanted {
                // As soon as a message can be sent, the other brokers are told to scan all queues.
                shared.dropped.store(true, Ordering::Release);
                shared.outbox.wake.notify_one();
            }
            shared.receiving.metrics.signal_dropped(topic);
            return;
        }
        if !shared.outbox.offer(signal) {
            shared.receiving.metrics.signal_coalesced(topic);
        }
    }

    fn awaits(&self, queue: &QueueName) -> bool {
        self.shared.outbox.awaits(queue)
    }

    fn announce(&self, queue: &QueueName, since: Timestamp, item: Option<ItemId>) {
        let shared = &self.shared;
        // If it cannot be sent, nothing is lost: the insert is signalled again when it is stored.
        if shared.can_send() && !shared.closing.is_cancelled() {
            shared.outbox.announce(queue, since, item);
        }
    }

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.shared.receiving.notices.subscribe()
    }

    fn healthy(&self) -> bool {
        let health = *self.shared.receiving.health.borrow();
        health.sending == Link::Up && health.receiving == Link::Up
    }

    async fn close(&self) {
        self.shared.closing.cancel();
        // A server that does not respond must not delay the shutdown.
        let _ = timeout(CLOSE_TIMEOUT, self.tasks.wait()).await;
    }
}

#[cfg(test)]
mod tests;
