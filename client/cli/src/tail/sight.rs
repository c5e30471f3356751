//! Which items of a queue are new, from one look at the queue to the next.

use std::collections::HashSet;

use prost_types::Timestamp;
use sluicegate_client::proto::{Item, ItemState};

/// Items may become visible a little after the time at which they were pushed, as their broker saw it.
const LATE_SECONDS: i64 = 10;

/// What one look at a queue has brought.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) items: Vec<Item>,
    /// True if these are all items of the queue.
    pub(super) is_complete: bool,
}

/// What is known of a queue from the looks before.
#[derive(Debug)]
pub(super) struct Sight {
    /// When the tail began, by the broker's clock.
    start: Timestamp,
    /// The ids of the last look and of the one before: an item that moves within the queue can be missing from one look.
    seen: [HashSet<String>; 2],
    is_complete: bool,
    /// The latest push that was seen.
    latest: Timestamp,
    /// How many pushed items were shown.
    shown: i64,
    /// How many were pushed before the tail began. Not known before the first figures.
    pushed_before: Option<i64>,
    /// How many are known to have passed unseen.
    missed: i64,
}

fn key(time: &Timestamp) -> (i64, i32) {
    (time.seconds, time.nanos)
}

impl Sight {
    /// Begins with a look whose items were there before.
    pub(super) fn new(start: Timestamp, first: &Look) -> Self {
        let seen = first.items.iter().map(|item| item.id.clone()).collect();
        let is_complete = first.is_complete;
        Self {
            start,
            seen: [seen, HashSet::new()],
            is_complete,
            latest: start,
            shown: 0,
            pushed_before: None,
            missed: 0,
        }
    }

    /// Returns the time of push from which on items may be new.
    pub(super) fn new_since(&self) -> Timestamp {
        let late = Timestamp { seconds: self.latest.seconds - LATE_SECONDS, ..self.latest };
        if key(&late) < key(&self.start) { self.start } else { late }
    }

    /// Returns the items that were not there before.
    ///
    /// Of a queue that was seen as a whole twice, these are all that were not seen before. Of others they are those that were pushed
    /// or dead-lettered since the tail began: an item that comes into sight may have waited out of sight.
    pub(super) fn new_items(&mut self, look: Look) -> Vec<Item> {
        let whole = self.is_complete && look.is_complete;
        let is_late = |time: Option<&Timestamp>| time.is_some_and(|at| key(at) >= key(&self.start));
        let ids: HashSet<String> = look.items.iter().map(|item| item.id.clone()).collect();
        let is_seen = |item: &Item| self.seen.iter().any(|seen| seen.contains(&item.id));
        let mut found = HashSet::new();
        let mut items: Vec<Item> = look
            .items
            .into_iter()
            .filter(|item| !is_seen(item) && found.insert(item.id.clone()))
            .filter(|item| {
                whole
                    || is_late(item.create_time.as_ref())
                    || is_late(item.dead_letter_time.as_ref())
            })
            .collect();
        items.sort_by_key(|item| arrival(item).map(|time| key(&time)));
        for item in &items {
            let pushed = item.create_time.filter(|_| is_pushed(item));
            if let Some(time) = pushed.filter(|time| key(time) >= key(&self.start)) {
                self.shown += 1;
                if key(&time) > key(&self.latest) {
                    self.latest = time;
                }
            }
        }
        self.is_complete = look.is_complete;
        let [last, _] = std::mem::take(&mut self.seen);
        self.seen = [ids, last];
        items
    }

    /// Takes over how many items were ever pushed, counted before the last look. Returns how many more have passed unseen.
    pub(super) fn missed(&mut self, pushed: i64) -> i64 {
        let before = *self.pushed_before.get_or_insert(pushed);
        let missed = (pushed - before - self.shown).max(self.missed);
        let more = missed - self.missed;
        self.missed = missed;
        more
    }
}

/// Returns true if the item came into its queue by a push, as far as one can see.
fn is_pushed(item: &Item) -> bool {
    item.dead_letter_time.is_none() || item.state() == ItemState::Processed
}

/// Returns when an item came into its queue, as far as one can see.
pub(super) fn arrival(item: &Item) -> Option<Timestamp> {
    item.dead_letter_time.filter(|_| item.state() != ItemState::Processed).or(item.create_time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanos: 0 }
    }

    fn item(id: &str, created: i64) -> Item {
        Item { id: id.to_owned(), create_time: Some(at(created)), ..Item::default() }
    }

    fn look(items: Vec<Item>, is_complete: bool) -> Look {
        Look { items, is_complete }
    }

    fn ids(items: &[Item]) -> Vec<&str> {
        items.iter().map(|item| item.id.as_str()).collect()
    }

    #[test]
    fn each_item_is_shown_once_in_the_order_of_its_coming() {
        let mut sight = Sight::new(at(100), &look(vec![item("old", 50)], true));
        let items =
            sight.new_items(look(vec![item("old", 50), item("b", 102), item("a", 101)], true));
        assert_eq!(ids(&items), ["a", "b"]);
        // Missing from one look, because it moved within the queue.
        assert!(sight.new_items(look(vec![item("a", 101)], true)).is_empty());
        assert!(sight.new_items(look(vec![item("a", 101), item("b", 102)], true)).is_empty());
    }

    #[test]
    fn what_comes_into_sight_of_a_deep_queue_is_not_taken_for_new() {
        let mut sight = Sight::new(at(100), &look(vec![item("old", 50)], false));
        let dead = Item { dead_letter_time: Some(at(103)), ..item("dead", 60) };
        let items = sight.new_items(look(vec![item("waited", 50), item("new", 102), dead], true));
        assert_eq!(ids(&items), ["new", "dead"]);
        // Seen as a whole twice: an item that was moved here is recognised.
        let items = sight.new_items(look(vec![item("waited", 50), item("moved", 70)], true));
        assert_eq!(ids(&items), ["moved"]);
    }

    #[test]
    fn what_was_pushed_and_not_seen_is_counted_once() {
        let mut sight = Sight::new(at(100), &look(vec![], true));
        assert_eq!(sight.missed(7), 0, "pushed before");
        sight.new_items(look(vec![item("a", 101)], true));
        assert_eq!(sight.missed(11), 3);
        assert_eq!(sight.missed(11), 0);
        // The look is later than the figures, and may show what they do not count yet.
        sight.new_items(look(vec![item("b", 102), item("c", 102)], true));
        assert_eq!(sight.missed(11), 0);
        assert_eq!(sight.missed(14), 1);
    }

    #[test]
    fn later_looks_ask_for_late_items_only() {
        let mut sight = Sight::new(at(100), &look(vec![], false));
        assert_eq!(sight.new_since(), at(100));
        sight.new_items(look(vec![item("a", 150)], false));
        assert_eq!(sight.new_since(), at(140), "an item may become visible after a later one");
    }
}
