//! Calls of the API through the client library, each recorded with its answer.

use std::time::{Duration, Instant};

use sluicegate_checker::{
    history::{
        Answer, Delivery, Figures, Listed, NewItem, PushEntry, Pushed, Request, Response,
        RollbackItem, Settings, Time,
    },
    messages::{
        self, duration, figures, micros, new_item, outcome, popped, push_entry, pushed, settled,
    },
};
use sluicegate_client::{Backoff, Client, Error};
use sluicegate_proto::v1 as pb;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::Load;
use crate::harness::at;

/// A client and the broker it calls.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) client: Client,
    /// What the checker knows the broker by.
    pub(crate) broker: String,
}

pub(crate) fn answer_of(status: &Status) -> Answer {
    Answer::from_code(&format!("{:?}", status.code()))
}

/// Makes a unary call of a service of the client and records it.
macro_rules! call {
    ($load:expr, $name:expr, $way:expr, $request:expr, $service:ident.$method:ident($message:expr, $wait:expr), $response:expr) => {{
        let mut service = $way.client.$service();
        let message = $way.client.waiting_request($message, $wait);
        let sent = async move { service.$method(message).await };
        $load.call($name, $way, $request, sent, $response).await
    }};
}

impl Load {
    async fn call<T>(
        &self,
        name: &str,
        way: &Way,
        request: Request,
        sent: impl Future<Output = Result<tonic::Response<T>, Status>>,
        response: impl FnOnce(&T) -> Response,
    ) -> Result<T, Answer> {
        let lease = match &request {
            Request::Reserve { lease, .. } => Some(Duration::from_micros(*lease)),
            _ => None,
        };
        let call = self.recorder.start(name, &way.broker, request);
        let begun = Instant::now();
        match sent.await {
            Ok(answer) => {
                let answer = answer.into_inner();
                // Items whose leases end soon are left out, which the caller does not see.
                let is_late = lease.is_some_and(|lease| begun.elapsed() > lease / 2);
                match response(&answer) {
                    Response::Deliveries(items) if items.is_empty() && is_late => {
                        call.end(Answer::Unknown("late".to_owned()));
                    }
                    response => call.ok(response),
                }
                Ok(answer)
            }
            Err(status) => {
                let answer = answer_of(&status);
                if lease.is_some() && status.get_error_details().error_info().is_some() {
                    // The broker says so itself: nobody has items of this call.
                    call.ok(Response::Deliveries(Vec::new()));
                } else {
                    call.end(answer.clone());
                }
                Err(answer)
            }
        }
    }

    pub(crate) async fn create(
        &self,
        way: &Way,
        queue: &str,
        settings: &Settings,
        lease: Duration,
    ) -> Result<(), Answer> {
        let request = Request::SetQueue { queue: queue.to_owned(), settings: settings.clone() };
        let message =
            pb::CreateQueueRequest { queue: Some(messages::queue(queue, settings, lease)) };
        let none = Duration::ZERO;
        call!(self, "operator", way, request, admin_service.create_queue(message, none), |_| {
            Response::Done
        })
        .map(drop)
    }

    pub(crate) async fn push(
        &self,
        name: &str,
        way: &Way,
        queue: &str,
        items: &[NewItem],
    ) -> Result<(), Answer> {
        let queue = queue.to_owned();
        let request = Request::Push { queue: queue.clone(), items: items.to_vec(), stream: None };
        let items = items.iter().map(new_item).collect();
        let message = pb::PushRequest { queue, items, producer: String::new() };
        let response = |answer: &pb::PushResponse| Response::Pushed(pushed(answer.results.clone()));
        call!(self, name, way, request, queue_service.push(message, Duration::ZERO), response)
            .map(drop)
    }

