//! Calls to one address: over one HTTP/2 connection, which is made when it is needed and again when it has ended.
//!
//! A call goes from its task to the task of the connection and back, with no other task between.

mod body;
mod connection;
mod endpoint;
mod failure;

use std::{
    future::Future,
    mem,
    sync::{Arc, Weak},
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use sluicegate_proto::deadline::deadline;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response, Uri, Version, request},
};

pub use self::body::Received;
use self::{
    body::{Outgoing, Sending},
    failure::{Unanswered, overdue},
};
pub(crate) use self::{
    connection::Connection,
    endpoint::{Endpoint, Tls},
    failure::{is_broken, is_unsent},
};

/// How often a call is made again, on another connection, because its connection ended before the call was taken.
const TRIES: u32 = 3;

/// What carries the calls to one address.
#[derive(Debug)]
pub(crate) struct Channel {
    endpoint: Arc<Endpoint>,
    state: Arc<Mutex<State>>,
}

/// A connection that is being made, for all calls that wait for it.
type Making = Shared<BoxFuture<'static, Result<Connection, Status>>>;

#[derive(Debug)]
enum State {
    Closed,
    Opening(Making),
    Open(Connection),
}

impl Channel {
    /// Returns a channel that connects when it is first used.
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint: Arc::new(endpoint), state: Arc::new(Mutex::new(State::Closed)) }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Makes a call, and returns when its answer begins.
    ///
    /// # Errors
    /// Those of which [`is_unsent`] says so took no effect. If the time of the call is over: `DEADLINE_EXCEEDED`, from the answer too once
    /// it has begun. If the stream that it sends fails: the failure of the stream.
    pub(crate) async fn call(&self, call: Request<Body>) -> Result<Response<Received>, Status> {
        let (head, body) = call.into_parts();
        let deadline = deadline(&head.headers).and_then(|time| Instant::now().checked_add(time));
        let answered = self.answer(self.addressed(head), body);
        let Some(deadline) = deadline else { return answered.await };
        let answer = timeout_at(deadline, answered).await.unwrap_or_else(|_| Err(overdue()))?;
        Ok(answer.map(|received| received.until(deadline)))
    }

    async fn answer(&self, head: request::Parts, body: Body) -> Result<Response<Received>, Status> {
        let mut outgoing = Outgoing::Unread(body);
        let mut tries = 0;
        loop {
            tries += 1;
            let connection = self.connection().await?;
            let unanswered = match connection.begin(Request::from_parts(head.clone(), ())).await {
                Err(unanswered) => unanswered,
                Ok((answer, to)) => {
                    let sending = outgoing.send(to)?;
                    match answer.await {
                        Ok(answer) => return Ok(answer.map(|from| Received::new(from, sending))),
                        Err(error) => {
                            if let Some(failure) = sending.as_ref().and_then(Sending::failure) {
                                return Err(failure);
                            }
                            Unanswered::by(&error)
                        }
                    }
                }
            };
            if !unanswered.is_unsent || tries == TRIES || !outgoing.can_be_sent() {
                return Err(unanswered.into());
            }
            self.leave(&connection);
        }
    }

    /// Completes the head of a call, which has only its path, with the broker to which it goes.
    fn addressed(&self, mut head: request::Parts) -> request::Parts {
        let mut parts = mem::take(&mut head.uri).into_parts();
        parts.scheme = Some(self.endpoint.scheme.clone());
        parts.authority = Some(self.endpoint.authority.clone());
        head.uri = Uri::from_parts(parts).unwrap_or_default();
        head.extensions.clear();
        head.version = Version::HTTP_2;
        head
    }

    /// Returns the connection, made if need be.
    async fn connection(&self) -> Result<Connection, Status> {
        let (opening, task) = match &mut *self.state.lock() {
            State::Open(connection) => return Ok(connection.clone()),
            State::Opening(opening) => (opening.clone(), None),
            state @ State::Closed => {
                let (opening, task) = self.open();
                *state = State::Opening(opening.clone());
                (opening, Some(task))
            }
        };
        // Not under the lock: a runtime that ends drops the task at once, which takes the lock.
        task.map(tokio::spawn);
        opening.await
    }

    /// Returns a connection that is being made, and the task that makes it: also if the call that wants it is given up.
    fn open(&self) -> (Making, impl Future<Output = ()> + Send + 'static) {
        let endpoint = Arc::clone(&self.endpoint);
        let mut opening = Opening { state: Arc::downgrade(&self.state), opened: None };
        let (done, opened) = oneshot::channel();
        let task = async move {
            let opened = Connection::open(&endpoint).await;
            let opened = opened.map_err(|error| Unanswered::before(&endpoint, &*error).into());
            opening.opened = opened.as_ref().ok().cloned();
            drop(opening);
            let _ = done.send(opened); // perhaps nobody waits any more
        };
        let opened = opened.map(|opened| {
            opened.unwrap_or_else(|_| Err(Status::unavailable("the client's runtime has ended")))
        });
        (opened.boxed().shared(), task)
    }

    /// Uses a connection no more, for it takes no calls.
    fn leave(&self, left: &Connection) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Open(connection) if connection.is(left)) {
            *state = State::Closed;
        }
    }
}

/// The making of a connection, after which the channel is open, or else closed: also if the task of this ends before.
struct Opening {
    state: Weak<Mutex<State>>,
    opened: Option<Connection>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade() {
            *state.lock() = self.opened.take().map_or(State::Closed, State::Open);
        }
    }
}

#[cfg(test)]
mod tests;
