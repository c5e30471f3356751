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
//! the log from its beginning, and writes all of it into the file again. But as long as any process has the file open,
//! SQLite does not write a page again that was written, even if a later sync of the file fails, and the page with it. So
//! after a failed sync the process ends, and what was written counts as not written.
//!
//! # How long the log gets
//! It begins anew once it is [`LONG`], within a few rounds. If the thread does not keep up, the writer waits for it: the
//! log is never longer than [`TOO_LONG`] and [`LONG`] together, and two commits. It is longer while somebody reads an old
//! state, which SQLite keeps in the log. The round after that may take seconds, in which the writer goes on slowly.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rusqlite::{Connection, Row, ffi};

use super::{
    super::{
        super::Result,
        failure::{Class, failed},
        schema::StoreFile,
        space,
    },
    start_thread,
};
use crate::essential;

/// Pages in the log at which all of it is to get into the file: 48 MiB. Fewer in builds for tests, so that most tests
/// have rounds.
const LONG: i64 = if cfg!(debug_assertions) { 36 } else { 12_000 };
/// Pages that are not in the file at which a round begins: 12 MiB.
const ROUND: i64 = LONG / 4;
/// The most pages that the writer writes into the file at once: 4 MiB.
const SHORT: i64 = LONG / 12;
/// Pages in the log from which on the writer waits for rounds, and does all that a round leaves.
const TOO_LONG: i64 = LONG + LONG / 2;
/// Pages in the log at which people are told that somebody prevents it from beginning anew: 400 MiB.
const VERY_LONG: i64 = 100_000;
/// The longest that the writer waits for a round after a commit, until [`LONG`] pages have come since the round began.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// Pause after an attempt that a reader has cut short, in times of what the attempt took.
const PAUSE: u32 = 4;
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Pause after an attempt that failed.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);

/// The handle of the thread.
pub(super) struct Checkpointer {
    orders: Option<mpsc::Sender<()>>,
    rounds: mpsc::Receiver<Attempt>,
    /// From an order until its round is taken from `rounds`: how many pages the log had.
    ordered_at: Option<i64>,
    /// The log after the commit before.
    log: Log,
    /// Bytes of a page.
    page_size: u32,
    /// Pages of the log at which people are told next how long it is.
    told_at: i64,
    /// True while the log's length cannot be read.
    is_unreadable: bool,
    /// Set while it would be in vain to try.
    paused_until: Option<Instant>,
    file: Arc<StoreFile>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Checkpointer {
    /// Starts the thread.
    pub(super) fn start(file: Arc<StoreFile>) -> Result<Self> {
        let conn = file.open_checkpointer().map_err(failed)?;
        let page_size = conn.pragma_query_value(None, "page_size", |row| row.get(0));
        let (orders, ordered) = mpsc::channel(); // one at a time
        let (ended, rounds) = mpsc::channel();
        let of_thread = Arc::clone(&file);
        let work = move || {
            while ordered.recv().is_ok() {
                let attempt = checkpoint(&conn, &of_thread);
                // SQLite leaves this to whoever comes to the end of the log, and that is the writer, which would wait.
                if let Err(error) = of_thread.sync() {
                    end(&of_thread, &error);
                }
                if ended.send(attempt).is_err() {
                    return;
                }
            }
        };
        let thread = start_thread("sqlite-log", work)?;
        Ok(Self {
            orders: Some(orders),
            rounds,
            ordered_at: None,
            log: Log { pages: 0, rest: 0 },
            page_size: page_size.map_err(failed)?,
            told_at: VERY_LONG,
            is_unreadable: false,
            paused_until: None,
            file,
            thread: Some(thread),
        })
    }

    /// The bytes of the log, as far as is known.
    pub(super) fn length(&self) -> u64 {
        self.bytes(self.log.pages)
    }

    /// Those that are not in the file.
    pub(super) fn unwritten(&self) -> u64 {
        self.bytes(self.log.rest)
    }

    fn bytes(&self, pages: i64) -> u64 {
        u64::try_from(pages).unwrap_or(0) * u64::from(self.page_size)
    }

    /// Does what the log needs after a commit of `writer`.
    pub(super) fn look_after(&mut self, writer: &Connection) {
        match self.go_on(writer) {
            Ok(()) => self.is_unreadable = false,
            Err(error) if self.is_unreadable => {
                tracing::debug!(%error, "could not read how long the log is");
            }
            Err(error) => {
                self.is_unreadable = true;
                tracing::warn!(
                    %error,
                    "could not read how long the log is: until this ends it grows, and takes room on the disk"
                );
            }
        }
    }

    fn go_on(&mut self, writer: &Connection) -> rusqlite::Result<()> {
        let before = std::mem::replace(&mut self.log, Log::of(writer)?);
        if self.log.pages < before.pages {
            (self.paused_until, self.told_at) = (None, VERY_LONG); // it has begun anew
        }
        if self.log.pages >= self.told_at {
            self.told_at = self.log.pages * 2;
            tracing::warn!(
                pages = self.log.pages,
                "the log beside the store's file is very long, and takes room on the disk: somebody reads an old \
                 state of the file. End such readers (a shell with an open transaction, a backup)"
            );
        }
        if self.log.pages < LONG && self.log.rest < ROUND {
            return Ok(());
        }
        let mut most = SHORT;
        if let Some(ordered_at) = self.ordered_at {
            let Some(round) = self.round(ordered_at) else { return Ok(()) };
            if self.ended(&round, SHORT) && self.log.pages >= TOO_LONG {
                most = i64::MAX;
            }
            self.log = Log::of(writer)?;
        }
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        if self.log.pages >= LONG && self.log.rest <= most {
            // The next commit begins the log anew, unless somebody reads it.
            let attempt = checkpoint(writer, &self.file);
            if self.ended(&attempt, 0) {
                self.log.rest = 0;
            }
        } else if self.log.pages >= LONG || self.log.rest >= ROUND {
            let is_ordered = self.orders.as_ref().is_some_and(|orders| orders.send(()).is_ok());
            self.ordered_at = is_ordered.then_some(self.log.pages);
        }
        Ok(())
    }

    /// Returns the round that was ordered if it has ended, or ends while the writer waits.
    fn round(&self, ordered_at: i64) -> Option<Attempt> {
        let pages = self.log.pages;
        if pages >= TOO_LONG && pages - ordered_at >= LONG {
            self.rounds.recv().ok()
        } else {
            let wait = if pages < TOO_LONG { Duration::ZERO } else { MAX_WAIT };
            self.rounds.recv_timeout(wait).ok()
        }
    }

    /// Takes note of the end of an attempt. Returns true if it left no more than `most` pages; else nothing is tried for
    /// a while.
    fn ended(&mut self, attempt: &Attempt, most: i64) -> bool {
        self.ordered_at = None;
        let pause = match attempt.rest {
            Some(rest) if rest <= most => return true,
            Some(_) => (attempt.took * PAUSE).clamp(MIN_PAUSE, MAX_PAUSE),
            None => PAUSE_AFTER_ERROR,
        };
        self.paused_until = Some(Instant::now() + pause);
        false
    }

    /// Writes all of the log into the file and returns its space to the disk, unless readers prevent it.
    pub(super) fn empty(&mut self, writer: &Connection) {
        if self.ordered_at.is_some()
            && let Ok(round) = self.rounds.recv()
        {
            self.ended(&round, SHORT); // two cannot write at a time
        }
        match space::empty_log(writer) {
            Ok(()) => {}
            Err(error) if is_failed_sync(&error) => end(&self.file, &error),
            Err(error) => tracing::debug!(%error, "could not empty the log"),
        }
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

/// What came of writing the log into the file.
struct Attempt {
    /// Pages of the log, as it was at the beginning, that are not in the file. `None` if it failed, or another process was
    /// at it.
    rest: Option<i64>,
    took: Duration,
}

/// Writes as much of the log into the file as readers allow, and waits for none of them.
fn checkpoint(conn: &Connection, file: &StoreFile) -> Attempt {
    let begun = Instant::now();
    let done = conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
        let is_refused: bool = row.get(0)?;
        if is_refused { Ok(None) } else { Log::from_row(row).map(|log| Some(log.rest)) }
    });
    let rest = match done {
        Ok(rest) => rest,
        Err(error) if is_failed_sync(&error) => end(file, &error),
        Err(error) if Class::of(&error) == Class::Full => None, // which is told elsewhere
        Err(error) => {
            tracing::warn!(%error, "could not write the log into the store's file; trying again");
            None
        }
    };
    Attempt { rest, took: begun.elapsed() }
}

pub(super) fn is_failed_sync(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_IOERR_FSYNC)
}

