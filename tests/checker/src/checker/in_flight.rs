//! What a stream holds: no more items and bytes than it may.

use super::{
    Checker,
    key::Key,
    state::{Kind, Receipt, Reservation},
};
use crate::{
    history::{CallId, Request},
    rules::Rule,
};

/// A stream holds at most so many times the items that it may have in flight, those included whose commits are being written.
pub(super) const MOST_HELD: usize = 2;
/// Most of the cases that wait for the outcome of commits.
const WAITING: usize = 100;

/// A stream was sent an item and held too many, unless commits had freed places by then.
pub(super) struct Overfull {
    /// How many it may hold.
    most: usize,
    /// How many it held for certain.
    certain: usize,
    /// The receipts by which commits were under way.
    open: Vec<Key>,
    queue: String,
    events: Vec<u64>,
}

impl Checker {
    /// Counts what a stream holds for certain.
    pub(super) fn check_in_flight(&mut self, id: CallId, most: usize, most_bytes: u64) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let mut held = std::mem::take(&mut call.held);
        held.retain(|receipt| self.newest(*receipt).is_some());
        let all = held.iter().filter_map(|receipt| self.receipts.get(receipt));
        let may_be_free = all.clone().filter(|of| of.settling).count();
        let certain: Vec<&Receipt> =
            all.filter(|of| !of.settling && self.holds_for_certain(of)).collect();
        let events: Vec<u64> = certain.iter().take(8).map(|of| of.delivered.event).collect();
        let (count, bytes) = (certain.len(), certain.iter().map(|of| of.bytes as u64).sum::<u64>());
        let Some(call) = self.calls.get_mut(&id) else { return };
        (call.held, call.may_be_free) = (held, may_be_free);
        // A single item may be larger.
        let wrong = if count > most {
            Some(format!("stream {id} holds {count}, {most} are allowed"))
        } else if most_bytes > 0 && count > 1 && bytes > most_bytes {
            Some(format!(
                "stream {id} holds {bytes} bytes in {count} items, {most_bytes} are allowed"
            ))
        } else {
            None
        };
        if let Some(explanation) = wrong {
            let Request::Consume(consume) = &call.request else { return };
            let (name, start) = (consume.queue.clone(), call.start.event);
            self.violate(Rule::Limits, None, &name, explanation, &[&[start], &events[..]].concat());
        }
    }

    /// Returns the reservation of a receipt, if it is the newest of its item and was not settled.
    fn newest(&self, key: Key) -> Option<&Reservation> {
        let receipt = self.receipts.get(&key).filter(|receipt| receipt.ended.is_none())?;
        self.items.get(&receipt.item)?.last.as_ref().filter(|last| last.receipt == key)
    }

    /// Returns whether the newest reservation of an item takes a place, and bytes, of its stream, unless a settle has freed them.
    fn holds_for_certain(&self, of: &Receipt) -> bool {
        let Some(item) = self.items.get(&of.item) else { return false };
        let lasts = item.last.as_ref().is_some_and(|last| {
            last.lease > self.now.at + self.options.clock
                && self.clock_stepped <= last.delivered.event
        });
        lasts && !of.may_be_free && !self.may_have_vanished(item)
    }

    /// Counts what a stream holds, with what may be committed by now.
    pub(super) fn check_held(&mut self, id: CallId, in_flight: usize) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let Request::Consume(consume) = &call.request else { return };
        let (queue, start) = (consume.queue.clone(), call.start.event);
        let mut held = std::mem::take(&mut call.held);
        held.retain(|receipt| self.newest(*receipt).is_some());
        let is_held = |receipt: &&Key| {
            self.receipts.get(receipt).is_some_and(|of| self.holds_for_certain(of))
        };
        let (mut certain, mut open, mut events) = (0, Vec::new(), vec![start, self.now.event]);
        for receipt in held.iter().filter(is_held) {
            let Some(of) = self.receipts.get(receipt) else { continue };
            if !of.settling {
                certain += 1;
            } else if self.is_being_committed(of) {
                open.push(*receipt);
            } else {
                continue;
            }
            events.push(of.delivered.event);
        }
        if let Some(call) = self.calls.get_mut(&id) {
            call.held = held;
        }
        let most = in_flight * MOST_HELD;
        if certain + open.len() > most && self.overfull.len() < WAITING {
            events.truncate(10);
            self.overfull.push(Overfull { most, certain, open, queue, events });
        }
    }

    /// Returns whether commits of an item are under way, or have an unknown outcome, and nothing else that ends its reservation.
    fn is_being_committed(&self, of: &Receipt) -> bool {
        let Some(item) = self.items.get(&of.item) else { return false };
        let mut enders = item.settles.iter().filter(|settle| settle.kind.ends()).peekable();
        enders.peek().is_some() && enders.all(|settle| settle.kind == Kind::Commit)
    }

    /// Commits by a receipt may have freed its place, at any time.
    pub(super) fn commit_may_have_freed(&mut self, receipt: Key) {
        self.overfull.retain_mut(|case| {
            case.open.retain(|open| *open != receipt);
            case.certain + case.open.len() > case.most
        });
    }

    /// Commits by a receipt have had no effect: its item took a place of its stream all the time.
    pub(super) fn commit_has_freed_nothing(&mut self, receipt: Key) {
        let now = self.now.event;
        for case in &mut self.overfull {
            let before = case.open.len();
            case.open.retain(|open| *open != receipt);
            if case.open.len() < before {
                case.certain += 1;
                case.events.push(now);
            }
        }
        for case in
            self.overfull.extract_if(.., |case| case.certain > case.most).collect::<Vec<_>>()
        {
            let Overfull { certain, most, queue, events, .. } = case;
            let explanation = format!(
                "a stream held {certain} with those that were being committed, {most} are allowed"
            );
            self.violate(Rule::Limits, None, &queue, explanation, &events);
        }
    }
}
