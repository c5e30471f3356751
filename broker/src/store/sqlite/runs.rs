//! Leases of many items that lie side by side.
//!
//! A lease changes a row and moves its entry in an index, and the commit that mostly follows soon deletes both. So a long
//! lease to one consumer is one row of `runs` at first, which the commit deletes with the items. Everything else that
//! looks at leases, or changes items otherwise, has the runs [written out](write_out) into their items before
//! ([`Kind::finds_leases`](super::writer::Kind), `read_items`): only pushes, reserves, commits and the question when a lease
//! ends know of them.
//!
//! # Where a reserve begins
//! The items of a run stay where they are in the index, so the next reserve begins behind them. That is right because
//! at the [`End`] of a run all items of its queue and priority up to there are in runs:
//!
//! * A reserve takes what comes first, and leases what it takes.
//! * What becomes ready later is behind: its `when` is no earlier than the time, and the last item of a run was due before
//!   the time at which it was leased.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rusqlite::{Connection, Row, params};

use super::{
    checksum::{corruption, is_damage},
    failure::Class,
    tx::{Tx, View},
};
use crate::domain::{Priority, Queue, Receipt, Timestamp};

/// A run has so many items at least. Debug builds have them for any, so that all tests meet them.
const MIN_ITEMS: usize = if cfg!(debug_assertions) { 1 } else { 64 };
/// Limit of runs in the file. Shorter ones come of commits out of the middle.
const MAX_RUNS: i64 = 8;
/// Limit of items in all runs, whose leases are written out at once.
const MAX_ITEMS: i64 = 4_000;
/// Limit of bytes of the items of one run, which are written anew with their leases.
const MAX_BYTES: usize = 512 << 10;

/// What the writer and readers beside it must know of each other.
#[derive(Debug)]
pub(super) struct Runs {
    /// False only if no run is in the file.
    any: AtomicBool,
    /// Number of readers that find all leases in their items.
    readers: AtomicUsize,
}

impl Runs {
    /// Writes out the runs of a file that is opened. If there is no room for that, later calls do it.
    pub(super) fn found(conn: &Connection) -> rusqlite::Result<Self> {
        match write_out_or_end(conn) {
            Err(error) if Class::of(&error) != Class::Full => return Err(error),
            Ok(_) | Err(_) => {}
        }
        Ok(Self { any: (!are_none(conn)).into(), readers: AtomicUsize::new(0) })
    }

    /// Notes a reader. While the result lives no run is added. If it says so, the reader must have the runs written out.
    pub(super) fn keep_out(&self) -> KeptOut<'_> {
        self.readers.fetch_add(1, Ordering::SeqCst);
        KeptOut { runs: self }
    }

    /// Returns true if there may be runs in the file.
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Says that there may be runs from now on, and returns true if one may be added: no reader is under way. One that comes later sees
    /// what this said.
    fn begin_to_add(&self) -> bool {
        self.any.store(true, Ordering::SeqCst);
        self.readers.load(Ordering::SeqCst) == 0
    }

    /// Notes that a transaction that left no run is committed.
    pub(super) fn none_left(&self) {
        self.any.store(false, Ordering::SeqCst);
    }
}

/// While this lives, no run is added.
pub(super) struct KeptOut<'r> {
    runs: &'r Runs,
}

impl KeptOut<'_> {
    /// Returns true if there may be runs in the file.
    pub(super) fn are_there(&self) -> bool {
        self.runs.any()
    }
}

