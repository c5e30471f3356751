//! A dispatcher's record of its consumers: which of them wait for items, and which hold which
//! items. Does no I/O.

mod calls;
mod coming;
mod flow;
mod held;
mod left;
mod report;
mod sent;
mod served_ahead;
mod stock;
mod stream;
mod unsent;

use std::{collections::BTreeMap, mem, sync::Arc};

use tokio::sync::Notify;

use crate::domain::{Delivery, Demand, IdMap, ItemId, Timestamp, limits::MAX_BATCH};

use self::{calls::Calls, held::Void, stream::Stream, unsent::Unsent};
use super::{EngineError, Result};

pub(super) use self::{
    calls::Call,
    coming::Coming,
    left::Left,
    stock::Stock,
    stream::{InFlight, StreamSettings, is_too_late},
    unsent::UnsentBytes,
};
pub(crate) use self::{
    flow::InForce,
    stream::{RevokeReason, Revoked},
};

/// Most items that streams are assigned in one round, so that the next items are reserved while
/// these are delivered and settled. While streams wait for items, calls share the rest of
/// [`MAX_BATCH`], the most items reserved in one call of the store.
const STREAM_BATCH: usize = 500;
/// Most payload bytes reserved for one consumer in one round, unless a single item is larger. A
/// reserve is answered by one message, and most gRPC libraries by default refuse messages over 4
/// MiB.
const MAX_ROUND_BYTES: usize = 3 << 20;

/// Identifies a consumer within its dispatcher.
pub(super) type ConsumerId = u64;

/// The claimant of the items that are reserved ahead. No consumer has this number.
const STOCK: ConsumerId = 0;

/// The consumer to which one demand of a round belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claimant {
    pub(super) id: ConsumerId,
    pub(super) auto_commit: bool,
    /// How often items had been taken back from the stream when it asked. What is reserved for it would overtake those that were
    /// taken back since.
    taken_back: u64,
}

impl Claimant {
    /// A claimant that holds nothing which could be taken back.
    fn new(id: ConsumerId, auto_commit: bool) -> Self {
        Self { id, auto_commit, taken_back: 0 }
    }
}

/// The demands of one call of [`Reserver::reserve`](crate::store::Reserver::reserve).
pub(super) struct Round {
    pub(super) demands: Vec<Demand>,
    pub(super) claimants: Vec<Claimant>,
    /// The newest consumer that existed when the round began.
    newest: ConsumerId,
}

/// The content of a stream's inbox.
pub(super) enum Inbox {
    Items(Vec<Delivery>),
    Revoked(Vec<Revoked>),
    Ended(EngineError),
    /// Nothing yet. `dirty` is true if the stream was not known to be hungry before.
    Empty {
        dirty: bool,
    },
}

#[derive(Default)]
pub(super) struct Consumers {
    last_id: ConsumerId,
    round: u64,
    streams: BTreeMap<ConsumerId, Stream>,
    calls: Calls,
    /// The stream that holds each item.
    holders: IdMap<ItemId, ConsumerId>,
    /// What is reserved for the next consumers that ask.
    pub(super) stock: Stock,
    /// Void reservations that have not been announced yet, in the order of their announcement.
    void: Vec<Void>,
    /// What the streams of all dispatchers were assigned and not sent.
    unsent: Arc<UnsentBytes>,
}

impl Consumers {
    pub(super) fn new(unsent: Arc<UnsentBytes>) -> Self {
        Self { unsent, ..Self::default() }
    }

    /// Returns the number of calls and of streams that have not ended.
    pub(super) fn len(&self) -> usize {
        self.streams.values().filter(|stream| stream.end.is_none()).count() + self.calls.len()
    }

    pub(super) fn add_stream(&mut self, settings: StreamSettings, wake: Arc<Notify>) -> ConsumerId {
        self.last_id += 1;
        let inbox = Unsent::new(Arc::clone(&self.unsent));
        self.streams.insert(self.last_id, Stream::new(settings, inbox, wake, self.round));
        self.last_id
    }

