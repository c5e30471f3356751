//! Writes the log into the store's file, beside the writer.
//!
//! SQLite itself would do it within a commit, once the log is long: the calls of that commit, and all that come after
//! it, wait until some thousand pages are read, written and synced. Here a thread does most of it, in rounds, over a
//! connection of its own. The rounds are short, because the writer's syncs wait for those of the file. While the writer
//! goes on, the thread never comes to the end of the log, and the log begins anew only when all of it is in the file. So
//! once the log is long, the writer does the last, short part.
//!
//! # What is on disk
//! Nothing depends on a round but the length of the log. A page that SQLite has written into the file stays in the log
//! until all of the log is in the file and the file is synced. Whoever opens the file after a kill or a power cut reads
//! the log from its beginning, and writes all of it into the file again. But within one process, SQLite does not write
//! a page again that it has written, even if a later sync of the file fails, and the page with it. So a failed sync ends
//! the process.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rusqlite::{Connection, Row, ffi};

use super::super::{
    super::{Result, StoreError},
    failure::failed,
    schema::StoreFile,
    space,
};
use crate::essential::{self, essential_thread};

/// Pages in the log at which all of it is to get into the file: 48 MiB. Fewer in builds for tests, so that most tests
/// have rounds.
const LONG: i64 = if cfg!(debug_assertions) { 36 } else { 12_000 };
/// Pages that are not in the file at which a round begins: 12 MiB.
const ROUND: i64 = LONG / 4;
/// The most pages that the writer writes into the file at once: 4 MiB.
const SHORT: i64 = LONG / 12;
/// Pages in the log at which the writer waits for rounds, and does as much as a round, because the thread does not keep up.
const TOO_LONG: i64 = LONG * 2;
/// The longest that the writer waits for a round after a commit, while the log is too long.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// Pause after a reader, or an error, has prevented that the log begins anew.
const PAUSE: Duration = Duration::from_millis(200);

/// The handle of the thread.
pub(super) struct Checkpointer {
    orders: Option<mpsc::Sender<()>>,
    /// For each round, whether all that was in the log at its beginning is in the file now.
    rounds: mpsc::Receiver<bool>,
    /// True from an order until its round is taken from `rounds`.
    is_at_work: bool,
    /// Pages in the log after the commit before.
    pages: i64,
    /// Set while it would be in vain to try.
    paused_until: Option<Instant>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Checkpointer {
    /// Starts the thread.
    pub(super) fn start(file: Arc<StoreFile>) -> Result<Self> {
        let conn = file.open_checkpointer().map_err(failed)?;
        let (orders, ordered) = mpsc::channel(); // one at a time
        let (ended, rounds) = mpsc::channel();
        let work = move || {
            while ordered.recv().is_ok() {
                let is_complete = checkpoint(&conn);
                // SQLite leaves this to whoever comes to the end of the log, and that is the writer, which would wait.
                if let Err(error) = file.sync() {
                    end(&error);
                }
                if ended.send(is_complete).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("sqlite-log".to_owned())
            .spawn(move || essential_thread("SQLite checkpoints", work))
            .map_err(|e| StoreError::Internal {
                reason: "cannot start the thread of checkpoints".to_owned(),
                source: Some(e.into()),
            })?;
        let (orders, thread) = (Some(orders), Some(thread));
        Ok(Self { orders, rounds, is_at_work: false, pages: 0, paused_until: None, thread })
    }

    /// Does what the log needs after a commit of `writer`.
    pub(super) fn look_after(&mut self, writer: &Connection) -> rusqlite::Result<()> {
        let mut log = Log::of(writer)?;
        if log.pages < self.pages {
            self.paused_until = None; // it has begun anew
        }
        self.pages = log.pages;
        if log.pages < LONG && log.rest < ROUND {
            return Ok(());
        }
        if self.is_at_work {
            let wait = if log.pages < TOO_LONG { Duration::ZERO } else { MAX_WAIT };
            let Ok(is_complete) = self.rounds.recv_timeout(wait) else { return Ok(()) };
            self.ended(is_complete);
            log = Log::of(writer)?;
        }
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        let most = if log.pages < TOO_LONG { SHORT } else { ROUND };
        if log.pages >= LONG && log.rest <= most {
            checkpoint(writer);
            self.pause(); // the next commit begins the log anew, unless somebody reads it
        } else if log.pages >= LONG || log.rest >= ROUND {
            self.is_at_work = self.orders.as_ref().is_some_and(|orders| orders.send(()).is_ok());
        }
        Ok(())
    }

    /// Writes all of the log into the file and returns its space to the disk, unless readers prevent it.
    pub(super) fn empty(&mut self, writer: &Connection) {
        if self.is_at_work
            && let Ok(is_complete) = self.rounds.recv()
        {
            self.ended(is_complete); // the round would prevent it
        }
        match space::empty_log(writer) {
            Ok(()) => {}
            Err(error) if is_failed_sync(&error) => end(&error),
            Err(error) => tracing::debug!(%error, "could not empty the log"),
        }
    }

    fn ended(&mut self, is_complete: bool) {
        self.is_at_work = false;
        if !is_complete {
            self.pause();
        }
    }

    fn pause(&mut self) {
        self.paused_until = Some(Instant::now() + PAUSE);
    }
}

impl Drop for Checkpointer {
    /// Ends the thread after its round.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has ended the process
        }
    }
}

/// The length of the log.
struct Log {
    pages: i64,
    /// Those that are not in the file.
    rest: i64,
}

impl Log {
    /// Reads it, and writes nothing.
    fn of(conn: &Connection) -> rusqlite::Result<Self> {
        conn.prepare_cached("PRAGMA wal_checkpoint(NOOP)")?.query_row([], Self::from_row)
    }

    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        let (pages, written) = (row.get::<_, i64>(1)?, row.get::<_, i64>(2)?);
        Ok(Self { pages, rest: pages - written })
    }
}

/// Writes as much of the log into the file as readers allow, and waits for none of them. Returns true if that is all but
/// a short part. After an error the log goes on, and it is tried again.
fn checkpoint(conn: &Connection) -> bool {
    let done = conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
        let another_does_it: bool = row.get(0)?;
        Ok(!another_does_it && Log::from_row(row)?.rest <= SHORT)
    });
    match done {
        Ok(is_complete) => is_complete,
        Err(error) if is_failed_sync(&error) => end(&error),
        Err(error) => {
            tracing::debug!(%error, "could not write the log into the store's file");
            false
        }
    }
}

fn is_failed_sync(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_IOERR_FSYNC)
}

fn end(error: &dyn std::error::Error) -> ! {
    essential::end_because(
        error,
        "the store's file cannot be synced: look at its disk. Nothing is lost, for its log is kept, and is written \
         into the file again at the next start",
    )
}
