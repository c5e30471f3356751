//! What is on its way to streams: items that are being stored as reserved for a stream take places of it already.

use super::{Claimant, Consumers};
use crate::domain::{Delivery, Timestamp};

/// What is on its way to a stream.
#[derive(Clone, Copy, Default)]
pub(in crate::engine) struct Coming {
    pub(in crate::engine) items: usize,
    /// Bytes of their payloads.
    pub(in crate::engine) bytes: usize,
}

impl Consumers {
    /// Notes that items are being stored as reserved for a stream.
    pub(in crate::engine) fn begin_coming(&mut self, claimant: &Claimant, coming: Coming) {
        if let Some(stream) = self.streams.get_mut(&claimant.id) {
            stream.coming.items += coming.items;
            stream.coming.bytes += coming.bytes;
        }
    }

    /// Notes that they are stored, or will not be.
    pub(in crate::engine) fn end_coming(&mut self, claimant: &Claimant, coming: Coming) {
        if let Some(stream) = self.streams.get_mut(&claimant.id) {
            stream.coming.items -= coming.items;
            stream.coming.bytes -= coming.bytes;
        }
    }

    /// Hands a stream items that were reserved for it outside of a round. Returns those for which the
    /// stream has no room any more.
    pub(in crate::engine) fn hand_pushed(
        &mut self,
        claimant: &Claimant,
        deliveries: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<Delivery> {
        if deliveries.is_empty() {
            return deliveries;
        }
        let payload = deliveries.iter().map(|delivery| delivery.item.payload.len()).sum();
        let stream = self.streams.get(&claimant.id);
        if !stream.is_some_and(|stream| stream.has_room_for(payload))
            || self.is_overtaking(claimant)
        {
            return deliveries;
        }
        self.round += 1; // the next item is another stream's, as after a round
        self.hand_to_stream(claimant.id, deliveries, now)
    }
}