/// Ends the process, because the file or its log cannot be synced.
pub(super) fn end(file: &StoreFile, error: &dyn std::error::Error) -> ! {
    if let Err(error) = file.forget_checkpoints() {
        tracing::error!(
            %error,
            "no other process may have the store's file open when it is opened next"
        );
    }
    essential::end_because(
        error,
        "the store's file or its log cannot be synced: look at the disk. The log is kept, and is written into the file again at the next start",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(folder: &tempfile::TempDir) -> (Connection, Checkpointer) {
        let file = Arc::new(StoreFile::lock(&folder.path().join("store.db")).unwrap());
        let writer = file.open_writer().unwrap();
        let mut checkpointer = Checkpointer::start(file).unwrap();
        checkpointer.empty(&writer);
        checkpointer.look_after(&writer);
        (writer, checkpointer)
    }

    fn write_a_page(writer: &Connection) {
        writer.execute_batch("UPDATE meta SET value = value + 1 WHERE key = 'next_id'").unwrap();
    }

    #[test]
    fn the_log_and_what_is_only_in_it_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, mut checkpointer) = started(&folder);
        assert_eq!((checkpointer.length(), checkpointer.unwritten()), (0, 0));
        write_a_page(&writer);
        checkpointer.look_after(&writer);
        assert_eq!((checkpointer.length(), checkpointer.unwritten()), (4_096, 4_096), "one page");
        checkpointer.empty(&writer);
        checkpointer.look_after(&writer);
        assert_eq!((checkpointer.length(), checkpointer.unwritten()), (0, 0));
    }

    #[test]
    fn a_very_long_log_is_told_at_each_doubling_until_it_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, mut checkpointer) = started(&folder);
        checkpointer.told_at = 2;
        let mut told_at = Vec::new();
        for _ in 0..4 {
            write_a_page(&writer);
            checkpointer.look_after(&writer);
            told_at.push(checkpointer.told_at);
        }
        assert_eq!(told_at, [2, 4, 4, 8]);
        checkpointer.empty(&writer);
        write_a_page(&writer);
        checkpointer.look_after(&writer);
        assert_eq!(checkpointer.told_at, VERY_LONG);
    }
}
