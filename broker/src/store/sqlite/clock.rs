//! The store's time across restarts. The file keeps the last time that was used, so that a broker that starts while the
//! machine's clock is behind it does not take ready items for delayed ones.

use std::time::Duration;

use rusqlite::{Connection, params};

use crate::domain::{Clock, Timestamp};

/// Limit up to which the time of a file may be ahead of the machine's for the clock to make up for it by running
/// slowly. A larger lag means that the machine's clock was wrong; the times in the file are then set back.
const MAX_LAG: Duration = Duration::from_hours(1);

/// Sets the clock so that items that were ready when the file was last written are ready now, whatever the machine's
/// clock says.
pub(super) fn resume(conn: &Connection, clock: &Clock) -> rusqlite::Result<()> {
    let last: i64 =
        conn.query_row("SELECT value FROM meta WHERE key = 'time'", [], |row| row.get(0))?;
    let (last, now) = (Timestamp(last), clock.now());
    let lag = now.until(last);
    if lag.is_zero() {
        return Ok(());
    }
    let behind_ms = lag.as_millis() as i64;
    if lag <= MAX_LAG {
        tracing::warn!(
            behind_ms,
            "this machine's clock was set back; the store's time goes on slowly until it has caught up"
        );
        clock.set(last);
        return Ok(());
    }
    tracing::warn!(
        behind_ms,
        "this machine's clock was set back by more than an hour; setting back the times in the file too"
    );
    bring_back(conn, last, now)
}

/// Sets back times after `last`, so that they are as far after `now` as they were after `last`. Times between `now` and
/// `last`, which were past, become `now`.
fn bring_back(conn: &Connection, last: Timestamp, now: Timestamp) -> rusqlite::Result<()> {
    const COLUMNS: [(&str, &str); 15] = [
        ("items", "\"when\""),
        ("items", "blocked"),
        ("items", "expires"),
        ("items", "processed"),
        ("items", "created"),
        ("items", "due"),
        ("items", "dead_lettered"),
        ("dedup", "until"),
        ("queues", "created"),
        ("schedules", "created"),
        ("schedules", "done_until"),
        ("schedules", "last"),
        ("operations", "created"),
        ("operations", "updated"),
        ("operations", "claim_until"),
    ];
    let tx = conn.unchecked_transaction()?;
    for (table, column) in COLUMNS {
        tx.execute(
            &format!(
                "UPDATE {table} SET {column} = max({column} - (?1 - ?2), ?2) WHERE {column} > ?2"
            ),
            params![last.0, now.0],
        )?;
    }
    tx.execute("UPDATE meta SET value = ?1 WHERE key = 'time'", [now.0])?;
    tx.commit()
}
