//! Ordering keys and sequence numbers, and how an item leaves a queue.
//!
//! At most one unsettled item per queue and key is not blocked. Dead-lettered items (those with an `origin`) keep their
//! keys but are not ordered.

use std::collections::BTreeSet;

use rusqlite::{OptionalExtension, params};

use super::{
    payloads, queues, templates,
    tx::{Tx, View},
};
use crate::domain::{Queue, QueueName, QueueTemplate, Timestamp};

/// What must be known of an item to take it out of its queue.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) row: i64,
    pub(super) queue: String,
    pub(super) key: Option<String>,
    pub(super) lock: Option<String>,
    pub(super) deliveries: u32,
    pub(super) blocked: bool,
    pub(super) processed: bool,
    pub(super) expires: Option<i64>,
    pub(super) origin: Option<String>,
    /// True if its payload may be stored apart.
    pub(super) is_apart: bool,
}

/// Reads an item's place.
pub(super) fn place(view: &View<'_>, row: i64) -> rusqlite::Result<Option<Place>> {
    view.conn
        .prepare_cached(
            "SELECT id, queue, key, lock, deliveries, blocked IS NOT NULL, processed IS NOT NULL,
               expires, origin, coalesce(length(payload), 0) = 0 FROM items WHERE id = ?1",
        )?
        .query_row([row], |row| {
            Ok(Place {
                row: row.get(0)?,
                queue: row.get(1)?,
                key: row.get(2)?,
                lock: row.get(3)?,
                deliveries: row.get(4)?,
                blocked: row.get(5)?,
                processed: row.get(6)?,
                expires: row.get(7)?,
                origin: row.get(8)?,
                is_apart: row.get(9)?,
            })
        })
        .optional()
}

impl Place {
    /// Returns true if the item has expired.
    pub(super) fn expired(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|end| end <= now.0)
    }

    /// Returns the key whose next item is unblocked when this item goes.
    fn turn(&self) -> Option<&str> {
        let has_turn = !self.blocked && !self.processed && self.origin.is_none();
        self.key.as_deref().filter(|_| has_turn)
    }

    /// Unblocks the next item of the key. Must be called once this item has left its place. True if an item was
    /// unblocked.
    pub(super) fn pass_turn(&self, tx: &Tx<'_>) -> rusqlite::Result<bool> {
        self.turn().map_or(Ok(false), |key| promote(tx, &self.queue, key))
    }

    /// Deletes the item. True if another item of its key has become ready.
    pub(super) fn delete(&self, tx: &Tx<'_>) -> rusqlite::Result<bool> {
        tx.conn.prepare_cached("DELETE FROM items WHERE id = ?1")?.execute([self.row])?;
        if self.is_apart {
            payloads::delete(tx, self.row)?;
        }
        self.pass_turn(tx)
    }

    /// Deletes an expired item, counts it, and notifies those who wait for the next item of its key.
    pub(super) fn delete_expired(&self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        if !self.processed {
            tx.conn
                .prepare_cached(
                    "INSERT INTO totals (queue, pushed, delivered, committed, rolled_back, moved,
                       dead_lettered, expired, popped, discarded)
                     VALUES (?1, 0, 0, 0, 0, 0, 0, 1, 0, 0)
                     ON CONFLICT (queue) DO UPDATE SET expired = expired + 1",
                )?
                .execute([&self.queue])?;
        }
        if self.delete(tx)? {
            tx.notify_unblocked(&self.queue);
        }
        Ok(())
    }
}

/// Unblocks the next item of the key. True if there is one.
fn promote(view: &View<'_>, queue: &str, key: &str) -> rusqlite::Result<bool> {
    let promoted = view
        .conn
        .prepare_cached(
            r#"UPDATE items SET "when" = max(blocked, ?3), blocked = NULL WHERE id =
                 (SELECT id FROM items INDEXED BY key_order
                  WHERE queue = ?1 AND key = ?2 AND processed IS NULL AND origin IS NULL
                    AND blocked IS NOT NULL AND (expires IS NULL OR expires > ?3)
                  ORDER BY seq LIMIT 1)"#,
        )?
        .execute(params![queue, key, view.now.0])?;
    Ok(promoted > 0)
}

/// Unblocks the first item of each key that has only blocked items, as after damage to an index. Returns the queues of
/// these keys. Reads all items with a key.
pub(super) fn restore_turns(view: &View<'_>) -> rusqlite::Result<BTreeSet<String>> {
    let mut lost = view.conn.prepare(
        "SELECT queue, key FROM items INDEXED BY key_order
         WHERE key IS NOT NULL AND processed IS NULL AND origin IS NULL
         GROUP BY queue, key HAVING count(blocked) = count(*)",
    )?;
    let lost: Vec<(String, String)> = lost
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let mut queues = BTreeSet::new();
    for (queue, key) in lost {
        if promote(view, &queue, &key)? {
            queues.insert(queue);
        }
    }
    Ok(queues)
}

