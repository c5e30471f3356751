//! Deduplication: which item is the first with a deduplication id, and whether its window is still open.

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

/// A queue's name and a deduplication id within the queue.
pub(crate) type DedupKey = (String, String);

/// Returns the key by which a push is deduplicated, if it has one.
pub(crate) fn key_of(push: &Push) -> Option<DedupKey> {
    let id = push.item.dedup_id.as_ref()?;
    Some((push.queue.name.as_str().to_owned(), id.as_str().to_owned()))
}

/// The first item with a deduplication id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct First {
    pub(crate) id: ItemId,
    /// The document that has the id: of the item, or of the segment in which it is or was.
    pub(crate) document: ItemId,
    /// Sequence number, if the item has one.
    pub(crate) sequence: Option<i64>,
    /// End of the deduplication window.
    pub(crate) window: Timestamp,
    pub(crate) tombstone: bool,
}

/// Parses the documents that a find with [`filter`] and [`projection`] returned. They may have other ids besides.
pub(crate) fn firsts(found: &[Document]) -> Result<HashMap<DedupKey, First>> {
    let mut firsts = HashMap::new();
    for document in found {
        let mut read = || {
            let id = ItemId(document.get_object_id("_id").ok()?.bytes());
            let first = First {
                id,
                document: id,
                sequence: document.get("seq").and_then(integer),
                window: Timestamp(document.get_datetime("window").ok()?.timestamp_millis()),
                tombstone: document.get_datetime("when").ok()?.timestamp_millis() == TOMBSTONE,
            };
            let key = |dedup: &Document| {
                Some((dedup.get_str("q").ok()?.to_owned(), dedup.get_str("id").ok()?.to_owned()))
            };
            match document.get("dedup")? {
                // Those of a segment, in the order of its items.
                Bson::Array(ids) => {
                    for (at, dedup) in ids.iter().enumerate() {
                        if let Some(dedup) = dedup.as_document() {
                            let first = First { id: id.at_offset(at + 1), ..first };
                            firsts.insert(key(dedup)?, first);
                        }
                    }
                }
                dedup => _ = firsts.insert(key(dedup.as_document()?)?, first),
            }
            Some(())
        };
        read().ok_or_else(|| broken("unreadable deduplication id"))?;
    }
    Ok(firsts)
}

/// Returns the filter for items with these deduplication ids.
pub(crate) fn filter(keys: &[DedupKey]) -> Document {
    let keys: Vec<Bson> =
        keys.iter().map(|(q, id)| doc! { "q": q.as_str(), "id": id.as_str() }.into()).collect();
    doc! { "dedup": { "$in": keys } }
}

/// Returns the projection to the fields that [`firsts`] parses.
pub(crate) fn projection() -> Document {
    doc! { "dedup": 1, "window": 1, "when": 1, "seq": 1 }
}

/// Returns the filter and the update that remove the deduplication id from an item whose window is unchanged. Items of
/// one segment have one window.
pub(crate) fn forgetting(first: &First) -> (Document, Document) {
    let id = mongodb::bson::oid::ObjectId::from_bytes(first.document.0);
    let filter = doc! { "_id": id, "window": date(first.window) };
    // A tombstone served only its window. From here on the TTL index may delete it.
    let mut update = doc! { "$unset": { "dedup": 1, "window": 1 } };
    if first.tombstone {
        update.insert("$set", doc! { "when": millis(TOMBSTONE) });
    }
    (filter, update)
}

/// Returns the first items with these ids whose windows are open. Ids whose windows have ended are removed from their
/// items and left out of the result, so that the push can be tried again.
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
        let mut over = HashMap::new();
        for (key, found) in firsts(&found)? {
            if found.window > now {
                first.insert(key, found);
            } else {
                over.insert(found.document, found);
            }
        }
        for found in over.values() {
            let (filter, update) = forgetting(found);
            in_time(&inner.db, group.items.update_one(filter, update)).await.map_err(failed)?;
        }
    }
    Ok(first)
}
