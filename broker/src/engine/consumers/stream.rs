//! One open stream: what it holds, what waits to be sent on it, and what it has lost.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::sync::Notify;

use super::{EngineError, MAX_BATCH, MAX_MESSAGE_BYTES, STREAM_BATCH};
use crate::domain::{ConsumerName, Delivery, ItemId, Receipt, Timestamp};

/// A stream that has items to work on is given more once it has room for this part of what it may
/// hold, or for [`STREAM_BATCH`] items: refills of a few items each would cost as much as large ones.
const ENOUGH_PART: usize = 4;
/// About as many bytes as one message of deliveries has, unless a single item is larger: most gRPC
/// libraries refuse messages over 4 MiB unless told otherwise, and small ones cost little more.
const FULL_MESSAGE_BYTES: usize = 1 << 20;
/// No broker can be set to take larger ones.
const LARGEST_PAYLOAD: usize = 16 << 20;
/// Nothing is sent within the last part of its lease, 1 of so many: it would arrive when somebody else has the item.
const MARGIN_PART: u32 = 10;
/// The longest such part.
const MAX_MARGIN: Duration = Duration::from_secs(1);

/// An item handed to a stream and not settled yet.
pub(in crate::engine) struct InFlight {
    pub(in crate::engine) receipt: Receipt,
    pub(in crate::engine) bytes: usize,
    /// False until it is in a message for the connection.
    pub(in crate::engine) sent: bool,
    pub(in crate::engine) lease_end: Timestamp,
    pub(in crate::engine) previous_eligible_time: Timestamp,
    /// When it was handed out: bounds how long it is renewed.
    pub(in crate::engine) since: Timestamp,
}

/// What a stream asked for when it was opened.
pub(in crate::engine) struct StreamSettings {
    pub(in crate::engine) max_in_flight: usize,
    pub(in crate::engine) max_in_flight_bytes: usize,
    pub(in crate::engine) lease: Duration,
    pub(in crate::engine) consumer: Option<ConsumerName>,
    pub(in crate::engine) auto_commit: bool,
    /// How long the broker prolongs the lease of one item, if it does.
    pub(in crate::engine) renewed_for: Option<Duration>,
    /// Tell it which items it no longer holds.
    pub(in crate::engine) tells_revoked: bool,
}

/// Why a stream no longer holds an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RevokeReason {
    /// The item was deleted.
    Deleted,
    /// The lease ended.
    Lapsed,
    /// The lease ended as it could not be prolonged any further.
    MaxLease,
    /// Another call ended the reservation.
    Cancelled,
}

/// An item that a stream no longer holds, though its consumer did not settle it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revoked {
    /// The reservation that has ended.
    pub receipt: Receipt,
    /// Why.
    pub reason: RevokeReason,
}

/// True if there is too little left of a lease for its item to be sent.
pub(in crate::engine) fn is_too_late(
    now: Timestamp,
    lease: Duration,
    lease_end: Timestamp,
) -> bool {
    now + (lease / MARGIN_PART).min(MAX_MARGIN) >= lease_end
}

pub(super) struct Stream {
    pub(super) settings: StreamSettings,
    /// Dealt to it, not yet taken.
    pub(super) inbox: VecDeque<Delivery>,
    /// It waits for items right now. Nothing is dealt to a stream that does not: an item must not
    /// wait in one stream's buffer while another consumer is idle.
    pub(super) hungry: bool,
    pub(super) in_flight: HashMap<ItemId, InFlight>,
    pub(super) bytes_in_flight: usize,
    /// No lease in flight ends before this.
    pub(super) first_lease_end: Timestamp,
    /// When it was last dealt something, in rounds: breaks ties between equally loaded streams.
    pub(super) served: u64,
    /// What it has lost and was not told of yet.
    pub(super) revoked: Vec<Revoked>,
    pub(super) wake: Arc<Notify>,
    pub(super) end: Option<EngineError>,
    /// It takes part in the round that is running.
    pub(super) in_round: bool,
    /// It is dealt nothing more, and ends when it holds nothing.
    retiring: bool,
}

/// A lease end that never comes.
const NEVER: Timestamp = Timestamp(i64::MAX);

impl Stream {
    pub(super) fn new(settings: StreamSettings, wake: Arc<Notify>, round: u64) -> Self {
        Self {
            settings,
            inbox: VecDeque::new(),
            hungry: false,
            in_flight: HashMap::new(),
            bytes_in_flight: 0,
            first_lease_end: NEVER,
            served: round,
            revoked: Vec::new(),
            wake,
            end: None,
            in_round: false,
            retiring: false,
        }
    }

    /// It is dealt items until it ends or retires.
    pub(super) fn goes_on(&self) -> bool {
        self.end.is_none() && !self.retiring
    }

    /// Deals it nothing more.
    pub(super) fn retire(&mut self) {
        self.retiring = true;
        self.wake.notify_one();
    }

    /// It is to end, holds nothing, and no running round has anything for it.
    pub(super) fn has_retired(&self) -> bool {
        self.retiring && !self.in_round && self.in_flight.is_empty() && self.inbox.is_empty()
    }

    /// The round it took part in is over.
    pub(super) fn round_ended(&mut self) {
        self.in_round = false;
        if self.retiring {
            self.wake.notify_one();
        }
    }

    fn is_full(&self) -> bool {
        self.in_flight.len() >= self.settings.max_in_flight
            || self.bytes_in_flight >= self.settings.max_in_flight_bytes
    }

