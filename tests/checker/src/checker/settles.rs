//! Settles: what a receipt may do, what its answer says, and what follows.

use super::{
    Checker,
    key::Key,
    state::{Ended, How, Item, Kind, Mark, Queue, Settle},
};
use crate::{
    history::{Answer, CallId, Outcome, PushEntry, Request, Response, RollbackItem, Time},
    rules::Rule,
};

/// A `CommitAndPush` that is not answered: its commit and its pushes happen together or not at all.
pub(super) struct Bond {
    item: Key,
    number: u32,
    start: u64,
    pushes: usize,
    /// The queues of those pushes that do not expire.
    queues: Vec<Key>,
    /// How many of its pushes were seen, and the last such event.
    seen: (usize, u64),
    /// The event that shows that nothing of it has happened.
    refuted: Option<u64>,
}

impl Checker {
    pub(super) fn start_settles(&mut self, call: CallId, request: &Request) {
        for (receipt, kind) in settles(request) {
            self.start_settle(call, receipt, kind);
        }
        if let Request::Move { to_queue, .. } = request {
            self.queue(to_queue);
        }
        let Request::CommitAndPush { receipt, pushes } = request else { return };
        if let Some(receipt) = self.receipts.get(&Key::of(receipt)) {
            let (item, number, start) = (receipt.item, receipt.number, self.now.event);
            let lasting = pushes.iter().filter(|push| push.item.ttl.is_none());
            let queues = lasting.map(|push| Key::of(&push.queue)).collect();
            let (pushes, seen) = (pushes.len(), (0, 0));
            let bond = Bond { item, number, start, pushes, queues, seen, refuted: None };
            self.bonds.insert(call, bond);
        }
        for (index, PushEntry { queue, item }) in pushes.iter().enumerate() {
            let queue = self.queue(queue);
            self.start_push(call, index, queue, item, None);
        }
    }

    fn start_settle(&mut self, call: CallId, receipt: &str, kind: Kind) {
        let (key, now) = (Key::of(receipt), self.now);
        let Some(receipt) = self.receipts.get_mut(&key) else { return };
        let extends = matches!(kind, Kind::Extend { .. });
        let (id, stream) = (receipt.item, receipt.call);
        if !extends && !std::mem::replace(&mut receipt.settling, true) {
            self.free_place(stream, false);
        }
        let Some(item) = self.items.get_mut(&id) else { return };
        item.ready = None;
        let Some(last) = item.last.as_mut().filter(|last| last.receipt == key) else { return };
        if let Kind::Extend { lease } = kind {
            // An extension may take effect at once, and then its lease is the shorter one.
            last.lease = last.lease.min(now.at + lease);
        }
        item.settles.push(Settle { call, start: now, kind });
    }

    pub(super) fn end_settles(&mut self, id: CallId, answer: Answer) {
        let Some(call) = self.calls.remove(&id) else { return };
        let settles = settles(&call.request);
        let mut pushed = None;
        let outcomes: Vec<(Outcome, Option<Time>)> = match answer {
            Answer::Ok(Response::Settled(outcomes)) => {
                outcomes.into_iter().map(|outcome| (outcome, None)).collect()
            }
            Answer::Ok(Response::Extended(outcomes)) => outcomes,
            Answer::Ok(Response::CommittedAndPushed(outcome, results)) => {
                pushed = Some(results);
                vec![(outcome, None)]
            }
            Answer::Ok(_) => Vec::new(),
            Answer::Refused(_) => {
                for (receipt, _) in settles {
                    self.settle_changed_nothing(id, receipt);
                }
                return self.pushes_of_bond_refused(id, &call.request);
            }
            Answer::Unknown(_) => {
                for (receipt, kind) in settles {
                    self.settle_unknown(receipt, kind);
                }
                return self.pushes_of_bond_unknown(id, &call.request);
            }
        };
        if outcomes.len() != settles.len() {
            let explanation = format!("call {id} has not one outcome for each receipt");
            self.violate(Rule::Recording, None, "history", explanation, &[call.start.event]);
        }
        for ((receipt, kind), (outcome, lease)) in settles.into_iter().zip(outcomes) {
            match outcome {
                Outcome::Ok | Outcome::DeadLettered => {
                    if kind == Kind::Commit {
                        self.commit_may_have_freed(Key::of(receipt));
                    }
                    self.settled(id, call.start, receipt, kind, (outcome, lease));
                }
                Outcome::LeaseLost => self.lease_lost(id, call.start, receipt),
                Outcome::Gone => self.said_gone(id, call.start, receipt),
            }
            if let Request::CommitAndPush { pushes, .. } = &call.request {
                if outcome != Outcome::Ok {
                    return self.pushes_of_bond_refused(id, &call.request);
                }
                self.bonds.remove(&id);
                for (index, push) in pushes.iter().enumerate() {
                    let result = pushed.as_ref().and_then(|results| results.get(index));
                    if let Some(result) = result {
                        self.pushed(id, index, &push.item, result);
                    }
                }
            }
        }
    }

