//! Polls between signals.
//!
//! Another broker signals its inserts once per signal window. Without polls in between, a queue
//! that receives several items per window would be delivered in bursts of that length. While
//! signals follow one another closely and announce items, a dispatcher that found the queue empty
//! therefore polls again before the next signal. It polls a few times as often as items arrive, so
//! the cost is proportional to the load.

use std::time::Duration;

use crate::{domain::Timestamp, signals::WINDOW};

/// Polls per arriving item.
const POLLS_PER_ITEM: u32 = 5;
/// Shortest pause between two polls.
const SHORTEST: Duration = Duration::from_millis(2);

/// The rate at which one queue's items arrive, estimated from the signals of other brokers.
#[derive(Debug, Default)]
pub(super) struct AdaptivePoll {
    /// When the last signal was received.
    last_signal: Option<Timestamp>,
    /// Number of items handed out since the last signal.
    items: u32,
    /// How long to wait after a poll that found nothing.
    pause: Option<Duration>,
}

impl AdaptivePoll {
    /// Records a signal about inserts on another broker.
    pub(super) fn record_signal(&mut self, now: Timestamp) {
        let between = self.last_signal.map(|before| before.until(now));
        self.pause = match between {
            Some(between) if between <= WINDOW * 2 && self.items > 1 => {
                Some((between / self.items / POLLS_PER_ITEM).max(SHORTEST))
            }
            _ => None,
        };
        self.last_signal = Some(now);
        self.items = 0;
    }

    /// Records how many items a reserve returned.
    pub(super) fn record_found(&mut self, items: usize) {
        self.items = self.items.saturating_add(items as u32);
    }

    /// Returns when to poll again after a reserve that found nothing, or `None` to wait for a
    /// signal.
    pub(super) fn next_poll(&self, now: Timestamp) -> Option<Timestamp> {
        let is_recent = self.last_signal.is_some_and(|at| at.until(now) <= WINDOW * 2);
        self.pause.filter(|_| is_recent).map(|pause| now + pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp(1_000_000 + millis)
    }

    #[test]
    fn a_queue_with_several_items_per_signal_is_polled_in_between() {
        let mut adaptive_poll = AdaptivePoll::default();
        adaptive_poll.record_signal(at(0));
        assert_eq!(adaptive_poll.next_poll(at(1)), None, "nothing is known yet");
        adaptive_poll.record_found(1);
        adaptive_poll.record_signal(at(50));
        assert_eq!(adaptive_poll.next_poll(at(51)), None, "each item had its signal");
        adaptive_poll.record_found(2);
        adaptive_poll.record_signal(at(100));
        assert_eq!(adaptive_poll.next_poll(at(101)), Some(at(101 + 5)), "50 ms for two items");
        adaptive_poll.record_found(40);
        adaptive_poll.record_found(10);
        adaptive_poll.record_signal(at(150));
        assert_eq!(adaptive_poll.next_poll(at(151)), Some(at(151 + 2)), "often enough");
    }

    #[test]
    fn polls_end_with_the_signals() {
        let mut adaptive_poll = AdaptivePoll::default();
        adaptive_poll.record_signal(at(0));
        adaptive_poll.record_found(5);
        adaptive_poll.record_signal(at(50));
        adaptive_poll.record_found(5);
        assert!(adaptive_poll.next_poll(at(150)).is_some());
        assert_eq!(adaptive_poll.next_poll(at(151)), None);
        adaptive_poll.record_signal(at(500));
        assert_eq!(adaptive_poll.next_poll(at(501)), None, "the estimate starts again");
    }
}
