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
    cell::{Cell, RefCell},
    collections::{BTreeSet, HashSet, VecDeque},
    mem,
    ops::Deref,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    super::{Result, StoreError},
    clock,
    damage::is_damage,
    mark::Mark,
    room::Room,
    schema::StoreFile,
    space, sweep,
};
use crate::{
    domain::{Clock, ItemId, QueueName, Timestamp},
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
/// How often a step is taken to give space back, while there is some to give.
const SHRINK_EVERY: Duration = Duration::from_millis(50);
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
    unblocked: &'c RefCell<BTreeSet<QueueName>>,
    passed_over: &'c RefCell<HashSet<i64>>,
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

    /// From now on the row is not looked at any more: it is damaged and cannot even be taken away.
    pub(super) fn pass_over(&self, row: i64) {
        self.passed_over.borrow_mut().insert(row);
    }

    /// True if the row is not to be looked at.
    pub(super) fn is_passed_over(&self, row: i64) -> bool {
        self.passed_over.borrow().contains(&row)
    }

    /// The rows that are not to be looked at, as a JSON array; `None`, as nearly always, if there are none.
    pub(super) fn passed_over(&self) -> Option<String> {
        let rows = self.passed_over.borrow();
        (!rows.is_empty())
            .then(|| format!("{rows:?}").replace(['{', '}'], ""))
            .map(|rows| format!("[{rows}]"))
    }

    /// Notes that an item of the queue became ready in a way that its consumers do not hear of otherwise: they
    /// are told once this is committed.
    pub(super) fn tell_unblocked(&self, queue: &str) {
        if let Ok(queue) = QueueName::parse("queue", queue) {
            self.unblocked.borrow_mut().insert(queue);
        }
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
    /// Settles an item and stores others.
    SettleAndPush,
    /// Anything else.
    Other,
}

impl Kind {
    /// True if it needs more room on the disk than it leaves.
    fn grows(self) -> bool {
        matches!(self, Self::Push(_) | Self::SettleAndPush)
    }
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
            (Some(failure), _) => Err(failure.for_kind(self.kind).into_error(None)),
            (None, None) => Err(ended()),
        };
        let _ = self.reply.send(answer); // whoever asked may have gone
    }
}

/// An error of SQLite, which can be told to several callers.
#[derive(Clone)]
struct Failure {
    class: Class,
    reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Full,
    Unavailable,
    Damaged,
    Internal,
}

impl Class {
    fn of(error: &rusqlite::Error) -> Self {
        use rusqlite::ErrorCode as Code;
        match error.sqlite_error_code() {
            Some(Code::DiskFull) => Self::Full,
            Some(
                Code::SystemIoFailure
                | Code::DatabaseBusy
                | Code::DatabaseLocked
                | Code::ReadOnly
                | Code::CannotOpen
                | Code::OutOfMemory,
            ) => Self::Unavailable,
            _ if is_damage(error) => Self::Damaged,
            _ => Self::Internal,
        }
    }
}

impl Failure {
    /// Of a call that is refused before it is tried.
    fn no_room() -> Self {
        Self { class: Class::Full, reason: "the disk is nearly full".to_owned() }
    }

    /// As it is told to a call of this kind: only what stores items is refused for want of room.
    fn for_kind(mut self, kind: Kind) -> Self {
        if self.class == Class::Full && !kind.grows() {
            self.class = Class::Unavailable;
        }
        self
    }

    fn into_error(self, source: Option<rusqlite::Error>) -> StoreError {
        let (reason, source) = (self.reason, source.map(Into::into));
        match self.class {
            Class::Full => StoreError::Full { reason },
            Class::Unavailable => StoreError::Unavailable { reason, source },
            Class::Damaged => StoreError::Damaged { reason, source },
            Class::Internal => StoreError::Internal { reason, source },
        }
    }
}

impl From<&rusqlite::Error> for Failure {
    fn from(error: &rusqlite::Error) -> Self {
        Self { class: Class::of(error), reason: error.to_string() }
    }
}

/// An error of SQLite as callers of the store see it who store nothing.
pub(super) fn failed(error: rusqlite::Error) -> StoreError {
    Failure::from(&error).for_kind(Kind::Other).into_error(Some(error))
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
            Kind::Settle(_) | Kind::SettleAndPush | Kind::Other => self.others.push_back(job),
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
            Kind::Reserve | Kind::SettleAndPush | Kind::Other => 1,
        };
        to.push(job);
    }
}

