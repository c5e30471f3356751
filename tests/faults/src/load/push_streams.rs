//! Batches on a `PushStream`, many of them in flight: those that follow each other closely are what the broker delivers directly.

use std::time::Duration;

use sluicegate_checker::{
    batches::Batches,
    history::{Answer, NewItem},
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

fn failed(code: i32) -> Answer {
    Answer::from_code(&format!("{:?}", Code::from(code)))
}

impl Load {
    /// Pushes on a stream for a while.
    pub(super) async fn push_on_stream(&self, name: &str, way: &Way) {
        let (outgoing, messages) = unbounded_channel();
        let mut batches = Batches::new(self.number_of_stream());
        self.send_batches(name, way, &mut batches, &outgoing);
        // `None` when the client has closed its half.
        let mut outgoing = Some(outgoing);
        let mut service = way.client.queue_service();
        let opening = service.push_stream(UnboundedReceiverStream::new(messages));
        let Ok(Ok(answers)) = timeout(PATIENCE, opening).await else { return };
        let mut answers = answers.into_inner();
        let ends_at = Instant::now() + self.dice.millis(100, 4_000);
        let mut next_batch = Instant::now();
        loop {
            if Instant::now() >= ends_at || self.stop.is_cancelled() {
                outgoing = None;
            }
            if outgoing.is_none() && batches.are_answered() {
                return;
            }
            tokio::select! {
                message = answers.message() => match message {
                    Ok(Some(message)) => if batches.record(message, failed) {
                        outgoing = None;
                    },
                    _ => return,
                },
                () = sleep_until(next_batch), if outgoing.is_some() => {
                    if let Some(outgoing) = &outgoing {
                        self.send_batches(name, way, &mut batches, outgoing);
                    }
                    next_batch = Instant::now() + self.dice.millis(0, 60);
                }
                () = sleep_until(ends_at + PATIENCE), if outgoing.is_none() => return,
            }
        }
    }

    /// Sends batches to one queue, one right after the other.
    fn send_batches(
        &self,
        name: &str,
        way: &Way,
        batches: &mut Batches,
        outgoing: &UnboundedSender<pb::PushStreamRequest>,
    ) {
        let queue = self.queue();
        for _ in 0..self.dice.number(1, 6) {
            let is_plain = self.dice.chance(0.8);
            let mut items: Vec<NewItem> =
                (0..self.dice.number(1, 4)).map(|_| self.new_item()).collect();
            if is_plain {
                items.iter_mut().for_each(NewItem::wait_for_nothing);
            }
            let start = |request| self.recorder.start(name, &way.broker, request);
            batches.send(queue.clone(), items, start, |message| outgoing.send(message).is_ok());
        }
    }
}
