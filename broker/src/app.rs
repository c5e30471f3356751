//! Builds the broker from its settings, runs it and drains it.

use std::{fmt::Display, net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{extract::ConnectInfo, http::Extensions};
use sluicegate_console::Rights;
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::{
    access::{Access, Peer, tokens::Tokens},
    config::{Settings, SignalsUri, StoreUri},
    console::{self, ConsoleState, Probe, StoredHistory},
    domain::{Action, Clock},
    engine::{Engine, Limits, background},
    essential::essential,
    grpc::{
        Api,
        server::{Health, Options, Server},
    },
    listener::{self, Listener},
    metrics::Metrics,
    otlp::Export,
    reload::{self, Files},
    signals::{self, Signals},
    store::{
        Capabilities, Store, StoreError,
        mongo::{MongoOptions, MongoStore},
        reports::broker_text,
        sqlite::SqliteStore,
    },
    tasks::Tasks,
    traces::Traces,
};

/// The reason why the broker does not start, in one sentence.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct StartError(String);

/// How long clients may take at shutdown to receive the messages on their way to them.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long a collector may take at shutdown to receive the last spans and metrics.
const LAST_EXPORT: Duration = Duration::from_secs(2);

/// A running broker.
pub(crate) struct App {
    engine: Arc<Engine>,
    signals: Arc<dyn Signals>,
    store: Arc<dyn Store>,
    /// The tasks of calls.
    calls: Tasks,
    servers: Tasks,
    /// Cancelled when the servers are to accept no more connections.
    stop: CancellationToken,
    /// Cancelled when a server has ended that was not told to stop.
    ended: CancellationToken,
    health: Health,
    /// `None`: nothing is sent to a collector.
    export: Option<Export>,
    access: Arc<Access>,
    shutdown_grace: Duration,
    /// Notified when files are to be read again.
    reload: Arc<Notify>,
    /// True if gRPC is served over TLS.
    tls: bool,
    /// The address of gRPC.
    pub address: SocketAddr,
    /// The address of the console.
    pub http_address: SocketAddr,
}

fn limits(settings: &Settings) -> Limits {
    Limits {
        max_payload_bytes: settings.max_payload_bytes,
        default_lease: settings.default_lease,
        max_lease: settings.max_lease,
        auto_create_queues: settings.auto_create_queues,
        max_queues: settings.bounds.max_queues,
        unused_queue_ttl: settings.bounds.unused_queue_ttl,
        poll_min: settings.poll_min,
        poll_max: settings.poll_max,
        failure_defaults: settings.failure_defaults.clone(),
        max_unsent_bytes: settings.bounds.max_unread_bytes,
        drain: (settings.shutdown_grace / 3).min(Duration::from_secs(3)),
        ..Limits::default()
    }
}

impl App {
    /// Connects to the store and the signals and starts serving.
    pub(crate) async fn start(settings: Settings) -> Result<Self, StartError> {
        let metrics = Arc::new(Metrics::new());
        let listener = bind("listen", settings.listen).await?;
        let http_listener = bind("http_listen", settings.http_listen).await?;
        let store = open_store(&settings).await?;
        tell_limits_of(store.capabilities(), &settings);
        let signals = signals::open(
            &settings.signals,
            store.broker_id(),
            &settings.database,
            Arc::clone(&metrics),
        )
        .await
        .map_err(|error| StartError(error.to_string()))?;
        let limits = limits(&settings);
        let engine =
            Engine::new(Arc::clone(&store), Arc::clone(&signals), Arc::clone(&metrics), limits);
        let keys = engine.refresh_receipt_keys().await;
        keys.map_err(|error| StartError(format!("cannot read the keys of receipts: {error}")))?;
        let address = local_address(&listener)?;
        engine.serves_at(address);
        background::start(&engine);
        let http_address = local_address(&http_listener)?;
        let http_listener = Listener::console(http_listener, &settings.bounds);
        let (calls, servers) = (Tasks::default(), Tasks::default());
        let stop = CancellationToken::new();
        let api = Api::new(Arc::clone(&engine), calls.clone(), stop.clone());
        let tokens = settings.tokens.as_ref().map(|(_, tokens)| Arc::clone(tokens));
        let access = Access::new(tokens, settings.max_refusals, Arc::clone(&metrics));
        let tls = match &settings.tls {
            Some(files) => Some(listener::acceptor(files).map_err(|e| StartError(e.to_string()))?),
            None => None,
        };
        let tls = tls.map(|acceptor| Arc::new(watch::Sender::new(acceptor)));
        let export = start_export(&settings, &engine, &metrics)?;
        let traces = export.as_ref().map(Export::traces).unwrap_or_default();
        let options = options(&settings, tls.as_deref(), &access, &metrics, traces);
        let files = reloaded(&settings, &access, tls);
        let reload = Arc::new(Notify::new());
        let server =
            Server::new(api, options).await.map_err(|error| StartError(error.to_string()))?;
        let health = server.health();
        health.set_serving(true).await;
        let pages = pages(&server, &engine, &access, settings.tokens.is_some(), &stop);
        let ended = CancellationToken::new();
        servers.spawn(essential("gRPC server", server.serve(listener)));
        let read_again = reload::run(files, Arc::clone(&reload), stop.clone());
        servers.spawn(essential("reload", read_again));
        servers.spawn(essential("audit log", Arc::clone(&access).sum_up(stop.clone())));
        let probe: Arc<dyn Probe> = Arc::new(EngineProbe(Arc::clone(&engine)));
        let console = console::router(ConsoleState { probe, metrics, access: Arc::clone(&access) });
        let console = console.merge(pages);
        let console = console.into_make_service_with_connect_info::<Peer>();
        let stopped = stop.clone().cancelled_owned();
        let serve = axum::serve(http_listener, console).with_graceful_shutdown(stopped);
        let serve = until_stopped("HTTP", serve.into_future(), stop.clone(), ended.clone());
        servers.spawn(essential("HTTP server", serve));
        let shutdown_grace = settings.shutdown_grace;
        Ok(Self {
            engine,
            signals,
            store,
            calls,
            servers,
            stop,
            ended,
            health,
            export,
            access,
            shutdown_grace,
            reload,
            tls: settings.tls.is_some(),
            address,
            http_address,
        })
    }

    /// Returns the text to print once the broker serves.
    pub(crate) fn banner(&self) -> String {
        format!(
            "sluicegate {version}\n\
             store       {store}\n\
             signals     {signals}\n\
             listening on {grpc}://{address}\n\
             listening on http://{http_address} (console, /healthz, /readyz, /metrics)\n\
             try         sluice --server {scheme}://{address} push hello 'first item'",
            version = env!("CARGO_PKG_VERSION"),
            store = self.store.describe(),
            signals = self.signals.describe(),
            // In the form that clients accept: they recognise TLS by the scheme.
            grpc = if self.tls { "https" } else { "grpc" },
            scheme = if self.tls { "https" } else { "http" },
            address = self.address,
            http_address = self.http_address,
        )
    }

    /// Reads tokens, certificates and keys again. What cannot be used changes nothing.
    pub(crate) fn reload(&self) {
        self.reload.notify_one();
    }

    /// Returns when a server has ended that was not told to stop. The broker is of no use any more.
    pub(crate) async fn server_ended(&self) {
        self.ended.cancelled().await;
    }

    /// Shuts the broker down within `shutdown_grace`. Returns false if work had to be cut short.
    pub(crate) async fn shutdown(self) -> bool {
        let access = Arc::clone(&self.access);
        let orderly = async {
            self.health.set_serving(false).await;
            self.engine.drain().await;
            self.stop.cancel();
            self.calls.close();
            self.calls.wait().await;
            // All answers have been sent. A client that does not read would not receive them in an
            // hour either.
            self.servers.close();
            let farewell = (self.shutdown_grace / 4).min(FAREWELL);
            if tokio::time::timeout(farewell, self.servers.wait()).await.is_err() {
                tracing::info!(
                    "some clients do not take their last answers: they are no longer waited for"
                );
            }
            self.engine.close().await;
            self.signals.close().await;
            self.store.close().await;
            if let Some(export) = self.export {
                export.close((self.shutdown_grace / 4).min(LAST_EXPORT)).await;
            }
        };
        let is_orderly = tokio::time::timeout(self.shutdown_grace, orderly).await.is_ok();
        access.close();
        is_orderly
    }
}

/// Runs a server. If the server ends before it is told to stop, `ended` is cancelled.
async fn until_stopped<E: Display>(
    name: &str,
    serve: impl Future<Output = Result<(), E>>,
    stop: CancellationToken,
    ended: CancellationToken,
) {
    let served = serve.await;
    if stop.is_cancelled() {
        return;
    }
    let why =
        served.err().map_or_else(|| "no reason is known".to_owned(), |error| error.to_string());
    tracing::error!(server = name, why, "a server ended by itself: the broker shuts down");
    ended.cancel();
}

/// Returns the pages of the console, which calls the broker as clients do.
fn pages(
    server: &Server,
    engine: &Engine,
    access: &Arc<Access>,
    needs_token: bool,
    stop: &CancellationToken,
) -> axum::Router {
    let access = Arc::clone(access);
    let rights = move |token: Option<&str>, queue: &str| {
        let queue = Some(queue).filter(|queue| !queue.is_empty());
        let may = |action| access.allows(token, action, queue);
        Rights {
            produce: may(Action::Produce),
            manage: may(Action::Manage),
            create: may(Action::Create),
        }
    };
    sluicegate_console::router(sluicegate_console::Options {
        broker: sluicegate_console::broker(server.services()),
        needs_token,
        rights: Arc::new(rights),
        peer: peer_of,
        history: Some(Arc::new(StoredHistory(Arc::clone(engine.store())))),
        shutdown: stop.clone(),
    })
}

/// Returns what gRPC wants to know about the connection of a browser.
fn peer_of(request: &Extensions) -> Extensions {
    let mut extensions = Extensions::new();
    if let Some(ConnectInfo(peer)) = request.get::<ConnectInfo<Peer>>() {
        extensions.insert(peer.clone());
    }
    extensions
}

fn options(
    settings: &Settings,
    tls: Option<&watch::Sender<TlsAcceptor>>,
    access: &Arc<Access>,
    metrics: &Arc<Metrics>,
    traces: Traces,
) -> Options {
    Options {
        tls: tls.map(watch::Sender::subscribe),
        max_connection_age: settings.max_connection_age,
        access: Arc::clone(access),
        bounds: settings.bounds.clone(),
        metrics: Arc::clone(metrics),
        traces,
    }
}

/// Begins to send spans and metrics, if the settings say where.
fn start_export(
    settings: &Settings,
    engine: &Engine,
    metrics: &Arc<Metrics>,
) -> Result<Option<Export>, StartError> {
    let Some(otlp) = &settings.otlp else { return Ok(None) };
    let instance = broker_text(engine.this_broker().broker);
    let export = Export::start(otlp, instance, metrics)
        .map_err(|error| StartError(format!("cannot send to {}: {error}", otlp.endpoint)))?;
    Ok(Some(export))
}

/// Returns the files that are read again when they change.
fn reloaded(
    settings: &Settings,
    access: &Arc<Access>,
    tls: Option<Arc<watch::Sender<TlsAcceptor>>>,
) -> Vec<Files> {
    let mut files = Vec::new();
    if let Some((path, _)) = settings.tokens.clone() {
        let access = Arc::clone(access);
        files.push(Files::new("tokens", vec![path.clone()], move || {
            access.replace(Tokens::read(&path)?);
            Ok(())
        }));
    }
    if let (Some(paths), Some(tls)) = (settings.tls.clone(), tls) {
        let all = [Some(paths.cert.clone()), Some(paths.key.clone()), paths.client_ca.clone()];
        files.push(Files::new("TLS certificate", all.into_iter().flatten().collect(), move || {
            tls.send_replace(listener::acceptor(&paths).map_err(|error| error.to_string())?);
            Ok(())
        }));
    }
    files
}

async fn bind(key: &str, address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address)
        .await
        .map_err(|error| StartError(format!("cannot listen on {address} ({key}): {error}")))
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|error| StartError(error.to_string()))
}

