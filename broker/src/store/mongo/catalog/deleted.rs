//! What is remembered of deleted queues, so that items that land in them afterwards are found.

use mongodb::bson::Document;

use crate::domain::QueueName;

/// Queues that were deleted, for a while.
pub(crate) const DELETED: &str = "deletedQueues";

/// The name of the queue that a document of [`DELETED`] is about.
pub(crate) fn name_of(document: &Document) -> Option<QueueName> {
    QueueName::parse("_id", document.get_str("_id").ok()?).ok()
}
