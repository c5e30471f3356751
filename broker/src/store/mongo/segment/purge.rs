//! Deleting segments with all that is not reserved in them.

use std::collections::HashSet;

use mongodb::bson::{RawArrayBuf, doc, rawdoc};

use crate::{
    domain::{ItemId, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::oid,
                layout::{BY_ID, Group, SEGMENTS, date, durable},
            },
            segment::{
                detach::{detach_ready, detach_reserved},
                document::Segment,
                lookup,
            },
            server::connect::{command_of, read, write},
        },
    },
};

/// Segments of one step.
const STEP: i32 = 100;

/// Deletes the segments that are there by now, and returns how many items that were. What is reserved in them gets
/// documents of its own before, and so does what is ready if deduplication ids of the segment are to be remembered.
pub(crate) async fn purge(inner: &Inner, group: &Group, queue: &QueueName) -> Result<u64> {
    let now = inner.now();
    let mut purged = 0;
    detach_reserved(inner, group, queue).await?;
    while let Some(items) = purge_some(inner, group, queue, now).await? {
        purged += items;
    }
    Ok(purged)
}

/// Deletes some of the segments that were pushed by `created_by`, and returns how many items that were; `None` if there were no more.
pub(crate) async fn purge_step(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    created_by: Timestamp,
) -> Result<Option<u64>> {
    detach_reserved(inner, group, queue).await?;
    purge_some(inner, group, queue, created_by).await
}

async fn purge_some(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    created_by: Timestamp,
) -> Result<Option<u64>> {
    let command = doc! {
        "find": group.items.name(), "hint": SEGMENTS, "projection": { "items": 0 },
        "filter": {
            "q": queue.as_str(), "left": { "$gte": 0 }, "created": { "$lte": date(created_by) },
        },
        "limit": STEP, "batchSize": STEP + 1,
    };
    let found: Vec<Segment> = read(&inner.db, &command_of(&command)?, Segment::read).await?;
    if found.is_empty() {
        return Ok(None);
    }
    // The deduplication ids of what was committed stay.
    let now = inner.now();
    let remembers = |segment: &Segment| {
        segment.left < segment.n && segment.window.is_some_and(|window| window > now.0)
    };
    let (remembering, found): (Vec<_>, Vec<_>) = found.into_iter().partition(remembers);
    let remembering: Vec<ItemId> = remembering.iter().map(|segment| segment.id).collect();
    detach_ready(inner, group, &remembering).await?;
    delete(inner, group, queue, found).await.map(Some)
}

/// Deletes segments in which nothing is reserved; again those of which something was claimed meanwhile.
async fn delete(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    mut segments: Vec<Segment>,
) -> Result<u64> {
    let mut deleted = 0;
    while !segments.is_empty() {
        let statement = |segment: &Segment| {
            rawdoc! {
                "q": {
                    "_id": oid(segment.id),
                    "ready": segment.ready as i32,
                    "left": segment.ready as i32,
                },
                "limit": 1,
                "hint": BY_ID,
            }
        };
        let deletes: RawArrayBuf = segments.iter().map(statement).collect();
        let command = rawdoc! {
            "delete": group.items.name(), "deletes": deletes, "ordered": false,
            "writeConcern": durable(),
        };
        let n = write(&inner.db, command).await?.n;
        if n == segments.len() as u64 {
            return Ok(deleted + segments.iter().map(|segment| segment.left as u64).sum::<u64>());
        }
        detach_reserved(inner, group, queue).await?;
        let ids: Vec<ItemId> = segments.iter().map(|segment| segment.id).collect();
        let again = lookup::segments(inner, group, ids).await?;
        let there: HashSet<ItemId> = again.iter().map(|segment| segment.id).collect();
        let gone = segments.iter().filter(|segment| !there.contains(&segment.id));
        deleted += gone.map(|segment| segment.ready as u64).sum::<u64>();
        segments = again;
    }
    Ok(deleted)
}
