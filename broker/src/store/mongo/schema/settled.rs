//! What a settle writes into the document of its item: tokens, tombstones, history.

use std::time::Duration;

use mongodb::bson::{Document, RawDocumentBuf, doc, oid::ObjectId, rawdoc};

use crate::{
    domain::{ItemId, LeaseToken, Queue, Timestamp},
    store::mongo::{
        Inner,
        cursor::lease_cache::EXCLUSIVE,
        schema::{
            item::{literal, oids, token_oid},
            layout::{PROCESSED, TOMBSTONE, date, lease_end, millis},
        },
    },
};

/// Milliseconds that a witness tombstone outlives the time in which the broker that made the reservation may settle the
/// item by a plain delete. A witness tombstone is kept only to tell that broker that the item was settled elsewhere.
pub(crate) const WITNESS: i64 = 60_000;

/// Number of settles whose tokens an item keeps, besides the last one.
const SETTLES_REMEMBERED: i32 = 8;

/// Returns a new token that names one settle.
pub(crate) fn settle_token(inner: &Inner) -> ObjectId {
    token_oid(LeaseToken::fresh(inner.broker))
}

/// Returns a filter for the items of one lease that have not expired.
pub(crate) fn held_filter(
    ids: impl IntoIterator<Item = ItemId>,
    token: LeaseToken,
    now: Timestamp,
) -> RawDocumentBuf {
    rawdoc! {
        "_id": { "$in": oids(ids) },
        "lock": token_oid(token),
        "deadline": { "$not": { "$lte": date(now) } },
    }
}

/// Returns an expression: until when a witness tombstone is needed. The broker that made the reservation may take an
/// item for untouched for [`EXCLUSIVE`] at most, not for a lease of hours, so that witnesses need not stay for hours.
pub(crate) fn witness_end(now: Timestamp) -> Document {
    let exclusive = doc! { "$min": [lease_end(), millis(now.0 + EXCLUSIVE)] };
    doc! { "$add": [exclusive, WITNESS] }
}

/// Returns an expression: until when the holder of the item may settle it, or null if nobody holds it.
fn witnessed(now: Timestamp) -> Document {
    doc! { "$cond": [{ "$gt": ["$lock", null] }, witness_end(now), null] }
}

/// Returns an expression for the tokens of the settles before this one, for the update that sets `settled`. The answer
/// to an update that took effect may be lost; until the update is repeated, the item can have been reserved and settled
/// again.
pub(crate) fn settled_before() -> Document {
    doc! { "$cond": [
        { "$gt": ["$settled", null] },
        { "$slice": [
            { "$concatArrays": [["$settled"], { "$ifNull": ["$settledBefore", []] }] },
            SETTLES_REMEMBERED,
        ] },
        "$$REMOVE",
    ] }
}

/// Returns the update that turns an item into a tombstone, which stays for as long as a producer or a consumer may
/// repeat a call about the item.
pub(crate) fn bury(now: Timestamp, settled: ObjectId) -> Vec<Document> {
    vec![doc! { "$replaceWith": {
        "_id": "$_id", "q": "$q", "when": millis(TOMBSTONE), "settled": settled,
        "settledBefore": settled_before(),
        "key": "$key", "seq": "$seq", "dedup": "$dedup", "window": "$window", "created": "$created",
        "expires": { "$max": [
            millis(now.0 + WITNESS), witnessed(now), "$window", "$trace",
        ] },
    } }]
}

/// Like [`bury`], for an item that is deleted by an administrator: its deduplication id no longer counts.
pub(crate) fn bury_deleted(now: Timestamp, settled: ObjectId) -> Vec<Document> {
    let mut stages = bury(now, settled);
    stages.push(doc! { "$unset": ["dedup", "window"] });
    stages
}

/// Returns the update that turns an item into history.
pub(crate) fn shelve(now: Timestamp, settled: ObjectId, retention: Duration) -> Vec<Document> {
    let deadline = now + retention;
    vec![
        doc! { "$set": {
            "when": millis(PROCESSED), "processed": date(now), "settled": settled,
            "settledBefore": settled_before(),
            "deadline": date(deadline),
            "expires": { "$max": [date(deadline), witnessed(now), "$window", "$trace"] },
        } },
        doc! { "$unset": ["lock", "turn", "due", "trace"] },
    ]
}

/// What an item that is discarded carries into history.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Failure {
    pub(crate) failed_attempts: u32,
    pub(crate) reason: Option<String>,
}

/// Returns the update that ends an item as the settings of its queue say. History says why an item was discarded.
pub(crate) fn finish(
    now: Timestamp,
    settled: ObjectId,
    queue: &Queue,
    failure: Option<&Failure>,
) -> Vec<Document> {
    if queue.retention.is_zero() {
        return bury(now, settled);
    }
    let mut stages = shelve(now, settled, queue.retention);
    if let Some(Failure { failed_attempts, reason }) = failure {
        let mut why = doc! {
            "deadLettered": date(now), "failedAttempts": i64::from(*failed_attempts),
        };
        if let Some(reason) = reason {
            why.insert("reason", literal(reason.as_str()));
        }
        stages.push(doc! { "$set": why });
    }
    stages
}
