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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{domain::IdSource, store::mongo::segment::seen::Front};

    const NOW: Timestamp = Timestamp(1_000_000);
    const UNTIL: Timestamp = Timestamp(1_030_000);

    /// A segment of so many items, whose deduplication ids are remembered until `window`.
    fn seen(n: usize, window: Option<i64>) -> Seen {
        let front = Front { head: 0, ready: n, runs: 0 };
        Seen::new(IdSource::new().next_block(NOW), (n, n), window, front)
    }

    #[test]
    fn the_last_items_of_a_segment_take_the_document_along() {
        let known = KnownSegments::default();
        let (some, whole) = (seen(10, None), seen(10, None));
        assert_eq!(known.leaving(some.id, 10, NOW), Leaving::Some, "others claimed it");
        known.claimed(&some, (10, 4, 6), UNTIL, NOW);
        assert_eq!(known.leaving(some.id, 4, NOW), Leaving::Some);
        assert!(!known.left(some.id, 4, false), "more may be ready");
        known.claimed(&some, (10, 6, 0), UNTIL, NOW);
        assert_eq!(known.leaving(some.id, 1, NOW), Leaving::Some);
        assert!(!known.left(some.id, 1, false));
        assert_eq!(known.leaving(some.id, 5, NOW), Leaving::All);
        assert!(!known.left(some.id, 5, true), "it is deleted");
        assert_eq!(
            known.leaving(some.id, 5, NOW),
            Leaving::Some,
            "nothing is known of it any more"
        );

        known.claimed(&whole, (10, 10, 0), UNTIL, NOW);
        assert_eq!(known.leaving(whole.id, 10, NOW), Leaving::Whole);
        assert!(known.left(whole.id, 10, false), "nobody knows whether it is deleted");
        assert_eq!(known.leaving(whole.id, 10, NOW), Leaving::Some);
    }

    #[test]
    fn a_segment_of_which_items_are_ready_stays() {
        let (known, seen) = (KnownSegments::default(), seen(10, None));
        known.claimed(&seen, (4, 4, 6), UNTIL, NOW);
        assert_eq!(known.leaving(seen.id, 4, NOW), Leaving::Some);
    }

    #[test]
    fn ids_that_are_remembered_stay_until_their_window_ends() {
        for (window, expected) in
            [(NOW.0 + 1, Leaving::AllRemembered(NOW.0 + 1)), (NOW.0, Leaving::Whole)]
        {
            let (known, seen) = (KnownSegments::default(), seen(2, Some(window)));
            known.claimed(&seen, (2, 2, 0), UNTIL, NOW);
            assert_eq!(known.leaving(seen.id, 2, NOW), expected);
        }
    }

    /// Of two calls that commit the items at the same time neither knows what the other one does. Whichever is answered
    /// last learns that nothing is left.
    #[test]
    fn of_two_commits_at_the_same_time_the_last_finds_the_segment_empty() {
        let (known, seen) = (KnownSegments::default(), seen(10, None));
        known.claimed(&seen, (10, 10, 0), UNTIL, NOW);
        assert_eq!(known.leaving(seen.id, 4, NOW), Leaving::Some);
        assert_eq!(known.leaving(seen.id, 6, NOW), Leaving::Some);
        assert_eq!(known.leaving(seen.id, 10, NOW), Leaving::Some, "others are leaving");
        assert!(!known.left(seen.id, 4, false));
        assert!(known.left(seen.id, 6, false));
        assert!(!known.left(seen.id, 6, false), "it is found once");
    }

    #[test]
    fn an_item_that_was_detached_is_not_waited_for() {
        let (known, seen) = (KnownSegments::default(), seen(3, None));
        known.claimed(&seen, (3, 3, 0), UNTIL, NOW);
        known.detached(seen.id);
        assert_eq!(known.leaving(seen.id, 2, NOW), Leaving::All);
        assert!(known.left(seen.id, 2, false));
    }

    /// What other brokers commit is not reported here.
    #[test]
    fn segments_whose_leases_ended_long_ago_are_forgotten() {
        let (known, held) = (KnownSegments::default(), seen(2, None));
        known.claimed(&held, (2, 1, 1), NOW + Duration::from_hours(1), NOW);
        known.claimed(&held, (2, 1, 0), UNTIL, NOW);
        let late = UNTIL + Duration::from_millis(KEEP as u64);
        for (count, until, now) in [(1_000, UNTIL, NOW), (3_000, late, late)] {
            for _ in 0..count {
                known.claimed(&seen(2, None), (2, 2, 0), until, now);
            }
        }
        assert_eq!(known.0.lock().by_id.len(), 3_001);
        assert_eq!(known.leaving(held.id, 2, late), Leaving::Whole, "one of its leases lasts");
    }
}
