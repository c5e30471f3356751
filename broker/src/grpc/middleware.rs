//! What every call passes first and every answer last: bounds, access, the log, deadlines, uniform errors.

use std::{pin::pin, sync::Arc, time::Instant};

use axum::{
    extract::Request,
    http::{HeaderValue, Response},
};
use sluicegate_proto::deadline::deadline;
use tokio::time::{sleep, timeout};
use tonic::{Code, Status, body::Body};
use tracing::{Instrument, Level};

use crate::{
    access::{Access, Caller, Peer, Refused, rules::Rule},
    grpc::{
        answers::{AnswerBody, Answers},
        concurrency::{CallPermit, ConcurrencyLimits, TooMany},
        intake::Intake,
        status::{ApiError, status},
    },
    metrics::Metrics,
};

/// What calls are passed by.
pub(crate) struct Edge {
    pub(crate) access: Arc<Access>,
    pub(crate) intake: Intake,
    pub(crate) concurrency: ConcurrencyLimits,
    pub(crate) answers: Arc<Answers>,
    pub(crate) metrics: Arc<Metrics>,
}

/// Passes a call on if its caller is let in; logs it at debug level; gives the statuses that tonic
/// makes by itself the details all others have. The request is boxed, because it would be moved at each step, twice.
pub(crate) async fn pass<F: Future<Output = Response<Body>>>(
    edge: &Edge,
    request: Box<Request>,
    next: impl FnOnce(Request) -> F,
) -> Response<AnswerBody> {
    let peer = request.extensions().get::<Peer>().cloned().unwrap_or_default();
    let method = tracing::enabled!(Level::DEBUG).then(|| request.uri().path().to_owned());
    let answer = pin!(bound(edge, &peer, request, next)); // large
    let Some(method) = method else { return answer.await };
    let address = peer.address;
    let span = tracing::debug_span!("call", %method, peer = address.map(tracing::field::display));
    let start = Instant::now();
    async move {
        let response = answer.await;
        // A stream has only begun by now.
        let code = code(&response);
        tracing::debug!(?code, elapsed = ?start.elapsed(), "answered");
        response
    }
    .instrument(span)
    .await
}

/// Runs a call, unless too many are under way.
async fn bound<F: Future<Output = Response<Body>>>(
    edge: &Edge,
    peer: &Peer,
    request: Box<Request>,
    next: impl FnOnce(Request) -> F,
) -> Response<AnswerBody> {
    let is_stream = Rule::is_stream(request.uri().path());
    match admit(edge, peer, &request, is_stream) {
        Ok((caller, permit)) => {
            let response = match caller {
                Ok(caller) => answer(edge, peer, caller, request, next).await,
                Err(refused) => refuse(edge, peer, request, refused).await,
            };
            edge.answers.hold(response, is_stream, peer, Some(permit))
        }
        Err(too_many) => {
            edge.metrics.call_refused(too_many.reason().reason());
            let refused = status(&too_many.into()).into_http();
            edge.answers.hold(refused, is_stream, peer, None)
        }
    }
}

/// Counts a call and finds out who makes it. While strangers have all of their places, nobody looks at the token of an address that was
/// refused too often: for want of a place its refusals are not held back, and it could try out tokens quickly.
fn admit(
    edge: &Edge,
    peer: &Peer,
    request: &Request,
    is_stream: bool,
) -> Result<(Result<Caller, Refused>, CallPermit), TooMany> {
    let of_peer = edge.concurrency.of_peer(is_stream, peer)?;
    if let Err(too_many) = edge.concurrency.room_for_strangers(is_stream)
        && edge.access.is_slowed_down(peer)
    {
        return Err(too_many);
    }
    let authorization = request.headers().get("authorization").map(HeaderValue::as_bytes);
    let caller = edge.access.admit(request.uri().path(), authorization, peer);
    let is_stranger = caller.as_ref().map_or(true, Caller::is_stranger);
    let permit = edge.concurrency.in_all(of_peer, is_stranger);
    if caller.is_err() && permit.is_err() {
        edge.access.penalty(peer); // counted, and not waited for
    }
    Ok((caller, permit?))
}

/// Refuses a call. The more often a peer was refused lately, the longer that is held back.
async fn refuse(
    edge: &Edge,
    peer: &Peer,
    request: Box<Request>,
    refused: Refused,
) -> Response<Body> {
    drop(request); // what arrives of it takes no memory meanwhile
    sleep(edge.access.penalty(peer)).await;
    status(&refused.into()).into_http()
}

/// Runs a call of this caller. If it is refused in the end, that is held back too.
async fn answer<F: Future<Output = Response<Body>>>(
    edge: &Edge,
    peer: &Peer,
    caller: Caller,
    mut request: Box<Request>,
    next: impl FnOnce(Request) -> F,
) -> Response<Body> {
    let begun = caller.begun();
    request.extensions_mut().insert(caller);
    let response = run(edge, peer, request, next).await;
    if begun.answered(&code(&response)) {
        sleep(edge.access.penalty(peer)).await;
    }
    response
}

async fn run<F: Future<Output = Response<Body>>>(
    edge: &Edge,
    peer: &Peer,
    request: Box<Request>,
    next: impl FnOnce(Request) -> F,
) -> Response<Body> {
    let deadline = deadline(request.headers());
    let answer = pin!(async {
        let reads_much = Rule::reads_much(request.uri().path());
        let _turn = if reads_much { edge.answers.turn(peer).await } else { None };
        edge.intake.run(*request, next).await
    });
    let Some(deadline) = deadline else { return uniform(answer.await) };
    if let Ok(response) = timeout(deadline, answer).await {
        return uniform(response);
    }
    let late = Status::deadline_exceeded("the deadline has passed: the outcome is unknown");
    status(&ApiError::Transport(late)).into_http()
}

/// Returns the code of an answer that is nothing but a status; OK for others, which may still fail later.
fn code<B>(response: &Response<B>) -> Code {
    match response.headers().get("grpc-status") {
        Some(code) => Code::from_bytes(code.as_bytes()),
        None => Code::Ok,
    }
}

/// Only answers that are nothing but a status carry it in their headers.
fn uniform(response: Response<Body>) -> Response<Body> {
    let headers = response.headers();
    if headers.contains_key("grpc-status-details-bin") || !headers.contains_key("grpc-status") {
        return response;
    }
    match Status::from_header_map(headers) {
        Some(bare) if bare.code() != Code::Ok => status(&ApiError::Transport(bare)).into_http(),
        _ => response,
    }
}
