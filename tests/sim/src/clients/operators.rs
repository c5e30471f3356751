//! Operators: pauses, purges, deletions, redrives, figures; and the end of a simulation.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sluicegate_broker::domain::{DedupId, ItemState};
use sluicegate_checker::{
    history::{Answer, Figures, Listed, QueueAtRest, Request, Response, State, What},
    messages::{figures, name},
};
use sluicegate_proto::v1::{self as pb, admin_service_server::AdminService as _};

use super::{
    Clients,
    api::{NodeRef, ask},
    schedules,
};
use crate::{
    cluster::Failed,
    plan::{LONGEST_LEASE, SCRATCH},
};

/// Operates until the end.
pub(super) async fn operate(clients: Arc<Clients>, number: u64) {
    let name = format!("operator {number}");
    while clients.pause(100, 5_000).await {
        let Some(node) = clients.cluster.any() else { continue };
        let queue = clients.queue();
        match clients.dice.number(0, 9) {
            0 => {
                clients.pause_queue(&name, &node, &queue, true).await;
                clients.pause(0, 3_000).await;
                clients.resume(&name, &queue).await;
            }
            1 => clients.redrive(&name, &node, &format!("{queue}.dead")).await,
            2 if clients.dice.chance(0.3) => clients.purge(&name, &node, &queue).await,
            3 => clients.delete_one(&name, &node, &queue).await,
            4 if clients.dice.chance(0.3) => clients.delete_queue(&name, &node, SCRATCH).await,
            _ => drop(clients.figures(&name, &node, &queue).await),
        }
    }
}

/// Makes a call that is answered by nothing of interest, and records it.
macro_rules! operator_call {
    ($clients:expr, $name:expr, $node:expr, $request:expr, $path:literal, $method:ident, $message:expr) => {{
        let call = $clients.recorder.start($name, &$node.name, $request);
        let done = ask!($node, None, $path, $method, $message);
        match done {
            Ok(_) => {
                call.ok(Response::Done);
                true
            }
            Err(Failed(answer)) => {
                call.end(answer);
                false
            }
        }
    }};
}

impl Clients {
    async fn pause_queue(&self, name: &str, node: &NodeRef, queue: &str, paused: bool) -> bool {
        let queue = queue.to_owned();
        if paused {
            let (request, message) = (
                Request::PauseQueue { queue: queue.clone() },
                pb::PauseQueueRequest { name: queue },
            );
            operator_call!(
                self,
                name,
                node,
                request,
                "AdminService/PauseQueue",
                pause_queue,
                message
            )
        } else {
            let (request, message) = (
                Request::ResumeQueue { queue: queue.clone() },
                pb::ResumeQueueRequest { name: queue },
            );
            operator_call!(
                self,
                name,
                node,
                request,
                "AdminService/ResumeQueue",
                resume_queue,
                message
            )
        }
    }

