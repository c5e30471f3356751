//! Items that are no longer what was stored: how they are known, and what becomes of them.
//!
//! Each item has a checksum over what its producer gave, which is checked whenever that is read. An item that fails, or
//! that cannot be read at all, is never handed out. It is set aside in the table `damaged`, where an operator finds
//! what is left of it, and its queue goes on without it. Where the file is so damaged that not even that is possible,
//! the item stays where it is and is passed over.

use rusqlite::{Error, ErrorCode, Row, params, types::Type};

use super::{order::place, writer::Tx};

/// The checksum of an item: over its id and all that its producer gave and nothing changes but a move
/// that replaces the content.
pub(super) fn checksum(row: i64, texts: [Option<&[u8]>; 3], payload: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&row.to_le_bytes());
    for part in texts.map(Option::unwrap_or_default).into_iter().chain([payload]) {
        sum.update(&(part.len() as u64).to_le_bytes());
        sum.update(part);
    }
    sum.finalize()
}

/// Where the columns that belong to the checksum are in a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Summed {
    pub(super) id: usize,
    pub(super) key: usize,
    pub(super) content_type: usize,
    pub(super) headers: usize,
    pub(super) payload: usize,
    pub(super) sum: usize,
}

/// Reads a row of nothing but what belongs to the checksum.
macro_rules! summed_columns {
    () => {
        "id, key, content_type, headers, payload, sum"
    };
}
pub(super) use summed_columns;

impl Summed {
    /// Of a row of [`summed_columns`].
    pub(super) const ALONE: Self =
        Self { id: 0, key: 1, content_type: 2, headers: 3, payload: 4, sum: 5 };
}

/// True if the item has a checksum, as all have that were stored since there are any. An error if it does not fit.
pub(super) fn verify(row: &Row<'_>, columns: Summed) -> rusqlite::Result<bool> {
    let Some(expected) = row.get::<_, Option<u32>>(columns.sum)? else { return Ok(false) };
    let found = sum_of(row, columns)?;
    if found == expected {
        Ok(true)
    } else {
        let why = format!("its checksum is {found:08x} and should be {expected:08x}");
        Err(Error::FromSqlConversionFailure(columns.payload, Type::Blob, why.into()))
    }
}

/// The checksum that the item of a row should have.
pub(super) fn sum_of(row: &Row<'_>, columns: Summed) -> rusqlite::Result<u32> {
    let text = |column| row.get_ref(column)?.as_bytes_or_null().map_err(Error::from);
    let texts = [text(columns.key)?, text(columns.content_type)?, text(columns.headers)?];
    let payload = row.get_ref(columns.payload)?.as_blob()?;
    Ok(checksum(row.get(columns.id)?, texts, payload))
}

/// True if the error says that what is stored is not what can have been stored.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(
        error,
        Error::FromSqlConversionFailure(..)
            | Error::InvalidColumnType(..)
            | Error::IntegralValueOutOfRange(..)
            | Error::Utf8Error(..)
    ) || is_corruption(error)
}

/// True if the file itself is not as SQLite wrote it.
pub(super) fn is_corruption(error: &Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt)
}

/// Takes a damaged item out of its queue. True if another item has become ready.
///
/// Where the file is damaged around the item, SQLite lets a transaction that has seen it do nothing more. Then this
/// fails, and the next transaction passes the item over.
pub(super) fn set_aside(tx: &Tx<'_>, row: i64, why: &Error) -> rusqlite::Result<bool> {
    let id = tx.item_id(row);
    match move_away(tx, row, &why.to_string()) {
        Ok(unblocked) => {
            tracing::error!(
                item = %id, row, %why,
                "an item is damaged and was set aside: see the table `damaged` of the store's file, and `sluicegate check`"
            );
            Ok(unblocked)
        }
        Err(error) => {
            if is_damage(&error) {
                pass_over(tx, row, &error);
            }
            Err(error)
        }
    }
}

/// Leaves a damaged item where it is, and looks at it no more.
pub(super) fn pass_over(tx: &Tx<'_>, row: i64, why: &Error) {
    tx.pass_over(row);
    tracing::error!(
        item = %tx.item_id(row), row, %why,
        "an item is damaged and passed over: the store's file is damaged around it, see `sluicegate check`"
    );
}

fn move_away(tx: &Tx<'_>, row: i64, why: &str) -> rusqlite::Result<bool> {
    tx.conn
        .prepare_cached(
            "INSERT OR REPLACE INTO damaged SELECT id, queue, ?2, ?3, key, content_type, headers, created, payload
             FROM items WHERE id = ?1",
        )?
        .execute(params![row, tx.now.0, why])?;
    match place(tx, row) {
        Ok(Some(place)) => place.delete(tx),
        Ok(None) => Ok(false),
        // Whose turn is next cannot be told from a key that cannot be read.
        Err(error) if is_damage(&error) => {
            tx.conn.prepare_cached("DELETE FROM items WHERE id = ?1")?.execute([row]).map(|_| false)
        }
        Err(error) => Err(error),
    }
}
