//! Items that are no longer what was stored: how they are recognised, and what happens to them.
//!
//! Each item has a checksum over what its producer sent, which is checked whenever that is read. An item that fails the
//! check, or that cannot be read at all, is never handed out. It is set aside in the table `damaged`, where an
//! administrator finds what is left of it, and its queue goes on without it. Where the file is too damaged even for
//! that, the item stays where it is and is passed over.

use rusqlite::{Error, params};

use super::{
    checksum::{is_damage, is_index_corruption},
    order::place,
    payloads::{self, payload},
    tx::Tx,
};

/// Takes a damaged item out of its queue. True if another item has become ready.
///
/// If the file is damaged around the item, SQLite allows nothing more in a transaction that has read it. Then this
/// function fails, and the next transaction passes the item over.
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
            // A damaged index is rebuilt, and the item is set aside the next time.
            if is_damage(&error) && !is_index_corruption(&error) {
                pass_over(tx, row, &error);
            }
            Err(error)
        }
    }
}

/// Leaves a damaged item where it is, and never reads it again.
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
            concat!(
                "INSERT OR REPLACE INTO damaged SELECT id, queue, ?2, ?3, key, content_type, headers, created, ",
                payload!(),
                " FROM items WHERE id = ?1"
            ),
        )?
        .execute(params![row, tx.now.0, why])?;
    match place(tx, row) {
        Ok(Some(place)) => place.delete(tx),
        Ok(None) => Ok(false),
        // If the key cannot be read, the next item of the key is not known.
        Err(error) if is_damage(&error) => {
            tx.conn.prepare_cached("DELETE FROM items WHERE id = ?1")?.execute([row])?;
            payloads::delete(tx, row).map(|()| false)
        }
        Err(error) => Err(error),
    }
}