    /// Removes a stream and returns the items it held.
    pub(super) fn remove_stream(&mut self, id: ConsumerId) -> Vec<InFlight> {
        let Some(mut stream) = self.streams.remove(&id) else { return Vec::new() };
        let held = stream.take_all();
        for held in &held {
            self.holders.remove(&held.receipt.item);
        }
        self.void.retain(|void| void.stream != id);
        held
    }

    pub(super) fn add_call(&mut self, call: Call) -> ConsumerId {
        self.last_id += 1;
        self.calls.add(self.last_id, call, self.round);
        self.last_id
    }

    /// Removes a call whose caller has gone.
    pub(super) fn remove_call(&mut self, id: ConsumerId) {
        self.calls.remove(id);
    }

    /// Withdraws a call whose time is up. Returns true if a running round will answer the call.
    pub(super) fn withdraw_call(&mut self, id: ConsumerId) -> bool {
        self.calls.withdraw(id)
    }

    /// Assigns no more items to a stream. The stream ends when it holds none.
    pub(super) fn retire_stream(&mut self, id: ConsumerId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.retire();
        }
    }

    /// Returns the content of a stream's inbox, and the assigned items for which it is too late to
    /// be sent.
    pub(super) fn look_into_inbox(
        &mut self,
        id: ConsumerId,
        now: Timestamp,
    ) -> (Inbox, Vec<InFlight>) {
        let (inbox, mut late) = self.look(id, now);
        if matches!(inbox, Inbox::Empty { .. }) && self.serve(id, now) {
            let (inbox, more) = self.look(id, now);
            late.extend(more);
            return (inbox, late);
        }
        (inbox, late)
    }

    fn look(&mut self, id: ConsumerId, now: Timestamp) -> (Inbox, Vec<InFlight>) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return (Inbox::Ended(EngineError::ShuttingDown), Vec::new());
        };
        let (message, late) = stream.next_message(now);
        for held in &late {
            self.holders.remove(&held.receipt.item);
        }
        let inbox = if !message.is_empty() {
            stream.hungry = false;
            Inbox::Items(message)
        } else if !stream.revoked.is_empty() {
            Inbox::Revoked(mem::take(&mut stream.revoked))
        } else if let Some(end) = &stream.end {
            Inbox::Ended(end.clone())
        } else if stream.has_retired() {
            Inbox::Ended(EngineError::StreamTooOld)
        } else {
            Inbox::Empty { dirty: !mem::replace(&mut stream.hungry, true) }
        };
        (inbox, late)
    }

    /// Collects the demands of all consumers, the least loaded first, and among equally loaded
    /// consumers those that have waited longest.
    pub(super) fn demands(&self) -> Round {
        struct Asking {
            /// How many items the consumer works on, how many it holds, and the round since which it has waited.
            rank: (usize, usize, u64),
            claimant: Claimant,
            demand: Demand,
        }
        let mut hungry: Vec<_> = self.streams.iter().filter(|(_, s)| s.demands()).collect();
        hungry.sort_by_key(|(_, s)| s.rank());
        let for_calls = if hungry.is_empty() { MAX_BATCH } else { MAX_BATCH - STREAM_BATCH };
        let calls = self.calls.demands(for_calls).map(|(id, max_items, waiting)| Asking {
            rank: (0, 0, waiting.since),
            claimant: Claimant::new(id, waiting.call.auto_commit),
            demand: Demand {
                max_items,
                max_bytes: MAX_ROUND_BYTES,
                may_exceed: true,
                lease: waiting.call.lease,
                consumer: waiting.call.consumer.clone(),
                spare: false,
            },
        });
        let mut all: Vec<Asking> = calls.collect();
        let mut left = STREAM_BATCH;
        for (&id, stream) in hungry {
            if left == 0 {
                break;
            }
            let settings = &stream.settings;
            let (max_bytes, may_exceed) = stream.wanted_bytes();
            let max_items = stream.room().min(left);
            left -= max_items;
            all.push(Asking {
                rank: stream.rank(),
                claimant: Claimant {
                    taken_back: stream.taken_back,
                    ..Claimant::new(id, settings.auto_commit)
                },
                demand: Demand {
                    max_items,
                    max_bytes,
                    may_exceed,
                    lease: settings.lease,
                    consumer: settings.consumer.clone(),
                    spare: false,
                },
            });
        }
        all.sort_by_key(|asking| asking.rank);
        let (claimants, demands) =
            all.into_iter().map(|asking| (asking.claimant, asking.demand)).unzip();
        Round { demands, claimants, newest: self.last_id }
    }

    /// Begins a round, which will answer its calls.
    pub(super) fn begin_round(&mut self, round: &Round) {
        self.round += 1;
        for claimant in &round.claimants {
            self.calls.begin_round(claimant.id);
            if let Some(stream) = self.streams.get_mut(&claimant.id) {
                stream.in_round = true;
            }
        }
    }

    /// Ends a round whose items have been handed out. `all_seen` says that the round found
    /// everything there was.
    pub(super) fn end_round(&mut self, round: &Round, all_seen: bool, now: Timestamp) {
        for claimant in &round.claimants {
            if let Some(stream) = self.streams.get_mut(&claimant.id) {
                stream.round_ended();
            }
        }
        self.stock.round_ended(all_seen, now);
        self.serve_all(now); // first, because the end of a round answers calls that do not wait
        self.calls.end_round(round.newest, all_seen);
    }

    /// Ends a round that failed.
    pub(super) fn fail_round(&mut self, error: &EngineError) {
        self.calls.fail_round(error);
        for stream in self.streams.values_mut().filter(|stream| stream.in_round) {
            stream.round_ended();
        }
    }

    /// Answers all calls that do not wait, with no items.
    pub(super) fn answer_impatient(&mut self) {
        self.calls.end_round(self.last_id, true);
    }

    /// Returns true if the consumer can still receive items.
    pub(super) fn is_there(&self, id: ConsumerId) -> bool {
        self.calls.listens(id) || self.streams.get(&id).is_some_and(Stream::goes_on)
    }

    /// Returns true if calls wait for items.
    pub(super) fn calls_wait(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Returns true if a consumer would take items now.
    pub(super) fn any_waits(&self) -> bool {
        self.calls_wait() || self.streams.values().any(Stream::demands)
    }

    /// Returns true if a stream may receive so many items and bytes at once, and does not hold all it may. Several items are for a stream
    /// that is the only one.
    pub(super) fn have_places(&self, items: usize, bytes: usize) -> bool {
        let mut streams = self.streams.values().filter(|stream| stream.goes_on());
        let is_alone = items == 1 || self.streams.len() == 1;
        is_alone && streams.any(|stream| stream.has_places(items, bytes))
    }

    /// Returns true if no consumer would be idle without a refill: all that want items have work
    /// and little room.
    pub(super) fn can_wait(&self) -> bool {
        let mut hungry = self.streams.values().filter(|stream| stream.demands()).peekable();
        self.calls.is_empty() && hungry.peek().is_some() && hungry.all(Stream::is_well_stocked)
    }

    /// Takes the items that were never sent out of all streams and the stock.
    pub(super) fn take_unsent(&mut self) -> Vec<InFlight> {
        let mut unsent: Vec<_> = self.streams.values_mut().flat_map(Stream::take_unsent).collect();
        for held in &unsent {
            self.holders.remove(&held.receipt.item);
        }
        unsent.append(&mut self.stock.take_all());
        unsent
    }

    /// Hands a consumer what was reserved for it. Returns the items that the consumer can no longer receive.
    pub(super) fn hand_reserved(
        &mut self,
        claimant: &Claimant,
        deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        if self.is_overtaking(claimant) {
            deliveries
        } else {
            self.hand(claimant.id, deliveries, now)
        }
    }

    /// Returns true if items were taken back from the stream since it asked.
    fn is_overtaking(&self, claimant: &Claimant) -> bool {
        let stream = self.streams.get(&claimant.id);
        stream.is_some_and(|stream| stream.taken_back != claimant.taken_back)
    }

    /// Hands a consumer items. Returns the items that the consumer cannot receive.
    pub(super) fn hand(
        &mut self,
        id: ConsumerId,
        deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        if id == STOCK {
            self.stock.add(deliveries, now);
            return Vec::new();
        }
        if let Some(call) = self.calls.get(id) {
            if call.auto_commit {
                return self.calls.hand(id, deliveries);
            }
            self.stock.count(&call.terms(), call.max_items, deliveries.len(), now);
            return self.calls.hand(id, deliveries);
        }
        if let Some(stream) = self.streams.get(&id).filter(|s| !s.settings.auto_commit) {
            let most = stream.settings.max_in_flight;
            self.stock.count(&stream.settings.terms(), most, deliveries.len(), now);
        }
        self.hand_to_stream(id, deliveries, now)
    }

    /// Hands a stream its items. Returns the items that the stream can no longer receive, as when
    /// its flow was lowered, or other items took its room, meanwhile. A stream receives all items that are committed already, as
    /// these cannot be rolled back.
    fn hand_to_stream(
        &mut self,
        id: ConsumerId,
        mut deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        if self.streams.get(&id).is_none_or(|stream| stream.end.is_some()) {
            return deliveries;
        }
        for delivery in &deliveries {
            // The item is reserved again, so that a stream that held it before no longer holds it.
            if let Some(before) = self.holders.insert(delivery.item.id, id) {
                self.displaced(before, delivery.item.id, now);
            }
        }
        let Some(stream) = self.streams.get_mut(&id) else { return deliveries };
        stream.served = self.round;
        let fits = match stream.settings.auto_commit {
            true => deliveries.len(),
            false if stream.goes_on() => stream.fitting(&deliveries),
            false => 0,
        };
        let too_many = deliveries.split_off(fits);
        for delivery in &too_many {
            self.holders.remove(&delivery.item.id);
        }
        let had_items = !stream.inbox.is_empty();
        for delivery in deliveries {
            if stream.settings.auto_commit {
                self.holders.remove(&delivery.item.id);
            }
            stream.hand(delivery, now);
        }
        stream.assigned(had_items);
        stream.wake.notify_one();
        too_many
    }

    /// Fails all waiting calls. Streams continue.
    pub(super) fn fail_calls(&mut self, error: &EngineError) {
        self.calls.fail(error);
    }

    /// Ends a stream and returns the items it held. An auto-commit stream first sends the items
    /// that are committed already.
    pub(super) fn end_stream(&mut self, id: ConsumerId, error: &EngineError) -> Vec<InFlight> {
        let Some(stream) = self.streams.get_mut(&id).filter(|s| !s.settings.auto_commit) else {
            return Vec::new();
        };
        let held = stream.take_all();
        stream.end.get_or_insert_with(|| error.clone());
        stream.wake.notify_one();
        for held in &held {
            self.holders.remove(&held.receipt.item);
        }
        self.void.retain(|void| void.stream != id);
        held
    }

    /// Ends all streams and calls, and returns the items that the streams held.
    pub(super) fn end_all(&mut self, error: &EngineError) -> Vec<InFlight> {
        self.fail_calls(error);
        let mut held = Vec::new();
        for stream in self.streams.values_mut() {
            held.append(&mut stream.take_all());
            stream.end.get_or_insert_with(|| error.clone());
            stream.wake.notify_one();
        }
        held.append(&mut self.stock.take_all());
        self.holders.clear();
        self.void.clear();
        held
    }

    /// Returns true if a stream has less than half of its places free.
    pub(super) fn places_are_scarce(&self) -> bool {
        self.streams.values().any(Stream::is_half_full)
    }
}

#[cfg(test)]
mod committing_tests;
#[cfg(test)]
mod flow_tests;
#[cfg(test)]
mod stock_tests;
#[cfg(test)]
pub(in crate::engine) mod tests;
