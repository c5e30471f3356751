//! The one thread that writes. All calls that have gathered while it was busy become one transaction, which one sync
//! makes durable: the group commit. Each call has a savepoint, so that a call that fails does not affect the others.
//! SQLite itself does not sync commits (`synchronous = NORMAL`): [`syncer`] does, while the writer goes on with the next
//! transaction.
//!
//! # Which answers wait for the disk
//! All answers but those of reserves. And every answer, also one of a reserve or of a call that changed nothing, waits for
//! transactions before it whose answers wait: it may rest on them, for example on a push that it says is a duplicate of
//! another. So do readers beside the writer, but for those whose answers nobody outside learns of.
//!
//! A transaction of reserves alone needs no sync of its own. It is atomic, visible to all later calls, and survives a
//! killed broker, because the operating system has it. But a power cut may undo it. What it undoes is a lease, which then
//! never was: the item is ready again, and nobody else has it, because the broker that handed it out died as well. A
//! consumer that outlived the broker holds a receipt whose token the item does not have, which is `LEASE_LOST`, as for any
//! lost lease. Lapsed leases that were counted and items that were dead-lettered on the way are found and counted again.
//! The same goes for housekeeping. Nothing that is answered as durable can rest on such a transaction: the log is one
//! file, written in order and read up to the first gap, so the next sync (of a push, of a settle) keeps what came before
//! it. A popped item is settled, and the settle synced, before the item is handed out. If no such sync comes, the writer
//! makes one after [`worker::LAZY_FOR`].

mod call_queue;
mod checkpointer;
mod syncer;
mod worker;

use std::{
    cell::RefCell,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicI64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use rusqlite::Connection;
use tokio::{
    sync::{Semaphore, oneshot},
    task::unconstrained,
};

pub(super) use self::call_queue::Kind;
use self::{
    call_queue::{Call, Job},
    checkpointer::Checkpointer,
    syncer::{Progress, Syncer},
    worker::Worker,
};
use super::{
    super::{Result, StoreError, unblocked::Unblocked},
    clock,
    failure::{ended, failed},
    indexes::Upkeep,
    mark::Mark,
    room::Room,
    runs::{self, KeptOut, Runs},
    schema::StoreFile,
    tx::{Tx, View, item_id},
};
use crate::{
    domain::{Clock, ItemId},
    essential::essential_thread,
    metrics::Metrics,
};

/// Limit of calls in the queue; more calls wait before they are queued.
const MAX_WAITING: usize = 4_096;

/// What the writer needs of its store.
pub(super) struct Station {
    /// The connection, which nothing else uses.
    pub(super) conn: Connection,
    /// The start of all ids of this store.
    pub(super) tag: u32,
    pub(super) clock: Arc<Clock>,
    /// `None` in memory.
    pub(super) file: Option<Arc<StoreFile>>,
    /// Set by readers that met damage, of which an index may be the cause.
    pub(super) suspected: Arc<AtomicBool>,
    /// Pause between sweeps for expired items.
    pub(super) sweep_every: Duration,
}

/// The handle of the writing thread.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<Box<dyn Job>>>,
    room: Arc<Semaphore>,
    thread: Option<thread::JoinHandle<()>>,
    metrics: Arc<OnceLock<Arc<Metrics>>>,
    tag: [u8; 4],
    /// The row of the next item.
    next_id: Arc<AtomicI64>,
    progress: Arc<Progress>,
    runs: Arc<Runs>,
    pub(super) unblocked: Arc<Unblocked>,
}

