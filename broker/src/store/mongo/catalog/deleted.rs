//! The collection of deleted queues, by which items that land in them afterwards are found.

use mongodb::bson::Document;

use crate::domain::QueueName;

/// The collection of queues that were deleted lately.
pub(crate) const DELETED: &str = "deletedQueues";

/// Returns the name of the queue that a document of [`DELETED`] is about.
pub(crate) fn name_of(document: &Document) -> Option<QueueName> {
    QueueName::parse("_id", document.get_str("_id").ok()?).ok()
}
