//! Consumers: streams that receive items for as long as they live, and single calls that wait.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    domain::{
        ConsumerName, Delivery, Invalid, Item, Outcome, Queue, QueueName, Receipt,
        limits::{MAX_BATCH, MIN_LEASE},
    },
    engine::{
        Engine, EngineError, Result,
        consumers::{
            Call, ConsumerId, InFlight, InForce, Inbox, Revoked, StreamSettings, is_too_late,
        },
        dispatch::Dispatcher,
        rollback::OnDisconnect,
    },
    metrics::OpenStream,
};

/// The options of a stream.
#[derive(Debug, Clone)]
pub(crate) struct ConsumeOptions {
    /// The queue.
    pub queue: QueueName,
    /// Most unsettled items.
    pub max_in_flight: usize,
    /// Most unsettled payload bytes.
    pub max_in_flight_bytes: Option<usize>,
    /// Lease of each item, if not that of the queue.
    pub lease: Option<Duration>,
    /// Name of the consumer.
    pub consumer: Option<ConsumerName>,
    /// The address it calls from.
    pub peer: Option<SocketAddr>,
    /// If true, each item is committed when it is handed out.
    pub auto_commit: bool,
    /// If true, leases are renewed for as long as the stream lives.
    pub renew: bool,
    /// What happens to unsettled items when the stream ends.
    pub on_disconnect: OnDisconnect,
    /// If true, the stream is told which items it no longer holds.
    pub tells_revoked: bool,
}

/// Who makes a call for items.
#[derive(Debug, Clone, Default)]
pub(crate) struct Identity {
    /// The name that the consumer gave itself.
    pub name: Option<ConsumerName>,
    /// The address it calls from.
    pub peer: Option<SocketAddr>,
}

/// A message to the consumer of a stream.
#[derive(Debug)]
pub(crate) enum Received {
    /// Items, at least one and at most as many as fit in a message.
    Deliveries(Vec<Delivery>),
    /// Items that the stream no longer holds, if it asked to be told.
    Revoked(Vec<Revoked>),
}

/// A stream of deliveries. When it is dropped, [`ConsumeOptions::on_disconnect`] decides what
/// happens to unsettled items.
pub(crate) struct Subscription {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    queue: Arc<Queue>,
    id: ConsumerId,
    lease: Duration,
    wake: Arc<Notify>,
    retirement: Retirement,
    _renewing: Option<DropGuard>,
    _open: OpenStream,
}

impl Subscription {
    /// The queue's name.
    pub(crate) fn queue(&self) -> &QueueName {
        &self.queue.name
    }

    /// Returns the lease in force.
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// Returns the next deliveries or revocations, or an error when the stream has to end. Returned
    /// items count as sent. Cancel-safe: the future may be dropped and the method called again
    /// without a loss.
    pub(crate) async fn next(&mut self) -> Result<Received> {
        loop {
            let (inbox, late) = self.dispatcher.look_into_inbox(self.id, self.engine.now());
            self.engine.release_unsent(&self.queue, late);
            match inbox {
                Inbox::Items(deliveries) => return Ok(Received::Deliveries(deliveries)),
                Inbox::Revoked(revoked) => return Ok(Received::Revoked(revoked)),
                Inbox::Ended(error) => return Err(error),
                Inbox::Empty { .. } => self.wake.notified().await,
            }
        }
    }

    /// Returns a handle that ends the stream when it is too old.
    pub(crate) fn retirement(&self) -> Retirement {
        self.retirement.clone()
    }

    /// Returns a handle to what was delivered.
    pub(crate) fn delivered(&self) -> Delivered {
        Delivered {
            engine: Arc::clone(&self.engine),
            dispatcher: Arc::clone(&self.dispatcher),
            id: self.id,
        }
    }

    /// Returns a handle to the stream's flow.
    pub(crate) fn flow(&self) -> Flow {
        Flow {
            engine: Arc::clone(&self.engine),
            dispatcher: Arc::clone(&self.dispatcher),
            id: self.id,
        }
    }
}

/// Changes a stream's flow from outside of it.
pub(crate) struct Flow {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    id: ConsumerId,
}

impl Flow {
    /// Changes how many items may be unsettled; 0 halts the stream. What was assigned to the stream, was not sent, and has no
    /// place any more returns to its queue. The result ends when nothing of that is delivered any more. Has no effect after the
    /// end of the stream.
    pub(crate) fn set_max_in_flight(&self, max_in_flight: usize) -> InForce {
        self.dispatcher.set_max_in_flight(&self.engine, self.id, max_in_flight)
    }
}

/// Commits what was delivered on a stream, all up to one item.
#[derive(Clone)]
pub(crate) struct Delivered {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    id: ConsumerId,
}

