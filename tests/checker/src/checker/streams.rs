//! Consumers: streams and waiting calls, what they hold, and how they end.

use super::{
    Checker,
    key::{Key, Map},
    state::{Call, Mark, Queue, Reservation},
};
use crate::{
    history::{Answer, CallId, Consume, Delivery, OnDisconnect, Request, Response, Span},
    report::Violation,
    rules::Rule,
};

/// How a delivery came to its consumer.
#[derive(Clone, Copy)]
pub(super) struct Taker {
    pub(super) call: CallId,
    pub(super) start: Mark,
    pub(super) holds: Holds,
    /// The length of its leases; 0 if it has none.
    pub(super) lease: Span,
    /// It may receive late.
    pub(super) slow: bool,
}

/// How long a consumer holds what it receives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    /// Not at all: it is committed already.
    Nothing,
    /// Until its lease ends.
    Lease,
    /// Until its lease ends, which is prolonged.
    RenewedLease,
    /// At most as long as the stream lives.
    Stream,
}

/// Returns whether a queue has one consumer at most, which receives what it is assigned.
fn serves_in_order(calls: &Map<CallId, Call>, queue: &Queue) -> bool {
    let mut consumers = queue.consumers.iter().filter_map(|call| calls.get(call));
    queue.consumers.len() <= 1 && consumers.all(|call| !call.may_go_unsent)
}

/// Notes that a consumer begins or ends whose items may be taken back before they are sent.
fn note_unsent(calls: &Map<CallId, Call>, queue: &mut Queue, call: CallId, now: Mark) {
    let Some(call) = calls.get(&call).filter(|call| call.may_go_unsent) else { return };
    queue.unsent = now;
    if call.may_go_unread {
        queue.unread = now;
    }
}

impl Checker {
    pub(super) fn start_consumer(&mut self, call: CallId, queue: &str) {
        let (key, now) = (self.queue(queue), self.now.event);
        let mark = self.now;
        let Some(queue) = self.queues.get_mut(&key) else { return };
        queue.consumers.push(call);
        note_unsent(&self.calls, queue, call, mark);
        queue.lone_since =
            if serves_in_order(&self.calls, queue) { queue.lone_since.min(now) } else { u64::MAX };
    }

    /// Returns whether a consumer's items may be taken back before they are sent: because it does not read, or because their leases are
    /// short. Other items come before them then.
    pub(super) fn may_go_unsent(&self, request: &Request) -> bool {
        match request {
            Request::Reserve { lease, .. } => *lease <= self.options.transit,
            Request::Consume(consume) => {
                !consume.auto_commit && (consume.slow || consume.lease <= self.options.transit)
            }
            _ => false,
        }
    }

    /// Returns whether a consumer does not read, and has leases so short that what it is assigned may lapse again and again.
    pub(super) fn may_go_unread(&self, request: &Request) -> bool {
        let is_unread = |consume: &Consume| consume.slow && consume.lease <= self.options.transit;
        matches!(request, Request::Consume(consume) if is_unread(consume))
    }

    /// Takes a consumer from its queue. One that `broke` off may have been handed items that nobody saw.
    fn end_consumer(&mut self, call: CallId, queue: &str, broke: bool, lease: Span) {
        let (key, now, transit) = (self.queue(queue), self.now, self.options.transit);
        let Some(queue) = self.queues.get_mut(&key) else { return };
        queue.consumers.retain(|other| *other != call);
        note_unsent(&self.calls, queue, call, now);
        if broke {
            queue.cut = now;
            queue.cuts += 1;
            queue.excused_until = queue.excused_until.max(now.at + lease + transit);
        }
        if broke || queue.lone_since == u64::MAX {
            let lone = serves_in_order(&self.calls, queue);
            queue.lone_since = if lone { now.event } else { u64::MAX };
        }
    }

    pub(super) fn end_reserve(&mut self, id: CallId, answer: Answer) {
        let Some(call) = self.calls.get(&id) else { return };
        let (queue, max_items, wait, lease, holds) = match &call.request {
            Request::Pop { queue, max_items, wait } => {
                (queue.clone(), *max_items, *wait, 0, Holds::Nothing)
            }
            Request::Reserve { queue, max_items, wait, lease } => {
                (queue.clone(), *max_items, *wait, *lease, Holds::Lease)
            }
            _ => return,
        };
        let taker = Taker { call: id, start: call.start, holds, lease, slow: false };
        let broke = matches!(answer, Answer::Unknown(_));
        self.note_late(taker, &queue);
        if let Answer::Ok(Response::Deliveries(deliveries)) = answer {
            if deliveries.len() > max_items.max(1) as usize {
                let explanation = format!("{} deliveries, {max_items} asked", deliveries.len());
                self.violate(Rule::Limits, None, &queue, explanation, &[taker.start.event]);
            }
            if deliveries.is_empty() && wait > 0 {
                self.waited_in_vain(id, &queue);
            }
            for delivery in &deliveries {
                self.deliver(taker, delivery);
            }
        }
        self.end_consumer(id, &queue, broke, lease);
        let Some(queue) = self.queues.get_mut(&Key::of(&queue)).filter(|_| broke) else { return };
        queue.lost_calls += 1;
        if holds == Holds::Nothing {
            let unseen = u64::from(max_items.max(1));
            queue.popped_unseen = queue.popped_unseen.saturating_add(unseen);
            queue.totals.popped.maybe += unseen;
            queue.totals.committed.maybe += unseen;
        }
    }

