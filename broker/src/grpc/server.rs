//! The gRPC server: all services behind one listener.
//!
//! A request with items may be up to 16 MiB large (or `max_payload_bytes` plus 1 MiB, if that is more), which bounds a
//! batch of items as well as its count does. Settles may be up to 4 MiB large, requests of operators up to 1 MiB. Larger
//! requests are answered RESOURCE_EXHAUSTED with the reason REQUEST_TOO_LARGE. Compressed requests count with their
//! decompressed size. The codec counts the entries of a request before it decodes the request.

use std::{sync::Arc, time::Duration};

use sluicegate_proto::{
    FILE_DESCRIPTOR_SET,
    externalscaler::external_scaler_server::ExternalScalerServer,
    v1::{
        admin_service_server::AdminServiceServer, operation_service_server::OperationServiceServer,
        queue_service_server::QueueServiceServer, schedule_service_server::ScheduleServiceServer,
        template_service_server::TemplateServiceServer,
    },
};
use tokio::{net::TcpListener, sync::watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::{codec::CompressionEncoding, server::NamedService, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::{
    access::Access,
    config::Bounds,
    grpc::{
        Api, answers::Answers, concurrency::ConcurrencyLimits, connections::Connections,
        intake::Intake, middleware::Edge, services::Services,
    },
    listener::{Handshakes, Listener},
    metrics::Metrics,
    traces::Traces,
};

/// The limit of a request with items, unless `max_payload_bytes` needs a higher one.
const REQUEST_BYTES: usize = 16 << 20;
/// The limit of a request of an operator, except for schedules.
const ADMIN_BYTES: usize = 1 << 20;
/// The limit of a request of KEDA, which holds the metadata of one trigger.
const SCALER_BYTES: usize = 64 << 10;
/// What a request may hold besides one payload.
const ENVELOPE_BYTES: usize = 1 << 20;
/// What the configuration sets.
#[derive(Clone)]
pub(crate) struct Options {
    /// Serve TLS, each connection with what this is when it begins; plain text otherwise.
    pub tls: Option<watch::Receiver<TlsAcceptor>>,
    /// About how old a connection gets before its client is asked to make a new one; zero: no limit.
    pub max_connection_age: Duration,
    /// Who may call what.
    pub access: Arc<Access>,
    /// How much clients may use.
    pub bounds: Bounds,
    /// Counts what is refused.
    pub metrics: Arc<Metrics>,
    /// Makes the spans of calls.
    pub traces: Traces,
}

/// A defect: the descriptors in the binary are damaged.
#[derive(Debug, thiserror::Error)]
#[error("the descriptors for reflection cannot be read")]
pub(crate) struct ServerError(#[from] tonic_reflection::server::Error);

/// The health that `grpc.health.v1` reports, for the broker and for each service. NOT_SERVING at first.
#[derive(Debug, Clone)]
pub(crate) struct Health(HealthReporter);

impl Health {
    /// Reports to load balancers and clients whether to use this broker. Watchers are notified
    /// immediately.
    pub(crate) async fn set_serving(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in SERVICES {
            self.0.set_service_status(service, status).await;
        }
    }

    /// Ends the streams of watchers, which would keep their connections open.
    async fn end(&self) {
        let mut reporter = self.0.clone();
        for service in SERVICES {
            reporter.clear_service_status(service).await;
        }
    }
}

/// The services whose health is reported; the empty name stands for the broker.
const SERVICES: [&str; 6] = [
    "",
    QueueServiceServer::<Api>::NAME,
    AdminServiceServer::<Api>::NAME,
    ScheduleServiceServer::<Api>::NAME,
    OperationServiceServer::<Api>::NAME,
    TemplateServiceServer::<Api>::NAME,
];

/// All services, ready to serve.
pub(crate) struct Server {
    services: Services,
    tls: Option<Handshakes>,
    bounds: Bounds,
    max_connection_age: Duration,
    health: Health,
    shutdown: CancellationToken,
}

impl Server {
    /// Builds the server. Must be called within a tokio runtime.
    pub(crate) async fn new(mut api: Api, options: Options) -> Result<Self, ServerError> {
        let Options { tls, max_connection_age, access, bounds, metrics, traces } = options;
        api.max_connection_age = max_connection_age;
        api.traces = traces;
        let (reporter, health_service) = tonic_health::server::health_reporter();
        let health = Health(reporter);
        health.set_serving(false).await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let shutdown = api.shutdown.clone();
        let request_limit = request_limit(api.engine.limits().max_payload_bytes);
        let tls = tls.map(|acceptor| Handshakes { acceptor, access: Arc::clone(&access) });
        let edge = Edge {
            access,
            intake: Intake::new(bounds.max_incoming_bytes, request_limit),
            concurrency: ConcurrencyLimits::new(&bounds),
            answers: Answers::new(&bounds, Arc::clone(&metrics), &api.tasks, shutdown.clone()),
            metrics,
        };
        let queue = queue_service(&api);
        let others = other_services(api)
            .add_service(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        let services = Services::new(edge, queue, others);
        Ok(Self { services, tls, bounds, max_connection_age, health, shutdown })
    }

    /// Returns all services, with the middleware in front of them, for callers in this process.
    pub(crate) fn services(&self) -> Services {
        self.services.clone()
    }

    /// Returns the handle to the server's health.
    pub(crate) fn health(&self) -> Health {
        self.health.clone()
    }

    /// Serves until the token given to [`Api::new`] is cancelled. Then accepts no more connections,
    /// and returns when the calls under way have ended. Streams end by themselves, but a client that does
    /// not read can delay the return forever: bound this call with a time-out. A connection
    /// that does not begin as HTTP/2 does within `handshake_timeout` is closed.
    pub(crate) async fn serve(self, listener: TcpListener) {
        let mut listener = Listener::grpc(listener, self.tls, &self.bounds);
        let connections = Connections::new(self.services, &self.bounds, self.max_connection_age);
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => break,
                (connection, _) = listener.accept() => connections.serve(connection),
            }
        }
        drop(listener);
        self.health.end().await;
        connections.end().await;
    }
}

// Sent messages need no limit: none is much larger than one payload.

fn queue_service(api: &Api) -> QueueServiceServer<Api> {
    QueueServiceServer::new(api.clone())
        .max_decoding_message_size(request_limit(api.engine.limits().max_payload_bytes))
        .accept_compressed(CompressionEncoding::Gzip)
}

fn other_services(api: Api) -> Routes {
    let schedule_limit = api.engine.limits().max_payload_bytes + ENVELOPE_BYTES;
    let admin = AdminServiceServer::new(api.clone())
        .max_decoding_message_size(ADMIN_BYTES)
        .accept_compressed(CompressionEncoding::Gzip);
    let schedule = ScheduleServiceServer::new(api.clone())
        .max_decoding_message_size(schedule_limit)
        .accept_compressed(CompressionEncoding::Gzip);
    let operation = OperationServiceServer::new(api.clone())
        .max_decoding_message_size(ADMIN_BYTES)
        .accept_compressed(CompressionEncoding::Gzip);
    let template = TemplateServiceServer::new(api.clone())
        .max_decoding_message_size(ADMIN_BYTES)
        .accept_compressed(CompressionEncoding::Gzip);
    let scaler = ExternalScalerServer::new(api)
        .max_decoding_message_size(SCALER_BYTES)
        .accept_compressed(CompressionEncoding::Gzip);
    Routes::new(admin)
        .add_service(schedule)
        .add_service(operation)
        .add_service(template)
        .add_service(scaler)
}

fn request_limit(max_payload_bytes: usize) -> usize {
    REQUEST_BYTES.max(max_payload_bytes + ENVELOPE_BYTES)
}
