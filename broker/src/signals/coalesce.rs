//! Sends at most one equal signal per window. The first signal is sent immediately and opens the
//! window. Further signals within the window are merged into one, which is sent when the window
//! closes. Without that signal the last insert of a burst would be lost, and its consumer would
//! wait for the fallback poll. A window ends early if another broker waits for the next signal, unless it has found what the
//! window has merged.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use crate::domain::{ItemId, QueueName, Signal, Timestamp, Topic};

/// How long equal signals are merged.
pub(crate) const WINDOW: Duration = Duration::from_millis(50);

/// Signals with the same key are equal.
type Key = (QueueName, Topic);

/// A time in which equal signals are merged.
#[derive(Debug)]
struct Window {
    closes: Instant,
    swallowed: Option<Swallowed>,
    /// Set if another broker waits for the next signal, and has found items that were eligible up to this time.
    found: Option<Timestamp>,
    /// The one item that another broker has found last.
    found_item: Option<ItemId>,
}

/// The signals that a window has merged. `None` is an unknown time, as documented at [`Signal::since`].
#[derive(Debug, Clone, Copy)]
struct Swallowed {
    least: Option<Timestamp>,
    /// The greatest `since`, and `None` if one of them is unknown.
    greatest: Option<Timestamp>,
    /// What they tell of that is not known to be found.
    unfound: Unfound,
}

/// What may still have to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unfound {
    Nothing,
    Item(ItemId),
    Anything,
}

impl Unfound {
    fn of(signal: &Signal, found: Option<ItemId>) -> Self {
        match signal.item {
            None => Self::Anything,
            item if item == found => Self::Nothing,
            Some(item) => Self::Item(item),
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nothing, one) | (one, Self::Nothing) => one,
            _ => Self::Anything,
        }
    }
}

impl Swallowed {
    const fn one(since: Option<Timestamp>, unfound: Unfound) -> Self {
        Self { least: since, greatest: since, unfound }
    }

    fn with(self, since: Option<Timestamp>, unfound: Unfound) -> Self {
        let greatest = self.greatest.zip(since).map(|(a, b)| a.max(b));
        Self { least: self.least.min(since), greatest, unfound: self.unfound.and(unfound) }
    }

    /// Returns the signal that stands for all.
    fn signal(self, (queue, topic): Key) -> Signal {
        let item = match self.unfound {
            Unfound::Item(item) => Some(item),
            Unfound::Nothing | Unfound::Anything => None,
        };
        Signal { queue, topic, since: self.least, item }
    }

    /// Returns true if a broker that has found items up to `found` has probably found all that was signalled.
    fn is_within(&self, found: Timestamp) -> bool {
        self.greatest.is_some_and(|greatest| greatest <= found)
    }
}

/// Merges equal signals. The coalescer has no clock of its own: each call passes the time.
///
/// The number of entries is bounded by the signals that are sent within one window, because an entry
/// is removed when its window closes without merged signals, and at the time at which a window that ended early would have.
#[derive(Debug, Default)]
pub(super) struct Coalescer {
    /// The open windows.
    open: HashMap<Key, Window>,
    /// When they close, and those that ended early would have. All are equally long, so they close in the order in which
    /// they opened.
    closing: VecDeque<(Instant, Key)>,
}

impl Coalescer {
    /// Accepts a signal. Returns the signal if it is to be sent now, `None` if a window has merged
    /// it.
    pub(super) fn offer(&mut self, signal: Signal, now: Instant) -> Option<Signal> {
        let key = (signal.queue.clone(), signal.topic);
        let Some(window) = self.open.get_mut(&key) else {
            self.open_window(key, now);
            return Some(signal);
        };
        let unfound = Unfound::of(&signal, window.found_item);
        let swallowed = match window.swallowed {
            None => Swallowed::one(signal.since, unfound),
            Some(before) => before.with(signal.since, unfound),
        };
        window.swallowed = Some(swallowed);
        let is_missing = window.found.is_some_and(|found| !swallowed.is_within(found));
        if is_missing { self.end(key, now) } else { None }
    }

    /// Notes that the signal of an insert is sent before the insert is stored. The signals that follow when it is stored are merged.
    /// Returns true if signals are merged of something that other brokers may not have found.
    pub(super) fn announced(&mut self, queue: &QueueName, now: Instant) -> bool {
        let key = (queue.clone(), Topic::Insert);
        if let Some(window) = self.open.get_mut(&key) {
            window.found = None;
            return window.swallowed.is_some_and(|all| all.unfound != Unfound::Nothing);
        }
        self.open_window(key, now);
        false
    }

