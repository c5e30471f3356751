//! The generated clients, for one visitor.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::http::{Extensions, HeaderValue, Request, Response, header};
use sluicegate_proto::v1::{
    Broker as BrokerReport, GetBrokerRequest, GetBrokerResponse, GetItemRequest, GetQueueRequest,
    GetQueueStatsRequest, Item, ItemState, ListBrokersRequest, ListConsumersRequest,
    ListConsumersResponse, ListItemsRequest, ListQueuesRequest, Queue, QueueStats,
    admin_service_client::AdminServiceClient, operation_service_client::OperationServiceClient,
    queue_service_client::QueueServiceClient, schedule_service_client::ScheduleServiceClient,
    template_service_client::TemplateServiceClient,
};
use tonic::{Code, Status, body::Body};
use tower::Service;

use crate::Broker;

/// How long a page waits for an answer, in the form of `grpc-timeout`. The broker closes a connection of HTTP on which it
/// sends nothing for `handshake_timeout`, 10 s unless set otherwise.
const PATIENCE: &str = "7S";
/// How long to wait for the beginning of an answer that is not bounded by the broker's own time-out.
const LIMIT: Duration = Duration::from_secs(8);
/// The most bytes of an answer. A page of items is up to 4 MiB and one item large; the first stats of all queues may be larger.
const MAX_ANSWER: usize = 64 << 20;
/// The most pages of a list that are read, which bounds a list that never ends.
const MAX_PAGES: usize = 1_000;
/// The size of a page of queues.
const PAGE: i32 = 1_000;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The broker as called by one visitor: each call carries the visitor's token and address.
#[derive(Clone)]
pub(crate) struct Upstream {
    broker: Broker,
    authorization: Option<HeaderValue>,
    peer: Extensions,
    /// False for streams and long actions, which take as long as they take.
    is_bounded: bool,
}

impl Service<Request<Body>> for Upstream {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.broker.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &self.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        request.extensions_mut().extend(self.peer.clone());
        if !self.is_bounded {
            return Box::pin(self.broker.call(request));
        }
        request.headers_mut().insert("grpc-timeout", HeaderValue::from_static(PATIENCE));
        let answer = self.broker.call(request);
        Box::pin(async move {
            match tokio::time::timeout(LIMIT, answer).await {
                Ok(answer) => answer,
                Err(_) => Ok(Status::deadline_exceeded("the broker does not answer").into_http()),
            }
        })
    }
}

/// The clients of one visitor.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) queue: QueueServiceClient<Upstream>,
    pub(crate) admin: AdminServiceClient<Upstream>,
    pub(crate) schedule: ScheduleServiceClient<Upstream>,
    pub(crate) operation: OperationServiceClient<Upstream>,
    pub(crate) template: TemplateServiceClient<Upstream>,
}

impl Api {
    /// Returns the clients for the bearer of a token. A token with characters that no header can hold is sent as an empty
    /// one, which the broker does not know.
    pub(crate) fn new(
        broker: &Broker,
        token: Option<&str>,
        peer: Extensions,
        is_bounded: bool,
    ) -> Self {
        let authorization = token.map(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                .unwrap_or(HeaderValue::from_static("Bearer"));
            value.set_sensitive(true);
            value
        });
        let upstream = Upstream { broker: broker.clone(), authorization, peer, is_bounded };
        Self {
            queue: QueueServiceClient::new(upstream.clone()).max_decoding_message_size(MAX_ANSWER),
            admin: AdminServiceClient::new(upstream.clone()).max_decoding_message_size(MAX_ANSWER),
            schedule: ScheduleServiceClient::new(upstream.clone())
                .max_decoding_message_size(MAX_ANSWER),
            operation: OperationServiceClient::new(upstream.clone())
                .max_decoding_message_size(MAX_ANSWER),
            template: TemplateServiceClient::new(upstream).max_decoding_message_size(MAX_ANSWER),
        }
    }

    /// Returns the settings of all queues that the visitor may view.
    pub(crate) async fn all_queues(&self) -> Result<Vec<Queue>, Status> {
        let mut queues = Vec::new();
        let mut page_token = String::new();
        for _ in 0..MAX_PAGES {
            let request = ListQueuesRequest { page_size: PAGE, page_token, ..Default::default() };
            let page = self.admin.clone().list_queues(request).await?.into_inner();
            queues.extend(page.queues);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        Ok(queues)
    }

    pub(crate) async fn get_queue(&self, name: &str) -> Result<Queue, Status> {
        let request = GetQueueRequest { name: name.to_owned() };
        let answer = self.admin.clone().get_queue(request).await?.into_inner();
        answer.queue.ok_or_else(incomplete)
    }

    pub(crate) async fn stats(&self, queue: &str) -> Result<QueueStats, Status> {
        let request = GetQueueStatsRequest { queue: queue.to_owned() };
        let answer = self.admin.clone().get_queue_stats(request).await?.into_inner();
        answer.stats.ok_or_else(incomplete)
    }

    pub(crate) async fn item(&self, queue: &str, id: &str) -> Result<Item, Status> {
        let request = GetItemRequest { queue: queue.to_owned(), id: id.to_owned() };
        let answer = self.admin.clone().get_item(request).await?.into_inner();
        answer.item.ok_or_else(incomplete)
    }

    /// Returns the answering broker, after it has tried its store.
    pub(crate) async fn this_broker(&self) -> Result<GetBrokerResponse, Status> {
        Ok(self.admin.clone().get_broker(GetBrokerRequest {}).await?.into_inner())
    }

    /// Returns all brokers of the store; `None` if the visitor may not view them.
    pub(crate) async fn brokers(&self) -> Result<Option<Vec<BrokerReport>>, Status> {
        match self.admin.clone().list_brokers(ListBrokersRequest {}).await {
            Ok(answer) => Ok(Some(answer.into_inner().brokers)),
            Err(status) if status.code() == Code::PermissionDenied => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// Returns one page of the consumers of all brokers.
    pub(crate) async fn consumers(
        &self,
        request: ListConsumersRequest,
    ) -> Result<ListConsumersResponse, Status> {
        Ok(self.admin.clone().list_consumers(request).await?.into_inner())
    }

    /// Returns one page of items, and the token of the next page.
    pub(crate) async fn items(
        &self,
        queue: &str,
        state: ItemState,
        page_size: i32,
        page_token: String,
    ) -> Result<(Vec<Item>, String), Status> {
        let (queue, state) = (queue.to_owned(), state.into());
        let request = ListItemsRequest { queue, state, page_size, page_token, filter: None };
        let answer = self.admin.clone().list_items(request).await?.into_inner();
        Ok((answer.items, answer.next_page_token))
    }
}

/// Returns the error of an answer without its content, which no broker sends.
pub(crate) fn incomplete() -> Status {
    Status::internal("the broker's answer is incomplete")
}