    /// A settle is answered as done: its receipt must be the newest, and not used up.
    fn settled(
        &mut self,
        call: CallId,
        start: Mark,
        name: &str,
        kind: Kind,
        (outcome, lease): (Outcome, Option<Time>),
    ) {
        let key = Key::of(name);
        let Some(receipt) = self.receipts.get(&key) else {
            let explanation = "settled by a receipt that nobody has received".to_owned();
            return self.violate(Rule::Recording, None, name, explanation, &[start.event]);
        };
        let (id, number, delivered) = (receipt.item, receipt.number, receipt.delivered.event);
        let (stream, queue) = (receipt.call, receipt.queue);
        // An extension may come before the settle and be answered after it.
        let ended = receipt.ended.filter(|ended| kind.ends() || *ended < start);
        let newer = receipt.newer.filter(|newer| kind == Kind::Commit || *newer < start);
        let gone = self.gone.get(&id).filter(|gone| !self.may_be_back(gone));
        let gone = gone.filter(|gone| gone.mark < start && gone.how != How::PushesSeen);
        let gone = gone.map(|gone| gone.mark);
        let stale = ended.map(|at| (at, "after it was settled"));
        let stale = stale.or(newer.map(|at| (at, "though a newer receipt was handed out")));
        let stale = stale.or(gone.map(|at| (at, "though the item is gone")));
        if let Some((at, what)) = stale {
            let explanation =
                format!("a settle by receipt {number} is answered {outcome:?} {what}");
            let events = [delivered, at.event, start.event];
            return self.violate(Rule::StaleReceipt, Some(id), name, explanation, &events);
        }
        if !matches!(kind, Kind::Extend { .. })
            && let Some(receipt) = self.receipts.get_mut(&key)
        {
            receipt.ended = Some(self.now);
            self.free_place(stream, true);
        }
        self.count_settle(queue, kind, outcome);
        if kind == Kind::Commit
            && let Some(gone) = self.gone.get_mut(&id).filter(|gone| gone.how == How::SaidGone)
        {
            gone.how = How::Committed;
        }
        let Some(item) = self.items.get_mut(&id) else { return };
        item.suspects.retain(|(excuse, _)| *excuse != call);
        item.settles.retain(|settle| settle.call != call);
        let is_last = item.last.as_ref().is_some_and(|last| last.receipt == key);
        if !is_last {
            return;
        }
        match (kind, outcome) {
            (Kind::Commit, _) => self.remove(id, How::Committed, number),
            (Kind::Extend { .. }, _) => {
                let others =
                    item.settles.iter().any(|settle| matches!(settle.kind, Kind::Extend { .. }));
                if let (Some(last), Some(lease)) = (&mut item.last, lease) {
                    let may_have_lapsed = last.lease <= self.now.at + self.options.clock;
                    last.lease = if others { last.lease.min(lease) } else { lease };
                    if let Some(receipt) = self.receipts.get_mut(&key).filter(|_| may_have_lapsed) {
                        receipt.may_be_free = true;
                    }
                }
            }
            (Kind::Move { to, delay }, _) => {
                let not_before = (start.at + delay, start.event);
                self.enter(id, to, start, call, Some(not_before), true);
                self.ready_after(id, delay);
            }
            (Kind::Rollback { .. }, Outcome::DeadLettered) => {
                self.dead_lettered(id, call, start, kind);
            }
            (Kind::Rollback { delay, keep_attempt, .. }, _) => {
                self.rolled_back(id, start, kind);
                let Some(item) = self.items.get_mut(&id) else { return };
                item.settles.clear();
                if let Some(last) = &mut item.last {
                    last.ended = Some(if keep_attempt { Ended::Kept } else { Ended::Failed });
                }
                let delay = delay.or(keep_attempt.then_some(0));
                item.not_before = (start.at + delay.unwrap_or(0), start.event);
                if let Some(delay) = delay {
                    self.ready_after(id, delay);
                }
            }
        }
    }

