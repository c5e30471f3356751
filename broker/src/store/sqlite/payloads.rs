//! Large payloads, which have a table of their own. What happens to an item changes its row, and SQLite writes a row anew when its size
//! changes, with all that is in it. So the row of such an item has an empty payload.

use rusqlite::{OptionalExtension, params};

use super::tx::Tx;

/// Payloads of so many bytes and more are stored apart: those that take pages of their own in any case.
const LARGE: usize = 8 << 10;

/// The payload of a row of `items`.
macro_rules! payload {
    () => {
        "iif(length(payload) > 0, payload, coalesce((SELECT payload FROM payloads WHERE payloads.id = items.id), payload))"
    };
}
pub(super) use payload;

/// The length of the payload of a row of `items`; 0 if it is damaged.
macro_rules! payload_length {
    () => {
        "coalesce(nullif(length(payload), 0), (SELECT length(payload) FROM payloads WHERE payloads.id = items.id), 0)"
    };
}
pub(super) use payload_length;

/// Stores the payload of an item, if it is large, and returns what the item's row has for it.
pub(super) fn store<'a>(tx: &Tx<'_>, row: i64, payload: &'a [u8]) -> rusqlite::Result<&'a [u8]> {
    if payload.len() < LARGE {
        return Ok(payload);
    }
    tx.conn
        .prepare_cached("INSERT OR REPLACE INTO payloads VALUES (?1, ?2)")?
        .execute(params![row, payload])?;
    Ok(&[])
}

/// Deletes the payload of an item, if it was stored apart.
pub(super) fn delete(tx: &Tx<'_>, row: i64) -> rusqlite::Result<()> {
    tx.conn.prepare_cached("DELETE FROM payloads WHERE id = ?1")?.execute([row]).map(drop)
}

/// Deletes the payloads of items, as far as they were stored apart. Most are not, and one look says so of all.
pub(super) fn delete_all(tx: &Tx<'_>, rows: &[i64]) -> rusqlite::Result<()> {
    let (Some(first), Some(last)) = (rows.iter().min(), rows.iter().max()) else { return Ok(()) };
    let any: Option<i64> = tx
        .conn
        .prepare_cached("SELECT id FROM payloads WHERE id BETWEEN ?1 AND ?2 LIMIT 1")?
        .query_row([first, last], |row| row.get(0))
        .optional()?;
    if any.is_none() {
        return Ok(());
    }
    rows.iter().try_for_each(|row| delete(tx, *row))
}
