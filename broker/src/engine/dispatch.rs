//! Out: one dispatcher per consumed queue and broker. It gathers what the queue's consumers have
//! room for, reserves as much in one go, and hands it to them.
//!
//! Nothing is lost between a look and a wait: news is noted before the store is asked, so what
//! arrives during the look causes another one.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::Rng;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{Delivery, Outcome, Queue, QueueName, Receipt, Timestamp, Totals},
    metrics::Wake,
    store::{Held, Reserved, Rollback, RollbackTo},
};

use super::{
    Engine, EngineError, Result,
    consumers::{Call, ConsumerId, Consumers, InFlight, Inbox, StreamSettings, Taker},
    depths::Change,
    rhythm::Rhythm,
};

/// A dispatcher with no consumers ends after this long.
const IDLE: Duration = Duration::from_secs(10);
/// How long consumers that have work wait for more, so that many small refills become one.
const GATHER: Duration = Duration::from_millis(1);
/// Fruitless looks in a row before the dispatcher waits for something to change.
const MAX_STUCK: u32 = 3;
/// First pause after a failed look; doubles up to [`MAX_BACKOFF`].
const BACKOFF: Duration = Duration::from_millis(100);
/// How often at the most an emptied queue is asked when its next item becomes eligible.
const DUE_INTERVAL: Duration = Duration::from_millis(200);
/// Longest pause after failed looks.
const MAX_BACKOFF: Duration = Duration::from_secs(2);

pub(super) struct Dispatcher {
    queue: QueueName,
    state: Mutex<State>,
    /// There is something to do for the loop.
    wake: Notify,
    /// Something was settled; for shutdown.
    fewer: Notify,
}

struct State {
    consumers: Consumers,
    /// The queue may have more than was seen in the last look.
    news: bool,
    /// What brings the next look about.
    woken_by: Wake,
    /// Receipts may have been settled on another broker.
    reconcile: bool,
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
            news: true,
            woken_by: Wake::Local,
            reconcile: false,
            due: None,
            due_asked: Timestamp::default(),
            rhythm: Rhythm::default(),
        };
        Self { queue, state: Mutex::new(state), wake: Notify::new(), fewer: Notify::new() }
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

    /// Something in the queue is eligible from `since` on.
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
                _ => state.news = true,
            }
        }
        self.wake.notify_one();
    }

    /// The same, by another broker's signal.
    pub(super) fn inserted_elsewhere(&self, since: Option<Timestamp>, now: Timestamp) {
        {
            let mut state = self.state.lock();
            state.rhythm.heard(now);
            state.woken_by = Wake::Signal;
        }
        self.inserted(since, now);
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

    /// These reservations were settled through this broker, or found to be void.
    pub(super) fn settled<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        let freed = {
            let mut state = self.state.lock();
            receipts.filter(|receipt| state.consumers.settled(receipt)).count()
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
            state.news = true; // a call is answered from the store, not from what was known before
            state.consumers.add_call(call)
        };
        self.wake.notify_one();
        id
    }

    pub(super) fn remove_call(&self, id: ConsumerId) {
        self.state.lock().consumers.remove_call(id);
    }

    pub(super) fn set_max_in_flight(&self, id: ConsumerId, max: usize) {
        self.state.lock().consumers.set_max_in_flight(id, max);
        self.wake.notify_one();
    }

    pub(super) fn look_into_inbox(&self, id: ConsumerId) -> Inbox {
        let inbox = self.state.lock().consumers.look_into_inbox(id);
        if matches!(inbox, Inbox::Empty { news: true }) {
            self.wake.notify_one();
        }
        inbox
    }

    /// Ends all streams and calls.
    pub(super) fn end_all(&self, error: &EngineError) {
        self.state.lock().consumers.end_all(error);
        self.wake.notify_one();
    }

    /// Waits until no stream holds an item any more.
    pub(super) async fn settled_down(&self) {
        loop {
            let fewer = self.fewer.notified();
            if self.state.lock().consumers.held_count() == 0 {
                return;
            }
            fewer.await;
        }
    }

    /// What to ask the store for now; `None` if nobody wants anything or nothing is there.
    fn next_round(&self, now: Timestamp) -> Option<(Vec<crate::domain::Want>, Vec<Taker>)> {
        let mut state = self.state.lock();
        if state.due.is_some_and(|due| due <= now) {
            state.due = None;
            state.news = true;
            state.woken_by = Wake::Timer;
        }
        if !state.news {
            return None;
        }
        let (wants, takers) = state.consumers.wants(now);
        if wants.is_empty() {
            return None;
        }
        state.news = false;
        Some((wants, takers))
    }

    /// True if there may be work, but nobody is idle: the next round can wait a moment.
    fn can_wait(&self) -> bool {
        let state = self.state.lock();
        state.news && state.consumers.can_wait()
    }

    /// The store did not answer: calls are told, streams wait for the next try.
    fn look_failed(&self, error: &EngineError) {
        let mut state = self.state.lock();
        state.news = true;
        state.consumers.fail_calls(error);
    }

    /// When the loop has to look by itself.
    fn next_timer(&self, now: Timestamp) -> Option<Timestamp> {
        let state = self.state.lock();
        // If there is news already, it is room that is waited for.
        let look = state.rhythm.next_look(now).filter(|_| !state.news);
        let timers = [state.due, state.consumers.first_lease_end(), look];
        timers.into_iter().flatten().min()
    }
}