    /// Closes the windows that have ended, and returns their merged signals. Each returned signal
    /// opens a new window.
    pub(super) fn close(&mut self, now: Instant) -> Vec<Signal> {
        let mut due = Vec::new();
        while self.closing.front().is_some_and(|(at, _)| *at <= now) {
            let Some((closes, key)) = self.closing.pop_front() else { break };
            // Otherwise the window has ended early, and another may be open.
            if self.open.get(&key).is_some_and(|window| window.closes == closes) {
                due.extend(self.end(key, now));
            }
        }
        due
    }

    /// Ends the window of a queue's inserts before its time, if it is open, because another broker waits for the next signal. Returns its merged
    /// signals, which open a window of their own. A broker that has `found` items which were eligible up to that time has
    /// probably found what was signalled up to it, so these signals stay until the window closes. It has certainly found the one `item`
    /// that it names.
    pub(super) fn end_window(
        &mut self,
        queue: QueueName,
        (found, item): (Option<Timestamp>, Option<ItemId>),
        now: Instant,
    ) -> Option<Signal> {
        let key = (queue, Topic::Insert);
        if let Some(found) = found {
            let window = self.open.get_mut(&key)?;
            window.found_item = item;
            if let (Some(item), Some(swallowed)) = (item, &mut window.swallowed)
                && swallowed.unfound == Unfound::Item(item)
            {
                swallowed.unfound = Unfound::Nothing;
            }
            if window.swallowed.is_none_or(|swallowed| swallowed.is_within(found)) {
                window.found = window.found.max(Some(found));
                return None;
            }
        }
        self.end(key, now)
    }

    fn end(&mut self, key: Key, now: Instant) -> Option<Signal> {
        let signal = self.open.remove(&key)?.swallowed?.signal(key.clone());
        self.open_window(key, now);
        Some(signal)
    }

    /// Returns when the next window closes.
    pub(super) fn next_close(&self) -> Option<Instant> {
        self.closing.front().map(|(at, _)| *at)
    }

    /// Removes all windows and returns their merged signals.
    pub(super) fn drain(&mut self) -> Vec<Signal> {
        self.closing.clear();
        let merged = |(key, window): (Key, Window)| Some(window.swallowed?.signal(key));
        self.open.drain().filter_map(merged).collect()
    }

    fn open_window(&mut self, key: Key, now: Instant) {
        let closes = now + WINDOW;
        self.closing.push_back((closes, key.clone()));
        self.open.insert(key, Window { closes, swallowed: None, found: None, found_item: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(queue: &str, topic: Topic, since: Option<i64>) -> Signal {
        let queue = QueueName::parse("queue", queue).unwrap();
        Signal::new(queue, topic, since.map(Timestamp))
    }

    fn insert(since: i64) -> Signal {
        signal("orders", Topic::Insert, Some(since))
    }

    fn after(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    #[test]
    fn the_first_signal_is_sent_immediately_and_the_merged_ones_when_the_window_closes() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        assert_eq!(coalescer.offer(insert(5), start), Some(insert(5)));
        for (millis, since) in [(1, 9), (20, 7), (49, 8)] {
            assert_eq!(coalescer.offer(insert(since), after(start, millis)), None);
        }
        assert_eq!(coalescer.next_close(), Some(after(start, 50)));
        assert_eq!(coalescer.close(after(start, 49)), []);
        assert_eq!(coalescer.close(after(start, 50)), [insert(7)], "the least since counts");
    }

    #[test]
    fn a_signal_sent_at_a_close_opens_a_window_of_its_own() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        coalescer.offer(insert(1), start);
        coalescer.offer(insert(2), after(start, 10));
        assert_eq!(coalescer.close(after(start, 50)), [insert(2)]);
        assert_eq!(coalescer.offer(insert(3), after(start, 99)), None);
        assert_eq!(coalescer.close(after(start, 100)), [insert(3)]);
        assert_eq!(coalescer.close(after(start, 150)), []);
        assert_eq!(coalescer.offer(insert(4), after(start, 150)), Some(insert(4)));
    }

    #[test]
    fn an_unknown_since_is_less_than_any_time() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let unknown = signal("orders", Topic::Insert, None);
        for order in [[Some(3), None], [None, Some(3)]] {
            coalescer.offer(insert(1), start);
            for since in order {
                coalescer.offer(signal("orders", Topic::Insert, since), start);
            }
            assert_eq!(coalescer.drain(), std::slice::from_ref(&unknown));
        }
    }

    #[test]
    fn a_window_that_ends_early_sends_what_it_merged_and_closes_no_later_one() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let end = |coalescer: &mut Coalescer, millis| {
            coalescer.end_window(insert(0).queue, (None, None), after(start, millis))
        };
        assert_eq!(end(&mut coalescer, 0), None, "none is open");
        coalescer.offer(insert(1), start);
        assert_eq!(end(&mut coalescer, 10), None, "nothing was merged");
        assert_eq!(coalescer.offer(insert(3), after(start, 11)), Some(insert(3)), "it has ended");
        assert_eq!(coalescer.offer(insert(4), after(start, 12)), None);
        assert_eq!(end(&mut coalescer, 20), Some(insert(4)));
        assert_eq!(coalescer.offer(insert(5), after(start, 21)), None, "a window of its own");
        assert_eq!(coalescer.close(after(start, 61)), [], "those of 0 and 11 have ended");
        assert_eq!(coalescer.close(after(start, 70)), [insert(5)]);
        assert_eq!(coalescer.close(after(start, 120)), []);
        assert!(coalescer.open.is_empty() && coalescer.closing.is_empty());
    }

