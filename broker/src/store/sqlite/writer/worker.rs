//! The work of the writing thread: groups of calls, one transaction each, and housekeeping between them.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use rusqlite::Connection;

use super::{
    super::{
        checksum::{is_corruption, is_damage},
        failure::{Class, Failure},
        indexes::{MetBy, Upkeep},
        room::Room,
        runs::{self, Runs},
        schema::StoreFile,
        space, sweep,
        tx::{Tx, View},
    },
    call_queue::{CallQueue, Job, Kind},
    checkpointer::{Checkpointer, end, is_failed_sync},
    syncer::{self, Answers, Syncer},
};
use crate::{
    domain::{Clock, QueueName},
    metrics::Metrics,
    store::unblocked::Unblocked,
};

/// Pause between steps that return space to the disk, while there is space to return.
const SHRINK_EVERY: Duration = Duration::from_millis(50);
/// The same while calls come, to which each step costs time, unless the disk is nearly full.
const SHRINK_EVERY_IF_BUSY: Duration = Duration::from_millis(250);
/// Time after which a reserve is on disk at the latest.
pub(super) const LAZY_FOR: Duration = Duration::from_millis(10);

/// Measures how many items a transaction stores and settles.
fn note_batches(metrics: &Metrics, group: &[Box<dyn Job>]) {
    let (mut pushed, mut settled) = (0, 0);
    for job in group {
        match job.kind() {
            Kind::Push { items, .. } => pushed += items,
            Kind::Commit(items) | Kind::Settle(items) => settled += items,
            Kind::SettleAndPush { .. } => settled += 1,
            Kind::Reserve | Kind::Items | Kind::Other => {}
        }
    }
    for (call, items) in [("push", pushed), ("settle", settled)] {
        if items > 0 {
            metrics.batch(call, items);
        }
    }
}

/// The state of the writing thread.
pub(super) struct Worker {
    pub(super) metrics: Arc<OnceLock<Arc<Metrics>>>,
    /// `None` in memory. Its connection is closed before the writer's, which writes the rest of the log into the file.
    pub(super) checkpointer: Option<Checkpointer>,
    /// `None` in memory. It gives its last answers before the connection is closed.
    pub(super) syncer: Option<Syncer>,
    pub(super) conn: Connection,
    pub(super) tag: [u8; 4],
    pub(super) clock: Arc<Clock>,
    pub(super) next_id: Arc<AtomicI64>,
    /// `next_id` as it is in the file.
    pub(super) saved_id: i64,
    /// Number of commits of the file whose answers wait for the disk.
    pub(super) commits: i64,
    /// True if the last of them has not been given to the syncer.
    pub(super) to_sync: bool,
    /// Whether there are leases of many items.
    pub(super) runs: Arc<Runs>,
    pub(super) disk: Option<Room>,
    pub(super) upkeep: Upkeep,
    /// Queues to notify when this transaction is committed.
    pub(super) unblocked: RefCell<BTreeSet<QueueName>>,
    /// Damaged rows that stay where they are.
    pub(super) passed_over: RefCell<HashSet<i64>>,
    pub(super) notify_unblocked: Arc<Unblocked>,
    /// Rows changed on the connection before this transaction.
    pub(super) changes: u64,
    /// Since when the log has had something that nobody is about to sync.
    pub(super) unsynced: Option<Instant>,
    /// Released after the connection is closed.
    pub(super) file: Option<Arc<StoreFile>>,
}

