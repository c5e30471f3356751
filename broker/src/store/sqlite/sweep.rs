//! Housekeeping: removes expired items, in chunks so small that no call waits long for one.

use rusqlite::params;

use super::{checksum::is_damage, damage::set_aside, order::place, tx::Tx};

/// Limit of rows of each kind removed in one transaction.
const CHUNK: usize = 500;

/// Removes some expired items, history and deduplication ids. True if there may be more.
pub(super) fn chunk(tx: &Tx<'_>) -> rusqlite::Result<bool> {
    let items = expired_items(tx)?;
    let forgotten = tx
        .conn
        .prepare_cached(
            "DELETE FROM dedup WHERE (queue, dedup) IN
               (SELECT queue, dedup FROM dedup INDEXED BY dedup_until
                WHERE until <= ?1 ORDER BY until LIMIT ?2)",
        )?
        .execute(params![tx.now.0, CHUNK as i64])?;
    Ok(items == CHUNK || forgotten == CHUNK)
}

fn expired_items(tx: &Tx<'_>) -> rusqlite::Result<usize> {
    let rows: Vec<i64> = tx
        .conn
        .prepare_cached(
            "SELECT id FROM items INDEXED BY expiry WHERE expires <= ?1 ORDER BY expires LIMIT ?2",
        )?
        .query_map(params![tx.now.0, CHUNK as i64], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    for &row in &rows {
        if tx.is_passed_over(row) {
            continue;
        }
        match place(tx, row) {
            Ok(Some(place)) => place.delete_expired(tx)?,
            Ok(None) => {}
            // A damaged item must not hold up those behind it.
            Err(error) if is_damage(&error) => {
                set_aside(tx, row, &error)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(rows.len())
}