async fn open_store(settings: &Settings) -> Result<Arc<dyn Store>, StartError> {
    let clock = Arc::new(Clock::system());
    match &settings.store {
        StoreUri::Sqlite { .. } | StoreUri::SqliteMemory => {
            let store = SqliteStore::open(&settings.store.to_string(), clock)
                .map_err(|error| not_opened(settings, &error))?;
            Ok(Arc::new(store))
        }
        StoreUri::Mongo { uri } => {
            let options = MongoOptions { clock, ..MongoOptions::default() };
            let store = MongoStore::connect(uri, &settings.database, options)
                .await
                .map_err(|error| not_opened(settings, &error))?;
            Ok(Arc::new(store))
        }
    }
}

fn not_opened(settings: &Settings, error: &StoreError) -> StartError {
    StartError(format!("cannot open the store {}: {error}", settings.store))
}

/// Logs what the operator cannot expect of the store.
fn tell_limits_of(store: Capabilities, settings: &Settings) {
    if !store.durable {
        tracing::warn!("the store is in memory: all items are gone when the broker ends");
    }
    if !store.shared && settings.signals != SignalsUri::Local {
        tracing::warn!(
            signals = %settings.signals,
            "this store has one broker at a time: its signals reach no other"
        );
    }
}

/// The broker's state, as queried by the console.
struct EngineProbe(Arc<Engine>);

#[async_trait]
impl Probe for EngineProbe {
    async fn store(&self) -> Result<(), String> {
        self.0.store().ping().await.map_err(|error| error.to_string())
    }

    fn signals_healthy(&self) -> bool {
        self.0.signals().healthy()
    }

    fn draining(&self) -> bool {
        self.0.is_draining()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_ended(served: Result<(), &str>, is_stopped: bool) -> bool {
        let (stop, ended) = (CancellationToken::new(), CancellationToken::new());
        if is_stopped {
            stop.cancel();
        }
        until_stopped("gRPC", async { served }, stop, ended.clone()).await;
        ended.is_cancelled()
    }

    #[tokio::test]
    async fn a_server_that_ends_by_itself_ends_the_broker() {
        assert!(is_ended(Err("out of order"), false).await);
        assert!(is_ended(Ok(()), false).await);
        assert!(!is_ended(Ok(()), true).await, "told to stop");
    }
}
