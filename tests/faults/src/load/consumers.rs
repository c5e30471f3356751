//! Consumers: streams, calls that wait and calls that do not, and all that is done with an item.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::{
    history::{Answer, Call, Consume, Delivery, OnDisconnect, PushEntry, Request, RollbackItem},
    messages::{self, micros},
    settles::Settles,
};
use sluicegate_proto::v1::{self as pb, consume_stream_request::Action};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Load, POPS, Way, calls::answer_of};

/// How long a stream may wait for its beginning. A broker answers only when it has something to send.
const OPENING: Duration = Duration::from_secs(5);

/// Consumes until the end, in one way after the other. A `fragile` consumer may vanish.
pub(super) async fn consume(load: Arc<Load>, number: u64, fragile: bool) {
    let name = format!("consumer {number}");
    while load.pause(0, 30).await {
        let mut way = load.way();
        if fragile {
            let node = load.world.next();
            way = Way { client: node.fragile_client.clone(), broker: node.name() };
        }
        let queue = load.queue();
        let is_popped = queue.starts_with(POPS);
        let queue = if load.dice.chance(0.1) { format!("{queue}.dead") } else { queue };
        match load.dice.number(0, 5) {
            _ if is_popped && load.dice.chance(0.7) => {
                let (max_items, wait) = load.taking();
                load.pop(&name, &way, &queue, max_items, wait).await;
            }
            0 | 1 => reserve(&load, &name, &way, &queue).await,
            2 | 3 => stream(&load, &name, &way, &queue, fragile).await,
            _ => two_way_stream(&load, &name, &way, &queue, fragile).await,
        }
    }
}

async fn reserve(load: &Arc<Load>, name: &str, way: &Way, queue: &str) {
    let (max_items, wait) = load.taking();
    let lease = load.lease();
    let deliveries = load.reserve(name, way, queue, max_items, wait, lease).await;
    let deliveries = deliveries.unwrap_or_default();
    if load.dice.chance(0.5) {
        let receipts: Vec<_> = deliveries.into_iter().map(|delivery| delivery.receipt).collect();
        if !receipts.is_empty() {
            let _ = load.commit(name, way, receipts).await;
        }
        return;
    }
    start_work(load, name, deliveries, lease);
}

/// Returns how a stream consumes, for the history and as a message.
fn opening(load: &Load, queue: &str) -> (Request, pb::ConsumeRequest, Duration) {
    let dice = &load.dice;
    let (lease, max_in_flight) = (load.lease(), dice.number(1, 20) as u32);
    let consume = Consume {
        queue: queue.to_owned(),
        max_in_flight,
        max_in_flight_bytes: 0,
        lease: micros(lease),
        auto_commit: false,
        on_disconnect: match dice.number(0, 3) {
            0 => OnDisconnect::Count,
            1 => OnDisconnect::KeepLease,
            _ => OnDisconnect::Release,
        },
        renew: dice.chance(0.3),
        slow: false,
    };
    let message = messages::consume(&consume);
    (Request::Consume(consume), message, lease)
}

/// A stream that ends by itself was ended by the broker.
fn ended(status: &Status) -> Answer {
    match answer_of(status) {
        Answer::Refused(code) => Answer::Unknown(code),
        answer => answer,
    }
}

/// Records that the client closes its stream. Of one that may have vanished nobody knows when the broker hears of it.
fn close(call: Call, fragile: bool) {
    if fragile { call.end(Answer::Unknown("left".to_owned())) } else { call.closed() }
}

async fn stream(load: &Arc<Load>, name: &str, way: &Way, queue: &str, fragile: bool) {
    let (request, message, lease) = opening(load, queue);
    let until = tokio::time::Instant::now() + load.dice.millis(100, 4_000);
    let call = load.recorder.start(name, &way.broker, request);
    let mut service = way.client.queue_service();
    let mut stream = match tokio::time::timeout(OPENING, service.consume(message)).await {
        Ok(Ok(stream)) => stream.into_inner(),
        Ok(Err(status)) => return call.end(answer_of(&status)),
        Err(_) => return call.end(Answer::Unknown("not opened".to_owned())),
    };
    loop {
        let message = tokio::select! {
            message = stream.message() => message,
            () = tokio::time::sleep_until(until) => return close(call, fragile),
            () = load.stop.cancelled() => return close(call, fragile),
        };
        let deliveries = match message {
            Ok(Some(message)) => message.deliveries,
            Ok(None) => return call.end(Answer::Unknown("ended".to_owned())),
            Err(status) => return call.end(ended(&status)),
        };
        let deliveries: Vec<_> = deliveries.into_iter().map(|one| load.delivery(one)).collect();
        call.delivered(deliveries.clone());
        start_work(load, name, deliveries, lease);
    }
}

