//! Returns unused pages to the disk, in steps so small that no call waits long for one.

use std::time::Duration;

use rusqlite::Connection;

/// Number of unused pages that are always kept for later use: 16 MiB.
const KEPT_PAGES: i64 = 4_096;
/// Of a large file, one unused page per this many used pages is kept too.
const KEPT_SHARE: i64 = 4;
/// Returns at most this many pages: 1 MiB.
const STEP: &str = "PRAGMA incremental_vacuum(256)";
/// Limit of used pages up to which a file is rewritten when it is opened: 64 MiB.
const MAX_REWRITTEN: i64 = 16_384;

fn pages(conn: &Connection) -> rusqlite::Result<(i64, i64)> {
    let pragma = |name| conn.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (all, unused) = (pragma("page_count")?, pragma("freelist_count")?);
    Ok((all - unused, unused))
}

fn gives_back(conn: &Connection) -> rusqlite::Result<bool> {
    const INCREMENTAL: i64 = 2;
    let mode: i64 = conn.pragma_query_value(None, "auto_vacuum", |row| row.get(0))?;
    Ok(mode == INCREMENTAL)
}

/// Returns true if more pages are unused than a queue that fills and empties will soon need again. On a disk that is
/// nearly full, returns true if any page is unused, because pushes go on only when the disk has room again.
pub(super) fn is_wasted(conn: &Connection, disk_is_scarce: bool) -> rusqlite::Result<bool> {
    let (used, unused) = pages(conn)?;
    let kept = if disk_is_scarce { 0 } else { KEPT_PAGES.max(used / KEPT_SHARE) };
    Ok(unused > kept && gives_back(conn)?)
}

/// Writes the log into the file and returns its space to the disk, unless readers prevent it. Does not wait for them.
pub(super) fn empty_log(conn: &Connection) -> rusqlite::Result<()> {
    let timeout = conn.pragma_query_value(None, "busy_timeout", |row| row.get::<_, u32>(0))?;
    conn.busy_timeout(Duration::ZERO)?;
    let emptied = conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    conn.busy_timeout(Duration::from_millis(timeout.into()))?;
    emptied
}

/// Returns some unused pages to the disk.
pub(super) fn free_pages(conn: &Connection) -> rusqlite::Result<()> {
    // The pragma goes on while rows of its result are read.
    let mut statement = conn.prepare_cached(STEP)?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(())
}

/// Lets a file of an earlier version return space from now on, which takes a rewrite. A large file stays as it is until
/// it has become small.
pub(super) fn enable(conn: &Connection) -> rusqlite::Result<()> {
    if gives_back(conn)? {
        return Ok(());
    }
    let (used, unused) = pages(conn)?;
    if used > MAX_REWRITTEN {
        tracing::info!(
            used_pages = used,
            unused_pages = unused,
            "the store's file keeps its size, as in earlier versions: it will return space after a start \
             with less than 64 MiB in it"
        );
        return Ok(());
    }
    // The rewrite takes as much room again for a moment, which a full disk does not have. That is no reason not to
    // start.
    if let Err(error) = conn.execute_batch("PRAGMA auto_vacuum = INCREMENTAL; VACUUM;") {
        tracing::warn!(%error, "could not rewrite the store's file, which keeps its size for now");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// On a disk that is nearly full, every page of settled items goes back, so that pushes go on again.
    #[test]
    fn on_a_scarce_disk_nothing_unused_is_kept() {
        let conn = Connection::open_in_memory().unwrap();
        enable(&conn).unwrap();
        conn.execute_batch(
            "CREATE TABLE t (x); INSERT INTO t VALUES (zeroblob(3000000)); DELETE FROM t;",
        )
        .unwrap();
        assert!(
            !is_wasted(&conn, false).unwrap(),
            "a queue that fills and empties needs the pages soon"
        );
        let mut steps = 0;
        while is_wasted(&conn, true).unwrap() {
            free_pages(&conn).unwrap();
            steps += 1;
        }
        assert!((2..10).contains(&steps), "{steps} steps of 1 MiB");
        assert_eq!(pages(&conn).unwrap().1, 0);
    }

    /// A file of an earlier version, on a disk without room to rewrite it, is opened as it is.
    #[test]
    fn a_file_that_cannot_be_rewritten_keeps_its_size() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch("CREATE TABLE t (x); BEGIN;").unwrap(); // the rewrite fails within a transaction
        enable(&conn).unwrap();
        conn.execute_batch("COMMIT").unwrap();
        assert!(!gives_back(&conn).unwrap());
        enable(&conn).unwrap();
        assert!(gives_back(&conn).unwrap());
    }

    /// The only writer does not wait for a reader that is slow, and gives what room it can.
    #[test]
    fn a_reader_does_not_hold_up_the_emptying_of_the_log() {
        const BUSY: Duration = Duration::from_secs(20);
        let folder = tempfile::tempdir().unwrap();
        let open = || Connection::open(folder.path().join("store.db")).unwrap();
        let conn = open();
        conn.busy_timeout(BUSY).unwrap();
        conn.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE t (x);").unwrap();
        let reader = open();
        reader.execute_batch("BEGIN; SELECT * FROM t;").unwrap();
        conn.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        let begun = Instant::now();
        empty_log(&conn).unwrap();
        assert!(begun.elapsed() < BUSY / 2, "the reader was waited for");
        let busy: i64 = conn.pragma_query_value(None, "busy_timeout", |row| row.get(0)).unwrap();
        assert_eq!(u128::try_from(busy).unwrap(), BUSY.as_millis());
        drop(reader);
        empty_log(&conn).unwrap();
        assert_eq!(folder.path().join("store.db-wal").metadata().unwrap().len(), 0);
    }
}
