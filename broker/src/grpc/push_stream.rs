//! PushStream: batch after batch on one stream, with many in progress at a time.
//!
//! A stream that has reached its maximum age asks its client to end it. Everything that the client
//! has sent until then is read and answered, so that the next stream begins without unknown
//! outcomes. If the client continues nevertheless, the broker ends the stream a little later, after
//! answering what was read.

use std::{pin::Pin, time::Duration};

use futures_util::{Stream, StreamExt, stream::FuturesUnordered};
use sluicegate_proto::v1 as pb;
use tokio::{
    sync::mpsc::{self, OwnedPermit},
    time::{Sleep, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    Api, convert, parse,
    status::{self, ApiError},
};
use crate::engine::EngineError;

/// Most batches of one stream that are in progress, or whose answers the client has not read yet.
/// Past this number the stream is not read, and HTTP/2 flow control slows the client down.
const MAX_BATCHES: usize = 64;
/// Space for the messages about the stream as a whole: `closing`, and the error that ends the
/// stream. Neither waits for the client to read answers.
const OTHER_MESSAGES: usize = 2;
/// Most time that a client has to end a stream that has reached its maximum age.
const LONGEST_GRACE: Duration = Duration::from_mins(1);

type Answer = Result<pb::PushStreamResponse, Status>;

/// Pushes the batches of `requests` in a task of its own, which runs until everything that was read
/// is stored, even if the client has gone.
pub(super) fn serve(
    api: &Api,
    requests: Streaming<pb::PushStreamRequest>,
) -> impl Stream<Item = Answer> + Send + 'static {
    let (answers, receiver) = mpsc::channel(MAX_BATCHES + OTHER_MESSAGES);
    api.tasks.spawn(run(api.clone(), requests, answers));
    ReceiverStream::new(receiver)
}

async fn run(
    api: Api,
    mut requests: Streaming<pb::PushStreamRequest>,
    answers: mpsc::Sender<Answer>,
) {
    let mut closing = answers.clone().try_reserve_owned().ok();
    let last = answers.clone().try_reserve_owned().ok();
    let mut age = api.stream_age().map(|age| Box::pin(sleep(age)));
    // Only this task polls the batches. It polls each for the first time in the order of arrival,
    // when the queue's settings are known, so that batches reach the store in that order.
    let mut in_flight = FuturesUnordered::new();
    let mut slot: Option<OwnedPermit<Answer>> = None;
    let mut end = None;
    loop {
        let reading = end.is_none();
        tokio::select! {
            biased;
            Some(()) = in_flight.next() => {}
            () = api.shutdown.cancelled(), if reading => {
                end = Some(Err(EngineError::ShuttingDown.into()));
            }
            () = answers.closed(), if reading => end = Some(Ok(())),
            () = passed(&mut age), if reading => match closing.take() {
                Some(place) => {
                    place.send(Ok(pb::PushStreamResponse { closing: true, ..Default::default() }));
                    let grace = api.max_connection_age.min(LONGEST_GRACE);
                    age = Some(Box::pin(sleep(grace)));
                }
                None => end = Some(Err(EngineError::StreamTooOld.into())),
            },
            // Space for the answer is reserved before each batch is read, so that sending an answer
            // never waits.
            free = answers.clone().reserve_owned(), if reading && slot.is_none() => slot = free.ok(),
            request = requests.message(), if reading && slot.is_some() => match request {
                Ok(Some(request)) => {
                    let batch = start(&api, request, slot.take()).await;
                    in_flight.push(batch);
                }
                Ok(None) => end = Some(Ok(())),
                Err(status) => end = Some(Err(ApiError::Transport(status).into())),
            },
            else => break,
        }
    }
    if let (Some(Err(status)), Some(last)) = (end, last) {
        last.send(Err(status));
    }
}

/// Waits for the time; forever if there is none.
async fn passed(time: &mut Option<Pin<Box<Sleep>>>) {
    match time {
        Some(time) => time.await,
        None => std::future::pending().await,
    }
}

/// Prepares one batch. The returned future pushes the batch and sends the answer.
async fn start(
    api: &Api,
    request: pb::PushStreamRequest,
    slot: Option<OwnedPermit<Answer>>,
) -> impl Future<Output = ()> + use<> {
    let pb::PushStreamRequest { batch_id, queue, items, producer } = request;
    let engine = api.engine.clone();
    let ready = match parse::batch(&queue, items, &producer, &api.rules()) {
        Ok(batch) => match engine.open_for_push(&batch.queue, batch.items.len()).await {
            Ok(queue) => Ok((queue, batch)),
            Err(error) => Err(error.into()),
        },
        Err(refused) => Err(refused),
    };
    async move {
        let pushed = match ready {
            Ok((queue, batch)) => {
                let pushed = engine.push_into(queue, batch.items, batch.producer).await;
                pushed.map_err(ApiError::from)
            }
            Err(error) => Err(error),
        };
        let mut answer = pb::PushStreamResponse { batch_id, ..Default::default() };
        match pushed {
            Ok(pushed) => answer.results = convert::pushed(pushed),
            Err(error) => answer.error = Some(status::embedded(&error.into())),
        }
        if let Some(slot) = slot {
            slot.send(Ok(answer));
        }
    }
}
