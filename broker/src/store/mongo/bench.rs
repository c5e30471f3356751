//! Converts items to documents and back, for the benchmarks alone.

use mongodb::bson::{RawDocument, RawDocumentBuf};

use crate::{
    domain::{Item, ItemId, QueueName, Timestamp},
    store::{
        Push, Result,
        mongo::schema::item::{self, Start, Stored},
    },
};

/// Returns the document of a new item.
pub fn encode(push: &Push, id: ItemId, now: Timestamp) -> Result<RawDocumentBuf> {
    item::encode(push, &Start { id, now, sequence: None, blocked: false })
}

/// Returns the item of a document.
pub fn decode(document: &RawDocument, queue: &QueueName, now: Timestamp) -> Result<Item> {
    Stored::read(document)?.into_item(queue, now)
}
