//! A collector of spans and metrics: what brokers send them to, over gRPC and HTTP.

use std::{
    collections::HashMap,
    fmt::Write,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    common::v1::{KeyValue, any_value::Value},
    metrics::v1::Metric,
    trace::v1::Span,
};
use prost::Message;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{
    Request, Response, Status,
    transport::{Identity, Server, ServerTlsConfig},
};

use crate::harness::until;

/// A running collector. Ends when dropped.
pub(super) struct Collector {
    address: SocketAddr,
    received: Received,
    _serving: AbortOnDropHandle<()>,
}

/// A span, after what its sender says of itself.
pub(super) type Sent = (HashMap<String, String>, Span);

/// Metrics of one request, after what their sender says of itself and the request's `authorization`.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) sender: HashMap<String, String>,
    pub(super) authorization: Option<String>,
    pub(super) metrics: Vec<Metric>,
}

/// What came.
#[derive(Clone, Default)]
struct Received(Arc<Inner>);

#[derive(Default)]
struct Inner {
    spans: Mutex<Vec<Sent>>,
    metrics: Mutex<Vec<Measured>>,
    /// True while metrics are refused.
    refuses: AtomicBool,
    refused: AtomicUsize,
}

impl Received {
    fn add(&self, request: ExportTraceServiceRequest) {
        let mut received = self.0.spans.lock().expect("no test panics here");
        for of_sender in request.resource_spans {
            let sender = attributes(&of_sender.resource.unwrap_or_default().attributes);
            let spans = of_sender.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| (sender.clone(), span)));
        }
    }

    /// Takes metrics, unless they are refused, which false says.
    fn measure(&self, request: ExportMetricsServiceRequest, headers: &HeaderMap) -> bool {
        if self.0.refuses.load(Ordering::SeqCst) {
            self.0.refused.fetch_add(1, Ordering::SeqCst);
            return false;
        }
        let authorization = headers.get("authorization").and_then(|value| value.to_str().ok());
        let mut received = self.0.metrics.lock().expect("no test panics here");
        for of_sender in request.resource_metrics {
            let metrics = of_sender.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
            received.push(Measured {
                sender: attributes(&of_sender.resource.unwrap_or_default().attributes),
                authorization: authorization.map(str::to_owned),
                metrics: metrics.collect(),
            });
        }
        true
    }
}

#[tonic::async_trait]
impl MetricsService for Received {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        if !self.measure(request, &metadata.into_headers()) {
            return Err(Status::unimplemented("no metrics here"));
        }
        Ok(Response::new(ExportMetricsServiceResponse::default()))
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

async fn measure(
    State(received): State<Received>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, Vec<u8>) {
    let protobuf = headers.get("content-type").is_some_and(|kind| kind == "application/x-protobuf");
    match ExportMetricsServiceRequest::decode(body) {
        Ok(request) if protobuf => {
            if !received.measure(request, &headers) {
                return (StatusCode::NOT_FOUND, Vec::new());
            }
            (StatusCode::OK, ExportMetricsServiceResponse::default().encode_to_vec())
        }
        _ => (StatusCode::BAD_REQUEST, Vec::new()),
    }
}

impl Collector {
    /// Starts a collector that speaks `grpc` or `http`.
    pub(super) async fn speaking(protocol: &str) -> Self {
        if protocol == "grpc" { Self::grpc().await } else { Self::http().await }
    }

    /// Starts a collector that speaks gRPC.
    pub(super) async fn grpc() -> Self {
        Self::by(Server::builder()).await
    }

    /// Starts a collector that speaks gRPC over TLS, with a certificate for this machine. Returns the certificate, as PEM, of the
    /// authority that it is from, which nobody else knows.
    pub(super) async fn over_tls() -> (Self, String) {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "the company");
        let key = || KeyPair::generate().expect("a key");
        let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
        let (own, key) = (CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name"), key());
        let own = own.signed_by(&key, &authority).expect("a certificate");
        let identity = Identity::from_pem(own.pem(), key.serialize_pem());
        let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity));
        (Self::by(server.expect("a certificate")).await, authority.pem())
    }

    async fn by(mut server: Server) -> Self {
        Self::start(|listener, received| async move {
            let server = server
                .add_service(TraceServiceServer::new(received.clone()))
                .add_service(MetricsServiceServer::new(received))
                .serve_with_incoming(TcpListenerStream::new(listener));
            server.await.expect("a collector that serves");
        })
        .await
    }

    /// Starts a collector that speaks HTTP.
    pub(super) async fn http() -> Self {
        Self::start(|listener, received| async {
            let router = Router::new()
                .route("/v1/traces", post(take))
                .route("/v1/metrics", post(measure))
                .with_state(received);
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

    /// Returns its address over TLS.
    pub(super) fn tls_endpoint(&self) -> String {
        format!("https://{}", self.address)
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
        self.received.0.spans.lock().expect("no test panics here").clone()
    }

    /// Returns all requests with metrics that have come so far.
    pub(super) fn metrics(&self) -> Vec<Measured> {
        self.received.0.metrics.lock().expect("no test panics here").clone()
    }

    /// Refuses metrics from now on, or takes them again.
    pub(super) fn refuse_metrics(&self, refuse: bool) {
        self.received.0.refuses.store(refuse, Ordering::SeqCst);
    }

    /// Returns how many requests with metrics were refused.
    pub(super) fn refused(&self) -> usize {
        self.received.0.refused.load(Ordering::SeqCst)
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
