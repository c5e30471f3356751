//! The items that streams hold: what frees their places, when their leases end, and what their consumers are told.

use std::{collections::hash_map::Entry, time::Duration};

use super::{
    ConsumerId, Consumers,
    stream::{InFlight, RevokeReason, Stream, held},
};
use crate::domain::{ItemId, Receipt, Timestamp};

/// How long the announcement of a reservation that was found void is delayed. A settle through this
/// broker may have ended the reservation and be about to be answered.
pub(super) const DOUBT: Duration = Duration::from_secs(1);

/// A reservation that a stream no longer holds, for an unknown reason.
pub(super) struct Void {
    pub(super) stream: ConsumerId,
    receipt: Receipt,
    told: Timestamp,
}

impl Consumers {
    /// Frees the place of a reservation that was settled. Returns true if one of our streams held
    /// it.
    pub(in crate::engine) fn settled(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        self.free(receipt, now).is_some()
    }

    /// Does the same for a reservation that ended with a commit, which is counted.
    pub(in crate::engine) fn committed(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        let stream = self.free(receipt, now).and_then(|id| self.streams.get_mut(&id));
        stream.map(|stream| stream.committed += 1).is_some()
    }

    /// Frees the place of a reservation, for an item that is in stock. Returns the stream that held it.
    fn free(&mut self, receipt: &Receipt, now: Timestamp) -> Option<ConsumerId> {
        self.void.retain(|void| void.receipt != *receipt);
        let (stream, _) = self.take(receipt)?;
        self.serve(stream, now);
        Some(stream)
    }

    /// Notes that the writing of a commit of a reservation begins, during which it takes no place. Returns true if a stream has more room.
    pub(in crate::engine) fn commit_begins(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        let Some((id, stream)) = self.holder(receipt.item) else { return false };
        let Some(has_room) = stream.commit_begins(receipt) else { return false };
        self.serve(id, now);
        has_room
    }

    /// Notes that the writing of a commit of a reservation has failed.
    pub(in crate::engine) fn commit_fails(&mut self, receipt: &Receipt) {
        if let Some((_, stream)) = self.holder(receipt.item) {
            stream.commit_fails(receipt);
        }
    }

    /// Returns the stream that holds an item, under whichever reservation.
    pub(super) fn holder(&mut self, item: ItemId) -> Option<(ConsumerId, &mut Stream)> {
        let id = *self.holders.get(&item)?;
        Some((id, self.streams.get_mut(&id)?))
    }

    /// Frees the place of a reservation that was found void for an unknown reason, and schedules
    /// the announcement to its stream. Returns true if one of our streams held it.
    pub(in crate::engine) fn found_void(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        let Some((stream, held)) = self.take(receipt) else { return false };
        self.announce_void(stream, held, now);
        true
    }

    /// Frees the place of an item that was reserved again. Before the end of its lease it was settled, perhaps through this broker: then
    /// that is about to be noted here.
    pub(super) fn displaced(&mut self, id: ConsumerId, item: ItemId, now: Timestamp) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(held) = stream.remove(item) else { return };
        if held.lease_end > now {
            self.announce_void(id, held, now);
        } else if held.is_sent() {
            stream.revoke(held.receipt, RevokeReason::Lapsed);
        }
    }

    /// Schedules the announcement of a void reservation to its stream.
    fn announce_void(&mut self, id: ConsumerId, held: InFlight, now: Timestamp) {
        let announced = self.streams.get(&id).is_some_and(|stream| stream.settings.tells_revoked);
        if held.is_sent() && announced {
            self.void.push(Void { stream: id, receipt: held.receipt, told: now + DOUBT });
        }
    }

    /// Revokes an item that was deleted from the stream that holds it. Returns true if one of our
    /// streams held it.
    pub(in crate::engine) fn deleted(&mut self, item: ItemId) -> bool {
        self.stock.remove(item);
        let Some(id) = self.holders.remove(&item) else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let Some(held) = stream.remove(item) else { return false };
        if held.is_sent() {
            stream.revoke(held.receipt, RevokeReason::Deleted);
        }
        true
    }

    /// Takes a reservation from the stream that holds it.
    fn take(&mut self, receipt: &Receipt) -> Option<(ConsumerId, InFlight)> {
        let Entry::Occupied(holder) = self.holders.entry(receipt.item) else { return None };
        let held = self.streams.get_mut(holder.get())?.remove_held(receipt)?;
        Some((holder.remove(), held))
    }

    /// Records the new end of a lease. A renewal leaves a later one.
    pub(in crate::engine) fn extended(
        &mut self,
        receipt: &Receipt,
        until: Timestamp,
        is_renewal: bool,
    ) {
        if let Some((_, stream)) = self.holder(receipt.item)
            && let Some(held) = held(&mut stream.in_flight, receipt)
        {
            let least = if is_renewal { held.lease_end } else { until };
            held.lease_end = until.max(least);
            stream.first_lease_end = stream.first_lease_end.min(until);
        }
    }

    /// Returns the receipts of items that were sent and whose leases have ended by `now` as far as is
    /// known here.
    pub(in crate::engine) fn lapsing(&self, now: Timestamp) -> Vec<Receipt> {
        self.streams.values().flat_map(|stream| stream.lapsing(now)).collect()
    }

    /// Returns the receipts of all items held by streams.
    pub(in crate::engine) fn held(&self) -> Vec<Receipt> {
        self.streams
            .values()
            .flat_map(|s| s.in_flight.values())
            .map(|held| held.receipt.clone())
            .collect()
    }

    /// Returns the number of items held by streams.
    pub(in crate::engine) fn held_count(&self) -> usize {
        self.holders.len()
    }

    /// Returns the receipts of a stream whose leases are to be renewed `until` then: those sent that were handed
    /// out since `oldest`, and whose leases do not last as long already. An item that was never sent goes to another
    /// consumer when its lease ends, because the client does not read.
    pub(in crate::engine) fn to_renew(
        &self,
        id: ConsumerId,
        oldest: Timestamp,
        until: Timestamp,
    ) -> Vec<Receipt> {
        self.streams.get(&id).map_or_else(Vec::new, |stream| {
            stream
                .in_flight
                .values()
                .filter(|held| held.is_sent() && held.since >= oldest && held.lease_end < until)
                .map(|held| held.receipt.clone())
                .collect()
        })
    }

    /// Takes the items whose leases have ended out of the streams, and announces the void
    /// reservations that are due.
    pub(in crate::engine) fn take_lapsed(&mut self, now: Timestamp) -> Vec<InFlight> {
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

    /// Returns when [`Self::take_lapsed`] has something to do next.
    pub(in crate::engine) fn next_lapse(&self) -> Option<Timestamp> {
        let void = self.void.first().map(|void| void.told);
        self.streams.values().filter_map(Stream::next_lapse).chain(void).min()
    }
}
