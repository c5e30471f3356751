//! Connections that read beside the writer, on the runtime's blocking threads.

use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{
    super::{Result, StoreError},
    schema::StoreFile,
    writer::{View, failed},
};
use crate::domain::Timestamp;

/// Reads at once; each has a connection with a cache of its own.
const MAX_READERS: usize = 4;

/// A small pool of read-only connections.
pub(super) struct Readers {
    file: Arc<StoreFile>,
    tag: [u8; 4],
    idle: Arc<Mutex<Vec<Connection>>>,
    room: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn new(file: Arc<StoreFile>, tag: [u8; 4]) -> Self {
        let room = Arc::new(Semaphore::new(MAX_READERS));
        Self { file, tag, idle: Arc::default(), room }
    }

    /// Has `work` read, all in one state of the data.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        now: Timestamp,
        work: impl FnOnce(&View<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let internal = |reason: String| StoreError::Internal {
            reason: format!("reading: {reason}"),
            source: None,
        };
        let room = self.room.clone();
        let permit = room.acquire_owned().await.map_err(|e| internal(e.to_string()))?;
        let (file, idle, tag) = (self.file.clone(), self.idle.clone(), self.tag);
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let conn = idle.lock().pop();
            let conn = conn.map_or_else(|| file.open_reader(), Ok)?;
            conn.execute_batch("BEGIN")?;
            let read = work(&View { conn: &conn, now, tag });
            conn.execute_batch("COMMIT")?;
            idle.lock().push(conn); // after an error it is dropped instead
            read
        });
        reading.await.map_err(|e| internal(e.to_string()))?.map_err(failed)
    }
}
