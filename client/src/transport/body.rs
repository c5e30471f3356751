//! What is sent and what is received in a call.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::FutureExt;
use h2::{Reason, RecvStream, SendStream};
use http_body::{Body as _, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Status, body::Body};

use super::failure::{Unanswered, overdue};

/// What a call sends.
pub(super) enum Outgoing {
    /// Nothing of it has been read.
    Unread(Body),
    /// All of it is there.
    Whole(Bytes),
    /// It was a stream, and cannot be sent again.
    Gone,
}

/// The sending of a stream, which ends with the call.
#[derive(Debug)]
pub(super) struct Sending {
    _task: AbortOnDropHandle<()>,
    failed: Arc<OnceLock<Status>>,
}

impl Sending {
    /// Returns why the stream failed, if it did, for example because a message is too large. That has ended the call.
    pub(super) fn failure(&self) -> Option<Status> {
        self.failed.get().cloned()
    }
}

impl Outgoing {
    /// Returns true if it can be sent, perhaps again.
    pub(super) fn can_be_sent(&self) -> bool {
        !matches!(self, Self::Gone)
    }

    /// Sends it. If the call ends meanwhile, its answer says so.
    ///
    /// # Errors
    /// Of the body, for example that a message is too large.
    pub(super) fn send(&mut self, mut to: SendStream<Bytes>) -> Result<Option<Sending>, Status> {
        let bytes = match mem::replace(self, Self::Gone) {
            Self::Whole(bytes) => bytes,
            Self::Unread(mut body) => match begin(&mut body)? {
                (mut whole, true) => whole.pop().unwrap_or_default(),
                (there, false) => {
                    let failed = Arc::new(OnceLock::new());
                    let failure = Arc::clone(&failed);
                    let task = tokio::spawn(async move {
                        // If this fails, the call ends, and says why.
                        let _ = send_all(there, body, to, &failure).await;
                    });
                    return Ok(Some(Sending { _task: AbortOnDropHandle::new(task), failed }));
                }
            },
            Self::Gone => return Ok(None),
        };
        let _ = to.send_data(bytes.clone(), true);
        *self = Self::Whole(bytes);
        Ok(None)
    }
}

/// Takes what is there of a body, up to two messages, and returns whether that is all.
fn begin(body: &mut Body) -> Result<(Vec<Bytes>, bool), Status> {
    let mut there = Vec::new();
    // Two looks: a unary call has one message, and then its end.
    for _ in 0..2 {
        match next(body).now_or_never() {
            Some(Some(bytes)) => there.push(bytes?),
            Some(None) => return Ok((there, true)),
            None => break,
        }
    }
    Ok((there, false))
}

/// Returns the next bytes of a body.
async fn next(body: &mut Body) -> Option<Result<Bytes, Status>> {
    loop {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        match frame.map(Frame::into_data) {
            Ok(Ok(bytes)) => return Some(Ok(bytes)),
            Ok(Err(_)) => {} // trailers, which calls do not have
            Err(status) => return Some(Err(status)),
        }
    }
}

/// Sends a stream, no faster than the broker reads it. Ends the call if the stream fails, and notes why.
async fn send_all(
    there: Vec<Bytes>,
    mut rest: Body,
    mut to: SendStream<Bytes>,
    failure: &OnceLock<Status>,
) -> Result<(), h2::Error> {
    for bytes in there {
        send(&mut to, bytes).await?;
    }
    loop {
        let next = tokio::select! {
            next = next(&mut rest) => next,
            _ = poll_fn(|context| to.poll_reset(context)) => return Ok(()),
        };
        match next {
            Some(Ok(bytes)) => send(&mut to, bytes).await?,
            Some(Err(status)) => {
                let _ = failure.set(status);
                to.send_reset(Reason::CANCEL);
                return Ok(());
            }
            None => return to.send_data(Bytes::new(), true),
        }
    }
}

async fn send(to: &mut SendStream<Bytes>, bytes: Bytes) -> Result<(), h2::Error> {
    // No more than a sign of life: what is reserved and not used is kept from the other calls of the connection.
    to.reserve_capacity(1);
    while to.capacity() == 0 {
        match poll_fn(|context| to.poll_capacity(context)).await {
            Some(room) => _ = room?,
            None => return Ok(()), // the call has ended
        }
    }
    to.send_data(bytes, false)
}

/// The answer of a broker, as it arrives. The call ends when this is dropped.
#[derive(Debug)]
pub struct Received {
    from: RecvStream,
    has_data: bool,
    sending: Option<Sending>,
    /// When the call ends at the latest.
    deadline: Option<Instant>,
    /// Wakes the reader then. There is none until the reader has waited.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Received {
    pub(super) fn new(from: RecvStream, sending: Option<Sending>) -> Self {
        Self { from, has_data: true, sending, deadline: None, alarm: None }
    }

    /// Ends the call at its deadline.
    pub(super) fn until(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.has_data {
            match ready!(self.from.poll_data(context)) {
                Some(Ok(bytes)) => {
                    // It is about to be decoded: the broker may send as much again.
                    let _ = self.from.flow_control().release_capacity(bytes.len());
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error)) => return Poll::Ready(self.failed(&error)),
                None => self.has_data = false,
            }
        }
        Poll::Ready(match ready!(self.from.poll_trailers(context)) {
            Ok(trailers) => trailers.map(|trailers| Ok(Frame::trailers(trailers))),
            Err(error) => self.failed(&error),
        })
    }

    /// Returns how a body ends whose call ended with this error.
    fn failed<T>(&self, error: &h2::Error) -> Option<Result<T, Status>> {
        if let Some(failure) = self.sending.as_ref().and_then(Sending::failure) {
            return Some(Err(failure));
        }
        // A broker that has said all may end the call before it has read all.
        let is_end = error.is_reset() && error.reason() == Some(Reason::NO_ERROR);
        (!is_end).then(|| Err(Unanswered::amid(error).into()))
    }
}

impl http_body::Body for Received {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(next) = self.poll_next(context) {
            return Poll::Ready(next);
        }
        let Some(deadline) = self.deadline else { return Poll::Pending };
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        ready!(alarm.as_mut().poll(context));
        Poll::Ready(Some(Err(overdue())))
    }

    fn is_end_stream(&self) -> bool {
        self.from.is_end_stream()
    }
}
