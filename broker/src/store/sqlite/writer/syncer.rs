//! Syncs the log, and gives the answers that wait for it.
//!
//! While calls wait, a thread syncs beside the writer, which goes on with them. What was written meanwhile shares the next
//! sync. If no call waits, the writer syncs by itself, for another thread would only have to be woken.

use std::{
    fs::File,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use parking_lot::Mutex;

use super::{
    super::{
        super::{Result, StoreError},
        beside::beside,
        failure::Failure,
        mark::Mark,
        schema::StoreFile,
    },
    call_queue::Job,
    checkpointer, start_thread,
};
use crate::metrics::Metrics;

/// The name of the thread.
const THREAD: &str = "sqlite-sync";

/// A call whose transaction has ended, with its failure, if it failed.
type Answer = (Box<dyn Job>, Option<Failure>);
/// Calls to answer together.
pub(super) type Answers = Vec<Answer>;

/// What is to be answered together.
struct Order {
    answers: Answers,
    /// The number of commits that are to be on disk before. `None` if nothing was written that needs to be.
    commits: Option<i64>,
}

/// How far the log is on disk.
#[derive(Debug)]
pub(super) struct Progress {
    /// Number of commits that others see, or are about to see.
    written: AtomicI64,
    /// Number of those that are on disk.
    synced: AtomicI64,
}

impl Progress {
    pub(super) fn new(commits: i64) -> Self {
        Self { written: commits.into(), synced: commits.into() }
    }

    /// Returns true if all that anybody can see is on disk.
    pub(super) fn is_synced(&self) -> bool {
        let synced = self.synced.load(Ordering::SeqCst);
        synced >= self.written.load(Ordering::SeqCst)
    }
}

/// The handle of the thread.
pub(super) struct Syncer {
    log: Arc<Log>,
    orders: Option<mpsc::Sender<Order>>,
    /// Orders that are not done.
    open: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Syncer {
    /// Starts the thread.
    pub(super) fn start(
        file: Arc<StoreFile>,
        mark: Mark,
        progress: Arc<Progress>,
        metrics: Arc<OnceLock<Arc<Metrics>>>,
    ) -> Result<Self> {
        let log = Arc::new(Log::open(file, mark, progress, metrics)?);
        let (orders, ordered) = mpsc::channel(); // bounded by the calls that may wait
        let open = Arc::new(AtomicUsize::new(0));
        let (of_thread, left) = (Arc::clone(&log), Arc::clone(&open));
        let work = move || work(&ordered, &left, |commits| of_thread.sync(commits));
        let thread = start_thread(THREAD, work)?;
        Ok(Self { log, orders: Some(orders), open, thread: Some(thread) })
    }

    /// Says that others may see this number of commits from now on.
    pub(super) fn announce(&self, commits: i64) {
        self.log.progress.written.store(commits, Ordering::SeqCst);
    }

    /// Answers calls once this number of commits is on disk, and all that they may have read.
    pub(super) fn answer(&self, answers: Answers, commits: Option<i64>, calls_wait: bool) {
        let is_idle = self.open.load(Ordering::Acquire) == 0;
        match commits {
            None if is_idle => give(answers),
            Some(commits) if is_idle && !calls_wait => {
                self.log.sync(commits);
                give(answers);
            }
            _ => {
                self.open.fetch_add(1, Ordering::Relaxed);
                let order = Order { answers, commits };
                let sent = self.orders.as_ref().map(|orders| orders.send(order));
                debug_assert!(
                    matches!(sent, Some(Ok(()))),
                    "a panic of the thread ends the process"
                );
            }
        }
    }

    /// Syncs the mark, so that it survives a power cut.
    pub(super) fn sync_mark(&self) {
        self.log.mark.lock().sync();
    }
}

impl Drop for Syncer {
    /// Ends the thread after the orders that were given before, and syncs the mark.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has ended the process
        }
        self.sync_mark();
    }
}

/// Does orders in turn. Those that wait at the same time share a sync, but no answer waits for a sync that it does not need.
fn work(ordered: &mpsc::Receiver<Order>, open: &AtomicUsize, sync: impl Fn(i64)) {
    while let Ok(first) = ordered.recv() {
        let mut waiting = vec![first];
        waiting.extend(ordered.try_iter());
        let done = waiting.len();
        let unsynced = waiting.iter().position(|order| order.commits.is_some()).unwrap_or(done);
        let rest = waiting.split_off(unsynced);
        give(waiting.into_iter().flat_map(|order| order.answers));
        if let Some(commits) = rest.iter().filter_map(|order| order.commits).max() {
            sync(commits);
        }
        give(rest.into_iter().flat_map(|order| order.answers));
        open.fetch_sub(done, Ordering::Release);
    }
}

