//! The state of one open stream: held items, items waiting to be sent, and revoked items.

use std::{collections::hash_map::Entry, net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::{Notify, oneshot};

use super::{
    EngineError, MAX_ROUND_BYTES, STREAM_BATCH, coming::Coming, sent::Sent, stock::Terms,
    unsent::Unsent,
};
use crate::domain::{
    ConsumerName, Delivery, IdMap, ItemId, LeaseToken, Receipt, Timestamp,
    limits::{LARGEST_MAX_PAYLOAD_BYTES, MAX_BATCH},
};

/// A stream that has work is assigned more items once it has room for this part of its limits, or
/// for [`STREAM_BATCH`] items. Refills of a few items each would cost as much as large ones.
const ENOUGH_PART: usize = 4;
/// Approximate size in bytes of one message of deliveries, unless a single item is larger. Most
/// gRPC libraries by default refuse messages over 4 MiB, and small messages cost little more.
const FULL_MESSAGE_BYTES: usize = 1 << 20;
/// Where commits take long, a stream holds so many times the items that it may have in flight, and so many times the payload bytes and one
/// item.
const MOST_HELD: usize = 4;
/// Nothing is sent within the last part of its lease, one in this many: the item would arrive when
/// another consumer has it.
const MARGIN_PART: u32 = 10;
/// Upper bound of that part.
const MAX_MARGIN: Duration = Duration::from_secs(1);

/// An item that was handed to a stream and is not settled yet.
pub(in crate::engine) struct InFlight {
    pub(in crate::engine) receipt: Receipt,
    pub(in crate::engine) bytes: usize,
    /// Its place among the items sent on its stream, from 1; 0 until it is in a message for the connection.
    pub(in crate::engine) tag: u64,
    pub(in crate::engine) lease_end: Timestamp,
    pub(in crate::engine) previous_eligible_time: Timestamp,
    /// The lapsed lease under which the item was held before.
    pub(in crate::engine) former_lease: Option<LeaseToken>,
    /// When the item was handed out, which bounds how long its lease is renewed.
    pub(in crate::engine) since: Timestamp,
    /// The number of its commits that are being written: its consumer has finished with it if there is one.
    pub(super) commits: u32,
    /// True once its consumer has asked to settle it by its receipt.
    pub(super) named: bool,
}

impl InFlight {
    /// Returns an item that is reserved and was not sent.
    pub(in crate::engine) fn unsent(delivery: &Delivery, since: Timestamp) -> Self {
        Self {
            receipt: delivery.receipt.clone(),
            bytes: delivery.item.payload.len(),
            tag: 0,
            lease_end: delivery.lease_expire_time,
            previous_eligible_time: delivery.previous_eligible_time,
            former_lease: delivery.former_lease,
            since,
            commits: 0,
            named: false,
        }
    }

    /// Returns true once the item is in a message for the connection.
    pub(in crate::engine) fn is_sent(&self) -> bool {
        self.tag > 0
    }
}

/// The settings with which a stream was opened.
pub(in crate::engine) struct StreamSettings {
    pub(in crate::engine) max_in_flight: usize,
    pub(in crate::engine) max_in_flight_bytes: usize,
    pub(in crate::engine) lease: Duration,
    pub(in crate::engine) consumer: Option<ConsumerName>,
    pub(in crate::engine) peer: Option<SocketAddr>,
    /// When the stream was opened.
    pub(in crate::engine) since: Timestamp,
    pub(in crate::engine) auto_commit: bool,
    /// How long the broker renews the lease of one item, if it does.
    pub(in crate::engine) renewed_for: Option<Duration>,
    /// If true, the stream is told which items it no longer holds.
    pub(in crate::engine) tells_revoked: bool,
}

/// The reason why a stream no longer holds an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RevokeReason {
    /// The item was deleted.
    Deleted,
    /// The lease ended.
    Lapsed,
    /// The lease ended because it could not be extended any further.
    MaxLease,
    /// Another call ended the reservation.
    Cancelled,
}

/// An item that a stream no longer holds although its consumer did not settle it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revoked {
    /// The reservation that ended.
    pub receipt: Receipt,
    /// The reason.
    pub reason: RevokeReason,
}

