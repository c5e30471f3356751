//! Direct delivery: an item that is pushed while the queue is empty and one of its streams waits is
//! stored as already reserved for that stream, and sent when it is stored. No reserve follows.
//! `docs/decisions/0017-direct-delivery.md` says why each condition is there.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{Dispatcher, State};
use crate::{
    domain::{
        Delivery, Item, ItemSize, ItemState, LeaseToken, Pushed, Queue, QueueName, Receipt,
        Timestamp, Totals, assign,
    },
    engine::{Engine, consumers::ConsumerId},
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
    queue: Arc<Queue>,
    /// True if no earlier push of the queue was in flight.
    is_alone: bool,
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

/// A push whose item is stored as reserved for a stream.
pub(in crate::engine) struct DirectPush {
    hold: Hold,
    stream: ConsumerId,
    push: Push,
    lease: Box<FirstLease>,
}

/// Returns the item of a push as it was stored under its lease.
fn delivery(push: Push, lease: FirstLease, pushed: &Pushed, now: Timestamp) -> Delivery {
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
        consumer: lease.consumer,
        eligible_time: Some(end),
        due_time: Some(created),
        ..item.into_item(&queue, pushed.id, pushed.sequence, producer, created)
    };
    Delivery {
        item,
        receipt,
        lease_expire_time: end,
        previous_eligible_time: created,
        former_lease: None,
    }
}

impl Engine {
    /// Reserves the item of a push for a stream of this broker, if nothing can be ahead of the item.
    /// Only for a push of a single item: batches share documents and are reserved together.
    pub(in crate::engine) fn begin_direct_push(
        &self,
        in_flight: &PushInFlight<'_>,
        pushes: &mut [Push],
    ) -> Option<DirectPush> {
        let [push] = pushes else { return None };
        if !in_flight.is_alone
            || push.queue.paused
            || !push.item.may_start_reserved(&push.queue)
            || self.is_draining()
            || !self.signals.healthy()
        {
            return None;
        }
        let dispatcher = self.dispatcher(&push.queue.name)?;
        let token = || LeaseToken::fresh(self.store.broker_id());
        let (stream, lease) =
            dispatcher.begin_direct_push(push.item.payload.len(), self.now(), token)?;
        let hold = Hold(dispatcher);
        let direct = DirectPush { hold, stream, push: push.clone(), lease: lease.clone() };
        push.first_lease = Some(lease);
        Some(direct)
    }

    /// Hands an item that was stored as reserved to its stream. If the stream can no longer receive
    /// the item, it is rolled back.
    pub(in crate::engine) fn deliver_pushed(self: &Arc<Self>, direct: DirectPush, pushed: &Pushed) {
        let DirectPush { hold, stream, push, lease } = direct;
        let (queue, now) = (Arc::clone(&push.queue), self.now());
        let delivery = delivery(push, *lease, pushed, now);
        let waited = delivery.previous_eligible_time.until(now);
        self.metrics.delivery_delays(&queue.name, std::iter::once(waited));
        self.count(&queue.name, &Totals { pushed: 1, delivered: 1, ..Totals::default() });
        let unwanted = if self.is_draining() {
            Some(delivery)
        } else {
            hold.0.hand_pushed(stream, delivery, now)
        };
        self.release_undelivered(&queue, unwanted.into_iter().collect());
    }
}

impl State {
    /// Returns true if nothing in the queue is eligible, as far as this broker knows.
    fn is_known_empty(&self, now: Timestamp) -> bool {
        self.seen_empty
            && !self.dirty
            && self.due.is_none_or(|due| due > now)
            && self.adaptive_poll.next_poll(now).is_none()
            && self.queue.as_ref().is_some_and(|queue| !queue.paused)
    }
}

impl Dispatcher {
    /// Returns the stream whose turn it is to receive an item of this size, with the lease of the
    /// item, if the queue is known to be empty. From then on reserves wait for the push. Calls that
    /// wait are answered by a reserve, and so are streams with `auto_commit`.
    fn begin_direct_push(
        &self,
        payload: usize,
        now: Timestamp,
        token: impl Fn() -> LeaseToken,
    ) -> Option<(ConsumerId, Box<FirstLease>)> {
        let mut state = self.state.lock();
        if !state.is_known_empty(now) || state.consumers.calls_wait() {
            return None;
        }
        let mut round = state.consumers.demands();
        let size = ItemSize { payload, message: 0 };
        let first = *assign(&[size], &round.demands).first()?;
        let (demand, claimant) = (round.demands.swap_remove(first), round.claimants[first]);
        if claimant.auto_commit {
            return None;
        }
        state.held_until = Some(now + HOLD);
        Some((claimant.id, FirstLease::new(token(), demand.lease, demand.consumer)))
    }

    /// Hands a stream an item that was stored as reserved for it. Returns the item if the stream can
    /// no longer receive it, or if the queue was paused meanwhile.
    fn hand_pushed(&self, id: ConsumerId, delivery: Delivery, now: Timestamp) -> Option<Delivery> {
        let mut state = self.state.lock();
        // The last reserve did not see this lease. The stream wakes the loop, which sets its timer.
        let end = delivery.lease_expire_time;
        state.due = Some(state.due.map_or(end, |due| due.min(end)));
        if state.queue.as_ref().is_some_and(|queue| queue.paused) {
            return Some(delivery);
        }
        state.consumers.hand_pushed(id, delivery, now)
    }
}
