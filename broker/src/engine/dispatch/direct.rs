//! Direct delivery: items that are pushed while the queue is empty and one of its streams waits are
//! stored as already reserved for that stream, and sent when they are stored. No reserve follows.
//! `docs/decisions/0017-direct-delivery.md` says why each condition is there.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{Dispatcher, State};
use crate::{
    domain::{
        Delivery, Item, ItemSize, ItemState, LeaseToken, NewItem, Pushed, Queue, QueueName,
        Receipt, Timestamp, Totals, assign,
    },
    engine::{
        Engine,
        consumers::{Claimant, is_too_late},
    },
    store::{FirstLease, Push},
};

/// The number of pushes of each queue that have begun and not ended.
#[derive(Default)]
pub(in crate::engine) struct PushesInFlight(Mutex<HashMap<QueueName, usize>>);

impl PushesInFlight {
    /// Counts a push, until the result is dropped.
    pub(in crate::engine) fn begin(&self, queue: &Arc<Queue>) -> PushInFlight<'_> {
        let mut pushes = self.0.lock();
        let is_alone = match pushes.get_mut(&queue.name) {
            Some(count) => {
                *count += 1;
                false
            }
            None => pushes.insert(queue.name.clone(), 1).is_none(),
        };
        PushInFlight { pushes: self, queue: Arc::clone(queue), is_alone }
    }
}

/// A push that has begun. It ends when the dispatcher knows of its items, so that no later push
/// overtakes it.
pub(in crate::engine) struct PushInFlight<'a> {
    pushes: &'a PushesInFlight,
    pub(in crate::engine) queue: Arc<Queue>,
    /// True if no earlier push of the queue was in flight.
    pub(in crate::engine) is_alone: bool,
}

impl Drop for PushInFlight<'_> {
    fn drop(&mut self) {
        let mut pushes = self.pushes.0.lock();
        if let Some(count) = pushes.get_mut(&self.queue.name) {
            *count -= 1;
            if *count == 0 {
                pushes.remove(&self.queue.name);
            }
        }
    }
}

/// How long reserves wait at most for a direct push that is in flight.
const HOLD: Duration = Duration::from_secs(5);

/// Holds back the reserves of a dispatcher while a direct push is in flight, so that no later push
/// is delivered first.
struct Hold(Arc<Dispatcher>);

impl Drop for Hold {
    fn drop(&mut self) {
        let dirty = {
            let mut state = self.0.state.lock();
            state.held_until = None;
            state.dirty
        };
        if dirty {
            self.0.wake.notify_one();
        }
    }
}

/// A push whose items are stored as reserved for a stream.
pub(in crate::engine) struct DirectPush {
    hold: Hold,
    stream: Claimant,
    pushes: Vec<Push>,
    lease: Box<FirstLease>,
}

/// Returns the item of a push as it was stored under its lease.
fn delivery(push: Push, lease: &FirstLease, pushed: &Pushed, now: Timestamp) -> Delivery {
    let Push { queue, item, producer, .. } = push;
    let created = pushed.eligible_time.unwrap_or(now);
    let end = created + lease.lasts;
    let receipt = Receipt {
        item: pushed.id,
        token: lease.token,
        deliveries: 1,
        earlier_deliveries: 0,
        attempt: 1,
        keyed: false,
        queue: queue.name.clone(),
        group: queue.group.clone(),
    };
    let item = Item {
        state: ItemState::Reserved,
        deliveries: 1,
        consumer: lease.consumer.clone(),
        eligible_time: Some(end),
        due_time: Some(created),
        ..item.into_item(&queue, pushed.id, pushed.sequence, producer, created)
    };
    Delivery {
        item: Box::new(item),
        receipt,
        lease_expire_time: end,
        previous_eligible_time: created,
        former_lease: None,
    }
}

impl Engine {
    /// Reserves the items of a push, all of one queue, for a stream of this broker, if nothing can be
    /// ahead of the items.
    pub(in crate::engine) fn begin_direct_push(
        &self,
        in_flight: &PushInFlight<'_>,
        pushes: &mut [Push],
    ) -> Option<DirectPush> {
        let first = pushes.first()?;
        let (queue, priority) = (Arc::clone(&first.queue), first.item.priority);
        if !in_flight.is_alone || queue.paused || self.is_draining() || !self.signals.healthy() {
            return None;
        }
        // Of several priorities the highest is delivered first.
        let may_go = |item: &NewItem| item.may_start_reserved(&queue) && item.priority == priority;
        if !pushes.iter().all(|push| may_go(&push.item)) {
            return None;
        }
        let dispatcher = self.dispatcher(&queue.name)?;
        let sizes: Vec<ItemSize> = pushes.iter().map(|push| push.item.size()).collect();
        let token = || LeaseToken::fresh(self.store.broker_id());
        let (stream, lease) = dispatcher.begin_direct_push(&sizes, self.now(), token)?;
        let hold = Hold(dispatcher);
        let direct = DirectPush { hold, stream, pushes: pushes.to_vec(), lease: lease.clone() };
        for push in pushes {
            push.first_lease = Some(lease.clone());
        }
        Some(direct)
    }

