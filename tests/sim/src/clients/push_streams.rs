//! Batches on a `PushStream`, many of them in flight.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::{
    batches,
    history::{Answer, NewItem},
};
use sluicegate_proto::v1::{self as pb, queue_service_server::QueueService as _};
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::{StreamExt as _, wrappers::UnboundedReceiverStream};
use tonic::{Code, Status};

use super::{Clients, api::NodeRef};
use crate::cluster::failed;

/// How long a client waits for the last answers.
const PATIENCE: Duration = Duration::from_mins(1);

/// The client's end of a stream.
struct Batches<'a> {
    clients: &'a Arc<Clients>,
    name: &'a str,
    node: &'a NodeRef,
    /// `None` when the client has closed its half.
    outgoing: Option<UnboundedSender<pb::PushStreamRequest>>,
    under_way: batches::Batches,
}

fn failed_with(code: i32) -> Answer {
    failed(&Status::new(Code::from(code), "")).0
}

impl Batches<'_> {
    /// Sends a batch. Most are for the same queue, and several are sent before the first is answered.
    fn send(&mut self) {
        let Some(outgoing) = &self.outgoing else { return };
        let dice = &self.clients.dice;
        let queue = self.clients.queue();
        let count = dice.number(1, 4);
        let mut items: Vec<NewItem> = (0..count).map(|_| self.clients.new_item()).collect();
        if self.clients.plan.has_bursts() && dice.chance(0.8) {
            items.iter_mut().for_each(NewItem::wait_for_nothing);
        }
        let (clients, node) = (self.clients, self.node);
        let start = |request| {
            let call = clients.recorder.start(self.name, &node.name, request);
            clients.cluster.net.step(self.name, &node.name);
            call
        };
        self.under_way.send(queue, items, start, |message| outgoing.send(message).is_ok());
    }

    fn answered(&mut self, message: pb::PushStreamResponse) {
        if self.under_way.record(message, failed_with) {
            self.outgoing = None;
        }
    }
}

/// Pushes on a stream for a while.
pub(super) async fn push(clients: &Arc<Clients>, name: &str, node: &NodeRef) {
    let (outgoing, messages) = unbounded_channel();
    let work = async {
        let request = node.broker.push_stream(UnboundedReceiverStream::new(messages));
        let refused = || Status::unimplemented("PushStream");
        node.broker.api().push_stream(request.ok_or_else(refused)?).await
    };
    let Ok(stream) = node.call(None, work).await else { return };
    let mut answers = Box::pin(stream.then(async |message| {
        node.link.pass().await;
        message
    }));
    let under_way = batches::Batches::new(clients.next_push_stream());
    let mut batches = Batches { clients, name, node, outgoing: Some(outgoing), under_way };
    let ends_at = Instant::now() + clients.dice.millis(100, 10_000);
    let mut next_batch = Instant::now();
    loop {
        if Instant::now() >= ends_at || clients.stop.is_cancelled() {
            batches.outgoing = None;
        }
        if batches.outgoing.is_none() && batches.under_way.are_answered() {
            return;
        }
        let sends = batches.outgoing.is_some();
        tokio::select! {
            biased;
            () = node.link.killed.cancelled() => return,
            message = answers.next() => match message {
                Some(Ok(message)) if !clients.dice.chance(clients.plan.breaks) => {
                    clients.cluster.net.step(&node.name, name);
                    batches.answered(message);
                }
                // The stream has ended, or breaks before the client gets this message.
                _ => return,
            },
            () = sleep_until(next_batch), if sends => {
                let together = if clients.plan.has_bursts() { clients.dice.number(1, 5) } else { 1 };
                (0..together).for_each(|_| batches.send());
                next_batch = Instant::now() + clients.dice.millis(0, clients.plan.push_pause / 4);
            }
            () = sleep_until(ends_at + PATIENCE), if !sends => return,
            () = sleep(Duration::from_secs(1)), if sends => {}
        }
    }
}
