//! What was sent on a stream, in its order: a consumer can commit all that it received up to one item.

use std::collections::BTreeMap;

use super::{
    ConsumerId, Consumers, InFlight,
    stream::{Stream, held},
};
use crate::domain::{ItemId, Receipt};

/// The items sent on a stream. The tag of an item is its place among them, from 1.
#[derive(Default)]
pub(super) struct Sent {
    /// How many there were.
    count: u64,
    /// Those that the stream holds and whose consumer has not asked to settle them, by tag.
    open: BTreeMap<u64, ItemId>,
}

impl Sent {
    /// Adds the next item. Returns its tag.
    pub(super) fn add(&mut self, item: ItemId) -> u64 {
        self.count += 1;
        self.open.insert(self.count, item);
        self.count
    }

    /// Removes an item that the stream holds no longer. An item that was not sent has the tag 0.
    pub(super) fn remove(&mut self, tag: u64) {
        self.open.remove(&tag);
    }

    /// Removes all.
    pub(super) fn clear(&mut self) {
        self.open.clear();
    }
}

impl Stream {
    /// See [`Consumers::include_up_to`].
    fn include_up_to(&mut self, tag: u64) -> Result<Vec<Receipt>, u64> {
        let Self { sent, in_flight, .. } = self;
        if tag == 0 || tag > sent.count {
            return Err(sent.count);
        }
        let later = sent.open.split_off(&(tag + 1));
        let included = std::mem::replace(&mut sent.open, later).into_values();
        let held = included.filter_map(|item| in_flight.get(&item));
        Ok(held.map(|held| held.receipt.clone()).collect())
    }
}

impl Consumers {
    /// Returns the reservations under which a stream holds the items that were sent up to this tag, in their order, to be committed. Left out
    /// are those that were [named](Self::name) or included before. If no such tag was sent, returns the last one as an error. A stream
    /// that has ended holds nothing.
    pub(in crate::engine) fn include_up_to(
        &mut self,
        id: ConsumerId,
        tag: u64,
    ) -> Result<Vec<Receipt>, u64> {
        self.streams.get_mut(&id).map_or(Ok(Vec::new()), |stream| stream.include_up_to(tag))
    }

    /// Notes that the commit of what [`Self::include_up_to`] returned has failed, so that the next one includes it too.
    pub(in crate::engine) fn exclude(&mut self, receipts: &[Receipt]) {
        self.each_held(receipts, |sent, held| {
            if held.tag > 0 && !held.named {
                sent.open.insert(held.tag, held.receipt.item);
            }
        });
    }

    /// Notes that the consumer asks to settle these reservations by their receipts.
    pub(in crate::engine) fn name(&mut self, receipts: &[Receipt]) {
        self.each_held(receipts, |sent, held| {
            held.named = held.tag > 0; // no consumer knows what was not sent
            sent.remove(held.tag);
        });
    }

    fn each_held(&mut self, receipts: &[Receipt], note: impl Fn(&mut Sent, &mut InFlight)) {
        for receipt in receipts {
            if let Some((_, Stream { sent, in_flight, .. })) = self.holder(receipt.item)
                && let Some(held) = held(in_flight, receipt)
            {
                note(sent, held);
            }
        }
    }
}

#[cfg(test)]
impl Stream {
    /// Checks that only what is held and was not named is open.
    pub(super) fn check_sent(&self) {
        for (tag, item) in &self.sent.open {
            let held = &self.in_flight[item];
            assert!(held.tag == *tag && !held.named, "{tag}");
        }
    }

    /// Returns what [`Self::include_up_to`] is to return, if it has not `included` it before.
    pub(super) fn to_include(
        &self,
        tag: u64,
        included: impl Fn(&Receipt) -> bool,
    ) -> Option<Vec<Receipt>> {
        let up_to = |held: &&InFlight| (1..=tag).contains(&held.tag);
        let open = |held: &&InFlight| !held.named && !included(&held.receipt);
        let mut held: Vec<_> = self.in_flight.values().filter(up_to).filter(open).collect();
        held.sort_by_key(|held| held.tag);
        let receipts = held.into_iter().map(|held| held.receipt.clone()).collect();
        (1..=self.sent.count).contains(&tag).then_some(receipts)
    }
}
