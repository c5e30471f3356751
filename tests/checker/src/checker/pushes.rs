//! Pushes: what is stored, under which id, once, and with which sequence number.

use super::{
    Checker, Old,
    key::Key,
    state::{Item, Mark, Named, Pushing},
};
use crate::{
    history::{Answer, CallId, NewItem, Pushed, Request, Response},
    rules::Rule,
};

impl Checker {
    pub(super) fn start_push(
        &mut self,
        call: CallId,
        index: usize,
        queue: Key,
        item: &NewItem,
        stream: Option<u64>,
    ) {
        let key_of = |text: &str| (!text.is_empty()).then(|| queue.within(text));
        let ordering = (!item.ordering_key.is_empty()).then(|| Key::of(&item.ordering_key));
        let dedup = key_of(&item.dedup_id);
        let name = Key::of(&item.name);
        let mut floor = self.queues.get(&queue).map_or((0, 0), |queue| queue.floor);
        if let Some(ordering) = ordering {
            let line = self.lines.entry(queue.and(ordering)).or_default();
            line.open += 1;
            if !self.queues.get(&queue).is_some_and(|queue| queue.settings.sequenced) {
                floor = line.floor;
            }
        }
        if self.queues.get(&queue).is_some_and(|queue| queue.deletions.since(floor.1)) {
            floor = (0, 0);
        }
        if let Some(dedup) = dedup {
            self.dedups.entry(dedup).or_default().open.push(name);
        }
        let broker = self.calls.get(&call).map_or(Key::of(""), |call| call.broker);
        let named = self.names.entry(name).or_default();
        named.pushes += 1;
        named.open.push(Pushing {
            call,
            index,
            queue,
            stream,
            broker,
            start: self.now,
            ordering,
            dedup,
            priority: item.priority,
            delay: item.delay,
            ttl: item.ttl,
            floor,
            stored: None,
            unknown: false,
        });
    }

    pub(super) fn end_push(&mut self, id: CallId, answer: Answer) {
        let Some(call) = self.calls.remove(&id) else { return };
        let Request::Push { items, .. } = call.request else { return };
        match answer {
            Answer::Ok(Response::Pushed(results)) if results.len() == items.len() => {
                for (index, (item, result)) in items.iter().zip(&results).enumerate() {
                    self.pushed(id, index, item, result);
                }
            }
            Answer::Ok(_) => {
                let explanation = format!("call {id} has not one result for each item");
                self.violate(Rule::Recording, None, "history", explanation, &[call.start.event]);
            }
            Answer::Refused(_) => {
                for (index, item) in items.iter().enumerate() {
                    self.push_refused(id, index, item, Rule::Invented);
                }
            }
            Answer::Unknown(_) => {
                for (index, item) in items.iter().enumerate() {
                    self.push_unknown(id, index, item);
                }
            }
        }
    }

    /// Takes the answer that an item is stored.
    pub(super) fn pushed(&mut self, call: CallId, index: usize, item: &NewItem, result: &Pushed) {
        let name = Key::of(&item.name);
        let Some(entry) = self.close_entry(call, index, name) else { return };
        let id = Key::of(&result.id);
        if result.deduplicated {
            return self.deduplicated(&entry, item, result);
        }
        if let Some(queue) = self.queues.get_mut(&entry.queue) {
            queue.totals.pushed.sure += 1;
        }
        let is_known = self.items.contains_key(&id) || self.gone.contains_key(&id);
        let other_name = self.items.get(&id).is_some_and(|item| item.name_key != name);
        if other_name || entry.stored.is_some_and(|stored| stored != id) {
            let explanation = format!("the push of {} is answered {}", item.name, result.id);
            let shown = entry.stored.unwrap_or(id);
            let events = [entry.start.event];
            self.violate(Rule::Doubled, Some(shown), &item.name, explanation, &events);
        } else if is_known && entry.stored.is_none() {
            // An earlier push of this name was taken for the one that stored the item.
            let named = self.names.entry(name).or_default();
            named.open.iter_mut().filter(|open| open.stored == Some(id)).for_each(|open| {
                open.stored = None;
            });
        }
        self.check_first(&entry, id, item);
        if !is_known {
            self.adopt(&result.id, &item.name, &entry);
        }
        self.check_sequence(&entry, id, item, result.sequence);
    }

