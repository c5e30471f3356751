//! What a client sends and is told on a `ConsumeStream`, for the history.

use std::collections::BTreeMap;

use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action, consume_stream_response::Event,
};

use crate::{
    history::{Answer, Call, Delivery, Request, RollbackItem},
    messages::settled,
};

/// The settles that were sent on a stream and not answered yet, by receipt.
#[derive(Default)]
pub struct Settles(BTreeMap<String, Call>);

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
            self.0.insert(receipt, call);
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
                if let Some(settle) = receipt.and_then(|receipt| self.0.remove(receipt)) {
                    settle.ok(settled(&message.results));
                }
            }
            Some(Event::Revoked(message)) => stream.revoked(&message.receipt),
            // It does not say what failed.
            Some(Event::Error(_)) => self.0.clear(),
            Some(Event::Opened(_) | Event::Extended(_) | Event::Flow(_)) | None => {}
        }
        Vec::new()
    }
}
