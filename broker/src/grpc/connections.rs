//! The connections that are served, each in a task of its own: until its client closes it, it is old, or the broker shuts down.

use std::{pin::pin, time::Duration};

use axum::http::Request;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use sluicegate_proto::gathered::Gathered;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::codegen::Service as _;

use super::services::Services;
use crate::{config::Bounds, listener::Connection, tasks::Tasks};

/// The most calls at a time on one connection; clients queue the rest.
const MAX_STREAMS: u32 = 4096;
/// HTTP/2 flow control: how much one stream, and one connection, may send before the server reads it.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// The open connections.
pub(super) struct Connections {
    http: http2::Builder<TokioExecutor>,
    services: Services,
    /// About how old a connection gets; zero: no limit.
    age: Duration,
    /// Cancelled when all of them have to end.
    closing: CancellationToken,
    open: Tasks,
}

impl Connections {
    pub(super) fn new(services: Services, bounds: &Bounds, age: Duration) -> Self {
        // A limit as low as h2's own default would hit clients that merely shut down with many open calls.
        let resets = if bounds.max_resets == 0 { usize::MAX } else { bounds.max_resets as usize };
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .auto_date_header(false) // gRPC has no use for it
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(bounds.max_metadata_bytes)
            .max_pending_accept_reset_streams(resets)
            .max_local_error_reset_streams(resets)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(bounds.ping_interval)
            .keep_alive_timeout(bounds.ping_timeout);
        let (closing, open) = (CancellationToken::new(), Tasks::default());
        Self { http, services, age, closing, open }
    }

    /// Serves a connection in a task of its own.
    pub(super) fn serve(&self, connection: Connection) {
        let (services, peer) = (self.services.clone(), connection.peer().clone());
        let answer = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer.clone());
            services.clone().call(request)
        });
        let served = self.http.serve_connection(TokioIo::new(Gathered::new(connection)), answer);
        let age = sleep(self.chosen_age());
        let is_to_end = self.closing.clone().run_until_cancelled_owned(age);
        self.open.spawn(async move {
            let mut served = pin!(served);
            let ended = tokio::select! {
                ended = &mut served => ended,
                _ = is_to_end => {
                    // GOAWAY: calls and streams under way go on; new ones use a new connection.
                    served.as_mut().graceful_shutdown();
                    served.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended");
            }
        });
    }

    /// Tells all clients to begin no more calls, and returns when those under way have ended.
    pub(super) async fn end(self) {
        self.closing.cancel();
        self.open.close();
        self.open.wait().await;
    }

    /// Returns at what age a connection is told to end: not the same for those that are made at the same time.
    fn chosen_age(&self) -> Duration {
        if self.age.is_zero() {
            Duration::MAX
        } else {
            self.age.mul_f64(rand::random_range(0.9..=1.1))
        }
    }
}