/// Answers calls.
pub(super) fn give(answers: impl IntoIterator<Item = Answer>) {
    for (job, failure) in answers {
        job.answer(failure);
    }
}

/// The log beside the store's file.
struct Log {
    written: File,
    mark: Mutex<Mark>,
    progress: Arc<Progress>,
    metrics: Arc<OnceLock<Arc<Metrics>>>,
    file: Arc<StoreFile>,
}

impl Log {
    fn open(
        file: Arc<StoreFile>,
        mark: Mark,
        progress: Arc<Progress>,
        metrics: Arc<OnceLock<Arc<Metrics>>>,
    ) -> Result<Self> {
        let path = beside(&file.path, "-wal");
        let written = File::open(&path).map_err(|error| {
            StoreError::Unsupported(format!("cannot open the log {}: {error}", path.display()))
        })?;
        Ok(Self { written, mark: Mutex::new(mark), progress, metrics, file })
    }

    /// Syncs the log, which has this number of commits. The process ends if that fails: SQLite takes what it has written for
    /// written, and the calls that wait for their answers have done what others have seen.
    fn sync(&self, commits: i64) {
        let start = Instant::now();
        if let Err(error) = self.written.sync_data() {
            checkpointer::end(&self.file, &error);
        }
        if let Some(metrics) = self.metrics.get() {
            metrics.sqlite_synced(start.elapsed());
        }
        self.mark.lock().note(commits);
        self.progress.synced.store(commits, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sqlite::{mark, tx::Tx, writer::Kind};

    /// What happened, in its order.
    type Events = Arc<Mutex<Vec<String>>>;

    struct Told {
        name: &'static str,
        events: Events,
    }

    impl Job for Told {
        fn kind(&self) -> &Kind {
            &Kind::Other
        }

        fn abandoned(&self) -> bool {
            false
        }

        fn run(&mut self, _: &Tx<'_>) -> rusqlite::Result<()> {
            Ok(())
        }

        fn answer(self: Box<Self>, _: Option<Failure>) {
            let by_thread = thread::current().name() == Some(THREAD);
            let told = if by_thread {
                format!("{}, by the thread", self.name)
            } else {
                self.name.to_owned()
            };
            self.events.lock().push(told);
        }
    }

    fn answers(name: &'static str, events: &Events) -> Answers {
        vec![(Box::new(Told { name, events: Arc::clone(events) }), None)]
    }

    #[test]
    fn orders_share_a_sync_and_what_needs_none_does_not_wait_for_one() {
        let events = Events::default();
        let (orders, ordered) = mpsc::channel();
        let order = |name, commits| {
            orders.send(Order { answers: answers(name, &events), commits }).unwrap();
        };
        order("read nothing new", None);
        order("wrote", Some(7));
        order("read what was written", None);
        order("wrote more", Some(8));
        drop(orders);
        let open = AtomicUsize::new(4);
        work(&ordered, &open, |commits| events.lock().push(format!("sync {commits}")));
        let expected =
            ["read nothing new", "sync 8", "wrote", "read what was written", "wrote more"];
        assert_eq!(*events.lock(), expected);
        assert_eq!(open.into_inner(), 0);
    }

    #[test]
    fn the_writer_syncs_if_no_call_waits_and_the_thread_has_nothing_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.db");
        let file = Arc::new(StoreFile::lock(&path).unwrap());
        let _writer = file.open_writer().unwrap();
        let mark = Mark::open(&path, 7).unwrap();
        let progress = Arc::new(Progress::new(0));
        let syncer =
            Syncer::start(Arc::clone(&file), mark, Arc::clone(&progress), Arc::default()).unwrap();
        syncer.announce(2);
        let noted = || mark::read(&path).unwrap().map(|noted| noted.commits);
        let events = Events::default();

        syncer.answer(answers("read", &events), None, false);
        assert_eq!((noted(), events.lock().len()), (None, 1));
        syncer.answer(answers("wrote", &events), Some(1), false);
        assert_eq!((noted(), events.lock().len()), (Some(1), 2));

        syncer.open.fetch_add(1, Ordering::Relaxed); // as if the thread were at work
        syncer.answer(answers("read", &events), None, false);
        syncer.answer(answers("wrote", &events), Some(2), false);
        assert!(!progress.is_synced() || noted() == Some(2));
        drop(syncer);
        assert_eq!(noted(), Some(2));
        assert!(progress.is_synced());
        let expected = ["read", "wrote", "read, by the thread", "wrote, by the thread"];
        assert_eq!(*events.lock(), expected);
    }
}
