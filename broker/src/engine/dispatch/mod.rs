//! Out: one dispatcher per consumed queue and broker. It gathers what the queue's consumers have
//! room for, reserves as much in one go, and hands it to them.
//!
//! Nothing is lost between a look and a wait: news is noted before the store is asked, so what
//! arrives during the look causes another one.

mod hand_out;
mod polls;
mod reconcile;
pub(super) mod run;

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    domain::{ItemId, Queue, QueueName, Receipt, Timestamp},
    engine::{
        EngineError,
        adaptive_poll::Rhythm,
        consumers::{Call, ConsumerId, Consumers, InFlight, Inbox, Round, StreamSettings},
    },
    metrics::Wake,
    store::Appeared,
};

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

#[cfg(test)]
mod tests;