    /// Pushes by the client's producer, which repeats the push until it is answered.
    pub(crate) async fn produce(&self, name: &str, way: &Way, queue: &str, items: &[NewItem]) {
        let request =
            Request::Push { queue: queue.to_owned(), items: items.to_vec(), stream: None };
        let call = self.recorder.start(name, &way.broker, request);
        let item = |item: &NewItem| {
            let new = sluicegate_client::NewItem::new(item.name.clone().into_bytes())
                .dedup_id(item.dedup_id.clone())
                .priority(item.priority);
            let new = if item.ordering_key.is_empty() {
                new
            } else {
                new.ordering_key(item.ordering_key.clone())
            };
            if item.delay > 0 { new.delay(Duration::from_micros(item.delay)) } else { new }
        };
        let backoff = Backoff { max: Duration::from_millis(500), ..Backoff::default() };
        let producer = way.client.producer(queue).backoff(backoff);
        match producer.push_all(items.iter().map(item)).await {
            Ok(results) => {
                // What the first try stored is the item of this push.
                let own = |one: Pushed| Pushed { deduplicated: false, ..one };
                call.ok(Response::Pushed(pushed(results).into_iter().map(own).collect()));
            }
            // The client says by this error that nothing was stored, by any try.
            Err(Error::Status(status)) => call.end(answer_of(&status)),
            Err(error) => call.end(Answer::Unknown(error.to_string())),
        }
    }

    pub(crate) async fn reserve(
        &self,
        name: &str,
        way: &Way,
        queue: &str,
        max_items: u32,
        wait: Duration,
        lease: Duration,
    ) -> Result<Vec<Delivery>, Answer> {
        let (request, message) = messages::reserve(queue, max_items, wait, lease);
        let deliveries = |answer: &pb::ReserveResponse| -> Vec<Delivery> {
            answer.deliveries.iter().map(|one| self.delivery(one.clone())).collect()
        };
        let response = |answer: &pb::ReserveResponse| Response::Deliveries(deliveries(answer));
        call!(self, name, way, request, queue_service.reserve(message, wait), response)
            .map(|answer| deliveries(&answer))
    }

    pub(crate) async fn pop(
        &self,
        name: &str,
        way: &Way,
        queue: &str,
        max_items: u32,
        wait: Duration,
    ) {
        let (request, message) = messages::pop(queue, max_items, wait);
        let response = |answer: &pb::PopResponse| {
            Response::Deliveries(answer.items.iter().cloned().map(popped).collect())
        };
        let _ = call!(self, name, way, request, queue_service.pop(message, wait), response);
    }

    /// Returns a time of the store as time of the history.
    fn time_of(&self, time: Option<&prost_types::Timestamp>) -> Time {
        self.recorder.time_of(self.world.clock.on_this_machine(at(time)))
    }

    pub(crate) fn delivery(&self, delivery: pb::Delivery) -> Delivery {
        let lease_end = self.time_of(delivery.lease_expire_time.as_ref());
        let item = delivery.item.unwrap_or_default();
        Delivery { receipt: delivery.receipt, lease_end, ..popped(item) }
    }

    pub(crate) async fn commit(
        &self,
        name: &str,
        way: &Way,
        receipts: Vec<String>,
    ) -> Result<(), Answer> {
        let request = Request::Commit { receipts: receipts.clone() };
        let message = pb::CommitRequest { receipts };
        let response = |answer: &pb::CommitResponse| settled(&answer.results);
        call!(self, name, way, request, queue_service.commit(message, Duration::ZERO), response)
            .map(drop)
    }

    pub(crate) async fn roll_back(
        &self,
        name: &str,
        way: &Way,
        item: RollbackItem,
    ) -> Result<(), Answer> {
        let request = Request::Rollback { items: vec![item.clone()] };
        let item = pb::RollbackItem { reason: "test".to_owned(), ..messages::rollback_item(item) };
        let message = pb::RollbackRequest { items: vec![item] };
        let response = |answer: &pb::RollbackResponse| settled(&answer.results);
        call!(self, name, way, request, queue_service.rollback(message, Duration::ZERO), response)
            .map(drop)
    }

