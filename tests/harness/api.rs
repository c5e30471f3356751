//! The generated clients, with short names for frequent calls.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use sluicegate_proto::v1::{
    CommitRequest, ConsumeRequest, ConsumeResponse, CreateQueueRequest, Delivery, GetItemRequest,
    GetQueueStatsRequest, Item, ItemState, ListItemsRequest, NewItem, OnDisconnect, Outcome,
    PushRequest, PushResult, Queue, QueueStats, ReserveRequest, RollbackItem, RollbackRequest,
    SettleResult, admin_service_client::AdminServiceClient,
    operation_service_client::OperationServiceClient, queue_service_client::QueueServiceClient,
    schedule_service_client::ScheduleServiceClient, template_service_client::TemplateServiceClient,
};
use tonic::{Status, Streaming, transport::Channel};
use tonic_types::StatusExt;

use super::{until, within};

/// One connection to a broker.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) channel: Channel,
    pub(crate) queue: QueueServiceClient<Channel>,
    pub(crate) admin: AdminServiceClient<Channel>,
    pub(crate) schedule: ScheduleServiceClient<Channel>,
    pub(crate) operation: OperationServiceClient<Channel>,
    pub(crate) template: TemplateServiceClient<Channel>,
}

impl Api {
    pub(crate) async fn connect(address: &str) -> Self {
        let endpoint = Channel::from_shared(address.to_owned()).expect("an address");
        let channel = endpoint.connect().await.expect("a broker that answers");
        Self {
            queue: QueueServiceClient::new(channel.clone()),
            admin: AdminServiceClient::new(channel.clone()),
            schedule: ScheduleServiceClient::new(channel.clone()),
            operation: OperationServiceClient::new(channel.clone()),
            template: TemplateServiceClient::new(channel.clone()),
            channel,
        }
    }

    pub(crate) async fn create(&self, queue: Queue) -> Queue {
        let request = CreateQueueRequest { queue: Some(queue) };
        let answer = self.admin.clone().create_queue(request).await.expect("a queue");
        answer.into_inner().queue.expect("the queue in the answer")
    }

    /// Creates a queue with the default settings, unless there is one of that name.
    pub(crate) async fn ensure(&self, queue: &str) {
        let queue = Queue { name: queue.to_owned(), ..Queue::default() };
        let request = CreateQueueRequest { queue: Some(queue) };
        if let Err(status) = self.admin.clone().create_queue(request).await {
            assert_eq!(status.code(), tonic::Code::AlreadyExists, "{status:?}");
        }
    }

    pub(crate) async fn try_push(
        &self,
        queue: &str,
        items: Vec<NewItem>,
    ) -> Result<Vec<PushResult>, Status> {
        let request = PushRequest { queue: queue.to_owned(), items, producer: String::new() };
        Ok(self.queue.clone().push(request).await?.into_inner().results)
    }

    pub(crate) async fn push_items(&self, queue: &str, items: Vec<NewItem>) -> Vec<PushResult> {
        self.try_push(queue, items).await.expect("an answered push")
    }

    pub(crate) async fn push(&self, queue: &str, payloads: &[&str]) -> Vec<PushResult> {
        self.push_items(queue, payloads.iter().map(|payload| new_item(payload)).collect()).await
    }

    /// Reserves up to `max_items`, waiting up to `wait` for the first.
    pub(crate) async fn reserve(
        &self,
        queue: &str,
        max_items: i32,
        wait: Duration,
        lease: Duration,
    ) -> Vec<Delivery> {
        let request = ReserveRequest {
            queue: queue.to_owned(),
            max_items,
            wait: duration(wait),
            lease: duration(lease),
            consumer: String::new(),
        };
        self.queue.clone().reserve(request).await.expect("an answer").into_inner().deliveries
    }

    /// Reserves one item, which must be delivered within the time limit.
    pub(crate) async fn reserve_one(&self, queue: &str, lease: Duration) -> Delivery {
        let mut deliveries = self.reserve(queue, 1, super::LIMIT, lease).await;
        assert_eq!(deliveries.len(), 1, "an item of {queue} within the time limit");
        deliveries.remove(0)
    }

