//! Calls of the API, each recorded with its answer.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::{
    history::{
        Answer, Delivery, NewItem, PushEntry, Request, Response, RollbackItem, Settings, Tick, Time,
    },
    messages::{self, duration, micros, new_item, outcome, popped, push_entry, pushed, settled},
};
use sluicegate_proto::v1::{
    self as pb, admin_service_server::AdminService as _, queue_service_server::QueueService as _,
};

use super::Clients;
use crate::cluster::{Failed, Node};

/// Makes a call of a service. `$path` names it for the check of permissions.
macro_rules! ask {
    ($node:expr, $patience:expr, $path:literal, $method:ident, $message:expr) => {{
        let node = &$node;
        let work = async {
            let request = node.broker.request(concat!("/sluicegate.v1.", $path), $message);
            let refused = || tonic::Status::unimplemented($path);
            node.broker.api().$method(request.ok_or_else(refused)?).await
        };
        node.call($patience, work).await
    }};
}
pub(super) use ask;

/// Creates a queue.
pub(crate) async fn set_queue(
    clients: &Clients,
    node: &Node,
    name: &str,
    settings: &Settings,
) -> Result<(), Failed> {
    let queue = name.to_owned();
    let request = Request::SetQueue { queue, settings: settings.clone() };
    let call = clients.recorder.start("operator", &node.name, request);
    let queue = Some(messages::queue(name, settings, clients.lease()));
    let message = pb::CreateQueueRequest { queue };
    let done = ask!(node, None, "AdminService/CreateQueue", create_queue, message);
    match done {
        Ok(_) => {
            call.ok(Response::Done);
            Ok(())
        }
        Err(Failed(answer)) => {
            call.end(answer.clone());
            Err(Failed(answer))
        }
    }
}

impl Clients {
    /// Returns an instant of the store as time of the history.
    fn history_time(&self, time: Option<prost_types::Timestamp>) -> Time {
        let Some(time) = time else { return 0 };
        let millis = time.seconds * 1_000 + i64::from(time.nanos) / 1_000_000;
        let ahead = millis - self.cluster.net.store_time().0;
        self.recorder.now().saturating_add_signed(ahead * 1_000)
    }

    pub(super) fn delivery(&self, delivery: pb::Delivery) -> Delivery {
        let lease_end = self.history_time(delivery.lease_expire_time);
        let item = popped(delivery.item.unwrap_or_default());
        let tick = self.tick(&item.name);
        Delivery { receipt: delivery.receipt, lease_end, tick, ..item }
    }

    /// Returns the tick that has pushed an item of this name, if one has.
    fn tick(&self, name: &str) -> Option<Tick> {
        let (schedule, millis) = name.split_once('@')?;
        let millis: i64 = millis.parse().ok()?;
        let at = prost_types::Timestamp {
            seconds: millis.div_euclid(1_000),
            nanos: (millis.rem_euclid(1_000) * 1_000_000) as i32,
        };
        let at = self.history_time(Some(at)) / 1_000 * 1_000;
        Some(Tick { schedule: schedule.to_owned(), at })
    }

    pub(super) async fn push(
        &self,
        client: &str,
        node: &Node,
        queue: &str,
        items: Vec<NewItem>,
    ) -> Result<(), Failed> {
        let message = pb::PushRequest {
            queue: queue.to_owned(),
            items: items.iter().map(new_item).collect(),
            producer: String::new(),
        };
        let request = Request::Push { queue: queue.to_owned(), items, stream: None };
        let call = self.recorder.start(client, &node.name, request);
        let patience = self.patience();
        match ask!(node, patience, "QueueService/Push", push, message) {
            Ok(answer) => {
                call.ok(Response::Pushed(pushed(answer.results)));
                Ok(())
            }
            Err(Failed(answer)) => {
                call.end(answer.clone());
                Err(Failed(answer))
            }
        }
    }

    pub(super) async fn pop(
        &self,
        client: &str,
        node: &Node,
        queue: &str,
        max_items: u32,
        wait: Duration,
    ) {
        let (request, message) = messages::pop(queue, max_items, wait);
        let call = self.recorder.start(client, &node.name, request);
        let patience = if self.plan.careless_pops { self.patience() } else { None };
        match ask!(node, patience, "QueueService/Pop", pop, message) {
            Ok(answer) => {
                let items = answer.items.into_iter().map(popped).collect();
                call.ok(Response::Deliveries(items));
            }
            Err(Failed(answer)) => call.end(answer),
        }
    }

