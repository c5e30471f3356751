//! Pushing over one stream, many batches in flight.
//!
//! One task owns the stream. It keeps each batch until the answer with its `batch_id` has arrived. When the stream
//! breaks, unanswered batches are sent again on the next stream if that cannot store items twice, because no broker has seen
//! them or each item has a `dedup_id`; otherwise their callers get [`Error::OutcomeUnknown`].

use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::stream;
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Status, Streaming};

use super::push::{Producer, is_repeatable, may_be_stored};
use crate::{
    client::Client,
    error::{Error, Result, is_transient},
    item::NewItem,
    proto::{PushResult, PushStreamRequest, PushStreamResponse},
};

/// A batch that failed temporarily, on a stream that lives, waits as long as after this many tries (0.4 s by default).
const FAILED_BATCH_TRIES: u32 = 3;

/// Settings of a [`PushStream`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamOptions {
    /// How many batches may be unanswered at a time; further ones wait. Default 16.
    pub max_in_flight: usize,
    /// How long [`PushStream::close`] waits for outstanding answers. Default 60 s.
    pub close_timeout: Duration,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self { max_in_flight: 16, close_timeout: Duration::from_secs(60) }
    }
}

/// Pushes batches over one stream; [`Producer::stream`] returns one. Dropping it abandons batches that are not answered yet;
/// [`PushStream::close`] waits for them.
#[derive(Debug)]
pub struct PushStream {
    producer: Producer,
    options: StreamOptions,
    window: Arc<Semaphore>,
    batches: mpsc::Sender<Batch>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Producer {
    /// Opens a stream on which many batches can be in flight. The stream connects when it is first used, and again when it
    /// breaks.
    pub fn stream(&self, options: StreamOptions) -> PushStream {
        let (batches, incoming) = mpsc::channel(options.max_in_flight.max(1));
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let task = StreamTask {
            producer: self.clone(),
            incoming,
            pending: HashMap::new(),
            unsent: VecDeque::new(),
            failed: VecDeque::new(),
            retry_at: Instant::now(),
            next_id: 1,
        };
        let stopped = stop.clone();
        tasks.spawn(async move { stopped.run_until_cancelled(task.run()).await });
        tasks.close();
        PushStream {
            producer: self.clone(),
            window: Arc::new(Semaphore::new(options.max_in_flight.max(1))),
            options,
            batches,
            tasks,
            stop,
        }
    }
}

impl PushStream {
    /// Sends items as one or more batches and returns as soon as they are queued for sending; waits while `max_in_flight`
    /// batches are unanswered. The ticket resolves to the results.
    ///
    /// # Errors
    /// [`Error::Closed`] if the stream has ended.
    pub async fn send<I>(&self, items: I) -> Result<PushTicket>
    where
        I: IntoIterator,
        I::Item: Into<NewItem>,
    {
        let items: Vec<NewItem> = items.into_iter().map(Into::into).collect();
        let mut parts = VecDeque::new();
        for items in self.producer.batches(items.into_iter()) {
            let permit = self.window.clone().acquire_owned().await.map_err(|_| Error::Closed)?;
            let (answer, answered) = oneshot::channel();
            let request = PushStreamRequest {
                batch_id: 0, // given by the task
                queue: self.producer.queue.clone(),
                items,
                producer: self.producer.name.clone(),
            };
            let give_up = Instant::now() + self.producer.backoff.give_up_after;
            let batch = Batch {
                safe: is_repeatable(&request.items),
                maybe_stored: false,
                request,
                answer,
                give_up,
                permit,
            };
            self.batches.send(batch).await.map_err(|_| Error::Closed)?;
            parts.push_back(answered);
        }
        Ok(PushTicket { parts, results: Vec::new() })
    }

