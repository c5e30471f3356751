//! `sluicegate check`: finds out whether a store's file is whole.

use std::{
    fmt,
    path::Path,
    time::{Duration, Instant},
};

use rusqlite::{Connection, OpenFlags, config::DbConfig, params};

use super::{
    checksum::{Summed, is_damage, summed_columns, verify},
    definitions, mark, runs,
    schema::{identity, is_store, open_memory},
};

/// Pause between reports of progress.
const TELL_EVERY: Duration = Duration::from_secs(2);
/// Limit of faults of one kind that are named.
const MAX_NAMED: usize = 100;

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of items in the file.
    pub items: u64,
    /// Number of items of earlier versions, which have no checksum.
    pub without_checksum: u64,
    /// The faults, one line each: the first ones of each kind.
    pub faults: Vec<String>,
    /// Number of further faults.
    pub unnamed: u64,
}

impl Report {
    /// Returns true if the file has no fault.
    pub fn is_whole(&self) -> bool {
        self.faults.is_empty()
    }

    fn add(&mut self, named: &mut usize, fault: String) {
        *named += 1;
        if *named <= MAX_NAMED {
            self.faults.push(fault);
        } else {
            self.unnamed += 1;
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in &self.faults {
            writeln!(f, "{fault}")?;
        }
        if self.unnamed > 0 {
            writeln!(f, "and {} more", self.unnamed)?;
        }
        write!(f, "{} items", self.items)?;
        if self.without_checksum > 0 {
            write!(f, ", {} of them stored before there were checksums", self.without_checksum)?;
        }
        f.write_str(if self.is_whole() { ": the file is whole" } else { ": the file is damaged" })
    }
}

/// Checks a store's file, beside a broker or without one, and changes neither the file nor its log. `tell` is called
/// with the progress of the check.
///
/// # Errors
/// Why the file could not be checked.
pub fn check(path: &Path, mut tell: impl FnMut(String)) -> Result<Report, String> {
    // The mark is read before the file, because a running broker only moves ahead of its mark.
    let noted = mark::read(path).map_err(|e| format!("cannot read the mark: {e}"))?;
    let length =
        std::fs::metadata(path).map_err(|e| format!("cannot open {}: {e}", path.display()))?.len();
    let mut report = Report::default();
    match (length, noted) {
        (0, Some(noted)) => {
            report.faults.push(format!("the file is empty; it held {} commits", noted.commits));
            return Ok(report);
        }
        (0, None) => return Err(format!("{} is empty", path.display())),
        _ => {}
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(|e| e.to_string())?;
    let is_ours = conn
        .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
        .and_then(|_| conn.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -65536;"))
        .and_then(|()| is_store(&conn));
    match is_ours {
        Ok(true) => {}
        Ok(false) => {
            return Err(format!(
                "{} is not a store's file of this version; a broker that opens it brings it up to date",
                path.display()
            ));
        }
        Err(error) if is_damage(&error) => {
            report.faults.push(format!("the file cannot be read: {error}"));
            return Ok(report);
        }
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    }
    let mut run = |name: &str, step: &mut dyn FnMut(&mut Report) -> rusqlite::Result<()>| match step(
        &mut report,
    ) {
        Ok(()) => Ok(()),
        Err(error) if is_damage(&error) => {
            report.faults.push(format!("{name}: {error}"));
            Ok(())
        }
        Err(error) => Err(format!("{name}: {error}")),
    };
    run("definitions", &mut |report| {
        report.faults.extend(definitions::fault(&conn, &open_memory()?)?);
        Ok(())
    })?;
    run("commits", &mut |report| check_commits(&conn, noted, report))?;
    tell("checking the structure of the file".to_owned());
    run("structure", &mut |report| check_structure(&conn, report))?;
    run("items", &mut |report| check_items(&conn, &mut tell, report))?;
    run("payloads", &mut |report| check_payloads(&conn, report))?;
    run("leases", &mut |report| check_runs(&conn, report))?;
    run("counters", &mut |report| check_counters(&conn, report))?;
    run("items set aside", &mut |report| list_damaged(&conn, report))?;
    Ok(report)
}

/// Checks that the file has all commits that were on disk.
fn check_commits(
    conn: &Connection,
    noted: Option<mark::Noted>,
    report: &mut Report,
) -> rusqlite::Result<()> {
    let (tag, commits) = identity(conn)?;
    match noted {
        Some(noted) if noted.tag == tag && noted.commits > commits => report.faults.push(format!(
            "the last {} of {} commits are lost: the log or the file was cut, damaged or replaced by an older one",
            noted.commits - commits,
            noted.commits
        )),
        _ => {}
    }
    Ok(())
}

/// Runs SQLite's own check: every page is used once, and every index fits its table.
fn check_structure(conn: &Connection, report: &mut Report) -> rusqlite::Result<()> {
    let mut statement = conn.prepare("PRAGMA integrity_check(1000)")?;
    let mut lines = statement.query([])?;
    let mut named = 0;
    while let Some(line) = lines.next()? {
        let line: String = line.get(0)?;
        if line != "ok" {
            report.add(&mut named, format!("structure: {line}"));
        }
    }
    Ok(())
}

/// Checks that each item is what was stored.
fn check_items(
    conn: &Connection,
    tell: &mut dyn FnMut(String),
    report: &mut Report,
) -> rusqlite::Result<()> {
    let all: u64 = conn
        .query_row("SELECT count(*) FROM items", [], |row| row.get::<_, i64>(0))?
        .cast_unsigned();
    let mut named = 0;
    let mut told = Instant::now();
    let mut after = i64::MIN;
    let mut next = conn.prepare(concat!(
        "SELECT ",
        summed_columns!(),
        " FROM items WHERE id > ?1 ORDER BY id LIMIT 1"
    ))?;
    let mut next_id = conn.prepare("SELECT min(id) FROM items WHERE id > ?1")?;
    // One item at a time, so that an unreadable item does not hide those behind it.
    while let Some(id) = next_id.query_row([after], |row| row.get::<_, Option<i64>>(0))? {
        let read = next.query_row([after], |row| verify(row, Summed::ALONE));
        after = id;
        report.items += 1;
        match read {
            Ok(summed) => report.without_checksum += u64::from(!summed),
            Err(error) if is_damage(&error) => {
                report.add(&mut named, format!("item {id:016x}: {error}"));
            }
            Err(error) => return Err(error),
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            tell(format!("{} of {all} items", report.items));
        }
    }
    Ok(())
}

/// Checks that each payload that is stored apart belongs to an item.
fn check_payloads(conn: &Connection, report: &mut Report) -> rusqlite::Result<()> {
    let left: i64 = conn.query_row(
        "SELECT count(*) FROM payloads WHERE id NOT IN (SELECT id FROM items)",
        [],
        |row| row.get(0),
    )?;
    if left > 0 {
        report.faults.push(format!("{left} payloads belong to no item"));
    }
    Ok(())
}

/// Checks that the items of each lease that is one row are there, and as they were when they were leased.
fn check_runs(conn: &Connection, report: &mut Report) -> rusqlite::Result<()> {
    let snapshot = conn.unchecked_transaction()?;
    let mut there = snapshot.prepare(
        "SELECT count(*) FROM items WHERE id BETWEEN ?1 AND ?2 AND queue = ?3 AND deliveries = ?4",
    )?;
    let mut named = 0;
    for run in runs::all(&snapshot)? {
        let leased = run.items();
        let there: i64 = there
            .query_row(params![run.first, run.last, run.queue, run.delivered], |row| row.get(0))?;
        if there != leased {
            let fault = format!(
                "lease of the items {:016x} to {:016x} of queue {}: {there} of {leased} are there",
                run.first, run.last, run.queue
            );
            report.add(&mut named, fault);
        }
    }
    Ok(())
}

/// Checks that the counters are ahead of all numbers taken from them.
fn check_counters(conn: &Connection, report: &mut Report) -> rusqlite::Result<()> {
    let (next, last): (i64, Option<i64>) = conn.query_row(
        "SELECT (SELECT value FROM meta WHERE key = 'next_id'), (SELECT max(id) FROM items)",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    if last.is_some_and(|last| last >= next) {
        report.faults.push(format!("the next item would be number {next}, which was used before"));
    }
    let mut behind = conn.prepare(
        "SELECT queue, max(seq) FROM items INDEXED BY key_order
         WHERE key IS NOT NULL AND processed IS NULL AND origin IS NULL GROUP BY queue
         HAVING max(seq) > coalesce((SELECT value FROM counters WHERE counters.queue = items.queue), 0)",
    )?;
    let mut queues = behind.query([])?;
    let mut named = 0;
    while let Some(queue) = queues.next()? {
        let (queue, seq): (String, i64) = (queue.get(0)?, queue.get(1)?);
        report.add(
            &mut named,
            format!("queue {queue}: sequence numbers go on below {seq}, which was used before"),
        );
    }
    Ok(())
}

/// Lists the items that a broker has set aside.
fn list_damaged(conn: &Connection, report: &mut Report) -> rusqlite::Result<()> {
    let mut statement =
        conn.prepare("SELECT id, CAST(queue AS TEXT), why FROM damaged ORDER BY id")?;
    let mut rows = statement.query([])?;
    let mut named = 0;
    while let Some(row) = rows.next()? {
        let (id, why): (i64, String) = (row.get(0)?, row.get(2)?);
        let queue = String::from_utf8_lossy(row.get_ref(1)?.as_bytes()?).into_owned();
        report.add(&mut named, format!("item {id:016x} of queue {queue} was set aside: {why}"));
    }
    Ok(())
}
