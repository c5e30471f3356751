//! The checksums of items, and the errors that say that stored data is damaged.

use rusqlite::{Error, ErrorCode, Row, ffi, types::Type};

/// Returns the checksum of an item, over its id and everything from its producer that nothing changes but a move that
/// replaces the content.
pub(super) fn checksum(row: i64, texts: [Option<&[u8]>; 3], payload: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&row.to_le_bytes());
    for part in texts.map(Option::unwrap_or_default).into_iter().chain([payload]) {
        sum.update(&(part.len() as u64).to_le_bytes());
        sum.update(part);
    }
    sum.finalize()
}

/// Positions of the columns that belong to the checksum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Summed {
    pub(super) id: usize,
    pub(super) key: usize,
    pub(super) content_type: usize,
    pub(super) headers: usize,
    pub(super) payload: usize,
    pub(super) sum: usize,
}

/// The columns that belong to the checksum.
macro_rules! summed_columns {
    () => {
        concat!(
            "id, key, content_type, headers, ",
            crate::store::sqlite::payloads::payload!(),
            ", sum"
        )
    };
}
pub(super) use summed_columns;

impl Summed {
    /// The positions in a row of [`summed_columns`].
    pub(super) const ALONE: Self =
        Self { id: 0, key: 1, content_type: 2, headers: 3, payload: 4, sum: 5 };
}

/// Returns true if the item has a checksum, and false if it was stored before there were checksums. An error if the
/// checksum does not fit.
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

/// Returns the checksum that the item of a row should have.
pub(super) fn sum_of(row: &Row<'_>, columns: Summed) -> rusqlite::Result<u32> {
    let text = |column| row.get_ref(column)?.as_bytes_or_null().map_err(Error::from);
    let texts = [text(columns.key)?, text(columns.content_type)?, text(columns.headers)?];
    let payload = row.get_ref(columns.payload)?.as_blob()?;
    Ok(checksum(row.get(columns.id)?, texts, payload))
}

/// Returns true if the error says that stored data is damaged.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(
        error,
        Error::FromSqlConversionFailure(..)
            | Error::InvalidColumnType(..)
            | Error::IntegralValueOutOfRange(..)
            | Error::Utf8Error(..)
    ) || is_corruption(error)
}

/// Returns the error for an index that does not fit its table.
pub(super) fn index_corruption(why: &str) -> Error {
    let error = ffi::Error::new(ffi::SQLITE_CORRUPT_INDEX);
    Error::SqliteFailure(error, Some(format!("an index is damaged: {why}")))
}

/// Returns the error for tables that do not fit each other.
pub(super) fn corruption(why: &str) -> Error {
    let error = ffi::Error::new(ffi::SQLITE_CORRUPT);
    Error::SqliteFailure(error, Some(format!("the tables are damaged: {why}")))
}

/// Returns true if the error says that an index does not fit its table.
pub(super) fn is_index_corruption(error: &Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_CORRUPT_INDEX)
}

/// Returns true if the error says that the file is not as SQLite wrote it, or not as this program defined it.
pub(super) fn is_corruption(error: &Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) || is_misfit(error)
}

/// Starts and parts of SQLite's messages about statements that do not fit the definitions in the file. They share their
/// code with all other errors in statements.
const MISFITS: [&str; 6] = [
    "no such table",
    "no such column",
    "no such index",
    "no query solution",
    "has no column named",
    "values were supplied",
];

/// Returns true if the error says that a statement does not fit the tables and indexes of the file. All statements are
/// fixed, so the definitions in the file have changed.
fn is_misfit(error: &Error) -> bool {
    let message = match error {
        Error::SqlInputError { msg, .. } => msg,
        Error::SqliteFailure(failure, Some(message)) if failure.code == ErrorCode::Unknown => {
            message
        }
        _ => return false,
    };
    MISFITS.iter().any(|misfit| message.contains(misfit))
}
