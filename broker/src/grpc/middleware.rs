//! What every call passes first and every answer last: tokens, the access log, deadlines, uniform errors.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{Request, State},
    http::HeaderMap,
    middleware::Next,
    response::Response,
};
use tokio::time::timeout;
use tonic::{Code, Status, transport::server::TcpConnectInfo};
use tracing::{Instrument, Level};

use crate::grpc::{
    auth::Tokens,
    intake::Intake,
    status::{ApiError, status},
};

/// Calls are answered so much sooner than their deadline that tonic does not cut them off, which it calls CANCELLED and
/// tells without details. Timers are exact to a millisecond.
const SOONER: Duration = Duration::from_millis(2);

/// What calls are passed by.
pub(crate) struct Edge {
    pub(crate) tokens: Tokens,
    pub(crate) intake: Intake,
}

/// Passes a call on if its token allows it; logs it at debug level; gives the statuses that tonic
/// makes by itself the details all others have.
pub(crate) async fn pass(State(edge): State<Arc<Edge>>, request: Request, next: Next) -> Response {
    if !tracing::enabled!(Level::DEBUG) {
        return answer(&edge, request, next).await;
    }
    let method = request.uri().path().to_owned();
    let peer = request.extensions().get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
    let span = tracing::debug_span!("call", %method, peer = peer.map(tracing::field::display));
    let start = Instant::now();
    async move {
        let response = answer(&edge, request, next).await;
        // A stream has only begun by now.
        let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |s| s.code());
        tracing::debug!(?code, elapsed = ?start.elapsed(), "answered");
        response
    }
    .instrument(span)
    .await
}

async fn answer(edge: &Edge, request: Request, next: Next) -> Response {
    let authorization = request.headers().get("authorization");
    if let Err(refused) = edge.tokens.check(request.uri().path(), authorization) {
        return status(&refused).into_http();
    }
    let deadline = deadline(request.headers());
    let answer = next.run(edge.intake.meter(request));
    let Some(deadline) = deadline else { return uniform(answer.await) };
    if let Ok(response) = timeout(deadline.saturating_sub(SOONER), answer).await {
        return uniform(response);
    }
    let late = Status::deadline_exceeded("the deadline has passed: the outcome is unknown");
    status(&ApiError::Transport(late)).into_http()
}

/// How long the caller waits for the answer, or for the beginning of a stream of answers: up to eight digits and a unit.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None; // tonic takes no more either
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3_600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// Only answers that are nothing but a status carry it in their headers.
fn uniform(response: Response) -> Response {
    let headers = response.headers();
    if headers.contains_key("grpc-status-details-bin") || !headers.contains_key("grpc-status") {
        return response;
    }
    match Status::from_header_map(headers) {
        Some(bare) if bare.code() != Code::Ok => {
            status(&ApiError::Transport(bare)).into_http::<Body>()
        }
        _ => response,
    }
}