impl Drop for KeptOut<'_> {
    fn drop(&mut self) {
        self.runs.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A row of `runs`.
#[derive(Debug, Clone)]
pub(super) struct Run {
    /// Rows of the first and the last item.
    pub(super) first: i64,
    pub(super) last: i64,
    pub(super) queue: String,
    pub(super) priority: u8,
    /// The `when` of the last item, or of one that was behind it.
    pub(super) up_to: i64,
    /// End of the lease.
    pub(super) until: i64,
    pub(super) lock: String,
    /// Number of deliveries before this one.
    pub(super) delivered: u32,
    pub(super) attempt: u32,
    pub(super) consumer: Option<String>,
    /// When the first of them expires.
    pub(super) expires: Option<i64>,
}

/// The columns that [`Run::read`] reads.
macro_rules! run_columns {
    () => {
        "first, last, queue, priority, up_to, until, lock, delivered, attempt, consumer, expires"
    };
}

impl Run {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            first: row.get(0)?,
            last: row.get(1)?,
            queue: row.get(2)?,
            priority: row.get(3)?,
            up_to: row.get(4)?,
            until: row.get(5)?,
            lock: row.get(6)?,
            delivered: row.get(7)?,
            attempt: row.get(8)?,
            consumer: row.get(9)?,
            expires: row.get(10)?,
        })
    }

    fn insert(&self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        tx.conn
            .prepare_cached(concat!(
                "INSERT INTO runs (",
                run_columns!(),
                ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)"
            ))?
            .execute(params![
                self.first,
                self.last,
                self.queue,
                self.priority,
                self.up_to,
                self.until,
                self.lock,
                self.delivered,
                self.attempt,
                self.consumer,
                self.expires,
            ])
            .map(drop)
    }

    /// Returns the number of its items, whatever a damaged row says.
    pub(super) const fn items(&self) -> i64 {
        self.last.saturating_sub(self.first).saturating_add(1)
    }

    /// Returns what is left of the run without the rows from `from` to `to`.
    fn without(&self, from: i64, to: i64) -> impl Iterator<Item = Self> {
        let before = Self { last: self.last.min(from - 1), ..self.clone() };
        let behind = Self { first: self.first.max(to + 1), ..self.clone() };
        [before, behind].into_iter().filter(|left| left.first <= left.last)
    }

    fn delete(&self, conn: &Connection) -> rusqlite::Result<()> {
        conn.prepare_cached("DELETE FROM runs WHERE first = ?1")?.execute([self.first]).map(drop)
    }

    /// Writes the lease into the items, and deletes the run.
    fn write_out(&self, conn: &Connection) -> rusqlite::Result<()> {
        let written = lease(conn, self)?;
        let items = self.items();
        if written as i64 != items {
            // What is not there needs no lease.
            tracing::error!(
                queue = %self.queue, items, written,
                "the file has not all items that are leased; see `sluicegate check`"
            );
        }
        self.delete(conn)
    }
}

/// Writes a lease into the items of its rows. Returns their number.
pub(super) fn lease(conn: &Connection, run: &Run) -> rusqlite::Result<usize> {
    conn.prepare_cached(
        r#"UPDATE items SET due = "when", "when" = ?3, lock = ?4, deliveries = ?5, attempt = ?6, consumer = ?7
           WHERE id BETWEEN ?1 AND ?2 AND deliveries = ?8"#,
    )?
    .execute(params![
        run.first,
        run.last,
        run.until,
        run.lock,
        run.delivered.saturating_add(1),
        run.attempt,
        run.consumer,
        run.delivered,
    ])
}

/// Adds a run of items that have so many bytes, if there is room for it, and if nobody needs the lease in the items. Returns false otherwise.
/// The items must have one priority and no ordering keys, and those before them must be leased or gone.
pub(super) fn add(tx: &Tx<'_>, run: &Run, bytes: usize) -> rusqlite::Result<bool> {
    let items = run.items();
    if items < MIN_ITEMS as i64
        || bytes > MAX_BYTES
        || run.up_to >= tx.now.0
        || !tx.runs.begin_to_add()
    {
        return Ok(false);
    }
    let (runs, leased) = count(tx)?;
    if runs >= MAX_RUNS || leased + items > MAX_ITEMS {
        return Ok(false);
    }
    run.insert(tx)?;
    Ok(true)
}

/// Returns the numbers of runs and of their items.
fn count(tx: &Tx<'_>) -> rusqlite::Result<(i64, i64)> {
    tx.conn
        .prepare_cached("SELECT count(*), coalesce(sum(last - first + 1), 0) FROM runs")?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))
}

/// Where the runs of a queue end, for each priority.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub(super) when: i64,
    pub(super) row: i64,
}

impl End {
    /// Before all items.
    const START: Self = Self { when: i64::MIN, row: i64::MIN };

    /// Returns the ends of a queue without runs.
    pub(super) fn all_at_start() -> [Self; Priority::LEVELS as usize] {
        [Self::START; Priority::LEVELS as usize]
    }
}

/// Returns where the runs of a queue end, for each priority.
pub(super) fn ends(
    view: &View<'_>,
    queue: &Queue,
) -> rusqlite::Result<[End; Priority::LEVELS as usize]> {
    let mut ends = End::all_at_start();
    let mut runs =
        view.conn.prepare_cached("SELECT priority, up_to, last FROM runs WHERE queue = ?1")?;
    let mut runs = runs.query([queue.name.as_str()])?;
    while let Some(run) = runs.next()? {
        let (priority, when, row) = (run.get::<_, u8>(0)?, run.get(1)?, run.get(2)?);
        let Some(end) = ends.get_mut(usize::from(priority)) else { continue };
        if (when, row) > (end.when, end.row) {
            *end = End { when, row };
        }
    }
    Ok(ends)
}

