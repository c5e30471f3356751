//! What a client sends and is told on a `ConsumeStream`, for the history.

use std::collections::{BTreeMap, VecDeque};

use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action, consume_stream_response::Event,
};

use crate::{
    history::{Answer, Call, Delivery, Request, Response, RollbackItem},
    messages::settled,
};

/// What was sent on a stream and not answered yet: settles by receipt, and changes of flow.
#[derive(Default)]
pub struct Settles {
    settles: BTreeMap<String, Call>,
    flows: VecDeque<Call>,
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
            self.settles.insert(receipt, call);
        } else {
            call.end(Answer::Refused("not sent".to_owned()));
        }
    }

    /// Changes how many items the stream may hold, as recorded in `call`. `send` returns whether that was sent.
    pub fn flow(&mut self, max_in_flight: u32, call: Call, send: impl FnOnce(Action) -> bool) {
        if send(Action::Flow(pb::Flow { max_in_flight: max_in_flight.cast_signed() })) {
            self.flows.push_back(call);
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
                let deliveries: Vec<_> = message.deliveries.into_iter().map(delivery).collect();
                stream.delivered(deliveries.clone());
                return deliveries;
            }
            Some(Event::Settled(message)) => {
                let receipt = message.results.first().map(|result| &result.receipt);
                if let Some(settle) = receipt.and_then(|receipt| self.settles.remove(receipt)) {
                    settle.ok(settled(&message.results));
                }
            }
            Some(Event::Revoked(message)) => stream.revoked(&message.receipt),
            // It does not say what failed.
            Some(Event::Error(_)) => self.settles.clear(),
            Some(Event::Flow(_)) => {
                if let Some(flow) = self.flows.pop_front() {
                    flow.ok(Response::Done);
                }
            }
            Some(Event::Opened(_) | Event::Extended(_)) | None => {}
        }
        Vec::new()
    }
}