impl Delivered {
    /// Notes that the consumer asks to settle these items by their receipts. Whatever becomes of that, [`Self::up_to`] leaves them out.
    pub(crate) fn name(&self, receipts: &[Receipt]) {
        self.dispatcher.name(receipts);
    }

    /// Returns the items up to the one with this tag that [`Subscription::next`] has returned, without those that the stream holds no longer,
    /// and those that were named or returned before. If it has not returned such a tag, returns the last one as an error.
    pub(crate) fn up_to(&self, tag: u64) -> std::result::Result<Vec<Receipt>, u64> {
        self.dispatcher.include_up_to(self.id, tag)
    }

    /// Commits what [`Self::up_to`] has returned, which returns it again if this fails. Returns when the commits are durable.
    pub(crate) async fn commit(&self, receipts: &[Receipt]) -> Result<Vec<Outcome>> {
        let included = Included { dispatcher: &self.dispatcher, receipts };
        // No call that names its receipts commits more at once.
        let parts = receipts.chunks(MAX_BATCH).map(|part| self.engine.commit(part));
        let outcomes: Result<Vec<_>> = join_all(parts).await.into_iter().collect();
        let outcomes = outcomes?;
        included.end();
        Ok(outcomes.concat())
    }
}

/// What a commit of all up to one item includes. If this is dropped before the [end](Self::end), the next one includes it too.
struct Included<'a> {
    dispatcher: &'a Dispatcher,
    receipts: &'a [Receipt],
}

impl Included<'_> {
    fn end(mut self) {
        self.receipts = &[];
    }
}

impl Drop for Included<'_> {
    fn drop(&mut self) {
        self.dispatcher.exclude(self.receipts);
    }
}

/// Ends a stream from outside of it, whether the stream is polled or not: a client that does not
/// read must not keep the items that its stream holds.
#[derive(Clone)]
pub(crate) struct Retirement {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    queue: Arc<Queue>,
    id: ConsumerId,
    on_disconnect: OnDisconnect,
    begun: Arc<AtomicBool>,
}

impl Retirement {
    /// Hands out nothing more to the stream. When all items are settled, [`Subscription::next`]
    /// returns [`EngineError::StreamTooOld`]. If the stream ends before that, its items are rolled
    /// back as at shutdown, with nothing counted, unless the stream asked to keep its leases.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
        self.dispatcher.retire_stream(self.id);
    }

    /// Ends the stream, whatever it holds.
    pub(crate) fn end(&self) {
        let held = self.dispatcher.end_stream(self.id, &EngineError::StreamTooOld);
        self.roll_back(held);
    }

    fn roll_back(&self, held: Vec<InFlight>) {
        if self.begun.load(Ordering::Relaxed) && self.on_disconnect != OnDisconnect::KeepLease {
            return self.engine.release_held(&self.queue, held);
        }
        self.engine.stream_ended(&self.queue, held, self.on_disconnect);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.retirement.roll_back(self.dispatcher.remove_stream(self.id));
    }
}

impl Engine {
    /// Opens a stream of deliveries.
    pub(crate) async fn consume(self: &Arc<Self>, options: ConsumeOptions) -> Result<Subscription> {
        self.check_open()?;
        let queue = self.queues.get(&options.queue).await?;
        let lease = self.lease(&queue, options.lease)?;
        let wake = Arc::new(Notify::new());
        let settings = StreamSettings {
            max_in_flight: options.max_in_flight,
            max_in_flight_bytes: options.max_in_flight_bytes.unwrap_or(usize::MAX),
            lease,
            consumer: options.consumer,
            peer: options.peer,
            since: self.now(),
            auto_commit: options.auto_commit,
            renewed_for: options.renew.then_some(self.limits.max_lease),
            tells_revoked: options.tells_revoked,
        };
        let (dispatcher, id) = self.with_dispatcher(&queue.name, |dispatcher| {
            (Arc::clone(dispatcher), dispatcher.add_stream(settings, Arc::clone(&wake)))
        });
        let renewing = options.renew.then(|| self.renew(&dispatcher, id, lease));
        let retirement = Retirement {
            engine: Arc::clone(self),
            dispatcher: Arc::clone(&dispatcher),
            queue: Arc::clone(&queue),
            id,
            on_disconnect: options.on_disconnect,
            begun: Arc::default(),
        };
        Ok(Subscription {
            engine: Arc::clone(self),
            dispatcher,
            queue,
            id,
            lease,
            wake,
            retirement,
            _renewing: renewing,
            _open: self.metrics.stream_opened("Consume"),
        })
    }