/// Consumes by a `ConsumeStream`, on which most items are settled: each by its receipt, or all up to one.
async fn two_way_stream(load: &Arc<Load>, name: &str, way: &Way, queue: &str, fragile: bool) {
    let (request, message, lease) = opening(load, queue);
    let until = tokio::time::Instant::now() + load.dice.millis(100, 4_000);
    let call = load.recorder.start(name, &way.broker, request);
    let (requests, outgoing) = mpsc::channel(100);
    let send = |action| requests.try_send(pb::ConsumeStreamRequest { action: Some(action) });
    let _ = send(Action::Open(message));
    let mut service = way.client.queue_service();
    let opened = service.consume_stream(ReceiverStream::new(outgoing));
    let mut stream = match tokio::time::timeout(OPENING, opened).await {
        Ok(Ok(stream)) => stream.into_inner(),
        Ok(Err(status)) => return call.end(answer_of(&status)),
        Err(_) => return call.end(Answer::Unknown("not opened".to_owned())),
    };
    let mut settles = Settles::default();
    let commits_up_to = load.dice.chance(0.3);
    loop {
        let message = tokio::select! {
            message = stream.message() => message,
            () = tokio::time::sleep_until(until) => return close(call, fragile),
            () = load.stop.cancelled() => return close(call, fragile),
        };
        let event = match message {
            Ok(Some(message)) => message.event,
            Ok(None) => return call.end(Answer::Unknown("ended".to_owned())),
            Err(status) => return call.end(ended(&status)),
        };
        let start = |request| load.recorder.start(name, &way.broker, request);
        for delivery in settles.record(&call, event, |one| load.delivery(one)) {
            if load.dice.chance(0.2) {
                start_work(load, name, vec![delivery], lease);
                continue;
            }
            let fails = load.dice.chance(0.1);
            if fails || !commits_up_to {
                settles.settle(&delivery.receipt, fails, start, |action| send(action).is_ok());
            }
        }
        if commits_up_to {
            let left = load.dice.number(0, 2) as usize;
            settles.commit_all_but(left, start, |action| send(action).is_ok());
        }
    }
}

/// Works on each of these items by itself.
fn start_work(load: &Arc<Load>, name: &str, deliveries: Vec<Delivery>, lease: Duration) {
    for delivery in deliveries {
        load.tasks.spawn(work(Arc::clone(load), name.to_owned(), delivery, lease));
    }
}

/// Works on an item, and settles it in one way or the other.
async fn work(load: Arc<Load>, name: String, delivery: Delivery, lease: Duration) {
    let dice = &load.dice;
    let longest = lease.as_millis() as u64;
    if dice.chance(0.5) {
        tokio::time::sleep(dice.millis(0, longest / 2)).await;
    }
    if dice.chance(0.1) {
        load.extend(&name, &load.way(), &delivery.receipt, lease).await;
        tokio::time::sleep(dice.millis(0, longest)).await;
    }
    let fails = dice.chance(0.15);
    if fails && dice.chance(0.2) {
        return; // the lease lapses
    }
    let choice = dice.number(0, 19);
    // A settle whose answer was lost is repeated, through any broker.
    for _ in 0..dice.number(1, 3) {
        let way = load.way();
        let answer = match choice {
            _ if fails => load.fail(&name, &way, &delivery, choice).await,
            0 | 1 => {
                let to = load.queue_but(&delivery.queue);
                load.move_item(&name, &way, &delivery.receipt, &to).await
            }
            2 | 3 => {
                let push = |_| PushEntry { queue: load.queue(), item: load.new_item() };
                let pushes = (0..dice.number(1, 3)).map(push).collect();
                load.commit_and_push(&name, &way, &delivery.receipt, pushes).await
            }
            _ => load.commit(&name, &way, vec![delivery.receipt.clone()]).await,
        };
        // Repeating what pushes would push it twice.
        if !matches!(answer, Err(Answer::Unknown(_))) || choice == 2 || choice == 3 {
            return;
        }
        tokio::time::sleep(dice.millis(0, 500)).await;
    }
}

impl Load {
    /// Returns how many items a call takes, and for how long it waits.
    fn taking(&self) -> (u32, Duration) {
        let wait = match self.dice.number(0, 2) {
            0 => Duration::ZERO,
            1 => self.dice.millis(1, 50),
            _ => self.dice.millis(50, 2_000),
        };
        (self.dice.number(1, 10) as u32, wait)
    }

    fn lease(&self) -> Duration {
        self.dice.millis(300, 2_000)
    }

    async fn fail(
        &self,
        name: &str,
        way: &Way,
        delivery: &Delivery,
        choice: u64,
    ) -> Result<(), Answer> {
        let receipt = delivery.receipt.clone();
        let item = match choice {
            0..=2 => RollbackItem { receipt, dead_letter: true, ..RollbackItem::default() },
            3..=6 => RollbackItem { receipt, keep_attempt: true, ..RollbackItem::default() },
            7..=10 => {
                RollbackItem { receipt, delay: Some(choice * 50_000), ..RollbackItem::default() }
            }
            _ => RollbackItem { receipt, ..RollbackItem::default() },
        };
        self.roll_back(name, way, item).await
    }
}
