//! Calls of the API, each recorded with its answer.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use sluicegate_checker::{
    Recorder,
    history::{
        Answer, Consume, Delivery, Figures, Listed, NewItem, PushEntry, Request, Response,
        RollbackItem, Settings,
    },
    messages::{
        self, duration, figures, micros, new_item, outcome, popped, push_entry, pushed, settled,
    },
};
use sluicegate_proto::v1 as pb;
use tokio::sync::watch;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::{
    harness::{Api, at},
    sqlite::{Answered, WriteLog},
};

/// How long a call may take at most. A broker answers within half a minute, whatever its store does.
pub(crate) const BOUND: Duration = Duration::from_secs(40);

/// The clients of one case.
#[derive(Clone)]
pub(crate) struct Clients {
    pub(crate) recorder: Recorder,
    pub(crate) api: Api,
    broker: String,
    notes: Arc<Mutex<Notes>>,
    /// What the store writes, if it is recorded.
    log: Option<WriteLog>,
}

/// What is noted of all calls.
#[derive(Debug, Default)]
struct Notes {
    slowest: Duration,
    /// Calls that had not ended in time.
    stuck: Vec<String>,
    /// The answers that must not be forgotten, with their places among the store's writes.
    answers: Vec<Answered>,
    /// True while items are delivered through a stream, which the store may note at any time.
    streams: bool,
}

impl Clients {
    pub(crate) fn new(api: Api, broker: String, log: Option<WriteLog>) -> Self {
        Self { recorder: Recorder::default(), api, broker, notes: Arc::default(), log }
    }

    /// Returns the same clients, which call another broker.
    pub(crate) fn through(&self, api: Api, broker: String) -> Self {
        Self { api, broker, ..self.clone() }
    }

