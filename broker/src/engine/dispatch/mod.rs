//! Out: one dispatcher per consumed queue and broker. It gathers what the queue's consumers have
//! room for, reserves as much in one go, and hands it to them.
//!
//! Nothing is lost between a look and a wait: news is noted before the store is asked, so what
//! arrives during the look causes another one.

mod polls;

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use sluicegate_proto::backoff::Backoff;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use self::polls::Polls;

use crate::{
    domain::{Delivery, ItemId, Outcome, Queue, QueueName, Receipt, Timestamp, Totals},
    engine::{
        Engine, EngineError, Result,
        adaptive_poll::Rhythm,
        consumers::{
            Call, Claimant, ConsumerId, Consumers, InFlight, Inbox, Round, StreamSettings,
        },
    },
    metrics::Wake,
    store::{Appeared, Reservation, Reserved, Reserver},
};

/// A dispatcher with no consumers ends after this long.
const IDLE: Duration = Duration::from_secs(10);
/// How long consumers that have work wait for more, so that many small refills become one.
const GATHER: Duration = Duration::from_millis(1);
/// A timer that goes off again and again does so at most this often.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Fruitless looks in a row before the dispatcher waits for something to change.
const MAX_STUCK: u32 = 3;
/// Pauses after failed looks.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
/// How often at the most an emptied queue is asked when its next item becomes eligible.
const DUE_INTERVAL: Duration = Duration::from_millis(200);

pub(super) struct Dispatcher {
    queue: QueueName,
    state: Mutex<State>,
    /// There is something to do for the loop.
    wake: Notify,
    /// Something was settled; for shutdown.
    fewer: Notify,
    /// How many steps its loop has begun.
    #[cfg(test)]
    steps: std::sync::atomic::AtomicU64,
}

struct State {
    consumers: Consumers,
    /// The queue may have more than was seen in the last look.
    dirty: bool,
    /// What other brokers said of that since the store was last told.
    appeared: Appeared,
    /// What brings the next look about.
    woken_by: Wake,
    /// Receipts may have been settled on another broker.
    reconcile: bool,
    /// The queue's settings as of the last step: what streams hold was reserved under these, or older ones.
    queue: Option<Arc<Queue>>,
    /// When something that was seen becomes eligible, or may.
    due: Option<Timestamp>,
    /// When the store was last asked for that.
    due_asked: Timestamp,
    /// How items come from other brokers.
    rhythm: Rhythm,
}

impl Dispatcher {
    pub(super) fn new(queue: QueueName) -> Self {
        let state = State {
            consumers: Consumers::default(),
            dirty: true,
            appeared: Appeared::Nothing, // the store looks from the start by itself
            woken_by: Wake::Local,
            reconcile: false,
            queue: None,
            due: None,
            due_asked: Timestamp::default(),
            rhythm: Rhythm::default(),
        };
        Self {
            queue,
            state: Mutex::new(state),
            wake: Notify::new(),
            fewer: Notify::new(),
            #[cfg(test)]
            steps: std::sync::atomic::AtomicU64::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(super) fn queue(&self) -> &QueueName {
        &self.queue
    }

    pub(super) fn consumers(&self) -> u32 {
        self.state.lock().consumers.len() as u32
    }

    pub(super) fn is_used(&self) -> bool {
        self.state.lock().consumers.len() > 0
    }

    /// This broker made something in the queue eligible from `since` on.
    pub(super) fn inserted(&self, since: Option<Timestamp>, now: Timestamp) {
        {
            let mut state = self.state.lock();
            match since {
                Some(since) if since > now => {
                    if state.due.is_some_and(|due| due <= since) {
                        return; // the timer goes off before
                    }
                    state.due = Some(since);
                }
                _ => state.dirty = true,
            }
        }
        self.wake.notify_one();
    }

    /// Another broker did, by its signal. It is noted before the store is asked, and told with the next reserve.
    pub(super) fn inserted_elsewhere(&self, since: Option<Timestamp>, now: Timestamp) {
        {
            let mut state = self.state.lock();
            state.appeared.add(Appeared::of(since));
            state.rhythm.heard(now);
            state.woken_by = Wake::Signal;
        }
        self.inserted(since, now);
    }

    /// Other brokers may have done anything to the queue.
    pub(super) fn look_from_start(&self, now: Timestamp) {
        self.state.lock().appeared.add(Appeared::FromStart);
        self.inserted(None, now);
    }

    /// Something of this queue was settled on another broker, perhaps ours.
    pub(super) fn settled_elsewhere(&self) {
        {
            let mut state = self.state.lock();
            if state.consumers.held_count() == 0 {
                return;
            }
            state.reconcile = true;
        }
        self.wake.notify_one();
    }

    /// These reservations were settled through this broker, or whoever tried has been told that they are void.
    pub(super) fn settled<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        self.free(receipts, Consumers::settled);
    }

    /// These reservations are void, which nobody was told yet.
    pub(super) fn found_void<'a>(
        &self,
        receipts: impl Iterator<Item = &'a Receipt>,
        now: Timestamp,
    ) {
        self.free(receipts, |consumers, receipt| consumers.found_void(receipt, now));
    }

