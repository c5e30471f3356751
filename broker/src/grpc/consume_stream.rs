//! ConsumeStream: deliveries and settles on one stream.
//!
//! A task of its own reads the requests. It starts each settle immediately, so that many run at a
//! time, and queues the settle for its answer. The connection polls the response stream, which
//! sends the answers in the order of the requests, and deliveries in between. Requests are
//! therefore carried out even while the client does not read. A request that is refused or fails is
//! answered with the reason, and the stream continues: the error does not concern the other items
//! that the consumer holds.

use std::{sync::Arc, time::Duration};

use futures_util::{
    Stream, StreamExt, TryFutureExt,
    stream::{self, BoxStream},
};
use sluicegate_proto::v1::{
    self as pb, consume_stream_request::Action as Request, consume_stream_response::Event,
};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::{
    Api, Running, convert,
    delivery_stream::{DeliveryStream, Message},
    joined, may_settle, parse,
    status::{self, ApiError},
};
use crate::{
    access::Caller,
    domain::{Action, IdMap, Invalid, ItemId, QueueName},
    engine::{Delivered, EngineError, Flow, InForce},
};

/// Most requests that are being carried out, or whose answers the client has not read yet. Past
/// this number the stream is not read, and HTTP/2 flow control slows the client down.
const MAX_SETTLES: usize = 64;
/// Most bytes of these requests, unless a single one is larger. An answer is about as large as its
/// request, because it repeats the receipts.
const MAX_SETTLES_BYTES: usize = 1 << 20;

type Requests = Streaming<pb::ConsumeStreamRequest>;
type Responses = BoxStream<'static, Result<pb::ConsumeStreamResponse, Status>>;

/// The answers to requests, in the order of the requests.
enum Answer {
    /// A settle or an extend that is being carried out.
    Settle(Running<Event>),
    /// A new flow, which is in force once the second is done.
    Flow(pb::Flow, InForce),
    /// The request is refused.
    Refused(Status),
    /// The connection failed, or the client violated the protocol. The stream ends.
    Failed(Status),
}

impl Answer {
    /// Waits until the answer can be sent. Cancel-safe.
    async fn done(&mut self) -> Result<Event, Status> {
        match self {
            Self::Settle(settle) => {
                Ok(joined(settle.await).unwrap_or_else(|status| refused(&status)))
            }
            Self::Flow(flow, in_force) => {
                let _ = in_force.await; // it is not told but dropped
                Ok(Event::Flow(*flow))
            }
            Self::Refused(status) => Ok(refused(status)),
            Self::Failed(status) => Err(status.clone()),
        }
    }
}

/// An answer, with the room that it takes until the client reads it.
type Queued = (Answer, OwnedSemaphorePermit);

/// Serves one stream. The response begins before `open` has arrived, because some clients wait for
/// the response first.
pub(super) fn serve(
    api: Api,
    caller: Caller,
    requests: Requests,
) -> impl Stream<Item = Result<pb::ConsumeStreamResponse, Status>> + Send + 'static {
    open(api, caller, requests).try_flatten_stream()
}

async fn open(api: Api, caller: Caller, mut requests: Requests) -> Result<Responses, Status> {
    let first = tokio::select! {
        biased;
        () = api.shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
        first = requests.message() => first.map_err(ApiError::Transport)?,
    };
    let Some(Request::Open(request)) = first.and_then(|request| request.action) else {
        return Err(Invalid::new("open", "must be the first message of the stream").into());
    };
    caller.may(Action::Consume, &request.queue)?;
    let mut options = parse::consume(&request, &api.rules()).map_err(|e| e.within("open"))?;
    options.tells_revoked = true;
    options.peer = caller.peer();
    let (auto_commit, max_in_flight) = (options.auto_commit, options.max_in_flight);
    api.until_created(&caller, &options.queue, Duration::MAX).await?;
    let subscription = api.run(|engine| async move { engine.consume(options).await }).await?;
    let opened = pb::ConsumeOpened {
        lease: Some(convert::duration(subscription.lease())),
        max_in_flight: max_in_flight as i32,
    };
    let (in_line, answers) = mpsc::channel(MAX_SETTLES);
    let reader = Reader {
        api: api.clone(),
        caller: caller.clone(),
        queue: subscription.queue().clone(),
        delivered: subscription.delivered(),
        flow: subscription.flow(),
        turns: Turns::default(),
        room: Arc::new(Semaphore::new(MAX_SETTLES_BYTES)),
    };
    api.tasks.spawn(reader.read(requests, in_line));
    let outgoing = DeliveryStream::new(subscription, auto_commit, &api, caller);
    let shutdown = api.shutdown.clone();
    let session = Session { outgoing, answers, current: None, end: None, shutdown };
    let events = stream::try_unfold(session, |mut session| async move {
        Ok(session.next().await?.map(|event| (event, session)))
    });
    let opened = stream::once(std::future::ready(Ok(Event::Opened(opened))));
    let response = |event| pb::ConsumeStreamResponse { event: Some(event) };
    Ok(opened.chain(events).map(move |event| event.map(response)).boxed())
}

