//! ConsumeStream: deliveries and settles on one stream.
//!
//! Requests are read by a task of their own, which starts each settle at once, many at a time, and
//! puts it in line. The response stream, polled by the connection, sends the answers in that order
//! and deliveries in between. So settles are carried out even while the client does not read.

use futures_util::{
    Stream, StreamExt, TryFutureExt,
    stream::{self, BoxStream},
};
use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action, consume_stream_response::Event,
};
use tokio::{sync::mpsc, task::JoinHandle};
use tonic::{Status, Streaming};

use super::{Api, convert, joined, parse, queue_service::Outgoing, status::ApiError};
use crate::{domain::Invalid, engine::EngineError};

/// Most requests that are under way, or answered and not read by the client yet. Past this the
/// stream is not read, and HTTP/2 flow control slows the client down.
const MAX_SETTLES: usize = 64;

type Requests = Streaming<pb::ConsumeStreamRequest>;
type Responses = BoxStream<'static, Result<pb::ConsumeStreamResponse, Status>>;

/// What a request is answered with, in the order of the requests.
enum Answer {
    /// A settle or an extend, under way.
    Settle(JoinHandle<Result<Event, EngineError>>),
    /// The new flow, to be set when its turn comes.
    Flow(usize),
    /// The request can not be taken: the stream ends.
    Failed(Status),
}

/// Serves one stream. The response begins before `open` has come: some clients wait for that.
pub(super) fn serve(
    api: Api,
    requests: Requests,
) -> impl Stream<Item = Result<pb::ConsumeStreamResponse, Status>> + Send + 'static {
    open(api, requests).try_flatten_stream()
}

async fn open(api: Api, mut requests: Requests) -> Result<Responses, Status> {
    let first = tokio::select! {
        biased;
        () = api.shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
        first = requests.message() => first.map_err(ApiError::Transport)?,
    };
    let Some(Action::Open(request)) = first.and_then(|request| request.action) else {
        return Err(Invalid::new("open", "must be the first message of the stream").into());
    };
    let options = parse::consume(&request, &api.rules()).map_err(|e| e.within("open"))?;
    let (auto_commit, max_in_flight) = (options.auto_commit, options.max_in_flight);
    let subscription = api.run(|engine| async move { engine.consume(options).await }).await?;
    let opened = pb::ConsumeOpened {
        lease: Some(convert::duration(subscription.lease())),
        max_in_flight: max_in_flight as i32,
    };
    let (in_line, answers) = mpsc::channel(MAX_SETTLES);
    api.tasks.spawn(read(api.clone(), requests, in_line));
    let outgoing = Outgoing::new(subscription, auto_commit, api.shutdown.clone());
    let session = Session { outgoing, answers, current: None };
    let events = stream::try_unfold(session, |mut session| async move {
        Ok(session.next().await?.map(|event| (event, session)))
    });
    let opened = stream::once(std::future::ready(Ok(Event::Opened(opened))));
    let response = |event| pb::ConsumeStreamResponse { event: Some(event) };
    Ok(opened.chain(events).map(move |event| event.map(response)).boxed())
}

/// Reads requests until the client has no more, one is refused, or the response stream is gone.
async fn read(api: Api, mut requests: Requests, in_line: mpsc::Sender<Answer>) {
    // A place in line before each request, so that what is under way is bounded.
    while let Ok(place) = in_line.reserve().await {
        let request = tokio::select! {
            biased;
            () = in_line.closed() => return,
            request = requests.message() => request,
        };
        let answer = match request {
            Ok(Some(request)) => act(&api, request).unwrap_or_else(Answer::Failed),
            Ok(None) => return,
            Err(status) => Answer::Failed(ApiError::Transport(status).into()),
        };
        let refused = matches!(answer, Answer::Failed(_));
        place.send(answer);
        if refused {
            return;
        }
    }
}

/// Starts what a request asks for.
fn act(api: &Api, request: pb::ConsumeStreamRequest) -> Result<Answer, Status> {
    match request.action {
        Some(Action::Commit(request)) => {
            let parsed = parse::receipts(&request.receipts).map_err(|e| e.within("commit"))?;
            Ok(Answer::Settle(api.start(|engine| async move {
                let outcomes = engine.commit(parsed).await?;
                let results = convert::settled(request.receipts, outcomes);
                Ok(Event::Settled(pb::CommitResponse { results }))
            })))
        }
        Some(Action::Rollback(request)) => {
            let (receipts, parsed) = parse::rollbacks(request).map_err(|e| e.within("rollback"))?;
            Ok(Answer::Settle(api.start(|engine| async move {
                let outcomes = engine.rollback(parsed).await?;
                let results = convert::settled(receipts, outcomes);
                Ok(Event::Settled(pb::CommitResponse { results }))
            })))
        }
        Some(Action::Extend(request)) => {
            let parsed = parse::extend(&request, &api.rules()).map_err(|e| e.within("extend"))?;
            let (receipts, lease) = parsed;
            Ok(Answer::Settle(api.start(|engine| async move {
                let outcomes = engine.extend(receipts, lease).await?;
                Ok(Event::Extended(convert::extended(request.receipts, outcomes)))
            })))
        }
        Some(Action::Flow(flow)) => Ok(Answer::Flow(parse::flow(flow)?)),
        Some(Action::Open(_)) => {
            Err(Invalid::new("open", "only the first message of the stream can be open").into())
        }
        None => Err(Invalid::new("action", "must be given").into()),
    }
}

/// An open stream. Dropping it gives back what is not settled.
struct Session {
    outgoing: Outgoing,
    answers: mpsc::Receiver<Answer>,
    /// The settle at the head of the line.
    current: Option<JoinHandle<Result<Event, EngineError>>>,
}

impl Session {
    /// The next event; `None` when the client has closed its side and all is answered.
    async fn next(&mut self) -> Result<Option<Event>, Status> {
        tokio::select! {
            biased;
            answer = next_answer(&mut self.answers, &mut self.current) => match answer? {
                None => Ok(None),
                Some(Next::Event(event)) => Ok(Some(event)),
                Some(Next::Flow(max_in_flight)) => {
                    self.outgoing.subscription().set_max_in_flight(max_in_flight);
                    Ok(Some(Event::Flow(pb::Flow { max_in_flight: max_in_flight as i32 })))
                }
            },
            deliveries = self.outgoing.next() => Ok(Some(Event::Deliveries(deliveries?))),
        }
    }
}

enum Next {
    Event(Event),
    Flow(usize),
}

/// The answer at the head of the line, when it is done. May be dropped and called again.
async fn next_answer(
    answers: &mut mpsc::Receiver<Answer>,
    current: &mut Option<JoinHandle<Result<Event, EngineError>>>,
) -> Result<Option<Next>, Status> {
    let settle = match current {
        Some(settle) => settle,
        None => match answers.recv().await {
            Some(Answer::Settle(settle)) => current.insert(settle),
            Some(Answer::Flow(max_in_flight)) => return Ok(Some(Next::Flow(max_in_flight))),
            Some(Answer::Failed(status)) => return Err(status),
            None => return Ok(None),
        },
    };
    let done = settle.await;
    *current = None;
    joined(done).map(|event| Some(Next::Event(event)))
}
