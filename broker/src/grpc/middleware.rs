//! What every call passes first and every answer last: tokens, the access log, uniform errors.

use std::{sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use tonic::{Code, Status, transport::server::TcpConnectInfo};
use tracing::{Instrument, Level};

use crate::grpc::{
    auth::Tokens,
    intake::Intake,
    status::{ApiError, status},
};

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
    uniform(next.run(request.map(|body| edge.intake.meter(body))).await)
}

/// Only answers that are nothing but a status carry it in their headers.
fn uniform(response: Response) -> Response {
    let headers = response.headers();
    if headers.contains_key("grpc-status-details-bin") || !headers.contains_key("grpc-status") {
        return response;
    }
    match Status::from_header_map(headers) {
        // What the server calls a deadline that has passed; whoever set it knows it by the other name.
        Some(bare) if bare.code() == Code::Cancelled && bare.message() == "Timeout expired" => {
            let late = Status::deadline_exceeded("the deadline has passed: the outcome is unknown");
            status(&ApiError::Transport(late)).into_http::<Body>()
        }
        Some(bare) if bare.code() != Code::Ok => {
            status(&ApiError::Transport(bare)).into_http::<Body>()
        }
        _ => response,
    }
}
