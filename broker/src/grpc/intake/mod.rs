//! Bounds how much of requests is held in memory before they are decoded.
//!
//! A request may be megabytes large, a connection may carry thousands of calls, and the received part of a message is kept
//! until the rest arrives. So a large message takes its size from a budget before it is read any further. A message that
//! does not fit waits, and HTTP/2 flow control makes its client wait too. A message takes its size in one step and holds no
//! other part of the budget while it waits, so that no two messages wait for each other. A message that does not arrive
//! in time is refused, which frees its part of the budget. So is one for which there is no room in time.
//!
//! The batches of push streams are held for longer: see [`batches`](mod@batches).

mod batches;
mod budget;

use std::{
    future::poll_fn,
    num::NonZero,
    pin::pin,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream, Bytes},
    extract::Request,
};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::{Instant, timeout_at},
};
use tonic::Status;

use self::budget::{Budget, Connection, Held};
use crate::{access::Peer, grpc::status::ApiError, long_work};

#[cfg(feature = "simulation")]
pub(crate) use batches::PUSH_STREAM;
pub(super) use batches::{Batch, Room, batches};

/// The length of what precedes each message: a flag and the message's length.
const PREFIX: usize = 5;
/// Messages up to this size are not counted, so that settles never wait for pushes.
const SMALL: usize = 64 << 10;
/// How long a large message may take from the time at which it is read.
const MAX_DURATION: Duration = Duration::from_mins(1);
/// What a message counts as when it is to be worked on: so many times its size, because many small headers take ten times as long to decode
/// as documents of the same size take to make.
const DECODING: usize = 10;
/// The most that gzip compresses. A compressed message counts as so many times its size, most of which is an exaggeration.
const GZIP_RATIO: usize = 1_032;

/// The budget: how many bytes of requests may be held at a time. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    budget: Arc<Budget>,
    /// As much again, for the decoded batches of push streams.
    batches: Arc<Semaphore>,
    bytes: usize,
    /// The most bytes of one message of a push stream.
    max_message: usize,
    /// As many large messages are worked on at a time as there are processors.
    turns: Arc<Semaphore>,
}

impl Intake {
    pub(crate) fn new(bytes: usize, max_message: usize) -> Self {
        let bytes = bytes.min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        let (budget, batches) = (Budget::new(bytes), Arc::new(Semaphore::new(bytes)));
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let turns = Arc::new(Semaphore::new(processors));
        Self { budget, batches, bytes, max_message, turns }
    }

    /// Runs a call, whose request is read only as fast as there is room. What is done at once with a large message that has arrived is
    /// long work: it is decompressed, decoded and checked.
    pub(crate) async fn run<F: Future>(
        &self,
        request: Request,
        call: impl FnOnce(Request) -> F,
    ) -> F::Output {
        let arrived: Arc<Mutex<Arrived>> = Arc::default();
        let mut call = pin!(call(self.meter(request, Arc::downgrade(&arrived))));
        poll_fn(|context| {
            let arrived = arrived.lock().take();
            let work = arrived.as_ref().map_or(0, |(work, _turn)| *work);
            long_work::on_bytes(work, || call.as_mut().poll(context))
        })
        .await
    }

    /// Returns the same request, which is read only as fast as there is room. `arrived` is gone when nobody waits for large messages.
    pub(crate) fn meter(&self, request: Request, arrived: Weak<Mutex<Arrived>>) -> Request {
        let connection = connection(&request);
        batches::divert(self, request).map(|body| self.meter_body(connection, body, arrived))
    }

    fn meter_body(
        &self,
        connection: Connection,
        body: Body,
        arrived: Weak<Mutex<Arrived>>,
    ) -> Body {
        let reader = Reader {
            intake: self.clone(),
            connection,
            frames: body.into_data_stream(),
            framing: Framing::default(),
            held: None,
            arrived,
        };
        Body::from_stream(stream::try_unfold(reader, |mut reader| async move {
            Ok::<_, axum::BoxError>(reader.next().await?.map(|chunk| (chunk, reader)))
        }))
    }

