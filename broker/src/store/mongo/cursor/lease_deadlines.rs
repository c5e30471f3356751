//! When the leases of a queue end, as far as this broker knows.
//!
//! A scan for lapsed leases is expensive after heavy use: every item that was settled in time leaves a dead index entry
//! where its lease would have ended. So a broker scans when a lease that it knows of ends. For the leases of other
//! brokers it scans now and then, in proportion to what the last scan cost.

use std::time::Duration;

use parking_lot::Mutex;

use crate::{domain::Timestamp, store::mongo::cursor::START};

/// Scans for leases of other brokers take at most one part in this many of the time.
const LOOK_SHARE: u32 = 50;
/// Pause between scans for leases of other brokers while the queue does not run empty.
const BUSY: Duration = Duration::from_secs(1);
/// The clocks of brokers agree to far less than this many milliseconds.
const UNCERTAINTY: i64 = 1_000;

/// The leases of one queue, as far as one broker knows them.
pub(crate) struct LeaseDeadlines(Mutex<State>);

struct State {
    /// No lease known here ends before this time.
    first: i64,
    /// No lease made since the running scan began ends before this time.
    made: i64,
    /// All leases that end before this time have been handled.
    mark: i64,
    looked: Option<Timestamp>,
    cost: Duration,
}

impl State {
    /// `pause` is the shortest time between two scans for leases of other brokers.
    fn is_due(&self, now: Timestamp, pause: Duration) -> bool {
        let Some(looked) = self.looked else { return true };
        let pause = pause.max(self.cost * LOOK_SHARE);
        self.first <= now.0 || now < looked || looked + pause <= now
    }
}

impl LeaseDeadlines {
    pub(crate) fn new() -> Self {
        let (first, made) = (i64::MAX, i64::MAX);
        Self(Mutex::new(State { first, made, mark: START, looked: None, cost: Duration::ZERO }))
    }

    /// Notes that a lease may end at `until`.
    pub(crate) fn expect(&self, until: Timestamp) {
        let mut state = self.0.lock();
        state.first = state.first.min(until.0);
        state.made = state.made.min(until.0);
    }

    /// Returns true if a lease known here has ended, or a scan for others is due.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.0.lock().is_due(now, Duration::ZERO)
    }

    /// Like [`is_due`](Self::is_due) while items wait to be handed out. Leases of other brokers are then scanned for
    /// less often.
    pub(crate) fn is_pressing(&self, now: Timestamp) -> bool {
        self.0.lock().is_due(now, BUSY)
    }

    /// Returns when the first lease ends, as far as known.
    pub(crate) fn first(&self) -> Option<Timestamp> {
        let first = self.0.lock().first;
        (first != i64::MAX).then_some(Timestamp(first))
    }

    /// Makes the next scan start at the beginning.
    pub(crate) fn forget(&self) {
        let mut state = self.0.lock();
        (state.mark, state.looked) = (START, None);
    }

    pub(crate) fn begin(&self) -> i64 {
        let mut state = self.0.lock();
        state.made = i64::MAX;
        state.mark
    }

    pub(crate) fn seen(&self, first: Option<Timestamp>, now: Timestamp, cost: Duration) {
        let mut state = self.0.lock();
        let first = first.map_or(i64::MAX, |first| first.0);
        state.first = first.min(state.made);
        state.mark = first.min(now.0) - UNCERTAINTY;
        state.looked = Some(now);
        state.cost = cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_made_during_a_scan_is_not_forgotten() {
        let lease_deadlines = LeaseDeadlines::new();
        assert!(lease_deadlines.is_due(Timestamp(0)), "nothing is known yet");
        let _ = lease_deadlines.begin();
        lease_deadlines.expect(Timestamp(5_000));
        lease_deadlines.seen(Some(Timestamp(9_000)), Timestamp(1_000), Duration::from_millis(2));
        assert_eq!(lease_deadlines.first(), Some(Timestamp(5_000)));
        assert!(!lease_deadlines.is_due(Timestamp(1_099)));
        assert!(lease_deadlines.is_due(Timestamp(1_100)), "other brokers may have made leases");
        assert!(!lease_deadlines.is_pressing(Timestamp(1_999)), "leases of other brokers can wait");
        assert!(lease_deadlines.is_pressing(Timestamp(2_000)));
        let _ = lease_deadlines.begin();
        lease_deadlines.seen(Some(Timestamp(9_000)), Timestamp(1_200), Duration::from_mins(1));
        assert_eq!(lease_deadlines.first(), Some(Timestamp(9_000)));
        assert!(!lease_deadlines.is_due(Timestamp(8_999)));
        assert!(lease_deadlines.is_due(Timestamp(9_000)));
        assert!(lease_deadlines.is_due(Timestamp(1_100)), "the clock was set back");
        assert_eq!(lease_deadlines.begin(), 200);
        lease_deadlines.forget();
        assert_eq!(lease_deadlines.begin(), START);
    }
}