    /// Reserves the items that are ready now, without waiting.
    pub(crate) async fn reserve_now(&self, queue: &str, max_items: i32) -> Vec<Delivery> {
        self.reserve(queue, max_items, Duration::ZERO, Duration::from_mins(1)).await
    }

    pub(crate) async fn try_commit(&self, receipts: &[&str]) -> Result<Vec<SettleResult>, Status> {
        let receipts = receipts.iter().map(|&receipt| receipt.to_owned()).collect();
        let answer = self.queue.clone().commit(CommitRequest { receipts }).await?;
        Ok(answer.into_inner().results)
    }

    /// Commits, and returns the outcomes.
    pub(crate) async fn commit(&self, receipts: &[&str]) -> Vec<Outcome> {
        outcomes(&self.try_commit(receipts).await.expect("an answered commit"))
    }

    /// Rolls one item back without a delay.
    pub(crate) async fn rollback(&self, receipt: &str, reason: &str) -> Outcome {
        self.rollback_item(RollbackItem {
            receipt: receipt.to_owned(),
            delay: duration(Duration::ZERO),
            reason: reason.to_owned(),
            ..Default::default()
        })
        .await
    }

    pub(crate) async fn rollback_item(&self, item: RollbackItem) -> Outcome {
        let request = RollbackRequest { items: vec![item] };
        let answer = self.queue.clone().rollback(request).await.expect("an answered rollback");
        outcomes(&answer.into_inner().results)[0]
    }

    /// Opens a consumer of `queue` with a lease of ten minutes.
    pub(crate) async fn consume(&self, queue: &str, max_in_flight: i32) -> Deliveries {
        self.consume_with(ConsumeRequest {
            queue: queue.to_owned(),
            max_in_flight,
            lease: duration(Duration::from_mins(10)),
            ..ConsumeRequest::default()
        })
        .await
    }

    /// Opens a consumer whose items count as failed attempts if its stream ends.
    pub(crate) async fn consume_counting(&self, queue: &str, max_in_flight: i32) -> Deliveries {
        self.consume_with(ConsumeRequest {
            queue: queue.to_owned(),
            max_in_flight,
            lease: duration(Duration::from_mins(10)),
            on_disconnect: OnDisconnect::Count.into(),
            ..ConsumeRequest::default()
        })
        .await
    }

    /// Opens a consumer. The queue is created before if it is not there, so that the consumer waits for items, not for it.
    pub(crate) async fn consume_with(&self, request: ConsumeRequest) -> Deliveries {
        self.ensure(&request.queue).await;
        let stream = self.queue.clone().consume(request).await.expect("a stream").into_inner();
        Deliveries { stream, pending: VecDeque::new() }
    }

    pub(crate) async fn item(&self, queue: &str, id: &str) -> Result<Item, Status> {
        let request = GetItemRequest { queue: queue.to_owned(), id: id.to_owned() };
        let answer = self.admin.clone().get_item(request).await?;
        Ok(answer.into_inner().item.expect("the item in the answer"))
    }

    /// Waits until the item is in this state.
    pub(crate) async fn until_state(&self, queue: &str, id: &str, state: ItemState) -> Item {
        until(&format!("item {id} of {queue} is {state:?}"), || async {
            self.item(queue, id).await.ok().filter(|item| item.state() == state)
        })
        .await
    }

