//! Rest: nothing is under way, so what is not listed is gone.

use super::{
    Checker, Old,
    key::{Key, Map},
    state::{Changes, How, Kind},
};
use crate::{
    history::{Listed, QueueAtRest, Request, State},
    rules::Rule,
};

impl Checker {
    pub(super) fn rest(&mut self, queues: &[QueueAtRest]) {
        self.check_overdue();
        let mut listed: Map<Key, (Key, State)> = Map::default();
        for at_rest in queues {
            let queue = self.queue(&at_rest.queue);
            for item in &at_rest.items {
                let id = Key::of(&item.id);
                if listed.insert(id, (queue, item.state)).is_some() {
                    let explanation = format!("{} is listed twice", item.id);
                    self.violate(Rule::Atomic, None, &item.name, explanation, &[]);
                }
                self.check_listed(queue, item);
            }
            self.check_figures(at_rest);
        }
        self.check_bonds();
        self.check_missed_ticks();
        self.check_unlisted(&listed);
        self.nothing_is_under_way();
    }

    /// An item that is listed was pushed, is not gone, and is where it was put.
    fn check_listed(&mut self, queue: Key, item: &Listed) {
        let id = Key::of(&item.id);
        if let Some(gone) = self.gone.get(&id) {
            let (how, event, was_in) = (gone.how, gone.mark.event, gone.queue);
            let replays = self.queues.get(&was_in).map(|queue| queue.replays);
            let replayed = replays.is_some_and(|replays| replays.since(event));
            let is_history = item.state == State::Processed && how != How::Deleted;
            if replayed && !is_history {
                self.gone.remove(&id);
                self.adopt_stray(&item.id, &item.name, queue);
            } else if !is_history {
                let explanation = format!("{} is still there as {:?}", item.id, item.state);
                self.violate(Rule::AfterCommit, None, &item.name, explanation, &[event]);
            }
            return;
        }
        if !self.items.contains_key(&id)
            && self.bind(&item.id, &item.name, Key::of(&item.name)).is_none()
        {
            self.adopt_stray(&item.id, &item.name, queue);
        }
        let Some(known) = self.items.get(&id) else { return };
        let number = known.number;
        if item.state == State::Processed {
            let popped = self.queues.get(&queue).is_some_and(|queue| queue.popped_unseen > 0);
            let commits = popped || known.ender().is_some() || self.may_be_gone(known);
            if !commits && number > 0 {
                let explanation = "listed as processed, and nobody has committed it".to_owned();
                let event = known.entered.1.event;
                self.violate(Rule::Lost, Some(id), &item.name, explanation, &[event]);
            }
            return self.remove(id, How::Committed, number);
        }
        if !self.is_in(id, queue) {
            self.check_place(id, queue);
        }
    }

    /// An item that is listed in another queue than it was put into must have been moved.
    fn check_place(&mut self, id: Key, to: Key) {
        let Some(item) = self.items.get(&id) else { return };
        let is_move = |kind: Kind| matches!(kind, Kind::Move { to: target, .. } if target == to);
        let moved = item.settles.iter().any(|settle| is_move(settle.kind));
        let from = self.queues.get(&item.queue);
        let redriven = from.is_some_and(|queue| queue.redrives.since(item.entered.0.event));
        let dead_letters = self.dead_letters_go_to(item.queue, to);
        let (start, event) = (item.entered.0, item.entered.1.event);
        if !moved && !redriven && !dead_letters {
            let explanation = "listed in a queue that nobody has moved it to".to_owned();
            self.violate(Rule::Atomic, Some(id), "", explanation, &[start.event, event]);
        }
        self.enter(id, to, start, 0, None, !dead_letters);
    }

    /// What is not listed must be gone for a reason.
    fn check_unlisted(&mut self, listed: &Map<Key, (Key, State)>) {
        let unlisted = self.items.keys().filter(|id| !listed.contains_key(id));
        let mut unlisted: Vec<Key> = unlisted.copied().collect();
        unlisted.sort_unstable_by_key(|id| self.items[id].entered);
        for id in unlisted {
            let Some(item) = self.items.get(&id) else { continue };
            let number = item.number;
            let mut explained = self.may_be_gone(item);
            let mut events = vec![item.entered.0.event, item.entered.1.event];
            events.extend(item.last.as_ref().map(|last| last.delivered.event));
            let queue = self.queues.get_mut(&item.queue);
            if let Some(queue) = queue.filter(|queue| !explained && queue.popped_unseen > 0) {
                explained = true;
                queue.popped_unseen -= u64::from(queue.popped_unseen < u64::MAX);
            }
            if !explained {
                let explanation = "stored, settled by nobody, and not there".to_owned();
                self.violate(Rule::Lost, Some(id), "", explanation, &events);
            }
            self.remove(id, How::SaidGone, number);
        }
    }

    /// Calls that were broken off have no effect any more.
    fn nothing_is_under_way(&mut self) {
        let is_stream = |request: &Request| matches!(request, Request::Consume(_));
        self.calls.retain(|_, call| is_stream(&call.request));
        let until = self.now.at + self.options.remember;
        for (name, named) in &mut self.names {
            if !named.open.is_empty() {
                named.open.clear();
                self.old.push_back((until, Old::Name(*name)));
            }
        }
        self.dedups.values_mut().for_each(|dedup| dedup.open.clear());
        self.lines.values_mut().for_each(|line| line.open = 0);
        self.lines.retain(|_, line| !line.items.is_empty() || line.floor.0 > 0);
        for item in self.items.values_mut() {
            item.settles.clear();
            item.suspects.clear();
            item.maybe_deleted = false;
        }
        let (calls, event) = (&self.calls, self.now.event);
        for queue in self.queues.values_mut() {
            queue.consumers.retain(|call| calls.contains_key(call));
            (queue.popped_unseen, queue.lost_calls) = (0, 0);
            for changes in
                [&mut queue.purges, &mut queue.deletions, &mut queue.replays, &mut queue.redrives]
            {
                close(changes, event);
            }
        }
    }
}

fn close(changes: &mut Changes, event: u64) {
    if changes.open > 0 {
        *changes = Changes { open: 0, done: event };
    }
}
