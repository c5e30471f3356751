//! Transactions: when an attempt is repeated, and how a commit with an unknown outcome is repeated.

use std::{
    future::IntoFuture,
    ops::{Deref, DerefMut},
    time::{Duration, Instant},
};

use mongodb::{
    ClientSession,
    error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT},
};
use sluicegate_proto::backoff::Backoff;
use tokio::time::timeout;

use crate::store::{
    Result, StoreError,
    mongo::server::{
        error::{describe, failed, is_duplicate_key, unavailable},
        group_commit::WRITE_LIMIT,
        places::{Db, Place},
        time_limit::{ANSWER_LIMIT, NO_ANSWER},
    },
};

/// Why an attempt failed.
pub(crate) enum Failure {
    /// A conflict with another operation: the whole attempt may be repeated.
    Conflict(StoreError),
    /// A repetition would fail too.
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

/// Pauses between attempts of an operation that had a conflict.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(3), Duration::from_millis(300));

/// Growing pauses between attempts, within the time limit of an operation.
pub(crate) struct Patience {
    until: Instant,
    failures: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Self { until: Instant::now() + WRITE_LIMIT / 2, failures: 0 }
    }

    /// Waits before the next attempt, or returns the error if no time is left for one.
    pub(crate) async fn next(&mut self, error: StoreError) -> Result<()> {
        if Instant::now() >= self.until {
            return Err(error);
        }
        tokio::time::sleep(BACKOFF.delay(self.failures)).await;
        self.failures += 1;
        Ok(())
    }

    /// Handles the end of an attempt. Returns its result, or `None` after a pause if the attempt is to be repeated.
    /// Aborts the transaction of a failed attempt.
    pub(crate) async fn after<T>(
        &mut self,
        transaction: &mut Transaction,
        outcome: Result<T, Failure>,
    ) -> Result<Option<T>> {
        let failure = match outcome {
            Ok(done) => return Ok(Some(done)),
            Err(failure) => failure,
        };
        abort(transaction).await;
        match failure {
            Failure::Final(error) => Err(error),
            Failure::Conflict(error) => self.next(error).await.map(|()| None),
        }
    }
}

/// A transaction, which has a place for all of its statements until it is committed or aborted. Within it nothing else may wait for
/// a place.
pub(crate) struct Transaction {
    session: ClientSession,
    place: Option<Place>,
}

impl Deref for Transaction {
    type Target = ClientSession;

    fn deref(&self) -> &ClientSession {
        &self.session
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut ClientSession {
        &mut self.session
    }
}

/// Begins a transaction.
pub(crate) async fn begin(db: &Db) -> Result<Transaction> {
    let place = Some(db.place().await?);
    let mut session = db.client().start_session().await.map_err(failed)?;
    session.start_transaction().await.map_err(failed)?;
    Ok(Transaction { session, place })
}

/// Commits the transaction, and repeats the commit while its outcome is unknown.
pub(crate) async fn commit(transaction: &mut Transaction) -> Result<(), Failure> {
    let mut patience = Patience::new();
    let mut limit = ANSWER_LIMIT;
    loop {
        let unknown = match timeout(limit, transaction.commit_transaction().into_future()).await {
            Ok(Ok(())) => {
                transaction.place = None;
                return Ok(());
            }
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

/// Runs an attempt at a transaction. An attempt that is not done in time has an unknown outcome. Its transaction must
/// be [aborted](abort), and ends by itself if the abort does not reach the server.
pub(crate) async fn attempt_in_time<T>(
    attempt: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let late = || Failure::Final(unavailable(NO_ANSWER));
    timeout(WRITE_LIMIT, attempt).await.unwrap_or_else(|_| Err(late()))
}

/// Ends a transaction that was not committed. Without this the server ends it later.
pub(crate) async fn abort(transaction: &mut Transaction) {
    let _ = timeout(ANSWER_LIMIT, transaction.abort_transaction().into_future()).await;
    transaction.place = None;
}
