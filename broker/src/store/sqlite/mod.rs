//! The store in one SQLite file. It needs no server; each file has one broker.
//!
//! * `contract`: the traits of a store; each method calls the function of the module that does it.
//! * `schema`: the tables, opening and locking the file; `migrations`: files of earlier versions.
//! * `writer`: the one thread that writes, and its group commit; `readers`: connections beside it; `tx`: what both pass
//!   to their calls.
//! * `checksum`, `damage`: items that are no longer what was stored; `definitions`: files whose tables are not as they
//!   were created; `indexes`: rebuilt where they are damaged.
//! * `push`, `reserve`, `settle`: the hot path. `runs`: leases of many items at once. `order`: ordering keys, and how items leave a queue. `payloads`: large ones.
//! * `browse`, `admin`, `queues`, `schedules`, `templates`, `operations`: for administrators. `sweep`: removes what has expired.
//!
//! The id of an item consists of the file's tag and the item's row, so that a lookup is one step in the table itself,
//! and the order of arrival is the order of rows.

mod admin;
mod beside;
mod browse;
mod check;
mod checksum;
mod clock;
mod contract;
mod damage;
mod definitions;
mod deletions;
mod failure;
mod figures;
mod indexes;
mod late;
mod mark;
mod migrations;
mod operations;
mod order;
mod payloads;
mod push;
mod queues;
mod readers;
mod receipt_keys;
mod repair;
mod reserve;
mod room;
mod rows;
mod runs;
mod schedules;
mod schema;
mod settle;
mod space;
mod sweep;
mod templates;
#[cfg(test)]
pub(crate) mod tests;
mod tx;
mod writer;

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use rusqlite::Connection;
use tokio::sync::Semaphore;

use self::{
    admin::{Before, CHUNK, Purge},
    deletions::Deletions,
    failure::failed,
    late::LateArrivals,
    readers::Readers,
    schema::StoreFile,
    tx::{Tx, View},
    writer::{Kind, Station, Writer},
};
pub use self::{
    check::{Report, check},
    repair::repair,
};
use super::{Result, StoreError};
use crate::domain::{Clock, Queue};

/// Most pages of items that are read at a time beside the writer.
const PAGES_BESIDE: usize = 2;
/// Pause between the writer's sweeps for expired items.
const SWEEP_EVERY: Duration = Duration::from_secs(15);

/// Durable queues in an SQLite file, or temporary queues in memory.
pub struct SqliteStore {
    inner: Arc<Inner>,
}

/// What the store shares with its handles.
struct Inner {
    // Fields are dropped in this order: the writer is the last to close the file, because readers cannot write the log into
    // it. Then the file's lock is released.
    /// `None` in memory, where all calls go through the writer's connection.
    readers: Option<Readers>,
    writer: Writer,
    /// Held while a page of items is read, so that many of them leave room for other calls.
    pages: Semaphore,
    clock: Arc<Clock>,
    description: String,
    broker: [u8; 4],
    late: Arc<LateArrivals>,
    deletions: Arc<Deletions>,
}

impl SqliteStore {
    /// Opens `sqlite:PATH`, `sqlite::memory:` or a plain path, and creates the file if it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] if the directory is missing, or if the file is not writable, belongs to another
    /// program, or is in use by another broker.
    pub fn open(uri: &str, clock: Arc<Clock>) -> Result<Self> {
        Self::open_with(uri, clock, SWEEP_EVERY)
    }

    fn open_with(uri: &str, clock: Arc<Clock>, sweep_every: Duration) -> Result<Self> {
        let path = uri.strip_prefix("sqlite:").unwrap_or(uri);
        if path.is_empty() {
            let message = "name a file: sqlite:PATH, or sqlite::memory:".to_owned();
            return Err(StoreError::Unsupported(message));
        }
        if path == ":memory:" {
            let conn = schema::open_memory().map_err(failed)?;
            return Self::start(conn, None, clock, sweep_every);
        }
        let file = Arc::new(StoreFile::lock(Path::new(path))?);
        Self::start(file.open_writer()?, Some(file), clock, sweep_every)
    }

    fn start(
        conn: Connection,
        file: Option<Arc<StoreFile>>,
        clock: Arc<Clock>,
        sweep_every: Duration,
    ) -> Result<Self> {
        let tag: u32 = conn
            .query_row("SELECT value FROM meta WHERE key = 'tag'", [], |row| row.get(0))
            .map_err(failed)?;
        let place =
            file.as_ref().map_or(":memory:".to_owned(), |file| file.path.display().to_string());
        let suspected = Arc::new(AtomicBool::new(false));
        let inner = Inner {
            writer: Writer::start(Station {
                conn,
                tag,
                clock: clock.clone(),
                file: file.clone(),
                suspected: Arc::clone(&suspected),
                sweep_every,
            })?,
            pages: Semaphore::new(if file.is_some() { PAGES_BESIDE } else { 1 }),
            readers: file.map(|file| Readers::new(file, tag.to_be_bytes(), suspected)),
            clock,
            description: format!("sqlite:{place}"),
            broker: rand::random(),
            late: Arc::new(LateArrivals::new()),
            deletions: Arc::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl Inner {
    /// Changes other things than items.
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer.call_once(Kind::Other, work).await
    }

    /// Changes items, which have their leases.
    async fn write_items<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer.call_once(Kind::Items, work).await
    }

    /// Reads items that are on disk, with their leases.
    async fn read_items<T: Send + 'static>(
        &self,
        work: impl FnOnce(&View<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let _leases = self.writer.leases_in_items().await?;
        self.read(work).await
    }

    /// Reads what is on disk, other than items.
    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&View<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let read = self.read_ahead(work).await?;
        self.writer.synced().await?;
        Ok(read)
    }

    /// Reads what is on disk, or soon will be, without the leases in [`runs`]. For what no answer rests on.
    async fn read_ahead<T: Send + 'static>(
        &self,
        work: impl FnOnce(&View<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        match &self.readers {
            Some(readers) => readers.read(self.clock.now_by_machine(), work).await,
            None => self.writer.call_once(Kind::Other, |tx| work(tx)).await,
        }
    }

    /// Deletes the deduplication ids of the queue.
    async fn forget_all(&self, queue: &Queue) -> Result<()> {
        loop {
            let name = queue.name.clone();
            let forgotten = self.write(move |tx| admin::forget_chunk(tx, &name)).await?;
            if forgotten < CHUNK {
                return Ok(());
            }
        }
    }

    async fn purge_all(&self, queue: &Queue, what: Purge) -> Result<u64> {
        let end = self.write(|tx| Ok(tx.next_row())).await?;
        let mut total = 0;
        loop {
            let queue = queue.clone();
            let (deleted, counted) = self
                .write_items(move |tx| admin::purge_chunk(tx, &queue, Before::row(end), what))
                .await?;
            total += counted;
            if deleted == 0 {
                return Ok(total);
            }
        }
    }
}
