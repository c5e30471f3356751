//! Delivery: one dispatcher per consumed queue and broker. A dispatcher collects the demands of the
//! queue's consumers, reserves items for all of them in one call, and hands the items out.
//!
//! No event is lost between a reserve and the wait that follows it: the record of events is cleared
//! before the store is asked, so that an event during a reserve causes another one.

mod announced;
pub(super) mod direct;
mod due;
mod hand_out;
mod polls;
mod reconcile;
mod returning;
pub(super) mod run;

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    domain::{Delivery, ItemId, Queue, QueueName, Receipt, Signal, Timestamp, Topic},
    engine::{
        Engine, EngineError,
        consumers::{
            Call, ConsumerId, Consumers, InFlight, InForce, Inbox, Left, Round, StreamSettings,
            UnsentBytes,
        },
    },
    metrics::Wake,
    signals::WINDOW,
    store::{Appeared, ConsumerReport},
};

use self::{
    announced::Announced,
    direct::{DirectPushes, Turns},
    due::NextDue,
    polls::Polls,
};

pub(super) struct Dispatcher {
    queue: QueueName,
    state: Mutex<State>,
    /// The pushes that are about to begin.
    pub(super) turns: Turns,
    /// Notified when the loop has something to do.
    wake: Notify,
    /// Notified when streams hold fewer items, for shutdown.
    fewer: Notify,
    /// Locked while items that are not wanted are rolled back. The next reserve begins afterwards, and finds them.
    returning: tokio::sync::Mutex<()>,
    /// Number of steps that the loop has begun.
    #[cfg(test)]
    steps: std::sync::atomic::AtomicU64,
}

struct State {
    consumers: Consumers,
    /// True if the queue may have more items than the last reserve saw.
    dirty: bool,
    /// True if the last reserve saw the end of the queue, and no other has begun since.
    seen_empty: bool,
    /// The direct pushes that are in flight, for which reserves wait.
    direct: DirectPushes,
    /// What other brokers have signalled since the store was last told.
    appeared: Appeared,
    /// The item that another broker has announced while nothing else was eligible, as far as this broker knew. The next reserve claims it,
    /// unless the queue may have more by then.
    announced: Option<Announced>,
    /// The event that causes the next reserve.
    woken_by: Wake,
    /// True if receipts may have been settled on another broker.
    reconcile: bool,
    /// The queue's settings as of the last step. Held items were reserved under these settings or
    /// older ones.
    queue: Option<Arc<Queue>>,
    next_due: NextDue,
    /// Until when other brokers merge the signals of their inserts, unless this broker or another has asked them not to.
    merged_until: Option<Timestamp>,
    /// Until when the items have been eligible that the last reserve found, if it found any.
    found: Option<Timestamp>,
    /// The item that it found, if it was one.
    found_item: Option<ItemId>,
}

impl State {
    /// Returns true if nothing in the queue is eligible, as far as this broker knows, but what a reserve that is under way is likely to take.
    fn expects_nothing_ahead(&self, now: Timestamp) -> bool {
        (self.seen_empty || self.direct.may_begin_behind_reserve()) && self.knows_of_nothing(now)
    }

    /// Returns true if nothing has become eligible since the last reserve began, as far as this broker knows.
    fn knows_of_nothing(&self, now: Timestamp) -> bool {
        !self.dirty
            && self.announced.is_none()
            && self.consumers.stock.is_empty()
            && self.next_due.is_ahead(now)
            && self.queue.as_ref().is_some_and(|queue| !queue.paused)
    }

    /// Returns true if the next reserve has something to look for.
    fn has_news(&self) -> bool {
        self.dirty || self.announced.is_some()
    }

    /// Notes what a reserve has found.
    fn found(&mut self, deliveries: &[(usize, Delivery)]) {
        self.found = deliveries.iter().map(|(_, found)| found.previous_eligible_time).max();
        self.found_item = match deliveries {
            [(_, only)] => Some(only.item.id),
            _ => None,
        };
        self.forget_announced(deliveries);
    }
}

