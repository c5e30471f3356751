//! Who waits for a queue's items, and who holds which: the book a dispatcher keeps. No I/O in here.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{Notify, oneshot};

use crate::domain::{ConsumerName, Delivery, ItemId, Receipt, Timestamp, Want};

use super::{EngineError, Result};

/// Most items reserved in one go, over all consumers of the queue; as many as one settle may name.
const MAX_BATCH: usize = 1_000;
/// Streams get so many in one go: while these are delivered and settled, the next are reserved.
const STREAM_BATCH: usize = 500;
/// A stream that has items to work on is given more once it has room for this part of what it may
/// hold, or for [`STREAM_BATCH`] items: refills of a few items each would cost as much as large ones.
const ENOUGH_PART: usize = 4;
/// Most payload bytes in one message to a consumer, unless a single item is larger: most gRPC
/// libraries refuse messages over 4 MiB, envelopes included, unless told otherwise.
const MAX_MESSAGE_BYTES: usize = 3 << 20;

/// Names a consumer within its dispatcher.
pub(super) type ConsumerId = u64;

/// An item handed to a stream and not settled yet.
pub(super) struct InFlight {
    pub(super) receipt: Receipt,
    pub(super) bytes: usize,
    /// False until the stream has taken it from its inbox.
    pub(super) sent: bool,
    pub(super) lease_end: Timestamp,
    pub(super) previous_eligible_time: Timestamp,
    /// When it was handed out: bounds how long it is renewed.
    pub(super) since: Timestamp,
}

/// What a stream asked for when it was opened.
pub(super) struct StreamSettings {
    pub(super) max_in_flight: usize,
    pub(super) max_in_flight_bytes: usize,
    pub(super) lease: Duration,
    pub(super) consumer: Option<ConsumerName>,
    pub(super) auto_commit: bool,
}

struct Stream {
    settings: StreamSettings,
    /// Dealt to it, not yet taken.
    inbox: Vec<Delivery>,
    /// It waits for items right now. Nothing is dealt to a stream that does not: an item must not
    /// wait in one stream's buffer while another consumer is idle.
    hungry: bool,
    in_flight: HashMap<ItemId, InFlight>,
    bytes_in_flight: usize,
    /// When it was last dealt something, in rounds: breaks ties between equally loaded streams.
    served: u64,
    wake: Arc<Notify>,
    end: Option<EngineError>,
}

impl Stream {
    fn is_full(&self) -> bool {
        self.in_flight.len() >= self.settings.max_in_flight
            || self.bytes_in_flight >= self.settings.max_in_flight_bytes
    }

    /// It could be dealt items now.
    fn wants(&self) -> bool {
        self.hungry && self.end.is_none() && !self.is_full()
    }

    /// It has work, and little room for more.
    fn is_well_stocked(&self) -> bool {
        let StreamSettings { max_in_flight: items, max_in_flight_bytes: bytes, .. } = self.settings;
        let room = items.saturating_sub(self.in_flight.len());
        let room_bytes = bytes.saturating_sub(self.bytes_in_flight);
        let little =
            room < STREAM_BATCH.min(items / ENOUGH_PART) || room_bytes < bytes / ENOUGH_PART;
        !self.in_flight.is_empty() && little
    }

    fn remove(&mut self, item: ItemId) -> bool {
        let Some(gone) = self.in_flight.remove(&item) else { return false };
        self.bytes_in_flight -= gone.bytes;
        if !gone.sent {
            self.inbox.retain(|delivery| delivery.item.id != item);
        }
        true
    }
}

/// How many of these fit one message: at least one, and no more than one settle may name, so that a
/// consumer can settle a message as it came.
fn one_message(deliveries: &[Delivery]) -> usize {
    let mut bytes = 0;
    let fit = deliveries.iter().take(MAX_BATCH).take_while(|delivery| {
        bytes += delivery.item.payload.len();
        bytes <= MAX_MESSAGE_BYTES
    });
    fit.count().max(1)
}

/// A waiting reserve or pop.
pub(super) struct Call {
    pub(super) max_items: usize,
    pub(super) lease: Duration,
    pub(super) consumer: Option<ConsumerName>,
    pub(super) auto_commit: bool,
    /// False: it wants an answer after one look, whatever there is.
    pub(super) waits: bool,
    pub(super) answer: oneshot::Sender<Result<Vec<Delivery>>>,
}

/// Who one want of a round belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taker {
    pub(super) id: ConsumerId,
    pub(super) auto_commit: bool,
}

/// What a stream finds when it looks into its inbox.
pub(super) enum Inbox {
    Items(Vec<Delivery>),
    Ended(EngineError),
    /// Nothing yet; `news` if it was not known to be hungry before.
    Empty {
        news: bool,
    },
}

