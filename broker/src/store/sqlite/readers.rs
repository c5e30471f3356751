//! Connections that read beside the writer, on the runtime's blocking threads.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{
    super::{Result, StoreError},
    checksum::is_corruption,
    failure::failed,
    schema::StoreFile,
    tx::View,
};
use crate::domain::Timestamp;

/// Limit of concurrent reads. Each has a connection with a cache of its own.
const MAX_READERS: usize = 4;

/// A small pool of read-only connections.
pub(super) struct Readers {
    pool: Arc<Pool>,
    tag: [u8; 4],
    room: Arc<Semaphore>,
    /// Set when a read meets damage.
    suspected: Arc<AtomicBool>,
}

/// Fields are dropped in this order: connections are closed before the file is released.
struct Pool {
    idle: Mutex<Vec<Connection>>,
    file: Arc<StoreFile>,
}

impl Readers {
    pub(super) fn new(file: Arc<StoreFile>, tag: [u8; 4], suspected: Arc<AtomicBool>) -> Self {
        let room = Arc::new(Semaphore::new(MAX_READERS));
        Self { pool: Arc::new(Pool { idle: Mutex::default(), file }), tag, room, suspected }
    }

    /// Runs `work`, which reads one consistent state of the data.
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
        let (pool, tag) = (self.pool.clone(), self.tag);
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let conn = pool.idle.lock().pop();
            let conn = conn.map_or_else(|| pool.file.open_reader(), Ok)?;
            conn.execute_batch("BEGIN")?;
            let read = work(&View { conn: &conn, now, tag });
            conn.execute_batch("COMMIT")?;
            pool.idle.lock().push(conn); // after an error it is dropped instead
            read
        });
        let read = reading.await.map_err(|e| internal(e.to_string()))?;
        if read.as_ref().is_err_and(is_corruption) {
            self.suspected.store(true, Ordering::Relaxed);
        }
        read.map_err(failed)
    }
}