/// Queues in which items became ready by themselves, until somebody asks.
#[derive(Debug, Default)]
pub(super) struct Unblocked {
    queues: Mutex<BTreeSet<QueueName>>,
    some: Notify,
}

impl Unblocked {
    fn add(&self, queues: BTreeSet<QueueName>) {
        self.queues.lock().extend(queues);
        self.some.notify_one();
    }

    /// Waits until there are some, and takes them.
    pub(super) async fn take(&self) -> Vec<QueueName> {
        loop {
            let queues = mem::take(&mut *self.queues.lock());
            if !queues.is_empty() {
                return queues.into_iter().collect();
            }
            self.some.notified().await;
        }
    }
}

/// What the writer needs of its store.
pub(super) struct Station {
    /// In use by nobody else.
    pub(super) conn: Connection,
    /// What all ids of this store begin with.
    pub(super) tag: u32,
    pub(super) clock: Arc<Clock>,
    /// `None` in memory.
    pub(super) file: Option<Arc<StoreFile>>,
    /// How often to look for what has expired.
    pub(super) sweep_every: Duration,
}

/// The way to the writing thread.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<Box<dyn Job>>>,
    room: Arc<Semaphore>,
    thread: Option<thread::JoinHandle<()>>,
    metrics: Arc<OnceLock<Arc<Metrics>>>,
    pub(super) unblocked: Arc<Unblocked>,
}