#[derive(Default)]
pub(super) struct Consumers {
    last_id: ConsumerId,
    round: u64,
    streams: BTreeMap<ConsumerId, Stream>,
    calls: BTreeMap<ConsumerId, Call>,
    /// Which stream holds which item.
    holders: HashMap<ItemId, ConsumerId>,
}

impl Consumers {
    pub(super) fn len(&self) -> usize {
        self.streams.len() + self.calls.len()
    }

    pub(super) fn add_stream(&mut self, settings: StreamSettings, wake: Arc<Notify>) -> ConsumerId {
        self.last_id += 1;
        let stream = Stream {
            settings,
            inbox: Vec::new(),
            hungry: false,
            in_flight: HashMap::new(),
            bytes_in_flight: 0,
            served: 0,
            wake,
            end: None,
        };
        self.streams.insert(self.last_id, stream);
        self.last_id
    }

    /// Takes a stream out, with what it held.
    pub(super) fn remove_stream(&mut self, id: ConsumerId) -> Vec<InFlight> {
        let Some(stream) = self.streams.remove(&id) else { return Vec::new() };
        for item in stream.in_flight.keys() {
            self.holders.remove(item);
        }
        stream.in_flight.into_values().collect()
    }

    pub(super) fn add_call(&mut self, call: Call) -> ConsumerId {
        self.last_id += 1;
        self.calls.insert(self.last_id, call);
        self.last_id
    }

    pub(super) fn remove_call(&mut self, id: ConsumerId) {
        self.calls.remove(&id);
    }

