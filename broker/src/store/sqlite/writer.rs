//! The one thread that writes. Whatever has gathered while it was busy becomes one transaction, made
//! durable by one fsync: the group commit. Each call has a savepoint, so that one that fails spoils no other.
//!
//! # Which answers wait for the disk
//! All but those of reserves. A transaction of nothing but reserves is committed with
//! `synchronous = NORMAL`: whole, seen by all who come later, and safe from a killed broker, as the
//! system has it; but a power cut may take it back. What it takes back is a lease that then never was:
//! the item is ready again, and nobody else has it, for the broker that gave the lease died as well. A
//! consumer that outlived it holds a receipt whose token the item does not have: `LEASE_LOST`, as of
//! any lease that was lost. Lapses counted and items dead-lettered on the way are found and counted
//! again. Nothing that is answered as durable can rest on it: the log is one file, written in order and
//! read up to the first gap, so the next sync (of a push, of a settle) keeps what came before it. What is
//! popped is settled, and that synced, before it is handed out. And if no such sync comes, the
//! writer makes one after [`LAZY_FOR`].

use std::{
    cell::Cell,
    collections::VecDeque,
    ops::Deref,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    super::{Result, StoreError},
    sweep,
};
use crate::{
    domain::{Clock, ItemId, Timestamp},
    metrics::Metrics,
};

/// Calls that may wait at once; more wait before they are queued.
const MAX_WAITING: usize = 4_096;
/// Most calls of each kind in one transaction: bounds how long the first waits for the last.
const MAX_GROUP: usize = 512;
/// Most items settled in one transaction, but for a single call's.
const MAX_SETTLED: usize = 4_000;
/// Most items pushed in one transaction, but for a single call's: producers who push without pause
/// leave room to consumers, as items that are not taken only make the queue longer.
const MAX_PUSHED: usize = 1_000;
/// A reserve is on disk after this long at the latest.
const LAZY_FOR: Duration = Duration::from_millis(10);

const SYNC: &str = "PRAGMA synchronous = FULL";
const DO_NOT_SYNC: &str = "PRAGMA synchronous = NORMAL";

/// A consistent sight of the data, at one time.
pub(super) struct View<'c> {
    /// The connection, in a transaction.
    pub(super) conn: &'c Connection,
    /// The store's time.
    pub(super) now: Timestamp,
    /// What all ids of this store begin with.
    pub(super) tag: [u8; 4],
}

impl View<'_> {
    /// The id that users see.
    pub(super) fn item_id(&self, row: i64) -> ItemId {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.tag);
        bytes[4..].copy_from_slice(&row.to_be_bytes());
        ItemId(bytes)
    }

    /// The row of an id; of an id that is not of this store, one that no item has.
    pub(super) fn row_id(&self, id: ItemId) -> i64 {
        match id.0.split_first_chunk::<4>() {
            Some((tag, rest)) if *tag == self.tag => rest.try_into().map_or(0, i64::from_be_bytes),
            _ => 0,
        }
    }
}

/// A transaction that may write.
pub(super) struct Tx<'c> {
    view: View<'c>,
    next_id: &'c Cell<i64>,
}

impl<'c> Deref for Tx<'c> {
    type Target = View<'c>;
    fn deref(&self) -> &View<'c> {
        &self.view
    }
}

impl Tx<'_> {
    /// The row of a new item: greater than all before.
    pub(super) fn next_row(&self) -> i64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }
}

/// What a call does, as far as the writer wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Stores so many items.
    Push(usize),
    /// Settles so many items.
    Settle(usize),
    /// Hands items out: the one kind whose answer does not wait for the disk.
    Reserve,
    /// Anything else.
    Other,
}