    /// The item was deleted through this broker.
    pub(super) fn deleted(&self, item: ItemId) {
        self.free(std::iter::once(item), Consumers::deleted);
    }

    /// Takes something out of the hands of whoever holds it; `free` is true if somebody did.
    fn free<T>(&self, all: impl Iterator<Item = T>, free: impl Fn(&mut Consumers, T) -> bool) {
        let freed = {
            let mut state = self.state.lock();
            all.map(|one| free(&mut state.consumers, one)).filter(|held| *held).count()
        };
        if freed > 0 {
            self.wake.notify_one();
            self.fewer.notify_waiters();
        }
    }

    pub(super) fn extended(&self, receipt: &Receipt, until: Timestamp) {
        self.state.lock().consumers.extended(receipt, until);
    }

    pub(super) fn to_renew(&self, id: ConsumerId, oldest: Timestamp) -> Vec<Receipt> {
        self.state.lock().consumers.to_renew(id, oldest)
    }

    pub(super) fn add_stream(&self, settings: StreamSettings, wake: Arc<Notify>) -> ConsumerId {
        let id = self.state.lock().consumers.add_stream(settings, wake);
        self.wake.notify_one();
        id
    }

    pub(super) fn remove_stream(&self, id: ConsumerId) -> Vec<InFlight> {
        let held = self.state.lock().consumers.remove_stream(id);
        self.wake.notify_one();
        self.fewer.notify_waiters();
        held
    }

    pub(super) fn add_call(&self, call: Call) -> ConsumerId {
        let id = {
            let mut state = self.state.lock();
            state.dirty = true; // a call is answered from the store, not from what was known before
            state.consumers.add_call(call)
        };
        self.wake.notify_one();
        id
    }

    pub(super) fn remove_call(&self, id: ConsumerId) {
        self.state.lock().consumers.remove_call(id);
    }

    /// The call's time is up. True if a round is running that will answer it.
    pub(super) fn withdraw_call(&self, id: ConsumerId) -> bool {
        self.state.lock().consumers.withdraw_call(id)
    }

    pub(super) fn set_max_in_flight(&self, id: ConsumerId, max: usize) {
        self.state.lock().consumers.set_max_in_flight(id, max);
        self.wake.notify_one();
    }

    pub(super) fn retire_stream(&self, id: ConsumerId) {
        self.state.lock().consumers.retire_stream(id);
    }

    /// Ends a stream and returns what it held, whether it is polled or not.
    pub(super) fn end_stream(&self, id: ConsumerId, error: &EngineError) -> Vec<InFlight> {
        let held = self.state.lock().consumers.end_stream(id, error);
        self.fewer.notify_waiters();
        held
    }

