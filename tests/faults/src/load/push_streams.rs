//! Batches on a `PushStream`, many of them in flight: those that follow each other closely are what the broker delivers directly.

use std::{collections::BTreeMap, time::Duration};

use sluicegate_checker::{
    history::{Answer, Call, NewItem, Request, Response},
    messages::{new_item, pushed},
};
use sluicegate_proto::v1 as pb;
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Code;

use super::{Load, Way};

/// How long a client waits for the stream to begin, and for the last answers.
const PATIENCE: Duration = Duration::from_secs(20);

/// The client's end of a stream.
struct Batches<'a> {
    load: &'a Load,
    name: &'a str,
    way: &'a Way,
    /// The number of the stream.
    number: u64,
    /// `None` when the client has closed its half.
    outgoing: Option<UnboundedSender<pb::PushStreamRequest>>,
    last: i64,
    /// Batches that were sent and not answered yet. The outcome of those that are dropped is unknown.
    open: BTreeMap<i64, Call>,
}

impl Batches<'_> {
    /// Sends batches to one queue, one right after the other.
    fn send(&mut self) {
        let Some(outgoing) = &self.outgoing else { return };
        let dice = &self.load.dice;
        let queue = self.load.queue();
        for _ in 0..dice.number(1, 6) {
            // What has to wait for nothing may be delivered directly.
            let is_plain = dice.chance(0.8);
            let mut items: Vec<NewItem> =
                (0..dice.number(1, 4)).map(|_| self.load.new_item()).collect();
            for item in items.iter_mut().filter(|_| is_plain) {
                item.ordering_key.clear();
                (item.priority, item.delay) = (0, 0);
            }
            self.last += 1;
            let message = pb::PushStreamRequest {
                batch_id: self.last,
                queue: queue.clone(),
                items: items.iter().map(new_item).collect(),
                producer: String::new(),
            };
            let request = Request::Push { queue: queue.clone(), items, stream: Some(self.number) };
            let call = self.load.recorder.start(self.name, &self.way.broker, request);
            if outgoing.send(message).is_ok() {
                self.open.insert(self.last, call);
            } // otherwise the stream has ended, and dropping the call says that its outcome is unknown
        }
    }

    fn answered(&mut self, message: pb::PushStreamResponse) {
        if message.closing {
            self.outgoing = None;
        }
        let Some(call) = self.open.remove(&message.batch_id) else { return };
        match message.error {
            None => call.ok(Response::Pushed(pushed(message.results))),
            Some(error) => call.end(Answer::from_code(&format!("{:?}", Code::from(error.code)))),
        }
    }
}

impl Load {
    /// Pushes on a stream for a while.
    pub(super) async fn push_on_stream(&self, name: &str, way: &Way) {
        let (outgoing, messages) = unbounded_channel();
        let (number, outgoing) = (self.number_of_stream(), Some(outgoing));
        let open = BTreeMap::new();
        let mut batches = Batches { load: self, name, way, number, outgoing, last: 0, open };
        batches.send();
        let mut service = way.client.queue_service();
        let opening = service.push_stream(UnboundedReceiverStream::new(messages));
        let Ok(Ok(answers)) = timeout(PATIENCE, opening).await else { return };
        let mut answers = answers.into_inner();
        let ends_at = Instant::now() + self.dice.millis(100, 4_000);
        let mut next_batch = Instant::now();
        loop {
            if Instant::now() >= ends_at || self.stop.is_cancelled() {
                batches.outgoing = None;
            }
            if batches.outgoing.is_none() && batches.open.is_empty() {
                return;
            }
            let sends = batches.outgoing.is_some();
            tokio::select! {
                message = answers.message() => match message {
                    Ok(Some(message)) => batches.answered(message),
                    _ => return,
                },
                () = sleep_until(next_batch), if sends => {
                    batches.send();
                    next_batch = Instant::now() + self.dice.millis(0, 60);
                }
                () = sleep_until(ends_at + PATIENCE), if !sends => return,
            }
        }
    }
}
