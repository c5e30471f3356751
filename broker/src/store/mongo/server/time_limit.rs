//! Time limits for every wait for the server. The driver has no time-out of its own: an operation whose connection
//! leads nowhere would wait until the operating system gives up the connection, which takes minutes, and for ever if
//! the server is frozen. The driver closes the connection of an operation that is dropped.

use std::{future::IntoFuture, io, time::Duration};

use tokio::time::timeout;

use crate::store::{
    Result, StoreError,
    mongo::server::{
        error::{failed, passes, unavailable},
        group_commit::WRITE_LIMIT,
        places::{Db, NO_PLACE},
    },
};

/// Time after which an operation that may be repeated without harm is sent again over another connection, because its
/// own may lead nowhere. Twice what a busy server takes at worst.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Time limit of a statement that changes or removes any number of items.
const BULK_LIMIT: Duration = Duration::from_mins(5);

/// The message of the error for an operation without an answer.
pub(crate) const NO_ANSWER: &str = "MongoDB did not answer in time";

/// Runs an operation of the driver. If it is not answered in time, its outcome is unknown, as after a lost connection.
pub(crate) async fn in_time<T>(
    db: &Db,
    operation: impl IntoFuture<Output = mongodb::error::Result<T>>,
) -> mongodb::error::Result<T> {
    within(db, WRITE_LIMIT, operation).await
}

/// Like [`in_time`], for statements that change or remove any number of items.
pub(crate) async fn bulk_in_time<T>(
    db: &Db,
    operation: impl IntoFuture<Output = mongodb::error::Result<T>>,
) -> mongodb::error::Result<T> {
    within(db, BULK_LIMIT, operation).await
}

/// Runs an operation of the driver for at most `limit`, once it has a place.
pub(crate) async fn within<T>(
    db: &Db,
    limit: Duration,
    operation: impl IntoFuture<Output = mongodb::error::Result<T>>,
) -> mongodb::error::Result<T> {
    let late = |message| Err(io::Error::new(io::ErrorKind::TimedOut, message).into());
    let Ok(_place) = db.place().await else { return late(NO_PLACE) };
    timeout(limit, operation.into_future()).await.unwrap_or_else(|_| late(NO_ANSWER))
}

/// Runs a read, and repeats it once over another connection if it is not answered within [`ANSWER_LIMIT`] or fails with
/// an error that may pass.
pub(crate) async fn read_in_time<T, E, F>(db: &Db, read: impl Fn() -> F) -> Result<T>
where
    E: Into<ReadError>,
    F: IntoFuture<Output = Result<T, E>>,
{
    let _place = db.place().await?;
    if let Ok(first) = timeout(ANSWER_LIMIT, read().into_future()).await {
        match first.map_err(Into::into) {
            Err(ReadError::Driver(error)) if passes(&error) => {}
            result => return result.map_err(ReadError::into_store_error),
        }
    }
    match timeout(WRITE_LIMIT, read().into_future()).await {
        Ok(second) => second.map_err(|error| error.into().into_store_error()),
        Err(_) => Err(unavailable(NO_ANSWER)),
    }
}

/// Why a read failed.
pub(crate) enum ReadError {
    Driver(mongodb::error::Error),
    Store(StoreError),
}

impl ReadError {
    fn into_store_error(self) -> StoreError {
        match self {
            Self::Driver(error) => failed(error),
            Self::Store(error) => error,
        }
    }
}

impl From<mongodb::error::Error> for ReadError {
    fn from(error: mongodb::error::Error) -> Self {
        Self::Driver(error)
    }
}

impl From<StoreError> for ReadError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
