//! The model: queues and items, one at a time, without faults.

use std::collections::HashMap;

use sluicegate_checker::history::{
    Answer, CallId, Consume, Delivery, Figures, Listed, NewItem, Outcome, Pushed, QueueAtRest,
    Request, Response, State, Time,
};

use crate::story::MS;

/// The limit of the queue `work`. The others have none that is ever reached.
pub(super) const MAX_ATTEMPTS: u32 = 2;

struct Lease {
    receipt: String,
    end: Time,
    stream: Option<CallId>,
}

struct Stored {
    id: String,
    name: String,
    queue: String,
    key: String,
    eligible: Time,
    expires: Option<Time>,
    attempt: u32,
    deliveries: u32,
    dead_letter: Option<(String, u32)>,
    lease: Option<Lease>,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) now: Time,
    /// In the order of arrival.
    items: Vec<Stored>,
    stored: usize,
    dedups: HashMap<String, String>,
    streams: HashMap<CallId, Consume>,
    /// What is under way to streams, with when it arrives.
    messages: Vec<(Time, CallId, Delivery)>,
    totals: HashMap<String, Figures>,
}

impl World {
    /// Performs a call and returns its answer.
    pub(super) fn perform(&mut self, call: CallId, request: &Request) -> Answer {
        self.expire();
        Answer::Ok(match request {
            Request::Push { queue, items, .. } => {
                Response::Pushed(items.iter().map(|item| self.push(queue, item)).collect())
            }
            Request::Reserve { queue, max_items, lease, .. } => {
                let take = |_| self.take(queue, Some(*lease), None);
                Response::Deliveries((0..*max_items).filter_map(take).collect())
            }
            Request::Pop { queue, .. } => {
                Response::Deliveries(self.take(queue, None, None).into_iter().collect())
            }
            Request::Commit { receipts } => {
                let outcomes = receipts.iter().map(|receipt| self.commit(receipt));
                Response::Settled(outcomes.collect())
            }
            Request::Rollback { items } => {
                let outcomes = items.iter().map(|item| {
                    self.settle(&item.receipt, |world, index| {
                        world.roll_back(index, item.delay, item.keep_attempt, item.dead_letter)
                    })
                });
                Response::Settled(outcomes.collect())
            }
            Request::Extend { receipts, lease } => {
                let end = self.now + lease;
                let extend = |world: &mut Self, index: usize| {
                    if let Some(held) = &mut world.items[index].lease {
                        held.end = end;
                    }
                    Outcome::Ok
                };
                let outcomes = receipts.iter().map(|receipt| self.settle(receipt, extend));
                Response::Extended(outcomes.map(|outcome| (outcome, Some(end))).collect())
            }
            Request::Move { receipt, to_queue, delay } => {
                let eligible = self.now + delay;
                let outcome = self.settle(receipt, |world, index| {
                    world.totals(index).moved += 1;
                    world.put(index, to_queue, eligible);
                    Outcome::Ok
                });
                Response::Settled(vec![outcome])
            }
            Request::CommitAndPush { receipt, pushes } => {
                let outcome = self.commit(receipt);
                let done = pushes.iter().filter(|_| outcome == Outcome::Ok);
                let pushed = done.map(|push| self.push(&push.queue, &push.item)).collect();
                Response::CommittedAndPushed(outcome, pushed)
            }
            Request::DeleteItem { queue, id } => {
                let found =
                    self.items.iter().position(|item| item.id == *id && item.queue == *queue);
                match found {
                    Some(index) => drop(self.items.remove(index)),
                    None => return Answer::Refused("NOT_FOUND".to_owned()),
                }
                Response::Done
            }
            other => panic!("call {call} is not in the model: {other:?}"),
        })
    }

    fn expire(&mut self) {
        let now = self.now;
        self.items.retain(|item| item.expires.is_none_or(|end| end > now));
    }

