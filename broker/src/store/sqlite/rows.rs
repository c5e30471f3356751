//! Converts rows to items and back.

use bytes::Bytes;
use rusqlite::{Row, types::Type};

use super::{
    checksum::{Summed, verify},
    tx::View,
};
use crate::domain::{
    ConsumerName, DedupId, Headers, Item, ItemState, LeaseToken, OrderingKey, Priority, QueueName,
    Timestamp,
};

/// The columns that [`read_item`] reads, in its order.
macro_rules! item_columns {
    () => {
        concat!(
            "id, queue, priority, \"when\", attempt, deliveries, lock, producer, consumer, key, seq, dedup, ",
            "content_type, headers, created, blocked, processed, expires, reason, origin, ",
            crate::store::sqlite::payloads::payload!(),
            ", due, earlier, dead_lettered, failed_attempts, sum"
        )
    };
}
pub(super) use item_columns;

/// An item, and columns that its fields do not show.
pub(super) struct Stored {
    pub(super) row: i64,
    pub(super) item: Item,
    /// `when` as stored. `None` for processed and blocked items.
    pub(super) when: Option<i64>,
    /// The lease, lapsed or not.
    pub(super) lease: Option<LeaseToken>,
    /// Number of deliveries before the item came into its queue.
    pub(super) earlier: u32,
}

/// Reads the item of a row of [`item_columns`].
pub(super) fn read_item(view: &View<'_>, row: &Row<'_>) -> rusqlite::Result<Stored> {
    read_item_of(view, queue_name(row, 1)?, row)
}

/// Like [`read_item`], for an item whose queue is known.
pub(super) fn read_item_of(
    view: &View<'_>,
    queue: QueueName,
    row: &Row<'_>,
) -> rusqlite::Result<Stored> {
    verify(row, Summed { id: 0, key: 9, content_type: 12, headers: 13, payload: 20, sum: 25 })?;
    let id: i64 = row.get(0)?;
    let when: Option<i64> = row.get(3)?;
    let lease = row.get_ref(6)?.as_str_or_null()?;
    let lease = lease.map(|lock| lock.parse().unwrap_or(LeaseToken::NONE));
    let blocked: Option<i64> = row.get(15)?;
    let processed: Option<i64> = row.get(16)?;
    let state = match when {
        _ if processed.is_some() => ItemState::Processed,
        _ if blocked.is_some() => ItemState::Blocked,
        Some(when) if when > view.now.0 && lease.is_some() => ItemState::Reserved,
        Some(when) if when > view.now.0 => ItemState::Delayed,
        _ => ItemState::Ready,
    };
    let created: i64 = row.get(14)?;
    let due_time = match state {
        ItemState::Blocked | ItemState::Processed => None,
        ItemState::Reserved => Some(row.get::<_, Option<i64>>(21)?.unwrap_or(created)),
        ItemState::Ready | ItemState::Delayed => when,
    };
    let item = Item {
        id: view.item_id(id),
        queue,
        payload: Bytes::copy_from_slice(row.get_ref(20)?.as_blob()?),
        content_type: text(row, 12)?,
        headers: headers(row, 13)?,
        priority: priority(row, 2)?,
        state,
        attempt: row.get(4)?,
        deliveries: row.get(5)?,
        sequence: row.get(10)?,
        ordering_key: OrderingKey::new(text(row, 9)?),
        dedup_id: DedupId::new(text(row, 11)?),
        create_time: Timestamp(created),
        eligible_time: when.map(Timestamp),
        expire_time: row.get::<_, Option<i64>>(17)?.map(Timestamp),
        process_time: processed.map(Timestamp),
        producer: consumer_name(row, 7)?,
        consumer: consumer_name(row, 8)?,
        last_reason: text(row, 18)?,
        origin_queue: optional_queue_name(row, 19)?,
        due_time: due_time.map(Timestamp),
        dead_letter_time: row.get::<_, Option<i64>>(23)?.map(Timestamp),
        dead_letter_attempts: row.get::<_, Option<u32>>(24)?.unwrap_or(0),
    };
    Ok(Stored { row: id, item, when, lease, earlier: row.get(22)? })
}

fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(row.get_ref(column)?.as_str_or_null()?.unwrap_or_default().to_owned())
}

pub(super) fn broken(column: usize, why: impl std::fmt::Display) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, why.to_string().into())
}

pub(super) fn queue_name(row: &Row<'_>, column: usize) -> rusqlite::Result<QueueName> {
    let text = row.get_ref(column)?.as_str()?;
    QueueName::parse("queue", text).map_err(|e| broken(column, e))
}

pub(super) fn optional_queue_name(
    row: &Row<'_>,
    column: usize,
) -> rusqlite::Result<Option<QueueName>> {
    let text = row.get_ref(column)?.as_str_or_null()?.unwrap_or_default();
    QueueName::parse_optional("queue", text).map_err(|e| broken(column, e))
}

fn consumer_name(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<ConsumerName>> {
    let text = row.get_ref(column)?.as_str_or_null()?.unwrap_or_default();
    ConsumerName::parse_optional("consumer", text).map_err(|e| broken(column, e))
}

pub(super) fn priority(row: &Row<'_>, column: usize) -> rusqlite::Result<Priority> {
    Priority::parse("priority", row.get(column)?).map_err(|e| broken(column, e))
}

pub(super) fn headers(row: &Row<'_>, column: usize) -> rusqlite::Result<Headers> {
    match row.get_ref(column)?.as_str_or_null()? {
        Some(json) => serde_json::from_str(json).map_err(|e| broken(column, e)),
        None => Ok(Headers::new()),
    }
}

/// Returns headers as JSON. `None` if there are none.
pub(super) fn headers_json(headers: &Headers) -> Option<String> {
    (!headers.is_empty()).then(|| json(headers))
}

/// Returns a map of strings as JSON.
pub(super) fn json(map: &std::collections::BTreeMap<String, String>) -> String {
    serde_json::to_string(map).unwrap_or_default() // strings always have a JSON form
}

/// Returns `None` for an empty text, which is stored as NULL.
pub(super) fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Returns a lease token as it is stored: 24 hexadecimal digits.
pub(super) fn lock_text(token: LeaseToken) -> String {
    token.to_string()
}
