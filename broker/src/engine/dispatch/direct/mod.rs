//! Direct delivery: items that are pushed while the queue is empty and one of its streams waits are
//! stored as already reserved for that stream, and sent when they are stored. No reserve follows.
//! `docs/decisions/0017-direct-delivery.md` says why each condition is there.

mod behind;
mod in_flight;
mod order;
mod turns;

use std::sync::Arc;

use super::{Dispatcher, State};
use crate::{
    domain::{
        Delivery, IdMark, Item, ItemSize, ItemState, LeaseToken, NewItem, Pushed, Receipt,
        Timestamp, Totals, assign,
    },
    engine::{
        Engine,
        consumers::{Coming, is_too_late},
    },
    store::{FirstLease, Push},
};

pub(super) use self::behind::UnderWay;
pub(in crate::engine) use self::in_flight::{PushInFlight, PushesInFlight};
pub(super) use self::order::DirectPushes;
use self::order::{Ended, Load};
pub(in crate::engine) use self::turns::Turns;

/// How many direct pushes are in flight at most that could share documents with others. Of more, group commit makes fewer documents.
const FEW: usize = 4;
/// A push with so many bytes of payload has documents of its own.
const LARGE: usize = 32 << 10;
/// Most bytes of payload of direct pushes that are in flight together.
const MOST_BYTES: usize = 4 << 20;

/// A place among the direct pushes of a dispatcher, until the push has ended. Meanwhile reserves wait, so that no later push is delivered first.
struct Place {
    engine: Arc<Engine>,
    dispatcher: Arc<Dispatcher>,
    number: u64,
    /// What the push has brought, once it has.
    brought: Option<Vec<Delivery>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let (is_wanted, now) = (!self.engine.is_draining(), self.engine.now());
        if self.dispatcher.end_direct_push(self.number, self.brought.take(), is_wanted, now) {
            self.dispatcher.return_soon(&self.engine);
        }
    }
}

/// A push whose items are stored as reserved for a stream.
pub(in crate::engine) struct DirectPush {
    place: Place,
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
        tag: 0,
    }
}

impl Engine {
    /// Returns true if nothing about the items of a push, all of one queue, and about the queue as such keeps them from going directly.
    fn may_go_directly(&self, pushes: &[Push]) -> bool {
        let Some(first) = pushes.first() else { return false };
        let (queue, priority) = (&first.queue, first.item.priority);
        // Of several priorities the highest is delivered first.
        let may_go = |item: &NewItem| item.may_start_reserved(queue) && item.priority == priority;
        !queue.paused
            && !self.is_draining()
            && self.signals.healthy()
            && pushes.iter().all(|push| may_go(&push.item))
    }

    /// Reserves the items of a push, all of one queue, for a stream of this broker, if nothing can be
    /// ahead of the items.
    fn begin_direct_push(
        self: &Arc<Self>,
        dispatcher: &Arc<Dispatcher>,
        in_flight: &mut PushInFlight<'_>,
        pushes: &mut [Push],
    ) -> Option<DirectPush> {
        if !in_flight.others_are_direct() || !self.may_go_directly(pushes) {
            return None;
        }
        let sizes: Vec<ItemSize> = pushes.iter().map(|push| push.item.size()).collect();
        let token = || LeaseToken::fresh(self.store.broker_id());
        let mark = || self.store.mark();
        let (number, lease) = dispatcher.begin_direct_push(&sizes, self.now(), token, mark)?;
        in_flight.goes_directly();
        let dispatcher = Arc::clone(dispatcher);
        let place = Place { engine: Arc::clone(self), dispatcher, number, brought: None };
        let direct = DirectPush { place, pushes: pushes.to_vec(), lease: lease.clone() };
        for push in pushes {
            push.first_lease = Some(lease.clone());
        }
        Some(direct)
    }

    /// Hands items that were stored as reserved to their stream, once those of earlier direct pushes are handed out. Those that the
    /// stream can no longer receive are rolled back, and reserves wait for that. So are those whose leases have ended, or are about to:
    /// another reservation of theirs may be in force by now, which they must not displace. Duplicates are left out.
    pub(in crate::engine) fn deliver_pushed(
        self: &Arc<Self>,
        direct: DirectPush,
        pushed: &[Pushed],
    ) {
        let DirectPush { mut place, pushes, lease } = direct;
        let Some(queue) = pushes.first().map(|push| Arc::clone(&push.queue)) else { return };
        let (now, all) = (self.now(), pushes.len());
        let stored = pushes.into_iter().zip(pushed).filter(|(_, pushed)| !pushed.deduplicated);
        let deliveries: Vec<Delivery> =
            stored.map(|(push, pushed)| delivery(push, &lease, pushed, now)).collect();
        let count = deliveries.len() as u64;
        self.metrics.deduplicated(&queue.name, all as u64 - count);
        if count > 0 {
            let waited =
                deliveries.iter().map(|delivery| delivery.previous_eligible_time.until(now));
            self.metrics.delivery_delays(&queue.name, waited);
            let totals = Totals { pushed: count, delivered: count, ..Totals::default() };
            self.count(&queue.name, &totals);
        }
        place.brought = Some(deliveries);
    }
}

