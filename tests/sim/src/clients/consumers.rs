//! Consumers: streams, calls that wait and calls that do not, and all that is done with an item.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use sluicegate_checker::{
    history::{Answer, Call, Consume, Delivery, OnDisconnect, PushEntry, Request, RollbackItem},
    messages::{duration, micros},
};
use sluicegate_proto::v1::{self as pb, queue_service_server::QueueService as _};
use tokio_stream::StreamExt as _;
use tonic::Status;

use super::{
    Clients,
    api::{NodeRef, ask, is_open},
};
use crate::cluster::{Failed, failed};

/// Consumes until the end, in one way after the other.
pub(super) async fn consume(clients: Arc<Clients>, number: u64) {
    let name = format!("consumer {number}");
    while clients.pause(0, 50).await {
        let Some(node) = clients.cluster.any() else { continue };
        let queue = match clients.dice.number(0, 9) {
            0 => format!("{}.dead", clients.queue()),
            _ => clients.queue(),
        };
        match clients.dice.number(0, 5) {
            0 => pop(&clients, &name, &node, &queue).await,
            1 | 2 => reserve(&clients, &name, &node, &queue).await,
            _ => stream(&clients, &name, &node, &queue).await,
        }
    }
}

async fn pop(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let (max_items, wait) = clients.taking();
    clients.pop(name, node, queue, max_items, wait).await;
}

async fn reserve(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let (max_items, wait) = clients.taking();
    let lease = clients.lease();
    let deliveries = clients.reserve(name, node, queue, max_items, wait, lease).await;
    if clients.dice.chance(0.5) {
        let receipts: Vec<_> = deliveries.into_iter().map(|delivery| delivery.receipt).collect();
        if !receipts.is_empty() {
            clients.commit(name, node, receipts).await;
        }
        return;
    }
    start_work(clients, name, deliveries, lease);
}

async fn stream(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let dice = &clients.dice;
    let (lease, max_in_flight) = (clients.lease(), dice.number(1, 20) as u32);
    let auto_commit = clients.plan.careless_pops && dice.chance(0.2);
    let (on_disconnect, wanted) = match dice.number(0, 3) {
        0 => (OnDisconnect::Count, pb::OnDisconnect::Count),
        1 => (OnDisconnect::KeepLease, pb::OnDisconnect::KeepLease),
        _ => (OnDisconnect::Release, pb::OnDisconnect::Release),
    };
    let renew = !auto_commit && dice.chance(0.3);
    let slow = dice.chance(clients.plan.stalls);
    let request = Request::Consume(Consume {
        queue: queue.to_owned(),
        max_in_flight,
        lease: micros(lease),
        auto_commit,
        on_disconnect,
        renew,
        slow,
    });
    let message = pb::ConsumeRequest {
        queue: queue.to_owned(),
        max_in_flight: max_in_flight.cast_signed(),
        max_in_flight_bytes: 0,
        lease: Some(duration(lease)),
        consumer: String::new(),
        auto_commit,
        renew,
        on_disconnect: wanted.into(),
    };
    let call = clients.recorder.start(name, &node.name, request);
    let mut stream = match ask!(node, None, "QueueService/Consume", consume, message) {
        Ok(stream) => Box::pin(stream),
        Err(Failed(answer)) => return call.end(answer),
    };
    let ends_at = tokio::time::Instant::now() + dice.millis(100, 30_000);
    loop {
        if slow && dice.chance(0.3) {
            tokio::time::sleep(dice.millis(100, 8_000)).await;
        }
        let next = async {
            let next = stream.next().await;
            node.link.pass().await;
            next
        };
        let message = tokio::select! {
            biased;
            () = node.link.killed.cancelled() => {
                return call.end(Answer::Unknown("killed".to_owned()));
            }
            message = next => message,
            () = tokio::time::sleep_until(ends_at) => return closed(call, node),
            () = clients.stop.cancelled() => return closed(call, node),
        };
        let deliveries = match message {
            Some(Ok(message)) => message.deliveries,
            Some(Err(status)) => return call.end(unknown(&status)),
            None => return call.end(Answer::Unknown("ended".to_owned())),
        };
        if dice.chance(clients.plan.breaks) {
            // The client did not get this message.
            return call.end(Answer::Unknown("broken".to_owned()));
        }
        clients.cluster.net.step(&node.name, name);
        let deliveries: Vec<_> = deliveries.into_iter().map(|one| clients.delivery(one)).collect();
        call.delivered(deliveries.clone());
        if auto_commit {
            continue;
        }
        start_work(clients, name, deliveries, lease);
    }
}