    /// What there is for a stream, and what was dealt to it but is too late to be sent.
    pub(super) fn look_into_inbox(&self, id: ConsumerId, now: Timestamp) -> (Inbox, Vec<InFlight>) {
        let (inbox, late) = self.state.lock().consumers.look_into_inbox(id, now);
        if matches!(inbox, Inbox::Empty { dirty: true }) || !late.is_empty() {
            self.wake.notify_one();
        }
        (inbox, late)
    }

    /// Ends all streams and calls; answers what the streams held, whether they are polled or not, with the
    /// queue's settings.
    pub(super) fn end_all(&self, error: &EngineError) -> Option<(Arc<Queue>, Vec<InFlight>)> {
        let mut state = self.state.lock();
        let held = state.consumers.end_all(error);
        let held = state.queue.clone().map(|queue| (queue, held));
        drop(state);
        self.fewer.notify_waiters();
        held
    }

    /// Waits until no stream holds an item any more.
    pub(super) async fn drained(&self) {
        loop {
            let fewer = self.fewer.notified();
            if self.state.lock().consumers.held_count() == 0 {
                return;
            }
            fewer.await;
        }
    }

    /// A step begins: takes note of what time has brought. Answers what was taken from streams because
    /// its lease has ended.
    fn begin_step(&self, queue: &Arc<Queue>, now: Timestamp) -> Vec<InFlight> {
        let mut state = self.state.lock();
        state.queue = Some(Arc::clone(queue));
        let lapsed = state.consumers.take_lapsed(now);
        let is_due = state.due.is_some_and(|due| due <= now);
        if is_due {
            state.due = None;
            state.woken_by = Wake::Timer;
        }
        state.dirty |= is_due || !lapsed.is_empty();
        drop(state);
        if !lapsed.is_empty() {
            self.fewer.notify_waiters();
        }
        lapsed
    }

    /// What to ask the store for now, and what to tell it; `None` if nobody wants anything or nothing is there.
    fn next_round(&self) -> Option<(Round, Appeared)> {
        let mut state = self.state.lock();
        if !state.dirty {
            return None;
        }
        let round = state.consumers.demands();
        if round.demands.is_empty() {
            return None;
        }
        state.dirty = false;
        state.consumers.begin_round(&round);
        Some((round, std::mem::take(&mut state.appeared)))
    }

    /// True if there may be work, but nobody is idle: the next round can wait a moment.
    fn can_wait(&self) -> bool {
        let state = self.state.lock();
        state.dirty && state.consumers.can_wait()
    }

    /// The store did not answer: calls are told, streams wait for the next try.
    fn look_failed(&self, error: &EngineError) {
        let mut state = self.state.lock();
        state.dirty = true;
        state.consumers.fail_round(error);
    }

    /// When a step has something to do that nobody tells of.
    fn next_timer(&self) -> Option<Timestamp> {
        let state = self.state.lock();
        state.due.into_iter().chain(state.consumers.next_lapse()).min()
    }

    /// When to look between two signals.
    fn next_look(&self, now: Timestamp) -> Option<Timestamp> {
        let state = self.state.lock();
        // If there is news already, it is room that is waited for.
        state.rhythm.next_look(now).filter(|_| !state.dirty)
    }

    fn holds_any(&self) -> bool {
        self.state.lock().consumers.held_count() > 0
    }
}