    /// Waits until each batch is answered, and ends the stream.
    ///
    /// # Errors
    /// [`Error::Closed`] if `close_timeout` passed first; the tickets of unanswered batches then resolve to the same error.
    pub async fn close(self) -> Result<()> {
        // Holding every permit means that nothing is unanswered.
        let all = self.options.max_in_flight.max(1).try_into().unwrap_or(u32::MAX);
        let answered =
            tokio::time::timeout(self.options.close_timeout, self.window.acquire_many(all)).await;
        self.stop.cancel();
        self.tasks.wait().await;
        if answered.is_ok() { Ok(()) } else { Err(Error::Closed) }
    }
}

impl Drop for PushStream {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A future of the results of one [`PushStream::send`], in order of its items.
#[derive(Debug)]
#[must_use = "the ticket resolves to whether the items were stored"]
pub struct PushTicket {
    parts: VecDeque<oneshot::Receiver<Result<Vec<PushResult>>>>,
    results: Vec<PushResult>,
}

impl Future for PushTicket {
    type Output = Result<Vec<PushResult>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        while let Some(part) = self.parts.front_mut() {
            let Poll::Ready(answer) = Pin::new(part).poll(context) else {
                return Poll::Pending;
            };
            self.parts.pop_front();
            match answer.unwrap_or(Err(Error::Closed)) {
                Ok(results) => self.results.extend(results),
                Err(source) if self.results.is_empty() => return Poll::Ready(Err(source)),
                Err(source) => {
                    let results = std::mem::take(&mut self.results);
                    return Poll::Ready(Err(Error::PartlyPushed {
                        results,
                        source: Box::new(source),
                    }));
                }
            }
        }
        Poll::Ready(Ok(std::mem::take(&mut self.results)))
    }
}

/// A batch and where its answer goes.
#[derive(Debug)]
struct Batch {
    request: PushStreamRequest,
    /// Sending it twice stores it once.
    safe: bool,
    /// An earlier try may have stored it.
    maybe_stored: bool,
    answer: oneshot::Sender<Result<Vec<PushResult>>>,
    give_up: Instant,
    permit: OwnedSemaphorePermit,
}

impl Batch {
    fn finish(self, result: Result<Vec<PushResult>>) {
        // The caller may have dropped its ticket.
        let _ = self.answer.send(result);
        drop(self.permit);
    }
}

struct StreamTask {
    producer: Producer,
    incoming: mpsc::Receiver<Batch>,
    /// Batches not answered yet, by `batch_id`.
    pending: HashMap<i64, Batch>,
    /// Those of them that have to be sent on the present stream.
    unsent: VecDeque<i64>,
    /// Those that failed for the moment, to be sent again at `retry_at`.
    failed: VecDeque<i64>,
    retry_at: Instant,
    next_id: i64,
}

impl StreamTask {
    async fn run(mut self) {
        let mut tries = 0;
        loop {
            // Connect only when there is something to send.
            while self.pending.is_empty() {
                match self.incoming.recv().await {
                    Some(batch) => self.accept(batch),
                    None => return,
                }
            }
            let client = self.producer.client.clone();
            client.rotate();
            let address = client.address_in_use();
            let answered_before = self.pending.len();
            let broken = match self.serve(&client).await {
                Ok(End::Done) => return,
                Ok(End::Old) => {
                    client.go_on();
                    tries = 0;
                    continue;
                }
                Err(broken) => broken,
            };
            let status = &broken.status;
            client.fail_over(&address);
            if self.pending.len() < answered_before {
                tries = 0;
            }
            let delay = self.producer.backoff.delay(tries, Some(status));
            self.sort_out(&broken, Instant::now() + delay);
            tracing::debug!(queue = self.producer.queue, ?delay, %status, "push stream broke");
            tokio::time::sleep(delay).await;
            tries += 1;
        }
    }

    fn accept(&mut self, mut batch: Batch) {
        let id = self.next_id;
        self.next_id += 1;
        batch.request.batch_id = id;
        if let Err(status) = self.producer.client.may_send(&batch.request) {
            return batch.finish(Err(status.into()));
        }
        self.pending.insert(id, batch);
        self.unsent.push_back(id);
    }

    /// Serves one stream until it breaks (an error), the broker wants another one, or the producer is gone and
    /// everything is answered.
    async fn serve(&mut self, client: &Client) -> Result<End, Broken> {
        let (requests, outgoing) = mpsc::channel(4);
        let outgoing = Arc::new(Mutex::new(outgoing));
        let end = self.serve_with(client, requests, &outgoing).await;
        // Requests that the transport did not take, such as those for a connection that was just closed, were never sent.
        while let Ok(request) = outgoing.lock().try_recv() {
            if let Some(batch) = self.pending.get_mut(&request.batch_id) {
                self.unsent.push_back(request.batch_id);
                batch.request = request;
            }
        }
        end
    }

