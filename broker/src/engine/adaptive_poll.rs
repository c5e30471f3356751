//! Polls between signals.
//!
//! Another broker signals its inserts once per signal window. Without polls in between, a queue
//! that receives several items per window would be delivered in bursts of that length. While
//! signals follow one another closely and bring items, a dispatcher that found the queue empty
//! therefore polls again before the next signal. It polls a few times as often as items arrive, so
//! the cost is proportional to the load.

use std::time::Duration;

use crate::{domain::Timestamp, signals::WINDOW};

/// Polls per arriving item.
const LOOKS: u32 = 5;
/// Shortest pause between two polls.
const SHORTEST: Duration = Duration::from_millis(2);

/// The rate at which one queue's items arrive, estimated from the signals of other brokers.
#[derive(Debug, Default)]
pub(super) struct Rhythm {
    /// When the last signal was received.
    heard: Option<Timestamp>,
    /// Number of items handed out since the last signal.
    items: u32,
    /// How long to wait after a poll that found nothing.
    pause: Option<Duration>,
}

impl Rhythm {
    /// Records a signal about inserts on another broker.
    pub(super) fn heard(&mut self, now: Timestamp) {
        let between = self.heard.map(|before| before.until(now));
        self.pause = match between {
            Some(between) if between <= WINDOW * 2 && self.items > 1 => {
                Some((between / self.items / LOOKS).max(SHORTEST))
            }
            _ => None,
        };
        self.heard = Some(now);
        self.items = 0;
    }

    /// Records how many items a reserve returned.
    pub(super) fn brought(&mut self, items: usize) {
        self.items = self.items.saturating_add(items as u32);
    }

    /// Returns when to poll again after a reserve that found nothing, or `None` to wait for a
    /// signal.
    pub(super) fn next_look(&self, now: Timestamp) -> Option<Timestamp> {
        let told_soon = self.heard.is_some_and(|heard| heard.until(now) <= WINDOW * 2);
        self.pause.filter(|_| told_soon).map(|pause| now + pause)
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
        let mut rhythm = Rhythm::default();
        rhythm.heard(at(0));
        assert_eq!(rhythm.next_look(at(1)), None, "nothing is known yet");
        rhythm.brought(1);
        rhythm.heard(at(50));
        assert_eq!(rhythm.next_look(at(51)), None, "each item had its signal");
        rhythm.brought(2);
        rhythm.heard(at(100));
        assert_eq!(rhythm.next_look(at(101)), Some(at(101 + 5)), "50 ms for two items");
        rhythm.brought(40);
        rhythm.brought(10);
        rhythm.heard(at(150));
        assert_eq!(rhythm.next_look(at(151)), Some(at(151 + 2)), "often enough");
    }

    #[test]
    fn polls_end_with_the_signals() {
        let mut rhythm = Rhythm::default();
        rhythm.heard(at(0));
        rhythm.brought(5);
        rhythm.heard(at(50));
        rhythm.brought(5);
        assert!(rhythm.next_look(at(150)).is_some());
        assert_eq!(rhythm.next_look(at(151)), None);
        rhythm.heard(at(500));
        assert_eq!(rhythm.next_look(at(501)), None, "the estimate starts again");
    }
}