/// The dispatcher's loop; ends at shutdown, or when the queue has had no consumers for a while.
pub(super) async fn run(engine: Arc<Engine>, dispatcher: Arc<Dispatcher>) {
    let mut polls = Polls::new(&engine);
    let mut reserver = engine.store.reserver(&dispatcher.queue);
    let (mut failures, mut stuck) = (0, 0);
    let mut ends_at = None;
    loop {
        if engine.draining.is_cancelled() {
            dispatcher.state.lock().consumers.fail_calls(&EngineError::ShuttingDown);
            if engine.stopping.is_cancelled() {
                return;
            }
            tokio::select! {
                () = engine.stopping.cancelled() => return,
                () = dispatcher.wake.notified() => continue,
            }
        }
        #[cfg(test)]
        dispatcher.steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if !dispatcher.is_used() {
            // Whatever wakes it meanwhile: only a consumer makes it go on.
            let ends_at = *ends_at.get_or_insert_with(|| Instant::now() + IDLE);
            tokio::select! {
                () = dispatcher.wake.notified() => {}
                () = engine.draining.cancelled() => {}
                () = sleep_until(ends_at) => {
                    if engine.retire(&dispatcher) {
                        return;
                    }
                }
            }
            continue;
        }
        ends_at = None;
        match step(&engine, &dispatcher, &mut *reserver, &mut polls).await {
            Ok(Step::Again) => {
                polls.found();
                (failures, stuck) = (0, 0);
            }
            Ok(Step::Stuck) if stuck < MAX_STUCK => stuck += 1,
            Ok(Step::Wait | Step::Stuck) => {
                (failures, stuck) = (0, 0);
                wait(&engine, &dispatcher, &mut polls).await;
            }
            Err(EngineError::QueueNotFound(queue)) => {
                // What its streams held is gone with it. Those that are not polled do not hear of their
                // end, and are no consumers any more all the same.
                dispatcher.end_all(&EngineError::QueueDeleted(queue));
            }
            Err(error) => {
                tracing::warn!(queue = %dispatcher.queue, %error, "could not reserve; trying again");
                dispatcher.look_failed(&error);
                tokio::select! {
                    () = tokio::time::sleep(BACKOFF.delay(failures)) => {}
                    () = engine.draining.cancelled() => {}
                }
                failures += 1;
            }
        }
    }
}

enum Step {
    /// Something was handed out or cleared away, or there is more to look at.
    Again,
    /// There is more, but none of it could be dealt: others were quicker, or it is too large for
    /// the room there is.
    Stuck,
    /// Nothing to do until something happens.
    Wait,
}

async fn step(
    engine: &Arc<Engine>,
    dispatcher: &Arc<Dispatcher>,
    reserver: &mut dyn Reserver,
    polls: &mut Polls,
) -> Result<Step> {
    gather_room(dispatcher, &engine.draining).await;
    let queue = engine.queues.get(&dispatcher.queue).await?;
    let lapsed = dispatcher.begin_step(&queue, engine.now());
    engine.release_unsent(&queue, lapsed);
    reconcile_if_due(engine, dispatcher, &queue, polls).await?;
    if queue.paused {
        let mut state = dispatcher.state.lock();
        state.consumers.answer_impatient();
        state.dirty = true; // for when it is resumed, which wakes us
        return Ok(Step::Wait);
    }
    let Some((round, appeared)) = dispatcher.next_round() else {
        return Ok(Step::Wait);
    };
    let wanted: usize = round.demands.iter().map(|demand| demand.max_items).sum();
    let woken_by = std::mem::replace(&mut dispatcher.state.lock().woken_by, Wake::Local);
    engine.metrics.woken(woken_by);
    let looked = engine.now();
    let reserved = reserver.reserve(&queue, &round.demands, appeared).await.inspect_err(|_| {
        dispatcher.state.lock().appeared.add(appeared); // nor may the store have heard of it
    })?;
    if reserved.limit_unknown {
        engine.with_known_limit(&queue).await?;
        let mut state = dispatcher.state.lock();
        state.dirty = true;
        state.consumers.end_round(&round, false);
        return Ok(Step::Again);
    }
    polls.looked();
    let assigned = reserved.deliveries.len();
    let cleared = reserved.at_limit.total() + reserved.expired;
    dispatcher.state.lock().rhythm.brought(assigned);
    let more = reserved.more || assigned >= wanted;
    hand_out(engine, dispatcher, &queue, &round, reserved).await?;
    {
        let mut state = dispatcher.state.lock();
        state.dirty |= more;
        state.consumers.end_round(&round, !more);
    }
    if more {
        return Ok(if assigned > 0 || cleared > 0 { Step::Again } else { Step::Stuck });
    }
    // The queue is empty as far as it was seen.
    ask_when_due(engine, dispatcher, reserver, &queue, looked).await?;
    Ok(if assigned > 0 { Step::Again } else { Step::Wait })
}