    async fn serve_with(
        &mut self,
        client: &Client,
        requests: mpsc::Sender<PushStreamRequest>,
        outgoing: &Arc<Mutex<mpsc::Receiver<PushStreamRequest>>>,
    ) -> Result<End, Broken> {
        let mut requests = Some(requests);
        // Nothing more is to be sent on this stream: it is old.
        let mut closing = false;
        let mut stub = client.queue_service();
        let outgoing = Arc::clone(outgoing);
        let taken = stream::poll_fn(move |context| outgoing.lock().poll_recv(context));
        let opening = stub.push_stream(taken);
        tokio::pin!(opening);
        let mut opened: Option<Streaming<PushStreamResponse>> = None;
        let mut more = true;
        loop {
            tokio::select! {
                // A broker may answer the call only once it has read something, so sending does not wait for it.
                response = &mut opening, if opened.is_none() => {
                    opened = Some(response.map_err(Broken::unopened)?.into_inner());
                }
                answer = next(&mut opened), if opened.is_some() => match answer? {
                    Some(PushStreamResponse { closing: true, .. }) => closing = true,
                    Some(answer) => self.answer(answer),
                    None => return Err(Status::unavailable("the broker ended the push stream").into()),
                },
                slot = reserve(requests.as_ref()), if !closing && !self.unsent.is_empty() => {
                    let slot = slot.map_err(|_| Status::unavailable("the push stream ended"))?;
                    let batch = self.unsent.pop_front().and_then(|id| self.pending.get_mut(&id));
                    if let Some(batch) = batch {
                        // What is sent on an open stream and cannot be sent again need not be kept.
                        let is_kept = batch.safe || opened.is_none();
                        slot.send(if is_kept { batch.request.clone() } else { std::mem::take(&mut batch.request) });
                    }
                }
                () = tokio::time::sleep_until(self.retry_at), if !self.failed.is_empty() => {
                    self.unsent.append(&mut self.failed);
                }
                batch = self.incoming.recv(), if more && !closing && self.unsent.is_empty() => match batch {
                    Some(batch) => self.accept(batch),
                    None => more = false,
                },
            }
            if !more && self.pending.is_empty() {
                return Ok(End::Done);
            }
            if closing {
                requests = None;
                if self.is_all_answered() {
                    return Ok(End::Old);
                }
            }
        }
    }

    /// True if all that was sent on the present stream is answered.
    fn is_all_answered(&self) -> bool {
        self.pending.len() == self.unsent.len() + self.failed.len()
    }

    fn answer(&mut self, answer: PushStreamResponse) {
        let id = answer.batch_id;
        let Some(mut batch) = self.pending.remove(&id) else {
            tracing::warn!(batch_id = id, "answer to a batch that was not sent");
            return;
        };
        let Some(error) = answer.error else {
            return batch.finish(Ok(answer.results));
        };
        let status = Status::with_details(
            Code::from_i32(error.code),
            error.message.clone(),
            details(&error),
        );
        if !is_transient(&status) {
            let maybe_stored = batch.maybe_stored || may_be_stored(&status);
            batch.finish(Err(Error::refused(status, maybe_stored)));
        } else if batch.safe && Instant::now() < batch.give_up {
            batch.maybe_stored = true;
            self.pending.insert(id, batch);
            self.failed.push_back(id);
            self.retry_at =
                Instant::now() + self.producer.backoff.delay(FAILED_BATCH_TRIES, Some(&status));
        } else {
            batch.finish(Err(Error::OutcomeUnknown(Box::new(status))));
        }
    }

    /// Sorts the pending batches after a stream broke: those that cannot be sent again are answered, the rest is queued.
    fn sort_out(&mut self, broken: &Broken, next_try: Instant) {
        let never_sent = std::mem::take(&mut self.unsent);
        self.failed.clear();
        let mut ids: Vec<i64> = self.pending.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let Some(batch) = self.pending.get_mut(&id) else {
                continue;
            };
            // What is still queued was not sent on this stream.
            let is_sent = broken.is_begun && !never_sent.contains(&id);
            let is_repeatable = batch.safe || !is_sent;
            batch.maybe_stored |= is_sent;
            if is_transient(&broken.status) && is_repeatable && next_try < batch.give_up {
                self.unsent.push_back(id);
            } else if let Some(batch) = self.pending.remove(&id) {
                let error = Error::refused(broken.status.clone(), batch.maybe_stored);
                batch.finish(Err(error));
            }
        }
    }
}

