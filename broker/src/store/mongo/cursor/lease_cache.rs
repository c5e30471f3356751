//! The reservations that this broker made and has not seen settled: what it needs to know of an item to settle it in
//! the cheapest way. Losing an entry costs time, never correctness.

use std::collections::hash_map::Entry;

use parking_lot::Mutex;

use crate::domain::{IdMap, ItemId, LeaseToken, OrderingKey, Receipt, Timestamp};

/// Milliseconds after which an entry may be dropped that no longer saves anything.
const KEEP: i64 = 60_000;
/// Milliseconds before the end of a lease from which its item is settled the exact way, because another broker may take
/// the item.
const CLOSE: i64 = 250;

/// Milliseconds after a reservation from which its item is settled the exact way. Few consumers take longer, and the
/// tombstones that other brokers leave for this broker need not stay longer.
pub(crate) const EXCLUSIVE: i64 = 120_000;

/// A reservation that this broker made.
#[derive(Debug, Clone)]
pub(crate) struct CachedLease {
    pub(crate) token: LeaseToken,
    /// Time of the reservation.
    pub(crate) made: Timestamp,
    /// End of the lease.
    pub(crate) until: i64,
    pub(crate) priority: i32,
    /// True if the item has a deduplication id: a tombstone must stay.
    pub(crate) dedup: bool,
    /// True if another broker may have reserved the item: a tombstone must stay.
    pub(crate) leaves_tombstone: bool,
    /// When the item expires, if it does.
    pub(crate) deadline: Option<i64>,
    pub(crate) key: Option<OrderingKey>,
    /// It shares a document with others.
    pub(crate) in_segment: bool,
}

impl CachedLease {
    /// Returns until when only this broker can change the item, at most.
    fn exclusive_until(&self) -> i64 {
        self.until.min(self.made.0 + EXCLUSIVE)
    }

    /// Returns true if only this broker can have changed the item, and the server cannot have removed it.
    pub(crate) fn is_exclusive(&self, now: Timestamp) -> bool {
        let until = self.exclusive_until();
        let end = self.deadline.map_or(until, |deadline| deadline.min(until));
        now.0 + CLOSE < end
    }
}

/// The reservations that this broker made.
#[derive(Default)]
pub(crate) struct LeaseCache(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    by_item: IdMap<ItemId, CachedLease>,
    /// Old entries are dropped when the map reaches this size.
    clear_at: usize,
}

impl LeaseCache {
    /// Adds reservations.
    pub(crate) fn add(
        &self,
        issues: impl IntoIterator<Item = (ItemId, CachedLease)>,
        now: Timestamp,
    ) {
        let mut entries = self.0.lock();
        entries.by_item.extend(issues);
        if entries.by_item.len() > entries.clear_at {
            // What other brokers settle is not reported here, so an entry does not stay for a lease of hours.
            entries.by_item.retain(|_, lease| lease.exclusive_until() + KEEP > now.0);
            entries.clear_at = (entries.by_item.len() * 2).max(1_000);
        }
    }

    /// Removes and returns the entry of a reservation that is about to be settled.
    pub(crate) fn take(&self, receipt: &Receipt) -> Option<CachedLease> {
        match self.0.lock().by_item.entry(receipt.item) {
            Entry::Occupied(entry) if entry.get().token == receipt.token => Some(entry.remove()),
            _ => None,
        }
    }

    /// Sets the end of a lease. With `sooner_only`, while the write is under way, the end is only moved to an earlier
    /// time.
    pub(crate) fn extend(&self, receipt: &Receipt, until: Timestamp, sooner_only: bool) {
        if let Some(cached_lease) = self.0.lock().by_item.get_mut(&receipt.item)
            && cached_lease.token == receipt.token
        {
            cached_lease.until =
                if sooner_only { cached_lease.until.min(until.0) } else { until.0 };
        }
    }

    /// Notes that these items have documents of their own.
    pub(crate) fn detached(&self, items: impl IntoIterator<Item = ItemId>) {
        let mut entries = self.0.lock();
        for item in items {
            if let Some(cached_lease) = entries.by_item.get_mut(&item) {
                cached_lease.in_segment = false;
            }
        }
    }

    /// Drops the entry of an item.
    pub(crate) fn forget(&self, item: ItemId) {
        self.0.lock().by_item.remove(&item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries are of use for [`EXCLUSIVE`]. Those of leases of hours that other brokers end do not gather.
    #[test]
    fn entries_of_long_leases_do_not_gather() {
        const PER_SECOND: i64 = 100;
        let cache = LeaseCache::default();
        let ids = crate::domain::IdSource::new();
        let token = LeaseToken::fresh([0; 4]);
        for second in 0..600 {
            let now = Timestamp(1_000_000 + second * 1_000);
            let lease = CachedLease {
                token,
                made: now,
                until: now.0 + 12 * 3_600_000,
                priority: 0,
                dedup: false,
                leaves_tombstone: false,
                deadline: None,
                key: None,
                in_segment: false,
            };
            cache.add((0..PER_SECOND).map(|_| (ids.next(now), lease.clone())), now);
        }
        let entries = cache.0.lock().by_item.len() as i64;
        let live = (EXCLUSIVE + KEEP) / 1_000 * PER_SECOND;
        assert!(entries <= 2 * live + PER_SECOND, "{entries} entries, {live} of them of use");
    }
}