/// Writes all leases out if one of the queue has lapsed, so that a reserve finds its items.
pub(super) fn write_out_if_lapsed(tx: &Tx<'_>, queue: &Queue) -> rusqlite::Result<()> {
    if !tx.runs.any() {
        return Ok(());
    }
    let mut lapsed =
        tx.conn.prepare_cached("SELECT 1 FROM runs WHERE queue = ?1 AND until <= ?2")?;
    if lapsed.exists(params![queue.name.as_str(), tx.now.0])? { write_out(tx) } else { Ok(()) }
}

/// Returns when the first lease of the queue that is a run ends after that time.
pub(super) fn next_lapse(
    view: &View<'_>,
    queue: &Queue,
    after: Timestamp,
) -> rusqlite::Result<Option<i64>> {
    view.conn
        .prepare_cached("SELECT min(until) FROM runs WHERE queue = ?1 AND until > ?2")?
        .query_row(params![queue.name.as_str(), after.0], |row| row.get(0))
}

/// Deletes the items from one row to another, if runs hold all of them for the receipt, which is of one of them. Returns
/// false otherwise; then the leases of none of these items are in a run.
pub(super) fn commit(
    tx: &Tx<'_>,
    [from, to]: [i64; 2],
    receipt: &Receipt,
) -> rusqlite::Result<bool> {
    if !tx.runs.any() {
        return Ok(false);
    }
    let touched: Vec<Run> = tx
        .conn
        .prepare_cached(concat!(
            "SELECT ",
            run_columns!(),
            " FROM runs WHERE first <= ?2 AND last >= ?1 ORDER BY first"
        ))?
        .query_map([from, to], Run::read)?
        .collect::<rusqlite::Result<_>>()?;
    if touched.is_empty() {
        return Ok(false);
    }
    let lock = receipt.token.to_string();
    // The token is of one reserve, which counted the deliveries that the receipt has.
    let are_held = touched
        .iter()
        .all(|run| run.lock == lock && run.expires.is_none_or(|expires| expires > tx.now.0));
    let held: i64 = touched.iter().map(|run| run.last.min(to) - run.first.max(from) + 1).sum();
    let is_cut_in_two = touched.first().is_some_and(|run| run.first < from && to < run.last);
    if !are_held || held != to - from + 1 || is_cut_in_two && count(tx)?.0 >= MAX_RUNS {
        write_out(tx)?;
        return Ok(false);
    }
    let mut delete = tx.conn.prepare_cached("DELETE FROM items WHERE id BETWEEN ?1 AND ?2")?;
    if delete.execute([from, to])? as i64 != held {
        return Err(corruption("not all items that are leased are there"));
    }
    for run in touched {
        run.delete(tx.conn)?;
        for left in run.without(from, to) {
            left.insert(tx)?;
        }
    }
    Ok(true)
}

/// Writes the leases of all runs into their items, each in a transaction of its own. A lease whose items are damaged ends
/// instead: they are handed out again, as after any lost lease, and the reserve that meets the damage sets it aside. Returns true
/// if there was one.
pub(super) fn write_out_or_end(conn: &Connection) -> rusqlite::Result<bool> {
    let runs = match all(conn) {
        Ok(runs) => runs,
        Err(error) if is_damage(&error) => {
            tracing::error!(%error, "it cannot be read which items are leased: they are handed out again");
            return conn.execute("DELETE FROM runs", []).map(|_| true);
        }
        Err(error) => return Err(error),
    };
    let mut any_ended = false;
    for run in runs {
        let tx = conn.unchecked_transaction()?;
        match run.write_out(&tx) {
            Ok(()) => tx.commit()?,
            Err(error) if is_damage(&error) => {
                tx.rollback()?;
                tracing::error!(
                    queue = %run.queue, %error,
                    "items are damaged, so that their lease cannot be written into them: it ends now; see `sluicegate check`"
                );
                run.delete(conn)?;
                any_ended = true;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(any_ended)
}

/// Writes the leases of all runs into their items.
pub(super) fn write_out(tx: &Tx<'_>) -> rusqlite::Result<()> {
    if !tx.runs.any() {
        return Ok(());
    }
    all(tx.conn)?.iter().try_for_each(|run| run.write_out(tx.conn))
}

/// Returns all runs.
pub(super) fn all(conn: &Connection) -> rusqlite::Result<Vec<Run>> {
    conn.prepare_cached(concat!("SELECT ", run_columns!(), " FROM runs"))?
        .query_map([], Run::read)?
        .collect()
}

/// Returns true if no run is in the file.
pub(super) fn are_none(conn: &Connection) -> bool {
    let any = conn.prepare_cached("SELECT 1 FROM runs").and_then(|mut any| any.exists([]));
    any.is_ok_and(|any| !any)
}