/// A call that waits for the writer.
trait Job: Send {
    fn kind(&self) -> Kind;
    /// True if nobody waits for the answer any more.
    fn abandoned(&self) -> bool;
    fn run(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()>;
    fn answer(self: Box<Self>, failure: Option<Failure>);
}

struct Call<F, T> {
    kind: Kind,
    work: Option<F>,
    result: Option<T>,
    reply: oneshot::Sender<Result<T>>,
    _permit: OwnedSemaphorePermit,
}

impl<F, T> Job for Call<F, T>
where
    F: FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send,
    T: Send,
{
    fn kind(&self) -> Kind {
        self.kind
    }

    fn abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    fn run(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(tx)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, failure: Option<Failure>) {
        let answer = match (failure, self.result) {
            (None, Some(result)) => Ok(result),
            (Some(failure), _) => Err(failure.into()),
            (None, None) => Err(ended()),
        };
        let _ = self.reply.send(answer); // whoever asked may have gone
    }
}

/// An error of SQLite, which can be told to several callers.
#[derive(Clone)]
struct Failure {
    unavailable: bool,
    reason: String,
}

impl From<&rusqlite::Error> for Failure {
    fn from(error: &rusqlite::Error) -> Self {
        use rusqlite::ErrorCode as Code;
        let unavailable = matches!(
            error.sqlite_error_code(),
            Some(
                Code::DiskFull
                    | Code::SystemIoFailure
                    | Code::DatabaseBusy
                    | Code::DatabaseLocked
                    | Code::ReadOnly
                    | Code::CannotOpen
                    | Code::OutOfMemory
            )
        );
        Self { unavailable, reason: error.to_string() }
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        let Failure { unavailable, reason } = failure;
        if unavailable {
            Self::Unavailable { reason, source: None }
        } else {
            Self::Internal { reason, source: None }
        }
    }
}

/// An error of SQLite as callers of the store see it.
pub(super) fn failed(error: rusqlite::Error) -> StoreError {
    let Failure { unavailable, reason } = Failure::from(&error);
    let source = Some(error.into());
    if unavailable {
        StoreError::Unavailable { reason, source }
    } else {
        StoreError::Internal { reason, source }
    }
}

fn ended() -> StoreError {
    StoreError::Unavailable { reason: "the writer has ended".to_owned(), source: None }
}

/// The calls that wait, in the order in which they came, by kind.
#[derive(Default)]
struct Line {
    others: VecDeque<Box<dyn Job>>,
    pushes: VecDeque<Box<dyn Job>>,
    reserves: VecDeque<Box<dyn Job>>,
}

impl Line {
    fn add(&mut self, job: Box<dyn Job>) {
        match job.kind() {
            Kind::Push(_) => self.pushes.push_back(job),
            Kind::Reserve => self.reserves.push_back(job),
            Kind::Settle(_) | Kind::Other => self.others.push_back(job),
        }
    }

    fn is_empty(&self) -> bool {
        self.others.is_empty() && self.pushes.is_empty() && self.reserves.is_empty()
    }

    /// The next transaction: reserves last, so that they find what is given back and pushed in it.
    fn next_group(&mut self) -> Vec<Box<dyn Job>> {
        let mut group = Vec::new();
        take(&mut self.others, MAX_SETTLED, &mut group);
        take(&mut self.pushes, MAX_PUSHED, &mut group);
        take(&mut self.reserves, MAX_GROUP, &mut group);
        group
    }
}

/// Moves calls over, the first ones first, until they have so many items together.
fn take(from: &mut VecDeque<Box<dyn Job>>, max_items: usize, to: &mut Vec<Box<dyn Job>>) {
    let (mut calls, mut items) = (0, 0);
    while calls < MAX_GROUP
        && items < max_items
        && let Some(job) = from.pop_front()
    {
        if job.abandoned() {
            continue;
        }
        calls += 1;
        items += match job.kind() {
            Kind::Push(items) | Kind::Settle(items) => items,
            Kind::Reserve | Kind::Other => 1,
        };
        to.push(job);
    }
}

/// The way to the writing thread.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<Box<dyn Job>>>,
    room: Arc<Semaphore>,
    thread: Option<thread::JoinHandle<()>>,
    metrics: Arc<OnceLock<Arc<Metrics>>>,
}

