//! The checker: follows a history event by event, and knows at each point what may be and what must be.
//!
//! A rule speaks only if the history cannot be explained. An outcome that is unknown may have taken effect
//! at any time after the start of its call, until something is seen that excludes it. Facts that a client
//! cannot see are assumed in favour of the broker.

mod admin;
mod deliveries;
mod figures;
mod flow;
mod in_flight;
mod key;
mod order;
mod pushes;
mod rest;
mod schedules;
mod settles;
mod state;
mod streams;
mod wakes;

use std::collections::{BTreeMap, VecDeque};

use flow::Flow;
use key::{Key, Map, Set};
use schedules::schedule_of;
use state::{Call, Dedup, Gone, How, Item, Line, Mark, Named, Queue, Receipt};

use crate::{
    history::{Answer, CallId, Event, Figures, Request, Response, Settings, Span, Time, What},
    report::{Report, Violation},
    rules::Rule,
};

/// How many violations are kept.
const KEPT: usize = 100;

/// What the checker allows for.
#[derive(Debug, Clone)]
pub struct Options {
    /// How far the clocks of brokers, store and clients may be apart.
    pub clock: Span,
    /// How long a message may be under way to a client that reads.
    pub transit: Span,
    /// The longest time until a waiting consumer has what is ready: the fallback poll, and some time for
    /// the work.
    pub wake: Span,
    /// How long a change of a queue's settings takes to reach every broker.
    pub settings: Span,
    /// How long what is settled is remembered. Later deliveries of it count as invented.
    pub remember: Span,
    /// Leases may be lost without being counted: power failures on SQLite.
    pub leases_may_be_lost: bool,
    /// The settings of queues that are created by a push.
    pub defaults: Settings,
}

impl Default for Options {
    /// Returns what suits brokers with default settings on one host.
    fn default() -> Self {
        Self {
            clock: 50_000,
            transit: 2_000_000,
            wake: 20_000_000,
            settings: 2_000_000,
            remember: 600_000_000,
            leases_may_be_lost: false,
            defaults: Settings::default(),
        }
    }
}

/// Something settled that is to be forgotten.
enum Old {
    Item(Key),
    Receipt(Key),
    Name(Key),
    Sequence(Key, u64),
}

/// Checks a history as it comes, event by event.
pub struct Checker {
    options: Options,
    /// The event that is observed.
    now: Mark,
    observed: u64,
    calls: Map<CallId, Call>,
    queues: Map<Key, Queue>,
    items: Map<Key, Item>,
    names: Map<Key, Named>,
    dedups: Map<Key, Dedup>,
    receipts: Map<Key, Receipt>,
    lines: Map<Key, Line>,
    gone: Map<Key, Gone>,
    /// Deletions of items whose pushes were not answered yet: who lists a queue knows an item before its producer does.
    early_deletions: Set<Key>,
    bonds: Map<CallId, settles::Bond>,
    overfull: Vec<in_flight::Overfull>,
    revoked: Map<Key, u64>,
    /// The last totals of each queue by broker, with when they were answered.
    totals_seen: Map<Key, (Figures, Mark)>,
    /// What is to be forgotten, and when: in the order of time, as all is remembered equally long.
    old: VecDeque<(Time, Old)>,
    old_dedups: VecDeque<(Time, Key)>,
    schedules: BTreeMap<String, schedules::Schedule>,
    ticks: schedules::Ticks,
    /// From when to when there were faults.
    fault_spans: Vec<(Time, Option<Time>)>,
    /// Faults under way.
    faults: u32,
    /// When the last fault ended.
    fault_ended: Mark,
    clock_stepped: u64,
    /// How many steps of clocks brokers and store are following.
    clocks_follow: u32,
    /// The clock of the store runs slowly.
    is_slow: bool,
    report: Report,
}

