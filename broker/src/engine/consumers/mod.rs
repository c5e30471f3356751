//! Who waits for a queue's items, and who holds which: the book a dispatcher keeps. No I/O in here.

mod calls;
mod stream;

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::Arc,
    time::Duration,
};

use tokio::sync::Notify;

use crate::domain::{Delivery, Demand, ItemId, Receipt, Timestamp};

use self::{calls::Calls, stream::Stream};
use super::{EngineError, Result};

pub(crate) use self::stream::{RevokeReason, Revoked};
pub(super) use self::{
    calls::Call,
    stream::{InFlight, StreamSettings, is_too_late},
};

/// Most items reserved in one go, over all consumers of the queue; as many as one settle may name.
const MAX_BATCH: usize = 1_000;
/// Streams get so many in one go: while these are delivered and settled, the next are reserved.
/// While streams ask, calls get no more than what is left of [`MAX_BATCH`].
const STREAM_BATCH: usize = 500;
/// Most payload bytes reserved for one consumer in one go, unless a single item is larger: a
/// reserve is answered by one message, and most gRPC libraries refuse those over 4 MiB unless told
/// otherwise.
const MAX_MESSAGE_BYTES: usize = 3 << 20;
/// A reservation that was found to be void is announced this much later: a settle through this
/// broker may have ended it, and be about to be answered.
const DOUBT: Duration = Duration::from_secs(1);

/// Names a consumer within its dispatcher.
pub(super) type ConsumerId = u64;

/// Who one demand of a round belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claimant {
    pub(super) id: ConsumerId,
    pub(super) auto_commit: bool,
}

/// One look at the store: who wants what.
pub(super) struct Round {
    pub(super) demands: Vec<Demand>,
    pub(super) claimants: Vec<Claimant>,
    /// The newest of the consumers that were there when it began.
    newest: ConsumerId,
}

/// What a stream finds when it looks into its inbox.
pub(super) enum Inbox {
    Items(Vec<Delivery>),
    Revoked(Vec<Revoked>),
    Ended(EngineError),
    /// Nothing yet; `dirty` if it was not known to be hungry before.
    Empty {
        dirty: bool,
    },
}

/// A reservation that a stream holds no more, for a reason that is not known.
struct Void {
    stream: ConsumerId,
    receipt: Receipt,
    told: Timestamp,
}

#[derive(Default)]
pub(super) struct Consumers {
    last_id: ConsumerId,
    round: u64,
    streams: BTreeMap<ConsumerId, Stream>,
    calls: Calls,
    /// Which stream holds which item.
    holders: HashMap<ItemId, ConsumerId>,
    /// What is to be announced in a moment, in that order.
    void: Vec<Void>,
}

impl Consumers {
    /// How many streams that go on, and calls.
    pub(super) fn len(&self) -> usize {
        self.streams.values().filter(|stream| stream.end.is_none()).count() + self.calls.len()
    }

    pub(super) fn add_stream(&mut self, settings: StreamSettings, wake: Arc<Notify>) -> ConsumerId {
        self.last_id += 1;
        self.streams.insert(self.last_id, Stream::new(settings, wake, self.round));
        self.last_id
    }

    /// Takes a stream out, with what it held.
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

    /// The caller has gone.
    pub(super) fn remove_call(&mut self, id: ConsumerId) {
        self.calls.remove(id);
    }

    /// The call's time is up. True if a round is running that will answer it.
    pub(super) fn withdraw_call(&mut self, id: ConsumerId) -> bool {
        self.calls.withdraw(id)
    }

