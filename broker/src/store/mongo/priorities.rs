//! Priorities in use. They are recorded with the settings of the queue, so that a queue with one priority costs one
//! range of the index. Sweeps read them from the index itself.
//!
//! Each priority in use has two sentinels, entries of the hand-out index that are never deleted: one behind all waiting
//! items, one at the end of the priority. A find that has read everything goes on to the next live entry to know that
//! it is done. Without a sentinel, this search would walk through dead entries among the reserved items, at the head of
//! the next priority, or of the next queue by name, and a hundred thousand dead entries take tens of milliseconds.

use std::collections::HashMap;

use mongodb::{
    bson::{Bson, Document, RawArrayBuf, doc, rawdoc},
    error::ErrorKind,
};

use crate::{
    domain::{PrioritySet, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::layout::{Group, HANDOUT, READY_END, TOMBSTONE, durable, millis},
            server::{
                connect::{read_documents, write},
                error::{DUPLICATE_KEY, failed, integer},
                time_limit::{in_time, read_in_time},
            },
        },
    },
};

/// A queue that has, or is about to have, items of these priorities.
#[derive(Clone, Copy)]
pub(crate) struct InUse<'a> {
    pub(crate) queue: &'a QueueName,
    pub(crate) set: PrioritySet,
    /// When the queue was created, if known.
    pub(crate) incarnation: Option<Timestamp>,
}

/// Records the priorities of queues of a group, each of which may be named several times: of all of them by two commands.
pub(crate) async fn record(
    inner: &Inner,
    group: &Group,
    used: impl IntoIterator<Item = InUse<'_>>,
) -> Result<()> {
    let mut queues: HashMap<&QueueName, InUse<'_>> = HashMap::new();
    for of in used {
        queues.entry(of.queue).or_insert(InUse { set: PrioritySet::EMPTY, ..of }).set |= of.set;
    }
    let missing: Vec<InUse<'_>> = queues
        .into_values()
        .filter_map(|of| {
            let set = inner.cursor(of.queue).unrecorded(of.set, of.incarnation);
            (!set.is_empty()).then_some(InUse { set, ..of })
        })
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let there = add_levels(inner, &missing).await?;
    set_sentinels(group, &missing).await?;
    // A queue that does not exist yet takes its priorities from the index when it is created.
    if there == missing.len() as u64 {
        for of in &missing {
            inner.cursor(of.queue).recorded(of.set, of.incarnation);
        }
    }
    Ok(())
}

