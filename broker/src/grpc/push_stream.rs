//! PushStream: batch after batch on one stream, many in flight.

use futures_util::{Stream, StreamExt, stream::FuturesUnordered};
use sluicegate_proto::v1 as pb;
use tokio::sync::mpsc::{self, OwnedPermit};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    Api, convert, parse,
    status::{self, ApiError},
};
use crate::engine::EngineError;

/// Most batches of one stream that are under way, or answered and not read by the client yet. Past
/// this the stream is not read, and HTTP/2 flow control slows the client down.
const MAX_BATCHES: usize = 64;

type Answer = Result<pb::PushStreamResponse, Status>;

/// Pushes the batches of `requests`. Runs in a task of its own until all that was read is stored,
/// also when the client is gone.
pub(super) fn serve(
    api: &Api,
    requests: Streaming<pb::PushStreamRequest>,
) -> impl Stream<Item = Answer> + Send + 'static {
    let (answers, receiver) = mpsc::channel(MAX_BATCHES);
    api.tasks.spawn(run(api.clone(), requests, answers));
    ReceiverStream::new(receiver)
}

async fn run(
    api: Api,
    mut requests: Streaming<pb::PushStreamRequest>,
    answers: mpsc::Sender<Answer>,
) {
    // Polled by this task alone and first in the order of arrival, so that the batches of one
    // queue are started in that order.
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
            // A place for its answer before each batch: answering never waits.
            free = answers.clone().reserve_owned(), if reading && slot.is_none() => slot = free.ok(),
            request = requests.message(), if reading && slot.is_some() => match request {
                Ok(Some(request)) => {
                    let slot = slot.take();
                    in_flight.push(answer(&api, request, slot));
                }
                Ok(None) => end = Some(Ok(())),
                Err(status) => end = Some(Err(ApiError::Transport(status).into())),
            },
            else => break,
        }
    }
    if let Some(Err(status)) = end {
        drop(slot);
        // Not sent only if the client is gone.
        let _ = answers.send(Err(status)).await;
    }
}

/// Pushes one batch and sends its answer.
fn answer(
    api: &Api,
    request: pb::PushStreamRequest,
    slot: Option<OwnedPermit<Answer>>,
) -> impl Future<Output = ()> + use<> {
    let pb::PushStreamRequest { batch_id, queue, items, producer } = request;
    let batch = parse::batch(&queue, items, &producer, &api.rules());
    let engine = api.engine.clone();
    async move {
        let pushed = match batch {
            Ok(batch) => {
                engine.push(&batch.queue, batch.items, batch.producer).await.map_err(Status::from)
            }
            Err(refused) => Err(refused.into()),
        };
        let answer = match pushed {
            Ok(pushed) => {
                pb::PushStreamResponse { batch_id, results: convert::pushed(pushed), error: None }
            }
            Err(error) => pb::PushStreamResponse {
                batch_id,
                results: Vec::new(),
                error: Some(status::embedded(&error)),
            },
        };
        if let Some(slot) = slot {
            slot.send(Ok(answer));
        }
    }
}