    /// Resumes a queue, and tries until that is done or the queue is not there.
    async fn resume(&self, name: &str, queue: &str) {
        for _ in 0..100 {
            if let Some(node) = self.cluster.any()
                && self.pause_queue(name, &node, queue, false).await
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn redrive(&self, name: &str, node: &NodeRef, queue: &str) {
        let request = Request::RedriveItems { queue: queue.to_owned() };
        let message = pb::RedriveItemsRequest {
            queue: queue.to_owned(),
            ..pb::RedriveItemsRequest::default()
        };
        operator_call!(
            self,
            name,
            node,
            request,
            "AdminService/RedriveItems",
            redrive_items,
            message
        );
    }

    async fn purge(&self, name: &str, node: &NodeRef, queue: &str) {
        let request = Request::PurgeQueue { queue: queue.to_owned() };
        let message = pb::PurgeQueueRequest { name: queue.to_owned() };
        operator_call!(self, name, node, request, "AdminService/PurgeQueue", purge_queue, message);
    }

    async fn delete_queue(&self, name: &str, node: &NodeRef, queue: &str) {
        let force = self.dice.chance(0.5);
        let request = Request::DeleteQueue { queue: queue.to_owned(), force };
        let message = pb::DeleteQueueRequest { name: queue.to_owned(), force };
        operator_call!(
            self,
            name,
            node,
            request,
            "AdminService/DeleteQueue",
            delete_queue,
            message
        );
    }

    async fn delete_one(&self, name: &str, node: &NodeRef, queue: &str) {
        let message = pb::ListItemsRequest {
            queue: queue.to_owned(),
            page_size: 5,
            ..pb::ListItemsRequest::default()
        };
        let Ok(page) = ask!(node, None, "AdminService/ListItems", list_items, message) else {
            return;
        };
        let Some(item) = self.dice.one_of(&page.items) else { return };
        let request = Request::DeleteItem { queue: queue.to_owned(), id: item.id.clone() };
        let message = pb::DeleteItemRequest {
            queue: queue.to_owned(),
            id: item.id.clone(),
            ..pb::DeleteItemRequest::default()
        };
        operator_call!(self, name, node, request, "AdminService/DeleteItem", delete_item, message);
    }

    async fn figures(&self, name: &str, node: &NodeRef, queue: &str) -> Option<Figures> {
        let queue = queue.to_owned();
        let request = Request::GetQueueStats { queue: queue.clone() };
        let call = self.recorder.start(name, &node.name, request);
        let message = pb::GetQueueStatsRequest { queue };
        match ask!(node, None, "AdminService/GetQueueStats", get_queue_stats, message) {
            Ok(answer) => {
                let figures = figures(&answer.stats.unwrap_or_default());
                call.ok(Response::Stats(figures));
                Some(figures)
            }
            Err(Failed(answer)) => {
                call.end(answer);
                None
            }
        }
    }

    /// Takes everything that is ready out of a queue. Returns how many items that were.
    async fn drain(&self, node: &NodeRef, queue: &str) -> usize {
        let (lease, mut taken) = (Duration::from_secs(30), 0);
        loop {
            let deliveries = self.reserve("drain", node, queue, 100, Duration::ZERO, lease).await;
            if deliveries.is_empty() {
                return taken;
            }
            taken += deliveries.len();
            let receipts = deliveries.into_iter().map(|delivery| delivery.receipt).collect();
            let Answer::Ok(_) = self.commit("drain", node, receipts).await else { return taken };
        }
    }
}

/// How long nothing may come any more before everything is drained: longer than leases, retries and
/// sweeps last.
const QUIET: Duration = Duration::from_millis(LONGEST_LEASE + 10_000);
/// The same if schedules tick rarely: longer than until a tick that could not be pushed is tried again.
const LONG_QUIET: Duration = Duration::from_secs(75);

/// Takes everything out of the queues when nothing is under way any more, and records what is left.
pub(crate) async fn rest(clients: &Arc<Clients>) {
    let quiet = if clients.plan.rare_ticks.is_empty() { QUIET } else { LONG_QUIET };
    tokio::time::sleep(quiet).await;
    schedules::delete_all(clients).await;
    for (queue, _) in &clients.plan.queues {
        clients.resume("drain", queue).await;
    }
    let mut quiet_rounds = 0;
    while quiet_rounds < 3 {
        let Some(node) = clients.cluster.any() else { return };
        let mut taken = 0;
        for queue in clients.cluster.database.queues() {
            taken += clients.drain(&node, queue.name.as_str()).await;
        }
        quiet_rounds = if taken == 0 { quiet_rounds + 1 } else { 0 };
        tokio::time::sleep(Duration::from_secs(4)).await;
    }
    let now = clients.cluster.net.store_time();
    let mut queues: BTreeMap<String, QueueAtRest> = BTreeMap::new();
    for item in clients.cluster.database.items(now) {
        let queue = item.queue.to_string();
        let at_rest = queues
            .entry(queue.clone())
            .or_insert_with(|| QueueAtRest { queue, ..QueueAtRest::default() });
        at_rest.items.push(Listed {
            id: item.id.to_string(),
            name: name(&item.payload, item.dedup_id.as_ref().map_or("", DedupId::as_str)),
            state: match item.state {
                ItemState::Ready => State::Ready,
                ItemState::Delayed => State::Delayed,
                ItemState::Reserved => State::Reserved,
                ItemState::Blocked => State::Blocked,
                ItemState::Processed => State::Processed,
            },
        });
    }
    if let Some(node) = clients.cluster.any() {
        for queue in clients.cluster.database.queues() {
            let queue = queue.name.to_string();
            let figures = clients.figures("drain", &node, &queue).await;
            let new = || QueueAtRest { queue: queue.clone(), ..QueueAtRest::default() };
            queues.entry(queue.clone()).or_insert_with(new).figures = figures;
        }
    }
    clients.recorder.mark(What::Rest { queues: queues.into_values().collect() });
}
