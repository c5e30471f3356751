//! Bounds how much of answers is held in memory that clients do not read.
//!
//! HTTP/2 sends no more of an answer than its client has made room for, and clients may make room for nothing. An answer
//! of megabytes would then stay in memory for as long as its connection lives, and a connection carries thousands of
//! calls. So the connection gets a large message in small parts, and the rest of the message waits here, where the rest is
//! counted and can be dropped:
//!
//! * An answer of which nothing is read for a while is dropped, unless it is a message on a stream: consumers that are
//!   busy read nothing either.
//! * When all messages that wait take more than a budget, the one of which nothing was read for the longest is dropped,
//!   among those of the peer that has left the most. A peer to which that happens again and again gets large answers one at
//!   a time, and more and more slowly: making them costs more than asking for them.
//!
//! The call of a message that was dropped ends. Its client gets RST_STREAM with ENHANCE_YOUR_CALM, which gRPC translates
//! into RESOURCE_EXHAUSTED: there is no room for a status behind half of a message.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Weak, atomic::Ordering},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Bytes, HttpBody},
    http::Response,
};
use bytes::Buf;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    sync::MutexGuard,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;

use super::concurrency::CallPermit;
use crate::{
    access::{Peer, Slowdown},
    config::Bounds,
    metrics::Metrics,
    tasks::Tasks,
};

/// Messages are handed to the connection in parts of this size: one frame of HTTP/2.
const PART: usize = 16 << 10;
/// How many times answers are looked at within the time in which they must be read.
const LOOKS: u32 = 4;
/// How many answers of a peer may be dropped in a minute for lack of room, before its next large ones wait.
const FORGIVEN: u32 = 8;

/// What was not read of all answers.
pub(super) struct Answers {
    /// Most bytes.
    budget: usize,
    /// How long an answer may go unread that is not on a stream.
    patience: Duration,
    unread: Mutex<Unread>,
    /// How often answers of a peer were dropped for lack of room.
    dropped: Slowdown,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Unread {
    bytes: usize,
    /// How often something was put in or taken out.
    steps: u64,
    /// Those of which nothing was read for the longest time come first.
    messages: BTreeMap<u64, Message>,
}

/// A message of which a part was not read.
struct Message {
    bytes: usize,
    since: Instant,
    is_on_stream: bool,
    peer: Peer,
    answer: Weak<Mutex<Answer>>,
}

impl Answers {
    /// Returns answers within these bounds. A task of its own drops what is not read in time, until `stop` is cancelled.
    pub(super) fn new(
        bounds: &Bounds,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let answers = Arc::new(Self {
            budget: bounds.max_unread_bytes,
            patience: bounds.unread_timeout,
            unread: Mutex::default(),
            dropped: Slowdown::new(FORGIVEN),
            metrics,
        });
        let watched = Arc::downgrade(&answers);
        tasks.spawn(stop.run_until_cancelled_owned(async move {
            while let Some(answers) = watched.upgrade() {
                let pause = answers.patience / LOOKS;
                answers.drop_left();
                drop(answers);
                sleep(pause).await;
            }
        }));
        answers
    }

    /// Waits until a large answer may be made for this peer, if many of its answers were dropped for lack of room. Then no other is made
    /// for it until what this returns is dropped.
    pub(super) async fn turn<'a>(&self, peer: &'a Peer) -> Option<MutexGuard<'a, ()>> {
        let network = peer.network()?;
        if self.dropped.delay(network).is_zero() {
            return None;
        }
        let turn = peer.usage.turn.lock().await;
        sleep(self.dropped.delay(network)).await;
        Some(turn)
    }

    /// Returns the same response, whose messages are counted while they are not read. The permit is held until the end of
    /// the response.
    pub(super) fn hold(
        self: &Arc<Self>,
        response: Response<Body>,
        is_on_stream: bool,
        peer: &Peer,
        permit: Option<CallPermit>,
    ) -> Response<AnswerBody> {
        let peer = peer.clone();
        response.map(|body| {
            let answer = Answer { body: Some(body), rest: Bytes::new(), number: None };
            let answer = Arc::new(Mutex::new(answer));
            let answers = Arc::clone(self);
            AnswerBody { answers, answer, is_on_stream, peer, _permit: permit }
        })
    }

    /// Counts what is left of a message that was counted under `number`. Returns its new number if anything is left, and
    /// messages to end for it, once the lock of this answer is released.
    fn note(
        &self,
        number: Option<u64>,
        left: usize,
        body: &AnswerBody,
    ) -> (Option<u64>, Vec<Message>) {
        let mut unread = self.unread.lock();
        unread.remove(number);
        if left == 0 {
            self.metrics.unread_bytes(unread.bytes);
            return (None, Vec::new());
        }
        let number = unread.add(Message {
            bytes: left,
            since: Instant::now(),
            is_on_stream: body.is_on_stream,
            peer: body.peer.clone(),
            answer: Arc::downgrade(&body.answer),
        });
        let mut too_many = Vec::new();
        while unread.bytes > self.budget
            && let Some(worst) = unread.worst(number)
        {
            too_many.extend(unread.remove(Some(worst)));
        }
        for network in too_many.iter().filter_map(|message| message.peer.network()) {
            self.dropped.failed(network);
        }
        self.metrics.unread_bytes(unread.bytes);
        (Some(number), too_many)
    }

    /// Drops answers that were left.
    fn drop_left(&self) {
        let mut unread = self.unread.lock();
        let is_left = |(number, message): (&u64, &Message)| {
            (!message.is_on_stream && message.since.elapsed() >= self.patience).then_some(*number)
        };
        let left: Vec<u64> = unread.messages.iter().filter_map(is_left).collect();
        let left: Vec<_> =
            left.into_iter().filter_map(|number| unread.remove(Some(number))).collect();
        self.metrics.unread_bytes(unread.bytes);
        drop(unread);
        end(&left, "nothing of them was read for too long");
    }
}