    /// Waits for a turn to work on a large message. Whoever has one must wait for nothing.
    async fn turn(&self) -> Result<Turn, Status> {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        Ok(turn.map_err(|_| ApiError::TaskDied)?) // they are never closed
    }

    /// Waits for room for a message of this size; `None` if it is small.
    async fn room(&self, connection: Connection, bytes: usize) -> Result<Option<Held>, Status> {
        if bytes <= SMALL {
            return Ok(None);
        }
        Ok(Some(self.budget.take(connection, bytes).await?))
    }
}

fn connection(request: &Request) -> Connection {
    request.extensions().get::<Peer>().and_then(|peer| peer.address)
}

fn too_slow() -> Status {
    Status::deadline_exceeded(format!("a message took longer than {MAX_DURATION:?}"))
}

/// The room that one message has taken.
#[derive(Debug)]
struct Reservation {
    message: u64,
    until: Instant,
    _room: Held,
}

/// A large message that has arrived and that nobody has worked on: the size of the work, and its turn.
type Arrived = Option<(usize, Turn)>;

/// The right to work on a large message. Each takes several times its size while it is decoded.
type Turn = OwnedSemaphorePermit;

struct Reader {
    intake: Intake,
    connection: Connection,
    frames: BodyDataStream,
    framing: Framing,
    held: Option<Reservation>,
    /// Gone when the call is answered. What comes after that, a task of the stream works on.
    arrived: Weak<Mutex<Arrived>>,
}

impl Reader {
    /// Returns the next part of the body. At each call, all messages that were complete have been decoded.
    async fn next(&mut self) -> Result<Option<Bytes>, axum::BoxError> {
        let message = self.framing.messages;
        if self.held.as_ref().is_some_and(|held| held.message != message) {
            self.held = None;
        }
        if let (Some(bytes), None) = (self.framing.unfinished(), &self.held)
            && let Some(room) = self.intake.room(self.connection, bytes).await?
        {
            let until = Instant::now() + MAX_DURATION;
            self.held = Some(Reservation { message, until, _room: room });
        }
        let chunk = match &self.held {
            Some(held) => {
                timeout_at(held.until, self.frames.next()).await.map_err(|_| too_slow())?
            }
            None => self.frames.next().await,
        };
        let Some(chunk) = chunk.transpose()? else { return Ok(None) };
        let work = self.framing.read(&chunk);
        if long_work::is_long(work) && self.arrived.strong_count() > 0 {
            let turn = self.intake.turn().await?;
            if let Some(arrived) = self.arrived.upgrade() {
                *arrived.lock() = Some((work, turn));
            }
            yield_now().await; // the call is polled once more, and takes the turn
        }
        Ok(Some(chunk))
    }
}

/// Returns the size of the work on a message of so many bytes.
fn work(bytes: usize, is_packed: bool) -> usize {
    bytes.saturating_mul(if is_packed { GZIP_RATIO } else { DECODING })
}

/// How far a body has been read in its sequence of messages.
#[derive(Debug, Default)]
struct Framing {
    /// How many messages have ended.
    messages: u64,
    prefix: [u8; PREFIX],
    /// How much of the prefix has arrived.
    prefix_read: usize,
    /// How much of the message is still to come, if its prefix has arrived.
    to_come: usize,
}

impl Framing {
    /// Reads the next part. Returns the size of the work on the messages whose ends are in it.
    fn read(&mut self, mut chunk: &[u8]) -> usize {
        let mut ended = 0;
        loop {
            if self.prefix_read < PREFIX {
                let part = chunk.len().min(PREFIX - self.prefix_read);
                self.prefix[self.prefix_read..][..part].copy_from_slice(&chunk[..part]);
                self.prefix_read += part;
                chunk = &chunk[part..];
                if self.prefix_read < PREFIX {
                    return ended;
                }
                self.to_come = self.length();
            }
            let part = chunk.len().min(self.to_come);
            self.to_come -= part;
            chunk = &chunk[part..];
            if self.to_come > 0 {
                return ended;
            }
            ended += work(self.length(), self.prefix[0] != 0);
            self.messages += 1;
            self.prefix_read = 0;
        }
    }

