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
/// hold, or for [`ENOUGH_ROOM`] items: refills of a few items each would cost as much as large ones.
const ENOUGH_PART: usize = 4;
/// Room for so many items is always worth a refill.
const ENOUGH_ROOM: usize = 500;
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
            room < ENOUGH_ROOM.min(items / ENOUGH_PART) || room_bytes < bytes / ENOUGH_PART;
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
pub(super) mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::domain::{GroupName, Headers, Item, ItemState, LeaseToken, Priority, QueueName};

    const NOW: Timestamp = Timestamp(1_000);
    const LEASE_END: Timestamp = Timestamp(2_000);

    /// An item on its way to a consumer.
    pub(in crate::engine) fn delivery(item: u8, token: u8, bytes: usize) -> Delivery {
        let queue = QueueName::parse("queue", "q").unwrap();
        let id = ItemId([item; 12]);
        let receipt = Receipt {
            item: id,
            token: LeaseToken([token; 12]),
            deliveries: 1,
            attempt: 1,
            keyed: false,
            queue: queue.clone(),
            group: GroupName::default(),
        };
        let item = Item {
            id,
            queue,
            payload: Bytes::from(vec![0; bytes]),
            content_type: String::new(),
            headers: Headers::new(),
            priority: Priority::default(),
            state: ItemState::Reserved,
            attempt: 1,
            deliveries: 1,
            sequence: 0,
            ordering_key: String::new(),
            dedup_id: String::new(),
            create_time: NOW,
            eligible_time: Some(LEASE_END),
            expire_time: None,
            process_time: None,
            producer: None,
            consumer: None,
            last_reason: String::new(),
            origin_queue: None,
        };
        Delivery { item, receipt, lease_expire_time: LEASE_END, previous_eligible_time: NOW }
    }

    fn stream(consumers: &mut Consumers, max_in_flight: usize, max_bytes: usize) -> ConsumerId {
        let settings = StreamSettings {
            max_in_flight,
            max_in_flight_bytes: max_bytes,
            lease: Duration::from_secs(1),
            consumer: None,
            auto_commit: false,
        };
        let id = consumers.add_stream(settings, Arc::new(Notify::new()));
        assert!(matches!(consumers.look_into_inbox(id), Inbox::Empty { news: true }));
        id
    }

    /// Who would be dealt how much now.
    fn wanted(consumers: &mut Consumers, now: Timestamp) -> Vec<(ConsumerId, usize)> {
        let (wants, takers) = consumers.wants(now);
        takers.iter().map(|t| t.id).zip(wants.iter().map(|w| w.max_items)).collect()
    }

    fn take(consumers: &mut Consumers, id: ConsumerId) -> usize {
        let taken = match consumers.look_into_inbox(id) {
            Inbox::Items(items) => items.len(),
            _ => 0,
        };
        consumers.look_into_inbox(id); // it asks for more
        taken
    }

    #[test]
    fn a_stream_that_does_not_ask_is_dealt_nothing() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 10, 1_000);
        assert_eq!(wanted(&mut consumers, NOW), [(id, 10)]);
        assert!(consumers.hand_to_stream(id, vec![delivery(1, 1, 5)], NOW).is_empty());
        assert!(matches!(consumers.look_into_inbox(id), Inbox::Items(items) if items.len() == 1));
        assert_eq!(wanted(&mut consumers, NOW), [], "it has not come back for more yet");
        consumers.look_into_inbox(id);
        assert_eq!(wanted(&mut consumers, NOW), [(id, 9)]);
    }

    #[test]
    fn a_message_can_be_settled_in_one_call() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 5_000, usize::MAX);
        // Dealt in two rounds, before the stream looked.
        for round in 0..2_u16 {
            let items = (0..700_u16).map(|n| {
                let mut delivery = delivery(0, 1, 5);
                delivery.item.id.0[..2].copy_from_slice(&(round * 700 + n).to_be_bytes());
                delivery.receipt.item = delivery.item.id;
                delivery
            });
            consumers.hand_to_stream(id, items.collect(), NOW);
        }
        let messages = [(); 2].map(|()| match consumers.look_into_inbox(id) {
            Inbox::Items(items) => items.len(),
            _ => 0,
        });
        assert_eq!(messages, [1_000, 400]);
    }

    #[test]
    fn a_full_stream_has_room_again_when_something_is_settled() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 2, 1_000);
        consumers.hand_to_stream(id, vec![delivery(1, 1, 5), delivery(2, 1, 5)], NOW);
        assert_eq!(take(&mut consumers, id), 2);
        assert_eq!(wanted(&mut consumers, NOW), []);
        assert!(!consumers.settled(&delivery(1, 9, 5).receipt), "a stale receipt frees nothing");
        assert!(consumers.settled(&delivery(1, 1, 5).receipt));
        assert!(!consumers.settled(&delivery(1, 1, 5).receipt), "a place is freed once");
        assert_eq!(wanted(&mut consumers, NOW), [(id, 1)]);
    }

    #[test]
    fn only_who_has_work_and_little_room_can_wait_for_more() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 8, 1_000);
        assert!(!consumers.can_wait(), "an idle consumer is served at once");
        let items: Vec<_> = (0..8).map(|n| delivery(n, 1, 5)).collect();
        consumers.hand_to_stream(id, items.clone(), NOW);
        assert_eq!(take(&mut consumers, id), 8);
        assert!(!consumers.can_wait(), "nobody wants anything");
        assert!(consumers.settled(&items[0].receipt));
        assert!(consumers.can_wait(), "room for one of eight");
        assert!(consumers.settled(&items[1].receipt));
        assert!(!consumers.can_wait(), "room for a quarter");
        assert!(!consumers.settled(&items[1].receipt));
        consumers.hand_to_stream(id, vec![delivery(9, 1, 5)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        assert!(consumers.can_wait());
        stream(&mut consumers, 8, 1_000);
        assert!(!consumers.can_wait(), "another consumer is idle");
    }

    #[test]
    fn who_has_little_room_for_bytes_can_wait_too_and_a_call_can_not() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 100, 10);
        consumers.hand_to_stream(id, vec![delivery(1, 1, 9)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        assert!(consumers.can_wait());
        let (answer, _answered) = oneshot::channel();
        let lease = Duration::from_secs(1);
        consumers.add_call(Call {
            max_items: 1,
            lease,
            consumer: None,
            auto_commit: false,
            waits: true,
            answer,
        });
        assert!(!consumers.can_wait());
    }

    #[test]
    fn a_flow_lowered_during_a_look_holds_for_what_that_brings() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 8, 1_000);
        assert_eq!(wanted(&mut consumers, NOW), [(id, 8)]);
        consumers.set_max_in_flight(id, 2);
        let back = consumers.hand_to_stream(id, (0..5).map(|n| delivery(n, 1, 5)).collect(), NOW);
        assert_eq!(back.iter().map(|d| d.item.id.0[0]).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(take(&mut consumers, id), 2);
        assert!(!consumers.settled(&back[0].receipt), "it does not hold what went back");
        assert!(wanted(&mut consumers, NOW).is_empty());
    }

    #[test]
    fn bytes_fill_a_stream_too() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 9, 10);
        consumers.hand_to_stream(id, vec![delivery(1, 1, 50)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        assert_eq!(wanted(&mut consumers, NOW), []);
        assert!(consumers.settled(&delivery(1, 1, 50).receipt));
        assert_eq!(wanted(&mut consumers, NOW), [(id, 9)]);
    }

    #[test]
    fn a_lapsed_lease_does_not_hold_a_full_stream_up() {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 1, 1_000);
        consumers.hand_to_stream(id, vec![delivery(1, 1, 5)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        assert_eq!(consumers.first_lease_end(), Some(LEASE_END));
        assert_eq!(wanted(&mut consumers, LEASE_END), [(id, 1)]);
        assert_eq!(consumers.held_count(), 0);
    }

    #[test]
    fn an_item_reserved_anew_leaves_its_old_stream() {
        let mut consumers = Consumers::default();
        let slow = stream(&mut consumers, 2, 1_000);
        let quick = stream(&mut consumers, 2, 1_000);
        consumers.hand_to_stream(slow, vec![delivery(1, 1, 5)], NOW);
        assert_eq!(take(&mut consumers, slow), 1);
        consumers.hand_to_stream(quick, vec![delivery(1, 2, 5)], LEASE_END);
        assert_eq!(wanted(&mut consumers, LEASE_END), [(slow, 2), (quick, 1)]);
        assert_eq!(consumers.remove_stream(slow).len(), 0, "it has nothing to give back");
        assert_eq!(consumers.remove_stream(quick).len(), 1);
    }

    #[test]
    fn what_nobody_takes_comes_back() {
        let mut consumers = Consumers::default();
        assert_eq!(consumers.hand_to_stream(7, vec![delivery(1, 1, 5)], NOW).len(), 1);
        let (answer, answered) = oneshot::channel();
        let lease = Duration::from_secs(1);
        let call =
            Call { max_items: 1, lease, consumer: None, auto_commit: false, waits: true, answer };
        let id = consumers.add_call(call);
        drop(answered);
        assert_eq!(consumers.hand_to_call(id, vec![delivery(1, 1, 5)]).len(), 1);
    }

    #[test]
    fn the_least_loaded_stream_comes_first() {
        let mut consumers = Consumers::default();
        let a = stream(&mut consumers, 9, 1_000);
        let b = stream(&mut consumers, 9, 1_000);
        consumers.hand_to_stream(a, vec![delivery(1, 1, 5)], NOW);
        take(&mut consumers, a);
        assert_eq!(wanted(&mut consumers, NOW), [(b, 9), (a, 8)]);
    }
}
