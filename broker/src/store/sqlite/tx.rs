//! What work on the data is given: a sight of it, and, within the writer's transaction, what may be changed.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, HashSet},
    ops::Deref,
};

use rusqlite::Connection;

use crate::domain::{ItemId, QueueName, Timestamp};

/// A consistent sight of the data, at one time.
pub(super) struct View<'c> {
    /// The connection, in a transaction.
    pub(super) conn: &'c Connection,
    /// The store's time.
    pub(super) now: Timestamp,
    /// What all ids of this store begin with.
    pub(super) tag: [u8; 4],
}

impl View<'_> {
    /// The id that users see.
    pub(super) fn item_id(&self, row: i64) -> ItemId {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.tag);
        bytes[4..].copy_from_slice(&row.to_be_bytes());
        ItemId(bytes)
    }

    /// The row of an id; of an id that is not of this store, one that no item has.
    pub(super) fn row_id(&self, id: ItemId) -> i64 {
        match id.0.split_first_chunk::<4>() {
            Some((tag, rest)) if *tag == self.tag => rest.try_into().map_or(0, i64::from_be_bytes),
            _ => 0,
        }
    }
}

/// A transaction that may write.
pub(super) struct Tx<'c> {
    pub(super) view: View<'c>,
    /// The row of the next item.
    pub(super) next_id: &'c Cell<i64>,
    /// Queues to be told of when this is committed.
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
    /// The row of a new item: greater than all before.
    pub(super) fn next_row(&self) -> i64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }

    /// From now on the row is not looked at any more: it is damaged and cannot even be taken away.
    pub(super) fn pass_over(&self, row: i64) {
        self.passed_over.borrow_mut().insert(row);
    }

    /// True if the row is not to be looked at.
    pub(super) fn is_passed_over(&self, row: i64) -> bool {
        self.passed_over.borrow().contains(&row)
    }

    /// The rows that are not to be looked at, as a JSON array; `None`, as nearly always, if there are none.
    pub(super) fn passed_over(&self) -> Option<String> {
        let rows = self.passed_over.borrow();
        (!rows.is_empty())
            .then(|| format!("{rows:?}").replace(['{', '}'], ""))
            .map(|rows| format!("[{rows}]"))
    }

    /// Notes that an item of the queue became ready in a way that its consumers do not hear of otherwise: they
    /// are told once this is committed.
    pub(super) fn notify_unblocked(&self, queue: &str) {
        if let Ok(queue) = QueueName::parse("queue", queue) {
            self.unblocked.borrow_mut().insert(queue);
        }
    }
}
