//! What this broker knows of segments of which it holds items: by it the last settle deletes the document instead of changing
//! it. Losing an entry leaves a document in which nothing is left until the first of its leases ends; nothing else.

use parking_lot::Mutex;

use crate::{
    domain::{IdMap, ItemId, Timestamp},
    store::mongo::segment::seen::Seen,
};

/// Entries are dropped this many milliseconds after the end of their last lease.
const KEEP: i64 = 60_000;

#[derive(Debug)]
struct Entry {
    /// How many items there were at first.
    n: usize,
    /// How many items are left, unless others took some.
    left: usize,
    /// How many of them this broker holds.
    held: usize,
    /// How many of these are being committed.
    leaving: usize,
    /// No item is ready any more.
    claimed: bool,
    /// Until when its deduplication ids are remembered.
    window: Option<i64>,
    /// The last end of a lease.
    until: i64,
}

/// Which items of a segment are being committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Perhaps not all that are left.
    Some,
    /// All that there were ever: the document can be deleted.
    Whole,
    /// All that are left: the document can be deleted.
    All,
    /// The same, but their deduplication ids are remembered until then.
    AllRemembered(i64),
}

/// Segments by id.
#[derive(Default)]
pub(crate) struct KnownSegments(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    by_id: IdMap<ItemId, Entry>,
    /// The map is cleared of old entries when it reaches this size.
    clear_at: usize,
}

impl KnownSegments {
    /// Notes a claim of so many items; `left`: how many were left in all, `ready`: how many are still ready.
    pub(crate) fn claimed(
        &self,
        seen: &Seen,
        (left, count, ready): (usize, usize, usize),
        until: Timestamp,
        now: Timestamp,
    ) {
        let mut entries = self.0.lock();
        let entry = entries.by_id.entry(seen.id).or_insert(Entry {
            n: seen.n,
            left,
            held: 0,
            leaving: 0,
            claimed: false,
            window: seen.window,
            until: 0,
        });
        entry.held += count;
        entry.claimed |= ready == 0;
        entry.until = entry.until.max(until.0);
        if entries.by_id.len() > entries.clear_at {
            entries.by_id.retain(|_, entry| entry.until + KEEP > now.0);
            entries.clear_at = (entries.by_id.len() * 2).max(1_000);
        }
    }

    /// Notes that so many items are about to be committed. Returns what is to become of the document.
    pub(crate) fn leaving(&self, segment: ItemId, count: usize, now: Timestamp) -> Leaving {
        let mut entries = self.0.lock();
        let Some(entry) = entries.by_id.get_mut(&segment) else { return Leaving::Some };
        let last = entry.claimed && entry.leaving == 0 && entry.left == count;
        entry.leaving += count;
        match entry.window.filter(|window| *window > now.0) {
            _ if !last => Leaving::Some,
            Some(window) => Leaving::AllRemembered(window),
            None if entry.n == count => Leaving::Whole,
            None => Leaving::All,
        }
    }

    /// Notes that so many items have left, or that it is not known; true if nothing may be left and nobody deleted the document.
    pub(crate) fn left(&self, segment: ItemId, count: usize, deleted: bool) -> bool {
        let mut entries = self.0.lock();
        let Some(entry) = entries.by_id.get_mut(&segment) else { return false };
        entry.leaving = entry.leaving.saturating_sub(count);
        entry.gone(count);
        let over = entry.claimed && entry.held == 0;
        if over || deleted {
            entries.by_id.remove(&segment);
        }
        over && !deleted
    }

    /// Notes that an item was detached, which this broker may have held.
    pub(crate) fn detached(&self, segment: ItemId) {
        if let Some(entry) = self.0.lock().by_id.get_mut(&segment) {
            entry.gone(1);
        }
    }
}

impl Entry {
    fn gone(&mut self, count: usize) {
        self.left = self.left.saturating_sub(count);
        self.held = self.held.saturating_sub(count);
    }
}