/// Returns true if an item of the key, other than `except`, is unsettled, so that `except` must wait.
pub(super) fn must_wait(
    tx: &Tx<'_>,
    queue: &QueueName,
    key: &str,
    except: i64,
) -> rusqlite::Result<bool> {
    loop {
        let first: Option<i64> = tx
            .conn
            .prepare_cached(
                "SELECT id FROM items INDEXED BY key_order
                 WHERE queue = ?1 AND key = ?2 AND processed IS NULL AND origin IS NULL AND id <> ?3
                 ORDER BY seq LIMIT 1",
            )?
            .query_row(params![queue.as_str(), key, except], |row| row.get(0))
            .optional()?;
        let Some(row) = first else { return Ok(false) };
        match place(tx, row)? {
            // An expired item that is not blocked must go before another can be unblocked.
            Some(place) if place.expired(tx.now) => place.delete_expired(tx)?,
            _ => return Ok(true),
        }
    }
}

/// Takes the next sequence number of the queue, if all its items have one or the item has a key.
pub(super) fn stamp(tx: &Tx<'_>, queue: &Queue, has_key: bool) -> rusqlite::Result<Option<i64>> {
    if !queue.sequenced && !has_key {
        return Ok(None);
    }
    tx.conn
        .prepare_cached(
            "INSERT INTO counters VALUES (?1, 1)
             ON CONFLICT (queue) DO UPDATE SET value = value + 1 RETURNING value",
        )?
        .query_row([queue.name.as_str()], |row| row.get(0))
        .map(Some)
}

/// Moves an item to the dead-letter queue of its queue. True if another item of its key has become ready.
pub(super) fn dead_letter(
    tx: &Tx<'_>,
    queue: &Queue,
    place: &Place,
    to: &QueueName,
    failed_attempts: u32,
    reason: Option<&str>,
) -> rusqlite::Result<bool> {
    restore_dead_letter_queue(tx, to, queue)?;
    tx.conn
        .prepare_cached(
            r#"UPDATE items SET queue = ?2, "when" = ?3, lock = NULL, origin = ?4, attempt = 1,
                 earlier = deliveries, dead_lettered = ?3, failed_attempts = ?6,
                 reason = coalesce(?5, reason) WHERE id = ?1"#,
        )?
        .execute(params![place.row, to.as_str(), tx.now.0, place.queue, reason, failed_attempts])?;
    place.pass_turn(tx)
}

/// Creates the dead-letter queue of a queue again, if it was deleted after somebody read that dead letters go there. Its template
/// says what its settings are, as for every queue that use creates.
fn restore_dead_letter_queue(tx: &Tx<'_>, name: &QueueName, from: &Queue) -> rusqlite::Result<()> {
    let mut there = tx.conn.prepare_cached("SELECT 1 FROM queues WHERE name = ?1")?;
    if there.exists([name.as_str()])? {
        return Ok(());
    }
    let templates = templates::list(tx)?;
    queues::create(tx, QueueTemplate::dead_letter_queue(&templates, name.clone(), from, tx.now))?;
    tracing::warn!(queue = %name, from = %from.name, "a dead letter came while the queue was deleted: it is there again");
    Ok(())
}

/// Removes an item at a limit as a commit does. True if another item of its key has become ready.
pub(super) fn discard(
    tx: &Tx<'_>,
    queue: &Queue,
    place: &Place,
    failed_attempts: u32,
    reason: Option<&str>,
) -> rusqlite::Result<bool> {
    if !queue.retention.is_zero() {
        tx.conn
            .prepare_cached(
                "UPDATE items SET dead_lettered = ?2, failed_attempts = ?3,
                   reason = coalesce(?4, reason) WHERE id = ?1",
            )?
            .execute(params![place.row, tx.now.0, failed_attempts, reason])?;
    }
    finish(tx, queue, place)
}

/// Deletes a settled item, or keeps it as history. True if another item of its key has become ready.
pub(super) fn finish(tx: &Tx<'_>, queue: &Queue, place: &Place) -> rusqlite::Result<bool> {
    if queue.retention.is_zero() {
        return place.delete(tx);
    }
    tx.conn
        .prepare_cached(
            r#"UPDATE items SET processed = ?2, expires = ?3, "when" = NULL, lock = NULL
               WHERE id = ?1"#,
        )?
        .execute(params![place.row, tx.now.0, (tx.now + queue.retention).0])?;
    place.pass_turn(tx)
}