/// Ends the calls of messages that are no longer counted. Their locks must be free.
fn end(messages: &[Message], reason: &str) {
    if messages.is_empty() {
        return;
    }
    tracing::debug!(count = messages.len(), reason, "answers that nobody reads are dropped");
    for message in messages {
        let Some(answer) = message.answer.upgrade() else { continue };
        let mut answer = answer.lock();
        let ended = (answer.body.take(), std::mem::take(&mut answer.rest));
        drop(answer);
        drop(ended); // which does more than free memory
    }
}

impl Unread {
    fn add(&mut self, message: Message) -> u64 {
        self.steps += 1;
        self.bytes += message.bytes;
        message.peer.usage.unread_bytes.fetch_add(message.bytes, Ordering::Relaxed);
        self.messages.insert(self.steps, message);
        self.steps
    }

    fn remove(&mut self, number: Option<u64>) -> Option<Message> {
        let message = self.messages.remove(&number?)?;
        self.bytes -= message.bytes;
        message.peer.usage.unread_bytes.fetch_sub(message.bytes, Ordering::Relaxed);
        Some(message)
    }

    /// Returns the message to drop next: of the peer that has left the most, the one that was left the longest; never the one
    /// that has just been added.
    fn worst(&self, added: u64) -> Option<u64> {
        let others = self.messages.iter().filter(|(number, _)| **number != added);
        let left_by_peer =
            |message: &Message| message.peer.usage.unread_bytes.load(Ordering::Relaxed);
        // Of several that are equal, the last one is returned, and the oldest is wanted.
        others.rev().max_by_key(|(_, message)| left_by_peer(message)).map(|(number, _)| *number)
    }
}

/// One answer, on its way to the connection.
struct Answer {
    /// `None` when the answer was dropped.
    body: Option<Body>,
    /// What is left of its last message.
    rest: Bytes,
    /// The number under which that is counted.
    number: Option<u64>,
}

/// What is sent of an answer.
pub(crate) struct AnswerBody {
    answers: Arc<Answers>,
    answer: Arc<Mutex<Answer>>,
    is_on_stream: bool,
    peer: Peer,
    _permit: Option<CallPermit>,
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let mut answer = self.answer.lock();
        let Answer { body, rest, number } = &mut *answer;
        let Some(body) = body else {
            return Poll::Ready(Some(Err(h2::Error::from(h2::Reason::ENHANCE_YOUR_CALM).into())));
        };
        if rest.is_empty() {
            match ready!(Pin::new(body).poll_frame(context)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.len() > PART => *rest = data,
                    Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
            }
        }
        let part = if rest.len() > PART {
            // A copy, because a slice would keep the whole message in memory while the connection holds this part of it.
            let part = Bytes::copy_from_slice(&rest[..PART]);
            rest.advance(PART);
            part
        } else {
            std::mem::take(rest)
        };
        let left = rest.len();
        let (counted, too_many) = self.answers.note(number.take(), left, &self);
        *number = counted;
        drop(answer);
        end(&too_many, "there are too many");
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        let answer = self.answer.lock();
        answer.rest.is_empty() && answer.body.as_ref().is_some_and(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let answer = self.answer.lock();
        match &answer.body {
            Some(body) if answer.rest.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        let Some(number) = self.answer.lock().number.take() else { return };
        let mut unread = self.answers.unread.lock();
        unread.remove(Some(number));
        self.answers.metrics.unread_bytes(unread.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn large_answers_of_a_peer_that_leaves_them_are_made_one_at_a_time() {
        let (metrics, tasks) = (Arc::new(Metrics::new()), Tasks::default());
        let answers = Answers::new(&Bounds::default(), metrics, &tasks, CancellationToken::new());
        let address = Some("192.0.2.1:7400".parse().unwrap());
        let peer = Peer { address, ..Peer::default() };
        assert!(answers.turn(&peer).await.is_none(), "it has left nothing");
        for _ in 0..=FORGIVEN {
            answers.dropped.failed(peer.network().unwrap());
        }
        let first = answers.turn(&peer).await;
        assert!(first.is_some());
        let mut second = pin!(answers.turn(&peer));
        assert!(timeout(Duration::from_secs(10), &mut second).await.is_err());
        drop(first);
        assert!(second.await.is_some());
    }
}
