//! Order within a key: at most one item of a key is not blocked, which the unique index on
//! `{q, turn}` enforces whatever brokers do; when it is settled, the next by sequence number gets
//! its turn. A turn lost to a crash between the two is found by the next push of the key and by
//! [`repair`].

use std::collections::HashSet;

use futures_util::{StreamExt, stream};
use mongodb::{
    bson::{Bson, Document, RawDocumentBuf, doc},
    options::{Hint, ReturnDocument},
};

use crate::{
    domain::{GroupName, ItemId, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::watermarks::bit,
            reserve::ended,
            schema::{
                item::Stored,
                layout::{Group, TURN, WAITING, date},
            },
            server::{
                connect::read_documents,
                error::{failed, integer, is_duplicate_key},
            },
        },
    },
};

/// A queue and an ordering key in it.
pub(crate) type OrderKey = (QueueName, String);

/// How many keys are promoted at once.
const AT_ONCE: usize = 16;
/// How many entries of the index one step of [`repair`] looks at.
const STEP: i32 = 500;
/// How many steps one call of it takes.
const STEPS: usize = 4;

/// An item that got its turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promoted {
    pub(crate) id: ItemId,
    pub(crate) when: Timestamp,
}

/// The name of a queue's sequence counter.
pub(crate) fn counter_id(queue: &QueueName) -> String {
    format!("sequence/{queue}")
}

/// The update that takes `n` numbers from a counter.
pub(crate) fn taking(n: i64) -> Document {
    doc! { "$inc": { "next": n } }
}

/// Takes `n` sequence numbers of a queue; answers the first.
pub(crate) async fn take_numbers(inner: &Inner, queue: &QueueName, n: usize) -> Result<i64> {
    let n = n as i64;
    let counters = inner.db.collection::<Document>("counters");
    let find = || {
        counters
            .find_one_and_update(doc! { "_id": counter_id(queue) }, taking(n))
            .upsert(true)
            .return_document(ReturnDocument::After)
    };
    let counter = match find().await {
        Err(error) if is_duplicate_key(&error) => find().await, // two brokers made it at once
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
            Some((last, keys)) if *last == queue => keys.push(key),
            _ => queues.push((queue, vec![key])),
        }
    }
    queues
}

/// The keys of which an item has its turn.
pub(crate) async fn holders(
    inner: &Inner,
    group: &Group,
    keys: &[OrderKey],
) -> Result<HashSet<OrderKey>> {
    let mut held = HashSet::new();
    for (queue, keys) in by_queue(keys) {
        for keys in keys.chunks(1_000) {
            let command = holders_command(group, queue, keys);
            for document in read_documents(&inner.db, command).await? {
                if let Ok(key) = document.get_str("turn") {
                    held.insert((queue.clone(), key.to_owned()));
                }
            }
        }
    }
    Ok(held)
}

fn holders_command(group: &Group, queue: &QueueName, keys: &[&str]) -> Document {
    doc! {
        "find": group.items.name(), "filter": { "q": queue.as_str(), "turn": { "$in": keys } },
        "projection": { "_id": 0, "turn": 1 }, "hint": TURN,
        "batchSize": 1_001,
    }
}

/// Finds the keys of which items are blocked.
pub(crate) fn waiting_pipeline(queue: &QueueName, keys: &[&str]) -> Vec<Document> {
    vec![
        doc! { "$match": {
            "q": queue.as_str(), "key": { "$in": keys }, "due": { "$exists": true },
        } },
        doc! { "$group": { "_id": "$key" } },
    ]
}

/// The update that gives a blocked item its turn.
pub(crate) fn turning(now: Timestamp) -> Vec<Document> {
    let when = doc! { "$max": ["$due", date(now)] };
    vec![
        doc! { "$set": { "turn": "$key", "when": when.clone(), "eligible": when } },
        doc! { "$unset": "due" },
    ]
}

/// Gives the first blocked item of each key its turn, unless another item has it.
pub(crate) async fn promote(
    inner: &Inner,
    group: &Group,
    keys: &[OrderKey],
) -> Result<Vec<Promoted>> {
    let free: Vec<OrderKey> = if keys.len() > 1 {
        let held = holders(inner, group, keys).await?;
        let free: HashSet<&OrderKey> = keys.iter().filter(|key| !held.contains(*key)).collect();
        free.into_iter().cloned().collect()
    } else {
        keys.to_vec()
    };
    let results: Vec<Result<Option<Promoted>>> = stream::iter(free)
        .map(|(queue, key)| async move { promote_one(inner, group, &queue, &key).await })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let mut promoted = Vec::new();
    for result in results {
        promoted.extend(result?);
    }
    Ok(promoted)
}

async fn promote_one(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    key: &str,
) -> Result<Option<Promoted>> {
    let filter = doc! { "q": queue.as_str(), "key": key, "due": { "$exists": true } };
    let found = group
        .items
        .find_one_and_update(filter, turning(inner.now()))
        .sort(doc! { "seq": 1 })
        .hint(Hint::Name(WAITING.to_owned()))
        .return_document(ReturnDocument::After)
        .projection(doc! { "when": 1, "priority": 1 })
        .await;
    let found: Option<RawDocumentBuf> = match found {
        Err(error) if is_duplicate_key(&error) => return Ok(None), // another has the turn
        result => result.map_err(failed)?,
    };
    let Some(found) = found else { return Ok(None) };
    let stored = Stored::read(&found)?;
    inner.head(queue).lower(bit(stored.priority), stored.when);
    Ok(Some(Promoted { id: stored.id(), when: Timestamp(stored.when) }))
}

/// Gives a turn to keys of the queue that have blocked items and no holder; answers how many. Walks on from
/// where the last call stopped, so that a call costs the same however many items are blocked.
pub(crate) async fn repair(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    ended::remove_ended(inner, &group, queue).await?;
    let head = inner.head(queue);
    let mut after = head.repaired.lock().take();
    let mut repaired = 0;
    for _ in 0..STEPS {
        let (count, last) = repair_step(inner, &group, queue, after).await?;
        repaired += count;
        after = last;
        if after.is_none() {
            break;
        }
    }
    *head.repaired.lock() = after;
    Ok(repaired)
}

/// The same for all keys.
pub(crate) async fn repair_all(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    ended::remove_ended(inner, &group, queue).await?;
    let (mut after, mut repaired) = (None, 0);
    loop {
        let (count, last) = repair_step(inner, &group, queue, after).await?;
        repaired += count;
        if last.is_none() {
            return Ok(repaired);
        }
        after = last;
    }
}

/// Repairs the keys of the next entries of the index; answers how many, and the last key looked at, `None` at
/// the end.
async fn repair_step(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    after: Option<String>,
) -> Result<(u64, Option<String>)> {
    let after = after.map_or(Bson::MinKey, Bson::String);
    let command = doc! {
        "find": group.items.name(),
        "filter": { "q": queue.as_str(), "key": { "$gt": after }, "due": { "$exists": true } },
        "sort": { "q": 1, "key": 1, "seq": 1 }, "projection": { "_id": 0, "key": 1 },
        "hint": WAITING, "limit": STEP, "batchSize": STEP + 1,
    };
    let found = read_documents(&inner.db, command).await?;
    let mut keys: Vec<OrderKey> = found
        .iter()
        .filter_map(|document| document.get_str("key").ok())
        .map(|key| (queue.clone(), key.to_owned()))
        .collect();
    keys.dedup();
    // The rest of the last key's items is passed over by one seek.
    let last = keys.last().map(|(_, key)| key.clone());
    let repaired = promote(inner, group, &keys).await?.len() as u64;
    Ok((repaired, last))
}