/// Why a stream broke.
struct Broken {
    status: Status,
    /// True if the broker may have read batches from it.
    is_begun: bool,
}

impl From<Status> for Broken {
    fn from(status: Status) -> Self {
        Self { status, is_begun: true }
    }
}

impl Broken {
    /// A stream that ended before its answer began.
    fn unopened(status: Status) -> Self {
        Self { is_begun: may_be_stored(&status), status }
    }
}

/// How a stream ended in good order.
enum End {
    /// There is nothing more to do.
    Done,
    /// The broker wants another stream in its place.
    Old,
}

/// A place for the next request.
async fn reserve(
    requests: Option<&mpsc::Sender<PushStreamRequest>>,
) -> Result<mpsc::Permit<'_, PushStreamRequest>, mpsc::error::SendError<()>> {
    match requests {
        Some(requests) => requests.reserve().await,
        None => std::future::pending().await,
    }
}

/// Returns the next answer; never ready while the stream is not open.
async fn next(
    stream: &mut Option<Streaming<PushStreamResponse>>,
) -> Result<Option<PushStreamResponse>, Status> {
    match stream {
        Some(stream) => stream.message().await,
        None => std::future::pending().await,
    }
}

/// The error of a batch, encoded the way `Status` carries its details.
fn details(error: &tonic_types::Status) -> bytes::Bytes {
    prost::Message::encode_to_vec(error).into()
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, BytesMut};
    use h2::{Reason, server};
    use prost::Message;
    use tokio::net::TcpListener;
    use tonic::codegen::http::Response;

    use super::*;

    /// Reads one message of gRPC.
    async fn read(body: &mut h2::RecvStream) -> PushStreamRequest {
        let mut bytes = BytesMut::new();
        loop {
            bytes.extend_from_slice(&body.data().await.unwrap().unwrap());
            let Some((head, message)) = bytes.split_first_chunk::<5>() else { continue };
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            if message.len() == length {
                return PushStreamRequest::decode(message).unwrap();
            }
        }
    }

    /// A message as it goes over a connection.
    fn encoded(message: &impl Message) -> bytes::Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_u8(0);
        bytes.put_u32(message.encoded_len() as u32);
        message.encode(&mut bytes).unwrap();
        bytes.freeze()
    }

    #[tokio::test]
    async fn what_a_broker_did_not_take_is_sent_again_and_what_failed_may_be_stored() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let producer = Client::builder(url).connect_lazy().unwrap().producer("q");
        let stream = producer.stream(StreamOptions::default());
        let ticket = stream.send(["once"]).await.unwrap();
        let (calls, mut called) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut connection =
                server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            while let Some(call) = connection.accept().await {
                calls.send(call.unwrap()).await.unwrap();
            }
        });
        let (mut request, mut refused) = called.recv().await.unwrap();
        let first = read(request.body_mut()).await;
        refused.send_reset(Reason::REFUSED_STREAM);
        let (mut request, mut respond) = called.recv().await.unwrap();
        let again = read(request.body_mut()).await;
        assert_eq!(again, first);

        let mut to = respond.send_response(Response::new(()), false).unwrap();
        let answer = PushStreamResponse { batch_id: again.batch_id, ..Default::default() };
        to.send_data(encoded(&answer), false).unwrap();
        assert_eq!(ticket.await.unwrap(), []);

        for (code, is_unknown) in [(Code::Internal, true), (Code::InvalidArgument, false)] {
            let ticket = stream.send(["once"]).await.unwrap();
            let batch_id = read(request.body_mut()).await.batch_id;
            let error = tonic_types::Status { code: code as i32, ..Default::default() };
            let answer = PushStreamResponse { batch_id, error: Some(error), ..Default::default() };
            to.send_data(encoded(&answer), false).unwrap();
            let error = ticket.await.unwrap_err();
            assert_eq!(matches!(error, Error::OutcomeUnknown(_)), is_unknown, "{error:?}");
        }
    }
}
