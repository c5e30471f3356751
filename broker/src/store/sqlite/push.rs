//! Stores new items: recognises duplicates, takes sequence numbers, blocks items behind others of their keys.

use rusqlite::{OptionalExtension, Statement, params};

use super::{
    super::Push,
    checksum::checksum,
    order, payloads,
    rows::{headers_json, lock_text, some},
    tx::Tx,
};
use crate::domain::{ConsumerName, DedupId, ItemId, OrderingKey, Pushed, Timestamp};

/// Stores items, in order.
pub(super) fn push(tx: &Tx<'_>, items: &[Push]) -> rusqlite::Result<Vec<Pushed>> {
    let mut insert = tx.conn.prepare_cached(
        r#"INSERT INTO items (id, queue, priority, "when", attempt, deliveries, earlier, producer, key,
             seq, dedup, content_type, headers, created, blocked, expires, payload, sum, lock, consumer)
           VALUES (?1, ?2, ?3, ?4, 1, ?16 IS NOT NULL, 0, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15,
             ?16, ?17)"#,
    )?;
    items.iter().map(|push| push_one(tx, &mut insert, push)).collect()
}

fn push_one(tx: &Tx<'_>, insert: &mut Statement<'_>, push: &Push) -> rusqlite::Result<Pushed> {
    let Push { queue, item, producer, dedup_window, first_lease, .. } = push;
    let name = queue.name.as_str();
    let remember = item.remembered_until(queue, *dedup_window, tx.now).filter(|end| *end > tx.now);
    let dedup_id = item.dedup_id.as_ref().map(DedupId::as_str);
    if remember.is_some()
        && let Some(dedup_id) = dedup_id
        && let Some((id, sequence)) = first_of(tx, name, dedup_id)?
    {
        return Ok(Pushed { id, deduplicated: true, sequence, eligible_time: None });
    }

    let row = tx.next_row();
    let key = item.ordering_key.as_ref().map(OrderingKey::as_str);
    let own = item.eligible_from(tx.now);
    let blocked = match key {
        Some(key) => order::must_wait(tx, &queue.name, key, row)?,
        None => false,
    };
    let sequence = order::stamp(tx, queue, key.is_some())?;
    let (eligible, blocked) = if blocked { (None, Some(own.0)) } else { (Some(own.0), None) };
    let lease = first_lease.as_deref();
    let when = lease.map_or(eligible, |lease| Some((tx.now + lease.lasts).0));
    let (content_type, headers) = (some(&item.content_type), headers_json(&item.headers));
    let texts = [key, content_type, headers.as_deref()].map(|text| text.map(str::as_bytes));
    let sum = checksum(row, texts, &item.payload);
    insert.execute(params![
        row,
        name,
        item.priority.level(),
        when,
        producer.as_ref().map(ConsumerName::as_str),
        key,
        sequence,
        dedup_id,
        content_type,
        headers,
        tx.now.0,
        blocked,
        item.expires(queue, tx.now).map(Timestamp::millis),
        payloads::store(tx, row, &item.payload)?,
        sum,
        lease.map(|lease| lock_text(lease.token)),
        lease.and_then(|lease| lease.consumer.as_ref()).map(ConsumerName::as_str),
    ])?;
    if let Some(until) = remember {
        tx.conn
            .prepare_cached("INSERT OR REPLACE INTO dedup VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![name, dedup_id, row, sequence, until.0])?;
    }
    Ok(Pushed {
        id: tx.item_id(row),
        deduplicated: false,
        sequence,
        eligible_time: eligible.map(Timestamp),
    })
}

/// Returns the item first pushed with this deduplication id, if its window is open. The item itself may be gone.
fn first_of(
    tx: &Tx<'_>,
    queue: &str,
    dedup: &str,
) -> rusqlite::Result<Option<(ItemId, Option<i64>)>> {
    tx.conn
        .prepare_cached("SELECT id, seq FROM dedup WHERE queue = ?1 AND dedup = ?2 AND until > ?3")?
        .query_row(params![queue, dedup, tx.now.0], |row| {
            Ok((tx.item_id(row.get(0)?), row.get(1)?))
        })
        .optional()
}