/// Reads requests and starts the requested work.
struct Reader {
    api: Api,
    caller: Caller,
    queue: QueueName,
    delivered: Delivered,
    flow: Flow,
    turns: Turns,
    /// Room for the bytes of requests that are not answered.
    room: Arc<Semaphore>,
}

impl Reader {
    /// Reads until the client sends no more, the client violates the protocol, or the response
    /// stream is dropped.
    async fn read(mut self, mut requests: Requests, in_line: mpsc::Sender<Queued>) {
        // Space for the answer is reserved before each request is read, and room for its bytes
        // before it is carried out, which bounds the work in progress.
        let shutdown = self.api.shutdown.clone();
        loop {
            let (place, request, room) = tokio::select! {
                biased;
                () = in_line.closed() => return,
                () = shutdown.cancelled() => return, // also from a client that does not read
                next = async {
                    let place = in_line.reserve().await;
                    let request = requests.message().await;
                    let bytes = request.as_ref().ok().and_then(Option::as_ref);
                    let bytes = bytes.map_or(0, prost::Message::encoded_len);
                    (place, request, room_for(&self.room, bytes).await)
                } => next,
            };
            let (Ok(place), Ok(room)) = (place, room) else { return };
            let answer = match request {
                Ok(Some(pb::ConsumeStreamRequest { action: Some(Request::Open(_)) })) => {
                    let reason = "only the first message of the stream can be open";
                    Answer::Failed(Invalid::new("open", reason).into())
                }
                Ok(Some(request)) => self.act(request).unwrap_or_else(Answer::Refused),
                Ok(None) => {
                    drop(self.flow.set_max_in_flight(0)); // the stream ends when all is answered
                    return;
                }
                Err(status) => Answer::Failed(ApiError::Transport(status).into()),
            };
            let ends = matches!(answer, Answer::Failed(_));
            place.send((answer, room));
            if ends {
                return;
            }
        }
    }