    pub(crate) async fn extend(&self, name: &str, way: &Way, receipt: &str, lease: Duration) {
        let receipts = vec![receipt.to_owned()];
        let request = Request::Extend { receipts: receipts.clone(), lease: micros(lease) };
        let message = pb::ExtendRequest { receipts, lease: Some(duration(lease)) };
        let response = |answer: &pb::ExtendResponse| {
            let one = |result: &pb::ExtendResult| {
                let end = result.lease_expire_time.as_ref();
                (outcome(result.outcome), end.map(|end| self.time_of(Some(end))))
            };
            Response::Extended(answer.results.iter().map(one).collect())
        };
        let none = Duration::ZERO;
        let _ = call!(self, name, way, request, queue_service.extend(message, none), response);
    }

    pub(crate) async fn move_item(
        &self,
        name: &str,
        way: &Way,
        receipt: &str,
        to_queue: &str,
    ) -> Result<(), Answer> {
        let (receipt, to_queue) = (receipt.to_owned(), to_queue.to_owned());
        let request =
            Request::Move { receipt: receipt.clone(), to_queue: to_queue.clone(), delay: 0 };
        let message = pb::MoveRequest { receipt, to_queue, ..pb::MoveRequest::default() };
        let response = |answer: &pb::MoveResponse| Response::Settled(vec![outcome(answer.outcome)]);
        call!(self, name, way, request, queue_service.r#move(message, Duration::ZERO), response)
            .map(drop)
    }

    pub(crate) async fn commit_and_push(
        &self,
        name: &str,
        way: &Way,
        receipt: &str,
        pushes: Vec<PushEntry>,
    ) -> Result<(), Answer> {
        let receipt = receipt.to_owned();
        let message = pb::CommitAndPushRequest {
            receipt: receipt.clone(),
            pushes: pushes.iter().map(push_entry).collect(),
        };
        let request = Request::CommitAndPush { receipt, pushes };
        let response = |answer: &pb::CommitAndPushResponse| {
            Response::CommittedAndPushed(outcome(answer.outcome), pushed(answer.results.clone()))
        };
        let none = Duration::ZERO;
        call!(self, name, way, request, queue_service.commit_and_push(message, none), response)
            .map(drop)
    }

    pub(crate) async fn figures(&self, way: &Way, queue: &str) -> Result<Figures, Answer> {
        let request = Request::GetQueueStats { queue: queue.to_owned() };
        let message = pb::GetQueueStatsRequest { queue: queue.to_owned() };
        let of = |answer: &pb::GetQueueStatsResponse| {
            figures(answer.stats.as_ref().unwrap_or(&pb::QueueStats::default()))
        };
        let response = |answer: &pb::GetQueueStatsResponse| Response::Stats(of(answer));
        let none = Duration::ZERO;
        call!(
            self,
            "operator",
            way,
            request,
            admin_service.get_queue_stats(message, none),
            response
        )
        .map(|answer| of(&answer))
    }

    /// Lists the items of a queue. A queue that is not there has none.
    pub(crate) async fn list(&self, way: &Way, queue: &str) -> Result<Vec<Listed>, Status> {
        let mut listed = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = pb::ListItemsRequest {
                queue: queue.to_owned(),
                page_size: 1_000,
                page_token,
                ..pb::ListItemsRequest::default()
            };
            let request = way.client.request(request);
            let page = match way.client.admin_service().list_items(request).await {
                Err(status) if status.code() == Code::NotFound => return Ok(Vec::new()),
                page => page?.into_inner(),
            };
            listed.extend(page.items.into_iter().map(messages::listed));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(listed);
            }
        }
    }

    /// Deletes a queue of this cycle, which is not part of the history any more.
    pub(crate) async fn delete_queue(&self, way: &Way, queue: &str) {
        let message = pb::DeleteQueueRequest { name: queue.to_owned(), force: true };
        let message = way.client.request(message);
        let _ = way.client.admin_service().delete_queue(message).await;
    }
}
