//! The collection of deleted queues, by which items that land in them afterwards are found.

use mongodb::bson::{Bson, Document, doc};

use crate::{
    domain::{GroupName, QueueName},
    store::mongo::schema::layout::millis,
};

/// The collection of queues that were deleted lately.
pub(crate) const DELETED: &str = "deletedQueues";
/// Seconds for which the deletion of a queue is remembered.
pub(crate) const REMEMBERED: i32 = 3_600;
/// Field with the groups in which a queue of this name was deleted before.
pub(crate) const FORMER_GROUPS: &str = "formerGroups";

/// Returns the name of the queue that a document of [`DELETED`] is about.
pub(crate) fn name_of(document: &Document) -> Option<QueueName> {
    QueueName::parse("_id", document.get_str("_id").ok()?).ok()
}

/// Returns the group of a queue by its document.
pub(crate) fn group_of(document: &Document) -> Option<GroupName> {
    GroupName::parse("group", document.get_str("group").ok()?).ok()
}

/// Returns the groups in which queues of one name were deleted, each with the time of its last deletion in
/// milliseconds.
pub(crate) fn deletions(document: &Document) -> Vec<(GroupName, i64)> {
    let former = document.get_array(FORMER_GROUPS).into_iter().flatten();
    let former = former.filter_map(Bson::as_document);
    std::iter::once(document)
        .chain(former)
        .filter_map(|of| Some((group_of(of)?, of.get_datetime("at").ok()?.timestamp_millis())))
        .collect()
}

/// Returns the value of [`FORMER_GROUPS`] for a queue that is deleted in `group` at `now`. `before` is the document of
/// the deletion before.
pub(crate) fn former_groups(before: &Document, group: &GroupName, now: i64) -> Vec<Document> {
    let remembered = now - i64::from(REMEMBERED) * 1_000;
    deletions(before)
        .into_iter()
        .filter(|(of, at)| of != group && *at > remembered)
        .map(|(of, at)| doc! { "group": of.as_str(), "at": millis(at) })
        .collect()
}