    pub(super) async fn reserve(
        &self,
        client: &str,
        node: &Node,
        queue: &str,
        max_items: u32,
        wait: Duration,
        lease: Duration,
    ) -> Vec<Delivery> {
        let (request, message) = messages::reserve(queue, max_items, wait, lease);
        let call = self.recorder.start(client, &node.name, request);
        match ask!(node, self.patience(), "QueueService/Reserve", reserve, message) {
            Ok(answer) => {
                let deliveries: Vec<_> =
                    answer.deliveries.into_iter().map(|one| self.delivery(one)).collect();
                call.ok(Response::Deliveries(deliveries.clone()));
                deliveries
            }
            Err(Failed(answer)) => {
                call.end(answer);
                Vec::new()
            }
        }
    }

    pub(super) async fn commit(&self, client: &str, node: &Node, receipts: Vec<String>) -> Answer {
        let request = Request::Commit { receipts: receipts.clone() };
        let call = self.recorder.start(client, &node.name, request);
        let message = pb::CommitRequest { receipts };
        let answer = match ask!(node, self.patience(), "QueueService/Commit", commit, message) {
            Ok(answer) => Answer::Ok(settled(&answer.results)),
            Err(Failed(answer)) => answer,
        };
        call.end(answer.clone());
        answer
    }

    pub(super) async fn roll_back(&self, client: &str, node: &Node, item: RollbackItem) -> Answer {
        let request = Request::Rollback { items: vec![item.clone()] };
        let call = self.recorder.start(client, &node.name, request);
        let message = pb::RollbackRequest { items: vec![messages::rollback_item(item)] };
        let answer = match ask!(node, self.patience(), "QueueService/Rollback", rollback, message) {
            Ok(answer) => Answer::Ok(settled(&answer.results)),
            Err(Failed(answer)) => answer,
        };
        call.end(answer.clone());
        answer
    }

    /// Prolongs a lease, and returns its new end if there is one.
    pub(super) async fn extend(
        &self,
        client: &str,
        node: &Node,
        receipt: &str,
        lease: Duration,
    ) -> Option<Time> {
        let receipts = vec![receipt.to_owned()];
        let request = Request::Extend { receipts: receipts.clone(), lease: micros(lease) };
        let call = self.recorder.start(client, &node.name, request);
        let message = pb::ExtendRequest { receipts, lease: Some(duration(lease)) };
        match ask!(node, self.patience(), "QueueService/Extend", extend, message) {
            Ok(answer) => {
                let one = |result: pb::ExtendResult| {
                    let end = result.lease_expire_time.map(|end| self.history_time(Some(end)));
                    (outcome(result.outcome), end)
                };
                let extended: Vec<_> = answer.results.into_iter().map(one).collect();
                let end = extended.first().and_then(|(_, end)| *end);
                call.ok(Response::Extended(extended));
                end
            }
            Err(Failed(answer)) => {
                call.end(answer);
                None
            }
        }
    }

    pub(super) async fn move_item(
        &self,
        client: &str,
        node: &Node,
        receipt: &str,
        to_queue: &str,
        delay: Duration,
    ) -> Answer {
        let (receipt, to_queue) = (receipt.to_owned(), to_queue.to_owned());
        let request = Request::Move {
            receipt: receipt.clone(),
            to_queue: to_queue.clone(),
            delay: micros(delay),
        };
        let call = self.recorder.start(client, &node.name, request);
        let delay = Some(duration(delay));
        let message = pb::MoveRequest { receipt, to_queue, delay, ..pb::MoveRequest::default() };
        let answer = match ask!(node, self.patience(), "QueueService/Move", r#move, message) {
            Ok(answer) => Answer::Ok(Response::Settled(vec![outcome(answer.outcome)])),
            Err(Failed(answer)) => answer,
        };
        call.end(answer.clone());
        answer
    }

    pub(super) async fn commit_and_push(
        &self,
        client: &str,
        node: &Node,
        receipt: &str,
        pushes: Vec<PushEntry>,
    ) -> Answer {
        let receipt = receipt.to_owned();
        let message = pb::CommitAndPushRequest {
            receipt: receipt.clone(),
            pushes: pushes.iter().map(push_entry).collect(),
        };
        let request = Request::CommitAndPush { receipt, pushes };
        let call = self.recorder.start(client, &node.name, request);
        let path = self.patience();
        let answer = match ask!(node, path, "QueueService/CommitAndPush", commit_and_push, message)
        {
            Ok(answer) => {
                let results = pushed(answer.results);
                Answer::Ok(Response::CommittedAndPushed(outcome(answer.outcome), results))
            }
            Err(Failed(answer)) => answer,
        };
        call.end(answer.clone());
        answer
    }
}

/// Repeats a call until it is answered one way or the other; a call that is repeated with the same
/// receipts does no harm.
pub(super) fn is_open(answer: &Answer) -> bool {
    matches!(answer, Answer::Unknown(_))
}

pub(super) type NodeRef = Arc<Node>;
