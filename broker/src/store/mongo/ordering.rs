//! Order within a key. At most one item of a key is not blocked, which the unique index on `{q, turn}` enforces across
//! brokers. When that item is settled, the next one by sequence number is unblocked. If a crash between the two writes
//! prevents this, the next push of the key does it, or the upkeep ([`crate::store::mongo::upkeep`]).

use std::collections::HashSet;

use mongodb::{
    bson::{Document, RawArrayBuf, RawDocumentBuf, doc, rawdoc},
    options::ReturnDocument,
};

use crate::{
    domain::{ItemId, OrderingKey, PrioritySet, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::Stored,
                layout::{Group, TURN, WAITING, date},
            },
            server::{
                connect::{read, read_documents},
                error::{failed, integer, is_duplicate_key},
                statement::{Update, statement_for_one, update_where_free},
                time_limit::in_time,
            },
        },
    },
};

/// A queue and an ordering key in it.
pub(crate) type OrderKey = (QueueName, OrderingKey);

/// Limit of keys of one command.
const MAX_KEYS: usize = 1_000;

/// An item that was unblocked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unblocked {
    pub(crate) id: ItemId,
    pub(crate) when: Timestamp,
}

/// Returns the id of a queue's sequence counter.
pub(crate) fn counter_id(queue: &QueueName) -> String {
    format!("sequence/{queue}")
}

/// Returns the update that takes `n` numbers from a counter.
pub(crate) fn taking(n: i64) -> Document {
    doc! { "$inc": { "next": n } }
}

/// Takes `n` sequence numbers of a queue and returns the first.
pub(crate) async fn take_numbers(inner: &Inner, queue: &QueueName, n: usize) -> Result<i64> {
    let n = n as i64;
    let counters = inner.db.collection::<Document>("counters");
    let find = || {
        counters
            .find_one_and_update(doc! { "_id": counter_id(queue) }, taking(n))
            .upsert(true)
            .return_document(ReturnDocument::After)
    };
    let counter = match in_time(&inner.db, find()).await {
        Err(error) if is_duplicate_key(&error) => in_time(&inner.db, find()).await, // two brokers created it at once
        result => result,
    };
    let counter = counter.map_err(failed)?;
    let last = counter.as_ref().and_then(|c| c.get("next")).and_then(integer).unwrap_or(n);
    Ok(last - n + 1)
}

/// Groups keys by queue.
pub(crate) fn by_queue(keys: &[OrderKey]) -> Vec<(&QueueName, Vec<&str>)> {
    let mut sorted: Vec<&OrderKey> = keys.iter().collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut queues: Vec<(&QueueName, Vec<&str>)> = Vec::new();
    for (queue, key) in sorted {
        match queues.last_mut() {
            Some((last, keys)) if *last == queue => keys.push(key.as_str()),
            _ => queues.push((queue, vec![key.as_str()])),
        }
    }
    queues
}

/// Returns the keys that have an unblocked item.
pub(crate) async fn holders(
    inner: &Inner,
    group: &Group,
    keys: &[OrderKey],
) -> Result<HashSet<OrderKey>> {
    let mut held = HashSet::new();
    for (queue, keys) in by_queue(keys) {
        for keys in keys.chunks(MAX_KEYS) {
            let command = holders_command(group, queue, keys);
            for document in read_documents(&inner.db, command).await? {
                let key = document.get_str("turn").ok().and_then(OrderingKey::new);
                held.extend(key.map(|key| (queue.clone(), key)));
            }
        }
    }
    Ok(held)
}

fn holders_command(group: &Group, queue: &QueueName, keys: &[&str]) -> Document {
    doc! {
        "find": group.items.name(), "filter": { "q": queue.as_str(), "turn": { "$in": keys } },
        "projection": { "_id": 0, "turn": 1 }, "hint": TURN,
        "batchSize": MAX_KEYS as i64 + 1,
    }
}

/// Returns the pipeline that finds which of the keys have blocked items.
pub(crate) fn waiting_pipeline(queue: &QueueName, keys: &[&str]) -> Vec<Document> {
    vec![
        doc! { "$match": {
            "q": queue.as_str(), "key": { "$in": keys }, "due": { "$exists": true },
        } },
        doc! { "$group": { "_id": "$key" } },
    ]
}

/// Returns the update that unblocks an item.
pub(crate) fn unblocking(now: Timestamp) -> Vec<Document> {
    let when = doc! { "$max": ["$due", date(now)] };
    vec![
        doc! { "$set": { "turn": "$key", "when": when.clone(), "eligible": when } },
        doc! { "$unset": "due" },
    ]
}

/// Unblocks the first item of each key, unless another item of the key is not blocked. Returns the items that were
/// unblocked, but for those that were reserved at once.
pub(crate) async fn unblock(
    inner: &Inner,
    group: &Group,
    keys: &[OrderKey],
) -> Result<Vec<Unblocked>> {
    let free: Vec<OrderKey> = if keys.len() > 1 {
        let held = holders(inner, group, keys).await?;
        keys.iter().filter(|key| !held.contains(*key)).cloned().collect()
    } else {
        keys.to_vec()
    };
    let mut unblocked = Vec::new();
    for (queue, keys) in by_queue(&free) {
        for keys in keys.chunks(MAX_KEYS) {
            unblocked.extend(unblock_in_queue(inner, group, queue, keys).await?);
        }
    }
    Ok(unblocked)
}

/// Like [`unblock`], after a settle. The settle has taken effect, so its caller is told so even if nothing can be
/// unblocked now. The upkeep does it later.
pub(crate) async fn unblock_settled(inner: &Inner, group: &Group, keys: &[OrderKey]) {
    if let Err(error) = unblock(inner, group, keys).await {
        tracing::debug!(%error, "could not unblock the next items of settled keys");
    }
}

/// Unblocks the first items of keys that have no unblocked item, by one command.
async fn unblock_in_queue(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    keys: &[&str],
) -> Result<Vec<Unblocked>> {
    let change = Update::pipeline(&unblocking(inner.now()))?;
    let statements = keys.iter().map(|key| first_waiting(queue, key, &change));
    // If another item of a key was unblocked meanwhile, the index refuses this one.
    if update_where_free(inner, group, statements).await?.n == 0 {
        return Ok(Vec::new());
    }
    let command = unblocked_command(group, queue, keys);
    let mut unblocked = Vec::new();
    for item in read(&inner.db, &command, Stored::read).await? {
        inner.cursor(queue).rewind(PrioritySet::of(item.priority), item.when);
        unblocked.push(Unblocked { id: item.id(), when: Timestamp(item.when) });
    }
    Ok(unblocked)
}

/// Returns the statement that changes the first blocked item of a key: the first in the order of the index, which is
/// that of the sequence numbers.
pub(crate) fn first_waiting(queue: &QueueName, key: &str, change: &Update) -> RawDocumentBuf {
    let filter = rawdoc! { "q": queue.as_str(), "key": key, "due": { "$exists": true } };
    statement_for_one(WAITING, filter, change.clone())
}

/// Returns the command that finds the items of the keys that are neither blocked nor reserved.
fn unblocked_command(group: &Group, queue: &QueueName, keys: &[&str]) -> RawDocumentBuf {
    let keys: RawArrayBuf = keys.iter().copied().collect();
    rawdoc! {
        "find": group.items.name(),
        "filter": { "q": queue.as_str(), "turn": { "$in": keys }, "lock": { "$exists": false } },
        "projection": { "when": 1, "priority": 1 },
        "hint": TURN,
        "batchSize": MAX_KEYS as i64 + 1,
    }
}
