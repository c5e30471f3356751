//! Prefetched items. Many small reserves in a row would each pay for a find. Instead, one find reads more items than
//! wanted, and the next reserves claim from the rest.
//!
//! Prefetched items are those that a find would return: items of the highest priority in use, none of which was handed
//! out before. Only a push, a rollback or a signal can report items that get ahead of them, and each of these calls
//! [`Prefetch::rewind`]. Whether another broker took an item meanwhile shows when the item is claimed.
//!
//! While the items of a large reserve are claimed, those of the next are read, behind the last that is known.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    domain::{ItemId, PrioritySet},
    store::mongo::schema::item::Stored,
};

/// Limit of prefetched items.
const MAX_ITEMS: usize = 1_000;
/// Limit of prefetched bytes of payload.
const MAX_BYTES: usize = 1 << 20;
/// Age at which prefetched items are dropped.
const GOOD_FOR: Duration = Duration::from_millis(100);

/// Items of one queue that were found and not yet handed out, in order.
#[derive(Default)]
pub(crate) struct Prefetch {
    items: VecDeque<Box<Stored>>,
    bytes: usize,
    /// Time of the find.
    found: Option<Instant>,
    /// Number of items that the last find prefetched.
    extra: usize,
    /// Bytes of the largest payload that the last find returned.
    largest: usize,
    /// True if the last find left items of the highest priority behind.
    more: bool,
    /// Changes whenever items are dropped.
    generation: u64,
}

/// Where a find goes on behind the items that were read: the priority, the time and the document of the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) priority: i32,
    pub(crate) when: i64,
    pub(crate) document: ItemId,
    generation: u64,
}

impl Prefetch {
    /// Returns the number of items that the next find should read: more than `wanted` if prefetching pays.
    pub(crate) fn limit(&mut self, wanted: usize) -> usize {
        let age = self.found.map_or(Duration::MAX, |found| found.elapsed());
        let most = MAX_ITEMS.min(MAX_BYTES / self.largest.max(1));
        self.extra = match age {
            _ if !self.more || wanted > most || age >= GOOD_FOR => 0,
            // The items were used up long before they were stale.
            _ if age < GOOD_FOR / 4 => (self.extra * 2).clamp(wanted, most),
            _ => self.extra,
        };
        wanted + self.extra
    }

    /// Notes the result of a find. `more` is true if it left items of the highest priority behind.
    pub(crate) fn found(&mut self, items: &[Box<Stored>], more: bool) {
        self.forget();
        self.found = Some(Instant::now());
        self.largest = items.iter().map(|item| item.payload.len()).max().unwrap_or_default();
        self.more = more;
    }

    /// Takes the first `wanted` items, or none if a find is needed.
    pub(crate) fn take(&mut self, wanted: usize) -> Vec<Box<Stored>> {
        if self.items.len() < wanted || self.found.is_none_or(|at| at.elapsed() >= GOOD_FOR) {
            self.forget();
            return Vec::new();
        }
        let taken: Vec<Box<Stored>> = self.items.drain(..wanted).collect();
        self.bytes -= taken.iter().map(|item| item.payload.len()).sum::<usize>();
        taken
    }

    /// Returns where to read on, if fewer than `wanted` items are left besides `rest`, those of this round that are not
    /// handed out, and there are more. `last` is the last item of this round.
    pub(crate) fn end(&self, wanted: usize, rest: usize, last: &Stored) -> Option<End> {
        let bytes = wanted.saturating_mul(self.largest);
        if !self.more || self.items.len() + rest >= wanted || bytes > MAX_BYTES {
            return None;
        }
        let last = self.items.back().map_or(last, |last| &**last);
        let (priority, when, document) = (last.priority, last.when, last.document());
        Some(End { priority, when, document, generation: self.generation })
    }