    /// Notes that items may have been reserved for a call, and were not handed out because too little was left of their leases.
    fn note_late(&mut self, taker: Taker, queue: &str) {
        let margin = (taker.lease / 10).min(1_000_000) + self.options.clock;
        if taker.holds != Holds::Lease || self.now.at + margin < taker.start.at + taker.lease {
            return;
        }
        let (now, key) = (self.now, Key::of(queue));
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.late = now;
            queue.cuts += 1;
        }
    }

    pub(super) fn delivered(&mut self, id: CallId, deliveries: &[Delivery]) {
        let now = self.now;
        let Some(call) = self.calls.get_mut(&id) else {
            let explanation = format!("a delivery on stream {id}, which is not open");
            return self.violate(Rule::Recording, None, "history", explanation, &[]);
        };
        let Request::Consume(consume) = &call.request else { return };
        let Consume { auto_commit, on_disconnect, renew, slow, lease, .. } = *consume;
        let (most, most_bytes) = (call.flow.most() as usize, consume.max_in_flight_bytes);
        call.last = now;
        let taker = Taker {
            call: id,
            start: call.start,
            holds: match on_disconnect {
                _ if auto_commit => Holds::Nothing,
                OnDisconnect::KeepLease if renew => Holds::RenewedLease,
                OnDisconnect::KeepLease => Holds::Lease,
                OnDisconnect::Release | OnDisconnect::Count => Holds::Stream,
            },
            lease,
            slow,
        };
        self.check_halted(id);
        for delivery in deliveries {
            self.deliver(taker, delivery);
            let Some(call) = self.calls.get_mut(&id).filter(|_| !auto_commit) else { continue };
            call.surely_not_free += 1;
            call.held.push(Key::of(&delivery.receipt));
            let count = call.held.len() - call.may_be_free.min(call.held.len());
            let all = call.held.len();
            if count > most || most_bytes > 0 && count > 1 {
                self.check_in_flight(id, most, most_bytes);
            }
            if all > most || most_bytes > 0 && all > 1 {
                self.check_held(id, most, most_bytes);
            }
        }
        if let Some(call) = self.calls.get_mut(&id) {
            call.idle = now;
        }
    }

    /// A settle by a receipt has begun, or is done.
    pub(super) fn free_place(&mut self, stream: CallId, is_done: bool) {
        let now = self.now;
        let Some(call) = self.calls.get_mut(&stream) else { return };
        if is_done {
            call.surely_not_free = call.surely_not_free.saturating_sub(1);
            call.idle = now;
        } else {
            call.may_be_free += 1;
        }
    }

    pub(super) fn end_stream(&mut self, id: CallId, answer: &Answer) {
        let Some(call) = self.calls.get(&id) else { return };
        let Request::Consume(consume) = &call.request else { return };
        let consume = consume.clone();
        let (broke, refused) =
            (matches!(answer, Answer::Unknown(_)), matches!(answer, Answer::Refused(_)));
        let keeps = broke || consume.on_disconnect == OnDisconnect::KeepLease;
        self.judge_suspects_of_stream(id);
        self.waited_in_vain(id, &consume.queue);
        self.end_consumer(id, &consume.queue, !refused, if keeps { consume.lease } else { 0 });
        let queue = self.queues.get_mut(&Key::of(&consume.queue));
        if let Some(queue) = queue.filter(|_| consume.auto_commit && !refused) {
            // What was under way to the client is gone from the queue, and nobody knows how much it was.
            queue.popped_unseen = u64::MAX;
            queue.totals.popped.maybe = u64::MAX / 2;
            queue.totals.committed.maybe = u64::MAX / 2;
        }
        let held = self.calls.remove(&id).filter(|_| broke).map(|call| call.held);
        for receipt in held.unwrap_or_default() {
            // A broker that shuts down takes back what its streams hold, whatever they asked for.
            let Some(of) = self.receipts.get(&receipt) else { continue };
            let last = self.items.get_mut(&of.item).and_then(|item| item.last.as_mut());
            if let Some(last) = last.filter(|last| last.receipt == receipt) {
                last.by_stream = true;
            }
        }
    }

    /// Returns the stream that holds a reservation, if its end is not read yet. The reservation may have ended: a broker that shuts down
    /// takes back what its streams hold, whatever they asked for.
    pub(super) fn open_stream(&self, of: &Reservation) -> Option<CallId> {
        let call = self.calls.get(&of.call)?;
        matches!(call.request, Request::Consume(_)).then_some(of.call)
    }

    /// Keeps the violations that hold because a stream was alive. A stream may have been dead since a little
    /// before the last thing that was read from it, though its client has not noticed.
    pub(super) fn judge_suspects_of_stream(&mut self, id: CallId) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let is_slow = matches!(&call.request, Request::Consume(consume) if consume.slow);
        let (last, transit) = (call.last.at, self.options.transit);
        let suspects = std::mem::take(&mut call.suspects);
        for (mark, violation) in suspects {
            if !is_slow && last > mark.at + transit {
                self.keep(violation);
            }
        }
    }

    /// Keeps a violation; if a stream is named, only if this turns out to have been alive now.
    pub(super) fn keep_unless_broken(&mut self, stream: Option<CallId>, violation: Violation) {
        let now = self.now;
        let Some(stream) = stream else { return self.keep(violation) };
        if let Some(call) = self.calls.get_mut(&stream) {
            call.suspects.push((now, violation));
        }
    }

    pub(super) fn revoked(&mut self, call: CallId, receipt: &str) {
        let key = Key::of(receipt);
        let Some(before) = self.revoked.insert(key, self.now.event) else { return };
        let item = self.receipts.get(&key).map(|receipt| receipt.item);
        let explanation = format!("stream {call} is told twice that it no longer holds {receipt}");
        self.violate(Rule::Outcome, item, receipt, explanation, &[before]);
    }
}
