//! What calls work on: a view of the data and, within the writer's transaction, the means to change it.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashSet},
    ops::Deref,
    sync::atomic::{AtomicI64, Ordering},
};

use rusqlite::Connection;

use super::runs::Runs;
use crate::domain::{ItemId, QueueName, Timestamp};

/// A consistent view of the data, at one time.
pub(super) struct View<'c> {
    /// The connection, in a transaction.
    pub(super) conn: &'c Connection,
    /// The store's time.
    pub(super) now: Timestamp,
    /// The start of all ids of this store.
    pub(super) tag: [u8; 4],
}

impl View<'_> {
    /// Returns the id that users see.
    pub(super) fn item_id(&self, row: i64) -> ItemId {
        item_id(self.tag, row)
    }

    /// Returns the row of an id, or a row that no item has if the id is not of this store.
    pub(super) fn row_id(&self, id: ItemId) -> i64 {
        match id.0.split_first_chunk::<4>() {
            Some((tag, rest)) if *tag == self.tag => rest.try_into().map_or(0, i64::from_be_bytes),
            _ => 0,
        }
    }
}

/// Returns the id that users see of the item in a row.
pub(super) fn item_id(tag: [u8; 4], row: i64) -> ItemId {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&tag);
    bytes[4..].copy_from_slice(&row.to_be_bytes());
    ItemId(bytes)
}

/// A transaction that may write.
pub(super) struct Tx<'c> {
    pub(super) view: View<'c>,
    /// The row of the next item.
    pub(super) next_id: &'c AtomicI64,
    /// Whether there are leases of many items.
    pub(super) runs: &'c Runs,
    /// Queues to notify when the transaction is committed.
    pub(super) unblocked: &'c RefCell<BTreeSet<QueueName>>,
    /// Damaged rows that stay where they are.
    pub(super) passed_over: &'c RefCell<HashSet<i64>>,
}

impl<'c> Deref for Tx<'c> {
    type Target = View<'c>;
    fn deref(&self) -> &View<'c> {
        &self.view
    }
}

impl Tx<'_> {
    /// Takes the row of a new item, which is greater than all before.
    pub(super) fn next_row(&self) -> i64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Excludes a row from all further reads, because it is damaged and cannot even be removed.
    pub(super) fn pass_over(&self, row: i64) {
        self.passed_over.borrow_mut().insert(row);
    }

    /// Returns true if the row is excluded.
    pub(super) fn is_passed_over(&self, row: i64) -> bool {
        self.passed_over.borrow().contains(&row)
    }

    /// Returns the excluded rows as a JSON array, or `None`, as nearly always, if there are none.
    pub(super) fn passed_over(&self) -> Option<String> {
        let rows = self.passed_over.borrow();
        (!rows.is_empty())
            .then(|| format!("{rows:?}").replace(['{', '}'], ""))
            .map(|rows| format!("[{rows}]"))
    }

    /// Notes that an item of the queue became ready in a way that its consumers do not learn of otherwise. They are
    /// notified once the transaction is committed.
    pub(super) fn notify_unblocked(&self, queue: &str) {
        if let Ok(queue) = QueueName::parse("queue", queue) {
            self.unblocked.borrow_mut().insert(queue);
        }
    }
}
