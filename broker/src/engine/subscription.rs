//! Consumers: streams that are handed items for as long as they live, and single calls that wait.

use std::{sync::Arc, time::Duration};

use tokio::sync::{Notify, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    domain::{ConsumerName, Delivery, Fate, Invalid, Item, Queue, QueueName},
    metrics::OpenStream,
    store::{Held, Rollback, RollbackTo},
};

use super::{
    Engine, EngineError, Result,
    consumers::{Call, ConsumerId, InFlight, Inbox, StreamSettings},
    dispatch::Dispatcher,
};

/// Shortest lease.
const MIN_LEASE: Duration = Duration::from_millis(100);
/// Why items of a stream that ended come back.
const DISCONNECTED: &str = "the consumer's stream ended";

/// What a stream asks for.
#[derive(Debug, Clone)]
pub struct ConsumeOptions {
    /// The queue.
    pub queue: QueueName,
    /// Most unsettled items.
    pub max_in_flight: usize,
    /// Most unsettled payload bytes.
    pub max_in_flight_bytes: Option<usize>,
    /// Lease of each item, if not the queue's.
    pub lease: Option<Duration>,
    /// Who it is.
    pub consumer: Option<ConsumerName>,
    /// Commit each item as it is handed out.
    pub auto_commit: bool,
    /// Prolong leases for as long as the stream lives.
    pub renew: bool,
}

/// A stream of deliveries. Dropping it gives back what is not settled.
pub struct Subscription {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    queue: Arc<Queue>,
    id: ConsumerId,
    lease: Duration,
    wake: Arc<Notify>,
    _renewing: Option<DropGuard>,
    _open: OpenStream,
}

impl Subscription {
    /// The lease in force.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// The next deliveries, at least one; an error when the stream has to end. May be dropped and
    /// called again at any time: nothing is lost.
    pub async fn next(&mut self) -> Result<Vec<Delivery>> {
        loop {
            match self.dispatcher.look_into_inbox(self.id) {
                Inbox::Items(deliveries) => return Ok(deliveries),
                Inbox::Ended(error) => return Err(error),
                Inbox::Empty { .. } => self.wake.notified().await,
            }
        }
    }

    /// A handle on the stream's flow.
    pub fn flow(&self) -> Flow {
        Flow { dispatcher: Arc::clone(&self.dispatcher), id: self.id }
    }
}

/// How much a stream takes, to be changed from outside of it.
pub struct Flow {
    dispatcher: Arc<Dispatcher>,
    id: ConsumerId,
}

impl Flow {
    /// Changes how many items may be unsettled; 0 halts the stream. Of no effect once that has ended.
    pub fn set_max_in_flight(&self, max_in_flight: usize) {
        self.dispatcher.set_max_in_flight(self.id, max_in_flight);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let held = self.dispatcher.remove_stream(self.id);
        self.engine.release_stream(Arc::clone(&self.queue), held);
    }
}

impl Engine {
    /// Opens a stream of deliveries.
    pub async fn consume(self: &Arc<Self>, options: ConsumeOptions) -> Result<Subscription> {
        self.check_open()?;
        let queue = self.queue_to_consume(&options.queue).await?;
        let lease = self.lease(&queue, options.lease)?;
        let wake = Arc::new(Notify::new());
        let settings = StreamSettings {
            max_in_flight: options.max_in_flight,
            max_in_flight_bytes: options.max_in_flight_bytes.unwrap_or(usize::MAX),
            lease,
            consumer: options.consumer,
            auto_commit: options.auto_commit,
        };
        let (dispatcher, id) = self.with_dispatcher(&queue.name, |dispatcher| {
            (Arc::clone(dispatcher), dispatcher.add_stream(settings, Arc::clone(&wake)))
        });
        let renewing = options.renew.then(|| self.renew(&dispatcher, id, lease));
        Ok(Subscription {
            engine: Arc::clone(self),
            dispatcher,
            queue,
            id,
            lease,
            wake,
            _renewing: renewing,
            _open: self.metrics.stream_opened("Consume"),
        })
    }

    /// Takes items under a lease, waiting up to `wait` for the first. If the caller has gone away
    /// meanwhile nothing is kept from others.
    pub async fn reserve(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
        lease: Option<Duration>,
        consumer: Option<ConsumerName>,
    ) -> Result<Vec<Delivery>> {
        self.take(queue, max_items, wait, lease, consumer, false).await
    }

    /// Takes items and forgets them, waiting up to `wait` for the first.
    pub async fn pop(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
    ) -> Result<Vec<Item>> {
        let deliveries = self.take(queue, max_items, wait, None, None, true).await?;
        Ok(deliveries.into_iter().map(|delivery| delivery.item).collect())
    }

