//! Transactions: when an attempt is repeated, and how a commit whose outcome is unknown is.

use std::{
    future::IntoFuture,
    time::{Duration, Instant},
};

use mongodb::{
    Client, ClientSession,
    error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT},
};
use sluicegate_proto::backoff::Backoff;
use tokio::time::timeout;

use crate::store::{
    Result, StoreError,
    mongo::server::{
        error::{describe, failed, is_duplicate_key, unavailable},
        group_commit::WRITE_LIMIT,
        time_limit::{ANSWER_LIMIT, NO_ANSWER, within},
    },
};

/// Why an attempt did not end well.
pub(crate) enum Failure {
    /// Another was in the way: all of it may be tried again.
    Conflict(StoreError),
    /// It will not do.
    Final(StoreError),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let conflict = error.contains_label(TRANSIENT_TRANSACTION_ERROR)
            || is_duplicate_key(&error)
            || matches!(error.kind.as_ref(), ErrorKind::Command(c) if c.code == 112);
        if conflict { Self::Conflict(failed(error)) } else { Self::Final(failed(error)) }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Final(error)
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Conflict(error) | Failure::Final(error) => error,
        }
    }
}

/// Pauses between attempts of an operation that was in another's way.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(3), Duration::from_millis(300));

/// Pauses that grow between attempts, within the time an operation has.
pub(crate) struct Patience {
    until: Instant,
    failures: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Self { until: Instant::now() + WRITE_LIMIT / 2, failures: 0 }
    }

    /// Waits before the next attempt; the error if there is none.
    pub(crate) async fn next(&mut self, error: StoreError) -> Result<()> {
        if Instant::now() >= self.until {
            return Err(error);
        }
        tokio::time::sleep(BACKOFF.delay(self.failures)).await;
        self.failures += 1;
        Ok(())
    }

    /// Sees an attempt off. Returns what it came to, or `None` after a pause if the attempt is to be repeated. The
    /// transaction of an attempt that failed is aborted.
    pub(crate) async fn after<T>(
        &mut self,
        session: &mut ClientSession,
        outcome: Result<T, Failure>,
    ) -> Result<Option<T>> {
        let failure = match outcome {
            Ok(done) => return Ok(Some(done)),
            Err(failure) => failure,
        };
        abort(session).await;
        match failure {
            Failure::Final(error) => Err(error),
            Failure::Conflict(error) => self.next(error).await.map(|()| None),
        }
    }
}

/// Begins a transaction.
pub(crate) async fn begin(client: &Client) -> Result<ClientSession> {
    let mut session = client.start_session().await.map_err(failed)?;
    session.start_transaction().await.map_err(failed)?;
    Ok(session)
}

/// Commits the transaction; repeats that while its outcome is unknown.
pub(crate) async fn commit(session: &mut ClientSession) -> Result<(), Failure> {
    let mut patience = Patience::new();
    let mut limit = ANSWER_LIMIT;
    loop {
        let unknown = match timeout(limit, session.commit_transaction().into_future()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => {
                unavailable(describe(&error))
            }
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {
                limit = WRITE_LIMIT;
                unavailable(NO_ANSWER)
            }
        };
        patience.next(unknown).await.map_err(Failure::Final)?;
    }
}

/// Awaits an attempt at a transaction. One that is not done in time has an unknown outcome; its transaction is to be
/// [aborted](abort), and ends by itself if that does not reach the server.
pub(crate) async fn attempt_in_time<T>(
    attempt: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let late = || Failure::Final(unavailable(NO_ANSWER));
    timeout(WRITE_LIMIT, attempt).await.unwrap_or_else(|_| Err(late()))
}

/// Ends a transaction that was not committed. It ends by itself otherwise, only later.
pub(crate) async fn abort(session: &mut ClientSession) {
    let _ = within(ANSWER_LIMIT, session.abort_transaction()).await;
}