    pub(super) fn set_max_in_flight(&mut self, id: ConsumerId, max: usize) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.settings.max_in_flight = max;
        }
    }

    pub(super) fn look_into_inbox(&mut self, id: ConsumerId) -> Inbox {
        let Some(stream) = self.streams.get_mut(&id) else {
            return Inbox::Ended(EngineError::ShuttingDown);
        };
        if !stream.inbox.is_empty() {
            stream.hungry = false;
            let items: Vec<_> = stream.inbox.drain(..one_message(&stream.inbox)).collect();
            for delivery in &items {
                if let Some(held) = stream.in_flight.get_mut(&delivery.item.id) {
                    held.sent = true;
                }
            }
            return Inbox::Items(items);
        }
        if let Some(end) = &stream.end {
            return Inbox::Ended(end.clone());
        }
        let news = !stream.hungry;
        stream.hungry = true;
        Inbox::Empty { news }
    }

    /// Who wants how much right now, the least loaded first. Calls hold nothing, so they come first.
    pub(super) fn wants(&mut self, now: Timestamp) -> (Vec<Want>, Vec<Taker>) {
        let mut wants = Vec::new();
        let mut takers = Vec::new();
        let mut total = 0;
        for (&id, call) in &self.calls {
            if total >= MAX_BATCH {
                break;
            }
            let max_items = call.max_items.min(MAX_BATCH - total);
            total += max_items;
            wants.push(Want {
                max_items,
                max_bytes: MAX_MESSAGE_BYTES,
                may_exceed: true,
                lease: call.lease,
                consumer: call.consumer.clone(),
            });
            takers.push(Taker { id, auto_commit: call.auto_commit });
        }
        self.drop_lapsed(now);
        let mut hungry: Vec<_> = self.streams.iter().filter(|(_, s)| s.wants()).collect();
        hungry.sort_by_key(|(_, s)| (s.in_flight.len(), s.served));
        for (&id, stream) in hungry {
            if total >= STREAM_BATCH {
                break;
            }
            let settings = &stream.settings;
            let (max_bytes, may_exceed) = if settings.max_in_flight_bytes == usize::MAX {
                // No more than it can be sent at once: the rest is for whoever comes first.
                (MAX_MESSAGE_BYTES, true)
            } else {
                let left = settings.max_in_flight_bytes.saturating_sub(stream.bytes_in_flight);
                (left, stream.in_flight.is_empty())
            };
            let max_items =
                (settings.max_in_flight - stream.in_flight.len()).min(STREAM_BATCH - total);
            total += max_items;
            wants.push(Want {
                max_items,
                max_bytes,
                may_exceed,
                lease: settings.lease,
                consumer: settings.consumer.clone(),
            });
            takers.push(Taker { id, auto_commit: settings.auto_commit });
        }
        (wants, takers)
    }

    /// True if nobody would be idle without a refill: all who want items have work, and little room.
    pub(super) fn can_wait(&self) -> bool {
        let mut hungry = self.streams.values().filter(|stream| stream.wants()).peekable();
        self.calls.is_empty() && hungry.peek().is_some() && hungry.all(Stream::is_well_stocked)
    }

    /// A lease that lapsed holds no place in a stream that is full: its consumer may be busy with it
    /// for ever. Only full streams are looked through.
    fn drop_lapsed(&mut self, now: Timestamp) {
        for stream in self.streams.values_mut() {
            if !stream.is_full() {
                continue;
            }
            let lapsed: Vec<ItemId> = stream
                .in_flight
                .iter()
                .filter(|(_, held)| held.lease_end <= now)
                .map(|(item, _)| *item)
                .collect();
            for item in lapsed {
                stream.remove(item);
                self.holders.remove(&item);
            }
        }
    }

    /// When the first lease held by a full stream ends: it has room again then.
    pub(super) fn first_lease_end(&self) -> Option<Timestamp> {
        let full = self.streams.values().filter(|stream| stream.is_full());
        full.flat_map(|stream| stream.in_flight.values()).map(|held| held.lease_end).min()
    }

    /// Gives a stream what it was dealt; what it can not have comes back. It may have lowered its flow
    /// meanwhile. Of what was committed already it gets all: there is no way back for that.
    pub(super) fn hand_to_stream(
        &mut self,
        id: ConsumerId,
        mut deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        self.round += 1;
        let round = self.round;
        if self.streams.get(&id).is_none_or(|stream| stream.end.is_some()) {
            return deliveries;
        }
        for delivery in &deliveries {
            // Reserved anew: whoever held it under a lapsed lease holds it no more.
            if let Some(before) = self.holders.insert(delivery.item.id, id)
                && let Some(stream) = self.streams.get_mut(&before)
            {
                stream.remove(delivery.item.id);
            }
        }
        let Some(stream) = self.streams.get_mut(&id) else { return deliveries };
        stream.served = round;
        let room = stream.settings.max_in_flight.saturating_sub(stream.in_flight.len());
        let fits = if stream.settings.auto_commit { deliveries.len() } else { room };
        let too_many = deliveries.split_off(fits.min(deliveries.len()));
        for delivery in &too_many {
            self.holders.remove(&delivery.item.id);
        }
        for delivery in deliveries {
            if stream.settings.auto_commit {
                self.holders.remove(&delivery.item.id);
            } else {
                let bytes = delivery.item.payload.len();
                stream.bytes_in_flight += bytes;
                let held = InFlight {
                    receipt: delivery.receipt.clone(),
                    bytes,
                    sent: false,
                    lease_end: delivery.lease_expire_time,
                    previous_eligible_time: delivery.previous_eligible_time,
                    since: now,
                };
                stream.in_flight.insert(delivery.item.id, held);
            }
            stream.inbox.push(delivery);
        }
        stream.wake.notify_one();
        too_many
    }

    /// Answers a call with what it was dealt; what it can not have comes back.
    pub(super) fn hand_to_call(
        &mut self,
        id: ConsumerId,
        deliveries: Vec<Delivery>,
    ) -> Vec<Delivery> {
        match self.calls.remove(&id) {
            Some(call) => match call.answer.send(Ok(deliveries)) {
                Ok(()) => Vec::new(),
                Err(unsent) => unsent.unwrap_or_default(),
            },
            None => deliveries,
        }
    }

    pub(super) fn is_call(&self, id: ConsumerId) -> bool {
        self.calls.contains_key(&id)
    }

    /// Answers, with nothing, the calls of this round that do not wait.
    pub(super) fn answer_impatient(&mut self, takers: impl Iterator<Item = ConsumerId>) {
        for id in takers {
            if self.calls.get(&id).is_some_and(|call| !call.waits)
                && let Some(call) = self.calls.remove(&id)
            {
                let _ = call.answer.send(Ok(Vec::new())); // nothing is lost if nobody listens
            }
        }
    }

    /// Fails all waiting calls; streams go on.
    pub(super) fn fail_calls(&mut self, error: &EngineError) {
        for call in std::mem::take(&mut self.calls).into_values() {
            let _ = call.answer.send(Err(error.clone())); // nobody listens: nobody to tell
        }
    }

    /// Ends all streams and calls.
    pub(super) fn end_all(&mut self, error: &EngineError) {
        self.fail_calls(error);
        for stream in self.streams.values_mut() {
            stream.end = Some(error.clone());
            stream.wake.notify_one();
        }
    }

    /// The reservation was settled: its place is free. True if one of our streams held it.
    pub(super) fn settled(&mut self, receipt: &Receipt) -> bool {
        let Some(&id) = self.holders.get(&receipt.item) else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.in_flight.get(&receipt.item).is_none_or(|h| h.receipt.token != receipt.token) {
            return false;
        }
        self.holders.remove(&receipt.item);
        stream.remove(receipt.item)
    }

    /// The lease was prolonged.
    pub(super) fn extended(&mut self, receipt: &Receipt, until: Timestamp) {
        if let Some(id) = self.holders.get(&receipt.item)
            && let Some(stream) = self.streams.get_mut(id)
            && let Some(held) = stream.in_flight.get_mut(&receipt.item)
            && held.receipt.token == receipt.token
        {
            held.lease_end = until;
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