impl Writer {
    /// Starts the thread. `sweep_every` is how often it looks for what has expired.
    pub(super) fn start(
        conn: Connection,
        tag: [u8; 4],
        clock: Arc<Clock>,
        sweep_every: Duration,
    ) -> Result<Self> {
        let next_id = conn
            .query_row("SELECT value FROM meta WHERE key = 'next_id'", [], |row| row.get(0))
            .map_err(failed)?;
        let (jobs, waiting) = mpsc::channel(); // bounded by `room`
        let metrics = Arc::new(OnceLock::new());
        let desk = Desk {
            metrics: Arc::clone(&metrics),
            conn,
            tag,
            clock,
            next_id: Cell::new(next_id),
            saved_id: next_id,
            syncing: true,
            changes: 0,
            unsynced: None,
        };
        let thread = thread::Builder::new()
            .name("sqlite-writer".to_owned())
            .spawn(move || desk.work(&waiting, sweep_every))
            .map_err(|e| StoreError::Internal {
                reason: "can not start the writer thread".to_owned(),
                source: Some(e.into()),
            })?;
        let room = Arc::new(Semaphore::new(MAX_WAITING));
        Ok(Self { jobs: Some(jobs), room, thread: Some(thread), metrics })
    }

    /// Notes from now on how many items share a transaction, and how long sweeps take.
    pub(super) fn measure(&self, metrics: &Arc<Metrics>) {
        let _ = self.metrics.set(Arc::clone(metrics)); // the first one stays
    }

    /// Has `work` done in a transaction; the answer comes when it is durable, unless it is a reserve.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        kind: Kind,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let permit = self.room.clone().acquire_owned().await.map_err(|_| ended())?;
        let (reply, answer) = oneshot::channel();
        let job = Call { kind, work: Some(work), result: None, reply, _permit: permit };
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(Box::new(job)).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

impl Drop for Writer {
    /// Ends the thread after what was asked of it before, so that the file can be opened again at once.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it panicked: callers have been told
        }
    }
}

/// Notes how many items a transaction stores and settles.
fn note_batches(metrics: &Metrics, group: &[Box<dyn Job>]) {
    let (mut pushed, mut settled) = (0, 0);
    for job in group {
        match job.kind() {
            Kind::Push(items) => pushed += items,
            Kind::Settle(items) => settled += items,
            Kind::Reserve | Kind::Other => {}
        }
    }
    for (call, items) in [("push", pushed), ("settle", settled)] {
        if items > 0 {
            metrics.batch(call, items);
        }
    }
}

/// What the thread has.
struct Desk {
    metrics: Arc<OnceLock<Arc<Metrics>>>,
    conn: Connection,
    tag: [u8; 4],
    clock: Arc<Clock>,
    next_id: Cell<i64>,
    /// `next_id` as it is in the file.
    saved_id: i64,
    /// True while the connection syncs each commit.
    syncing: bool,
    /// Rows changed on the connection before this transaction.
    changes: u64,
    /// Since when there is something in the log that was not synced.
    unsynced: Option<Instant>,
}