impl Worker {
    pub(super) fn work(mut self, arrivals: &mpsc::Receiver<Box<dyn Job>>, sweep_every: Duration) {
        let mut call_queue = CallQueue::default();
        let mut next_sweep = Instant::now() + sweep_every;
        let mut last_call = None;
        loop {
            if call_queue.is_empty() {
                let sync_by = self.unsynced.map(|since| since + LAZY_FOR);
                let until = [sync_by, self.upkeep.due()].into_iter().flatten().min();
                let until = until.map_or(next_sweep, |until| until.min(next_sweep));
                match arrivals.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(job) => call_queue.add(job),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
            call_queue.add_all(arrivals);
            let had_room = !self.is_scarce();
            let has_calls = !call_queue.is_empty();
            let answers = self.commit_group(call_queue.next_group());
            call_queue.add_all(arrivals);
            self.answer(answers, !call_queue.is_empty());
            self.sync_if_due(!call_queue.is_empty());
            if has_calls {
                last_call = Some(Instant::now());
            }
            if had_room && self.is_scarce() {
                next_sweep = Instant::now(); // returned space is needed at once
            }
            self.look_after_log();
            self.look_after_indexes();
            if Instant::now() >= next_sweep {
                let is_busy = last_call.is_some_and(|last| last.elapsed() < SHRINK_EVERY);
                // A sweep takes a bounded chunk at a time, with calls in between.
                let more = self.sweep();
                let shrink_every =
                    if is_busy && !self.is_scarce() { SHRINK_EVERY_IF_BUSY } else { SHRINK_EVERY };
                let pause = match (more, self.give_space_back()) {
                    (true, _) => Duration::ZERO,
                    (false, true) => shrink_every.min(sweep_every),
                    (false, false) => sweep_every,
                };
                next_sweep = Instant::now() + pause;
                if pause == sweep_every
                    && let Some(syncer) = &self.syncer
                {
                    syncer.sync_mark();
                }
            }
        }
    }

    /// Returns true if the disk was nearly full when that was last looked at.
    fn is_scarce(&self) -> bool {
        self.disk.as_ref().is_some_and(Room::was_scarce)
    }

    /// Syncs what reserves and housekeeping wrote, if it has waited long enough for others.
    fn sync_if_due(&mut self, calls_wait: bool) {
        if self.unsynced.is_some_and(|since| since.elapsed() >= LAZY_FOR) {
            self.to_sync = true;
            self.answer(Answers::new(), calls_wait);
        }
    }

    /// Answers calls when what they wrote is on disk, and what they read of others.
    fn answer(&mut self, answers: Answers, calls_wait: bool) {
        let to_sync = std::mem::take(&mut self.to_sync);
        if to_sync {
            self.unsynced = None;
        } else if answers.is_empty() {
            return;
        }
        match &self.syncer {
            Some(syncer) => syncer.answer(answers, to_sync.then_some(self.commits), calls_wait),
            None => syncer::give(answers),
        }
    }

    fn look_after_log(&mut self) {
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.look_after(&self.conn);
            if let Some(metrics) = self.metrics.get() {
                metrics.sqlite_log_bytes(checkpointer.length());
            }
        }
    }

    /// Compares some more items with their indexes, until all are compared.
    fn look_after_indexes(&mut self) {
        let view = View { conn: &self.conn, now: self.clock.now_by_machine(), tag: self.tag };
        let unblocked = self.upkeep.go_on(&view);
        self.tell(&unblocked);
    }

    /// Ends the leases of many items that cannot be written into their items. True if there were any, so that a call that
    /// failed may be tried again.
    fn end_damaged_leases(&self) -> bool {
        self.runs.any()
            && runs::write_out_or_end(&self.conn).unwrap_or_else(|error| {
                tracing::error!(%error, "could not write leases into their items");
                false
            })
    }

    /// Rebuilds damaged indexes. True if there were any, so that a call that failed may be tried again.
    fn mend_indexes(&mut self) -> bool {
        let view = View { conn: &self.conn, now: self.clock.now_by_machine(), tag: self.tag };
        let mended = self.upkeep.mend(&view, MetBy::Writer);
        let is_mended = mended.is_some();
        self.tell(&mended.unwrap_or_default());
        is_mended
    }

    fn tell(&self, unblocked: &BTreeSet<String>) {
        if !unblocked.is_empty() {
            let queues = unblocked.iter().filter_map(|name| QueueName::parse("queue", name).ok());
            self.notify_unblocked.add(queues);
        }
    }

