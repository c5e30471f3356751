//! Which reservations this broker made and has not seen settled: what it needs to know of an item
//! to settle it in the cheapest way. Losing an entry costs time, never correctness.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use crate::domain::{ItemId, LeaseToken, Receipt, Timestamp};

/// Entries are dropped this many milliseconds after their lease's end.
const KEEP: i64 = 60_000;
/// A lease this close to its end is settled the exact way: another broker may take the item.
const CLOSE: i64 = 250;

/// This many milliseconds after a reservation was made it is settled the exact way: few consumers take
/// longer, and what other brokers leave behind for its sake need not stay longer.
pub(crate) const EXCLUSIVE: i64 = 120_000;

/// A reservation made here.
#[derive(Debug, Clone)]
pub(crate) struct CachedLease {
    pub(crate) token: LeaseToken,
    /// When it was made.
    pub(crate) made: Timestamp,
    /// End of the lease.
    pub(crate) until: i64,
    pub(crate) priority: i32,
    /// It has a deduplication id: a tombstone must stay.
    pub(crate) dedup: bool,
    /// It has been through another broker's hands: a tombstone must stay.
    pub(crate) leaves_tombstone: bool,
    /// Its end, if it has one.
    pub(crate) deadline: Option<i64>,
    pub(crate) key: Option<Arc<str>>,
}

impl CachedLease {
    /// True if nothing but this broker can have touched the item, nor the server removed it.
    pub(crate) fn is_exclusive(&self, now: Timestamp) -> bool {
        let until = self.until.min(self.made.0 + EXCLUSIVE);
        let end = self.deadline.map_or(until, |deadline| deadline.min(until));
        now.0 + CLOSE < end
    }
}

/// The reservations made here.
#[derive(Default)]
pub(crate) struct LeaseCache(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    by_item: HashMap<ItemId, CachedLease>,
    /// The map is cleared of old entries when it reaches this size.
    clear_at: usize,
}

impl LeaseCache {
    /// Notes reservations.
    pub(crate) fn add(
        &self,
        issues: impl IntoIterator<Item = (ItemId, CachedLease)>,
        now: Timestamp,
    ) {
        let mut entries = self.0.lock();
        entries.by_item.extend(issues);
        if entries.by_item.len() > entries.clear_at {
            entries.by_item.retain(|_, cached_lease| cached_lease.until + KEEP > now.0);
            entries.clear_at = (entries.by_item.len() * 2).max(1_000);
        }
    }

    /// Takes what is known of a reservation that is about to be settled.
    pub(crate) fn take(&self, receipt: &Receipt) -> Option<CachedLease> {
        let mut entries = self.0.lock();
        match entries.by_item.get(&receipt.item) {
            Some(cached_lease) if cached_lease.token == receipt.token => {
                entries.by_item.remove(&receipt.item)
            }
            _ => None,
        }
    }

    /// Notes a lease's new end; `sooner_only` while it is not sure.
    pub(crate) fn extend(&self, receipt: &Receipt, until: Timestamp, sooner_only: bool) {
        if let Some(cached_lease) = self.0.lock().by_item.get_mut(&receipt.item)
            && cached_lease.token == receipt.token
        {
            cached_lease.until =
                if sooner_only { cached_lease.until.min(until.0) } else { until.0 };
        }
    }

    /// Forgets an item.
    pub(crate) fn forget(&self, item: ItemId) {
        self.0.lock().by_item.remove(&item);
    }
}
