//! Sends at most one equal signal per window. The first signal is sent immediately and opens the
//! window. Further signals within the window are merged into one, which is sent when the window
//! closes. Without that signal the last insert of a burst would be lost, and its consumer would
//! wait for the fallback poll. A window ends early if another broker waits for the next signal.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use crate::domain::{QueueName, Signal, Timestamp, Topic};

/// How long equal signals are merged.
pub(crate) const WINDOW: Duration = Duration::from_millis(50);

/// Signals with the same key are equal.
type Key = (QueueName, Topic);

/// A time in which equal signals are merged.
#[derive(Debug)]
struct Window {
    closes: Instant,
    swallowed: Swallowed,
}

/// The signals that a window has merged.
#[derive(Debug, Clone, Copy)]
enum Swallowed {
    Nothing,
    /// Signals, with the least `since` of them.
    Least(Option<Timestamp>),
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
        if let Some(Window { swallowed, .. }) = self.open.get_mut(&key) {
            // `None` is less than every time, as documented at `Signal::since`.
            *swallowed = Swallowed::Least(match *swallowed {
                Swallowed::Nothing => signal.since,
                Swallowed::Least(before) => before.min(signal.since),
            });
            return None;
        }
        self.open_window(key, now);
        Some(signal)
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

    /// Ends a window before its time, if it is open. Returns its merged signals, which open a window of their own.
    pub(super) fn end_window(
        &mut self,
        queue: QueueName,
        topic: Topic,
        now: Instant,
    ) -> Option<Signal> {
        self.end((queue, topic), now)
    }

    fn end(&mut self, key: Key, now: Instant) -> Option<Signal> {
        let Swallowed::Least(since) = self.open.remove(&key)?.swallowed else { return None };
        let signal = Signal { queue: key.0.clone(), topic: key.1, since };
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
        let swallowed = |((queue, topic), window): (Key, Window)| match window.swallowed {
            Swallowed::Nothing => None,
            Swallowed::Least(since) => Some(Signal { queue, topic, since }),
        };
        self.open.drain().filter_map(swallowed).collect()
    }

    fn open_window(&mut self, key: Key, now: Instant) {
        let closes = now + WINDOW;
        self.closing.push_back((closes, key.clone()));
        self.open.insert(key, Window { closes, swallowed: Swallowed::Nothing });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(queue: &str, topic: Topic, since: Option<i64>) -> Signal {
        let queue = QueueName::parse("queue", queue).unwrap();
        Signal { queue, topic, since: since.map(Timestamp) }
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
            coalescer.end_window(insert(0).queue, Topic::Insert, after(start, millis))
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