    #[test]
    fn what_the_broker_that_waits_has_found_stays_until_the_window_closes() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let found = |coalescer: &mut Coalescer, up_to, millis| {
            let found = Some(Timestamp(up_to));
            coalescer.end_window(insert(0).queue, (found, None), after(start, millis))
        };
        coalescer.offer(insert(5), start);
        assert_eq!(coalescer.offer(insert(6), after(start, 1)), None);
        assert_eq!(found(&mut coalescer, 7, 2), None);
        assert_eq!(coalescer.offer(insert(7), after(start, 3)), None, "it has that too");
        assert_eq!(coalescer.offer(insert(8), after(start, 4)), Some(insert(6)), "but not that");
        assert_eq!(coalescer.offer(insert(9), after(start, 5)), None, "it was told once");
        assert_eq!(found(&mut coalescer, 8, 6), Some(insert(9)), "it has not found that");
        assert_eq!(found(&mut coalescer, 9, 7), None);
        let unknown = signal("orders", Topic::Insert, None);
        assert_eq!(coalescer.offer(unknown.clone(), after(start, 8)), Some(unknown));
        coalescer.offer(insert(3), after(start, 9));
        assert_eq!(found(&mut coalescer, 9, 10), None);
        assert_eq!(coalescer.close(after(start, 58)), [insert(3)]);
    }

    #[test]
    fn an_insert_that_was_announced_is_signalled_again_only_if_it_was_not_found() {
        for (found, sent) in [(None, true), (Some(Timestamp(4)), true), (Some(Timestamp(5)), false)]
        {
            let (mut coalescer, start) = (Coalescer::default(), Instant::now());
            coalescer.announced(&insert(5).queue, start);
            assert_eq!(coalescer.offer(insert(5), after(start, 1)), None);
            let again = coalescer.end_window(insert(5).queue, (found, None), after(start, 2));
            assert_eq!(again, sent.then(|| insert(5)));
            // The answer may also come before the insert is stored.
            let mut coalescer = Coalescer::default();
            coalescer.announced(&insert(5).queue, start);
            assert_eq!(coalescer.end_window(insert(5).queue, (found, None), after(start, 1)), None);
            let signalled = coalescer.offer(insert(5), after(start, 2));
            assert_eq!(signalled, sent.then(|| insert(5)));
        }
    }

    fn named(since: i64, item: u8) -> Signal {
        Signal { item: Some(ItemId([item; 12])), ..insert(since) }
    }

    #[test]
    fn a_signal_names_its_item_unless_it_is_merged_with_others() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        assert_eq!(coalescer.offer(named(1, 1), start), Some(named(1, 1)));
        coalescer.offer(named(3, 3), start);
        assert_eq!(coalescer.close(after(start, 50)), [named(3, 3)], "it is the only one");
        coalescer.offer(named(5, 5), after(start, 60));
        coalescer.offer(named(4, 4), after(start, 60));
        assert_eq!(coalescer.close(after(start, 100)), [insert(4)]);
        coalescer.offer(named(7, 7), after(start, 110));
        coalescer.offer(insert(8), after(start, 110));
        assert_eq!(coalescer.drain(), [insert(7)]);
    }

    /// It is sent all the same when the window closes: whoever says so may be wrong.
    #[test]
    fn the_signal_of_an_item_that_was_found_does_not_count_as_one_that_waits() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let queue = insert(0).queue;
        let found = |coalescer: &mut Coalescer, since, item| {
            let found = (Some(Timestamp(since)), Some(ItemId([item; 12])));
            coalescer.end_window(insert(0).queue, found, after(start, 5))
        };
        assert!(!coalescer.announced(&queue, start));
        assert_eq!(coalescer.offer(named(5, 5), start), None);
        assert!(coalescer.announced(&queue, start), "nobody has found it");
        assert_eq!(found(&mut coalescer, 5, 5), None);
        assert!(!coalescer.announced(&queue, start));
        // The answer may also come before the item is stored.
        assert_eq!(found(&mut coalescer, 6, 6), None);
        assert_eq!(coalescer.offer(named(6, 6), start), None);
        assert!(!coalescer.announced(&queue, start));
        assert_eq!(coalescer.offer(named(7, 7), start), None);
        assert!(coalescer.announced(&queue, start));
        assert_eq!(found(&mut coalescer, 7, 7), None);
        assert!(!coalescer.announced(&queue, start));
        assert_eq!(coalescer.close(after(start, 50)), [insert(5)]);
    }

    /// It may have come before the one that was found, and would be handed out after the one that is announced next.
    #[test]
    fn the_signal_of_another_item_that_may_have_been_found_is_kept() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let queue = insert(0).queue;
        for merged in [named(5, 4), insert(5)] {
            assert!(!coalescer.announced(&queue, start));
            assert_eq!(coalescer.offer(merged.clone(), start), None);
            let found = (Some(Timestamp(5)), Some(ItemId([5; 12])));
            assert_eq!(coalescer.end_window(queue.clone(), found, start), None);
            assert!(coalescer.announced(&queue, start));
            assert_eq!(coalescer.drain(), [merged]);
        }
    }

    #[test]
    fn a_signal_names_the_only_item_that_was_not_found() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let found = |coalescer: &mut Coalescer, item| {
            let found = (Some(Timestamp(9)), Some(ItemId([item; 12])));
            coalescer.end_window(insert(0).queue, found, start)
        };
        for (item, merged) in [(5, Some(6)), (6, Some(5)), (7, None)] {
            coalescer.announced(&insert(0).queue, start);
            coalescer.offer(named(5, 5), start);
            found(&mut coalescer, item);
            coalescer.offer(named(6, 6), start);
            let item_left = merged.map(|item| ItemId([item; 12]));
            let expected = Signal { item: item_left, ..insert(5) };
            assert_eq!(coalescer.drain(), [expected], "{item} was found");
        }
    }

    #[test]
    fn an_insert_that_was_announced_in_an_open_window_is_merged_in_it() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        coalescer.offer(insert(5), start);
        coalescer.end_window(insert(5).queue, (Some(Timestamp(5)), None), after(start, 1));
        coalescer.announced(&insert(6).queue, after(start, 2));
        assert_eq!(coalescer.offer(insert(6), after(start, 3)), None);
        assert_eq!(coalescer.close(after(start, 50)), [insert(6)]);
    }

    #[test]
    fn queues_and_topics_are_not_merged() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        for topic in [Topic::Insert, Topic::Settings, Topic::Settle] {
            for queue in ["a", "b"] {
                let signal = signal(queue, topic, None);
                assert_eq!(coalescer.offer(signal.clone(), start), Some(signal));
            }
        }
    }

    #[test]
    fn memory_is_freed_when_windows_close() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        for n in 0..1_000 {
            coalescer.offer(signal(&format!("q{n}"), Topic::Insert, None), start);
        }
        assert_eq!(coalescer.close(after(start, 50)), []);
        assert!(coalescer.open.is_empty() && coalescer.closing.is_empty());
        assert_eq!(coalescer.next_close(), None);
    }

    #[test]
    fn at_most_one_signal_is_sent_per_window_and_the_last_is_not_lost() {
        let (mut coalescer, start) = (Coalescer::default(), Instant::now());
        let mut sent = Vec::new();
        for millis in 0..1_000 {
            let now = after(start, millis);
            sent.extend(coalescer.close(now).into_iter().map(|s| (millis, s)));
            let falling = insert(5_000 - millis as i64);
            sent.extend(coalescer.offer(falling, now).map(|s| (millis, s)));
        }
        let end = coalescer.next_close().unwrap();
        sent.extend(coalescer.close(end).into_iter().map(|s| (1_000, s)));
        assert!(sent.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 50), "{sent:?}");
        assert_eq!(sent.len(), 21);
        assert_eq!(sent.last().unwrap().1, insert(5_000 - 999));
    }
}