    /// Starts the work that a request asks for.
    fn act(&mut self, request: pb::ConsumeStreamRequest) -> Result<Answer, Status> {
        let api = &self.api;
        let keys = api.engine.receipt_keys();
        match request.action {
            Some(Request::Commit(request)) => {
                let parsed =
                    parse::receipts(&request.receipts, &keys).map_err(|e| e.within("commit"))?;
                may_settle(&self.caller, &parsed)?;
                self.delivered.name(&parsed);
                let turn = self.turns.next(parsed.iter().map(|receipt| receipt.item));
                Ok(Answer::Settle(api.start(|engine| {
                    turn.run(async move {
                        let outcomes = engine.commit(&parsed).await?;
                        let results = convert::settled(request.receipts, outcomes);
                        Ok(Event::Settled(pb::CommitResponse { results }))
                    })
                })))
            }
            Some(Request::Rollback(request)) => {
                // Before it can be refused: what is not to be committed must not be so by a request behind this one.
                self.delivered.name(&parse::named(&request, &keys));
                let (receipts, parsed) =
                    parse::rollbacks(request, &keys).map_err(|e| e.within("rollback"))?;
                may_settle(&self.caller, parsed.iter().map(|rollback| &rollback.receipt))?;
                let turn = self.turns.next(parsed.iter().map(|rollback| rollback.receipt.item));
                Ok(Answer::Settle(api.start(|engine| {
                    turn.run(async move {
                        let outcomes = engine.rollback(parsed).await?;
                        let results = convert::settled(receipts, outcomes);
                        Ok(Event::Settled(pb::CommitResponse { results }))
                    })
                })))
            }
            Some(Request::Extend(request)) => {
                let (receipts, lease) =
                    parse::extend(&request, &api.rules(), &keys).map_err(|e| e.within("extend"))?;
                may_settle(&self.caller, &receipts)?;
                let turn = self.turns.next(receipts.iter().map(|receipt| receipt.item));
                Ok(Answer::Settle(api.start(|engine| {
                    turn.run(async move {
                        let outcomes = engine.extend(receipts, lease).await?;
                        Ok(Event::Extended(convert::extended(request.receipts, outcomes)))
                    })
                })))
            }
            Some(Request::CommitUpTo(request)) => {
                self.caller.may(Action::Consume, self.queue.as_str())?;
                let tag = u64::try_from(request.delivery_tag).unwrap_or(0);
                let receipts = self.delivered.up_to(tag).map_err(not_delivered)?;
                let turn = self.turns.next(receipts.iter().map(|receipt| receipt.item));
                let delivered = self.delivered.clone();
                Ok(Answer::Settle(api.start(|_| {
                    turn.run(async move {
                        let outcomes = delivered.commit(&receipts).await?;
                        let answer = convert::committed_up_to(&receipts, &outcomes, &keys);
                        Ok(Event::CommittedUpTo(answer))
                    })
                })))
            }
            Some(Request::Flow(flow)) => {
                let in_force = self.flow.set_max_in_flight(parse::flow(flow)?);
                Ok(Answer::Flow(flow, in_force))
            }
            // An action that this broker does not know arrives as no action.
            Some(Request::Open(_)) | None => Err(Invalid::new("action", "must be given").into()),
        }
    }
}

/// Refuses the tag of an item that was not delivered.
fn not_delivered(last: u64) -> Invalid {
    let reason = match last {
        0 => "the stream has delivered no item that is to be committed".to_owned(),
        last => format!("must be that of a delivered item, 1 to {last}"),
    };
    Invalid::new("commit_up_to.delivery_tag", reason)
}

/// Decides which requests of a stream wait for others: requests that name the same item run in the
/// order in which they were sent, and all others run concurrently.
#[derive(Default)]
struct Turns {
    /// For each item, the end of the last request that names it, which is shared because a clone of a token takes a lock. Requests that
    /// have ended are removed now and then.
    ends: IdMap<ItemId, Arc<CancellationToken>>,
    /// The number of entries at which those that have ended are removed.
    look_at: usize,
}

/// The position of one request relative to the others.
struct Turn {
    /// The ends of earlier requests that name an item of this request.
    before: Vec<Arc<CancellationToken>>,
    end: DropGuard,
}

impl Turns {
    /// Registers the next request, which names these items.
    fn next(&mut self, items: impl Iterator<Item = ItemId>) -> Turn {
        if self.ends.len() >= self.look_at {
            self.ends.retain(|_, end| !end.is_cancelled());
            self.look_at = 2 * self.ends.len() + 1_000;
        }
        let end = Arc::new(CancellationToken::new());
        // A request may name an item twice.
        let is_under_way =
            |before: &Arc<CancellationToken>| !Arc::ptr_eq(before, &end) && !before.is_cancelled();
        let before = items
            .filter_map(|item| self.ends.insert(item, Arc::clone(&end)))
            .filter(is_under_way)
            .collect();
        let end = CancellationToken::clone(&end).drop_guard();
        Turn { before, end }
    }
}

impl Turn {
    /// Runs `work` after the earlier requests for its items. The request ends with this future,
    /// even if that is dropped.
    async fn run<T>(self, work: impl Future<Output = T>) -> T {
        let Self { before, end: _end } = self;
        for end in before {
            end.cancelled().await;
        }
        work.await
    }
}

