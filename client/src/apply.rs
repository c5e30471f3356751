//! Applying work to MongoDB documents in any order, safely (feature `mongodb`).
//!
//! Several consumers of one queue work side by side, so "insert Ann" and a later "remove Ann" can reach the
//! database in either order, or twice. [`SetField`] keeps, for each member of a set in a document, the sequence number
//! of the last operation that was applied, and ignores older ones. A removed member leaves a tombstone with its
//! number. So any number of consumers, in any order, produce the same document.
//!
//! Sequence numbers come from a queue created with `sequenced` ([`Delivery::sequence`](crate::Delivery::sequence)).
//!
//! A document looks like this:
//! ```json
//! { "_id": "algebra",
//!   "students": [ { "member": "ann", "seq": 7 }, { "member": "bob", "seq": 2 } ],
//!   "students_removed": [ { "member": "cid", "seq": 5 } ] }
//! ```
//! Both lists are sorted by member. `{ "students.member": "ann" }` finds Ann's classes.

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
    error::Result,
};

/// What happens to a member of the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It becomes a member.
    Insert,
    /// It is no longer a member.
    Remove,
}

/// What an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The document has changed.
    Changed,
    /// This operation, or a later one on the same member, was applied before. Nothing has changed.
    Stale,
}

/// A set kept in a field of the documents of one collection.
#[derive(Debug, Clone)]
pub struct SetField {
    collection: Collection<Document>,
    present: String,
    removed: String,
}

impl SetField {
    /// The set in `field`; its tombstones are in `FIELD_removed`. `field` must not contain `.` or `$`.
    pub fn new(collection: Collection<Document>, field: &str) -> Self {
        Self { collection, present: field.to_owned(), removed: format!("{field}_removed") }
    }

    /// Applies one operation to the document with this `_id`, unless a later one on the same member was
    /// applied before: one conditional upsert, atomic, and safe to repeat. A document that does not exist is created.
    ///
    /// `sequence` orders the operations on a member; those on different members may share numbers.
    ///
    /// # Errors
    /// Those of the driver. It is then unknown whether the operation was applied; repeat it.
    pub async fn apply(
        &self,
        id: impl Into<Bson>,
        change: Change,
        member: impl Into<Bson>,
        sequence: i64,
    ) -> Result<Applied> {
        let pipeline = self.pipeline(change, &member.into(), sequence);
        let filter = doc! { "_id": id.into() };
        let result = self.collection.update_one(filter, pipeline).upsert(true).await?;
        // An update that leaves the document as it was counts as matched, not as modified.
        let changed = result.modified_count > 0 || result.upserted_id.is_some();
        Ok(if changed { Applied::Changed } else { Applied::Stale })
    }

    /// Drops the tombstones with numbers below `sequence`, in all documents. Do so only when no operation
    /// with a lower number can still be on its way. Returns how many documents have changed.
    ///
    /// # Errors
    /// Those of the driver.
    pub async fn forget_removed(&self, sequence: i64) -> Result<u64> {
        let older = doc! { "seq": { "$lt": sequence } };
        let filter = doc! { &self.removed: { "$elemMatch": &older } };
        let update = doc! { "$pull": { &self.removed: older } };
        Ok(self.collection.update_many(filter, update).await?.modified_count)
    }

    /// The update: `seen` is the highest number either list has for the member; if `sequence` is higher, the member's
    /// entry is taken out of both lists and put, in order, into the one it now belongs to.
    fn pipeline(&self, change: Change, member: &Bson, sequence: i64) -> Vec<Document> {
        let (present, removed) = (format!("${}", self.present), format!("${}", self.removed));
        let member = doc! { "$literal": member };
        let entry = doc! { "member": &member, "seq": { "$literal": sequence } };
        let of_member = |list: &str| {
            doc! { "$filter": {
                "input": { "$ifNull": [list, []] },
                "cond": { "$eq": ["$$this.member", &member] },
            } }
        };
        let others = |list: &str, comparison: &str| {
            doc! { "$filter": {
                "input": { "$ifNull": [list, []] },
                "cond": { comparison: ["$$this.member", &member] },
            } }
        };
        let with = |list: &str| {
            doc! { "$concatArrays": [others(list, "$lt"), [&entry], others(list, "$gt")] }
        };
        let without = |list: &str| others(list, "$ne");
        let (new_present, new_removed) = match change {
            Change::Insert => (with(&present), without(&removed)),
            Change::Remove => (without(&present), with(&removed)),
        };
        let unseen = doc! { "$allElementsTrue": [{ "$map": {
            "input": { "$concatArrays": [of_member(&present), of_member(&removed)] },
            "in": { "$lt": ["$$this.seq", { "$literal": sequence }] },
        } }] };
        // Both conditions read the document as it was before the stage.
        let keep_or = |new: Document, old: &str| {
            doc! { "$cond": [&unseen, new, { "$ifNull": [old, []] }] }
        };
        vec![doc! { "$set": {
            &self.present: keep_or(new_present, &present),
            &self.removed: keep_or(new_removed, &removed),
        } }]
    }
}
