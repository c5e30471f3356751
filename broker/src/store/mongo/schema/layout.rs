//! Collections, the names of indexes, and the dates that stand for states.

use std::sync::Arc;

use mongodb::{
    Collection,
    bson::{DateTime, Document, RawDocumentBuf, doc, rawdoc},
};
use tokio::sync::OnceCell;

use crate::{
    domain::{FOREVER, GroupName, Outcome, Pushed, Timestamp},
    store::{
        Push, Reservation,
        mongo::server::{
            group_commit::{Batcher, Limits},
            places::Db,
        },
    },
};

const HOUR: i64 = 3_600_000;
/// 9999-12-31T00:00:00Z. Some languages support no later dates.
const LAST_DAY: i64 = 253_402_214_400_000;
/// `when` of the sentinel behind all eligible times of a priority (see `priorities`).
pub(crate) const READY_END: i64 = FOREVER.0 + HOUR;
/// Milliseconds from the end of a lease to the `when` of its item: four thousand years of the calendar, so that a
/// person can still read the date. Reserved items stand behind all waiting items: an item that is settled before its
/// lease ends leaves its dead index entry where no reserve comes by.
pub(crate) const LEASED: i64 = 10 * 146_097 * 24 * HOUR;
/// `when` of an item that waits for an earlier item of its key. Later than every end of a lease.
pub(crate) const BLOCKED: i64 = LAST_DAY + 21 * HOUR;
/// `when` of a segment of which no item is ready any more.
pub(crate) const CLAIMED: i64 = BLOCKED + HOUR / 2;
/// `when` of processed items that are kept as history.
pub(crate) const PROCESSED: i64 = LAST_DAY + 22 * HOUR;
/// `when` of a tombstone, which is kept only to recognise a repeated push or settle.
pub(crate) const TOMBSTONE: i64 = LAST_DAY + 23 * HOUR;

/// Name of the hand-out index.
pub(crate) const HANDOUT: &str = "handout";
/// Name of the index of history.
pub(crate) const HISTORY: &str = "history";
/// Name of the unique index of deduplication ids.
pub(crate) const DEDUP: &str = "dedup";
/// Name of the unique index that allows one unblocked item per key.
pub(crate) const TURN: &str = "turn";
/// Name of the index of blocked items, by key and sequence.
pub(crate) const WAITING: &str = "waiting";
/// Name of the index of items that expire.
pub(crate) const ENDS: &str = "ends";
/// Name of the index of segments.
pub(crate) const SEGMENTS: &str = "segments";
/// Name of the index of ids.
pub(crate) const BY_ID: &str = "_id_";

/// Returns a time as a BSON date.
pub(crate) fn date(at: Timestamp) -> DateTime {
    DateTime::from_millis(at.0)
}

/// Returns a BSON date from milliseconds since 1970.
pub(crate) fn millis(at: i64) -> DateTime {
    DateTime::from_millis(at)
}

/// Returns a condition on `when` that matches items in every state, but neither tombstones nor sentinels.
pub(crate) fn live() -> Document {
    doc! { "$lt": millis(TOMBSTONE), "$ne": millis(READY_END) }
}

/// Returns the `when` of an item that is reserved until `until`.
pub(crate) fn leased(until: Timestamp) -> DateTime {
    DateTime::from_millis(LEASED + until.0.min(FOREVER.0))
}

/// Returns an expression for the end of an item's lease, which is `when` itself if the lease has lapsed.
pub(crate) fn lease_end() -> Document {
    doc! { "$cond": [
        { "$gte": ["$when", millis(LEASED)] }, { "$subtract": ["$when", LEASED] }, "$when",
    ] }
}

const _: () = assert!(READY_END < LEASED && LEASED + FOREVER.0 < BLOCKED);

/// Returns the write concern of every write: journalled on a majority.
pub(crate) fn durable() -> RawDocumentBuf {
    rawdoc! { "w": "majority", "j": true, "wtimeout": 15_000 }
}

/// A group: its collection, and the batchers of its writes.
pub(crate) struct Group {
    pub(crate) db: Db,
    pub(crate) items: Collection<RawDocumentBuf>,
    /// Set when the indexes and the view have been created by this process.
    pub(super) indexes: OnceCell<()>,
    /// Unordered pushes. Writes with items of the same queue follow each other; others run concurrently.
    pub(crate) plain: Arc<Batcher<Push, Pushed>>,
    /// Ordered pushes, with a key or a sequence number: one write at a time, in the order of arrival.
    pub(crate) ordered: Arc<Batcher<Push, Pushed>>,
    /// Commits.
    pub(crate) commits: Arc<Batcher<Reservation, Outcome>>,
}

impl Group {
    pub(crate) fn new(db: &Db, name: &GroupName) -> Self {
        let bytes = 30 * 1024 * 1024;
        Self {
            db: db.clone(),
            items: db.collection(&format!("items.{name}")),
            indexes: OnceCell::new(),
            plain: Batcher::new(Limits { writes: 2, worthwhile: 1, items: 2_000, bytes }),
            ordered: Batcher::new(Limits { writes: 1, worthwhile: 1, items: 1_000, bytes }),
            commits: Batcher::new(Limits { writes: 2, worthwhile: 48, items: 5_000, bytes }),
        }
    }
}