    fn totals(&mut self, index: usize) -> &mut Figures {
        self.totals.entry(self.items[index].queue.clone()).or_default()
    }

    fn push(&mut self, queue: &str, item: &NewItem) -> Pushed {
        let dedup = format!("{queue} {}", item.dedup_id);
        if let Some(id) = self.dedups.get(&dedup).filter(|_| !item.dedup_id.is_empty()) {
            return Pushed { id: id.clone(), deduplicated: true, sequence: 0 };
        }
        self.stored += 1;
        let id = format!("id {}", self.stored);
        self.dedups.insert(dedup, id.clone());
        self.items.push(Stored {
            id: id.clone(),
            name: item.name.clone(),
            queue: queue.to_owned(),
            key: item.ordering_key.clone(),
            eligible: self.now + item.delay,
            expires: item.ttl.map(|ttl| self.now + ttl),
            attempt: 1,
            deliveries: 0,
            dead_letter: None,
            lease: None,
        });
        self.totals.entry(queue.to_owned()).or_default().pushed += 1;
        Pushed { id, deduplicated: false, sequence: self.stored as u64 }
    }

    /// Hands out the first item, under a lease or for good.
    fn take(
        &mut self,
        queue: &str,
        lease: Option<u64>,
        stream: Option<CallId>,
    ) -> Option<Delivery> {
        self.lapse();
        let is_ready = |index: usize, item: &Stored| {
            let behind = |other: &Stored| other.queue == queue && other.key == item.key;
            let blocked = !item.key.is_empty() && self.items[..index].iter().any(behind);
            item.queue == queue && item.lease.is_none() && item.eligible <= self.now && !blocked
        };
        let index = (0..self.items.len()).find(|index| is_ready(*index, &self.items[*index]))?;
        let (now, item) = (self.now, &mut self.items[index]);
        item.deliveries += 1;
        let receipt = format!("{}/{}", item.id, item.deliveries);
        let (origin_queue, dead_letter_attempts) = item.dead_letter.clone().unwrap_or_default();
        let delivery = Delivery {
            receipt: receipt.clone(),
            id: item.id.clone(),
            name: item.name.clone(),
            queue: queue.to_owned(),
            attempt: item.attempt,
            deliveries: item.deliveries,
            sequence: 0,
            lease_end: lease.map_or(0, |lease| now + lease),
            origin_queue,
            dead_letter_attempts,
        };
        item.lease = lease.map(|lease| Lease { receipt, end: now + lease, stream });
        self.totals(index).delivered += 1;
        if lease.is_none() {
            let totals = self.totals(index);
            (totals.committed, totals.popped) = (totals.committed + 1, totals.popped + 1);
            self.items.remove(index);
        }
        Some(delivery)
    }

    /// Leases that have ended are failed attempts.
    fn lapse(&mut self) {
        let now = self.now;
        let ended = |item: &Stored| item.lease.as_ref().is_some_and(|lease| lease.end <= now);
        while let Some(index) = self.items.iter().position(ended) {
            self.roll_back(index, Some(0), false, false);
        }
    }

    /// Settles the item that a receipt holds.
    fn settle(&mut self, receipt: &str, settle: impl Fn(&mut Self, usize) -> Outcome) -> Outcome {
        let holds = |item: &Stored| item.lease.as_ref().is_some_and(|held| held.receipt == receipt);
        if let Some(index) = self.items.iter().position(holds) {
            return settle(self, index);
        }
        let (id, _) = receipt.split_once('/').expect("a receipt of the model");
        let is_there = self.items.iter().any(|item| item.id == id);
        if is_there { Outcome::LeaseLost } else { Outcome::Gone }
    }

    fn commit(&mut self, receipt: &str) -> Outcome {
        self.settle(receipt, |world, index| {
            world.totals(index).committed += 1;
            world.items.remove(index);
            Outcome::Ok
        })
    }

