//! Which items were pushed and which arrived, and how often.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;

/// Set in an item's byte once its push was answered; the rest counts its deliveries.
const ACKNOWLEDGED: u8 = 0x80;

/// Shared by all producers and consumers of a run.
#[derive(Debug)]
pub(super) struct Track {
    /// The zero of the times in the payloads.
    epoch: Instant,
    next: AtomicU64,
    seen: Mutex<Vec<u8>>,
    pushed: AtomicU64,
    committed: AtomicU64,
}

/// What became of the items.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) missing: u64,
    pub(super) doubled: u64,
}

impl Verdict {
    pub(super) fn exactly_once(self) -> bool {
        self == Self::default()
    }
}

impl std::ops::AddAssign for Verdict {
    fn add_assign(&mut self, other: Self) {
        self.missing += other.missing;
        self.doubled += other.doubled;
    }
}

impl Track {
    pub(super) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            next: AtomicU64::new(0),
            seen: Mutex::default(),
            pushed: AtomicU64::new(0),
            committed: AtomicU64::new(0),
        }
    }

    /// The numbers of the next `n` items, below `limit`; empty when there are none left.
    pub(super) fn claim(&self, n: u64, limit: u64) -> Range<u64> {
        let start = self.next.fetch_add(n, Ordering::Relaxed);
        start.min(limit)..(start + n).min(limit)
    }

    /// A payload that tells its number and when it was due.
    pub(super) fn payload(&self, number: u64, due: Instant, size: usize) -> Bytes {
        let due = due.saturating_duration_since(self.epoch).as_nanos() as u64;
        let mut payload = vec![b'.'; size.max(16)];
        payload[..8].copy_from_slice(&number.to_le_bytes());
        payload[8..16].copy_from_slice(&due.to_le_bytes());
        payload.into()
    }

    pub(super) fn acknowledged(&self, numbers: Range<u64>) {
        self.pushed.fetch_add(numbers.end - numbers.start, Ordering::Relaxed);
        let mut seen = self.seen.lock();
        for number in numbers {
            *slot(&mut seen, number) |= ACKNOWLEDGED;
        }
    }

    /// Notes deliveries and answers how long ago each was due.
    pub(super) fn delivered<'a>(
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

    /// Each item whose push was answered should have come once; one whose push failed, at most once.
    pub(super) fn verdict(&self) -> Verdict {
        let seen = self.seen.lock();
        let missing = seen.iter().map(|&byte| u64::from(byte == ACKNOWLEDGED)).sum();
        let doubled = seen.iter().filter(|&&byte| byte & !ACKNOWLEDGED > 1).count() as u64;
        Verdict { missing, doubled }
    }

    pub(super) fn settled(&self, n: u64) {
        self.committed.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn count_pushed(&self) -> u64 {
        self.pushed.load(Ordering::Relaxed)
    }

    pub(super) fn count_committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    /// The verdict when `left` items were in the queue at the end and only counted: there should be `others`, and as
    /// many as were pushed and not committed.
    pub(super) fn verdict_with(&self, left: u64, others: u64) -> Verdict {
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
        let track = Track::new();
        let now = Instant::now();
        track.acknowledged(0..4);
        let come: Vec<Bytes> = [0, 1, 1, 3, 9].map(|n| track.payload(n, now, 16)).into();
        track.delivered(come.iter(), now);
        assert_eq!(track.verdict(), Verdict { missing: 1, doubled: 1 });
    }

    #[test]
    fn what_is_left_counts_as_arrived_and_no_more() {
        let track = Track::new();
        let now = Instant::now();
        track.acknowledged(0..4);
        track.delivered([track.payload(0, now, 16)].iter(), now);
        track.settled(1);
        assert!(track.verdict_with(3, 0).exactly_once());
        assert_eq!(track.verdict_with(2, 0), Verdict { missing: 1, doubled: 0 });
        assert_eq!(track.verdict_with(7, 3), Verdict { missing: 0, doubled: 1 });
    }

    #[test]
    fn claims_end_at_the_limit() {
        let track = Track::new();
        assert_eq!(track.claim(10, 15), 0..10);
        assert_eq!(track.claim(10, 15), 10..15);
        assert!(track.claim(10, 15).is_empty());
    }
}
