//! What a settle writes into the document of its item: tokens, tombstones, history.

use std::time::Duration;

use mongodb::bson::{Document, RawDocumentBuf, doc, oid::ObjectId, rawdoc};

use crate::{
    domain::{ItemId, LeaseToken, Queue, Timestamp},
    store::mongo::{
        Inner,
        cursor::lease_cache::EXCLUSIVE,
        schema::{
            item::{oids, token_oid},
            layout::{PROCESSED, TOMBSTONE, date, lease_end, millis},
        },
    },
};

/// A tombstone that only bears witness stays this long past the time for which the broker that made the
/// reservation may settle it the cheapest way, in milliseconds.
pub(crate) const WITNESS: i64 = 60_000;

/// Settles of an item whose tokens are remembered, beside the last one.
const SETTLES_REMEMBERED: i32 = 8;

/// A token that names one settle.
pub(crate) fn settle_token(inner: &Inner) -> ObjectId {
    token_oid(LeaseToken::fresh(inner.broker))
}

/// Matches items of one lease whose end has not come.
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

/// Until when the broker that made the reservation may take it for one that nobody else touched: not for
/// a whole lease of hours, so that what bears witness against it need not stay for hours.
pub(crate) fn witness_end(now: Timestamp) -> Document {
    let exclusive = doc! { "$min": [lease_end(), millis(now.0 + EXCLUSIVE)] };
    doc! { "$add": [exclusive, WITNESS] }
}

/// Until when whoever was promised the item may ask; null if nobody was.
fn witnessed(now: Timestamp) -> Document {
    doc! { "$cond": [{ "$gt": ["$lock", null] }, witness_end(now), null] }
}

/// The tokens of the settles before this one, as an expression of the update that sets `settled`. The answer to an
/// update that took effect may be lost; until it is repeated the item can have been reserved and settled again.
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

/// Update that turns an item into a tombstone, for as long as anybody may ask.
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

/// The same for an item that is deleted on purpose: its deduplication id counts no more.
pub(crate) fn bury_deleted(now: Timestamp, settled: ObjectId) -> Vec<Document> {
    let mut stages = bury(now, settled);
    stages.push(doc! { "$unset": ["dedup", "window"] });
    stages
}

/// Update that turns an item into history.
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

/// Update that ends an item as its queue's settings say.
pub(crate) fn finish(now: Timestamp, settled: ObjectId, queue: &Queue) -> Vec<Document> {
    if queue.retention.is_zero() {
        bury(now, settled)
    } else {
        shelve(now, settled, queue.retention)
    }
}
