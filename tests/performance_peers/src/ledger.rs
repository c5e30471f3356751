//! Which items were pushed and which arrived.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;

/// Numbers the items of a run and records their arrival. All producers and consumers share it.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// The instant from which the times in the payloads are counted.
    epoch: Instant,
    next: AtomicU64,
    stored: AtomicU64,
    arrived: AtomicU64,
    doubled: AtomicU64,
    seen: Mutex<Vec<bool>>,
}

impl Ledger {
    pub(crate) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            next: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
            doubled: AtomicU64::new(0),
            seen: Mutex::default(),
        }
    }

    /// Returns payloads that hold the item's number and the instant at which its push was due.
    pub(crate) fn payloads(&self, n: usize, size: usize, due: Instant) -> Vec<Bytes> {
        let first = self.next.fetch_add(n as u64, Ordering::Relaxed);
        let due = due.saturating_duration_since(self.epoch).as_nanos() as u64;
        let payload = |number: u64| {
            let mut payload = vec![b'.'; size];
            payload[..8].copy_from_slice(&number.to_le_bytes());
            payload[8..16].copy_from_slice(&due.to_le_bytes());
            payload.into()
        };
        (first..first + n as u64).map(payload).collect()
    }

    /// Counts items that the system has said to be stored.
    pub(crate) fn stored(&self, n: usize) {
        self.stored.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Records the arrival of items and returns how long before it each push was due.
    pub(crate) fn arrived(&self, payloads: &[Bytes]) -> Vec<Duration> {
        let now = self.epoch.elapsed();
        let word = |payload: &Bytes, at: usize| {
            let bytes = payload.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let mut seen = self.seen.lock();
        let mut doubled = 0;
        for payload in payloads {
            let number = word(payload, 0) as usize;
            if seen.len() <= number {
                seen.resize((number + 1).next_power_of_two(), false);
            }
            doubled += u64::from(std::mem::replace(&mut seen[number], true));
        }
        drop(seen);
        self.doubled.fetch_add(doubled, Ordering::Relaxed);
        self.arrived.fetch_add(payloads.len() as u64, Ordering::Relaxed);
        payloads.iter().map(|p| now.saturating_sub(Duration::from_nanos(word(p, 8)))).collect()
    }

    /// Returns how many items were stored and have not arrived.
    pub(crate) fn missing(&self) -> u64 {
        let arrived = self.arrived.load(Ordering::Relaxed) - self.doubled.load(Ordering::Relaxed);
        self.stored.load(Ordering::Relaxed).saturating_sub(arrived)
    }

    /// Returns how many items the system has said to be stored.
    pub(crate) fn count_stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// Returns how often an item arrived.
    pub(crate) fn count_arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Returns how often an item arrived that had arrived before.
    pub(crate) fn doubled(&self) -> u64 {
        self.doubled.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_doubled_items_are_counted() {
        let ledger = Ledger::new();
        let payloads = ledger.payloads(4, 16, Instant::now());
        ledger.stored(4);
        ledger.arrived(&payloads[..2]);
        ledger.arrived(&payloads[1..2]);
        assert_eq!((ledger.missing(), ledger.doubled()), (2, 1));
    }
}