/// The dispatcher's loop; ends at shutdown, or when the queue has had no consumers for a while.
pub(super) async fn run(engine: Arc<Engine>, dispatcher: Arc<Dispatcher>) {
    let mut polls = Polls::new(&engine);
    let mut backoff = BACKOFF;
    let mut stuck = 0;
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
        if !dispatcher.is_used() {
            tokio::select! {
                () = dispatcher.wake.notified() => {}
                () = engine.draining.cancelled() => {}
                () = tokio::time::sleep(IDLE) => {
                    if engine.retire(&dispatcher) {
                        return;
                    }
                }
            }
            if !dispatcher.is_used() {
                continue;
            }
        }
        match step(&engine, &dispatcher).await {
            Ok(Step::Again) => {
                polls.reset();
                backoff = BACKOFF;
                stuck = 0;
            }
            Ok(Step::Stuck) if stuck < MAX_STUCK => stuck += 1,
            Ok(Step::Wait | Step::Stuck) => {
                backoff = BACKOFF;
                stuck = 0;
                wait(&engine, &dispatcher, &mut polls).await;
            }
            Err(EngineError::QueueNotFound(queue)) => {
                dispatcher.end_all(&EngineError::QueueDeleted(queue));
                tokio::select! {
                    () = dispatcher.wake.notified() => {}
                    () = engine.draining.cancelled() => {}
                }
            }
            Err(error) => {
                tracing::warn!(queue = %dispatcher.queue, %error, "could not reserve; trying again");
                dispatcher.look_failed(&error);
                let pause = rand::rng().random_range(backoff / 2..=backoff);
                backoff = (backoff * 2).min(MAX_BACKOFF);
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = engine.draining.cancelled() => {}
                }
            }
        }
    }
}

enum Step {
    /// Something was handed out, or there is more to look at.
    Again,
    /// There is more, but none of it could be dealt: others were quicker, or it is too large for
    /// the room there is.
    Stuck,
    /// Nothing to do until something happens.
    Wait,
}