    /// Takes the answer that an item was stored by an earlier push.
    fn deduplicated(&mut self, entry: &Pushing, item: &NewItem, result: &Pushed) {
        let id = Key::of(&result.id);
        let Some(dedup) = entry.dedup.and_then(|dedup| self.dedups.get(&dedup)) else {
            let explanation = "deduplicated, and it has no deduplication id".to_owned();
            let events = [entry.start.event];
            return self.violate(Rule::Doubled, Some(id), &item.name, explanation, &events);
        };
        if dedup.unsure {
            return;
        }
        match dedup.first {
            Some((first, _)) if first == id => {}
            Some((_, at)) if !self.in_window(entry, at) => {}
            Some((first, at)) => {
                let explanation = format!("deduplicated as {}, which is not the first", result.id);
                let events = [at.event, entry.start.event];
                self.violate(Rule::Doubled, Some(first), &item.name, explanation, &events);
            }
            None => {
                let open = dedup.open.clone();
                let is_same = |open: &Pushing| open.dedup == entry.dedup && open.stored.is_none();
                let first = open.iter().find(|name| {
                    self.names.get(name).is_some_and(|named| named.open.iter().any(is_same))
                });
                if let Some(name) = first.copied() {
                    self.bind(&result.id, &item.name, name);
                } else {
                    let explanation =
                        "deduplicated, though no push before may have stored it".to_owned();
                    let events = [entry.start.event];
                    self.violate(Rule::Doubled, Some(id), &item.name, explanation, &events);
                    self.adopt(&result.id, &item.name, entry);
                }
            }
        }
    }

    /// Returns whether what was pushed with an entry's deduplication id since `first` is a duplicate for
    /// certain, if it is stored by now.
    fn in_window(&self, entry: &Pushing, first: Mark) -> bool {
        let Some(queue) = self.queues.get(&entry.queue) else { return false };
        let window = queue.settings.dedup_window;
        queue.settings_unsure_until <= self.now.at
            && self.clock_stepped <= first.event.min(entry.start.event)
            && !queue.purges.since(first.event)
            && !queue.deletions.since(first.event)
            && self.now.at + self.options.clock < first.at + window
            // An earlier push, whose item is seen late, may have stored it so early that its own window was over by then.
            && first.at + self.options.clock < entry.start.at + window
    }

    /// Notes the first item of a deduplication id. There must be no other one.
    fn check_first(&mut self, entry: &Pushing, id: Key, item: &NewItem) {
        let Some(key) = entry.dedup else { return };
        let Some(dedup) = self.dedups.get(&key) else { return };
        let before = dedup.first.filter(|(first, _)| *first != id && !dedup.unsure);
        if let Some((first, at)) = before.filter(|(_, at)| self.in_window(entry, *at)) {
            let explanation = format!("deduplication id {} stored a second item", item.dedup_id);
            let events = [at.event, entry.start.event];
            self.violate(Rule::Doubled, Some(first), &item.name, explanation, &events);
        }
        self.note_first(entry, id);
    }

    fn note_first(&mut self, entry: &Pushing, id: Key) {
        let (Some(key), Some(queue)) = (entry.dedup, self.queues.get(&entry.queue)) else { return };
        let until = self.now.at + queue.settings.dedup_window + self.options.remember;
        let Some(dedup) = self.dedups.get_mut(&key) else { return };
        if dedup.first.is_none_or(|(first, _)| first != id) {
            dedup.first = Some((id, entry.start));
            self.old_dedups.push_back((until, key));
        }
    }

    pub(super) fn forget_dedup(&mut self, id: Key) {
        let Some(dedup) = self.dedups.get(&id) else { return };
        let Some((_, at)) = dedup.first.filter(|_| dedup.open.is_empty()) else { return };
        if at.at + self.options.remember <= self.now.at {
            self.dedups.remove(&id);
        }
    }