/// Adds the priorities to the settings of the queues, and returns how many of these there are.
async fn add_levels(inner: &Inner, queues: &[InUse<'_>]) -> Result<u64> {
    let mut names: HashMap<PrioritySet, RawArrayBuf> = HashMap::new();
    for of in queues {
        names.entry(of.set).or_default().push(of.queue.as_str());
    }
    let statements = names.into_iter().map(|(set, names)| {
        rawdoc! {
            "q": { "_id": { "$in": names } },
            "u": { "$addToSet": { "levels": { "$each": set.iter().collect::<RawArrayBuf>() } } },
            "multi": true,
        }
    });
    let command = rawdoc! {
        "update": "queues",
        "updates": statements.collect::<RawArrayBuf>(),
        "ordered": false,
        "writeConcern": durable(),
    };
    Ok(write(&inner.db, command).await?.n)
}

/// Names and dates of the sentinels of a priority.
const SENTINELS: [(&str, i64); 2] = [("ready", READY_END), ("end", TOMBSTONE)];

fn sentinel_id(queue: &QueueName, level: i32, name: &str) -> String {
    format!("barrier/{queue}/{level}/{name}")
}

/// Returns the ids of all sentinels that a queue may have.
pub(crate) fn sentinel_ids(queue: &QueueName) -> Vec<String> {
    let of_level = |level| SENTINELS.map(|(name, _)| sentinel_id(queue, level, name));
    PrioritySet::ALL.iter().flat_map(of_level).collect()
}

/// Inserts the sentinels of these priorities. Nothing that reads items reads at their dates.
async fn set_sentinels(group: &Group, queues: &[InUse<'_>]) -> Result<()> {
    let levels = queues.iter().flat_map(|of| of.set.iter().map(|level| (of.queue, level)));
    let sentinels = levels.flat_map(|(queue, level)| {
        SENTINELS.map(|(name, when)| {
            rawdoc! {
                "_id": sentinel_id(queue, level, name),
                "q": queue.as_str(),
                "when": millis(when),
                "priority": level,
            }
        })
    });
    let insert = group.items.insert_many(sentinels).ordered(false);
    let Err(error) = in_time(&group.db, insert).await else { return Ok(()) };
    let there_before = match error.kind.as_ref() {
        ErrorKind::InsertMany(insert) => {
            insert.write_concern_error.is_none()
                && insert.write_errors.iter().flatten().all(|e| e.code == DUPLICATE_KEY)
        }
        _ => false,
    };
    if there_before { Ok(()) } else { Err(failed(error)) }
}

/// Returns the priorities that are recorded with the queue.
pub(crate) async fn recorded(inner: &Inner, queue: &QueueName) -> Result<PrioritySet> {
    let command = doc! {
        "find": "queues", "filter": { "_id": queue.as_str() }, "projection": { "levels": 1 },
        "limit": 1, "singleBatch": true,
    };
    let found = read_documents(&inner.db, command).await?;
    let set = found.first().and_then(|queue| queue.get_array("levels").ok());
    Ok(set.map_or(PrioritySet::EMPTY, |levels| to_set(levels)))
}

/// Returns the priorities of which the index has entries.
pub(crate) async fn in_index(
    inner: &Inner,
    collection: &str,
    queue: &QueueName,
) -> Result<PrioritySet> {
    let command = doc! {
        "distinct": collection, "key": "priority", "query": { "q": queue.as_str() },
    };
    let reply = read_in_time(&inner.db, || inner.db.run_command(command.clone())).await?;
    Ok(reply.get_array("values").map_or(PrioritySet::EMPTY, |levels| to_set(levels)))
}

fn to_set(levels: &[Bson]) -> PrioritySet {
    levels.iter().filter_map(integer).map(|level| level as i32).collect()
}

/// Returns the earliest `when` in the range, whose end is not included. One command makes one index seek per priority.
pub(crate) async fn first_between(
    inner: &Inner,
    collection: &str,
    queue: &QueueName,
    set: PrioritySet,
    range: (i64, i64),
) -> Result<Option<i64>> {
    let found = nth_between(inner, collection, queue, set, range, 0).await?;
    Ok(found.into_iter().map(|(_, when)| when).min())
}

/// Returns, for each priority with more than `n` entries in the range, the `when` of the entry that follows the first
/// `n`.
pub(crate) async fn nth_between(
    inner: &Inner,
    collection: &str,
    queue: &QueueName,
    set: PrioritySet,
    (from, below): (i64, i64),
    n: i64,
) -> Result<Vec<(i32, i64)>> {
    let seek = |level: i32| {
        let mut stages = vec![
            doc! { "$match": {
                "q": queue.as_str(), "priority": level,
                "when": { "$gte": millis(from), "$lt": millis(below) },
            } },
            doc! { "$sort": { "when": 1 } },
        ];
        if n > 0 {
            stages.push(doc! { "$skip": n });
        }
        stages.push(doc! { "$limit": 1 });
        stages.push(doc! { "$project": { "_id": 0, "priority": 1, "when": 1 } });
        stages
    };
    let mut each = set.iter();
    let Some(first) = each.next() else { return Ok(Vec::new()) };
    let mut pipeline = seek(first);
    for level in each {
        let other = doc! { "coll": collection, "pipeline": seek(level) };
        pipeline.push(doc! { "$unionWith": other });
    }
    let command = doc! {
        "aggregate": collection, "pipeline": pipeline, "cursor": {}, "hint": HANDOUT,
    };
    let found = read_documents(&inner.db, command).await?;
    let place = |entry: &Document| {
        let level = entry.get("priority").and_then(integer)?;
        Some((level as i32, entry.get_datetime("when").ok()?.timestamp_millis()))
    };
    Ok(found.iter().filter_map(place).collect())
}