impl Dispatcher {
    /// Returns the dispatcher of a queue. `unsent` counts what the streams of all of them were assigned and not sent.
    pub(super) fn new(queue: QueueName, unsent: Arc<UnsentBytes>) -> Self {
        let state = State {
            consumers: Consumers::new(unsent),
            dirty: true,
            seen_empty: false,
            direct: DirectPushes::default(),
            appeared: Appeared::Nothing, // a new reserver scans from the start anyway
            announced: None,
            woken_by: Wake::Local,
            reconcile: false,
            queue: None,
            next_due: NextDue::default(),
            merged_until: None,
            found: None,
            found_item: None,
        };
        Self {
            queue,
            state: Mutex::new(state),
            turns: Turns::default(),
            wake: Notify::new(),
            fewer: Notify::new(),
            returning: tokio::sync::Mutex::new(()),
            #[cfg(test)]
            steps: std::sync::atomic::AtomicU64::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns true if no reserve is under way, and none follows before the next event.
    #[cfg(test)]
    pub(super) fn rests(&self) -> bool {
        let state = self.state.lock();
        state.seen_empty && !state.has_news()
    }

    #[cfg(test)]
    pub(super) fn is_known_empty(&self, now: Timestamp) -> bool {
        let state = self.state.lock();
        state.seen_empty && state.knows_of_nothing(now)
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

    /// Records that this broker made items eligible from `since` on.
    pub(super) fn inserted(&self, since: Option<Timestamp>, now: Timestamp) {
        {
            let mut state = self.state.lock();
            match since {
                Some(since) if since > now => {
                    if !state.next_due.add(since) {
                        return; // the timer fires before that
                    }
                }
                Some(_) => state.dirty = true,
                None => {
                    state.dirty = true;
                    state.consumers.stock.withdraw(now); // the queue may have been paused
                }
            }
        }
        self.wake.notify_one();
    }

    /// Records another broker's signal of eligible items. The next reserve passes it to the store.
    pub(super) fn inserted_elsewhere(&self, since: Option<Timestamp>, now: Timestamp) {
        {
            let mut state = self.state.lock();
            state.appeared.add(Appeared::of(since));
            state.merged_until = Some(now + WINDOW);
            state.woken_by = Wake::Signal;
        }
        self.inserted(since, now);
    }

    /// Records that another broker has asked for signals of this queue.
    pub(super) fn wanted_elsewhere(&self) {
        self.state.lock().merged_until = None;
    }

    /// Returns what asks the other brokers to signal the next insert at once, if they merge their signals and a consumer waits: once
    /// per signal.
    fn wanted(&self, now: Timestamp) -> Option<Signal> {
        let mut state = self.state.lock();
        if state.has_news() || !state.consumers.any_waits() {
            return None;
        }
        let is_merged = state.merged_until.take().is_some_and(|until| until > now);
        is_merged.then(|| Signal {
            queue: self.queue.clone(),
            topic: Topic::Wanted,
            since: state.found,
            item: state.found_item,
        })
    }

    /// Records that other brokers may have changed anything in the queue.
    pub(super) fn look_from_start(&self, now: Timestamp) {
        self.state.lock().appeared.add(Appeared::FromStart);
        self.inserted(None, now);
    }

    /// Records that another broker settled items of this queue, which our streams may hold.
    pub(super) fn settled_elsewhere(&self, now: Timestamp) {
        {
            let mut state = self.state.lock();
            state.consumers.stock.withdraw(now); // an item may have been deleted
            if state.consumers.held_count() == 0 && state.direct.len() == 0 {
                return;
            }
            state.reconcile = true;
        }
        self.wake.notify_one();
    }

    /// Frees reservations that were settled through this broker, or whose caller was told that they
    /// are void.
    pub(super) fn settled<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>, now: Timestamp) {
        self.free(receipts, |consumers, receipt| consumers.settled(receipt, now));
    }

    /// Does the same, and counts those that ended with a commit, which is said beside each.
    pub(super) fn ended<'a>(
        &self,
        receipts: impl Iterator<Item = (&'a Receipt, bool)>,
        now: Timestamp,
    ) {
        self.free(receipts, |consumers, (receipt, committed)| {
            if committed {
                consumers.committed(receipt, now)
            } else {
                consumers.settled(receipt, now)
            }
        });
    }

    /// Notes that the writing of commits begins. The streams that hold these reservations have room for other items meanwhile.
    pub(super) fn commits_begin<'a>(
        &self,
        receipts: impl Iterator<Item = &'a Receipt>,
        now: Timestamp,
    ) {
        self.free(receipts, |consumers, receipt| consumers.commit_begins(receipt, now));
    }

    /// Notes that the writing of these commits has failed.
    pub(super) fn commits_fail<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        let mut state = self.state.lock();
        for receipt in receipts {
            state.consumers.commit_fails(receipt);
        }
    }

