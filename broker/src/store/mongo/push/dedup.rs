//! Repeated pushes: who was first with a deduplication id, and whether that still counts.

use std::collections::HashMap;

use mongodb::bson::{Bson, Document, doc};

use crate::{
    domain::{ItemId, Timestamp},
    store::{
        Push, Result,
        mongo::{
            Inner,
            schema::layout::{DEDUP, Group, TOMBSTONE, date, millis},
            server::{
                connect::read_documents,
                error::{broken, failed, integer},
                time_limit::in_time,
            },
        },
    },
};

/// A queue's name and a deduplication id in it.
pub(crate) type DedupKey = (String, String);

/// What names this push, if anything does.
pub(crate) fn key_of(push: &Push) -> Option<DedupKey> {
    let id = &push.item.dedup_id;
    (!id.is_empty()).then(|| (push.queue.name.as_str().to_owned(), id.clone()))
}

/// The item that was first with its id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct First {
    pub(crate) id: ItemId,
    /// Its sequence number, 0 if it has none.
    pub(crate) sequence: i64,
    /// Until when that counts.
    pub(crate) window: Timestamp,
    pub(crate) tombstone: bool,
}

/// Reads what a search by [`filter`] found.
pub(crate) fn firsts(found: &[Document]) -> Result<HashMap<DedupKey, First>> {
    let mut firsts = HashMap::new();
    for document in found {
        let read = || {
            let dedup = document.get_document("dedup").ok()?;
            let key = (dedup.get_str("q").ok()?.to_owned(), dedup.get_str("id").ok()?.to_owned());
            let first = First {
                id: ItemId(document.get_object_id("_id").ok()?.bytes()),
                sequence: document.get("seq").and_then(integer).unwrap_or_default(),
                window: Timestamp(document.get_datetime("window").ok()?.timestamp_millis()),
                tombstone: document.get_datetime("when").ok()?.timestamp_millis() == TOMBSTONE,
            };
            Some((key, first))
        };
        let (key, first) = read().ok_or_else(|| broken("unreadable deduplication id"))?;
        firsts.insert(key, first);
    }
    Ok(firsts)
}

/// Finds the items that carry these ids.
pub(crate) fn filter(keys: &[DedupKey]) -> Document {
    let keys: Vec<Bson> =
        keys.iter().map(|(q, id)| doc! { "q": q.as_str(), "id": id.as_str() }.into()).collect();
    doc! { "dedup": { "$in": keys } }
}

/// What of them to read.
pub(crate) fn projection() -> Document {
    doc! { "dedup": 1, "window": 1, "when": 1, "seq": 1 }
}

/// The update that makes an item forget its id, if that has not changed.
pub(crate) fn forgetting(first: &First) -> (Document, Document) {
    let id = mongodb::bson::oid::ObjectId::from_bytes(first.id.0);
    let filter = doc! { "_id": id, "window": date(first.window) };
    // A tombstone is left to the TTL index, which has nothing else to wait for.
    let mut update = doc! { "$unset": { "dedup": 1, "window": 1 } };
    if first.tombstone {
        update.insert("$set", doc! { "when": millis(TOMBSTONE) });
    }
    (filter, update)
}

/// Who was first with these ids. Those whose window has ended are made to forget theirs, and are
/// left out: the push may be tried again.
pub(crate) async fn resolve(
    inner: &Inner,
    group: &Group,
    keys: &[DedupKey],
    now: Timestamp,
) -> Result<HashMap<DedupKey, First>> {
    let mut first = HashMap::new();
    for keys in keys.chunks(1_000) {
        let command = doc! {
            "find": group.items.name(), "filter": filter(keys), "projection": projection(),
            "hint": DEDUP, "batchSize": 1_001,
        };
        let found = read_documents(&inner.db, command).await?;
        for (key, found) in firsts(&found)? {
            if found.window > now {
                first.insert(key, found);
            } else {
                let (filter, update) = forgetting(&found);
                in_time(group.items.update_one(filter, update)).await.map_err(failed)?;
            }
        }
    }
    Ok(first)
}