/// Waits until there is room worth a look at the store, somebody is idle, or a moment has passed.
/// What wakes it is looked at in the step that follows.
async fn gather_room(dispatcher: &Dispatcher, draining: &CancellationToken) {
    let until = Instant::now() + GATHER;
    while dispatcher.can_wait() {
        tokio::select! {
            () = dispatcher.wake.notified() => {}
            () = draining.cancelled() => return,
            () = sleep_until(until) => return,
        }
    }
}

/// Sees to it that the loop is there when the next item becomes eligible. A queue that runs empty
/// again and again does not ask the store each time; it looks once more a little later instead.
/// `looked`: when the look began that found nothing more.
async fn ask_when_due(
    engine: &Engine,
    dispatcher: &Dispatcher,
    reserver: &mut dyn Reserver,
    queue: &Queue,
    looked: Timestamp,
) -> Result<()> {
    let now = engine.now();
    let ask_again = dispatcher.state.lock().due_asked + DUE_INTERVAL;
    let due = if now < ask_again {
        Some(ask_again)
    } else {
        dispatcher.state.lock().due_asked = now;
        reserver.next_eligible(queue, looked).await?
    };
    let mut state = dispatcher.state.lock();
    state.due = match (state.due, due) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    Ok(())
}

/// Gives each consumer what it was dealt, and back to the queue what its consumer is no longer there for.
async fn hand_out(
    engine: &Arc<Engine>,
    dispatcher: &Arc<Dispatcher>,
    queue: &Arc<Queue>,
    round: &Round,
    reserved: Reserved,
) -> Result<()> {
    let delivered = reserved.deliveries.len() as u64;
    if reserved.damaged > 0 {
        engine.metrics.damaged(&queue.name, reserved.damaged);
    }
    let Reserved { mut deliveries, at_limit, expired, .. } = reserved;
    let mut totals = Totals { delivered, expired, ..Totals::default() };
    engine.report_lapsed_at_limit(queue, at_limit);
    let mut unwanted = Vec::new();
    let mut failed = None;
    if round.claimants.iter().any(|claimant| claimant.auto_commit) {
        let committed =
            commit_at_once(engine, dispatcher, queue, round, &mut deliveries, &mut unwanted).await;
        match committed {
            Ok(committed) => {
                totals.popped = committed;
                totals.committed += committed;
            }
            Err(error) => failed = Some(error), // of these alone: the others are dealt theirs
        }
    }
    engine.count(&queue.name, &totals);
    let mut assigned: Vec<Vec<Delivery>> = round.claimants.iter().map(|_| Vec::new()).collect();
    for (claimant, delivery) in deliveries {
        assigned[claimant].push(delivery);
    }
    let now = engine.now();
    {
        let mut state = dispatcher.state.lock();
        for (claimant, deliveries) in round.claimants.iter().zip(assigned) {
            if deliveries.is_empty() {
                continue;
            }
            let back = state.consumers.hand(claimant.id, deliveries, now);
            // Items committed at once are gone from the store: nothing to give back if their claimant
            // has gone since.
            if !claimant.auto_commit {
                unwanted.extend(back);
            }
        }
    }
    engine.release_undelivered(queue, unwanted);
    failed.map_or(Ok(()), Err)
}