    pub(super) fn push_refused(&mut self, call: CallId, index: usize, item: &NewItem, rule: Rule) {
        let name = Key::of(&item.name);
        let Some(entry) = self.close_entry(call, index, name) else { return };
        if let Some(stored) = entry.stored.filter(|_| self.is_only_push(name)) {
            let explanation =
                "its push changed nothing by its answer, and yet it was there".to_owned();
            let seen = self.items.get(&stored).map(|item| item.entered.1);
            let seen = seen.or(self.gone.get(&stored).map(|gone| gone.mark));
            let events = [entry.start.event, seen.map_or(entry.start.event, |seen| seen.event)];
            self.violate(rule, Some(stored), &item.name, explanation, &events);
        }
    }

    pub(super) fn push_unknown(&mut self, call: CallId, index: usize, item: &NewItem) {
        let name = Key::of(&item.name);
        let Some(entry) = self.close_entry(call, index, name) else { return };
        if let Some(queue) = self.queues.get_mut(&entry.queue) {
            queue.totals.pushed.maybe += 1;
        }
        let dedup = entry.dedup.and_then(|dedup| self.dedups.get(&dedup));
        let first = dedup.filter(|dedup| !dedup.unsure).and_then(|dedup| dedup.first);
        let is_duplicate = first.is_some_and(|(_, at)| self.in_window(&entry, at));
        if entry.stored.is_none() && !is_duplicate {
            self.reopen(name, Pushing { unknown: true, ..entry });
        }
    }

    /// Takes an entry out of the pushes under way.
    fn close_entry(&mut self, call: CallId, index: usize, name: Key) -> Option<Pushing> {
        let named = self.names.get_mut(&name)?;
        let is_it = |open: &Pushing| open.call == call && open.index == index;
        let entry = named.open.swap_remove(named.open.iter().position(is_it)?);
        if let Some(ordering) = entry.ordering {
            let line = self.lines.entry(entry.queue.and(ordering)).or_default();
            line.open = line.open.saturating_sub(1);
        }
        if let Some(dedup) = entry.dedup.and_then(|dedup| self.dedups.get_mut(&dedup))
            && let Some(at) = dedup.open.iter().position(|open| *open == name)
        {
            dedup.open.swap_remove(at);
        }
        Some(entry)
    }

    /// Finds the push that stored an item that was seen and is not known, and takes it as stored. The push
    /// was made under `name`.
    pub(super) fn bind(&mut self, id: &str, shown: &str, name: Key) -> Option<Key> {
        let key = Key::of(id);
        let named = self.names.entry(name).or_default();
        let open = named.open.iter().filter(|open| open.stored.is_none());
        let earliest = open.min_by_key(|open| open.start).map(|open| (open.call, open.index));
        let Some((call, index)) = earliest else {
            self.never_pushed(shown, named_before(self.names.get(&name)), id);
            return None;
        };
        let entry = self.close_entry(call, index, name)?;
        if let Some(dedup) = entry.dedup.and_then(|dedup| self.dedups.get(&dedup)) {
            let before = dedup.first.filter(|(first, _)| *first != key && !dedup.unsure);
            if let Some((first, at)) = before.filter(|(_, at)| self.in_window(&entry, *at)) {
                let explanation = format!("its deduplication id stored a second item, {id}");
                let events = [at.event, entry.start.event];
                self.violate(Rule::Doubled, Some(first), shown, explanation, &events);
            }
        }
        self.note_first(&entry, key);
        let adopted = self.adopt(id, shown, &entry);
        if self.is_only_push(name) {
            self.push_was_seen(entry.call, adopted);
        } else if let Some(item) = self.items.get_mut(&adopted) {
            // Another push of that name may have stored the item.
            (item.entered_by, item.stream, item.in_push_order) = ((0, 0), None, false);
        }
        if !entry.unknown {
            self.reopen(name, Pushing { stored: Some(key), ..entry });
        }
        Some(adopted)
    }

    fn is_only_push(&self, name: Key) -> bool {
        self.names.get(&name).is_some_and(|named| named.pushes == 1)
    }

