//! HTTP for probes and metrics: `/healthz`, `/readyz`, `/metrics`.

mod history;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{
    Extension, Json, Router,
    extract::{ConnectInfo, Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tokio::time::{sleep, timeout};

use crate::{
    access::{Access, Caller, Peer, Refused},
    domain::Action,
    metrics::{self, Metrics},
};

pub(crate) use history::StoredHistory;

/// How long the store may take to respond to a probe.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// The broker's state, as queried by the console.
#[async_trait]
pub(crate) trait Probe: Send + Sync + 'static {
    /// Returns an error unless the store can be reached and written to. The prober sees the error, so the error
    /// has no credentials in it.
    async fn store(&self) -> Result<(), String>;

    /// Returns true while signals are sent and received.
    fn signals_healthy(&self) -> bool;

    /// Returns true from the time at which the broker was told to stop.
    fn draining(&self) -> bool;
}

/// What the pages of the console are made from.
#[derive(Clone)]
pub(crate) struct ConsoleState {
    /// The broker's condition.
    pub probe: Arc<dyn Probe>,
    /// Its metrics.
    pub metrics: Arc<Metrics>,
    /// Who may see what.
    pub access: Arc<Access>,
}

/// Returns the pages of the console:
/// * `/healthz`: 200 while the process lives.
/// * `/readyz`: 200 while the broker accepts requests, 503 when it drains or when the store does
///   not respond within 2 s. Failing signals make the broker `degraded`, not unready, because
///   deliveries continue.
/// * `/metrics`: OpenMetrics text; if there are tokens, for those that may view all queues.
pub(crate) fn router(state: ConsoleState) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(show_metrics))
        .layer(middleware::from_fn_with_state(Arc::clone(&state.access), admit))
        .with_state(state)
}

/// The body of `/readyz`.
#[derive(Serialize)]
struct Readiness {
    ready: bool,
    draining: bool,
    /// `ok` or `unavailable`.
    store: &'static str,
    /// `ok` or `degraded`.
    signals: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

async fn ready(State(state): State<ConsoleState>) -> Response {
    let probe = state.probe;
    // The probe runs in a task of its own: a prober that hangs up must not cut a store call short.
    let asked = tokio::spawn({
        let probe = Arc::clone(&probe);
        async move { timeout(STORE_TIMEOUT, probe.store()).await }
    });
    let store = match asked.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(format!("no answer from the store within {STORE_TIMEOUT:?}")),
        Err(_) => Err("asking the store failed".to_owned()),
    };
    let draining = probe.draining();
    let body = Readiness {
        ready: store.is_ok() && !draining,
        draining,
        store: if store.is_ok() { "ok" } else { "unavailable" },
        signals: if probe.signals_healthy() { "ok" } else { "degraded" },
        reason: store.err(),
    };
    let status = if body.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// Passes a request on if its caller is let in.
async fn admit(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<Peer>>();
    let peer = peer.map(|ConnectInfo(peer)| peer.clone()).unwrap_or_default();
    let authorization = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let response = match access.admit(request.uri().path(), authorization, &peer) {
        Err(refused) => self::refused(&refused),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
    };
    let status = response.status();
    if [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::NOT_FOUND].contains(&status) {
        sleep(access.penalty(&peer)).await;
    }
    response
}

fn refused(refused: &Refused) -> Response {
    let text = format!("{refused}\n");
    match refused {
        Refused::NoSuchCall => StatusCode::NOT_FOUND.into_response(),
        Refused::TokenMissing | Refused::TokenUnknown | Refused::TokenExpired => {
            let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, scheme, text).into_response()
        }
        Refused::PermissionMissing { .. } => (StatusCode::FORBIDDEN, text).into_response(),
    }
}

async fn show_metrics(
    State(state): State<ConsoleState>,
    Extension(caller): Extension<Caller>,
) -> Response {
    if let Err(refused) = caller.may_everywhere(Action::View) {
        return self::refused(&refused);
    }
    match state.metrics.encode() {
        Ok(page) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests;
