//! Items by id, as their segments say.

use std::collections::{BTreeMap, HashMap};

use mongodb::bson::rawdoc;

use crate::{
    domain::{ItemId, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{Stored, oid, oids},
                layout::{BY_ID, Group, SEGMENTS, millis},
            },
            segment::{
                claim::number_of,
                document::{Segment, contents},
            },
            server::connect::read,
        },
    },
};

/// Those of the segments that are there, without what their items are.
pub(crate) async fn segments(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
) -> Result<Vec<Segment>> {
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(ids) }, "left": { "$gte": 0 } },
        "projection": { "items": 0 },
        "hint": BY_ID,
    };
    read(&inner.db, &command, Segment::read).await
}

/// Those of the items that are in segments, without what they are.
pub(crate) async fn items(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
) -> Result<HashMap<ItemId, Stored>> {
    let mut wanted: BTreeMap<ItemId, Vec<ItemId>> = BTreeMap::new();
    for id in ids {
        let (segment, offset) = id.block();
        if offset > 0 {
            wanted.entry(segment).or_default().push(id);
        }
    }
    let mut found = HashMap::new();
    if wanted.is_empty() {
        return Ok(found);
    }
    for segment in segments(inner, group, wanted.keys().copied()).await? {
        for id in wanted.get(&segment.id).into_iter().flatten() {
            if segment.holds(number_of(*id)) {
                found.insert(*id, segment.item(number_of(*id), None)?);
            }
        }
    }
    Ok(found)
}

/// One item, if it is in a segment.
pub(crate) async fn item(inner: &Inner, group: &Group, id: ItemId) -> Result<Option<Stored>> {
    let (segment, offset) = id.block();
    if offset == 0 {
        return Ok(None);
    }
    let at = number_of(id);
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": oid(segment), "left": { "$gte": 0 } },
        "projection": {
            "q": 1, "when": 1, "priority": 1, "created": 1, "n": 1, "head": 1, "ready": 1, "left": 1, "done": 1,
            "runs": 1, "window": 1, "items": { "$slice": ["$items", at as i64, 1] },
            "dedup": { "$slice": ["$dedup", at as i64, 1] },
        },
        "hint": BY_ID,
        "limit": 1,
        "singleBatch": true,
    };
    let found = read(&inner.db, &command, |document| {
        let segment = Segment::read(document)?;
        if !segment.holds(at) {
            return Ok(None);
        }
        segment.item(at, contents(document).next().as_ref()).map(Some)
    });
    Ok(found.await?.into_iter().flatten().next())
}

/// When the first lease ends of those under which items of the queue's segments are, or sooner.
pub(crate) async fn first_lapse(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
) -> Result<Option<Timestamp>> {
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "q": queue.as_str(), "lapse": { "$gte": millis(0) }, "left": { "$gte": 0 } },
        "sort": { "lapse": 1 },
        "projection": { "_id": 0, "lapse": 1 },
        "hint": SEGMENTS,
        "limit": 1,
        "singleBatch": true,
    };
    let found = read(&inner.db, &command, |document| Ok(Segment::read(document)?.lapse)).await?;
    Ok(found.into_iter().flatten().next().map(Timestamp))
}