    fn roll_back(
        &mut self,
        index: usize,
        delay: Option<u64>,
        keep_attempt: bool,
        dead_letter: bool,
    ) -> Outcome {
        let policy = if keep_attempt { 0 } else { 1_000 * MS };
        let now = self.now;
        let item = &mut self.items[index];
        let fails = !keep_attempt && item.attempt == MAX_ATTEMPTS;
        if item.queue == "work" && (dead_letter || fails) {
            item.dead_letter = Some((item.queue.clone(), item.attempt));
            self.totals(index).dead_lettered += 1;
            self.put(index, "work.dead", now);
            return Outcome::DeadLettered;
        }
        item.attempt += u32::from(!keep_attempt);
        item.eligible = now + delay.unwrap_or(policy);
        item.lease = None;
        Outcome::Ok
    }

    /// Puts an item at the end of a queue.
    fn put(&mut self, index: usize, queue: &str, eligible: Time) {
        let mut item = self.items.remove(index);
        (item.queue, item.eligible, item.attempt) = (queue.to_owned(), eligible, 1);
        item.lease = None;
        self.items.push(item);
    }

    pub(super) fn open(&mut self, call: CallId, of: Consume) {
        self.streams.insert(call, of);
    }

    pub(super) fn is_open(&self, call: CallId) -> bool {
        self.streams.contains_key(&call)
    }

    /// The stream ends: its items are ready again at once.
    pub(super) fn close(&mut self, call: CallId) {
        self.streams.remove(&call);
        self.messages.retain(|(_, stream, _)| *stream != call);
        for item in &mut self.items {
            if item.lease.as_ref().is_some_and(|lease| lease.stream == Some(call)) {
                (item.lease, item.eligible) = (None, self.now);
            }
        }
    }

    /// Sends each stream what it has room for, and returns what arrives.
    pub(super) fn pump(&mut self) -> Vec<(CallId, Delivery)> {
        self.expire();
        let mut streams: Vec<(CallId, Consume)> =
            self.streams.iter().map(|(call, of)| (*call, of.clone())).collect();
        streams.sort_unstable_by_key(|(call, _)| *call);
        for (call, of) in streams {
            let held = self
                .items
                .iter()
                .filter(|item| item.lease.as_ref().is_some_and(|lease| lease.stream == Some(call)));
            let mut room = (of.max_in_flight as usize).saturating_sub(held.count());
            while room > 0 {
                let lease = (!of.auto_commit).then_some(of.lease);
                let Some(delivery) = self.take(&of.queue, lease, Some(call)) else { break };
                self.messages.push((self.now + 200 * MS, call, delivery));
                room -= 1;
            }
        }
        let now = self.now;
        let arrived = self.messages.extract_if(.., |(at, ..)| *at <= now);
        arrived.map(|(_, call, delivery)| (call, delivery)).collect()
    }

    /// Returns all queues as they are.
    pub(super) fn at_rest(&mut self, queues: &[&str]) -> Vec<QueueAtRest> {
        self.expire();
        let mut at_rest = Vec::new();
        for queue in queues {
            let mut figures = self.totals.get(*queue).copied().unwrap_or_default();
            let mut items = Vec::new();
            for (index, item) in self.items.iter().enumerate() {
                if item.queue != *queue {
                    continue;
                }
                let behind = |other: &Stored| other.queue == *queue && other.key == item.key;
                let (state, count) = if item.lease.is_some() {
                    (State::Reserved, &mut figures.reserved)
                } else if !item.key.is_empty() && self.items[..index].iter().any(behind) {
                    (State::Blocked, &mut figures.blocked)
                } else if item.eligible > self.now {
                    (State::Delayed, &mut figures.delayed)
                } else {
                    (State::Ready, &mut figures.ready)
                };
                *count += 1;
                items.push(Listed { id: item.id.clone(), name: item.name.clone(), state });
            }
            let queue = (*queue).to_owned();
            at_rest.push(QueueAtRest { queue, items, figures: Some(figures) });
        }
        at_rest
    }
}