/// Waits for room for a request of so many bytes. A request larger than all the room takes all.
async fn room_for(
    room: &Arc<Semaphore>,
    bytes: usize,
) -> Result<OwnedSemaphorePermit, AcquireError> {
    Arc::clone(room).acquire_many_owned(bytes.min(MAX_SETTLES_BYTES) as u32).await
}

/// An open stream. When it is dropped, unsettled items are rolled back.
struct Session {
    outgoing: DeliveryStream,
    answers: mpsc::Receiver<Queued>,
    /// The answer that is sent next.
    current: Option<Queued>,
    /// The reason why the stream ends, after all queued answers are sent.
    end: Option<Status>,
    shutdown: CancellationToken,
}

impl Session {
    /// Returns the next event, or `None` when the client has closed its side and all requests are
    /// answered.
    async fn next(&mut self) -> Result<Option<Event>, Status> {
        loop {
            if let Some(end) = &self.end
                && self.current.is_none()
                && self.answers.is_empty()
            {
                return Err(end.clone());
            }
            return tokio::select! {
                biased;
                answer = next_answer(&mut self.answers, &mut self.current) => match answer {
                    Ok(None) if self.shutdown.is_cancelled() => Err(EngineError::ShuttingDown.into()),
                    answer => answer,
                },
                // A client that sends no more is sent no more items.
                message = self.outgoing.next(), if self.end.is_none() && !self.answers.is_closed() => match message {
                    // The answer to the last settle is still to be sent.
                    Err(end @ ApiError::Engine(EngineError::StreamTooOld)) => {
                        self.end = Some(end.into());
                        continue;
                    }
                    message => Ok(Some(match message? {
                        Message::Deliveries(deliveries) => Event::Deliveries(deliveries),
                        Message::Revoked(revoked) => Event::Revoked(revoked),
                    })),
                },
            };
        }
    }
}

/// Returns the next answer when its work is done. Cancel-safe.
async fn next_answer(
    answers: &mut mpsc::Receiver<Queued>,
    current: &mut Option<Queued>,
) -> Result<Option<Event>, Status> {
    let (answer, _) = match current {
        Some(current) => current,
        None => match answers.recv().await {
            Some(next) => current.insert(next),
            None => return Ok(None),
        },
    };
    let event = answer.done().await;
    *current = None;
    event.map(Some)
}

fn refused(status: &Status) -> Event {
    Event::Error(status::embedded(status))
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, poll};

    use super::*;

    #[tokio::test]
    async fn requests_wait_only_for_those_that_name_the_same_item() {
        let mut turns = Turns::default();
        let mut turn = |items: &[u8]| turns.next(items.iter().map(|item| ItemId([*item; 12])));
        let first = turn(&[1, 2, 2]);
        let other = turn(&[3]);
        let mut second = Box::pin(turn(&[2]).run(async {}));
        let mut third = Box::pin(turn(&[3, 2]).run(async {}));
        other.run(async {}).await;
        assert!(poll!(&mut second).is_pending());
        // A request that is dropped is never carried out, and does not delay others.
        drop(first);
        assert!(poll!(&mut third).is_pending(), "the third request waits for the second");
        second.await;
        third.await;
        turn(&[1, 2, 3]).run(async {}).await;
        turn(&[4, 4]).run(async {}).now_or_never().expect("a request that waits for no other");
    }

    #[test]
    fn ended_requests_are_removed() {
        let mut turns = Turns::default();
        let mut number = 0_u32;
        let mut next = |turns: &mut Turns| {
            number += 1;
            let mut id = [0; 12];
            id[..4].copy_from_slice(&number.to_be_bytes());
            turns.next(std::iter::once(ItemId(id)))
        };
        let under_way: Vec<_> = (0..50).map(|_| next(&mut turns)).collect();
        for _ in 0..10_000 {
            drop(next(&mut turns));
        }
        assert!(turns.ends.len() < 2_000, "{}", turns.ends.len());
        assert!(under_way.iter().all(|turn| turn.before.is_empty()));
        assert_eq!(turns.ends.values().filter(|end| !end.is_cancelled()).count(), 50);
    }
}