    fn length(&self) -> usize {
        let [_, a, b, c, d] = self.prefix;
        u32::from_be_bytes([a, b, c, d]) as usize
    }

    /// Returns the size of the message of which a part has arrived.
    fn unfinished(&self) -> Option<usize> {
        (self.prefix_read == PREFIX).then(|| self.length())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, poll};
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;
    use crate::long_work::tests::keep_the_thread;

    fn message(length: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend_from_slice(&u32::try_from(length).unwrap().to_be_bytes());
        bytes.resize(PREFIX + length, 7);
        bytes
    }

    #[test]
    fn messages_are_separated_however_they_are_fragmented() {
        let bytes = [message(0), message(3), message(300), message(0), message(1)].concat();
        for size in 1..=bytes.len() {
            let mut framing = Framing::default();
            let ended: usize = bytes.chunks(size).map(|chunk| framing.read(chunk)).sum();
            assert_eq!(ended, (3 + 300 + 1) * DECODING);
            assert_eq!((framing.messages, framing.unfinished()), (5, None), "cut at {size}");
        }
        let mut framing = Framing::default();
        framing.read(&bytes[..20]);
        assert_eq!((framing.messages, framing.unfinished()), (2, Some(300)));
    }

    fn body(intake: &Intake) -> (mpsc::Sender<Result<Vec<u8>, axum::BoxError>>, BodyDataStream) {
        let (sender, receiver) = mpsc::channel(9);
        let body = Body::from_stream(ReceiverStream::new(receiver));
        let body = intake.meter_body(None, body, Weak::new());
        (sender, body.into_data_stream())
    }

    #[test]
    fn a_compressed_message_counts_as_what_it_may_hold() {
        let mut bytes = message(100);
        bytes[0] = 1;
        assert_eq!(Framing::default().read(&bytes), 100 * GZIP_RATIO);
    }

    /// As of ConsumeStream, whose requests another task reads when the call has been answered.
    #[tokio::test]
    async fn what_is_read_after_the_answer_takes_no_turn() {
        let intake = Intake::new(256 << 20, 16 << 20);
        let turns = intake.turns.available_permits();
        let large = message(1 << 20);
        let (sender, receiver) = mpsc::channel(9);
        let request = Request::new(Body::from_stream(ReceiverStream::new(receiver)));
        let body = intake.run(request, async |request: Request| request.into_body()).await;
        let mut parts = body.into_data_stream();
        for _ in 0..=turns {
            sender.send(Ok::<_, axum::BoxError>(large.clone())).await.unwrap();
            let part = timeout_at(Instant::now() + MAX_DURATION, parts.next()).await;
            assert_eq!(part.unwrap().unwrap().unwrap().len(), large.len());
        }
        assert_eq!(intake.turns.available_permits(), turns);
    }