impl Desk {
    fn work(mut self, arrivals: &mpsc::Receiver<Box<dyn Job>>, sweep_every: Duration) {
        let mut line = Line::default();
        let mut next_sweep = Instant::now() + sweep_every;
        loop {
            if line.is_empty() {
                let sync_by = self.unsynced.map(|since| since + LAZY_FOR);
                let until = sync_by.map_or(next_sweep, |by| by.min(next_sweep));
                match arrivals.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(job) => line.add(job),
                    Err(mpsc::RecvTimeoutError::Timeout) => self.sync_if_due(),
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
            while let Ok(job) = arrivals.try_recv() {
                line.add(job);
            }
            self.commit_group(line.next_group());
            if Instant::now() >= next_sweep {
                // A bounded chunk at a time, calls in between.
                let more = self.sweep();
                next_sweep = Instant::now() + if more { Duration::ZERO } else { sweep_every };
            }
        }
    }

    /// Syncs what reserves wrote, by a commit that is synced. Should it fail, the next call will tell.
    fn sync_if_due(&mut self) {
        if self.unsynced.is_none_or(|since| since.elapsed() < LAZY_FOR) {
            return;
        }
        let synced = self.transaction(|tx| {
            tx.conn
                .prepare_cached("UPDATE meta SET value = ?1 WHERE key = 'pinged'")?
                .execute([tx.now.0])
        });
        if let Err(error) = synced {
            tracing::warn!(%error, "could not sync what was reserved last");
            self.unsynced = None;
        }
    }

    fn sweep(&mut self) -> bool {
        let start = Instant::now();
        let swept = self.transaction(sweep::chunk);
        if let Some(metrics) = self.metrics.get() {
            metrics.swept(start.elapsed());
        }
        match swept {
            Ok(more) => more,
            Err(error) => {
                tracing::warn!(%error, "could not remove what has expired; trying again later");
                false
            }
        }
    }

    fn transaction<T>(
        &mut self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        self.begin(true)?;
        let done = work(&self.tx()).and_then(|done| self.commit().map(|()| done));
        if done.is_err() && !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        done
    }

    fn tx(&self) -> Tx<'_> {
        let view = View { conn: &self.conn, now: self.clock.now(), tag: self.tag };
        Tx { view, next_id: &self.next_id }
    }

    /// Begins a transaction whose commit is synced, or not.
    fn begin(&mut self, sync: bool) -> rusqlite::Result<()> {
        if sync != self.syncing {
            // Takes effect when it is parsed, so it can not come from the cache of statements.
            self.conn.execute_batch(if sync { SYNC } else { DO_NOT_SYNC })?;
            self.syncing = sync;
        }
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        self.changes = self.conn.total_changes();
        Ok(())
    }

    fn commit(&mut self) -> rusqlite::Result<()> {
        let next_id = self.next_id.get();
        if next_id != self.saved_id {
            self.conn
                .prepare_cached("UPDATE meta SET value = ?1 WHERE key = 'next_id'")?
                .execute([next_id])?;
        }
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        self.saved_id = next_id;
        // A commit of nothing writes nothing and syncs nothing.
        if self.conn.total_changes() != self.changes {
            self.unsynced =
                if self.syncing { None } else { self.unsynced.or(Some(Instant::now())) };
        }
        Ok(())
    }

    fn commit_group(&mut self, mut group: Vec<Box<dyn Job>>) {
        if group.is_empty() {
            return;
        }
        if let Some(metrics) = self.metrics.get() {
            note_batches(metrics, &group);
        }
        match self.run_group(&mut group) {
            Ok(failures) => {
                for (job, failure) in group.into_iter().zip(failures) {
                    job.answer(failure);
                }
            }
            Err(error) => {
                if !self.conn.is_autocommit()
                    && let Err(error) = self.conn.execute_batch("ROLLBACK")
                {
                    tracing::error!(%error, "could not roll back");
                }
                let failure = Failure::from(&error);
                for job in group {
                    job.answer(Some(failure.clone()));
                }
            }
        }
    }

    /// Answers which calls failed by themselves; an error is one of all.
    fn run_group(&mut self, group: &mut [Box<dyn Job>]) -> rusqlite::Result<Vec<Option<Failure>>> {
        self.begin(group.iter().any(|job| job.kind() != Kind::Reserve))?;
        let mut failures = Vec::with_capacity(group.len());
        if let [only] = group {
            only.run(&self.tx())?;
            failures.push(None);
        } else {
            for job in group {
                self.conn.prepare_cached("SAVEPOINT call")?.execute([])?;
                match job.run(&self.tx()) {
                    Ok(()) => failures.push(None),
                    // A full disk and the like undo the whole transaction.
                    Err(error) if self.conn.is_autocommit() => return Err(error),
                    Err(error) => {
                        self.conn.prepare_cached("ROLLBACK TO call")?.execute([])?;
                        failures.push(Some(Failure::from(&error)));
                    }
                }
                self.conn.prepare_cached("RELEASE call")?.execute([])?;
            }
        }
        self.commit()?;
        Ok(failures)
    }
}
