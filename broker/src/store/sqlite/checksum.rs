//! The checksums of items, and the errors that say that what is stored is not what can have been stored.

use rusqlite::{Error, ErrorCode, Row, ffi, types::Type};

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

/// An index does not fit its table.
pub(super) fn index_corruption(why: &str) -> Error {
    let error = ffi::Error::new(ffi::SQLITE_CORRUPT_INDEX);
    Error::SqliteFailure(error, Some(format!("an index is damaged: {why}")))
}

/// True if the error says that an index does not fit its table.
pub(super) fn is_index_corruption(error: &Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_CORRUPT_INDEX)
}

/// True if the file itself is not as SQLite wrote it.
pub(super) fn is_corruption(error: &Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt)
}
