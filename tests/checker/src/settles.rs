//! What a client sends and is told on a `ConsumeStream`, for the history.

use std::collections::{BTreeMap, VecDeque};

use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action, consume_stream_response::Event,
};

use crate::{
    history::{Answer, Call, Delivery, Outcome, Request, Response, RollbackItem},
    messages::{outcome, settled},
};

/// What was sent on a stream and not answered yet, and what was received and not settled on it.
#[derive(Default)]
pub struct Settles {
    /// In the order sent, in which the answers come.
    asked: VecDeque<Asked>,
    received: Received,
}

/// Receipts by the tags of their deliveries.
type Received = BTreeMap<i64, String>;

enum Asked {
    /// A commit or rollback of one item.
    Settle(Call),
    /// A commit of all these; nothing is recorded of it if one before it has failed, whose items it may include.
    UpTo(Received, Option<Call>),
    Flow(Call),
}

impl Settles {
    /// Commits an item, or rolls it back if it `fails`: `start` records the call, and `send` returns whether it was sent.
    pub fn settle(
        &mut self,
        receipt: &str,
        fails: bool,
        start: impl FnOnce(Request) -> Call,
        send: impl FnOnce(Action) -> bool,
    ) {
        let receipt = receipt.to_owned();
        let (request, action) = if fails {
            let items = vec![RollbackItem { receipt: receipt.clone(), ..RollbackItem::default() }];
            let item = pb::RollbackItem { receipt: receipt.clone(), ..pb::RollbackItem::default() };
            let message = pb::RollbackRequest { items: vec![item] };
            (Request::Rollback { items }, Action::Rollback(message))
        } else {
            let receipts = vec![receipt.clone()];
            let message = pb::CommitRequest { receipts: receipts.clone() };
            (Request::Commit { receipts }, Action::Commit(message))
        };
        let call = start(request);
        if send(action) {
            self.received.retain(|_, received| *received != receipt);
            self.asked.push_back(Asked::Settle(call));
        } else {
            call.end(Answer::Refused("not sent".to_owned()));
        }
    }

    /// Commits all that was received and not settled on the stream but the `last` ones, as [`Self::settle`] commits an item.
    pub fn commit_all_but(
        &mut self,
        last: usize,
        start: impl FnOnce(Request) -> Call,
        send: impl FnOnce(Action) -> bool,
    ) {
        let Some(&delivery_tag) = self.received.keys().rev().nth(last) else { return };
        let later = self.received.split_off(&(delivery_tag + 1));
        let received = std::mem::replace(&mut self.received, later);
        let call = start(Request::Commit { receipts: received.values().cloned().collect() });
        if send(Action::CommitUpTo(pb::CommitUpTo { delivery_tag })) {
            self.asked.push_back(Asked::UpTo(received, Some(call)));
        } else {
            call.end(Answer::Refused("not sent".to_owned()));
            self.received.extend(received);
        }
    }

    /// The next commit of all up to one item commits these too. Of those that are under way, it is not known which does.
    fn up_to_failed(&mut self, failed: Received) {
        self.received.extend(failed);
        for asked in &mut self.asked {
            if let Asked::UpTo(received, call) = asked {
                self.received.extend(received.clone());
                *call = None;
            }
        }
    }

    /// Changes how many items the stream may hold, as recorded in `call`. `send` returns whether that was sent.
    pub fn flow(&mut self, max_in_flight: u32, call: Call, send: impl FnOnce(Action) -> bool) {
        if send(Action::Flow(pb::Flow { max_in_flight: max_in_flight.cast_signed() })) {
            self.asked.push_back(Asked::Flow(call));
        } else {
            call.end(Answer::Refused("not sent".to_owned()));
        }
    }

    /// Records what came over a stream, and returns the deliveries in it.
    pub fn record(
        &mut self,
        stream: &Call,
        event: Option<Event>,
        delivery: impl Fn(pb::Delivery) -> Delivery,
    ) -> Vec<Delivery> {
        match event {
            Some(Event::Deliveries(message)) => {
                let tag = |one: &pb::Delivery| (one.delivery_tag, one.receipt.clone());
                self.received.extend(message.deliveries.iter().map(tag));
                let deliveries: Vec<_> = message.deliveries.into_iter().map(delivery).collect();
                stream.delivered(deliveries.clone());
                return deliveries;
            }
            Some(Event::Settled(message)) => {
                if let Some(Asked::Settle(call)) = self.asked.pop_front() {
                    call.ok(settled(&message.results));
                }
            }
            Some(Event::CommittedUpTo(message)) => {
                if let Some(Asked::UpTo(received, Some(call))) = self.asked.pop_front() {
                    call.end(outcomes_up_to(&received, &message));
                }
            }
            Some(Event::Revoked(message)) => {
                self.received.retain(|_, received| *received != message.receipt);
                stream.revoked(&message.receipt);
            }
            Some(Event::Error(_)) => {
                if let Some(Asked::UpTo(received, _)) = self.asked.pop_front() {
                    self.up_to_failed(received);
                }
            }
            Some(Event::Flow(_)) => {
                if let Some(Asked::Flow(call)) = self.asked.pop_front() {
                    call.ok(Response::Done);
                }
            }
            Some(Event::Opened(_) | Event::Extended(_)) | None => {}
        }
        Vec::new()
    }
}

/// Returns what became of the items that a commit of all up to one was about. The answer does not say which of them the stream held no longer.
fn outcomes_up_to(received: &Received, answer: &pb::CommitUpToResponse) -> Answer {
    let not_committed: BTreeMap<&str, i32> =
        answer.not_committed.iter().map(|one| (one.receipt.as_str(), one.outcome)).collect();
    let is_known = |receipt: &&str| received.values().any(|received| received == receipt);
    let count = not_committed.keys().filter(|receipt| is_known(receipt)).count();
    if count != not_committed.len()
        || count + answer.committed.cast_unsigned() as usize != received.len()
    {
        return Answer::Unknown("some are left out".to_owned());
    }
    let outcomes = received
        .values()
        .map(|receipt| not_committed.get(receipt.as_str()).map_or(Outcome::Ok, |of| outcome(*of)));
    Answer::Ok(Response::Settled(outcomes.collect()))
}