    /// Reserves items, waiting up to `wait` for the first. If the caller goes away meanwhile, the
    /// items stay available to others.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
        lease: Option<Duration>,
        consumer: Identity,
    ) -> Result<Vec<Delivery>> {
        self.take(queue, max_items, wait, lease, consumer, false).await
    }

    /// Reserves and commits items, waiting up to `wait` for the first.
    pub(crate) async fn pop(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
        peer: Option<SocketAddr>,
    ) -> Result<Vec<Item>> {
        let consumer = Identity { name: None, peer };
        let deliveries = self.take(queue, max_items, wait, None, consumer, true).await?;
        Ok(deliveries.into_iter().map(|delivery| *delivery.item).collect())
    }

    async fn take(
        self: &Arc<Self>,
        queue: &QueueName,
        max_items: usize,
        wait: Duration,
        lease: Option<Duration>,
        Identity { name: consumer, peer }: Identity,
        auto_commit: bool,
    ) -> Result<Vec<Delivery>> {
        self.check_open()?;
        let queue = self.queues.get(queue).await?;
        let lease = self.lease(&queue, lease)?;
        let (answer, answered) = oneshot::channel();
        let waits = !wait.is_zero();
        let since = self.now();
        let call = Call { max_items, lease, consumer, peer, since, auto_commit, waits, answer };
        let (dispatcher, id) = self.with_dispatcher(&queue.name, |dispatcher| {
            (Arc::clone(dispatcher), dispatcher.add_call(call, since))
        });
        let mut waiting =
            Waiting { engine: Arc::clone(self), queue, dispatcher, id, auto_commit, answered };
        let time_is_up = async {
            if waits {
                tokio::time::sleep(wait).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        let deliveries = tokio::select! {
            biased;
            answer = &mut waiting.answered => answer.unwrap_or(Err(EngineError::ShuttingDown)),
            () = time_is_up => waiting.give_up().await,
            // The dispatcher may have ended before the call was added.
            () = self.stopping.cancelled() => waiting.give_up().await,
        }?;
        // What was committed at once was compared with the time after its commit, and is counted as handed out.
        Ok(if auto_commit { deliveries } else { waiting.in_time(lease, deliveries) })
    }

    /// Returns the lease to use: the requested one, else the queue's, else the broker's default.
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

    /// Renews the leases of an open stream, three times per lease.
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
                    biased;
                    () = token.cancelled() => return,
                    () = engine.stopping.cancelled() => return,
                    () = tokio::time::sleep(lease / 3) => {}
                }
                let now = engine.now();
                let receipts =
                    dispatcher.to_renew(id, now - engine.limits.max_lease, now + lease);
                if receipts.is_empty() {
                    continue;
                }
                // The next round retries after a failure, while a third of the lease is left.
                match engine.extend_held(&receipts, Some(lease), true).await {
                    Ok(results) => {
                        let void = results.iter().zip(&receipts);
                        let void = void.filter(|((outcome, _), _)| *outcome != Outcome::Ok);
                        dispatcher.found_void(void.map(|(_, receipt)| receipt), engine.now());
                    }
                    Err(error) => {
                        tracing::warn!(queue = %dispatcher.queue(), %error, "could not renew leases");
                    }
                }
            }
        });
        guard
    }
}

/// A waiting call. If it is dropped while its answer is under way, the items are rolled back.
struct Waiting {
    engine: Arc<Engine>,
    queue: Arc<Queue>,
    dispatcher: Arc<Dispatcher>,
    id: ConsumerId,
    auto_commit: bool,
    answered: oneshot::Receiver<Result<Vec<Delivery>>>,
}

impl Waiting {
    /// Ends the wait. Returns no items, unless a running round includes the call, which then
    /// returns the answer of that round.
    async fn give_up(&mut self) -> Result<Vec<Delivery>> {
        let nothing = if self.engine.stopping.is_cancelled() {
            Err(EngineError::ShuttingDown)
        } else {
            Ok(Vec::new())
        };
        if self.dispatcher.withdraw_call(self.id) {
            (&mut self.answered).await.unwrap_or(nothing)
        } else {
            self.answered.try_recv().unwrap_or(nothing)
        }
    }

    /// Returns the items whose leases leave time for an answer. After a pause of the whole broker
    /// the leases may have ended.
    fn in_time(&self, lease: Duration, mut deliveries: Vec<Delivery>) -> Vec<Delivery> {
        let now = self.engine.now();
        let is_late = |delivery: &mut Delivery| {
            delivery.item.has_expired(now) || is_too_late(now, lease, delivery.lease_expire_time)
        };
        let late: Vec<_> = deliveries.extract_if(.., is_late).collect();
        self.engine.release_undelivered(&self.queue, late);
        deliveries
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.dispatcher.remove_call(self.id);
        if let Ok(Ok(deliveries)) = self.answered.try_recv()
            && !self.auto_commit
        {
            self.engine.release_undelivered(&self.queue, deliveries);
        }
    }
}