    /// It could be dealt items now.
    pub(super) fn demands(&self) -> bool {
        self.hungry && self.goes_on() && !self.is_full()
    }

    /// Most bytes it can be dealt in one look, and whether a first item may exceed them: no more than
    /// fits a message, for the rest is better left to whoever comes first, and never more than it may hold.
    pub(super) fn wanted_bytes(&self) -> (usize, bool) {
        let left = self.settings.max_in_flight_bytes.saturating_sub(self.bytes_in_flight);
        if self.in_flight.is_empty() || left >= MAX_MESSAGE_BYTES + LARGEST_PAYLOAD {
            (left.min(MAX_MESSAGE_BYTES), true)
        } else {
            (left, false)
        }
    }

    /// It has work, and little room for more.
    pub(super) fn is_well_stocked(&self) -> bool {
        let StreamSettings { max_in_flight: items, max_in_flight_bytes: bytes, .. } = self.settings;
        let room = items.saturating_sub(self.in_flight.len());
        let room_bytes = bytes.saturating_sub(self.bytes_in_flight);
        let little =
            room < STREAM_BATCH.min(items / ENOUGH_PART) || room_bytes < bytes / ENOUGH_PART;
        !self.in_flight.is_empty() && little
    }

    /// Puts an item into its hands.
    pub(super) fn hand(&mut self, delivery: Delivery, now: Timestamp) {
        if !self.settings.auto_commit {
            let bytes = delivery.item.payload.len();
            self.bytes_in_flight += bytes;
            self.first_lease_end = self.first_lease_end.min(delivery.lease_expire_time);
            let held = InFlight {
                receipt: delivery.receipt.clone(),
                bytes,
                sent: false,
                lease_end: delivery.lease_expire_time,
                previous_eligible_time: delivery.previous_eligible_time,
                since: now,
            };
            self.in_flight.insert(delivery.item.id, held);
        }
        self.inbox.push_back(delivery);
    }

    /// Takes an item out of its hands.
    pub(super) fn remove(&mut self, item: ItemId) -> Option<InFlight> {
        let gone = self.in_flight.remove(&item)?;
        self.bytes_in_flight -= gone.bytes;
        if self.in_flight.is_empty() {
            self.first_lease_end = NEVER;
            if self.retiring {
                self.wake.notify_one();
            }
        }
        if !gone.sent {
            self.inbox.retain(|delivery| delivery.item.id != item);
        }
        Some(gone)
    }

    /// Notes that it has lost an item, and wakes it to hear so.
    pub(super) fn revoke(&mut self, receipt: Receipt, reason: RevokeReason) {
        if self.settings.tells_revoked && self.end.is_none() {
            self.revoked.push(Revoked { receipt, reason });
            self.wake.notify_one();
        }
    }

    /// The next message, and what is not sent any more because its lease is about to end, or has
    /// ended: after a pause of the whole broker somebody else may have the item.
    pub(super) fn next_message(&mut self, now: Timestamp) -> (Vec<Delivery>, Vec<InFlight>) {
        let (mut message, mut late) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        while let Some(mut delivery) = self.inbox.pop_front() {
            let id = delivery.item.id;
            if let Some(held) = self.in_flight.get(&id)
                && is_too_late(now, self.settings.lease, held.lease_end)
            {
                late.extend(self.remove(id));
                continue;
            }
            bytes += delivery.item.message_bytes();
            // No more than one settle may name, so that a consumer can settle a message as it came.
            if !message.is_empty() && (bytes > FULL_MESSAGE_BYTES || message.len() == MAX_BATCH) {
                self.inbox.push_front(delivery);
                break;
            }
            if let Some(held) = self.in_flight.get_mut(&id) {
                held.sent = true;
                delivery.lease_expire_time = held.lease_end;
            }
            message.push(delivery);
        }
        (message, late)
    }

    /// Takes out what it holds under leases that have ended. A lapsed lease holds no place: its
    /// consumer may be busy with the item for ever.
    pub(super) fn take_lapsed(&mut self, now: Timestamp) -> Vec<InFlight> {
        if self.first_lease_end > now {
            return Vec::new();
        }
        let lapsed = self.in_flight.iter().filter(|(_, held)| held.lease_end <= now);
        let lapsed: Vec<ItemId> = lapsed.map(|(item, _)| *item).collect();
        let lapsed: Vec<_> = lapsed.into_iter().filter_map(|item| self.remove(item)).collect();
        let ends = self.in_flight.values().map(|held| held.lease_end);
        self.first_lease_end = ends.min().unwrap_or(NEVER);
        for held in lapsed.iter().filter(|held| held.sent) {
            let longest = self.settings.renewed_for;
            let reason = if longest.is_some_and(|longest| held.since + longest <= now) {
                RevokeReason::MaxLease
            } else {
                RevokeReason::Lapsed
            };
            self.revoke(held.receipt.clone(), reason);
        }
        lapsed
    }

    /// When the first lease ends.
    pub(super) fn next_lapse(&self) -> Option<Timestamp> {
        (self.first_lease_end != NEVER).then_some(self.first_lease_end)
    }

    /// Takes out all it holds.
    pub(super) fn take_all(&mut self) -> Vec<InFlight> {
        if !self.settings.auto_commit {
            self.inbox.clear(); // committed items can only be sent
        }
        self.bytes_in_flight = 0;
        self.first_lease_end = NEVER;
        std::mem::take(&mut self.in_flight).into_values().collect()
    }
}
