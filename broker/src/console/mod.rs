//! HTTP for probes and metrics: `/healthz`, `/readyz`, `/metrics`.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tokio::time::timeout;

use crate::metrics::{self, Metrics};

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
}

/// Returns the pages of the console:
/// * `/healthz`: 200 while the process lives.
/// * `/readyz`: 200 while the broker accepts requests, 503 when it drains or when the store does
///   not respond within 2 s. Failing signals make the broker `degraded`, not unready, because
///   deliveries continue.
/// * `/metrics`: OpenMetrics text.
pub(crate) fn router(state: ConsoleState) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(show_metrics))
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

async fn show_metrics(State(state): State<ConsoleState>) -> Response {
    match state.metrics.encode() {
        Ok(page) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests;