    /// Adds items that were read behind `end`, unless others were dropped since. `more` as in [`Prefetch::found`].
    pub(crate) fn append(&mut self, end: End, items: Vec<Box<Stored>>, more: bool) {
        if self.generation != end.generation {
            return;
        }
        self.found = Some(Instant::now());
        self.more = more;
        self.largest = items.iter().map(|item| item.payload.len()).fold(self.largest, usize::max);
        self.bytes += items.iter().map(|item| item.payload.len()).sum::<usize>();
        self.items.extend(items);
    }

    /// Returns items that were not handed out to the front. Only items of the highest priority in `used` that nobody
    /// held are kept, up to the first other item, because none of them may overtake that one.
    pub(crate) fn restore(&mut self, items: Vec<Box<Stored>>, used: PrioritySet) {
        let fits = |item: &Stored| item.lock.is_none() && used.highest() == Some(item.priority);
        if !items.iter().all(|item| fits(item)) {
            self.forget();
        }
        let kept: Vec<Box<Stored>> = items.into_iter().take_while(|item| fits(item)).collect();
        self.bytes += kept.iter().map(|item| item.payload.len()).sum::<usize>();
        for item in kept.into_iter().rev() {
            self.items.push_front(item);
        }
        while self.bytes > MAX_BYTES {
            self.drop_last();
        }
    }

    /// Drops the items behind a new one that became eligible at `since` in one of the priorities.
    pub(crate) fn rewind(&mut self, set: PrioritySet, since: i64) {
        while let Some(last) = self.items.back() {
            match set.highest() {
                Some(highest) if highest > last.priority => {}
                Some(highest) if highest == last.priority && last.when > since => {}
                _ => break,
            }
            self.drop_last();
            self.more = false;
        }
    }

    /// Drops everything: others take from the queue too, or what was known of it no longer holds.
    pub(crate) fn clear(&mut self) {
        *self = Self { generation: self.generation + 1, ..Self::default() };
    }

    fn drop_last(&mut self) {
        self.generation += 1;
        if let Some(last) = self.items.pop_back() {
            self.bytes -= last.payload.len();
        }
    }

