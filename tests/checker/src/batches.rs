//! What a client sends and is told on a `PushStream`, for the history.

use std::collections::BTreeMap;

use sluicegate_proto::v1 as pb;

use crate::{
    history::{Answer, Call, NewItem, Request, Response},
    messages::{new_item, pushed},
};

/// Batches that were sent on a stream and not answered yet. The outcome of those that are dropped is unknown.
pub struct Batches {
    /// The number of the stream.
    stream: u64,
    last: i64,
    open: BTreeMap<i64, Call>,
}

impl Batches {
    /// Of the stream with this number, on which nothing was sent.
    pub fn new(stream: u64) -> Self {
        Self { stream, last: 0, open: BTreeMap::new() }
    }

    /// Sends a batch: `start` records the call, and `send` returns whether it was sent.
    pub fn send(
        &mut self,
        queue: String,
        items: Vec<NewItem>,
        start: impl FnOnce(Request) -> Call,
        send: impl FnOnce(pb::PushStreamRequest) -> bool,
    ) {
        self.last += 1;
        let message = pb::PushStreamRequest {
            batch_id: self.last,
            queue: queue.clone(),
            items: items.iter().map(new_item).collect(),
            producer: String::new(),
        };
        let call = start(Request::Push { queue, items, stream: Some(self.stream) });
        if send(message) {
            self.open.insert(self.last, call);
        } else {
            call.end(Answer::Unknown("not sent".to_owned()));
        }
    }

    /// Records the answer to a batch. `failed` says what the code of an error means. Returns true if the broker asks the client to end the
    /// stream.
    pub fn record(
        &mut self,
        message: pb::PushStreamResponse,
        failed: impl FnOnce(i32) -> Answer,
    ) -> bool {
        if let Some(call) = self.open.remove(&message.batch_id) {
            match message.error {
                None => call.ok(Response::Pushed(pushed(message.results))),
                Some(error) => call.end(failed(error.code)),
            }
        }
        message.closing
    }

    /// Returns true if all batches are answered.
    pub fn are_answered(&self) -> bool {
        self.open.is_empty()
    }
}
