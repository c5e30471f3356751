//! Figures: how many items are in which state, and what happened since a queue's creation.

use mongodb::bson::{Bson, Document, RawDocumentBuf, doc};

use super::{
    Inner, admin,
    connect::{count, read_documents},
    errors::{broken, failed, integer, written},
    head::levels as each_level,
    layout::{BLOCKED, ENDS, Group, HANDOUT, LEASED, PROCESSED, READY_END, date, millis},
    levels,
};
use crate::{
    domain::{Depth, Queue, QueueName, Timestamp, Totals},
    store::Result,
};

/// Counts a queue's items by the hand-out index alone.
pub(super) async fn depth(inner: &Inner, queue: &Queue) -> Result<Depth> {
    let group = inner.group(&queue.group).await?;
    let name = group.items.name();
    let (q, now) = (queue.name.as_str(), inner.now());
    let used = admin::reclaim(inner, &group, queue, now).await?;
    let mut depth = Depth::default();
    for level in each_level(used) {
        let range = |when: Document| doc! { "q": q, "priority": level, "when": when };
        let between =
            |from: i64, below: i64| range(doc! { "$gte": millis(from), "$lt": millis(below) });
        let only = |when: i64| range(doc! { "$eq": millis(when) });
        let count = |filter: Document| count(&inner.db, name, filter, HANDOUT);
        let ready = count(range(doc! { "$lte": date(now) })).await?;
        depth.ready += ready;
        depth.delayed += count(between(now.0 + 1, READY_END)).await?;
        depth.reserved += count(between(LEASED, BLOCKED)).await?;
        depth.blocked += count(only(BLOCKED)).await?;
        depth.processed += count(only(PROCESSED)).await?;
        if ready > 0 && depth.oldest_ready.is_none() {
            let mut ready = range(doc! { "$lte": date(now) });
            ready.insert("deadline", doc! { "$not": { "$lte": date(now) } });
            depth.oldest_ready = first(inner, name, ready).await?;
        }
    }
    subtract_ended(inner, &group, queue, now, &mut depth).await?;
    depth.next_eligible = levels::next_eligible(inner, &queue.name, &queue.group, now).await?;
    Ok(depth)
}

/// Takes those off the counts that are past their end and not removed yet: there are few, the
/// server removes them every minute.
async fn subtract_ended(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    now: Timestamp,
    depth: &mut Depth,
) -> Result<()> {
    let state = doc! { "$switch": {
        "branches": [
            { "case": { "$eq": ["$when", millis(PROCESSED)] }, "then": "processed" },
            { "case": { "$eq": ["$when", millis(BLOCKED)] }, "then": "blocked" },
            { "case": { "$lte": ["$when", date(now)] }, "then": "ready" },
            { "case": { "$gt": ["$lock", null] }, "then": "reserved" },
        ],
        "default": "delayed",
    } };
    let command = doc! {
        "aggregate": group.items.name(), "hint": ENDS, "cursor": {},
        "pipeline": [
            { "$match": { "q": queue.name.as_str(), "deadline": { "$lte": date(now) } } },
            { "$group": { "_id": state, "n": { "$sum": 1 } } },
        ],
    };
    for ended in read_documents(&inner.db, command).await? {
        let n = ended.get("n").and_then(integer).unwrap_or_default() as u64;
        let count = match ended.get_str("_id").unwrap_or_default() {
            "processed" => &mut depth.processed,
            "blocked" => &mut depth.blocked,
            "ready" => &mut depth.ready,
            "reserved" => &mut depth.reserved,
            _ => &mut depth.delayed,
        };
        *count = count.saturating_sub(n);
    }
    Ok(())
}

async fn first(inner: &Inner, collection: &str, filter: Document) -> Result<Option<Timestamp>> {
    let command = doc! {
        "find": collection, "filter": filter, "sort": { "priority": -1, "when": 1, "_id": 1 },
        "projection": { "_id": 0, "when": 1 }, "hint": HANDOUT, "limit": 1, "singleBatch": true,
    };
    let found = read_documents(&inner.db, command).await?;
    let when = found.first().and_then(|document| document.get_datetime("when").ok());
    Ok(when.map(|when| Timestamp(when.timestamp_millis())))
}

/// The name of a queue's totals among the counters.
pub(super) fn totals_id(queue: &QueueName) -> String {
    format!("totals/{queue}")
}

/// The fields of the totals, and where they are.
fn fields(totals: &Totals) -> [(&'static str, u64); 7] {
    [
        ("pushed", totals.pushed),
        ("delivered", totals.delivered),
        ("committed", totals.committed),
        ("rolledBack", totals.rolled_back),
        ("moved", totals.moved),
        ("deadLettered", totals.dead_lettered),
        ("expired", totals.expired),
    ]
}

/// Adds to queues' totals, in one command.
pub(super) async fn add_totals(inner: &Inner, changes: Vec<(QueueName, Totals)>) -> Result<()> {
    let mut updates = Vec::with_capacity(changes.len());
    for (queue, totals) in &changes {
        let added: Document = fields(totals)
            .into_iter()
            .filter(|(_, n)| *n > 0)
            .map(|(name, n)| (name.to_owned(), Bson::Int64(n as i64)))
            .collect();
        if !added.is_empty() {
            updates.push(doc! {
                "q": { "_id": totals_id(queue) }, "u": { "$inc": added }, "upsert": true,
            });
        }
    }
    for updates in updates.chunks(1_000) {
        let mut command = RawDocumentBuf::try_from(
            &doc! { "update": "counters", "updates": updates.to_vec(), "ordered": false },
        )
        .map_err(|e| broken(e.to_string()))?;
        command.append(mongodb::bson::raw::cstr!("writeConcern"), super::layout::durable());
        // Not repeated if the outcome is unknown: it would be counted twice.
        let reply = inner.db.run_raw_command(command).await.map_err(failed)?;
        written(&reply)?;
    }
    Ok(())
}

/// A queue's totals.
pub(super) async fn totals(inner: &Inner, queue: &QueueName) -> Result<Totals> {
    let found = inner
        .db
        .collection::<Document>("counters")
        .find_one(doc! { "_id": totals_id(queue) })
        .await
        .map_err(failed)?;
    let Some(found) = found else { return Ok(Totals::default()) };
    let n = |name: &str| found.get(name).and_then(integer).unwrap_or_default() as u64;
    Ok(Totals {
        pushed: n("pushed"),
        delivered: n("delivered"),
        committed: n("committed"),
        rolled_back: n("rolledBack"),
        moved: n("moved"),
        dead_lettered: n("deadLettered"),
        expired: n("expired"),
    })
}
