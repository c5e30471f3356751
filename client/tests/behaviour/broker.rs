//! A server that hands each call to the test.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use sluicegate_client::{
    Client, ClientBuilder,
    proto::{
        CommitAndPushRequest, CommitAndPushResponse, CommitRequest, CommitResponse, ConsumeRequest,
        ConsumeResponse, ConsumeStreamRequest, ConsumeStreamResponse, Delivery, ExtendRequest,
        ExtendResponse, Item, MoveRequest, MoveResponse, Outcome, PopRequest, PopResponse,
        PushRequest, PushResponse, PushResult, PushStreamRequest, PushStreamResponse,
        ReserveRequest, ReserveResponse, RollbackRequest, RollbackResponse, SettleResult,
        queue_service_server::{QueueService, QueueServiceServer},
    },
    tonic::{Request, Response, Status, Streaming, transport::Server},
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::task::AbortOnDropHandle;

type Answer<T> = oneshot::Sender<Result<T, Status>>;
type Stream<T> = mpsc::Sender<Result<T, Status>>;

/// A call and how to answer it.
#[derive(Debug)]
pub(crate) enum Call {
    Push(PushRequest, Answer<PushResponse>),
    PushStream(Streaming<PushStreamRequest>, Stream<PushStreamResponse>),
    Consume(ConsumeRequest, Stream<ConsumeResponse>),
    ConsumeStream(Streaming<ConsumeStreamRequest>, Stream<ConsumeStreamResponse>),
    Commit(CommitRequest, Answer<CommitResponse>),
    Rollback(RollbackRequest, Answer<RollbackResponse>),
    Extend(ExtendRequest, Answer<ExtendResponse>),
    Move(MoveRequest, Answer<MoveResponse>),
    CommitAndPush(CommitAndPushRequest, Answer<CommitAndPushResponse>),
}

/// A server on a port of its own, until it is dropped.
pub(crate) struct Broker {
    calls: mpsc::Receiver<Call>,
    address: String,
    /// What the next stream is refused with.
    refusal: Arc<Mutex<Option<Status>>>,
    _server: AbortOnDropHandle<()>,
}

/// A test that waits this long has failed.
const HUNG: Duration = Duration::from_secs(20);

impl Broker {
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (sender, calls) = mpsc::channel(100);
        let refusal: Arc<Mutex<Option<Status>>> = Arc::default();
        let handler = Handler { calls: sender, refusal: Arc::clone(&refusal) };
        let serving = Server::builder()
            .add_service(QueueServiceServer::new(handler))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { serving.await.unwrap() });
        Self { calls, address, refusal, _server: AbortOnDropHandle::new(server) }
    }

    pub(crate) fn client(&self) -> Client {
        self.builder().connect_lazy().unwrap()
    }

    pub(crate) fn builder(&self) -> ClientBuilder {
        Client::builder(&self.address)
    }

    /// Refuses the next stream, of which the test does not hear.
    pub(crate) fn refuse_stream(&self, status: Status) {
        *self.refusal.lock().unwrap() = Some(status);
    }

    /// Returns the next call.
    pub(crate) async fn call(&mut self) -> Call {
        tokio::time::timeout(HUNG, self.calls.recv()).await.expect("no call came").unwrap()
    }
}

/// Takes the next call of one kind out of its envelope.
macro_rules! expect_call {
    ($broker:expr, $kind:ident) => {
        match $broker.call().await {
            $crate::broker::Call::$kind(request, answer) => (request, answer),
            other => panic!("expected {}, got {other:?}", stringify!($kind)),
        }
    };
}
pub(crate) use expect_call;

/// Waits for the next message of a stream.
pub(crate) async fn next<T>(stream: &mut Streaming<T>) -> T {
    tokio::time::timeout(HUNG, stream.message())
        .await
        .expect("no message came")
        .unwrap()
        .expect("the stream has ended")
}

/// A delivery whose payload and receipt are `name`.
pub(crate) fn delivery(name: &str) -> Delivery {
    let item = Item {
        id: name.into(),
        payload: name.to_owned().into(),
        attempt: 1,
        deliveries: 1,
        ..Default::default()
    };
    Delivery { item: Some(item), receipt: name.into(), ..Delivery::default() }
}