/// Records that the client closes its stream. A broker that shuts down may have ended it before.
fn closed(call: Call, node: &NodeRef) {
    if node.leaves.load(Ordering::Relaxed) {
        return call.end(Answer::Unknown("shutting down".to_owned()));
    }
    call.closed();
}

/// A stream that ends by itself was ended by the broker.
fn unknown(status: &Status) -> Answer {
    match failed(status).0 {
        Answer::Refused(code) => Answer::Unknown(code),
        answer => answer,
    }
}

/// Works on each of these items by itself.
fn start_work(clients: &Arc<Clients>, name: &str, deliveries: Vec<Delivery>, lease: Duration) {
    for delivery in deliveries {
        let (clients, name) = (Arc::clone(clients), name.to_owned());
        clients.tasks.clone().spawn(work(clients, name, delivery, lease));
    }
}

/// Works on an item, and settles it in one way or the other.
async fn work(clients: Arc<Clients>, name: String, delivery: Delivery, lease: Duration) {
    let dice = &clients.dice;
    let longest = lease.as_millis() as u64;
    if dice.chance(0.5) {
        tokio::time::sleep(dice.millis(0, longest / 2)).await;
    }
    if dice.chance(0.1)
        && let Some(node) = clients.cluster.any()
    {
        clients.extend(&name, &node, &delivery.receipt, lease).await;
        tokio::time::sleep(dice.millis(0, longest)).await;
    }
    let fails = dice.chance(clients.plan.failures);
    if fails && dice.chance(0.2) {
        return; // the lease lapses
    }
    let choice = dice.number(0, 19);
    // A settle whose answer was lost is repeated, through any broker.
    for _ in 0..dice.number(1, 3) {
        let Some(node) = clients.cluster.any() else { continue };
        let answer = match choice {
            _ if fails => clients.fail(&name, &node, &delivery, choice).await,
            0 => {
                let to = clients.queue_but(&delivery.queue);
                let delay = if dice.chance(0.3) { dice.millis(1, 2_000) } else { Duration::ZERO };
                clients.move_item(&name, &node, &delivery.receipt, &to, delay).await
            }
            1 => {
                let push = |_| PushEntry { queue: clients.queue(), item: clients.new_item() };
                let pushes = (0..dice.number(1, 3)).map(push).collect();
                clients.commit_and_push(&name, &node, &delivery.receipt, pushes).await
            }
            _ => clients.commit(&name, &node, vec![delivery.receipt.clone()]).await,
        };
        // Repeating what pushes would push it twice.
        if !is_open(&answer) || choice == 1 {
            return;
        }
        if dice.chance(0.5) {
            tokio::time::sleep(dice.millis(0, 1_000)).await;
        }
    }
}

impl Clients {
    /// Returns how many items a call takes, and for how long it waits.
    fn taking(&self) -> (u32, Duration) {
        let wait = match self.dice.number(0, 3) {
            0 => Duration::ZERO,
            1 => self.dice.millis(1, 50),
            _ => self.dice.millis(50, 25_000),
        };
        (self.dice.number(1, 10) as u32, wait)
    }

    fn lease(&self) -> Duration {
        self.dice.millis(200, 5_000)
    }

    async fn fail(&self, name: &str, node: &NodeRef, delivery: &Delivery, choice: u64) -> Answer {
        let receipt = delivery.receipt.clone();
        let item = match choice {
            0..=2 => RollbackItem { receipt, dead_letter: true, ..RollbackItem::default() },
            3..=6 => RollbackItem { receipt, keep_attempt: true, ..RollbackItem::default() },
            7..=10 => {
                RollbackItem { receipt, delay: Some(choice * 100_000), ..RollbackItem::default() }
            }
            _ => RollbackItem { receipt, ..RollbackItem::default() },
        };
        self.roll_back(name, node, item).await
    }
}