impl Checker {
    /// Returns a checker that has seen nothing.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            now: Mark::default(),
            observed: 0,
            calls: Map::default(),
            queues: Map::default(),
            items: Map::default(),
            names: Map::default(),
            dedups: Map::default(),
            receipts: Map::default(),
            lines: Map::default(),
            gone: Map::default(),
            early_deletions: Set::default(),
            bonds: Map::default(),
            overfull: Vec::new(),
            revoked: Map::default(),
            totals_seen: Map::default(),
            old: VecDeque::new(),
            old_dedups: VecDeque::new(),
            schedules: BTreeMap::default(),
            ticks: schedules::Ticks::default(),
            fault_spans: Vec::new(),
            faults: 0,
            fault_ended: Mark::default(),
            clock_stepped: 0,
            clocks_follow: 0,
            is_slow: false,
            report: Report::default(),
        }
    }

    /// Takes the next event.
    pub fn observe(&mut self, event: Event) {
        if event.at < self.now.at {
            let explanation = "the time goes back".to_owned();
            self.violate(Rule::Recording, None, "history", explanation, &[]);
        }
        self.now = Mark { event: self.observed, at: event.at.max(self.now.at) };
        self.observed += 1;
        if self.clocks_follow > 0 {
            self.clock_stepped = self.now.event;
        }
        match event.what {
            What::Start { call, broker, request, .. } => self.start(call, &broker, request),
            What::End { call, answer } => self.end(call, answer),
            What::Delivered { call, deliveries } => self.delivered(call, &deliveries),
            What::Revoked { call, receipt } => self.revoked(call, &receipt),
            What::Disturbed { begins, .. } => self.disturbed(begins),
            What::ClockStepped => self.clock_stepped = self.now.event,
            What::ClocksFollow { begins } => {
                self.clock_stepped = self.now.event;
                let before = self.clocks_follow;
                self.clocks_follow = if begins { before + 1 } else { before.saturating_sub(1) };
            }
            What::ClockSlow { begins } => self.is_slow = begins,
            What::Rest { queues } => self.rest(&queues),
        }
        self.report.most_open = self.report.most_open.max(self.items.len() as u64);
        self.forget();
    }

    /// Returns what was found.
    pub fn finish(mut self) -> Report {
        let streams: Vec<CallId> = self.calls.keys().copied().collect();
        for call in streams {
            self.judge_suspects_of_stream(call);
        }
        self.check_overdue();
        self.report.events = self.observed;
        self.report
    }

    fn start(&mut self, id: CallId, broker: &str, request: Request) {
        let call = Call {
            start: self.now,
            broker: Key::of(broker),
            request: Request::GetQueueStats { queue: String::new() },
            last: self.now,
            idle: self.now,
            may_go_unsent: self.may_go_unsent(&request),
            may_go_unread: self.may_go_unread(&request),
            held: Vec::new(),
            may_be_free: 0,
            surely_not_free: 0,
            flow: Flow::of(&request),
            suspects: Vec::new(),
        };
        if self.calls.insert(id, call).is_some() {
            let explanation = format!("call {id} starts twice");
            self.violate(Rule::Recording, None, "history", explanation, &[]);
        }
        match &request {
            Request::Push { queue, items, stream } => {
                let queue = self.queue(queue);
                for (index, item) in items.iter().enumerate() {
                    self.start_push(id, index, queue, item, *stream);
                }
            }
            Request::Pop { queue, .. } | Request::Reserve { queue, .. } => {
                self.start_consumer(id, queue);
            }
            Request::Consume(consume) => self.start_consumer(id, &consume.queue),
            Request::Flow { stream, max_in_flight } => {
                self.start_flow(id, *stream, *max_in_flight);
            }
            Request::GetQueueStats { .. } => {}
            Request::Commit { .. }
            | Request::Rollback { .. }
            | Request::Extend { .. }
            | Request::Move { .. }
            | Request::CommitAndPush { .. } => self.start_settles(id, &request),
            other => match schedule_of(other) {
                Some(schedule) => self.start_schedule_change(schedule),
                None => self.start_operator(other),
            },
        }
        if let Some(call) = self.calls.get_mut(&id) {
            call.request = request;
        }
    }

    fn end(&mut self, id: CallId, answer: Answer) {
        let Some(call) = self.calls.get(&id) else {
            let explanation = format!("call {id} ends and has not started");
            return self.violate(Rule::Recording, None, "history", explanation, &[]);
        };
        if matches!(call.request, Request::Consume(_)) {
            return self.end_stream(id, &answer);
        }
        match &call.request {
            Request::Push { .. } => self.end_push(id, answer),
            Request::Pop { .. } | Request::Reserve { .. } => self.end_reserve(id, answer),
            Request::Flow { stream, .. } => self.end_flow(id, *stream, &answer),
            Request::Commit { .. }
            | Request::Rollback { .. }
            | Request::Extend { .. }
            | Request::Move { .. }
            | Request::CommitAndPush { .. } => self.end_settles(id, answer),
            Request::GetQueueStats { .. } => {
                if let (Some(call), Answer::Ok(Response::Stats(figures))) =
                    (self.calls.remove(&id), answer)
                {
                    self.check_totals(&call, figures);
                }
            }
            request if schedule_of(request).is_some() => {
                let request = request.clone();
                self.end_schedule_change(&request, &answer);
            }
            _ => self.end_operator(id, &answer),
        }
        self.calls.remove(&id);
    }

    /// Returns the key of a queue, which is known from now on.
    fn queue(&mut self, name: &str) -> Key {
        let key = Key::of(name);
        let defaults = &self.options.defaults;
        self.queues.entry(key).or_insert_with(|| Queue {
            name: name.to_owned(),
            settings: defaults.clone(),
            ..Queue::default()
        });
        key
    }

    fn disturbed(&mut self, begins: bool) {
        if begins {
            self.faults += 1;
            self.fault_spans.push((self.now.at, None));
        } else {
            self.faults = self.faults.saturating_sub(1);
            let open = self.fault_spans.iter_mut().find(|(_, end)| end.is_none());
            if let Some((_, end)) = open {
                *end = Some(self.now.at);
            }
        }
        self.fault_ended = self.now;
        for queue in self.queues.values_mut() {
            queue.totals.unsure = true;
            queue.lone_since = queue.lone_since.max(self.now.event);
        }
    }

    /// Removes an item that is gone for certain.
    fn remove(&mut self, id: Key, how: How, number: u32) {
        let Some(item) = self.items.remove(&id) else { return };
        self.leave_line(id, item.queue, item.ordering);
        let forget_at = self.now.at + self.options.remember;
        let (mark, queue, expires) = (self.now, item.queue, item.expires);
        self.gone.insert(id, Gone { mark, number, how, queue, expires });
        self.old.push_back((forget_at, Old::Item(id)));
        self.old.push_back((forget_at, Old::Name(item.name_key)));
    }

    /// Returns true if an item that had expired may be there again: the clock of the store may have been set back since.
    fn may_be_back(&self, gone: &Gone) -> bool {
        gone.how == How::SaidGone && gone.expires.is_some() && gone.mark.event <= self.clock_stepped
    }

    /// Forgets what was settled long ago.
    fn forget(&mut self) {
        while self.old.front().is_some_and(|(at, _)| *at <= self.now.at) {
            match self.old.pop_front() {
                Some((_, Old::Item(id))) => drop(self.gone.remove(&id)),
                Some((_, Old::Receipt(receipt))) => self.forget_receipt(receipt),
                Some((_, Old::Name(name))) => self.forget_name(name),
                Some((_, Old::Sequence(queue, number))) => {
                    let queue = self.queues.get_mut(&queue);
                    queue.map(|queue| queue.sequences.remove(&number));
                }
                None => {}
            }
        }
        while self.old_dedups.front().is_some_and(|(at, _)| *at <= self.now.at) {
            if let Some((_, id)) = self.old_dedups.pop_front() {
                self.forget_dedup(id);
            }
        }
    }

    fn forget_receipt(&mut self, receipt: Key) {
        let open = self.receipts.get(&receipt).and_then(|receipt| self.items.get(&receipt.item));
        let is_last =
            open.and_then(|item| item.last.as_ref()).is_some_and(|last| last.receipt == receipt);
        if is_last {
            self.old.push_back((self.now.at + self.options.remember, Old::Receipt(receipt)));
        } else {
            self.receipts.remove(&receipt);
            self.revoked.remove(&receipt);
        }
    }

    fn forget_name(&mut self, name: Key) {
        let Some(named) = self.names.get(&name) else { return };
        let is_open = named.item.is_some_and(|(id, _)| self.items.contains_key(&id));
        if named.open.is_empty() && !is_open {
            self.names.remove(&name);
        }
    }

    /// Records a violation, proven by the given events and the present one.
    fn violate(
        &mut self,
        rule: Rule,
        id: Option<Key>,
        name: &str,
        explanation: String,
        events: &[u64],
    ) {
        let violation = self.violation(rule, id, name, explanation, events);
        self.keep(violation);
    }

    fn violation(
        &self,
        rule: Rule,
        id: Option<Key>,
        name: &str,
        explanation: String,
        events: &[u64],
    ) -> Violation {
        let item = id.and_then(|id| self.items.get(&id));
        let (id, name) = item.map_or(("", name), |item| (&*item.id, &*item.name));
        let mut events = events.to_vec();
        events.push(self.now.event);
        events.sort_unstable();
        events.dedup();
        let (id, name) = (id.to_owned(), name.to_owned());
        Violation { rule, id, name, related: None, explanation, events, evidence: Vec::new() }
    }

    fn keep(&mut self, violation: Violation) {
        if self.report.violations.len() < KEPT {
            self.report.violations.push(violation);
        } else {
            self.report.omitted += 1;
        }
    }
}
