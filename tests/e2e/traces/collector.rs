//! A collector of spans: what brokers send them to, over gRPC and HTTP.

use std::{
    collections::HashMap,
    fmt::Write,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, http::StatusCode, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use crate::harness::until;

/// A running collector. Ends when dropped.
pub(super) struct Collector {
    address: SocketAddr,
    received: Received,
    _serving: AbortOnDropHandle<()>,
}

/// A span, after what its sender says of itself.
pub(super) type Sent = (HashMap<String, String>, Span);

/// The spans that came.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<Sent>>>);

impl Received {
    fn add(&self, request: ExportTraceServiceRequest) {
        let mut received = self.0.lock().expect("no test panics here");
        for of_sender in request.resource_spans {
            let sender = attributes(&of_sender.resource.unwrap_or_default().attributes);
            let spans = of_sender.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| (sender.clone(), span)));
        }
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.add(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Takes its time over HTTP, so that nothing has come from a broker that does not wait for the answer.
async fn take(State(received): State<Received>, body: Bytes) -> (StatusCode, Vec<u8>) {
    tokio::time::sleep(Duration::from_millis(300)).await;
    match ExportTraceServiceRequest::decode(body) {
        Ok(request) => {
            received.add(request);
            (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
        }
        Err(_) => (StatusCode::BAD_REQUEST, Vec::new()),
    }
}

impl Collector {
    /// Starts a collector that speaks gRPC.
    pub(super) async fn grpc() -> Self {
        Self::start(|listener, received| async {
            let server = tonic::transport::Server::builder()
                .add_service(TraceServiceServer::new(received))
                .serve_with_incoming(TcpListenerStream::new(listener));
            server.await.expect("a collector that serves");
        })
        .await
    }

    /// Starts a collector that speaks HTTP.
    pub(super) async fn http() -> Self {
        Self::start(|listener, received| async {
            let router = Router::new().route("/v1/traces", post(take)).with_state(received);
            axum::serve(listener, router).await.expect("a collector that serves");
        })
        .await
    }

    async fn start<F: Future<Output = ()> + Send + 'static>(
        serve: impl FnOnce(TcpListener, Received) -> F,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let received = Received::default();
        let serving = tokio::spawn(serve(listener, received.clone()));
        Self { address, received, _serving: AbortOnDropHandle::new(serving) }
    }

    /// Returns its address.
    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits for the span of this name, which must be the only one of its name, and returns what its sender says of
    /// itself, and the span.
    pub(super) async fn span(&self, name: &str) -> Sent {
        let spans = self.spans(name, 1).await;
        spans.into_iter().next().expect("one span")
    }

    /// Waits for `count` spans of this name, which must be all of its name.
    pub(super) async fn spans(&self, name: &str, count: usize) -> Vec<Sent> {
        let found = until(&format!("{count} spans {name:?}"), || async {
            let found: Vec<_> = self.all().into_iter().filter(|(_, s)| s.name == name).collect();
            (found.len() >= count).then_some(found)
        })
        .await;
        assert_eq!(found.len(), count, "{found:?}");
        found
    }

    /// Returns all spans that have come so far.
    pub(super) fn all(&self) -> Vec<Sent> {
        self.received.0.lock().expect("no test panics here").clone()
    }
}

/// Returns attributes by name, as text.
pub(super) fn attributes(of: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let entry = |attribute: &KeyValue| {
        let value = attribute.value.as_ref().and_then(|value| value.value.as_ref());
        (attribute.key.clone(), value.map(text).unwrap_or_default())
    };
    of.iter().map(entry).collect()
}

/// Returns an id of a trace or a span as W3C writes it.
pub(super) fn hex(id: &[u8]) -> String {
    id.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a string does not fail
        text
    })
}
