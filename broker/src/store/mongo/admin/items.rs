//! Reads and deletes items.

use mongodb::bson::{Document, doc};

use crate::{
    domain::{Item, ItemId, ItemState, Queue},
    store::{
        ItemDeleted, Result,
        mongo::{
            Inner,
            admin::listing::within,
            ordering,
            schema::{
                item::{Stored, oid},
                layout::{TOMBSTONE, millis},
                settled::{bury_deleted, settle_token},
            },
            segment::{detach::detach_items, lookup},
            server::{
                error::failed,
                time_limit::{in_time, read_in_time},
            },
        },
    },
};

/// Returns an item of the queue.
pub(crate) async fn get(inner: &Inner, queue: &Queue, id: ItemId) -> Result<Option<Item>> {
    let group = inner.group(&queue.group).await?;
    // First, so that an item which is detached between the two reads is found by the second.
    let shared = lookup::item(inner, &group, id).await?;
    let stored = if let Some(stored) = shared.filter(|item| *item.queue == *queue.name.as_str()) {
        stored
    } else {
        let filter = own_document(queue, id);
        let found = read_in_time(&inner.db, || group.items.find_one(filter.clone())).await?;
        let Some(found) = found else { return Ok(None) };
        Stored::read(&found)?
    };
    let now = inner.now();
    if stored.is_over(now) {
        return Ok(None);
    }
    stored.into_item(&queue.name, now).map(Some)
}

/// Matches an item of the queue that has a document of its own.
fn own_document(queue: &Queue, id: ItemId) -> Document {
    doc! {
        "_id": oid(id), "q": queue.name.as_str(), "when": { "$lt": millis(TOMBSTONE) },
        "left": { "$exists": false },
    }
}

/// Deletes an item of the queue, if it is in the state `only_if`.
pub(crate) async fn delete(
    inner: &Inner,
    queue: &Queue,
    id: ItemId,
    only_if: Option<ItemState>,
) -> Result<ItemDeleted> {
    let group = inner.group(&queue.group).await?;
    detach_items(inner, &group, &[id]).await?;
    let mut filter = own_document(queue, id);
    if let Some(state) = only_if {
        filter.insert("$or", within(state, inner.now()));
    }
    // A tombstone stays for consumers that hold a receipt and producers that repeat the push.
    let update = group
        .items
        .find_one_and_update(filter, bury_deleted(inner.now(), settle_token(inner)))
        .projection(doc! { "key": 1, "deadline": 1 });
    let Some(found) = in_time(&inner.db, update).await.map_err(failed)? else {
        let other = if only_if.is_some() { get(inner, queue, id).await? } else { None };
        return Ok(other.map_or(ItemDeleted::NotFound, |item| ItemDeleted::OtherState(item.state)));
    };
    let stored = Stored::read(&found)?;
    inner.lease_cache.forget(id);
    if let Some(key) = &stored.key {
        ordering::unblock(inner, &group, &[(queue.name.clone(), key.clone())]).await?;
    }
    Ok(if stored.is_over(inner.now()) { ItemDeleted::NotFound } else { ItemDeleted::Done })
}