    fn forget(&mut self) {
        self.generation += 1;
        self.items.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::domain::{LeaseToken, PrioritySet};

    fn item(priority: i32, when: i64) -> Box<Stored> {
        let mut item = Box::<Stored>::default();
        (item.priority, item.when) = (priority, when);
        item.payload = Bytes::from_static(b"work");
        item
    }

    fn items(priority: i32, whens: std::ops::Range<i64>) -> Vec<Box<Stored>> {
        whens.map(|when| item(priority, when)).collect()
    }

    /// Returns a prefetch that holds items of priority 3 at these times.
    fn prefetch(whens: std::ops::Range<i64>) -> Prefetch {
        let mut prefetch = Prefetch::default();
        let items = items(3, whens);
        prefetch.found(&items, true);
        prefetch.restore(items, PrioritySet::of(3) | PrioritySet::of(0));
        prefetch
    }

    fn whens(prefetch: &Prefetch) -> Vec<i64> {
        prefetch.items.iter().map(|item| item.when).collect()
    }

    #[test]
    fn finds_grow_while_prefetching_pays() {
        let mut prefetch = Prefetch::default();
        assert_eq!(prefetch.limit(10), 10, "nothing is known");
        prefetch.found(&items(3, 0..10), true);
        assert_eq!(prefetch.limit(10), 20);
        prefetch.found(&items(3, 0..20), true);
        assert_eq!(prefetch.limit(10), 30);
        prefetch.found(&items(3, 0..30), false);
        assert_eq!(prefetch.limit(10), 10, "the last find read everything");
        prefetch.found(&items(3, 0..10), true);
        assert_eq!(prefetch.limit(1_500), 1_500, "a large find pays for itself");
        let mut large = item(3, 0);
        large.payload = vec![0; MAX_BYTES / 4].into();
        prefetch.found(&[large], true);
        assert_eq!((prefetch.limit(3), prefetch.limit(5)), (6, 5), "the limit of bytes");
    }

    #[test]
    fn prefetched_items_are_taken_in_order() {
        let mut prefetch = prefetch(0..5);
        let mut taken = prefetch.take(2);
        assert_eq!(taken.iter().map(|item| item.when).collect::<Vec<_>>(), [0, 1]);
        // One of the items was too large for its consumer.
        prefetch.restore(vec![taken.pop().unwrap()], PrioritySet::of(3));
        assert_eq!(whens(&prefetch), [1, 2, 3, 4]);
        assert_eq!(prefetch.bytes, 16);
        assert_eq!(prefetch.take(4).len(), 4);
        assert!(prefetch.take(1).is_empty());
        assert_eq!(prefetch.bytes, 0);
    }

    #[test]
    fn too_few_or_too_old_needs_a_find() {
        assert!(prefetch(0..5).take(6).is_empty());
        let mut old = prefetch(0..5);
        old.found = old.found.and_then(|at| at.checked_sub(GOOD_FOR));
        assert!(old.take(1).is_empty());
        assert_eq!(old.limit(1), 1);
    }

    #[test]
    fn items_read_ahead_follow_those_that_are_there() {
        let mut prefetch = prefetch(0..3);
        let last = item(3, 2);
        assert_eq!(prefetch.end(3, 0, &last), None, "there are enough");
        let end = prefetch.end(5, 0, &last).unwrap();
        assert_eq!((end.priority, end.when), (3, 2));
        assert_eq!(prefetch.end(5, 2, &last), None, "with those that return");
        prefetch.append(end, items(3, 3..5), true);
        assert_eq!(whens(&prefetch), [0, 1, 2, 3, 4]);
        let end = prefetch.end(9, 0, &last).unwrap();
        assert_eq!(end.when, 4);
        prefetch.append(end, Vec::new(), false);
        assert_eq!(prefetch.end(9, 0, &last), None, "there are no more");
    }

    /// What was dropped meanwhile would be missing between those that are there and those that were read.
    #[test]
    fn nothing_is_added_behind_a_gap() {
        let drops: [fn(&mut Prefetch); 3] = [
            |prefetch| prefetch.rewind(PrioritySet::of(3), 1),
            Prefetch::clear,
            |prefetch| drop(prefetch.take(50)),
        ];
        for drop_some in drops {
            let mut prefetch = prefetch(0..3);
            let end = prefetch.end(5, 0, &item(3, 2)).unwrap();
            drop_some(&mut prefetch);
            let left = whens(&prefetch);
            prefetch.append(end, items(3, 3..5), true);
            assert_eq!(whens(&prefetch), left);
        }
    }

    #[test]
    fn a_new_item_drops_the_items_behind_it() {
        let after = |set, since| {
            let mut prefetch = prefetch(10..15);
            prefetch.rewind(set, since);
            whens(&prefetch)
        };
        let all = vec![10, 11, 12, 13, 14];
        assert_eq!(after(PrioritySet::of(3), 14), all, "the new item comes after them");
        assert_eq!(after(PrioritySet::of(2), 0), all, "a lower priority");
        assert_eq!(after(PrioritySet::of(3), 12), [10, 11, 12]);
        assert_eq!(after(PrioritySet::of(3), 0), [0; 0]);
        assert_eq!(after(PrioritySet::of(4), 20), [0; 0], "a higher priority");
        assert_eq!(after(PrioritySet::of(4) | PrioritySet::of(3), 20), [0; 0]);
    }

    #[test]
    fn only_items_of_the_highest_priority_that_nobody_held_are_kept() {
        let kept = |items: Vec<Box<Stored>>, used| {
            let mut prefetch = prefetch(50..52);
            prefetch.restore(items, used);
            whens(&prefetch)
        };
        assert_eq!(kept(items(3, 0..2), PrioritySet::of(3) | PrioritySet::of(1)), [0, 1, 50, 51]);
        assert_eq!(kept(items(3, 0..2), PrioritySet::of(4) | PrioritySet::of(3)), [0; 0]);
        let mut held = item(3, 1);
        held.lock = Some(LeaseToken([1; 12]));
        assert_eq!(kept(vec![item(3, 0), held, item(3, 2)], PrioritySet::of(3)), [0]);
    }
}