    fn ready_after(&mut self, id: Key, delay: u64) {
        let ready = self.now.at + delay + self.options.clock;
        if let Some(item) = self.items.get_mut(&id) {
            item.ready = item.ordering.is_none().then_some(ready);
        }
    }

    fn count_settle(&mut self, queue: Key, kind: Kind, outcome: Outcome) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        match (kind, outcome) {
            (_, Outcome::DeadLettered) => queue.totals.dead_lettered += 1,
            (Kind::Commit, _) => queue.totals.committed.sure += 1,
            (Kind::Move { .. }, _) => queue.totals.moved.sure += 1,
            _ => {}
        }
    }

    /// Returns whether the limits of an item's queue are certain, and whether the item is at one of them.
    fn at_limit(&self, item: &Item) -> Option<bool> {
        let queue = self.queues.get(&item.queue)?;
        let last = item.last.as_ref()?;
        let before = item.deliveries_before?;
        if queue.settings_unsure_until > self.now.at {
            return None;
        }
        let (attempts, deliveries) = (queue.settings.max_attempts, queue.settings.max_deliveries);
        let by_attempts = attempts > 0 && last.attempt >= attempts;
        let here = last.number.saturating_sub(before);
        let reaches = |here: u32| deliveries > 0 && here >= deliveries;
        let is_certain =
            by_attempts || reaches(here) == reaches(here.saturating_sub(item.uncounted));
        is_certain.then(|| by_attempts || reaches(here))
    }

    fn dead_lettered(&mut self, id: Key, call: CallId, start: Mark, kind: Kind) {
        let Some(item) = self.items.get(&id) else { return };
        let (queue, number) = (item.queue, item.number);
        let rejected = matches!(kind, Kind::Rollback { dead_letter: true, .. });
        if !rejected && self.at_limit(item) == Some(false) {
            let events: Vec<u64> = item.last.iter().map(|last| last.delivered.event).collect();
            let explanation = "dead-lettered before it was at a limit".to_owned();
            self.violate(
                Rule::Limits,
                Some(id),
                "",
                explanation,
                &[&[start.event], &events[..]].concat(),
            );
        }
        match self.dead_letter_queue(queue) {
            Some(to) => {
                let to = self.queue(&to);
                self.enter(id, to, start, call, Some((start.at, start.event)), false);
                self.ready_after(id, 0);
            }
            None => self.remove(id, How::Discarded, number),
        }
    }

    fn rolled_back(&mut self, id: Key, start: Mark, kind: Kind) {
        let Some(item) = self.items.get(&id) else { return };
        let Kind::Rollback { keep_attempt, dead_letter, .. } = kind else { return };
        let Some(queue) = self.queues.get(&item.queue) else { return };
        let sure = queue.settings_unsure_until <= self.now.at;
        let limit = queue.settings.max_attempts;
        let failed = item.last.as_ref().is_some_and(|last| limit > 0 && last.attempt >= limit);
        if sure && self.has_limits(item.queue) && (dead_letter || failed && !keep_attempt) {
            let events: Vec<u64> = item.last.iter().map(|last| last.delivered.event).collect();
            let explanation = "rolled back where it had to be dead-lettered".to_owned();
            self.violate(
                Rule::Limits,
                Some(id),
                "",
                explanation,
                &[&[start.event], &events[..]].concat(),
            );
        }
    }

    /// A settle has changed nothing: what it would have excused is a violation.
    fn settle_changed_nothing(&mut self, call: CallId, receipt: &str) {
        let key = Key::of(receipt);
        let Some(receipt) = self.receipts.get_mut(&key) else { return };
        let (id, stream) = (receipt.item, receipt.call);
        receipt.settling = false;
        if let Some(stream) = self.calls.get_mut(&stream) {
            stream.may_be_free = stream.may_be_free.saturating_sub(1);
        }
        self.judge_suspects(id, call);
        let Some(item) = self.items.get(&id).filter(|item| item.settles.is_empty()) else { return };
        if item.last.as_ref().is_some_and(|last| last.receipt == key) {
            self.commit_has_freed_nothing(key);
        }
    }

    fn judge_suspects(&mut self, id: Key, call: CallId) {
        let now = self.now.event;
        let Some(item) = self.items.get_mut(&id) else { return };
        item.settles.retain(|settle| settle.call != call);
        let others = item.ender().is_some();
        let suspects = std::mem::take(&mut item.suspects);
        for (excuse, mut violation) in suspects {
            if excuse == call && !others {
                violation.events.push(now);
                self.keep(violation);
            } else if let Some(item) = self.items.get_mut(&id).filter(|_| excuse != call) {
                item.suspects.push((excuse, violation));
            }
        }
    }

    fn settle_unknown(&mut self, receipt: &str, kind: Kind) {
        let queue = self.receipts.get(&Key::of(receipt)).map(|receipt| receipt.queue);
        let Some(queue) = queue.and_then(|queue| self.queues.get_mut(&queue)) else { return };
        match kind {
            Kind::Commit => queue.totals.committed.maybe += 1,
            Kind::Move { .. } => queue.totals.moved.maybe += 1,
            _ => {}
        }
    }

    /// `LEASE_LOST`: the item is there, and something has ended the reservation.
    fn lease_lost(&mut self, call: CallId, start: Mark, name: &str) {
        let key = Key::of(name);
        let Some(receipt) = self.receipts.get(&key) else { return };
        let (id, delivered, ended) = (receipt.item, receipt.delivered.event, receipt.ended);
        self.commit_may_have_freed(key);
        self.judge_suspects(id, call);
        let gone =
            self.gone.get(&id).filter(|gone| gone.how == How::Committed && gone.mark < start);
        let replayed = |gone: &super::Gone| {
            self.queues.get(&gone.queue).is_some_and(|queue| queue.replays.since(gone.mark.event))
        };
        if let Some(at) = gone.filter(|gone| !replayed(gone)).map(|gone| gone.mark.event) {
            let explanation = "answered LEASE_LOST after its commit; it is gone".to_owned();
            return self.violate(Rule::Outcome, Some(id), name, explanation, &[delivered, at]);
        }
        let Some(item) = self.items.get(&id) else { return };
        let Some(last) = item.last.as_ref().filter(|last| last.receipt == key) else { return };
        let is_valid = last.ended.is_none()
            && !last.by_stream
            && last.lease > self.now.at + self.options.clock
            && self.clock_stepped <= delivered
            && !self.options.leases_may_be_lost;
        if is_valid && ended.is_none() && item.ender().is_none() && !self.may_be_gone(item) {
            let stream = self.open_stream(last);
            let explanation = "answered LEASE_LOST while its lease is valid".to_owned();
            let events = [delivered, start.event];
            let violation = self.violation(Rule::Outcome, Some(id), name, explanation, &events);
            self.keep_unless_broken(stream, violation);
        }
    }

    /// `GONE`: something has removed the item.
    fn said_gone(&mut self, call: CallId, start: Mark, name: &str) {
        let Some(receipt) = self.receipts.get(&Key::of(name)) else { return };
        let (id, number, delivered) = (receipt.item, receipt.number, receipt.delivered.event);
        let queue = receipt.queue;
        self.commit_may_have_freed(Key::of(name));
        self.judge_suspects(id, call);
        let Some(item) = self.items.get(&id) else { return };
        let was_deleted =
            self.queues.get(&queue).is_some_and(|queue| queue.deletions.since(delivered));
        if was_deleted && (item.queue != queue || self.may_be_elsewhere(item)) {
            return; // true of any receipt of that queue
        }
        let popped = self.queues.get(&item.queue).is_some_and(|queue| queue.popped_unseen > 0);
        if popped || self.may_be_gone(item) {
            self.remove(id, How::SaidGone, number);
        } else {
            let explanation = "answered GONE, and nobody has removed it".to_owned();
            self.violate(Rule::Outcome, Some(id), name, explanation, &[delivered, start.event]);
        }
    }

    /// An item that a `CommitAndPush` under way pushes was seen: its commit has happened.
    pub(super) fn push_was_seen(&mut self, call: CallId, pushed: Key) {
        let now = self.now.event;
        let Some(bond) = self.bonds.get_mut(&call) else { return };
        bond.seen = (bond.seen.0 + 1, now);
        let (item, number, start, refuted) = (bond.item, bond.number, bond.start, bond.refuted);
        match refuted {
            Some(refuted) => {
                let explanation = "pushed by a CommitAndPush whose item was delivered again";
                let events = [start, refuted];
                self.violate(Rule::Atomic, Some(pushed), "", explanation.to_owned(), &events);
            }
            None => self.remove(item, How::PushesSeen, number),
        }
    }

    /// The item of a `CommitAndPush` was delivered again: it has not happened.
    pub(super) fn refute_bond(&mut self, call: CallId) {
        let now = self.now.event;
        if let Some(bond) = self.bonds.get_mut(&call) {
            bond.refuted.get_or_insert(now);
        }
    }

    fn pushes_of_bond_refused(&mut self, call: CallId, request: &Request) {
        self.bonds.remove(&call);
        let Request::CommitAndPush { pushes, .. } = request else { return };
        for (index, push) in pushes.iter().enumerate() {
            self.push_refused(call, index, &push.item, Rule::Atomic);
        }
    }

    fn pushes_of_bond_unknown(&mut self, call: CallId, request: &Request) {
        let Request::CommitAndPush { pushes, .. } = request else { return };
        for (index, push) in pushes.iter().enumerate() {
            self.push_unknown(call, index, &push.item);
        }
    }

    /// At rest: of each `CommitAndPush` all pushes were seen, or none.
    pub(super) fn check_bonds(&mut self) {
        for (call, bond) in std::mem::take(&mut self.bonds) {
            let (seen, last) = bond.seen;
            // What was not seen may have been popped or purged.
            let stays = |queue: &Key| {
                let queue = self.queues.get(queue);
                queue.is_some_and(|queue| {
                    queue.popped_unseen == 0 && !queue.purges.since(bond.start)
                })
            };
            // An operator may have deleted it by an id that nobody else was told.
            let all_stay = bond.queues.len() == bond.pushes
                && self.early_deletions.iter().all(|id| self.items.contains_key(id))
                && bond.queues.iter().all(stays);
            if all_stay && seen > 0 && seen < bond.pushes {
                let explanation =
                    format!("of {} pushes of CommitAndPush {call} {seen} are there", bond.pushes);
                let events = [bond.start, last];
                self.violate(Rule::Atomic, None, "CommitAndPush", explanation, &events);
            }
        }
    }

    /// Returns whether an item may be at a limit, so that the next failure takes it out of its queue.
    fn may_be_at_limit(&self, item: &Item) -> bool {
        let Some(queue) = self.queues.get(&item.queue).filter(|_| self.has_limits(item.queue))
        else {
            return false;
        };
        // Consumers that ended may have had it and not seen it.
        let unseen = queue.cuts - item.cuts.min(queue.cuts)
            + queue.consumers.len() as u64
            + queue.lost_calls;
        let attempt = item.last.as_ref().map_or(1, |last| u64::from(last.attempt));
        let here = u64::from(item.number - item.deliveries_before.unwrap_or(0).min(item.number));
        let reaches = |limit: u32, most: u64| limit > 0 && most >= u64::from(limit);
        let was_handed_out = item.last.is_some() || unseen > 0;
        // While the store fails, or consumers halt, an item may lapse again and again, reserved for a consumer that is not sent it
        // in time.
        let entered = item.entered.0.event;
        let is_unsent = |call: &CallId| self.calls.get(call).is_some_and(|call| call.may_go_unsent);
        let was_disturbed = self.faults > 0
            || self.fault_ended.event > entered
            || queue.flow_changed.event > entered;
        // For a client that does not read, and short leases, that takes no fault.
        let is_unread = |call: &CallId| self.calls.get(call).is_some_and(|call| call.may_go_unread);
        let may_lapse_unseen = was_disturbed
            && (queue.unsent.event > entered || queue.consumers.iter().any(is_unsent))
            || queue.unread.event > entered
            || queue.consumers.iter().any(is_unread);
        may_lapse_unseen
            || was_handed_out
                && (queue.settings_unsure_until > self.now.at
                    || reaches(queue.settings.max_attempts, attempt + unseen)
                    || reaches(queue.settings.max_deliveries, here + unseen))
    }

    /// Returns whether something that is not certain may have removed an item for good.
    pub(super) fn may_be_gone(&self, item: &Item) -> bool {
        let Some(queue) = self.queues.get(&item.queue) else { return true };
        let discards = |kind: Kind| {
            let rejects = matches!(kind, Kind::Rollback { dead_letter: true, .. });
            kind == Kind::Commit || rejects && queue.settings.discard_failed
        };
        self.may_have_vanished(item)
            || self.is_being_taken(queue)
            || self.may_be_gone_elsewhere(item, queue)
            || item.settles.iter().any(|settle| discards(settle.kind))
            || (queue.settings.discard_failed || queue.settings_unsure_until > self.now.at)
                && self.may_be_at_limit(item)
    }

    /// Returns whether an item may be in another queue.
    fn may_be_elsewhere(&self, item: &Item) -> bool {
        let Some(queue) = self.queues.get(&item.queue) else { return true };
        let is_move = |settle: &Settle| matches!(settle.kind, Kind::Move { .. });
        queue.redrives.since(item.entered.0.event)
            || item.settles.iter().any(is_move)
            || self.may_be_at_limit(item)
    }

    /// Returns whether an item may be in another queue, by a redrive, by a move whose outcome is not known, or as a dead letter, and
    /// may have been removed there.
    fn may_be_gone_elsewhere(&self, item: &Item, queue: &Queue) -> bool {
        let since = item.entered.0.event;
        let removes = |to: &Queue| {
            to.purges.since(since)
                || to.popped_unseen > 0
                || to.settings.discard_failed
                || self.is_being_taken(to)
        };
        let moved = |settle: &Settle| match settle.kind {
            Kind::Move { to, .. } => self.queues.get(&to).is_none_or(removes),
            _ => false,
        };
        let dead_letters = || {
            let to = self.dead_letter_queue(item.queue)?;
            self.queues.get(&Key::of(&to))
        };
        queue.redrives.since(since) && self.queues.values().any(removes)
            || item.settles.iter().any(moved)
            || self.may_be_at_limit(item) && dead_letters().is_some_and(removes)
    }

    /// Returns whether an item may have left its queue: for good, or for another queue. A caller that can
    /// wait for the answers of settles under way takes `judged_later`, and these do not count.
    pub(super) fn may_have_left(&self, item: &Item, judged_later: bool) -> bool {
        let Some(queue) = self.queues.get(&item.queue) else { return true };
        let counts = |settle: &&Settle| !judged_later || !self.calls.contains_key(&settle.call);
        let mut settles = item.settles.iter().filter(counts);
        self.may_have_vanished(item)
            || self.is_being_taken(queue)
            || queue.popped_unseen > 0
            || queue.redrives.since(item.entered.0.event)
            || settles.any(|settle| settle.kind.removes())
            || self.may_be_at_limit(item)
    }

    /// Returns whether a consumer is under way whose items are gone before it has them.
    fn is_being_taken(&self, queue: &Queue) -> bool {
        let requests = queue.consumers.iter().filter_map(|call| self.calls.get(call));
        requests.map(|call| &call.request).any(|request| match request {
            Request::Consume(consume) => consume.auto_commit,
            request => matches!(request, Request::Pop { .. }),
        })
    }

    /// Returns whether an item may have expired or been deleted.
    pub(super) fn may_have_vanished(&self, item: &Item) -> bool {
        let Some(queue) = self.queues.get(&item.queue) else { return true };
        let first = item.expires.map(|(first, _)| first);
        let is_known = self.clock_stepped <= item.stored;
        first.is_some_and(|first| !is_known || first <= self.now.at + self.options.clock)
            || item.maybe_deleted
            || queue.purges.since(item.entered.0.event)
    }
}

/// Returns the receipts of a request and what it does with each.
fn settles(request: &Request) -> Vec<(&str, Kind)> {
    match request {
        Request::Commit { receipts } => {
            receipts.iter().map(|receipt| (receipt.as_str(), Kind::Commit)).collect()
        }
        Request::Extend { receipts, lease } => {
            let kind = Kind::Extend { lease: *lease };
            receipts.iter().map(|receipt| (receipt.as_str(), kind)).collect()
        }
        Request::Rollback { items } => {
            let kind = |item: &RollbackItem| Kind::Rollback {
                delay: item.delay,
                keep_attempt: item.keep_attempt,
                dead_letter: item.dead_letter,
            };
            items.iter().map(|item| (item.receipt.as_str(), kind(item))).collect()
        }
        Request::Move { receipt, to_queue, delay } => {
            vec![(receipt, Kind::Move { to: Key::of(to_queue), delay: *delay })]
        }
        Request::CommitAndPush { receipt, .. } => vec![(receipt, Kind::Commit)],
        _ => Vec::new(),
    }
}