/// Returns true if too little is left of a lease to send its item.
pub(in crate::engine) fn is_too_late(
    now: Timestamp,
    lease: Duration,
    lease_end: Timestamp,
) -> bool {
    sent_by(lease, lease_end) <= now
}

/// Returns the time by which an item has to be sent.
fn sent_by(lease: Duration, lease_end: Timestamp) -> Timestamp {
    Timestamp(lease_end.0 - (lease / MARGIN_PART).min(MAX_MARGIN).as_millis() as i64)
}

/// Returns the item of a reservation, if it is held under that one.
pub(super) fn held<'a>(
    in_flight: &'a mut IdMap<ItemId, InFlight>,
    receipt: &Receipt,
) -> Option<&'a mut InFlight> {
    in_flight.get_mut(&receipt.item).filter(|held| held.receipt.token == receipt.token)
}

pub(super) struct Stream {
    pub(super) settings: StreamSettings,
    /// Assigned items that have not been taken yet.
    pub(super) inbox: Unsent,
    /// True if the stream waits for items. A stream that does not wait is assigned nothing: an item
    /// must not wait in one stream's buffer while another consumer is idle. A stream whose client
    /// does not read is not polled, and would wait forever: see [`Self::assigned`].
    pub(super) hungry: bool,
    pub(super) in_flight: IdMap<ItemId, InFlight>,
    bytes_in_flight: usize,
    /// The number and the payload bytes of the items in flight whose commits are being written.
    committing: usize,
    bytes_committing: usize,
    /// What is being stored as reserved for the stream.
    pub(super) coming: Coming,
    /// No lease of an item in flight ends before this time.
    pub(super) first_lease_end: Timestamp,
    /// The round in which the stream was last assigned items. Breaks ties between equally loaded
    /// streams.
    pub(super) served: u64,
    /// The items that were sent, those committed at once left out.
    pub(super) sent: Sent,
    /// How many items were sent.
    pub(super) delivered: u64,
    /// How many of them were committed.
    pub(super) committed: u64,
    /// Revoked items that the stream has not been told of yet.
    pub(super) revoked: Vec<Revoked>,
    pub(super) wake: Arc<Notify>,
    pub(super) end: Option<EngineError>,
    /// True if the stream takes part in the running round.
    pub(super) in_round: bool,
    /// How often items were taken back from the stream that had not been sent.
    pub(super) taken_back: u64,
    /// Dropped when nothing more is delivered to a stream whose flow is zero.
    pub(super) halt: Option<oneshot::Sender<()>>,
    /// True if the stream is assigned nothing more and ends when it holds nothing.
    retiring: bool,
}

/// A lease end that never comes.
const NEVER: Timestamp = Timestamp(i64::MAX);

impl StreamSettings {
    /// Returns what an item has to be reserved for.
    pub(super) fn terms(&self) -> Terms {
        Terms { lease: self.lease, consumer: self.consumer.clone() }
    }
}

impl Stream {
    pub(super) fn new(
        settings: StreamSettings,
        inbox: Unsent,
        wake: Arc<Notify>,
        round: u64,
    ) -> Self {
        Self {
            settings,
            inbox,
            hungry: false,
            in_flight: IdMap::default(),
            bytes_in_flight: 0,
            committing: 0,
            bytes_committing: 0,
            coming: Coming::default(),
            first_lease_end: NEVER,
            served: round,
            sent: Sent::default(),
            delivered: 0,
            committed: 0,
            revoked: Vec::new(),
            wake,
            end: None,
            in_round: false,
            taken_back: 0,
            halt: None,
            retiring: false,
        }
    }

    /// Returns true if the stream can be assigned items: it has neither ended nor retired.
    pub(super) fn goes_on(&self) -> bool {
        self.end.is_none() && !self.retiring
    }

    /// Stops assigning items to the stream.
    pub(super) fn retire(&mut self) {
        self.retiring = true;
        self.wake.notify_one();
    }

    /// Returns true if the stream is to end, holds nothing, and takes part in no running round.
    pub(super) fn has_retired(&self) -> bool {
        self.retiring && !self.in_round && self.in_flight.is_empty() && self.inbox.is_empty()
    }

    /// Ends the stream's part in a round.
    pub(super) fn round_ended(&mut self) {
        self.in_round = false;
        self.tell_if_halted();
        if self.retiring {
            self.wake.notify_one();
        }
    }