    /// Returns some of the file's free pages to the disk, and the log's space too if the disk is nearly full. True if
    /// there may soon be more to return.
    fn give_space_back(&mut self) -> bool {
        let scarce = self.is_scarce();
        if scarce && let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.empty(&self.conn);
        }
        match space::is_wasted(&self.conn, scarce) {
            Ok(false) => return scarce,
            Ok(true) => {}
            Err(error) => {
                tracing::warn!(%error, "could not read how much of the file is unused");
                return false;
            }
        }
        let given = self.transaction(|tx| space::free_pages(tx.conn));
        if let Err(error) = &given {
            tracing::warn!(%error, "could not return space to the disk");
        }
        scarce || given.is_ok()
    }

    fn sweep(&mut self) -> bool {
        let start = Instant::now();
        let swept = self.transaction(|tx| runs::write_out(tx).and_then(|()| sweep::chunk(tx)));
        if let Some(metrics) = self.metrics.get() {
            metrics.swept(start.elapsed());
        }
        match swept {
            Ok(more) => more,
            Err(error) => {
                tracing::warn!(%error, "could not remove expired items; trying again later");
                is_damage(&error) && self.end_damaged_leases()
                    || is_corruption(&error) && self.mend_indexes()
            }
        }
    }

    fn transaction<T>(
        &mut self,
        work: impl FnOnce(&Tx<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        self.begin()?;
        let done = work(&self.tx()).and_then(|done| self.commit(false).map(|()| done));
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
            runs: &self.runs,
            unblocked: &self.unblocked,
            passed_over: &self.passed_over,
        }
    }

    fn begin(&mut self) -> rusqlite::Result<()> {
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        self.changes = self.conn.total_changes();
        Ok(())
    }

    /// Commits. `answered_durably` if the answers to what was done wait for the disk.
    fn commit(&mut self, answered_durably: bool) -> rusqlite::Result<()> {
        let next_id = self.next_id.load(Ordering::Relaxed);
        // A commit without changes writes nothing and needs no sync.
        let changes = self.conn.total_changes() != self.changes || next_id != self.saved_id;
        let counts = changes && answered_durably;
        let no_runs = self.runs.any() && runs::are_none(&self.conn);
        if counts {
            self.conn
                .prepare_cached(
                    "UPDATE meta SET value = CASE key WHEN 'next_id' THEN ?1 WHEN 'time' THEN ?2 ELSE ?3 END
                     WHERE key IN ('next_id', 'time', 'commits')",
                )?
                .execute([next_id, self.clock.now_by_machine().0, self.commits + 1])?;
            self.announce(self.commits + 1); // others see it before this thread goes on
        }
        let committed =
            self.conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        if let Err(error) = committed {
            self.announce(self.commits);
            // SQLite itself syncs the beginning of a log.
            if let Some(file) = self.file.as_ref().filter(|_| is_failed_sync(&error)) {
                end(file, &error);
            }
            return Err(error);
        }
        if no_runs {
            self.runs.none_left();
        }
        if counts {
            self.saved_id = next_id;
            self.commits += 1;
            self.to_sync = true;
        } else if changes {
            self.unsynced = self.unsynced.or_else(|| Some(Instant::now()));
        }
        let unblocked = self.unblocked.take();
        if !unblocked.is_empty() {
            self.notify_unblocked.add(unblocked);
        }
        Ok(())
    }

    fn announce(&self, commits: i64) {
        if let Some(syncer) = &self.syncer {
            syncer.announce(commits);
        }
    }

    /// Refuses calls that would store more than there is room for, and returns the others.
    fn refuse_growth(&mut self, group: Vec<Box<dyn Job>>) -> Vec<Box<dyn Job>> {
        let grows = group.iter().any(|job| job.kind().grows());
        let unwritten = self.checkpointer.as_ref().map_or(0, Checkpointer::unwritten);
        if !grows || !self.disk.as_mut().is_some_and(|disk| disk.is_scarce(unwritten)) {
            return group;
        }
        let (refused, group): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|job| job.kind().grows());
        for job in refused {
            job.answer(Some(Failure::no_room()));
        }
        group
    }

    /// Does what calls ask for. Returns them with their failures, to be answered once that is on disk.
    fn commit_group(&mut self, group: Vec<Box<dyn Job>>) -> Answers {
        let group = self.refuse_growth(group);
        if group.is_empty() {
            return Answers::new();
        }
        if let Some(metrics) = self.metrics.get() {
            note_batches(metrics, &group);
        }
        let (without_room, mut answers): (Answers, Answers) =
            self.try_group(group).into_iter().partition(|(job, failure)| {
                let is_full = failure.as_ref().is_some_and(|failure| failure.class == Class::Full);
                is_full && job.kind().is_repeatable()
            });
        // The room that was set aside for these is free now.
        if !without_room.is_empty() {
            let again = without_room.into_iter().map(|(job, _)| job).collect();
            answers.extend(self.try_group(again));
        }
        answers
    }

    /// Runs calls in one transaction. Returns each with its failure, if it failed.
    fn try_group(&mut self, mut group: Vec<Box<dyn Job>>) -> Answers {
        let passed_over = self.passed_over.borrow().len();
        let failures = match self.run_group(&mut group) {
            Ok(mut failures) => {
                let mut damage: Vec<&mut Failure> =
                    failures.iter_mut().flatten().filter(|failure| failure.is_damage()).collect();
                let is_over = !damage.is_empty() && self.end_damaged_leases();
                if !is_over {
                    damage.retain(|failure| failure.class == Class::Corrupt);
                }
                if is_over || !damage.is_empty() && self.mend_indexes() {
                    for failure in damage {
                        failure.class = Class::Unavailable;
                    }
                }
                failures
            }
            Err(error) => {
                if !self.conn.is_autocommit()
                    && let Err(error) = self.conn.execute_batch("ROLLBACK")
                {
                    tracing::error!(%error, "could not roll back");
                }
                let mut failure = Failure::from(&error);
                // An item that was passed over explains the failure. Otherwise an index may be the cause.
                let is_explained = self.passed_over.borrow().len() > passed_over;
                let is_mended = failure.is_damage() && self.end_damaged_leases()
                    || failure.class == Class::Corrupt && !is_explained && self.mend_indexes();
                if failure.is_damage() && (is_mended || group.len() > 1) {
                    failure.class = Class::Unavailable; // which call met the damage is not known: all may try again
                }
                vec![Some(failure); group.len()]
            }
        };
        let is_full = failures.iter().flatten().any(|failure| failure.class == Class::Full);
        if is_full && let Some(disk) = &mut self.disk {
            disk.ran_out();
        }
        group.into_iter().zip(failures).collect()
    }

    /// Runs the calls of a group in one transaction. Returns the failure of each call that failed by itself. An error
    /// fails all calls.
    fn run_group(&mut self, group: &mut [Box<dyn Job>]) -> rusqlite::Result<Vec<Option<Failure>>> {
        self.begin()?;
        let answered_durably = group.iter().any(|job| *job.kind() != Kind::Reserve);
        let mut failures = Vec::with_capacity(group.len());
        if let [only] = group {
            only.run(&self.tx())?;
            failures.push(None);
        } else {
            for job in group {
                self.conn.prepare_cached("SAVEPOINT call")?.execute([])?;
                match job.run(&self.tx()) {
                    Ok(()) => failures.push(None),
                    // A full disk and similar errors undo the whole transaction.
                    Err(error) if self.conn.is_autocommit() => return Err(error),
                    Err(error) => {
                        self.conn.prepare_cached("ROLLBACK TO call")?.execute([])?;
                        failures.push(Some(Failure::from(&error)));
                    }
                }
                self.conn.prepare_cached("RELEASE call")?.execute([])?;
            }
        }
        self.commit(answered_durably)?;
        Ok(failures)
    }
}