    async fn take(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
        lease: Option<Duration>,
        consumer: Option<ConsumerName>,
        auto_commit: bool,
    ) -> Result<Vec<Delivery>> {
        self.check_open()?;
        let queue = self.queue_to_consume(queue).await?;
        let lease = self.lease(&queue, lease)?;
        let (answer, answered) = oneshot::channel();
        let waits = !wait.is_zero();
        let call = Call { max_items, lease, consumer, auto_commit, waits, answer };
        let (dispatcher, id) = self.with_dispatcher(&queue.name, |dispatcher| {
            (Arc::clone(dispatcher), dispatcher.add_call(call))
        });
        let mut waiting =
            Waiting { engine: Arc::clone(self), queue, dispatcher, id, auto_commit, answered };
        let answer = if waits {
            tokio::time::timeout(wait, &mut waiting.answered).await.ok()
        } else {
            Some((&mut waiting.answered).await)
        };
        match answer {
            Some(answer) => answer.unwrap_or(Err(EngineError::ShuttingDown)),
            None => waiting.give_up(),
        }
    }

    async fn queue_to_consume(&self, name: &QueueName) -> Result<Arc<Queue>> {
        let (queue, new) = self.queues.get_or_create(name).await?;
        if new {
            self.tell_settings(&queue.name);
        }
        Ok(queue)
    }

    /// The lease to give: what was asked for, else the queue's, else the broker's.
    pub(super) fn lease(&self, queue: &Queue, asked: Option<Duration>) -> Result<Duration> {
        if let Some(asked) = asked {
            self.check_lease("lease", asked)?;
        }
        let lease = asked.or(queue.lease).unwrap_or(self.limits.default_lease);
        Ok(lease.min(self.limits.max_lease))
    }

    pub(super) fn check_lease(&self, field: &str, lease: Duration) -> Result<(), Invalid> {
        if (MIN_LEASE..=self.limits.max_lease).contains(&lease) {
            return Ok(());
        }
        let longest = self.limits.max_lease.as_secs();
        Err(Invalid::new(field, format!("a lease is 100 ms to {longest} s long on this broker")))
    }

    /// Prolongs the leases of a living stream, three times as often as needed.
    fn renew(
        self: &Arc<Self>,
        dispatcher: &Arc<Dispatcher>,
        id: ConsumerId,
        lease: Duration,
    ) -> DropGuard {
        let token = CancellationToken::new();
        let guard = token.clone().drop_guard();
        let (engine, dispatcher) = (Arc::clone(self), Arc::clone(dispatcher));
        self.tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = token.cancelled() => return,
                    () = engine.stopping.cancelled() => return,
                    () = tokio::time::sleep(lease / 3) => {}
                }
                let oldest = engine.now() - engine.limits.max_lease;
                let receipts = dispatcher.to_renew(id, oldest);
                if receipts.is_empty() {
                    continue;
                }
                // A failure is met again by the next round, while a third of the lease is left.
                if let Err(error) = engine.extend(receipts, Some(lease)).await {
                    tracing::warn!(queue = %dispatcher.queue(), %error, "could not renew leases");
                }
            }
        });
        guard
    }

    /// Gives back what a stream held when it ended: a failed attempt for what was sent to it, none
    /// for what never left, and none if it is the broker that goes. The settings may have changed
    /// since the stream was opened: those of now count.
    fn release_stream(self: &Arc<Self>, opened: Arc<Queue>, held: Vec<InFlight>) {
        if held.is_empty() {
            return;
        }
        let (now, draining) = (self.now(), self.is_draining());
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            let queue = engine.queues.get(&opened.name).await.unwrap_or(opened);
            let back = |eligible_time, attempt| RollbackTo::Queue { eligible_time, attempt };
            let give_back = |held: InFlight| {
                let attempt = held.receipt.attempt;
                let (to, reason) = if !held.sent {
                    (back(held.previous_eligible_time, attempt), None)
                } else if draining {
                    (back(now, attempt), None)
                } else {
                    let to = match queue.after_failure(attempt) {
                        Fate::Retry { attempt } => back(now, attempt),
                        Fate::DeadLetter => RollbackTo::DeadLetter,
                    };
                    (to, Some(DISCONNECTED.to_owned()))
                };
                let held = Held { queue: Arc::clone(&queue), receipt: held.receipt };
                Rollback { held, to, reason }
            };
            engine.release(held.into_iter().map(give_back).collect());
        });
    }
}

/// A call that waits. If it is dropped with an answer under way, the items go back.
struct Waiting {
    engine: Arc<Engine>,
    queue: Arc<Queue>,
    dispatcher: Arc<Dispatcher>,
    id: ConsumerId,
    auto_commit: bool,
    answered: oneshot::Receiver<Result<Vec<Delivery>>>,
}

impl Waiting {
    /// The time is up: nothing, unless an answer came at this very moment.
    fn give_up(&mut self) -> Result<Vec<Delivery>> {
        self.dispatcher.remove_call(self.id);
        self.answered.try_recv().unwrap_or_else(|_| Ok(Vec::new()))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Ok(deliveries) = self.give_up()
            && !self.auto_commit
        {
            self.engine.release_undelivered(&self.queue, deliveries);
        }
    }
}