    /// Returns the number of items that the consumer works on.
    pub(super) fn load(&self) -> usize {
        self.in_flight.len() - self.committing
    }

    /// Returns its place among those that want items: the lowest comes first.
    pub(super) fn rank(&self) -> (usize, usize, u64) {
        let coming = self.coming.items;
        (self.load() + coming, self.in_flight.len() + coming, self.served)
    }

    /// Returns how many more items the stream can be assigned. An item whose commit is being written takes no place, as long as there
    /// are not too many of them.
    pub(super) fn room(&self) -> usize {
        let (most, coming) = (self.settings.max_in_flight, self.coming.items);
        let room = most.saturating_sub(self.load() + coming);
        room.min((most * MOST_HELD).saturating_sub(self.in_flight.len() + coming))
    }

    /// Returns the same for payload bytes.
    fn room_bytes(&self) -> usize {
        let (most, coming) = (self.settings.max_in_flight_bytes, self.coming.bytes);
        let room = most.saturating_sub(self.bytes_in_flight - self.bytes_committing + coming);
        room.min(most.saturating_mul(MOST_HELD).saturating_sub(self.bytes_in_flight + coming))
    }

    fn is_full(&self) -> bool {
        self.room() == 0 || self.room_bytes() == 0
    }

    /// Returns true if less than half of the stream's places, or bytes, are free.
    pub(super) fn is_half_full(&self) -> bool {
        self.room() < self.settings.max_in_flight.div_ceil(2)
            || self.room_bytes() < self.settings.max_in_flight_bytes.div_ceil(2)
    }

    /// Notes that the writing of a commit of a reservation begins, if the stream holds it. Returns
    /// whether that makes room.
    pub(super) fn commit_begins(&mut self, receipt: &Receipt) -> Option<bool> {
        let held = held(&mut self.in_flight, receipt)?;
        held.commits += 1;
        let is_first = held.commits == 1;
        if is_first {
            self.committing += 1;
            self.bytes_committing += held.bytes;
        }
        Some(is_first)
    }

    /// Notes that the writing of a commit of a reservation has failed.
    pub(super) fn commit_fails(&mut self, receipt: &Receipt) {
        let held = held(&mut self.in_flight, receipt).filter(|held| held.commits > 0);
        let Some(held) = held else { return };
        held.commits -= 1;
        if held.commits == 0 {
            self.committing -= 1;
            self.bytes_committing -= held.bytes;
        }
    }

    /// Returns true if the stream can be assigned items now.
    pub(super) fn demands(&self) -> bool {
        self.hungry && self.goes_on() && !self.is_full()
    }

    /// Returns the most bytes that the stream can be assigned in one round, and whether a first
    /// item may exceed them. A round assigns no more than fits in a message, so that the rest is
    /// left to the first idle consumer, and never more than the stream may hold.
    pub(super) fn wanted_bytes(&self) -> (usize, bool) {
        let left = self.room_bytes();
        if self.load() + self.coming.items == 0
            || left >= MAX_ROUND_BYTES + LARGEST_MAX_PAYLOAD_BYTES
        {
            (left.min(MAX_ROUND_BYTES), true)
        } else {
            (left, false)
        }
    }

    /// Returns true if the stream does not hold all it may, which is at least so many items and bytes. They are not committed when they are handed out.
    pub(super) fn has_places(&self, items: usize, bytes: usize) -> bool {
        let StreamSettings { max_in_flight, max_in_flight_bytes, auto_commit, .. } = self.settings;
        !auto_commit && !self.is_full() && max_in_flight >= items && max_in_flight_bytes >= bytes
    }

    /// Returns true if the stream can receive an item with so many bytes of payload.
    pub(super) fn has_room_for(&self, payload: usize) -> bool {
        let (max_bytes, may_exceed) = self.wanted_bytes();
        self.goes_on() && !self.is_full() && (payload <= max_bytes || may_exceed)
    }

    /// Returns how many of these items, from the first on, the stream has room for. There may be less room than when they were asked
    /// for: what was being committed may count again, and others may have come meanwhile.
    pub(super) fn fitting(&self, deliveries: &[Delivery]) -> usize {
        let room = self.room_bytes();
        let may_exceed = room > 0 && self.load() == 0;
        let mut bytes: usize = 0;
        let fits = |(at, delivery): &(usize, &Delivery)| {
            bytes = bytes.saturating_add(delivery.item.payload.len());
            bytes <= room || *at == 0 && may_exceed
        };
        deliveries.iter().take(self.room()).enumerate().take_while(fits).count()
    }