    /// See [`Consumers::include_up_to`].
    pub(super) fn include_up_to(&self, id: ConsumerId, tag: u64) -> Result<Vec<Receipt>, u64> {
        self.state.lock().consumers.include_up_to(id, tag)
    }

    /// See [`Consumers::exclude`].
    pub(super) fn exclude(&self, receipts: &[Receipt]) {
        self.state.lock().consumers.exclude(receipts);
    }

    /// See [`Consumers::name`].
    pub(super) fn name(&self, receipts: &[Receipt]) {
        self.state.lock().consumers.name(receipts);
    }

    /// Adds reports of the consumers, until there are `most` reports.
    pub(super) fn report(&self, most: usize, reports: &mut Vec<ConsumerReport>) {
        let mut after = 0;
        // Ends because the numbers of streams grow, and each step goes on behind the one before.
        while let Some(last) =
            self.state.lock().consumers.report_streams(&self.queue, after, most, reports)
        {
            after = last;
        }
        self.state.lock().consumers.report_calls(&self.queue, most, reports);
    }

    /// Frees reservations that are void, about which nobody has been told yet.
    pub(super) fn found_void<'a>(
        &self,
        receipts: impl Iterator<Item = &'a Receipt>,
        now: Timestamp,
    ) {
        self.free(receipts, |consumers, receipt| consumers.found_void(receipt, now));
    }

    /// Records when leases end, as read from the store. `None` changes nothing.
    fn leases_end(&self, receipts: &[Receipt], ends: &[Option<Timestamp>]) {
        let mut state = self.state.lock();
        for (receipt, end) in receipts.iter().zip(ends) {
            if let Some(end) = end {
                state.consumers.extended(receipt, *end, false);
            }
        }
    }

    /// Frees an item that was deleted through this broker.
    pub(super) fn deleted(&self, item: ItemId) {
        self.state.lock().direct.deleted(item);
        self.free(std::iter::once(item), Consumers::deleted);
    }

    /// Applies `free` to each of `all`, and wakes the waiters if it freed anything. `free` returns
    /// true if a stream has more room.
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

    pub(super) fn extended(&self, receipt: &Receipt, until: Timestamp, is_renewal: bool) {
        self.state.lock().consumers.extended(receipt, until, is_renewal);
    }

    pub(super) fn to_renew(
        &self,
        id: ConsumerId,
        oldest: Timestamp,
        until: Timestamp,
    ) -> Vec<Receipt> {
        self.state.lock().consumers.to_renew(id, oldest, until)
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

    pub(super) fn add_call(&self, call: Call, now: Timestamp) -> ConsumerId {
        let id = {
            let mut state = self.state.lock();
            let id = state.consumers.add_call(call);
            if !state.consumers.serve(id, now) {
                state.dirty = true; // a call is answered from the store, not from older knowledge
            }
            id
        };
        self.wake.notify_one();
        id
    }

    pub(super) fn remove_call(&self, id: ConsumerId) {
        self.state.lock().consumers.remove_call(id);
    }

    /// Withdraws a call whose time is up. Returns true if a running round will answer the call.
    pub(super) fn withdraw_call(&self, id: ConsumerId) -> bool {
        self.state.lock().consumers.withdraw_call(id)
    }

    /// Changes the flow of a stream. The result ends when the new one is in force.
    pub(super) fn set_max_in_flight(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        id: ConsumerId,
        max: usize,
    ) -> InForce {
        let in_force = {
            let mut state = self.state.lock();
            let in_force = state.consumers.set_max_in_flight(id, max, engine.now());
            // A push must not go to a stream past the items that return.
            state.dirty |= state.consumers.stock.is_returning();
            in_force
        };
        self.return_soon(engine);
        self.wake.notify_one();
        self.fewer.notify_waiters();
        in_force
    }

    /// Returns the streams that have left what they were assigned for at least so long.
    pub(super) fn left(&self, time: Duration) -> Vec<Left> {
        self.state.lock().consumers.left(time).collect()
    }

    /// Takes back what a stream was assigned and not sent.
    pub(super) fn take_back(self: &Arc<Self>, engine: &Arc<Engine>, id: ConsumerId) {
        {
            let mut state = self.state.lock();
            state.consumers.take_back(id, engine.now());
            // A push must not go to a stream past the items that return.
            state.dirty |= state.consumers.stock.is_returning();
        }
        self.return_soon(engine);
        self.wake.notify_one();
        self.fewer.notify_waiters();
    }

    pub(super) fn retire_stream(&self, id: ConsumerId) {
        self.state.lock().consumers.retire_stream(id);
    }

    /// Ends a stream and returns the items it held, whether the stream is polled or not.
    pub(super) fn end_stream(&self, id: ConsumerId, error: &EngineError) -> Vec<InFlight> {
        let held = self.state.lock().consumers.end_stream(id, error);
        self.fewer.notify_waiters();
        held
    }

    /// Returns the content of a stream's inbox, and the assigned items for which it is too late to
    /// be sent.
    pub(super) fn look_into_inbox(&self, id: ConsumerId, now: Timestamp) -> (Inbox, Vec<InFlight>) {
        let (inbox, late) = self.state.lock().consumers.look_into_inbox(id, now);
        if matches!(inbox, Inbox::Empty { dirty: true }) || !late.is_empty() {
            self.wake.notify_one();
        }
        (inbox, late)
    }

    /// Ends all streams and calls. Returns what the streams held, whether they are polled or not,
    /// with the queue's settings.
    pub(super) fn end_all(&self, error: &EngineError) -> Option<(Arc<Queue>, Vec<InFlight>)> {
        let mut state = self.state.lock();
        let held = state.consumers.end_all(error);
        let held = state.queue.clone().map(|queue| (queue, held));
        drop(state);
        self.fewer.notify_waiters();
        held
    }

    /// Waits until streams hold no items.
    pub(super) async fn drained(&self) {
        loop {
            let fewer = self.fewer.notified();
            if self.state.lock().consumers.held_count() == 0 {
                return;
            }
            fewer.await;
        }
    }

    /// Begins a step: applies the timers that are due. Returns the items that were taken from
    /// streams because their leases have ended.
    fn begin_step(&self, queue: &Arc<Queue>, now: Timestamp) -> Vec<InFlight> {
        let mut state = self.state.lock();
        state.queue = Some(Arc::clone(queue));
        let lapsed = state.consumers.take_lapsed(now);
        state.give_up_if_overdue(now);
        let is_due = state.next_due.take(now);
        if is_due {
            state.woken_by = Wake::Timer;
        }
        state.dirty |= is_due || !lapsed.is_empty();
        drop(state);
        if !lapsed.is_empty() {
            self.fewer.notify_waiters();
        }
        lapsed
    }

    /// Takes the items in stock, for shutdown.
    fn take_stock(&self) -> Option<(Arc<Queue>, Vec<InFlight>)> {
        let mut state = self.state.lock();
        let unsent = state.consumers.stock.take_all();
        state.queue.clone().filter(|_| !unsent.is_empty()).map(|queue| (queue, unsent))
    }

    /// Takes what has to be rolled back before the next reserve.
    fn take_returning(&self, now: Timestamp) -> Vec<InFlight> {
        self.state.lock().consumers.take_returning(now)
    }

    /// Ends the calls that do not wait, as long as the queue is paused. Returns the items that
    /// were taken from streams because they have not been sent.
    fn pause(&self) -> Vec<InFlight> {
        let mut state = self.state.lock();
        state.consumers.answer_impatient();
        state.dirty = true; // for the resumption, which wakes the loop
        let unsent = state.consumers.take_unsent();
        drop(state);
        if !unsent.is_empty() {
            self.fewer.notify_waiters();
        }
        unsent
    }

    /// Returns the demands of the next reserve and the signals to pass on with it. Returns `None`
    /// if no consumer wants items and enough are in stock, the queue is known to be empty, a direct push is in flight, or items have to
    /// be rolled back first.
    fn next_round(&self, queue: &Queue, now: Timestamp) -> Option<(Round, Appeared)> {
        let mut state = self.state.lock();
        if !state.has_news()
            || state.direct.held_until().is_some()
            || state.consumers.stock.is_returning()
        {
            return None;
        }
        let mut round = state.consumers.demands();
        if state.dirty || round.demands.is_empty() {
            state.look_for_announced();
        }
        let announced = state.announced.take();
        if announced.is_none() && queue.may_reserve_ahead() {
            state.consumers.add_stock(&mut round, now);
        }
        if round.demands.is_empty() {
            return None;
        }
        let is_likely_last = state.seen_empty && !round.demands.iter().any(|demand| demand.spare);
        state.direct.reserve_begins(is_likely_last);
        (state.dirty, state.seen_empty) = (false, false);
        state.consumers.begin_round(&round);
        let appeared = match announced {
            Some(Announced { item: id, since }) => Appeared::Item { id, since },
            None => std::mem::take(&mut state.appeared),
        };
        Some((round, appeared))
    }

    /// Returns true if the next round can wait a moment: there may be items, but no consumer is
    /// idle.
    fn can_wait(&self) -> bool {
        let state = self.state.lock();
        state.dirty && state.consumers.can_wait()
    }

    /// Fails the waiting calls after a failed reserve. Streams wait for the next attempt.
    fn look_failed(&self, error: &EngineError) {
        let mut state = self.state.lock();
        state.dirty = true;
        state.consumers.fail_round(error);
    }

    /// Returns when the next timer is due.
    fn next_timer(&self) -> Option<Timestamp> {
        let state = self.state.lock();
        let is_held_up = state.has_news() || state.direct.has_waiting();
        let held = state.direct.held_until().filter(|_| is_held_up);
        [state.next_due.at(), state.consumers.next_lapse(), held].into_iter().flatten().min()
    }

    /// Returns when to check the reservations that streams hold.
    fn next_reconcile(&self, polls: &Polls, signals_healthy: bool) -> Instant {
        let state = self.state.lock();
        let unasked = polls.next_reconcile(signals_healthy);
        if state.reconcile {
            unasked.min(polls.next_reconcile_after_signal(state.consumers.places_are_scarce()))
        } else {
            unasked
        }
    }

    fn holds_any(&self) -> bool {
        self.state.lock().consumers.held_count() > 0
    }
}

#[cfg(test)]
mod tests;
