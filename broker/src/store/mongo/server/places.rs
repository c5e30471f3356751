//! The database together with places for operations: no more operations use the driver at a time than it may have connections,
//! and all others wait here.
//!
//! They must not wait inside the driver. It gives its connections to those who wait in the order in which they came, looks at
//! one of them whenever an operation comes or a connection is returned, and does not notice before that one has gone. But
//! whoever runs into a time limit goes. After a server was slow for seconds, thousands of them stand in the way, and then
//! connections lie idle: each operation that comes makes the driver look at one that has gone, and waits behind all others, until
//! it goes too. With the dispatchers of thousands of queues this lasted for minutes, without any work for the server.

use std::{ops::Deref, sync::Arc};

use mongodb::{
    ClientSession, Database,
    bson::{Document, RawDocumentBuf},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::store::{
    Result,
    mongo::server::{error::unavailable, group_commit::WRITE_LIMIT, sessions::Sessions},
};

/// One connection in so many is left to what the driver does by itself: it closes cursors and ends sessions.
const SPARE: usize = 8;
/// The message of the error for an operation that has not begun.
pub(crate) const NO_PLACE: &str = "too many operations wait for MongoDB";

/// A database, the places of its operations, and their sessions. Clones share them.
#[derive(Clone)]
pub(crate) struct Db {
    database: Database,
    places: Arc<Semaphore>,
    sessions: Sessions,
}

/// The right to use a connection. Whoever has a place must not wait for another one.
pub(crate) type Place = OwnedSemaphorePermit;

impl Db {
    /// Returns a database whose client may have so many connections to a server.
    pub(crate) fn new(database: Database, connections: u32) -> Self {
        let connections = connections as usize;
        let places = (connections - connections / SPARE).max(1);
        let places = Arc::new(Semaphore::new(places));
        Self { database, places, sessions: Sessions::default() }
    }

    /// Returns another database of the same servers, whose operations share the places.
    pub(crate) fn sibling(&self, name: &str) -> Self {
        Self { database: self.client().database(name), ..self.clone() }
    }

    /// Waits for a place, in the order of the calls.
    ///
    /// # Errors
    /// If there is none within [`WRITE_LIMIT`].
    pub(crate) async fn place(&self) -> Result<Place> {
        match timeout(WRITE_LIMIT, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            _ => Err(unavailable(NO_PLACE)), // the semaphore is never closed
        }
    }

    /// Runs a command that is not part of a transaction.
    pub(crate) async fn run(&self, command: RawDocumentBuf) -> mongodb::error::Result<Document> {
        self.in_session(async |it| self.run_raw_command(command).session(it).await).await
    }

    /// Runs an operation, which must not be part of a transaction, in one of the sessions.
    pub(crate) async fn in_session<T>(
        &self,
        operation: impl AsyncFnOnce(&mut ClientSession) -> mongodb::error::Result<T>,
    ) -> mongodb::error::Result<T> {
        self.sessions.with(self.client(), operation).await
    }
}

impl Deref for Db {
    type Target = Database;

    fn deref(&self) -> &Database {
        &self.database
    }
}