    /// Returns all items of a queue in one state, in the order of ListItems, over as many pages as
    /// necessary.
    pub(crate) async fn list(&self, queue: &str, state: ItemState) -> Vec<Item> {
        let mut items = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListItemsRequest {
                queue: queue.to_owned(),
                state: state.into(),
                page_size: 100,
                page_token,
                filter: None,
            };
            let page = self.admin.clone().list_items(request).await.expect("a page").into_inner();
            items.extend(page.items);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return items;
            }
        }
    }

    pub(crate) async fn stats(&self, queue: &str) -> QueueStats {
        let request = GetQueueStatsRequest { queue: queue.to_owned() };
        let answer = self.admin.clone().get_queue_stats(request).await.expect("stats");
        answer.into_inner().stats.expect("the stats in the answer")
    }

    /// Waits until the stats satisfy `wanted`, as they are cached for a moment.
    pub(crate) async fn until_stats(&self, queue: &str, wanted: impl Fn(&QueueStats) -> bool) {
        let last = std::sync::Mutex::new(None);
        let asked = tokio::time::timeout(super::LIMIT, async {
            loop {
                let stats = self.stats(queue).await;
                if wanted(&stats) {
                    return;
                }
                *last.lock().expect("no panic inside") = Some(stats);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        assert!(asked.await.is_ok(), "the stats of {queue} stay {last:?}");
    }
}

/// The deliveries of one stream, one by one.
pub(crate) struct Deliveries {
    stream: Streaming<ConsumeResponse>,
    pending: VecDeque<Delivery>,
}

impl Deliveries {
    /// Returns the next delivery. Panics if none arrives within the time limit.
    pub(crate) async fn next(&mut self) -> Delivery {
        within("the next delivery", self.try_next()).await.expect("an open stream")
    }

    /// Returns the next delivery, or the status with which the stream ended.
    pub(crate) async fn try_next(&mut self) -> Result<Delivery, Status> {
        loop {
            if let Some(delivery) = self.pending.pop_front() {
                return Ok(delivery);
            }
            match self.stream.message().await? {
                Some(message) => self.pending.extend(message.deliveries),
                None => return Err(Status::ok("the stream ended")),
            }
        }
    }

    pub(crate) async fn take(&mut self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            taken.push(self.next().await);
        }
        taken
    }

    /// Returns the deliveries that arrive while `other` is awaited, and the result of `other`.
    pub(crate) async fn during<T>(&mut self, other: impl Future<Output = T>) -> (Vec<Delivery>, T) {
        let mut seen = Vec::new();
        tokio::pin!(other);
        loop {
            tokio::select! {
                answer = &mut other => return (seen, answer),
                delivery = self.try_next() => seen.push(delivery.expect("an open stream")),
            }
        }
    }
}

pub(crate) fn new_item(payload: &str) -> NewItem {
    NewItem { payload: payload.to_owned().into(), ..NewItem::default() }
}

#[allow(clippy::unnecessary_wraps)] // always set, as the messages require
pub(crate) fn duration(duration: Duration) -> Option<prost_types::Duration> {
    Some(prost_types::Duration::try_from(duration).expect("a duration in range"))
}

/// Returns a timestamp, which must be set, as the system's time.
pub(crate) fn at(timestamp: Option<&prost_types::Timestamp>) -> SystemTime {
    SystemTime::try_from(*timestamp.expect("a timestamp")).expect("a timestamp in range")
}

/// Returns the payload of a delivery as text.
pub(crate) fn text(delivery: &Delivery) -> String {
    let item = delivery.item.as_ref().expect("an item in the delivery");
    String::from_utf8(item.payload.to_vec()).expect("text")
}

pub(crate) fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(text).collect()
}

pub(crate) fn outcomes(results: &[SettleResult]) -> Vec<Outcome> {
    results.iter().map(SettleResult::outcome).collect()
}

/// Returns the fields that an INVALID_ARGUMENT names.
pub(crate) fn bad_fields(status: &Status) -> Vec<String> {
    let details = status.get_error_details();
    let violations = details.bad_request().map(|bad| bad.field_violations.clone());
    violations.unwrap_or_default().into_iter().map(|violation| violation.field).collect()
}

/// Returns the stable reason of an error, and checks that the domain is Sluicegate's.
pub(crate) fn error_reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info().unwrap_or_else(|| panic!("no ErrorInfo in {status:?}"));
    assert_eq!(info.domain, "sluicegate");
    info.reason.clone()
}

/// Returns the delay after which an error says to retry.
pub(crate) fn retry_after(status: &Status) -> Option<Duration> {
    status.get_error_details().retry_info().and_then(|info| info.retry_delay)
}