    fn reopen(&mut self, name: Key, entry: Pushing) {
        if let Some(ordering) = entry.ordering {
            self.lines.entry(entry.queue.and(ordering)).or_default().open += 1;
        }
        if let Some(dedup) = entry.dedup {
            self.dedups.entry(dedup).or_default().open.push(name);
        }
        self.names.entry(name).or_default().open.push(entry);
    }

    fn never_pushed(&mut self, shown: &str, before: Option<(Key, Mark)>, id: &str) {
        if let Some((first, at)) = before {
            let explanation = format!("stored by one push, and there a second time as {id}");
            self.violate(Rule::Doubled, Some(first), shown, explanation, &[at.event]);
        } else {
            let explanation = format!("nobody has pushed it, and it is there as {id}");
            self.violate(Rule::Invented, None, shown, explanation, &[]);
        }
    }

    /// Takes an item as stored by the push of an entry.
    pub(super) fn adopt(&mut self, id: &str, name: &str, entry: &Pushing) -> Key {
        let (key, now) = (Key::of(id), self.now);
        let clock = self.options.clock;
        let expires = entry.ttl.map(|ttl| (entry.start.at + ttl, Some(now.at + ttl + clock)));
        let name_key = Key::of(name);
        let item = Item {
            id: id.into(),
            name: name.into(),
            name_key,
            queue: entry.queue,
            ordering: entry.ordering,
            ordered: true,
            dedup: entry.dedup,
            entered: (entry.start, now),
            entered_by: (entry.call, entry.index),
            stream: entry.stream,
            broker: entry.broker,
            priority: entry.priority,
            in_push_order: entry.delay == 0,
            deliveries_before: Some(0),
            uncounted: 0,
            not_before: (entry.start.at + entry.delay, entry.start.event),
            ready: Some(now.at + entry.delay),
            expires,
            stored: now.event,
            number: 0,
            last: None,
            settles: Vec::new(),
            maybe_deleted: self.early_deletions.contains(&key),
            suspects: Vec::new(),
            cuts: self.queues.get(&entry.queue).map_or(0, |queue| queue.cuts),
        };
        self.report.items += 1;
        self.names.entry(name_key).or_default().item = Some((key, now));
        self.items.insert(key, item);
        self.enter_line(key);
        key
    }

    fn check_sequence(&mut self, entry: &Pushing, id: Key, item: &NewItem, sequence: u64) {
        let Some(queue) = self.queues.get_mut(&entry.queue) else { return };
        if queue.deletions.since(entry.start.event) {
            return;
        }
        let (call, event) = (entry.call, self.now.event);
        let mut wrong = None;
        let is_later = |last: (CallId, u64)| last.0 != call || sequence > last.1;
        if queue.settings.sequenced {
            if !is_later(queue.last_answer) {
                wrong = Some((event, "not after the item before it in the same push"));
            }
            queue.last_answer = (call, sequence);
            queue.floor = queue.floor.max((sequence, event));
            if let Some(before) = queue.sequences.insert(sequence, event) {
                wrong = Some((before, "was given before"));
            }
            let until = self.now.at + self.options.remember;
            self.old.push_back((until, Old::Sequence(entry.queue, sequence)));
        } else if let Some(ordering) = entry.ordering.filter(|_| sequence > 0) {
            let line = self.lines.entry(entry.queue.and(ordering)).or_default();
            if !is_later(line.last_answer) {
                wrong = Some((event, "not after the item before it in the same push"));
            }
            line.last_answer = (call, sequence);
            line.floor = line.floor.max((sequence, event));
        } else {
            return;
        }
        if sequence <= entry.floor.0 || sequence == 0 {
            wrong = Some((entry.floor.1, "not above a number that was answered before"));
        }
        if let Some((before, what)) = wrong {
            let explanation = format!("its sequence number {sequence} is {what}");
            let events = [before, entry.start.event];
            self.violate(Rule::SequenceOrder, Some(id), &item.name, explanation, &events);
        }
    }
}

fn named_before(named: Option<&Named>) -> Option<(Key, Mark)> {
    named.and_then(|named| named.item)
}