impl Writer {
    /// Starts the thread.
    pub(super) fn start(station: Station) -> Result<Self> {
        let Station { conn, tag, clock, file, suspected, sweep_every } = station;
        let view = View { conn: &conn, now: clock.now_by_machine(), tag: tag.to_be_bytes() };
        let upkeep = Upkeep::start(&view, suspected).map_err(failed)?;
        let runs = Arc::new(Runs::found(&conn).map_err(failed)?);
        clock::resume(&conn, &clock).map_err(failed)?;
        let count = |key| {
            let sql = "SELECT value FROM meta WHERE key = ?1";
            conn.query_row(sql, [key], |row| row.get::<_, i64>(0)).map_err(failed)
        };
        let (next_id, commits) = (count("next_id")?, count("commits")?);
        let beside = |what: &str, error: std::io::Error| {
            StoreError::Unsupported(format!(
                "cannot write the {what} beside the store's file: {error}"
            ))
        };
        let (tag_bytes, next_row) = (tag.to_be_bytes(), Arc::new(AtomicI64::new(next_id)));
        let (metrics, progress) = (Arc::new(OnceLock::new()), Arc::new(Progress::new(commits)));
        let (mut syncer, mut disk, mut checkpointer) = (None, None, None);
        if let Some(file) = &file {
            let mut mark = Mark::open(&file.path, tag).map_err(|e| beside("mark", e))?;
            mark.note(commits);
            syncer = Some(Syncer::start(
                Arc::clone(file),
                mark,
                Arc::clone(&progress),
                Arc::clone(&metrics),
            )?);
            disk = Some(Room::beside(&file.path).map_err(|e| beside("reserve", e))?);
            checkpointer = Some(Checkpointer::start(Arc::clone(file))?);
        }
        let (jobs, waiting) = mpsc::channel(); // bounded by `room`
        let unblocked = Arc::new(Unblocked::default());
        let worker = Worker {
            metrics: Arc::clone(&metrics),
            checkpointer,
            syncer,
            conn,
            tag: tag_bytes,
            clock,
            next_id: Arc::clone(&next_row),
            saved_id: next_id,
            commits,
            to_sync: false,
            runs: Arc::clone(&runs),
            disk,
            upkeep,
            unblocked: RefCell::default(),
            passed_over: RefCell::default(),
            notify_unblocked: unblocked.clone(),
            changes: 0,
            unsynced: None,
            file,
        };
        let thread = start_thread("sqlite-writer", move || worker.work(&waiting, sweep_every))?;
        let room = Arc::new(Semaphore::new(MAX_WAITING));
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self {
            jobs,
            room,
            thread,
            metrics,
            tag: tag_bytes,
            next_id: next_row,
            progress,
            runs,
            unblocked,
        })
    }

    /// Returns the id of the item that was stored last, whether its transaction is committed or not.
    pub(super) fn last_id(&self) -> ItemId {
        item_id(self.tag, self.next_id.load(Ordering::Relaxed) - 1)
    }

    /// Writes all leases into their items. While the result lives they stay there.
    pub(super) async fn leases_in_items(&self) -> Result<KeptOut<'_>> {
        let kept_out = self.runs.keep_out();
        if kept_out.are_there() {
            self.call(Kind::Reserve, runs::write_out).await?;
        }
        Ok(kept_out)
    }

    /// Waits until all is on disk that a reader may have seen before.
    pub(super) async fn synced(&self) -> Result<()> {
        if self.progress.is_synced() {
            return Ok(());
        }
        self.call(Kind::Reserve, |_| Ok(())).await // its answer waits for all before it
    }

    /// Measures from now on how many items share a transaction, and how long sweeps take.
    pub(super) fn measure(&self, metrics: &Arc<Metrics>) {
        let _ = self.metrics.set(Arc::clone(metrics)); // the first one stays
    }

    /// Does as [`Self::call`] with work of a kind that is not repeatable, which runs once.
    pub(super) async fn call_once<T: Send + 'static>(
        &self,
        kind: Kind,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut work = Some(work);
        let run = move |tx: &Tx<'_>| match work.take() {
            Some(work) => work(tx),
            None => Err(rusqlite::Error::InvalidQuery), // the writer repeats no call of this kind
        };
        self.call(kind, run).await
    }

    /// Runs `work` in a transaction. The result comes when the transaction is durable, unless the call is a reserve.
    ///
    /// `work` may run again after its transaction was rolled back, if its kind is [repeatable](Kind::is_repeatable).
    pub(super) async fn call<T: Send + 'static>(
        &self,
        kind: Kind,
        work: impl FnMut(&Tx<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        // Calls queue in the order in which they are first polled. Without `unconstrained`, a task that has used up its
        // share of time would be suspended before its call is queued.
        let permit = unconstrained(self.room.clone().acquire_owned());
        let permit = permit.await.map_err(|_| ended())?;
        let (reply, answer) = oneshot::channel();
        let job = Call { kind, work, result: None, reply, _permit: permit };
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(Box::new(job)).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

/// Starts a thread whose panic ends the process.
fn start_thread(
    name: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(move || essential_thread(name, work)).map_err(|e| StoreError::Internal {
        reason: format!("cannot start the thread {name}"),
        source: Some(e.into()),
    })
}

impl Drop for Writer {
    /// Ends the thread after the calls that were queued before, so that the file can be opened again at once.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has ended the process
        }
    }
}
