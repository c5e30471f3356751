//! The order of deliveries: by ordering key, and as pushed to a lone consumer.

use super::{
    Checker,
    key::Key,
    state::{Item, Kind, Watermark},
};
use crate::{history::Delivery, report::Violation, rules::Rule};

impl Item {
    /// Returns whether this item came into its queue before another one, for certain.
    fn is_before(&self, other: &Self) -> bool {
        let ((call, index), (other_call, other_index)) = (self.entered_by, other.entered_by);
        if call == other_call && call != 0 {
            return index < other_index;
        }
        let one_stream = self.stream.is_some() && self.stream == other.stream;
        one_stream && self.entered.0 < other.entered.0 || self.entered.1 < other.entered.0
    }
}

impl Checker {
    /// Puts an item at the end of its ordering key.
    pub(super) fn enter_line(&mut self, id: Key) {
        let Some(item) = self.items.get_mut(&id).filter(|item| item.ordered) else { return };
        let Some(ordering) = item.ordering else { return };
        let line = self.lines.entry(item.queue.and(ordering)).or_default();
        if !line.items.is_empty() || line.open > 0 {
            item.ready = None;
        }
        line.items.push_back(id);
    }

    /// Takes an item out of its ordering key; the next one is ready by now, if it is known to be next.
    pub(super) fn leave_line(&mut self, id: Key, queue: Key, ordering: Option<Key>) {
        let Some(ordering) = ordering else { return };
        let Some(line) = self.lines.get_mut(&queue.and(ordering)) else { return };
        let Some(at) = line.items.iter().position(|other| *other == id) else { return };
        line.items.remove(at);
        if line.held == Some(id) {
            line.held = None;
        }
        let next = line.items.front().filter(|_| at == 0 && line.held.is_none() && line.open == 0);
        let Some(next) = next.and_then(|next| self.items.get_mut(next)) else { return };
        if next.last.is_none() {
            next.ready = Some(self.now.at.max(next.not_before.0 + self.options.clock));
        }
    }

    /// An item was delivered: the items before it in its key must be settled, and none may be held.
    pub(super) fn check_key_order(&mut self, id: Key) {
        let Some(item) = self.items.get(&id).filter(|item| item.ordered) else { return };
        let Some(ordering) = item.ordering else { return };
        let line_key = item.queue.and(ordering);
        let Some(line) = self.lines.get(&line_key) else { return };
        let mut early = None;
        for &before in line.items.iter().take_while(|before| **before != id) {
            let Some(other) = self.items.get(&before) else { continue };
            if other.is_before(item) && !self.may_have_left(other, true) {
                early = Some((before, "is not settled", Kind::removes as fn(Kind) -> bool));
                break;
            }
            if other.entered.1 > item.entered.1 {
                break;
            }
        }
        if let Some(held) = line.held.filter(|held| *held != id) {
            let other = self.items.get(&held).filter(|other| self.is_held(other));
            if other.is_some_and(|other| !self.may_have_left(other, true)) {
                early = Some((held, "is held", Kind::ends as fn(Kind) -> bool));
            }
        }
        if let Some((before, what, excuses)) = early {
            self.out_of_key(id, before, what, excuses);
        }
        if let Some(line) = self.lines.get_mut(&line_key) {
            line.held = Some(id);
        }
    }

    fn out_of_key(&mut self, id: Key, before: Key, what: &str, excuses: fn(Kind) -> bool) {
        let (Some(item), Some(other)) = (self.items.get(&id), self.items.get(&before)) else {
            return;
        };
        let mut events = vec![item.entered.0.event, other.entered.0.event, other.entered.1.event];
        events.extend(other.last.as_ref().map(|last| last.delivered.event));
        let explanation =
            format!("delivered while {} ({}) of the same key {what}", other.name, other.id);
        let related = Some((other.id.to_string(), other.name.to_string()));
        let violation = self.violation(Rule::KeyOrder, Some(id), "", explanation, &events);
        let violation = Violation { related, ..violation };
        let other = self.items.get_mut(&before);
        match other.and_then(|other| other.settled_by(excuses).map(|call| (other, call))) {
            Some((other, call)) => other.suspects.push((call, violation)),
            None => self.keep(violation),
        }
    }

    /// Returns whether an item is under a lease for certain.
    fn is_held(&self, item: &Item) -> bool {
        item.last.as_ref().is_some_and(|last| {
            last.ended.is_none()
                && !last.by_stream
                && self.clock_stepped <= last.delivered.event
                && last.lease > self.now.at + self.options.clock
        })
    }

    /// A first delivery: with one consumer at a time and no fault, what was pushed before has come before.
    pub(super) fn check_push_order(&mut self, id: Key, delivery: &Delivery) {
        let Some(item) = self.items.get(&id) else { return };
        let Some(queue) = self.queues.get_mut(&item.queue) else { return };
        let is_first = item.in_push_order && item.number == 0 && delivery.deliveries == 1;
        // A reserve that hangs during a fault may hold items that it hands out to nobody, which come later.
        if !is_first || item.entered.0.event <= queue.lone_since || self.faults > 0 {
            return;
        }
        // A broker hears a little later that a consumer has gone, and takes back what it has assigned to it.
        if queue.cut.event > 0 && item.entered.0.at <= queue.cut.at + self.options.transit {
            return;
        }
        let keyed = if item.ordering.is_some() { "keyed" } else { "plain" };
        let lane = item.broker.within(keyed).within(&item.priority.to_string());
        let (call, index) = item.entered_by;
        let stream = item.stream;
        let lane = if stream.is_some() { lane.within(&format!("{stream:?}")) } else { lane };
        let mark = Watermark { start: item.entered.0, call, index, delivered: self.now.event };
        let last = queue.watermarks.entry(lane).or_insert(mark);
        let is_later = match stream {
            Some(_) if last.call != call => last.start > item.entered.0,
            _ if last.call == call => last.index > index,
            _ => last.start > item.entered.1,
        };
        let (start, delivered) = (last.start.event, last.delivered);
        if (last.start, last.index) < (mark.start, index) {
            *last = mark;
        }
        // Keyed items may wait for others of their keys.
        if is_later && item.ordering.is_none() {
            let events = [item.entered.0.event, item.entered.1.event, start, delivered];
            let explanation = "pushed before what was delivered before it".to_owned();
            self.violate(Rule::PushOrder, Some(id), "", explanation, &events);
        }
    }
}