impl State {
    /// Lets reserves go on if a direct push takes too long. What has come behind it goes back into the queue.
    pub(super) fn give_up_if_overdue(&mut self, now: Timestamp) {
        for (stream, coming) in self.direct.give_up_if_overdue(now) {
            self.consumers.end_coming(&stream, coming);
        }
        let back = self.direct.take_broken();
        self.give_back(&back, now);
    }

    /// Hands out what direct pushes have brought, up to the first that has not ended. Returns true if items are to be rolled back.
    fn hand_out_pushed(&mut self, is_wanted: bool, now: Timestamp) -> bool {
        let mut unwanted = Vec::new();
        while let Some(ended) = self.direct.next_ended() {
            let mut back = self.hand_pushed(ended, is_wanted, now);
            if !back.is_empty() {
                self.direct.items_return();
            }
            unwanted.append(&mut back);
        }
        unwanted.append(&mut self.direct.take_broken());
        self.give_back(&unwanted, now);
        !unwanted.is_empty()
    }

    /// Hands a stream what a push has brought. Returns the items that the stream can no longer receive: all if the queue was paused
    /// meanwhile.
    fn hand_pushed(&mut self, ended: Ended, is_wanted: bool, now: Timestamp) -> Vec<Delivery> {
        let Ended { load, mut deliveries, is_in_order } = ended;
        self.consumers.end_coming(&load.stream, load.coming);
        // The last reserve did not see these leases. The stream wakes the loop, which sets its timer.
        if let Some(end) = deliveries.iter().map(|delivery| delivery.lease_expire_time).min() {
            self.next_due.add(end);
        }
        let is_paused = self.queue.as_ref().is_some_and(|queue| queue.paused);
        if is_paused || !is_wanted || !is_in_order {
            return deliveries;
        }
        let is_late = |one: &mut Delivery| is_too_late(now, load.lasts, one.lease_expire_time);
        let mut unwanted: Vec<Delivery> = deliveries.extract_if(.., is_late).collect();
        unwanted.append(&mut self.consumers.hand_pushed(&load.stream, deliveries, now));
        unwanted
    }
}

impl Dispatcher {
    /// Chooses the stream whose turn it is to receive items of these sizes, if the queue is known to be empty but for direct pushes in
    /// flight and for what a reserve that is under way is likely to take. Returns the number of the push and the lease of the items. From
    /// then on reserves wait for the push, and its items take places of the stream. Calls that wait are answered by a reserve, and so are
    /// streams with `auto_commit`. Several items, and those behind a reserve, are for a stream that is the only one to wait and has room
    /// for all: a reserve shares them more evenly.
    fn begin_direct_push(
        &self,
        sizes: &[ItemSize],
        now: Timestamp,
        token: impl FnOnce() -> LeaseToken,
        mark: impl FnOnce() -> IdMark,
    ) -> Option<(u64, Box<FirstLease>)> {
        let mut state = self.state.lock();
        if !state.expects_nothing_ahead(now)
            || state.consumers.calls_wait()
            || !state.direct.may_join()
        {
            return None;
        }
        let bytes: usize = sizes.iter().map(|size| size.payload).sum();
        let (others, most) = (state.direct.len(), MOST_BYTES.saturating_sub(state.direct.bytes()));
        if others >= FEW && bytes < LARGE || others > 0 && bytes > most {
            return None;
        }
        let mut round = state.consumers.demands();
        let is_behind = state.direct.may_begin_behind_reserve();
        if (sizes.len() > 1 || is_behind) && round.demands.len() > 1 {
            return None;
        }
        if is_behind {
            // What the reserve brings needs room too.
            for demand in &mut round.demands {
                demand.max_items /= 2;
                (demand.max_bytes, demand.may_exceed) = (demand.max_bytes / 2, false);
            }
        }
        let assigned = assign(sizes, &round.demands);
        if assigned.len() < sizes.len() {
            return None;
        }
        let first = *assigned.first()?;
        let (demand, stream) = (round.demands.swap_remove(first), round.claimants[first]);
        if stream.auto_commit {
            return None;
        }
        let coming = Coming { items: sizes.len(), bytes };
        state.consumers.begin_coming(&stream, coming);
        let load = Load { stream, coming, lasts: demand.lease };
        let number = state.direct.begin(load, now, mark);
        Some((number, FirstLease::new(token(), demand.lease, demand.consumer)))
    }

    /// Ends a push with what it brought (`None`: nobody knows), and hands out what that and later ones brought that waited for it. Nothing
    /// is handed out unless it `is_wanted`. Returns true if items are to be rolled back.
    fn end_direct_push(
        &self,
        number: u64,
        brought: Option<Vec<Delivery>>,
        is_wanted: bool,
        now: Timestamp,
    ) -> bool {
        let mut state = self.state.lock();
        state.direct.end(number, brought);
        let some_return = state.hand_out_pushed(is_wanted, now);
        let has_news = state.has_news() || state.direct.has_waiting(); // for which there is a timer
        drop(state);
        if has_news {
            self.wake.notify_one();
        }
        some_return
    }
}

#[cfg(test)]
mod tests;
