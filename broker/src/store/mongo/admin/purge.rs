//! Purges: deletes all items of a queue that are not reserved.

use mongodb::bson::{Document, doc};

use crate::{
    domain::{Queue, Timestamp},
    store::{
        Purged, Result,
        mongo::{
            Inner,
            admin::listing::reclaim,
            schema::{
                layout::{Group, HANDOUT, date, live},
                settled::{bury_deleted, settle_token},
            },
            segment,
            server::{
                connect::read_documents,
                error::failed,
                time_limit::{bulk_in_time, in_time},
            },
            upkeep,
        },
    },
};

/// Limit of documents of one step.
const STEP: i64 = 5_000;

/// Deletes all items that are not reserved, including history.
pub(crate) async fn purge(inner: &Inner, queue: &Queue) -> Result<u64> {
    let group = inner.group(&queue.group).await?;
    let (q, now) = (queue.name.as_str(), inner.now());
    reclaim(inner, &group, queue, now).await?;
    let shared = segment::purge::purge(inner, &group, &queue.name).await?;
    // Items with a lapsed lease leave a tombstone, because a consumer may still settle them.
    let bury = group.items.update_many(
        doc! {
            "q": q, "when": live(), "left": { "$exists": false },
            "$or": [
                { "lock": { "$exists": true }, "when": { "$lte": date(now) } },
                { "lock": { "$exists": false }, "trace": { "$exists": true } },
            ],
        },
        bury_deleted(now, settle_token(inner)),
    );
    let buried = bulk_in_time(&inner.db, bury).await.map_err(failed)?;
    let free = doc! {
        "q": q, "when": live(), "lock": { "$exists": false }, "left": { "$exists": false },
    };
    let deleted = bulk_in_time(&inner.db, group.items.delete_many(free)).await.map_err(failed)?;
    upkeep::repair_all(inner, &queue.name, &queue.group).await?;
    Ok(shared + buried.modified_count + deleted.deleted_count)
}

/// Deletes some of the items that were first pushed by `created_by`, including history: segments first, then documents of one item.
pub(crate) async fn purge_step(
    inner: &Inner,
    queue: &Queue,
    created_by: Timestamp,
) -> Result<Purged> {
    let group = inner.group(&queue.group).await?;
    reclaim(inner, &group, queue, inner.now()).await?;
    let shared = segment::purge::purge_step(inner, &group, &queue.name, created_by).await?;
    if let Some(items) = shared {
        return Ok(Purged { items, more: true });
    }
    let command = doc! {
        "find": group.items.name(), "projection": { "_id": 1 }, "hint": HANDOUT,
        "filter": {
            "q": queue.name.as_str(), "when": live(), "left": { "$exists": false },
            "lock": { "$exists": false }, "created": { "$lte": date(created_by) },
        },
        "limit": STEP, "batchSize": STEP + 1,
    };
    let found = read_documents(&inner.db, command).await?;
    let ids: Vec<_> = found.iter().filter_map(|document| document.get("_id").cloned()).collect();
    let more = ids.len() as i64 == STEP;
    let mut items = bury_lapsed(inner, &group, queue, created_by).await?;
    if !ids.is_empty() {
        // Matches no item that was reserved meanwhile.
        let free = |trace: bool| {
            doc! {
                "_id": { "$in": &ids }, "q": queue.name.as_str(), "when": live(),
                "left": { "$exists": false }, "lock": { "$exists": false },
                "trace": { "$exists": trace },
            }
        };
        let grave = bury_deleted(inner.now(), settle_token(inner));
        let bury =
            in_time(&inner.db, group.items.update_many(free(true), grave)).await.map_err(failed)?;
        let delete =
            in_time(&inner.db, group.items.delete_many(free(false))).await.map_err(failed)?;
        items += bury.modified_count + delete.deleted_count;
    }
    if !more {
        upkeep::repair_all(inner, &queue.name, &queue.group).await?;
    }
    Ok(Purged { items, more })
}

/// Items with a lapsed lease leave a tombstone, because a consumer may still settle them. They are few.
async fn bury_lapsed(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    created_by: Timestamp,
) -> Result<u64> {
    let now = inner.now();
    let lapsed: Document = doc! {
        "q": queue.name.as_str(), "when": { "$lte": date(now) }, "lock": { "$exists": true },
        "left": { "$exists": false }, "created": { "$lte": date(created_by) },
    };
    let grave = bury_deleted(now, settle_token(inner));
    let buried =
        bulk_in_time(&inner.db, group.items.update_many(lapsed, grave)).await.map_err(failed)?;
    Ok(buried.modified_count)
}