async fn step(engine: &Arc<Engine>, dispatcher: &Arc<Dispatcher>) -> Result<Step> {
    gather_room(dispatcher, &engine.draining).await;
    let queue = engine.queues.get(&dispatcher.queue).await?;
    if std::mem::take(&mut dispatcher.state.lock().reconcile) {
        reconcile(engine, dispatcher, &queue).await?;
    }
    if queue.paused {
        let mut state = dispatcher.state.lock();
        let (_, takers) = state.consumers.wants(engine.now());
        state.consumers.answer_impatient(takers.iter().map(|taker| taker.id));
        state.news = true; // for when it is resumed, which wakes us
        return Ok(Step::Wait);
    }
    let Some((wants, takers)) = dispatcher.next_round(engine.now()) else {
        return Ok(Step::Wait);
    };
    let wanted: usize = wants.iter().map(|want| want.max_items).sum();
    let woken_by = std::mem::replace(&mut dispatcher.state.lock().woken_by, Wake::Local);
    engine.metrics.woken(woken_by);
    let looked = engine.now();
    let reserved = engine.store.reserve(&queue, &wants).await?;
    let dealt = reserved.deliveries.len();
    dispatcher.state.lock().rhythm.brought(dealt);
    let more = reserved.more || dealt >= wanted;
    hand_out(engine, dispatcher, &queue, &takers, reserved).await?;
    if more {
        dispatcher.state.lock().news = true;
        return Ok(if dealt > 0 { Step::Again } else { Step::Stuck });
    }
    // The queue is empty as far as it was seen.
    dispatcher.state.lock().consumers.answer_impatient(takers.iter().map(|taker| taker.id));
    ask_when_due(engine, dispatcher, &queue, looked).await?;
    Ok(if dealt > 0 { Step::Again } else { Step::Wait })
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
    queue: &Queue,
    looked: Timestamp,
) -> Result<()> {
    let now = engine.now();
    let ask_again = dispatcher.state.lock().due_asked + DUE_INTERVAL;
    let due = if now < ask_again {
        Some(ask_again)
    } else {
        dispatcher.state.lock().due_asked = now;
        engine.store.next_eligible(queue, looked).await?
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
    takers: &[Taker],
    reserved: Reserved,
) -> Result<()> {
    let delivered = reserved.deliveries.len() as u64;
    if reserved.damaged > 0 {
        engine.metrics.damaged(&queue.name, reserved.damaged);
    }
    let Reserved { mut deliveries, dead_lettered, expired, .. } = reserved;
    let mut totals = Totals { delivered, dead_lettered, expired, ..Totals::default() };
    if dead_lettered > 0
        && let Some(target) = &queue.dead_letter_queue
    {
        engine.figures.depths.changed(target, || Change::arrived(dead_lettered));
        engine.tell_inserted(target, None);
    }
    if takers.iter().any(|taker| taker.auto_commit) {
        totals.committed += commit_at_once(engine, queue, takers, &mut deliveries).await?;
    }
    engine.count(&queue.name, &totals);
    let mut dealt: Vec<Vec<Delivery>> = takers.iter().map(|_| Vec::new()).collect();
    for (taker, delivery) in deliveries {
        dealt[taker].push(delivery);
    }
    let now = engine.now();
    let mut unwanted = Vec::new();
    {
        let mut state = dispatcher.state.lock();
        for (taker, deliveries) in takers.iter().zip(dealt) {
            if deliveries.is_empty() {
                continue;
            }
            // Items committed at once are gone from the store: nothing to give back if nobody takes
            // them. That is what at most once means.
            let back = if state.consumers.is_call(taker.id) {
                state.consumers.hand_to_call(taker.id, deliveries)
            } else {
                state.consumers.hand_to_stream(taker.id, deliveries, now)
            };
            if !taker.auto_commit {
                unwanted.extend(back);
            }
        }
    }
    engine.release_undelivered(queue, unwanted);
    Ok(())
}

/// Commits what goes to takers that want it so; keeps of that only what was there to commit.
async fn commit_at_once(
    engine: &Engine,
    queue: &Arc<Queue>,
    takers: &[Taker],
    deliveries: &mut Vec<(usize, Delivery)>,
) -> Result<u64> {
    let held: Vec<Held> = deliveries
        .iter()
        .filter(|(taker, _)| takers[*taker].auto_commit)
        .map(|(_, delivery)| Held { queue: Arc::clone(queue), receipt: delivery.receipt.clone() })
        .collect();
    if held.is_empty() {
        return Ok(0);
    }
    let mut outcomes = engine.store.commit(held).await?.into_iter();
    let mut committed = 0;
    deliveries.retain(|(taker, _)| {
        if !takers[*taker].auto_commit {
            return true;
        }
        let ok = outcomes.next() == Some(Outcome::Ok);
        committed += u64::from(ok);
        ok
    });
    Ok(committed)
}

/// Finds out which items our streams hold no more, since they were settled on another broker.
async fn reconcile(engine: &Engine, dispatcher: &Dispatcher, queue: &Arc<Queue>) -> Result<()> {
    let receipts = dispatcher.state.lock().consumers.held();
    if receipts.is_empty() {
        return Ok(());
    }
    let held = receipts
        .iter()
        .map(|receipt| Held { queue: Arc::clone(queue), receipt: receipt.clone() })
        .collect();
    let holds = engine.store.holds(held).await?;
    dispatcher.settled(receipts.iter().zip(holds).filter(|(_, holds)| !holds).map(|(r, _)| r));
    Ok(())
}

async fn wait(engine: &Engine, dispatcher: &Dispatcher, polls: &mut Polls) {
    let poll = polls.next(engine.signals.healthy());
    let now = engine.now();
    let timer = dispatcher.next_timer(now);
    let until = timer.map_or(poll, |timer| poll.min(now.until(timer)));
    let polled = until == poll;
    tokio::select! {
        () = dispatcher.wake.notified() => {}
        () = engine.draining.cancelled() => {}
        () = sleep_until(Instant::now() + until) => {
            let mut state = dispatcher.state.lock();
            state.news = true;
            state.woken_by = if polled { Wake::Poll } else { Wake::Timer };
            if polled {
                // Signals may be lost, those about settles too.
                state.reconcile = state.consumers.held_count() > 0;
                drop(state);
                polls.missed();
            }
        }
    }
}

/// Fallback looks at an idle queue: more and more seldom, at random times.
struct Polls {
    min: Duration,
    max: Duration,
    current: Duration,
}

impl Polls {
    fn new(engine: &Engine) -> Self {
        let (min, max) = (engine.limits.poll_min, engine.limits.poll_max);
        Self { min, max, current: min }
    }

    fn reset(&mut self) {
        self.current = self.min;
    }

    fn missed(&mut self) {
        self.current = (self.current * 2).min(self.max);
    }

    fn next(&self, signals_healthy: bool) -> Duration {
        let longest = if signals_healthy { self.current } else { self.min };
        rand::rng().random_range(longest / 2..=longest)
    }
}

impl Engine {
    /// Puts back where they were items that were reserved but reached nobody.
    pub(super) fn release_undelivered(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        unwanted: Vec<Delivery>,
    ) {
        if unwanted.is_empty() {
            return;
        }
        let items = unwanted
            .into_iter()
            .map(|delivery| Rollback {
                to: RollbackTo::Queue {
                    eligible_time: delivery.previous_eligible_time,
                    attempt: delivery.receipt.attempt,
                },
                held: Held { queue: Arc::clone(queue), receipt: delivery.receipt },
                reason: None,
            })
            .collect();
        self.release(items);
    }

    /// Gives items back in a task of its own. Should the store not be there: their leases lapse.
    pub(super) fn release(self: &Arc<Self>, items: Vec<Rollback>) {
        if items.is_empty() {
            return;
        }
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            for attempt in 1.. {
                match engine.roll_back(items.clone()).await {
                    Ok(_) => return,
                    Err(error) if attempt < 5 && !engine.stopping.is_cancelled() => {
                        tracing::debug!(%error, "could not give items back; trying again");
                        tokio::time::sleep(Duration::from_millis(200 * attempt)).await;
                    }
                    Err(error) => {
                        tracing::warn!(%error, items = items.len(), "could not give items back: they are ready again when their leases end");
                        return;
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