    /// Returns the answers that must not be forgotten.
    pub(crate) fn answers(&self) -> Vec<Answered> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).answers.clone()
    }

    /// Returns how long the slowest call took, and the calls that did not end in time.
    pub(crate) fn notes(&self) -> (Duration, Vec<String>) {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        (notes.slowest, notes.stuck.clone())
    }

    /// Makes a call.
    async fn call<T>(
        &self,
        client: &str,
        request: Request,
        sent: impl Future<Output = Result<tonic::Response<T>, Status>>,
        answer: impl Fn(&T) -> Response,
    ) -> Result<T, Answer> {
        let what = format!("{request:?}");
        let lease = match &request {
            Request::Reserve { lease, .. } => Some(Duration::from_micros(*lease)),
            _ => None,
        };
        let is_lasting =
            !matches!(request, Request::Reserve { .. } | Request::GetQueueStats { .. });
        let call = self.recorder.start(client, &self.broker, request);
        let begun = Instant::now();
        let ended = tokio::time::timeout(BOUND, sent).await;
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.slowest = notes.slowest.max(begun.elapsed());
        match ended {
            Ok(Ok(response)) => {
                let response = response.into_inner();
                if let (Some(log), true, false) = (&self.log, is_lasting, notes.streams) {
                    let call = format!("{what} answered by {:?}", answer(&response));
                    notes.answers.push(Answered { position: log.position(), call });
                }
                // Items whose leases end soon are left out, which the caller does not see.
                let is_late = lease.is_some_and(|lease| begun.elapsed() > lease / 2);
                let answer = answer(&response);
                if is_late && matches!(&answer, Response::Deliveries(some) if some.is_empty()) {
                    call.end(Answer::Unknown("late".to_owned()));
                } else {
                    call.ok(answer);
                }
                Ok(response)
            }
            Ok(Err(status)) => {
                let answer = answer_of(&status);
                if lease.is_some() && status.get_error_details().error_info().is_some() {
                    // The broker says so itself: nobody has items of this call.
                    call.ok(Response::Deliveries(Vec::new()));
                } else {
                    call.end(answer.clone());
                }
                Err(answer)
            }
            Err(_) => {
                notes.stuck.push(what);
                Err(Answer::Unknown("not answered".to_owned()))
            }
        }
    }

    pub(crate) async fn create(&self, queue: &str, settings: &Settings) -> Result<(), Answer> {
        let request = Request::SetQueue { queue: queue.to_owned(), settings: settings.clone() };
        let message = messages::queue(queue, settings, Duration::from_secs(1));
        let message = pb::CreateQueueRequest { queue: Some(message) };
        let mut api = self.api.admin.clone();
        let sent = async move { api.create_queue(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn push(&self, queue: &str, items: &[NewItem]) -> Result<Vec<String>, Answer> {
        let request =
            Request::Push { queue: queue.to_owned(), items: items.to_vec(), stream: None };
        let message = pb::PushRequest {
            queue: queue.to_owned(),
            items: items.iter().map(new_item).collect(),
            producer: String::new(),
        };
        let mut api = self.api.queue.clone();
        let sent = async move { api.push(message).await };
        let response = |answer: &pb::PushResponse| Response::Pushed(pushed(answer.results.clone()));
        let answer = self.call("producer", request, sent, response).await?;
        Ok(answer.results.into_iter().map(|result| result.id).collect())
    }

    pub(crate) async fn reserve(
        &self,
        queue: &str,
        max_items: u32,
        wait: Duration,
        lease: Duration,
    ) -> Result<Vec<Delivery>, Answer> {
        let (request, message) = messages::reserve(queue, max_items, wait, lease);
        let mut api = self.api.queue.clone();
        let sent = async move { api.reserve(message).await };
        let deliveries = |answer: &pb::ReserveResponse| -> Vec<Delivery> {
            answer.deliveries.iter().map(|one| self.delivery(one.clone())).collect()
        };
        let response = |answer: &pb::ReserveResponse| Response::Deliveries(deliveries(answer));
        self.call("consumer", request, sent, response).await.map(|answer| deliveries(&answer))
    }

    pub(crate) async fn pop(&self, queue: &str, max_items: u32) -> Result<(), Answer> {
        let (request, message) = messages::pop(queue, max_items, Duration::ZERO);
        let mut api = self.api.queue.clone();
        let sent = async move { api.pop(message).await };
        let response = |answer: &pb::PopResponse| {
            Response::Deliveries(answer.items.iter().cloned().map(popped).collect())
        };
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) fn delivery(&self, delivery: pb::Delivery) -> Delivery {
        let lease_end = self.recorder.time_of(at(delivery.lease_expire_time.as_ref()));
        let item = delivery.item.unwrap_or_default();
        Delivery { receipt: delivery.receipt, lease_end, ..popped(item) }
    }

    pub(crate) async fn commit(&self, receipts: Vec<String>) -> Result<(), Answer> {
        let request = Request::Commit { receipts: receipts.clone() };
        let mut api = self.api.queue.clone();
        let sent = async move { api.commit(pb::CommitRequest { receipts }).await };
        let response = |answer: &pb::CommitResponse| settled(&answer.results);
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) async fn roll_back(&self, items: Vec<RollbackItem>) -> Result<(), Answer> {
        let request = Request::Rollback { items: items.clone() };
        let one =
            |item| pb::RollbackItem { reason: "test".to_owned(), ..messages::rollback_item(item) };
        let message = pb::RollbackRequest { items: items.into_iter().map(one).collect() };
        let mut api = self.api.queue.clone();
        let sent = async move { api.rollback(message).await };
        let response = |answer: &pb::RollbackResponse| settled(&answer.results);
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) async fn extend(
        &self,
        receipts: Vec<String>,
        lease: Duration,
    ) -> Result<(), Answer> {
        let request = Request::Extend { receipts: receipts.clone(), lease: micros(lease) };
        let message = pb::ExtendRequest { receipts, lease: Some(duration(lease)) };
        let mut api = self.api.queue.clone();
        let sent = async move { api.extend(message).await };
        let response = |answer: &pb::ExtendResponse| {
            let one = |result: &pb::ExtendResult| {
                let end = result.lease_expire_time.as_ref();
                (outcome(result.outcome), end.map(|end| self.recorder.time_of(at(Some(end)))))
            };
            Response::Extended(answer.results.iter().map(one).collect())
        };
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) async fn move_item(&self, receipt: &str, to_queue: &str) -> Result<(), Answer> {
        let (receipt, to_queue) = (receipt.to_owned(), to_queue.to_owned());
        let request =
            Request::Move { receipt: receipt.clone(), to_queue: to_queue.clone(), delay: 0 };
        let message = pb::MoveRequest { receipt, to_queue, ..pb::MoveRequest::default() };
        let mut api = self.api.queue.clone();
        let sent = async move { api.r#move(message).await };
        let response = |answer: &pb::MoveResponse| Response::Settled(vec![outcome(answer.outcome)]);
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) async fn commit_and_push(
        &self,
        receipt: &str,
        pushes: Vec<PushEntry>,
    ) -> Result<(), Answer> {
        let receipt = receipt.to_owned();
        let message = pb::CommitAndPushRequest {
            receipt: receipt.clone(),
            pushes: pushes.iter().map(push_entry).collect(),
        };
        let request = Request::CommitAndPush { receipt, pushes };
        let mut api = self.api.queue.clone();
        let sent = async move { api.commit_and_push(message).await };
        let response = |answer: &pb::CommitAndPushResponse| {
            Response::CommittedAndPushed(outcome(answer.outcome), pushed(answer.results.clone()))
        };
        self.call("consumer", request, sent, response).await.map(drop)
    }

    pub(crate) async fn redrive(&self, queue: &str) -> Result<(), Answer> {
        let request = Request::RedriveItems { queue: queue.to_owned() };
        let message = pb::RedriveItemsRequest {
            queue: queue.to_owned(),
            ..pb::RedriveItemsRequest::default()
        };
        let mut api = self.api.admin.clone();
        let sent = async move { api.redrive_items(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn replay(&self, queue: &str) -> Result<(), Answer> {
        let request = Request::ReplayItems { queue: queue.to_owned() };
        let all = pb::replay_items_request::Selection::ProcessTime(pb::TimeRange::default());
        let message = pb::ReplayItemsRequest {
            queue: queue.to_owned(),
            selection: Some(all),
            ..pb::ReplayItemsRequest::default()
        };
        let mut api = self.api.admin.clone();
        let sent = async move { api.replay_items(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn purge(&self, queue: &str) -> Result<(), Answer> {
        let request = Request::PurgeQueue { queue: queue.to_owned() };
        let message = pb::PurgeQueueRequest { name: queue.to_owned() };
        let mut api = self.api.admin.clone();
        let sent = async move { api.purge_queue(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn delete_queue(&self, queue: &str, force: bool) -> Result<(), Answer> {
        let request = Request::DeleteQueue { queue: queue.to_owned(), force };
        let message = pb::DeleteQueueRequest { name: queue.to_owned(), force };
        let mut api = self.api.admin.clone();
        let sent = async move { api.delete_queue(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn delete_item(&self, queue: &str, id: &str) -> Result<(), Answer> {
        let request = Request::DeleteItem { queue: queue.to_owned(), id: id.to_owned() };
        let message = pb::DeleteItemRequest {
            queue: queue.to_owned(),
            id: id.to_owned(),
            ..pb::DeleteItemRequest::default()
        };
        let mut api = self.api.admin.clone();
        let sent = async move { api.delete_item(message).await };
        self.call("operator", request, sent, |_| Response::Done).await.map(drop)
    }

    pub(crate) async fn figures(&self, queue: &str) -> Result<Figures, Answer> {
        let request = Request::GetQueueStats { queue: queue.to_owned() };
        let message = pb::GetQueueStatsRequest { queue: queue.to_owned() };
        let mut api = self.api.admin.clone();
        let sent = async move { api.get_queue_stats(message).await };
        let of = |answer: &pb::GetQueueStatsResponse| {
            figures(answer.stats.as_ref().unwrap_or(&pb::QueueStats::default()))
        };
        let response = |answer: &pb::GetQueueStatsResponse| Response::Stats(of(answer));
        self.call("operator", request, sent, response).await.map(|answer| of(&answer))
    }

    /// Lists the items of a queue, with the ends of their leases. A queue that is not there has none.
    pub(crate) async fn list(&self, queue: &str) -> Result<Vec<Listed>, Status> {
        let request = pb::ListItemsRequest {
            queue: queue.to_owned(),
            page_size: 1_000,
            ..pb::ListItemsRequest::default()
        };
        let page = match self.api.admin.clone().list_items(request).await {
            Err(status) if status.code() == Code::NotFound => return Ok(Vec::new()),
            page => page?.into_inner(),
        };
        Ok(page.items.into_iter().map(messages::listed).collect())
    }

    /// Consumes through a stream while `meanwhile` runs, which is told how many items have come, and until `enough` have or `patience` has
    /// passed. Returns what came.
    pub(crate) async fn consume_during<M: Future<Output = Result<(), Answer>>>(
        &self,
        queue: &str,
        enough: usize,
        patience: Duration,
        meanwhile: impl FnOnce(watch::Receiver<usize>) -> M,
    ) -> (Vec<Delivery>, Result<(), Answer>) {
        let (count, counted) = watch::channel(0);
        let meanwhile = meanwhile(counted);
        let lease = Duration::from_secs(1);
        let request = Request::Consume(Consume {
            queue: queue.to_owned(),
            max_in_flight: 10,
            lease: micros(lease),
            ..Consume::default()
        });
        let message = pb::ConsumeRequest {
            queue: queue.to_owned(),
            max_in_flight: 10,
            lease: Some(duration(lease)),
            ..pb::ConsumeRequest::default()
        };
        let call = self.recorder.start("consumer", &self.broker, request);
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).streams = true;
        let mut stream = match self.api.queue.clone().consume(message).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => {
                call.end(answer_of(&status));
                return (Vec::new(), meanwhile.await);
            }
        };
        // The stream waits once the broker has found nothing for it.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (mut came, mut done) = (Vec::new(), None);
        let mut meanwhile = std::pin::pin!(meanwhile);
        let mut until = tokio::time::Instant::now() + BOUND;
        loop {
            if done.is_some() && came.len() >= enough {
                call.closed();
                break;
            }
            tokio::select! {
                answer = &mut meanwhile, if done.is_none() => {
                    done = Some(answer);
                    until = tokio::time::Instant::now() + patience;
                }
                message = stream.message() => match message {
                    Ok(Some(message)) => {
                        let deliveries: Vec<Delivery> =
                            message.deliveries.into_iter().map(|one| self.delivery(one)).collect();
                        call.delivered(deliveries.clone());
                        came.extend(deliveries);
                        count.send_replace(came.len());
                    }
                    ended => {
                        let why = ended.err().map_or_else(|| "ended".to_owned(), |s| format!("{:?}", s.code()));
                        call.end(Answer::Unknown(why));
                        break;
                    }
                },
                () = tokio::time::sleep_until(until) => {
                    call.closed();
                    break;
                }
            }
        }
        let done = match done {
            Some(done) => done,
            None => meanwhile.await,
        };
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).streams = false;
        (came, done)
    }
}

fn answer_of(status: &Status) -> Answer {
    Answer::from_code(&format!("{:?}", status.code()))
}