    /// Returns true if the stream has work and little room for more.
    pub(super) fn is_well_stocked(&self) -> bool {
        let StreamSettings { max_in_flight: items, max_in_flight_bytes: bytes, .. } = self.settings;
        let little = self.room() < STREAM_BATCH.min(items / ENOUGH_PART)
            || self.room_bytes() < bytes / ENOUGH_PART;
        self.load() > 0 && little
    }

    /// Notes that a round has assigned items to the stream. `had_items`: its inbox was not empty
    /// before. Until the stream is polled again it gets at most one more round, which is reserved
    /// while this one is sent. A stream with `auto_commit` gets none, because items that are
    /// committed already would be lost with the stream, and no stream does if too much is unsent.
    pub(super) fn assigned(&mut self, had_items: bool) {
        self.inbox.tell();
        if had_items || self.settings.auto_commit || self.inbox.all().is_over() {
            self.hungry = false;
        }
    }

    /// Assigns an item to the stream.
    pub(super) fn hand(&mut self, delivery: Delivery, now: Timestamp) {
        if !self.settings.auto_commit {
            let held = InFlight::unsent(&delivery, now);
            self.bytes_in_flight += held.bytes;
            self.first_lease_end = self.first_lease_end.min(held.lease_end);
            self.in_flight.insert(delivery.item.id, held);
        }
        self.inbox.add(delivery);
    }

    /// Removes an item from the stream.
    pub(super) fn remove(&mut self, item: ItemId) -> Option<InFlight> {
        let gone = self.take_out(item)?;
        self.remove_unsent(&gone);
        Some(gone)
    }

    /// Removes the item of a reservation, if the stream holds it under that one.
    pub(super) fn remove_held(&mut self, receipt: &Receipt) -> Option<InFlight> {
        let Entry::Occupied(held) = self.in_flight.entry(receipt.item) else { return None };
        let gone = (held.get().receipt.token == receipt.token).then(|| held.remove())?;
        self.taken_out(&gone);
        self.remove_unsent(&gone);
        Some(gone)
    }

    /// Removes an item from the inbox, if it is there.
    fn remove_unsent(&mut self, gone: &InFlight) {
        if !gone.is_sent() {
            self.inbox.retain(|delivery| delivery.item.id != gone.receipt.item);
        }
    }

    /// Removes an item that is not in the inbox, or is removed from the inbox by the caller.
    pub(super) fn take_out(&mut self, item: ItemId) -> Option<InFlight> {
        let gone = self.in_flight.remove(&item)?;
        self.taken_out(&gone);
        Some(gone)
    }

    /// Notes that an item is no longer in flight.
    fn taken_out(&mut self, gone: &InFlight) {
        self.sent.remove(gone.tag);
        self.bytes_in_flight -= gone.bytes;
        if gone.commits > 0 {
            self.committing -= 1;
            self.bytes_committing -= gone.bytes;
        }
        if self.in_flight.is_empty() {
            self.first_lease_end = NEVER;
            if self.retiring {
                self.wake.notify_one();
            }
        }
    }

    /// Records a revoked item, and wakes the stream to announce it.
    pub(super) fn revoke(&mut self, receipt: Receipt, reason: RevokeReason) {
        if self.settings.tells_revoked && self.end.is_none() {
            self.revoked.push(Revoked { receipt, reason });
            self.wake.notify_one();
        }
    }

