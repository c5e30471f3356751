//! Reading ahead. Many small reserves in a row would each pay for a find: instead, one brings more than
//! is wanted, and the next are claimed from what it left.
//!
//! What is read ahead is what a find would bring: items of the highest level in use, none of which has been
//! handed out before. Nothing but an insert can get ahead of those, and whoever inserts, gives back or
//! learns of it says so ([`Prefetch::rewind`]). That an item was taken by another meanwhile shows when it is claimed.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{domain::PrioritySet, store::mongo::schema::item::Stored};

/// Most items that are read ahead.
const MAX_ITEMS: usize = 256;
/// Most bytes of payload that are kept.
const MAX_BYTES: usize = 256 << 10;
/// What was found is forgotten after this long.
const GOOD_FOR: Duration = Duration::from_millis(100);

/// Items of one queue, found and not yet handed out, in order.
#[derive(Default)]
pub(crate) struct Prefetch {
    items: VecDeque<Stored>,
    bytes: usize,
    /// When they were found.
    found: Option<Instant>,
    /// How many were read ahead by the last find.
    extra: usize,
    /// Bytes of payload of the largest the last find brought.
    largest: usize,
    /// The last find left more of the highest level behind.
    more: bool,
}

impl Prefetch {
    /// How many items the next find should bring: more than `wanted` if such finds are of use.
    pub(crate) fn limit(&mut self, wanted: usize) -> usize {
        let age = self.found.map_or(Duration::MAX, |found| found.elapsed());
        let most = MAX_ITEMS.min(MAX_BYTES / self.largest.max(1));
        self.extra = match age {
            _ if !self.more || wanted > most || age >= GOOD_FOR => 0,
            // Used up long before it was stale.
            _ if age < GOOD_FOR / 4 => (self.extra * 2).clamp(wanted, most),
            _ => self.extra,
        };
        wanted + self.extra
    }

    /// Notes what a find brought; `more`: it left some of the highest level behind.
    pub(crate) fn found(&mut self, items: &[Stored], more: bool) {
        self.forget();
        self.found = Some(Instant::now());
        self.largest = items.iter().map(|item| item.payload.len()).max().unwrap_or_default();
        self.more = more;
    }

    /// Takes the first `wanted`; none if a find is needed.
    pub(crate) fn take(&mut self, wanted: usize) -> Vec<Stored> {
        if self.items.len() < wanted || self.found.is_none_or(|at| at.elapsed() >= GOOD_FOR) {
            self.forget();
            return Vec::new();
        }
        let taken: Vec<Stored> = self.items.drain(..wanted).collect();
        self.bytes -= taken.iter().map(|item| item.payload.len()).sum::<usize>();
        taken
    }

    /// Puts back what was not handed out, before what is there. Only items of the highest level `used`
    /// that nobody held, up to the first that is none: nothing may pass those before it.
    pub(crate) fn restore(&mut self, items: Vec<Stored>, used: PrioritySet) {
        let fits = |item: &Stored| item.lock.is_none() && used.highest() == Some(item.priority);
        if !items.iter().all(fits) {
            self.forget();
        }
        let kept: Vec<Stored> = items.into_iter().take_while(fits).collect();
        self.bytes += kept.iter().map(|item| item.payload.len()).sum::<usize>();
        for item in kept.into_iter().rev() {
            self.items.push_front(item);
        }
        while self.bytes > MAX_BYTES {
            self.drop_last();
        }
    }

    /// Something became eligible at `since` in one of the levels: what would come behind it goes.
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

    /// Others take from the queue as well, or what was known of it no longer holds.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    fn drop_last(&mut self) {
        if let Some(last) = self.items.pop_back() {
            self.bytes -= last.payload.len();
        }
    }

    fn forget(&mut self) {
        self.items.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::domain::{LeaseToken, PrioritySet};

    fn item(priority: i32, when: i64) -> Stored {
        let mut item = Stored::default();
        (item.priority, item.when) = (priority, when);
        item.payload = Bytes::from_static(b"work");
        item
    }

    fn items(level: i32, whens: std::ops::Range<i64>) -> Vec<Stored> {
        whens.map(|when| item(level, when)).collect()
    }

    /// With the items of level 3 at these times in it.
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
    fn finds_grow_while_they_are_of_use() {
        let mut prefetch = Prefetch::default();
        assert_eq!(prefetch.limit(10), 10, "nothing is known");
        prefetch.found(&items(3, 0..10), true);
        assert_eq!(prefetch.limit(10), 20);
        prefetch.found(&items(3, 0..20), true);
        assert_eq!(prefetch.limit(10), 30);
        prefetch.found(&items(3, 0..30), false);
        assert_eq!(prefetch.limit(10), 10, "that was all");
        prefetch.found(&items(3, 0..10), true);
        assert_eq!(prefetch.limit(500), 500, "large ones pay for themselves");
        let mut large = item(3, 0);
        large.payload = vec![0; MAX_BYTES / 4].into();
        prefetch.found(&[large], true);
        assert_eq!((prefetch.limit(3), prefetch.limit(5)), (6, 5), "no more than may be kept");
    }

    #[test]
    fn what_is_left_is_taken_in_order() {
        let mut prefetch = prefetch(0..5);
        let mut taken = prefetch.take(2);
        assert_eq!(taken.iter().map(|item| item.when).collect::<Vec<_>>(), [0, 1]);
        // One of them was too large for whoever wanted it.
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
    fn what_comes_first_drops_what_stands_behind_it() {
        let after = |set, since| {
            let mut prefetch = prefetch(10..15);
            prefetch.rewind(set, since);
            whens(&prefetch)
        };
        let all = vec![10, 11, 12, 13, 14];
        assert_eq!(after(PrioritySet::of(3), 14), all, "it comes after them");
        assert_eq!(after(PrioritySet::of(2), 0), all, "a lower level");
        assert_eq!(after(PrioritySet::of(3), 12), [10, 11, 12]);
        assert_eq!(after(PrioritySet::of(3), 0), [0; 0]);
        assert_eq!(after(PrioritySet::of(4), 20), [0; 0], "a higher level");
        assert_eq!(after(PrioritySet::of(4) | PrioritySet::of(3), 20), [0; 0]);
    }

    #[test]
    fn only_the_highest_level_and_what_nobody_held_is_kept() {
        let kept = |items: Vec<Stored>, used| {
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