    /// A turn ends with the poll in which the message is worked on, or with the call.
    #[tokio::test]
    async fn turns_are_given_back() {
        let intake = Intake::new(256 << 20, 16 << 20);
        let turns = intake.turns.available_permits();
        let large = message(1 << 20);
        let request = || Request::new(Body::from(large.clone()));
        let read = async |request: Request| {
            let mut parts = request.into_body().into_data_stream();
            parts.next().await.unwrap().unwrap();
            assert_eq!(intake.turns.available_permits(), turns - 1);
            yield_now().await;
            assert_eq!(intake.turns.available_permits(), turns);
        };
        intake.run(request(), read).await;
        let mut given_up = Box::pin(intake.run(request(), read));
        assert!(poll!(&mut given_up).is_pending());
        assert_eq!(intake.turns.available_permits(), turns - 1);
        drop(given_up);
        assert_eq!(intake.turns.available_permits(), turns);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn what_is_done_with_a_large_message_is_long_work() {
        let (sender, receiver) = mpsc::channel(9);
        let large = message(8 << 20);
        for part in large.chunks(2 << 20) {
            sender.try_send(Ok::<_, axum::BoxError>(part.to_vec())).unwrap();
        }
        drop(sender);
        let request = Request::new(Body::from_stream(ReceiverStream::new(receiver)));
        let length = large.len();
        let call = async move |request: Request| {
            let mut parts = request.into_body().into_data_stream();
            let mut received = 0;
            while received < length {
                received += parts.next().await.unwrap().unwrap().len();
            }
            keep_the_thread();
        };
        let intake = Intake::new(256 << 20, 16 << 20);
        tokio::spawn(async move { intake.run(request, call).await }).await.unwrap();
    }

    /// Messages that are declared and never sent leave room for those that come over other connections.
    #[tokio::test]
    async fn stalled_messages_do_not_hold_up_other_connections() {
        let intake = Intake::new(256 << 20, 16 << 20);
        let request = |port: u16, body| {
            let mut request = Request::new(body);
            let address = Some(([127, 0, 0, 1], port).into());
            request.extensions_mut().insert(Peer { address, ..Peer::default() });
            intake.meter(request, Weak::new()).into_body().into_data_stream()
        };
        let mut stalled = Vec::new();
        for _ in 0..16 {
            let prefix = Ok::<_, axum::BoxError>(message(16 << 20)[..10].to_vec());
            let frames = stream::iter([prefix]).chain(stream::pending());
            let mut body = request(1, Body::from_stream(frames));
            body.next().await.unwrap().unwrap();
            assert!(poll!(body.next()).is_pending());
            stalled.push(body);
        }
        let large = message(100 << 10);
        let frames = large.chunks(16 << 10).map(|part| Ok::<_, axum::BoxError>(part.to_vec()));
        let frames: Vec<_> = frames.collect();
        let mut other = request(2, Body::from_stream(stream::iter(frames)));
        let mut received = 0;
        while let Some(part) = other.next().now_or_never().expect("no wait") {
            received += part.unwrap().len();
        }
        assert_eq!(received, large.len());
    }

    /// Large messages are not read while others hold the room; small messages always are.
    #[tokio::test]
    async fn a_message_that_does_not_fit_waits_until_there_is_room() {
        let large = SMALL + 1;
        let intake = Intake::new(large + SMALL, 9);
        let (first, mut first_body) = body(&intake);
        let (second, mut second_body) = body(&intake);
        let (third, mut third_body) = body(&intake);
        for sender in [&first, &second] {
            let bytes = message(large);
            sender.send(Ok(bytes[..10].to_vec())).await.unwrap();
            sender.send(Ok(bytes[10..20].to_vec())).await.unwrap();
        }
        for body in [&mut first_body, &mut second_body] {
            body.next().await.unwrap().unwrap();
        }
        first_body.next().await.unwrap().unwrap();
        assert!(poll!(second_body.next()).is_pending(), "there is no room for a second one");
        third.send(Ok(message(SMALL))).await.unwrap();
        third_body.next().await.unwrap().unwrap();
        drop(first_body); // decoded, or refused
        second_body.next().await.unwrap().unwrap();
        drop((first, second));
    }

    /// Room that was taken for a message that does not arrive becomes free again.
    #[tokio::test(start_paused = true)]
    async fn a_message_that_does_not_arrive_frees_its_room() {
        let intake = Intake::new(10, 9);
        let (sender, mut stalled) = body(&intake);
        sender.send(Ok(message(10 * SMALL)[..10].to_vec())).await.unwrap();
        stalled.next().await.unwrap().unwrap();
        let error = stalled.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("took longer"), "{error}");
        assert!(stalled.next().await.is_none());
        assert_eq!(intake.budget.free(), 10);
    }
}