    pub(super) fn set_max_in_flight(&mut self, id: ConsumerId, max: usize) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.settings.max_in_flight = max;
        }
    }

    /// Deals a stream nothing more; it ends when it holds nothing.
    pub(super) fn retire_stream(&mut self, id: ConsumerId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.retire();
        }
    }

    /// What there is for a stream, and what was dealt to it but is too late to be sent.
    pub(super) fn look_into_inbox(
        &mut self,
        id: ConsumerId,
        now: Timestamp,
    ) -> (Inbox, Vec<InFlight>) {
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

    /// Who wants how much right now: the least loaded first, and among those who has waited longest.
    pub(super) fn demands(&self) -> Round {
        struct Asking {
            /// What it holds, and since which round it has waited.
            rank: (usize, u64),
            claimant: Claimant,
            demand: Demand,
        }
        let mut hungry: Vec<_> = self.streams.iter().filter(|(_, s)| s.demands()).collect();
        hungry.sort_by_key(|(_, s)| (s.in_flight.len(), s.served));
        let for_calls = if hungry.is_empty() { MAX_BATCH } else { MAX_BATCH - STREAM_BATCH };
        let calls = self.calls.demands(for_calls).map(|(id, max_items, waiting)| Asking {
            rank: (0, waiting.since),
            claimant: Claimant { id, auto_commit: waiting.call.auto_commit },
            demand: Demand {
                max_items,
                max_bytes: MAX_MESSAGE_BYTES,
                may_exceed: true,
                lease: waiting.call.lease,
                consumer: waiting.call.consumer.clone(),
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
            let max_items = (settings.max_in_flight - stream.in_flight.len()).min(left);
            left -= max_items;
            all.push(Asking {
                rank: (stream.in_flight.len(), stream.served),
                claimant: Claimant { id, auto_commit: settings.auto_commit },
                demand: Demand {
                    max_items,
                    max_bytes,
                    may_exceed,
                    lease: settings.lease,
                    consumer: settings.consumer.clone(),
                },
            });
        }
        all.sort_by_key(|asking| asking.rank);
        let (claimants, demands) =
            all.into_iter().map(|asking| (asking.claimant, asking.demand)).unzip();
        Round { demands, claimants, newest: self.last_id }
    }

    /// The round is under way: its calls are answered by it.
    pub(super) fn begin_round(&mut self, round: &Round) {
        self.round += 1;
        for claimant in &round.claimants {
            self.calls.begin_round(claimant.id);
            if let Some(stream) = self.streams.get_mut(&claimant.id) {
                stream.in_round = true;
            }
        }
    }

    /// The round is over, and what it brought was handed out. `all_seen`: there was no more.
    pub(super) fn end_round(&mut self, round: &Round, all_seen: bool) {
        self.calls.end_round(round.newest, all_seen);
        for claimant in &round.claimants {
            if let Some(stream) = self.streams.get_mut(&claimant.id) {
                stream.round_ended();
            }
        }
    }

    /// The round brought nothing but an error.
    pub(super) fn fail_round(&mut self, error: &EngineError) {
        self.calls.fail_round(error);
        for stream in self.streams.values_mut().filter(|stream| stream.in_round) {
            stream.round_ended();
        }
    }

    /// Answers, with nothing, all calls that do not wait.
    pub(super) fn answer_impatient(&mut self) {
        self.calls.end_round(self.last_id, true);
    }

    /// True if there is still somebody for what is dealt to this claimant.
    pub(super) fn is_there(&self, id: ConsumerId) -> bool {
        self.calls.listens(id) || self.streams.get(&id).is_some_and(Stream::goes_on)
    }

    /// True if nobody would be idle without a refill: all who want items have work, and little room.
    pub(super) fn can_wait(&self) -> bool {
        let mut hungry = self.streams.values().filter(|stream| stream.demands()).peekable();
        self.calls.is_empty() && hungry.peek().is_some() && hungry.all(Stream::is_well_stocked)
    }

    /// Takes out of the streams what they hold under leases that have ended, and announces what it is
    /// time to announce.
    pub(super) fn take_lapsed(&mut self, now: Timestamp) -> Vec<InFlight> {
        let mut lapsed = Vec::new();
        for stream in self.streams.values_mut() {
            lapsed.append(&mut stream.take_lapsed(now));
        }
        for held in &lapsed {
            self.holders.remove(&held.receipt.item);
        }
        let due = self.void.iter().take_while(|void| void.told <= now).count();
        for Void { stream, receipt, .. } in self.void.drain(..due) {
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.revoke(receipt, RevokeReason::Cancelled);
            }
        }
        lapsed
    }

    /// When [`Self::take_lapsed`] has something to do.
    pub(super) fn next_lapse(&self) -> Option<Timestamp> {
        let void = self.void.first().map(|void| void.told);
        self.streams.values().filter_map(Stream::next_lapse).chain(void).min()
    }

    /// Gives a consumer what it was dealt; what it cannot have comes back.
    pub(super) fn hand(
        &mut self,
        id: ConsumerId,
        deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        if self.calls.contains(id) {
            self.calls.hand(id, deliveries)
        } else {
            self.hand_to_stream(id, deliveries, now)
        }
    }

    /// Gives a stream what it was dealt; what it cannot have comes back. It may have lowered its flow
    /// meanwhile. Of what was committed already it gets all: there is no way back for that.
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
            // Reserved anew: whoever held it under a lapsed lease holds it no more.
            if let Some(before) = self.holders.insert(delivery.item.id, id)
                && let Some(stream) = self.streams.get_mut(&before)
                && let Some(held) = stream.remove(delivery.item.id)
                && held.sent
            {
                stream.revoke(held.receipt, RevokeReason::Lapsed);
            }
        }
        let Some(stream) = self.streams.get_mut(&id) else { return deliveries };
        stream.served = self.round;
        let most = if stream.goes_on() { stream.settings.max_in_flight } else { 0 };
        let room = most.saturating_sub(stream.in_flight.len());
        let fits = if stream.settings.auto_commit { deliveries.len() } else { room };
        let too_many = deliveries.split_off(fits.min(deliveries.len()));
        for delivery in &too_many {
            self.holders.remove(&delivery.item.id);
        }
        for delivery in deliveries {
            if stream.settings.auto_commit {
                self.holders.remove(&delivery.item.id);
            }
            stream.hand(delivery, now);
        }
        stream.wake.notify_one();
        too_many
    }

    /// Fails all waiting calls; streams go on.
    pub(super) fn fail_calls(&mut self, error: &EngineError) {
        self.calls.fail(error);
    }

    /// Ends a stream and returns what it held. One whose items are committed already goes on to send them.
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

    /// Ends all streams and calls; answers what the streams held.
    pub(super) fn end_all(&mut self, error: &EngineError) -> Vec<InFlight> {
        self.fail_calls(error);
        let mut held = Vec::new();
        for stream in self.streams.values_mut() {
            held.append(&mut stream.take_all());
            stream.end.get_or_insert_with(|| error.clone());
            stream.wake.notify_one();
        }
        self.holders.clear();
        self.void.clear();
        held
    }

    /// The reservation was settled: its place is free. True if one of our streams held it.
    pub(super) fn settled(&mut self, receipt: &Receipt) -> bool {
        self.void.retain(|void| void.receipt != *receipt);
        self.take(receipt).is_some()
    }

    /// The reservation was found to be void, and it is not known why: its place is free, and its
    /// stream is told in a moment. True if one of our streams held it.
    pub(super) fn found_void(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        let Some((stream, held)) = self.take(receipt) else { return false };
        let told = now + DOUBT;
        let announced =
            self.streams.get(&stream).is_some_and(|stream| stream.settings.tells_revoked);
        if held.sent && announced {
            self.void.push(Void { stream, receipt: held.receipt, told });
        }
        true
    }

    /// The item was deleted: whoever holds it is told. True if one of our streams did.
    pub(super) fn deleted(&mut self, item: ItemId) -> bool {
        let Some(id) = self.holders.remove(&item) else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let Some(held) = stream.remove(item) else { return false };
        if held.sent {
            stream.revoke(held.receipt, RevokeReason::Deleted);
        }
        true
    }

    /// Takes the reservation out of the hands of the stream that holds it.
    fn take(&mut self, receipt: &Receipt) -> Option<(ConsumerId, InFlight)> {
        let id = *self.holders.get(&receipt.item)?;
        let stream = self.streams.get_mut(&id)?;
        if stream.in_flight.get(&receipt.item)?.receipt.token != receipt.token {
            return None;
        }
        self.holders.remove(&receipt.item);
        Some((id, stream.remove(receipt.item)?))
    }

    /// The lease was prolonged.
    pub(super) fn extended(&mut self, receipt: &Receipt, until: Timestamp) {
        if let Some(id) = self.holders.get(&receipt.item)
            && let Some(stream) = self.streams.get_mut(id)
            && let Some(held) = stream.in_flight.get_mut(&receipt.item)
            && held.receipt.token == receipt.token
        {
            held.lease_end = until;
            stream.first_lease_end = stream.first_lease_end.min(until);
        }
    }

    /// All receipts held by streams.
    pub(super) fn held(&self) -> Vec<Receipt> {
        self.streams
            .values()
            .flat_map(|s| s.in_flight.values())
            .map(|held| held.receipt.clone())
            .collect()
    }

    /// How many items streams hold.
    pub(super) fn held_count(&self) -> usize {
        self.holders.len()
    }

    /// What a stream holds whose leases should be prolonged: not handed out before `oldest`.
    pub(super) fn to_renew(&self, id: ConsumerId, oldest: Timestamp) -> Vec<Receipt> {
        self.streams.get(&id).map_or_else(Vec::new, |stream| {
            stream
                .in_flight
                .values()
                .filter(|held| held.since >= oldest)
                .map(|held| held.receipt.clone())
                .collect()
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