pub(crate) fn deliveries<'a>(names: impl IntoIterator<Item = &'a str>) -> ConsumeResponse {
    ConsumeResponse { deliveries: names.into_iter().map(delivery).collect() }
}

/// The same outcome for each receipt.
pub(crate) fn settled<'a>(
    receipts: impl IntoIterator<Item = &'a String>,
    outcome: Outcome,
) -> Vec<SettleResult> {
    let outcome = outcome.into();
    receipts.into_iter().map(|receipt| SettleResult { receipt: receipt.clone(), outcome }).collect()
}

/// One result per item; ids are the payloads.
pub(crate) fn pushed(items: &[sluicegate_client::proto::NewItem]) -> Vec<PushResult> {
    let id = |payload: &[u8]| String::from_utf8_lossy(payload).into_owned();
    items.iter().map(|item| PushResult { id: id(&item.payload), ..Default::default() }).collect()
}

struct Handler {
    calls: mpsc::Sender<Call>,
    refusal: Arc<Mutex<Option<Status>>>,
}

impl Handler {
    async fn unary<Q, T>(
        &self,
        request: Request<Q>,
        call: impl FnOnce(Q, Answer<T>) -> Call,
    ) -> Result<Response<T>, Status> {
        let (answer, answered) = oneshot::channel();
        self.calls.send(call(request.into_inner(), answer)).await.unwrap();
        // A test that drops the answer breaks the call.
        answered.await.unwrap_or(Err(Status::unavailable("dropped by the test"))).map(Response::new)
    }

    async fn streaming<Q, T>(
        &self,
        request: Request<Q>,
        call: impl FnOnce(Q, Stream<T>) -> Call,
    ) -> Result<Response<ReceiverStream<Result<T, Status>>>, Status> {
        if let Some(status) = self.refusal.lock().unwrap().take() {
            return Err(status);
        }
        let (answers, stream) = mpsc::channel(100);
        self.calls.send(call(request.into_inner(), answers)).await.unwrap();
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

#[tonic::async_trait]
impl QueueService for Handler {
    type PushStreamStream = ReceiverStream<Result<PushStreamResponse, Status>>;
    type ConsumeStream = ReceiverStream<Result<ConsumeResponse, Status>>;
    type ConsumeStreamStream = ReceiverStream<Result<ConsumeStreamResponse, Status>>;

    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushResponse>, Status> {
        self.unary(request, Call::Push).await
    }

    async fn push_stream(
        &self,
        request: Request<Streaming<PushStreamRequest>>,
    ) -> Result<Response<Self::PushStreamStream>, Status> {
        self.streaming(request, Call::PushStream).await
    }

    async fn pop(&self, _: Request<PopRequest>) -> Result<Response<PopResponse>, Status> {
        Err(Status::unimplemented("pop"))
    }

    async fn reserve(
        &self,
        _: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        Err(Status::unimplemented("reserve"))
    }

    async fn consume(
        &self,
        request: Request<ConsumeRequest>,
    ) -> Result<Response<Self::ConsumeStream>, Status> {
        self.streaming(request, Call::Consume).await
    }

    async fn consume_stream(
        &self,
        request: Request<Streaming<ConsumeStreamRequest>>,
    ) -> Result<Response<Self::ConsumeStreamStream>, Status> {
        self.streaming(request, Call::ConsumeStream).await
    }

    async fn commit(
        &self,
        request: Request<CommitRequest>,
    ) -> Result<Response<CommitResponse>, Status> {
        self.unary(request, Call::Commit).await
    }

    async fn rollback(
        &self,
        request: Request<RollbackRequest>,
    ) -> Result<Response<RollbackResponse>, Status> {
        self.unary(request, Call::Rollback).await
    }

    async fn extend(
        &self,
        request: Request<ExtendRequest>,
    ) -> Result<Response<ExtendResponse>, Status> {
        self.unary(request, Call::Extend).await
    }

    async fn r#move(
        &self,
        request: Request<MoveRequest>,
    ) -> Result<Response<MoveResponse>, Status> {
        self.unary(request, Call::Move).await
    }

    async fn commit_and_push(
        &self,
        request: Request<CommitAndPushRequest>,
    ) -> Result<Response<CommitAndPushResponse>, Status> {
        self.unary(request, Call::CommitAndPush).await
    }
}
