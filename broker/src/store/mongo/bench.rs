//! Items as documents: for the benchmarks alone.

use mongodb::bson::{RawDocument, RawDocumentBuf};

use super::document::{self, Start, Stored};
use crate::{
    domain::{Item, ItemId, QueueName, Timestamp},
    store::{Push, Result},
};

/// The document of a new item.
pub fn encode(push: &Push, id: ItemId, now: Timestamp) -> Result<RawDocumentBuf> {
    document::encode(push, &Start { id, now, sequence: 0, blocked: false })
}

/// The item of a document.
pub fn decode(document: &RawDocument, queue: &QueueName, now: Timestamp) -> Result<Item> {
    Stored::read(document)?.into_item(queue, now)
}
