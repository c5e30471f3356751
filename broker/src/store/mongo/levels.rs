//! Priority levels in use: recorded with the queue's settings, so that a queue with one level costs
//! one range of the index, and read from the index itself by sweeps.
//!
//! Each level in use has a barrier at its end: an entry of the hand-out index that is never deleted.
//! A find that has read all there is looks for the next live entry to know that it is done; without
//! the barrier that search goes on through whatever was deleted at the head of the next level, or of
//! the next queue by name, and a hundred thousand dead entries take tens of milliseconds.

use mongodb::{
    bson::{Bson, Document, RawDocumentBuf, doc, rawdoc},
    error::ErrorKind,
};

use super::{
    Inner,
    connect::read_documents,
    errors::{DUPLICATE_KEY, failed, integer},
    head::{LevelSet, bit, levels},
    layout::{BLOCKED, Group, HANDOUT, TOMBSTONE, date, millis},
};
use crate::{
    domain::{GroupName, QueueName, Timestamp},
    store::Result,
};

/// Records that a queue has, or is about to have, items in these levels. `incarnation`: when the
/// queue was created, if known.
pub(super) async fn record(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    set: LevelSet,
    incarnation: Option<Timestamp>,
) -> Result<()> {
    let head = inner.head(queue);
    let missing = head.unrecorded(set, incarnation);
    if missing == 0 {
        return Ok(());
    }
    let new: Vec<Bson> = levels(missing).map(Bson::Int32).collect();
    let outcome = inner
        .db
        .collection::<Document>("queues")
        .update_one(
            doc! { "_id": queue.as_str() },
            doc! { "$addToSet": { "levels": { "$each": new } } },
        )
        .await
        .map_err(failed)?;
    set_barriers(group, queue, missing).await?;
    // A queue that is not there yet gets its levels from the index when it is created.
    if outcome.matched_count > 0 {
        head.recorded(missing);
    }
    Ok(())
}

fn barrier_id(queue: &QueueName, level: i32) -> String {
    format!("barrier/{queue}/{level}")
}

/// The ids of all barriers a queue may have.
pub(super) fn barrier_ids(queue: &QueueName) -> Vec<String> {
    levels(LevelSet::MAX).map(|level| barrier_id(queue, level)).collect()
}

/// Puts barriers at the ends of the levels. They look like tombstones, which nobody reads, and sort
/// before all others, whose ids are no text.
async fn set_barriers(group: &Group, queue: &QueueName, set: LevelSet) -> Result<()> {
    let barriers: Vec<RawDocumentBuf> = levels(set)
        .map(|level| {
            rawdoc! {
                "_id": barrier_id(queue, level),
                "q": queue.as_str(),
                "when": millis(TOMBSTONE),
                "priority": level,
            }
        })
        .collect();
    let Err(error) = group.items.insert_many(barriers).ordered(false).await else { return Ok(()) };
    let there_before = match error.kind.as_ref() {
        ErrorKind::InsertMany(insert) => {
            insert.write_concern_error.is_none()
                && insert.write_errors.iter().flatten().all(|e| e.code == DUPLICATE_KEY)
        }
        _ => false,
    };
    if there_before { Ok(()) } else { Err(failed(error)) }
}

/// The levels recorded with the queue.
pub(super) async fn recorded(inner: &Inner, queue: &QueueName) -> Result<LevelSet> {
    let command = doc! {
        "find": "queues", "filter": { "_id": queue.as_str() }, "projection": { "levels": 1 },
        "limit": 1, "singleBatch": true,
    };
    let found = read_documents(&inner.db, command).await?;
    let set = found.first().and_then(|queue| queue.get_array("levels").ok());
    Ok(set.map_or(0, |levels| to_set(levels)))
}

/// The levels of which the index has entries.
pub(super) async fn in_index(
    inner: &Inner,
    collection: &str,
    queue: &QueueName,
) -> Result<LevelSet> {
    let command = doc! {
        "distinct": collection, "key": "priority", "query": { "q": queue.as_str() },
    };
    let reply = inner.db.run_command(command).await.map_err(failed)?;
    Ok(reply.get_array("values").map_or(0, |levels| to_set(levels)))
}

fn to_set(levels: &[Bson]) -> LevelSet {
    levels.iter().filter_map(integer).fold(0, |set, level| set | bit(level as i32))
}

/// When the first item that is not eligible now becomes so.
pub(super) async fn next_eligible(
    inner: &Inner,
    queue: &QueueName,
    group: &GroupName,
) -> Result<Option<Timestamp>> {
    let group = inner.group(group).await?;
    let head = inner.head(queue);
    let mut used = head.look_used();
    if used == 0 {
        used = in_index(inner, group.items.name(), queue).await?;
        head.add_used(used);
    }
    first_after(inner, group.items.name(), queue, used, inner.now()).await
}

/// The earliest `when` past `now`: one index seek per level, all in one go.
pub(super) async fn first_after(
    inner: &Inner,
    collection: &str,
    queue: &QueueName,
    set: LevelSet,
    now: Timestamp,
) -> Result<Option<Timestamp>> {
    let seek = |level: i32| {
        vec![
            doc! { "$match": {
                "q": queue.as_str(), "priority": level,
                "when": { "$gt": date(now), "$lt": millis(BLOCKED) },
            } },
            doc! { "$sort": { "when": 1 } },
            doc! { "$limit": 1 },
            doc! { "$project": { "_id": 0, "when": 1 } },
        ]
    };
    let mut each = levels(set);
    let Some(first) = each.next() else { return Ok(None) };
    let mut pipeline = seek(first);
    for level in each {
        let other = doc! { "coll": collection, "pipeline": seek(level) };
        pipeline.push(doc! { "$unionWith": other });
    }
    let command = doc! {
        "aggregate": collection, "pipeline": pipeline, "cursor": {}, "hint": HANDOUT,
    };
    let found = read_documents(&inner.db, command).await?;
    let times = found.iter().filter_map(|d| d.get_datetime("when").ok());
    Ok(times.map(|when| Timestamp(when.timestamp_millis())).min())
}
