//! Keys with which receipts are signed.

use rusqlite::params;

use super::{
    super::{RECEIPT_KEYS, StoredReceiptKey},
    tx::{Tx, View},
};
use crate::domain::Timestamp;

pub(super) fn list(view: &View<'_>) -> rusqlite::Result<Vec<StoredReceiptKey>> {
    view.conn
        .prepare_cached("SELECT number, secret, created FROM receipt_keys ORDER BY number DESC")?
        .query_map([], |row| {
            Ok(StoredReceiptKey {
                number: row.get(0)?,
                secret: row.get(1)?,
                created: Timestamp(row.get(2)?),
            })
        })?
        .collect()
}

pub(super) fn add(tx: &Tx<'_>, key: &StoredReceiptKey) -> rusqlite::Result<()> {
    tx.conn
        .prepare_cached(
            "INSERT INTO receipt_keys (number, secret, created) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
        )?
        .execute(params![key.number, key.secret, key.created.0])?;
    let last = key.number.saturating_sub(RECEIPT_KEYS);
    tx.conn.prepare_cached("DELETE FROM receipt_keys WHERE number <= ?1")?.execute([last])?;
    Ok(())
}
