//! Streams of deliveries: of those of a `ConsumeStream`, most are settled on the stream.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::StreamExt as _;
use sluicegate_broker::simulation::requests;
use sluicegate_checker::{
    history::{Answer, Call, Consume, Delivery, OnDisconnect, Request, Time},
    messages::{self, micros},
    settles::Settles,
};
use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action, queue_service_server::QueueService as _,
};
use tokio::{
    sync::mpsc::unbounded_channel,
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::{Stream, wrappers::UnboundedReceiverStream};
use tonic::Status;

use super::{
    Clients, TICKS,
    api::{NodeRef, ask},
    consumers::start_work,
};
use crate::{
    cluster::{Failed, failed},
    plan::Weather,
};

/// How a stream consumes, and until when.
struct Opening {
    consume: Consume,
    lease: Duration,
    ends_at: Instant,
}

impl Opening {
    fn new(clients: &Clients, queue: &str, auto_commit: bool) -> Self {
        let dice = &clients.dice;
        let lease = clients.lease();
        let consume = Consume {
            queue: queue.to_owned(),
            max_in_flight: dice.number(1, 20) as u32,
            max_in_flight_bytes: *dice.one_of(clients.plan.limits_of_bytes).unwrap_or(&0),
            lease: micros(lease),
            auto_commit,
            on_disconnect: match dice.number(0, 3) {
                0 => OnDisconnect::Count,
                1 => OnDisconnect::KeepLease,
                _ => OnDisconnect::Release,
            },
            renew: !auto_commit && dice.chance(0.3),
            slow: dice.chance(clients.plan.stalls),
        };
        Self { consume, lease, ends_at: Instant::now() + dice.millis(100, 30_000) }
    }
}

/// Why a stream is over.
enum Over {
    /// The client closes it.
    Closed,
    Ended(Answer),
}

impl Over {
    fn broken(why: &str) -> Self {
        Self::Ended(Answer::Unknown(why.to_owned()))
    }

    /// Records the end. A broker that shuts down may have ended the stream before its client closes it.
    fn record(self, call: Call, node: &NodeRef) {
        match self {
            Self::Ended(answer) => call.end(answer),
            Self::Closed if node.leaves.load(Ordering::Relaxed) => {
                call.end(Answer::Unknown("shutting down".to_owned()));
            }
            Self::Closed => call.closed(),
        }
    }
}

/// A stream that ends by itself was ended by the broker.
fn unknown(status: &Status) -> Answer {
    match failed(status).0 {
        Answer::Refused(code) => Answer::Unknown(code),
        answer => answer,
    }
}

/// Returns what a stream brings, each message with when it left its broker.
fn arriving<T>(
    clients: &Clients,
    node: &NodeRef,
    stream: impl Stream<Item = Result<T, Status>>,
) -> impl Stream<Item = (Result<T, Status>, Time)> {
    stream.then(async |message| {
        let sent = clients.recorder.now();
        node.link.pass().await;
        (message, sent)
    })
}

/// Returns the next message and when it left its broker, or why the stream is over. Returns nothing at a point of time.
async fn next<T>(
    clients: &Clients,
    name: &str,
    node: &NodeRef,
    opening: &Opening,
    stream: &mut (impl Stream<Item = (Result<T, Status>, Time)> + Unpin),
    until: Option<Instant>,
) -> Result<Option<(T, Time)>, Over> {
    let dice = &clients.dice;
    if opening.consume.slow && dice.chance(0.3) {
        sleep(dice.millis(100, 8_000)).await;
    }
    let next = tokio::select! {
        biased;
        () = node.link.killed.cancelled() => return Err(Over::broken("killed")),
        next = stream.next() => next,
        () = sleep_until(until.unwrap_or(opening.ends_at)), if until.is_some() => return Ok(None),
        () = sleep_until(opening.ends_at) => return Err(Over::Closed),
        () = clients.stop.cancelled() => return Err(Over::Closed),
    };
    let (message, sent) = next.ok_or_else(|| Over::broken("ended"))?;
    let message = message.map_err(|status| Over::Ended(unknown(&status)))?;
    if dice.chance(clients.plan.breaks) {
        // The client did not get this message.
        return Err(Over::broken("broken"));
    }
    clients.cluster.net.step(&node.name, name);
    Ok(Some((message, sent)))
}

/// Consumes by `Consume` for a while.
pub(super) async fn consume(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let auto_commit = clients.plan.careless_pops && clients.dice.chance(0.2);
    let opening = Opening::new(clients, queue, auto_commit);
    let request = Request::Consume(opening.consume.clone());
    let call = clients.recorder.start(name, &node.name, request);
    let opened =
        ask!(node, None, "QueueService/Consume", consume, messages::consume(&opening.consume));
    let mut stream = match opened {
        Ok(stream) => Box::pin(arriving(clients, node, stream)),
        Err(Failed(answer)) => return call.end(answer),
    };
    loop {
        let (message, sent) = match next(clients, name, node, &opening, &mut stream, None).await {
            Ok(Some(message)) => message,
            Ok(None) => continue,
            Err(over) => return over.record(call, node),
        };
        let sent = |one| Delivery { sent: Some(sent), ..clients.delivery(one) };
        let deliveries: Vec<_> = message.deliveries.into_iter().map(sent).collect();
        call.delivered(deliveries.clone());
        if !auto_commit {
            start_work(clients, name, deliveries, opening.lease);
        }
    }
}

/// When a client changes the flow of its stream, and to what.
struct Flows {
    next_at: Option<Instant>,
    is_halted: bool,
}

impl Flows {
    fn new(clients: &Clients) -> Self {
        let next_at = clients.plan.flows.then(|| Instant::now() + clients.dice.millis(0, 3_000));
        Self { next_at, is_halted: false }
    }

    /// Returns the next flow. Often nothing is read for a moment before, so that what is assigned meanwhile was not sent.
    async fn next(&mut self, clients: &Clients) -> u32 {
        let dice = &clients.dice;
        if !self.is_halted && dice.chance(0.8) {
            sleep(dice.millis(0, 1_000)).await;
        }
        self.is_halted = !self.is_halted && dice.chance(0.7);
        let pause = match dice.number(0, 2) {
            0 => Duration::ZERO,
            _ => dice.millis(0, 1_500),
        };
        self.next_at = Some(Instant::now() + pause);
        if self.is_halted { 0 } else { dice.number(1, 20) as u32 }
    }
}

/// Consumes by `ConsumeStream` for a while.
pub(super) async fn consume_two_way(
    clients: &Arc<Clients>,
    name: &str,
    node: &NodeRef,
    queue: &str,
) {
    let auto_commit = queue != TICKS && clients.plan.careless_pops && clients.dice.chance(0.2);
    let opening = Opening::new(clients, queue, auto_commit);
    let start = |request| clients.recorder.start(name, &node.name, request);
    let call = start(Request::Consume(opening.consume.clone()));
    let (outgoing, messages) = unbounded_channel();
    let send = |action| {
        clients.cluster.net.step(name, &node.name);
        outgoing.send(pb::ConsumeStreamRequest { action: Some(action) }).is_ok()
    };
    send(Action::Open(messages::consume(&opening.consume)));
    let messages = requests(UnboundedReceiverStream::new(messages));
    let opened = ask!(node, None, "QueueService/ConsumeStream", consume_stream, messages);
    let mut stream = match opened {
        Ok(stream) => Box::pin(arriving(clients, node, stream)),
        Err(Failed(answer)) => return call.end(answer),
    };
    let (mut settles, mut flows) = (Settles::default(), Flows::new(clients));
    loop {
        let next = next(clients, name, node, &opening, &mut stream, flows.next_at).await;
        // Messages wait on their way between the two halves of such a stream, so that it is not known when they were sent.
        let message = match next {
            Ok(Some((message, _))) => message,
            Ok(None) => {
                let max_in_flight = flows.next(clients).await;
                let change = start(Request::Flow { stream: call.id(), max_in_flight });
                settles.flow(max_in_flight, change, send);
                // The broker reads this before it delivers anything more.
                sleep(clients.dice.millis(0, 20)).await;
                continue;
            }
            Err(over) => return over.record(call, node),
        };
        for delivery in settles.record(&call, message.event, |one| clients.delivery(one)) {
            if auto_commit {
                continue;
            }
            if clients.dice.chance(0.3) {
                start_work(clients, name, vec![delivery], opening.lease);
                continue;
            }
            let fails = clients.dice.chance(clients.plan.failures);
            if fails || clients.plan.weather != Weather::UpTo {
                settles.settle(&delivery.receipt, fails, start, send);
            }
        }
        if !auto_commit && clients.plan.weather == Weather::UpTo {
            settles.commit_all_but(clients.dice.number(0, 2) as usize, start, send);
        }
    }
}
