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

/// A stream holds at most so many times the items that it may have in flight, and the bytes besides one item, those included whose commits
/// are being written.
const MOST_HELD: u64 = 4;
/// Most of the cases that wait for the outcome of commits.
const WAITING: usize = 100;

/// A stream was sent an item and held too much, unless commits had freed places by then.
pub(super) struct Overfull {
    /// Items, or bytes.
    what: &'static str,
    /// How much it may hold.
    most: u64,
    /// How much it held for certain.
    certain: u64,
    /// The receipts by which commits were under way, and how much each of them stands for.
    open: Vec<(Key, u64)>,
    queue: String,
    events: Vec<u64>,
}

impl Overfull {
    /// Returns whether it was too much if none of the commits under way had freed anything.
    fn may_be_wrong(&self) -> bool {
        self.certain + self.open.iter().map(|(_, weight)| weight).sum::<u64>() > self.most
    }
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

    /// Counts what a stream holds that was just sent an item, with what may be committed by now.
    pub(super) fn check_held(&mut self, id: CallId, most_items: usize, most_bytes: u64) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let Request::Consume(consume) = &call.request else { return };
        let (queue, start, newest) = (consume.queue.clone(), call.start.event, self.now.event);
        let mut held = std::mem::take(&mut call.held);
        held.retain(|receipt| self.newest(*receipt).is_some());
        let case = |what, most| Overfull {
            what,
            most: MOST_HELD * most,
            certain: 0,
            open: Vec::new(),
            queue: queue.clone(),
            events: vec![start, newest],
        };
        let mut items = case("items", most_items as u64);
        let mut bytes = case("bytes besides the newest item", most_bytes);
        for (at, receipt) in held.iter().enumerate() {
            let Some(of) = self.receipts.get(receipt) else { continue };
            let is_open = of.settling;
            if !self.holds_for_certain(of) || is_open && !self.is_being_committed(of) {
                continue;
            }
            let weight = if at + 1 < held.len() { of.bytes as u64 } else { 0 };
            for (case, weight) in [(&mut items, 1), (&mut bytes, weight)] {
                if is_open {
                    case.open.push((*receipt, weight));
                } else {
                    case.certain += weight;
                }
                case.events.push(of.delivered.event);
            }
        }
        if let Some(call) = self.calls.get_mut(&id) {
            call.held = held;
        }
        let limited = [Some(items), Some(bytes).filter(|_| most_bytes > 0)];
        for mut case in limited.into_iter().flatten().filter(Overfull::may_be_wrong) {
            case.events.truncate(10);
            if self.overfull.len() < WAITING {
                self.overfull.push(case);
            }
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
            case.open.retain(|(open, _)| *open != receipt);
            case.may_be_wrong()
        });
    }

    /// Commits by a receipt have had no effect: its item took a place of its stream all the time.
    pub(super) fn commit_has_freed_nothing(&mut self, receipt: Key) {
        let now = self.now.event;
        for case in &mut self.overfull {
            for (_, weight) in case.open.extract_if(.., |(open, _)| *open == receipt) {
                case.certain += weight;
                case.events.push(now);
            }
        }
        let wrong = self.overfull.extract_if(.., |case| case.certain > case.most);
        for case in wrong.collect::<Vec<_>>() {
            let Overfull { what, certain, most, queue, events, .. } = case;
            let explanation = format!(
                "a stream held {certain} {what} with those that were being committed, {most} are allowed"
            );
            self.violate(Rule::Limits, None, &queue, explanation, &events);
        }
    }
}
