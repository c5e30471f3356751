//! Keeps track of which items were pushed and which arrived, and how often.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;

/// This bit of an item's byte is set when its push is answered; the other bits count its deliveries.
const ACKNOWLEDGED: u8 = 0x80;

/// Numbers the items of a run and records what happens to each. All producers and consumers of the run share it.
#[derive(Debug)]
pub(crate) struct Tracker {
    /// The instant from which the times in the payloads are counted.
    epoch: Instant,
    next: AtomicU64,
    seen: Mutex<Vec<u8>>,
    pushed: AtomicU64,
    committed: AtomicU64,
}

/// What happened to the items of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) missing: u64,
    pub(crate) doubled: u64,
}

impl Verdict {
    pub(crate) fn exactly_once(self) -> bool {
        self == Self::default()
    }
}

impl std::ops::AddAssign for Verdict {
    fn add_assign(&mut self, other: Self) {
        self.missing += other.missing;
        self.doubled += other.doubled;
    }
}

impl Tracker {
    pub(crate) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            next: AtomicU64::new(0),
            seen: Mutex::default(),
            pushed: AtomicU64::new(0),
            committed: AtomicU64::new(0),
        }
    }

    /// Returns the numbers of the next `n` items, below `limit`; empty when there are none left.
    pub(crate) fn next_numbers(&self, n: u64, limit: u64) -> Range<u64> {
        let start = self.next.fetch_add(n, Ordering::Relaxed);
        start.min(limit)..(start + n).min(limit)
    }

    /// Returns a payload that holds the item's number and when its push was due.
    pub(crate) fn payload(&self, number: u64, due: Instant, size: usize) -> Bytes {
        let due = due.saturating_duration_since(self.epoch).as_nanos() as u64;
        let mut payload = vec![b'.'; size.max(16)];
        payload[..8].copy_from_slice(&number.to_le_bytes());
        payload[8..16].copy_from_slice(&due.to_le_bytes());
        payload.into()
    }

    pub(crate) fn acknowledged(&self, numbers: Range<u64>) {
        self.pushed.fetch_add(numbers.end - numbers.start, Ordering::Relaxed);
        let mut seen = self.seen.lock();
        for number in numbers {
            *slot(&mut seen, number) |= ACKNOWLEDGED;
        }
    }

    /// Records deliveries and returns how long before each its push was due.
    pub(crate) fn delivered<'a>(
        &self,
        payloads: impl Iterator<Item = &'a Bytes>,
        now: Instant,
    ) -> Vec<Duration> {
        let now = now.saturating_duration_since(self.epoch);
        let mut seen = self.seen.lock();
        payloads
            .filter_map(|payload| {
                let (number, due) = (read(payload, 0)?, read(payload, 8)?);
                let count = slot(&mut seen, number);
                if *count & !ACKNOWLEDGED < 0x7f {
                    *count += 1;
                }
                Some(now.saturating_sub(Duration::from_nanos(due)))
            })
            .collect()
    }

    /// Returns how many items are missing or doubled: an item whose push was answered must have arrived exactly once, and
    /// one whose push failed at most once.
    pub(crate) fn verdict(&self) -> Verdict {
        let seen = self.seen.lock();
        let missing = seen.iter().map(|&byte| u64::from(byte == ACKNOWLEDGED)).sum();
        let doubled = seen.iter().filter(|&&byte| byte & !ACKNOWLEDGED > 1).count() as u64;
        Verdict { missing, doubled }
    }

    pub(crate) fn settled(&self, n: u64) {
        self.committed.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn count_pushed(&self) -> u64 {
        self.pushed.load(Ordering::Relaxed)
    }

    pub(crate) fn count_committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    /// Returns the verdict where the items still in the queue at the end are only counted, as `left`. There should be
    /// `others`, and as many as were pushed and not committed.
    pub(crate) fn verdict_with(&self, left: u64, others: u64) -> Verdict {
        let should = (others + self.count_pushed()).saturating_sub(self.count_committed());
        let doubled = self.verdict().doubled + left.saturating_sub(should);
        Verdict { missing: should.saturating_sub(left), doubled }
    }
}

fn slot(seen: &mut Vec<u8>, number: u64) -> &mut u8 {
    let at = number as usize;
    if seen.len() <= at {
        seen.resize((at + 1).next_power_of_two(), 0);
    }
    &mut seen[at]
}

fn read(payload: &Bytes, at: usize) -> Option<u64> {
    let bytes = payload.get(at..at + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_doubled_items_are_found() {
        let tracker = Tracker::new();
        let now = Instant::now();
        tracker.acknowledged(0..4);
        let come: Vec<Bytes> = [0, 1, 1, 3, 9].map(|n| tracker.payload(n, now, 16)).into();
        tracker.delivered(come.iter(), now);
        assert_eq!(tracker.verdict(), Verdict { missing: 1, doubled: 1 });
    }

    #[test]
    fn items_left_in_the_queue_count_as_arrived() {
        let tracker = Tracker::new();
        let now = Instant::now();
        tracker.acknowledged(0..4);
        tracker.delivered([tracker.payload(0, now, 16)].iter(), now);
        tracker.settled(1);
        assert!(tracker.verdict_with(3, 0).exactly_once());
        assert_eq!(tracker.verdict_with(2, 0), Verdict { missing: 1, doubled: 0 });
        assert_eq!(tracker.verdict_with(7, 3), Verdict { missing: 0, doubled: 1 });
    }

    #[test]
    fn claims_end_at_the_limit() {
        let tracker = Tracker::new();
        assert_eq!(tracker.next_numbers(10, 15), 0..10);
        assert_eq!(tracker.next_numbers(10, 15), 10..15);
        assert!(tracker.next_numbers(10, 15).is_empty());
    }
}