/// Commits what goes to claimants that want it so; keeps of that only what was there to commit. What is for
/// nobody any more is not committed, and goes to `unwanted`; so does all of it if the commit fails.
async fn commit_at_once(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    round: &Round,
    deliveries: &mut Vec<(usize, Delivery)>,
    unwanted: &mut Vec<Delivery>,
) -> Result<u64> {
    let claimants = &round.claimants;
    let is_gone: Vec<bool> = {
        let state = dispatcher.state.lock();
        let gone =
            |claimant: &Claimant| claimant.auto_commit && !state.consumers.is_there(claimant.id);
        claimants.iter().map(gone).collect()
    };
    unwanted.extend(deliveries.extract_if(.., |(claimant, _)| is_gone[*claimant]).map(|(_, d)| d));
    let held: Vec<Reservation> = deliveries
        .iter()
        .filter(|(claimant, _)| claimants[*claimant].auto_commit)
        .map(|(_, delivery)| Reservation {
            queue: Arc::clone(queue),
            receipt: delivery.receipt.clone(),
        })
        .collect();
    if held.is_empty() {
        return Ok(0);
    }
    let outcomes = match engine.store.commit(held).await {
        Ok(outcomes) => outcomes,
        Err(error) => {
            // Whether it took effect is not known. What is still there is ready again.
            let theirs =
                deliveries.extract_if(.., |(claimant, _)| claimants[*claimant].auto_commit);
            unwanted.extend(theirs.map(|(_, delivery)| delivery));
            return Err(error.into());
        }
    };
    let mut outcomes = outcomes.into_iter();
    let mut committed = 0;
    deliveries.retain(|(claimant, _)| {
        if !claimants[*claimant].auto_commit {
            return true;
        }
        let ok = outcomes.next() == Some(Outcome::Ok);
        committed += u64::from(ok);
        ok
    });
    Ok(committed)
}

/// Finds out which reservations our streams hold no more, if another broker's signal or the time asks for it.
async fn reconcile_if_due(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    polls: &mut Polls,
) -> Result<()> {
    let told = std::mem::take(&mut dispatcher.state.lock().reconcile);
    if !told && Instant::now() < polls.next_reconcile(engine.signals.healthy()) {
        return Ok(());
    }
    let reconciled = reconcile(engine, dispatcher, queue).await;
    match reconciled {
        Ok(()) => polls.reconciled(),
        Err(_) => dispatcher.state.lock().reconcile = true,
    }
    reconciled
}

/// Finds out which items our streams hold no more, since they were settled on another broker.
async fn reconcile(engine: &Engine, dispatcher: &Dispatcher, queue: &Arc<Queue>) -> Result<()> {
    let receipts = dispatcher.state.lock().consumers.held();
    if receipts.is_empty() {
        return Ok(());
    }
    let held = receipts
        .iter()
        .map(|receipt| Reservation { queue: Arc::clone(queue), receipt: receipt.clone() })
        .collect();
    let holds = engine.store.holds(held).await?;
    let void = receipts.iter().zip(holds).filter(|(_, holds)| !holds).map(|(r, _)| r);
    dispatcher.found_void(void, engine.now());
    Ok(())
}

async fn wait(engine: &Engine, dispatcher: &Dispatcher, polls: &mut Polls) {
    let healthy = engine.signals.healthy();
    let now = engine.now();
    let look = dispatcher.next_look(now);
    let timer = dispatcher.next_timer().into_iter().chain(look).min();
    let timer = timer.map(|timer| Instant::now() + now.until(timer).max(SHORTEST_WAIT));
    let reconcile = dispatcher.holds_any().then(|| polls.next_reconcile(healthy));
    let poll = polls.next_look(healthy);
    let until = [Some(poll), reconcile, timer].into_iter().flatten().min().unwrap_or(poll);
    tokio::select! {
        () = dispatcher.wake.notified() => return,
        () = engine.draining.cancelled() => return,
        () = sleep_until(until) => {}
    }
    // What became due, lapsed, or has to be reconciled is seen to by the step that follows.
    let is_polled = poll <= Instant::now();
    if is_polled {
        polls.missed();
    }
    if is_polled || look.is_some_and(|look| look <= engine.now()) {
        let mut state = dispatcher.state.lock();
        state.dirty = true;
        state.woken_by = if is_polled { Wake::Poll } else { Wake::Timer };
    }
}

#[cfg(test)]
mod tests;
