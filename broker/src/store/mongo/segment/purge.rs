//! Deleting segments with all that is not reserved in them.

use mongodb::{
    ClientSession,
    bson::{doc, oid::ObjectId},
    options::Hint,
};

use crate::{
    domain::{ItemId, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::oid,
                layout::{BY_ID, Group, SEGMENTS, date},
            },
            segment::{
                detach::{detach_ready, detach_reserved},
                document::Segment,
            },
            server::{
                connect::{command_of, read},
                transaction::{Failure, Patience, attempt_in_time, begin, commit},
            },
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
    while let Some(items) = purge_step(inner, group, queue, now).await? {
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
    let now = inner.now();
    let remembering = found.iter().filter(|segment| remembers(segment, now));
    let remembering: Vec<ItemId> = remembering.map(|segment| segment.id).collect();
    detach_ready(inner, group, &remembering).await?;
    delete(inner, group, found.iter().map(|segment| segment.id)).await.map(Some)
}

/// Returns true if deduplication ids of items that were committed are to stay.
fn remembers(segment: &Segment, now: Timestamp) -> bool {
    segment.left < segment.n && segment.window.is_some_and(|window| window > now.0)
}

/// Deletes those of the segments that can be deleted whole, and returns how many items that were. Others may claim or
/// move items meanwhile, so that what counts is what is there in the transaction that deletes it.
async fn delete(
    inner: &Inner,
    group: &Group,
    segments: impl IntoIterator<Item = ItemId>,
) -> Result<u64> {
    let segments: Vec<ObjectId> = segments.into_iter().map(oid).collect();
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let attempt = async {
            let deleted = delete_within(inner, group, &segments, &mut session).await?;
            commit(&mut session).await?;
            Ok(deleted)
        };
        let outcome = attempt_in_time(attempt).await;
        if let Some(deleted) = patience.after(&mut session, outcome).await? {
            return Ok(deleted);
        }
    }
}

/// The same within a transaction.
async fn delete_within(
    inner: &Inner,
    group: &Group,
    segments: &[ObjectId],
    session: &mut ClientSession,
) -> Result<u64, Failure> {
    let now = inner.now();
    let mut found = group
        .items
        .find(doc! { "_id": { "$in": segments }, "left": { "$gte": 0 } })
        .projection(doc! { "items": 0 })
        .hint(Hint::Name(BY_ID.to_owned()))
        .session(&mut *session)
        .await?;
    let (mut free, mut items) = (Vec::new(), 0);
    while let Some(document) = found.next(&mut *session).await {
        let segment = Segment::read(&document?)?;
        if segment.left == segment.ready && !remembers(&segment, now) {
            free.push(oid(segment.id));
            items += segment.left as u64;
        }
    }
    if !free.is_empty() {
        group.items.delete_many(doc! { "_id": { "$in": free } }).session(session).await?;
    }
    Ok(items)
}