    /// Hands items that were stored as reserved to their stream. Those that the stream can no longer
    /// receive are rolled back, and reserves wait for that. So are those whose leases have ended, or are about to: another
    /// reservation of theirs may be in force by now, which they must not displace. Duplicates are left out.
    pub(in crate::engine) fn deliver_pushed(
        self: &Arc<Self>,
        direct: DirectPush,
        pushed: &[Pushed],
    ) {
        let DirectPush { hold, stream, pushes, lease } = direct;
        let Some(queue) = pushes.first().map(|push| Arc::clone(&push.queue)) else { return };
        let (now, all) = (self.now(), pushes.len());
        let stored = pushes.into_iter().zip(pushed).filter(|(_, pushed)| !pushed.deduplicated);
        let mut deliveries: Vec<Delivery> =
            stored.map(|(push, pushed)| delivery(push, &lease, pushed, now)).collect();
        let count = deliveries.len() as u64;
        self.metrics.deduplicated(&queue.name, all as u64 - count);
        if count == 0 {
            return;
        }
        let waited = deliveries.iter().map(|delivery| delivery.previous_eligible_time.until(now));
        self.metrics.delivery_delays(&queue.name, waited);
        let totals = Totals { pushed: count, delivered: count, ..Totals::default() };
        self.count(&queue.name, &totals);
        let is_late = |one: &mut Delivery| is_too_late(now, lease.lasts, one.lease_expire_time);
        let mut unwanted: Vec<Delivery> = deliveries.extract_if(.., is_late).collect();
        if self.is_draining() {
            unwanted.append(&mut deliveries);
        } else {
            unwanted.append(&mut hold.0.hand_pushed(&stream, deliveries, now));
        }
        hold.0.give_back(self, &unwanted);
    }
}

impl State {
    /// Returns true if nothing in the queue is eligible, as far as this broker knows.
    fn is_known_empty(&self, now: Timestamp) -> bool {
        self.seen_empty
            && !self.dirty
            && self.consumers.stock.is_empty()
            && self.due.is_none_or(|due| due > now)
            && self.queue.as_ref().is_some_and(|queue| !queue.paused)
    }
}

impl Dispatcher {
    /// Returns the stream whose turn it is to receive items of these sizes, with the lease of the
    /// items, if the queue is known to be empty. From then on reserves wait for the push. Calls that
    /// wait are answered by a reserve, and so are streams with `auto_commit`. Several items are for a
    /// stream that is the only one to wait and has room for all: a reserve shares them more evenly.
    fn begin_direct_push(
        &self,
        sizes: &[ItemSize],
        now: Timestamp,
        token: impl Fn() -> LeaseToken,
    ) -> Option<(Claimant, Box<FirstLease>)> {
        let mut state = self.state.lock();
        if !state.is_known_empty(now) || state.consumers.calls_wait() {
            return None;
        }
        let mut round = state.consumers.demands();
        if sizes.len() > 1 && round.demands.len() > 1 {
            return None;
        }
        let assigned = assign(sizes, &round.demands);
        if assigned.len() < sizes.len() {
            return None;
        }
        let first = *assigned.first()?;
        let (demand, claimant) = (round.demands.swap_remove(first), round.claimants[first]);
        if claimant.auto_commit {
            return None;
        }
        state.held_until = Some(now + HOLD);
        Some((claimant, FirstLease::new(token(), demand.lease, demand.consumer)))
    }

    /// Hands a stream items that were stored as reserved for it. Returns those that the stream can no
    /// longer receive: all if the queue was paused meanwhile.
    fn hand_pushed(
        &self,
        stream: &Claimant,
        deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        let mut state = self.state.lock();
        // The last reserve did not see this lease. The stream wakes the loop, which sets its timer.
        let end = deliveries.iter().map(|delivery| delivery.lease_expire_time).min();
        state.due = [state.due, end].into_iter().flatten().min();
        if state.queue.as_ref().is_some_and(|queue| queue.paused) {
            return deliveries;
        }
        state.consumers.hand_pushed(stream, deliveries, now)
    }
}