    /// Returns the next message, and the items that are not sent because their leases have ended or
    /// are about to end, or because they have expired. After a pause of the whole broker another
    /// consumer may have the items whose leases have ended.
    pub(super) fn next_message(&mut self, now: Timestamp) -> (Vec<Delivery>, Vec<InFlight>) {
        let mut message = Vec::with_capacity(self.inbox.len().min(MAX_BATCH));
        let mut late = Vec::new();
        let mut bytes = 0;
        while let Some(next) = self.inbox.first() {
            let id = next.item.id;
            let held = self.in_flight.get_mut(&id);
            let lease_end = held.as_ref().map(|held| held.lease_end);
            let is_late = next.item.has_expired(now)
                || lease_end.is_some_and(|end| is_too_late(now, self.settings.lease, end));
            bytes += if is_late { 0 } else { next.item.message_bytes() };
            // A message holds at most as many items as one settle may name, so that a consumer can
            // settle a whole message in one call.
            let is_full = bytes > FULL_MESSAGE_BYTES || message.len() == MAX_BATCH;
            if !is_late && is_full && !message.is_empty() {
                break;
            }
            let Some(mut delivery) = self.inbox.take_first() else { break };
            if is_late {
                late.extend(self.take_out(id));
                continue;
            }
            if let Some(held) = held {
                held.tag = self.sent.add(id);
                delivery.tag = held.tag;
                delivery.lease_expire_time = held.lease_end;
            }
            message.push(delivery);
        }
        self.inbox.looked_at();
        self.tell_if_halted();
        self.delivered += message.len() as u64;
        if self.settings.auto_commit {
            self.committed += message.len() as u64;
        }
        (message, late)
    }

    /// Returns the receipts of items that were sent and whose leases have ended by `now`.
    pub(super) fn lapsing(&self, now: Timestamp) -> impl Iterator<Item = Receipt> {
        let any = self.first_lease_end <= now;
        let held = any.then(|| self.in_flight.values()).into_iter().flatten();
        held.filter(move |held| held.is_sent() && held.lease_end <= now)
            .map(|held| held.receipt.clone())
    }

    /// Takes out the items whose leases have ended, and unsent items that it is too late to send. A
    /// lapsed lease occupies no place, because its consumer may be busy with the item forever. What
    /// was never sent has to be rolled back while its lease lasts: afterwards any reserve finds a
    /// lapsed lease, and counts a failed attempt.
    pub(super) fn take_lapsed(&mut self, now: Timestamp) -> Vec<InFlight> {
        if self.next_lapse().is_none_or(|next| next > now) {
            return Vec::new();
        }
        let lease = self.settings.lease;
        let is_over = |held: &InFlight| {
            held.lease_end <= now || (!held.is_sent() && is_too_late(now, lease, held.lease_end))
        };
        let lapsed = self.in_flight.iter().filter(|(_, held)| is_over(held));
        let lapsed: Vec<ItemId> = lapsed.map(|(item, _)| *item).collect();
        let lapsed: Vec<_> = lapsed.into_iter().filter_map(|item| self.take_out(item)).collect();
        if lapsed.iter().any(|held| !held.is_sent()) {
            self.inbox.retain(|delivery| self.in_flight.contains_key(&delivery.item.id));
        }
        let ends = self.in_flight.values().map(|held| held.lease_end);
        self.first_lease_end = ends.min().unwrap_or(NEVER);
        for held in lapsed.iter().filter(|held| held.is_sent()) {
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

    /// Takes out the items that were never sent. Committed items can only be sent, and stay.
    pub(super) fn take_unsent(&mut self) -> Vec<InFlight> {
        let unsent = self.in_flight.iter().filter(|(_, held)| !held.is_sent());
        let unsent: Vec<ItemId> = unsent.map(|(item, _)| *item).collect();
        if !unsent.is_empty() {
            self.inbox.clear(); // no item of this stream is committed already
        }
        unsent.into_iter().filter_map(|item| self.take_out(item)).collect()
    }

    /// Returns when [`Self::take_lapsed`] has something to do next.
    pub(super) fn next_lapse(&self) -> Option<Timestamp> {
        // The first item of the inbox was assigned first, so that its lease ends first. Items that
        // are committed already are not in flight.
        let unsent = self.inbox.first().and_then(|next| self.in_flight.get(&next.item.id));
        let unsent = unsent.map(|held| sent_by(self.settings.lease, held.lease_end));
        let end = (self.first_lease_end != NEVER).then_some(self.first_lease_end);
        unsent.into_iter().chain(end).min()
    }

    /// Takes out all items the stream holds.
    pub(super) fn take_all(&mut self) -> Vec<InFlight> {
        if !self.settings.auto_commit {
            self.inbox.clear(); // committed items can only be sent
        }
        (self.bytes_in_flight, self.committing, self.bytes_committing) = (0, 0, 0);
        self.first_lease_end = NEVER;
        self.sent.clear();
        std::mem::take(&mut self.in_flight).into_values().collect()
    }
}
