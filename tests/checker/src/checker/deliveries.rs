//! Deliveries: of what, when, to whom, and with which counts.

use super::{
    Checker, Old,
    key::Key,
    state::{Ended, How, Item, Kind, Mark, Pushing, Receipt, Reservation, Settle},
    streams::{Holds, Taker},
};
use crate::{
    history::{CallId, Delivery, Request, Span},
    rules::Rule,
};

/// For so many microseconds a broker may go on handing out items to a stream whose client has gone: it hears of it late, and
/// later if it stands still.
const UNNOTICED: Span = 30_000_000;

impl Checker {
    pub(super) fn deliver(&mut self, taker: Taker, delivery: &Delivery) {
        let id = Key::of(&delivery.id);
        let queue = self.queue(&delivery.queue);
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.totals.delivered += 1;
        }
        let is_new = !self.items.contains_key(&id) && !self.gone.contains_key(&id);
        if let Some(tick) = delivery.tick.as_ref().filter(|_| is_new) {
            self.tick_seen(tick, delivery, queue);
        }
        if !self.items.contains_key(&id) && !self.open_unknown(taker, delivery, queue) {
            return;
        }
        let Some(item) = self.items.get(&id) else { return };
        if item.name_key != Key::of(&delivery.name) {
            let explanation = format!("delivered with the content of {}", delivery.name);
            let events = [item.entered.0.event];
            self.violate(Rule::Invented, Some(id), "", explanation, &events);
        }
        if self.is_late(id, taker, delivery) {
            return;
        }
        self.settles_had_no_effect(id, queue);
        if self.items.get(&id).is_some_and(|item| item.queue != queue) {
            self.moved_unseen(id, queue, delivery);
        }
        self.check_overlap(id);
        self.check_times(id, taker, delivery);
        self.check_sent(id, taker, delivery);
        self.check_counts(id, taker, delivery);
        self.check_limits(id, delivery);
        self.check_key_order(id);
        self.check_push_order(id, delivery);
        self.check_wake(id, taker);
        self.hold(id, taker, delivery);
    }

    /// Opens an item that is not known to be there. Returns false if it cannot be there.
    fn open_unknown(&mut self, taker: Taker, delivery: &Delivery, queue: Key) -> bool {
        let id = Key::of(&delivery.id);
        let back =
            self.gone.get(&id).filter(|gone| self.may_be_back(gone)).map(|gone| gone.expires);
        let gone = self.gone.get(&id).map(|gone| (gone.mark, gone.number, gone.how, gone.queue));
        let Some((mark, number, how, was_in)) = gone else {
            let name = Key::of(&delivery.name);
            if self.bind(&delivery.id, &delivery.name, name).is_none() {
                self.adopt_stray(&delivery.id, &delivery.name, queue);
            }
            return true;
        };
        let replays = self.queues.get(&was_in).map(|queue| queue.replays);
        let replayed = replays.is_some_and(|replays| replays.since(mark.event));
        let may_replay = matches!(how, How::Committed | How::PushesSeen | How::SaidGone);
        if let Some(expires) = back.or((replayed && may_replay).then_some(None)) {
            self.gone.remove(&id);
            let item = self.adopt_stray(&delivery.id, &delivery.name, queue);
            if let Some(item) = self.items.get_mut(&item) {
                item.expires = expires;
            }
            return true;
        }
        let lease_begin = delivery.lease_end.saturating_sub(taker.lease);
        let in_time = taker.slow
            || self.now.at <= mark.at + self.options.transit
            || taker.lease > 0 && lease_begin <= mark.at + self.options.clock;
        // A pop takes items long before its caller has them, if its answer is held up.
        let is_pop = || {
            self.calls
                .get(&taker.call)
                .is_some_and(|call| matches!(call.request, Request::Pop { .. }))
        };
        // Nobody receives a later delivery of what was committed by this one.
        let may_be_later = match how {
            How::Committed | How::PushesSeen => false,
            How::SaidGone => in_time || is_pop(),
            How::Deleted | How::Discarded => in_time,
        };
        let was_under_way =
            taker.start.event < mark.event && (delivery.deliveries <= number || may_be_later);
        if was_under_way {
            if taker.holds == Holds::Nothing {
                self.count_popped(queue);
            }
            return false;
        }
        let (rule, what) = match how {
            How::Committed => (Rule::AfterCommit, "its commit was answered"),
            How::Deleted => (Rule::AfterCommit, "its deletion was answered"),
            How::Discarded => (Rule::AfterCommit, "it was discarded"),
            How::SaidGone => (Rule::Outcome, "a receipt of it was answered GONE"),
            How::PushesSeen => (Rule::Atomic, "what its CommitAndPush has pushed was seen"),
        };
        let explanation = format!("delivered as {} after {what}", delivery.id);
        self.violate(rule, None, &delivery.name, explanation, &[mark.event, taker.start.event]);
        false
    }

    /// Opens an item of which nothing is known but that it is there.
    pub(super) fn adopt_stray(&mut self, id: &str, name: &str, queue: Key) -> Key {
        let entry = Pushing {
            call: 0,
            index: 0,
            queue,
            stream: None,
            broker: queue,
            start: self.now,
            ordering: None,
            dedup: None,
            priority: 0,
            delay: 0,
            ttl: None,
            floor: (0, 0),
            stored: None,
            unknown: true,
        };
        let key = self.adopt(id, name, &entry);
        if let Some(item) = self.items.get_mut(&key) {
            item.deliveries_before = None;
            item.uncounted = 0;
            item.in_push_order = false;
            item.ready = None;
        }
        key
    }

    /// Returns whether a delivery arrives after a newer one: it is no longer valid, and says nothing.
    fn is_late(&mut self, id: Key, taker: Taker, delivery: &Delivery) -> bool {
        let receipt = Key::of(&delivery.receipt);
        let Some(item) = self.items.get(&id) else { return true };
        if delivery.deliveries > item.number {
            return false;
        }
        let same = self.receipts.get(&receipt).filter(|_| taker.holds != Holds::Nothing);
        if let Some(before) = same.map(|same| same.delivered.event) {
            let explanation = "one reservation is handed out twice".to_owned();
            self.violate(Rule::LeaseOverlap, Some(id), "", explanation, &[before]);
            return true;
        }
        let last = item.last.as_ref().map(|last| (last.number, last.delivered));
        if self.options.leases_may_be_lost && last.is_some() {
            return false;
        }
        if last.is_some_and(|(number, _)| number == delivery.deliveries) || item.number == 0 {
            let explanation = format!("two deliveries are number {}", delivery.deliveries);
            let before: Vec<u64> = last.iter().map(|(_, delivered)| delivered.event).collect();
            self.violate(Rule::Attempts, Some(id), "", explanation, &before);
        }
        let newer = last.map(|(_, delivered)| delivered);
        self.know_receipt(id, delivery, taker.call, newer.or(Some(self.now)));
        true
    }

    fn know_receipt(&mut self, item: Key, delivery: &Delivery, call: CallId, newer: Option<Mark>) {
        let (receipt, delivered) = (Key::of(&delivery.receipt), self.now);
        let queue = self.items.get(&item).map_or(item, |item| item.queue);
        let known = Receipt {
            item,
            queue,
            number: delivery.deliveries,
            bytes: delivery.bytes,
            call,
            delivered,
            newer,
            ended: None,
            settling: false,
            may_be_free: false,
        };
        self.receipts.insert(receipt, known);
        self.old.push_back((self.now.at + self.options.remember, Old::Receipt(receipt)));
    }

    /// An item is delivered again: settles that would have removed it have not happened, and never will.
    fn settles_had_no_effect(&mut self, id: Key, queue: Key) {
        let now = self.now.event;
        let Some(item) = self.items.get_mut(&id) else { return };
        let commits = item.settles.iter().filter(|settle| settle.kind == Kind::Commit);
        let commits: Vec<(CallId, u64)> =
            commits.map(|settle| (settle.call, settle.start.event)).collect();
        if item.queue == queue && commits.len() == item.settles.len() {
            let excused = |call: CallId| commits.iter().any(|(commit, _)| *commit == call);
            for (_, mut suspect) in
                item.suspects.extract_if(.., |(call, _)| excused(*call)).collect::<Vec<_>>()
            {
                suspect.events.push(now);
                self.keep(suspect);
            }
            let last = self.items.get(&id).and_then(|item| item.last.as_ref());
            if let Some(receipt) = last.map(|last| last.receipt).filter(|_| !commits.is_empty()) {
                self.commit_has_freed_nothing(receipt);
            }
        }
        for (call, _) in commits {
            self.refute_bond(call);
        }
        if let Some(item) = self.items.get_mut(&id) {
            item.settles.retain(|settle| settle.kind != Kind::Commit);
        }
    }

    /// An item is in another queue than the last time: something must have moved it.
    fn moved_unseen(&mut self, id: Key, to: Key, delivery: &Delivery) {
        let Some(item) = self.items.get(&id) else { return };
        let Some(from) = self.queues.get(&item.queue) else { return };
        let is_move = |kind: Kind| matches!(kind, Kind::Move { to: target, .. } if target == to);
        let moved = item.settles.iter().find(|settle| is_move(settle.kind));
        let moved = moved.map(|settle| (settle.start, settle.call));
        let redriven = from.redrives.since(item.entered.0.event);
        let moved_first = |settle: &Settle| match settle.kind {
            Kind::Move { to: between, .. } => self.dead_letters_go_to(between, to),
            _ => false,
        };
        let dead_letters =
            self.dead_letters_go_to(item.queue, to) || item.settles.iter().any(moved_first);
        let (start, before) = (item.entered.0, item.last.as_ref());
        let events: Vec<u64> = before
            .map(|last| last.delivered.event)
            .into_iter()
            .chain([item.entered.0.event])
            .collect();
        if moved.is_none() && !redriven {
            if !dead_letters {
                let explanation = format!("it is in {}, and nobody has moved it", delivery.queue);
                self.violate(Rule::Atomic, Some(id), "", explanation, &events);
            } else if let Some(wrong) = self.unjustified_dead_letter(item, delivery) {
                self.violate(Rule::Limits, Some(id), "", wrong, &events);
            }
        }
        let (start, call) = moved.unwrap_or((start, 0));
        // A dead letter is in no order, and what is redriven returns to a place that nobody is told.
        let ordered = delivery.origin_queue.is_empty() && (moved.is_some() || !redriven);
        self.enter(id, to, start, call, None, ordered);
    }

    /// Returns what is wrong with a dead letter, if anything is.
    fn unjustified_dead_letter(&self, item: &Item, delivery: &Delivery) -> Option<String> {
        let from = self.queues.get(&item.queue)?;
        let rejects = |kind: Kind| matches!(kind, Kind::Rollback { dead_letter: true, .. });
        let is_rejected = item.settles.iter().any(|settle| rejects(settle.kind));
        let unsure = from.settings_unsure_until > self.now.at || delivery.origin_queue != from.name;
        let (attempts, limit) = (delivery.dead_letter_attempts, from.settings.max_attempts);
        let handed_out =
            delivery.deliveries.saturating_sub(1 + item.deliveries_before.unwrap_or(0));
        let most = from.settings.max_deliveries;
        if is_rejected || unsure || attempts == limit || most > 0 && handed_out >= most {
            return None;
        }
        Some(format!(
            "dead-lettered after {attempts} failed attempts and at most {handed_out} deliveries; the limits are \
             {limit} and {most}"
        ))
    }

    /// Puts an item into another queue.
    pub(super) fn enter(
        &mut self,
        id: Key,
        to: Key,
        start: Mark,
        call: CallId,
        not_before: Option<(u64, u64)>,
        ordered: bool,
    ) {
        let now = self.now;
        let cuts = self.queues.get(&to).map_or(0, |queue| queue.cuts);
        let Some(item) = self.items.get(&id) else { return };
        let (from, ordering) = (item.queue, item.ordering);
        self.leave_line(id, from, ordering);
        let Some(item) = self.items.get_mut(&id) else { return };
        (item.queue, item.ordered) = (to, ordered);
        item.entered = (start, now);
        (item.entered_by, item.stream) = ((call, 0), None);
        item.in_push_order = false;
        // A reservation that nobody saw may have come between.
        item.deliveries_before = (call != 0).then_some(item.number);
        item.uncounted = 0;
        item.not_before = not_before.unwrap_or_default();
        item.ready = not_before.map(|(at, _)| at);
        item.last = None;
        item.settles.clear();
        item.suspects.clear();
        item.cuts = cuts;
        self.enter_line(id);
    }

    /// The reservation before must have ended.
    fn check_overlap(&mut self, id: Key) {
        let Some(item) = self.items.get(&id) else { return };
        let Some(last) = &item.last else { return };
        let now = self.now.at + self.options.clock;
        let is_valid = last.ended.is_none() && last.lease > now;
        let is_known =
            !self.options.leases_may_be_lost && self.clock_stepped <= last.delivered.event;
        if !is_valid || !is_known {
            return;
        }
        let left = (last.lease - self.now.at) / 1000;
        let explanation =
            format!("delivered while the lease of delivery {} has {left} ms left", last.number);
        let by_stream = last.by_stream;
        let stream = if by_stream { Some(last.call) } else { self.open_stream(last) };
        let events = [last.delivered.event];
        let violation = self.violation(Rule::LeaseOverlap, Some(id), "", explanation, &events);
        let item = self.items.get_mut(&id);
        match item.and_then(|item| item.ender().map(|call| (item, call))) {
            // The stream may have ended, whatever became of the settle.
            Some(_) if by_stream => {}
            Some((item, call)) => item.suspects.push((call, violation)),
            None => self.keep_unless_broken(stream, violation),
        }
    }

    /// Nothing comes early, expired, or out of a paused queue.
    fn check_times(&mut self, id: Key, taker: Taker, delivery: &Delivery) {
        let (now, clock, transit) = (self.now.at, self.options.clock, self.options.transit);
        let has_lease = taker.lease > 0 && taker.holds != Holds::Nothing;
        let reserved = has_lease.then(|| delivery.lease_end.saturating_sub(taker.lease));
        let (faults, fault_ended) = (self.faults, self.fault_ended.at);
        let Some(item) = self.items.get(&id) else { return };
        let (not_before, because) = item.not_before;
        if now + clock < not_before && because >= self.clock_stepped {
            let early = (not_before - now) / 1000;
            let explanation = format!("delivered {early} ms before it is eligible");
            self.violate(Rule::TooEarly, Some(id), "", explanation, &[because]);
        }
        // What was sent in time may arrive late, and in a fault as late as the fault makes it.
        let is_held_up = |end: u64| taker.slow || faults > 0 || fault_ended > end;
        let too_late =
            |end: u64| taker.start.at > end + clock || !is_held_up(end) && now > end + transit;
        let reserved_too_late = |end: u64| reserved.is_some_and(|reserved| reserved > end + clock);
        let Some(item) = self.items.get(&id) else { return };
        let expired = item
            .expires
            .and_then(|(_, end)| end)
            .filter(|end| too_late(*end) || reserved_too_late(*end));
        // By a slow clock its time to live lasts longer.
        let known = self.clock_stepped <= item.entered.0.event && !self.is_slow;
        if let Some(end) = expired.filter(|_| known) {
            // By its lease it was reserved after that, even if a clock shows an earlier time now.
            let late = reserved.map_or(now, |reserved| reserved.max(now)) - end;
            let explanation = format!("delivered {} ms after it expired", late / 1000);
            let events = [item.entered.0.event, item.entered.1.event, taker.start.event];
            self.violate(Rule::Expired, Some(id), "", explanation, &events);
        }
        let Some(item) = self.items.get(&id) else { return };
        let paused = self.queues.get(&item.queue).and_then(|queue| queue.paused);
        if let Some(paused) = paused.filter(|paused| too_late(paused.at + self.options.settings)) {
            let explanation = "delivered from a paused queue".to_owned();
            self.violate(Rule::Paused, Some(id), "", explanation, &[paused.event]);
        }
    }

    /// Nothing is sent when too little is left of its lease: a tenth, at most a second.
    fn check_sent(&mut self, id: Key, taker: Taker, delivery: &Delivery) {
        let Some(sent) = delivery.sent.filter(|_| taker.holds != Holds::Nothing) else { return };
        let margin = (taker.lease / 10).min(1_000_000);
        let is_known = self.clock_stepped <= taker.start.event;
        if is_known && sent + margin > delivery.lease_end + self.options.clock {
            let left = (delivery.lease_end.cast_signed() - sent.cast_signed()) / 1_000;
            let explanation = format!("sent when {left} ms of its lease were left");
            self.violate(Rule::TooLate, Some(id), "", explanation, &[taker.start.event]);
        }
    }

    /// Attempts and deliveries are what the events before make them.
    fn check_counts(&mut self, id: Key, taker: Taker, delivery: &Delivery) {
        let Some(item) = self.items.get(&id) else { return };
        let mut wrong = None;
        let unseen = item.unseen(delivery);
        let since = item.last.as_ref().map_or(item.entered.0, |last| last.delivered);
        if item.deliveries_before.is_some() && unseen > 0 && !self.may_hide(item, since, taker) {
            wrong = Some(format!("delivery {} follows {}", delivery.deliveries, item.number));
        }
        let (least, most) = self.next_attempt(item);
        let least = if self.may_have_returned(item) { 1 } else { least };
        let most = most.saturating_add(unseen);
        let is_known = item.deliveries_before.is_some() || item.last.is_some();
        let mut stream = None;
        if is_known && !(least..=most).contains(&delivery.attempt) {
            stream = self.taken_back_from(item, delivery, since).filter(|_| wrong.is_none());
            let expected =
                if least == most { least.to_string() } else { format!("{least} to {most}") };
            wrong = Some(format!("attempt {} where {expected} was due", delivery.attempt));
        }
        if let Some(wrong) = wrong {
            let mut events = vec![since.event];
            let receipt = item.last.as_ref().and_then(|last| self.receipts.get(&last.receipt));
            events.extend(receipt.and_then(|receipt| receipt.ended).map(|ended| ended.event));
            let violation = self.violation(Rule::Attempts, Some(id), "", wrong, &events);
            self.keep_unless_broken(stream, violation);
        }
    }

    /// Returns the stream from which a broker that shut down may have taken an item back before its lease ended, and whose consumer has
    /// not heard of that yet.
    fn taken_back_from(&self, item: &Item, delivery: &Delivery, since: Mark) -> Option<CallId> {
        let is_kept =
            |last: &&Reservation| last.ended.is_none() && last.attempt == delivery.attempt;
        let last = item.last.as_ref().filter(is_kept)?;
        let was_disturbed = self.faults > 0 || self.fault_ended.event > since.event;
        self.open_stream(last).filter(|_| was_disturbed)
    }

    /// Returns whether an item may have been handed out since then without anybody seeing it: to a stream, which need not
    /// have been sent it, or to a call that broke off, is under way, or took as long as its leases last; or in the queue to which it was
    /// redriven, before it came back. Where there is one consumer at a time, which reads what it is sent, no delivery is counted of what
    /// it was not sent.
    fn may_hide(&self, item: &Item, since: Mark, taker: Taker) -> bool {
        let Some(queue) = self.queues.get(&item.queue) else { return true };
        let is_alone = item.entered.0.event > queue.lone_since && self.faults == 0;
        let is_stream = |call: &CallId| {
            self.calls.get(call).is_none_or(|call| matches!(call.request, Request::Consume(_)))
        };
        let may_be_others = || {
            queue.cut.event > since.event
                || queue.cut.event > 0 && since.at <= queue.cut.at + UNNOTICED
                || queue.consumers.iter().any(|call| *call != taker.call || is_stream(call))
        };
        queue.late.event > since.event
            || queue.lost_calls > 0
            || queue.redrives.since(item.entered.0.event)
            || !is_alone && may_be_others()
    }

    /// Returns what attempt the next delivery has, if no other came between.
    fn next_attempt(&self, item: &Item) -> (u32, u32) {
        let Some(last) = &item.last else { return (1, 1) };
        let same = last.attempt;
        match last.ended {
            Some(Ended::Kept) => (same, same),
            None if last.by_stream
                || !item.settles.is_empty()
                || self.options.leases_may_be_lost
                || last.lease > self.now.at && self.open_stream(last).is_some() =>
            {
                (same, same + 1)
            }
            // The lease has lapsed.
            None | Some(Ended::Failed) => (same + 1, same + 1),
        }
    }

    /// Returns whether an item may have been dead-lettered and redriven, and nobody saw it in between.
    fn may_have_returned(&self, item: &Item) -> bool {
        let dead = self.dead_letter_queue(item.queue);
        let dead = dead.and_then(|dead| self.queues.get(&Key::of(&dead)));
        dead.is_some_and(|dead| dead.redrives.since(item.entered.0.event))
    }

    /// No delivery is beyond a limit.
    fn check_limits(&mut self, id: Key, delivery: &Delivery) {
        let Some(item) = self.items.get(&id) else { return };
        let Some(queue) = self.queues.get(&item.queue) else { return };
        let unsure = queue.settings_unsure_until > self.now.at || self.may_have_returned(item);
        if unsure || !self.has_limits(item.queue) {
            return;
        }
        let (attempts, deliveries) = (queue.settings.max_attempts, queue.settings.max_deliveries);
        let here =
            item.deliveries_before.map_or(0, |before| delivery.deliveries.saturating_sub(before));
        let here = here.saturating_sub(item.uncounted + item.unseen(delivery));
        let Some(last) = &item.last else { return };
        let returned = !item.may_be_taken_back();
        let events = [last.delivered.event];
        let wrong = if attempts > 0 && delivery.attempt > attempts {
            format!("attempt {}, and {attempts} are allowed", delivery.attempt)
        } else if deliveries > 0 && here > deliveries && returned {
            format!("delivery {here} in this queue, and {deliveries} are allowed")
        } else {
            return;
        };
        self.violate(Rule::Limits, Some(id), "", wrong, &events);
    }

    /// Notes the new reservation, or that the item is gone if it was committed with its delivery.
    fn hold(&mut self, id: Key, taker: Taker, delivery: &Delivery) {
        let now = self.now;
        let cuts = self.queues.get(&Key::of(&delivery.queue)).map_or(0, |queue| queue.cuts);
        let Some(item) = self.items.get_mut(&id) else { return };
        let before = item.last.as_ref().map(|last| last.receipt);
        item.uncounted += item.unseen(delivery) + u32::from(item.may_be_taken_back());
        item.number = delivery.deliveries;
        item.settles.clear();
        item.cuts = cuts;
        let receipt = Key::of(&delivery.receipt);
        if let Some(before) = before.and_then(|before| self.receipts.get_mut(&before)) {
            before.newer = Some(now);
        }
        if taker.holds == Holds::Nothing {
            self.remove(id, How::Committed, delivery.deliveries);
            self.count_popped(Key::of(&delivery.queue));
            return;
        }
        let lapses = taker.holds == Holds::Lease;
        item.ready = lapses.then_some(delivery.lease_end + self.options.clock);
        item.last = Some(Reservation {
            receipt,
            number: delivery.deliveries,
            attempt: delivery.attempt,
            delivered: now,
            call: taker.call,
            lease: delivery.lease_end,
            ended: None,
            by_stream: taker.holds == Holds::Stream,
        });
        self.know_receipt(id, delivery, taker.call, None);
    }

    fn count_popped(&mut self, queue: Key) {
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.totals.popped.sure += 1;
            queue.totals.committed.sure += 1;
        }
    }

    /// Returns whether limits have an effect in a queue: there is a queue to go to.
    pub(super) fn has_limits(&self, queue: Key) -> bool {
        let Some(queue) = self.queues.get(&queue) else { return false };
        let settings = &queue.settings;
        let is_last = queue.name.strip_suffix(".dead").is_some() || queue.name.len() > 123;
        settings.discard_failed || !settings.dead_letter_queue.is_empty() || !is_last
    }

    /// Returns the name of the queue that takes the dead letters of a queue.
    pub(super) fn dead_letter_queue(&self, queue: Key) -> Option<String> {
        let of = self.queues.get(&queue)?;
        if !self.has_limits(queue) || of.settings.discard_failed {
            return None;
        }
        let named = &of.settings.dead_letter_queue;
        Some(if named.is_empty() { format!("{}.dead", of.name) } else { named.clone() })
    }

    pub(super) fn dead_letters_go_to(&self, queue: Key, to: Key) -> bool {
        self.dead_letter_queue(queue).is_some_and(|name| Key::of(&name) == to)
    }
}