impl Writer {
    /// Starts the thread.
    pub(super) fn start(station: Station) -> Result<Self> {
        let Station { conn, tag, clock, file, sweep_every } = station;
        clock::resume(&conn, &clock).map_err(failed)?;
        let count = |key| {
            let sql = "SELECT value FROM meta WHERE key = ?1";
            conn.query_row(sql, [key], |row| row.get::<_, i64>(0)).map_err(failed)
        };
        let (next_id, commits) = (count("next_id")?, count("commits")?);
        let beside = |what: &str, error: std::io::Error| {
            StoreError::Unsupported(format!(
                "can not write the {what} beside the store's file: {error}"
            ))
        };
        let (mut mark, mut disk) = (None, None);
        if let Some(file) = &file {
            let mut opened = Mark::open(&file.path, tag).map_err(|e| beside("mark", e))?;
            opened.note(commits);
            mark = Some(opened);
            disk = Some(Room::beside(&file.path).map_err(|e| beside("reserve", e))?);
        }
        let (jobs, waiting) = mpsc::channel(); // bounded by `room`
        let metrics = Arc::new(OnceLock::new());
        let unblocked = Arc::new(Unblocked::default());
        let desk = Desk {
            metrics: Arc::clone(&metrics),
            conn,
            tag: tag.to_be_bytes(),
            clock,
            next_id: Cell::new(next_id),
            saved_id: next_id,
            commits,
            mark,
            disk,
            unblocked: RefCell::default(),
            passed_over: RefCell::default(),
            tell_unblocked: unblocked.clone(),
            syncing: true,
            changes: 0,
            unsynced: None,
            _file: file,
        };
        let thread = thread::Builder::new()
            .name("sqlite-writer".to_owned())
            .spawn(move || desk.work(&waiting, sweep_every))
            .map_err(|e| StoreError::Internal {
                reason: "can not start the writer thread".to_owned(),
                source: Some(e.into()),
            })?;
        let room = Arc::new(Semaphore::new(MAX_WAITING));
        Ok(Self { jobs: Some(jobs), room, thread: Some(thread), metrics, unblocked })
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
            Kind::SettleAndPush => settled += 1,
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
    /// Synced commits that the file has seen.
    commits: i64,
    mark: Option<Mark>,
    disk: Option<Room>,
    /// Queues to be told of when this transaction is committed.
    unblocked: RefCell<BTreeSet<QueueName>>,
    /// Damaged rows that stay where they are.
    passed_over: RefCell<HashSet<i64>>,
    tell_unblocked: Arc<Unblocked>,
    /// True while the connection syncs each commit.
    syncing: bool,
    /// Rows changed on the connection before this transaction.
    changes: u64,
    /// Since when there is something in the log that was not synced.
    unsynced: Option<Instant>,
    /// Let go after the connection is closed.
    _file: Option<Arc<StoreFile>>,
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
                    Err(mpsc::RecvTimeoutError::Disconnected) => return self.sync_mark(),
                }
            }
            while let Ok(job) = arrivals.try_recv() {
                line.add(job);
            }
            let had_room = !self.disk.as_ref().is_some_and(Room::was_scarce);
            self.commit_group(line.next_group());
            if had_room && self.disk.as_ref().is_some_and(Room::was_scarce) {
                next_sweep = Instant::now(); // what can be given back now is needed now
            }
            if Instant::now() >= next_sweep {
                // A bounded chunk at a time, calls in between.
                let more = self.sweep();
                let pause = match (more, self.give_space_back()) {
                    (true, _) => Duration::ZERO,
                    (false, true) => SHRINK_EVERY.min(sweep_every),
                    (false, false) => sweep_every,
                };
                next_sweep = Instant::now() + pause;
                if pause == sweep_every {
                    self.sync_mark();
                }
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

    fn sync_mark(&mut self) {
        if let Some(mark) = &mut self.mark {
            mark.sync();
        }
    }

    /// Gives some of the file's free pages back to the disk, and on a disk that is nearly full the log's too; true if there
    /// may soon be more to give.
    fn give_space_back(&mut self) -> bool {
        let scarce = self.disk.as_ref().is_some_and(Room::was_scarce);
        if scarce && let Err(error) = space::empty_log(&self.conn) {
            tracing::debug!(%error, "could not empty the log");
        }
        match space::is_wasted(&self.conn, scarce) {
            Ok(false) => return scarce,
            Ok(true) => {}
            Err(error) => {
                tracing::warn!(%error, "could not see how much of the file is unused");
                return false;
            }
        }
        let given = self.transaction(|tx| space::give_back(tx.conn));
        if let Err(error) = &given {
            tracing::warn!(%error, "could not give space back");
        }
        scarce || given.is_ok()
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
        let view = View { conn: &self.conn, now: self.clock.now_by_machine(), tag: self.tag };
        Tx {
            view,
            next_id: &self.next_id,
            unblocked: &self.unblocked,
            passed_over: &self.passed_over,
        }
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
        // A commit of nothing writes nothing and syncs nothing.
        let changes = self.conn.total_changes() != self.changes || next_id != self.saved_id;
        let counts = changes && self.syncing;
        if counts {
            self.conn
                .prepare_cached(
                    "UPDATE meta SET value = CASE key WHEN 'next_id' THEN ?1 WHEN 'time' THEN ?2 ELSE ?3 END
                     WHERE key IN ('next_id', 'time', 'commits')",
                )?
                .execute([next_id, self.clock.now_by_machine().0, self.commits + 1])?;
        }
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        if counts {
            self.saved_id = next_id;
            self.commits += 1;
            if let Some(mark) = &mut self.mark {
                mark.note(self.commits);
            }
        }
        if changes {
            self.unsynced =
                if self.syncing { None } else { self.unsynced.or(Some(Instant::now())) };
        }
        let unblocked = self.unblocked.take();
        if !unblocked.is_empty() {
            self.tell_unblocked.add(unblocked);
        }
        Ok(())
    }

    /// Answers calls that would store more than there is room for.
    fn refuse_growth(&mut self, group: Vec<Box<dyn Job>>) -> Vec<Box<dyn Job>> {
        let grows = group.iter().any(|job| job.kind().grows());
        if !grows || !self.disk.as_mut().is_some_and(Room::is_scarce) {
            return group;
        }
        let (refused, group): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|job| job.kind().grows());
        for job in refused {
            job.answer(Some(Failure::no_room()));
        }
        group
    }

    fn commit_group(&mut self, group: Vec<Box<dyn Job>>) {
        let mut group = self.refuse_growth(group);
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
                let mut failure = Failure::from(&error);
                if failure.class == Class::Damaged && group.len() > 1 {
                    failure.class = Class::Unavailable; // which of them met it is not known: all may try again
                }
                if failure.class == Class::Full
                    && let Some(disk) = &mut self.disk
                {
                    disk.ran_out();
                }
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
