//! Leases that have ended. A reserved item stands behind all that wait, by the end of its lease;
//! when that has come, whoever hands out next puts the item back among the ready, its eligible time
//! the end of the lease. The lock stays on it: until it is reserved anew the old receipt may settle it.
//!
//! Looking for such items is dear after heavy use: every item settled in time leaves a dead entry
//! where its lease would have ended. So a broker looks when a lease it knows of ends, and for those
//! of others now and then, in proportion to what the last look cost.

use std::time::{Duration, Instant};

use mongodb::bson::{doc, rawdoc};
use parking_lot::Mutex;

use crate::{
    domain::{QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::watermarks::{Head, LevelSet, START, levels as each_level},
            priorities,
            schema::layout::{BLOCKED, Group, HANDOUT, LEASED, leased, millis},
            settle::receipts::{Update, statement_by, update},
        },
    },
};

/// Looks for other brokers' leases take at most one part in so many of the time.
const LOOK_SHARE: u32 = 50;
/// A queue that does not run empty is looked through for them this seldom.
const BUSY: Duration = Duration::from_secs(1);
/// Brokers' clocks agree to within this many milliseconds, by far.
const UNCERTAINTY: i64 = 1_000;
/// Most rounds of one look: others may lapse while these are put back.
const ROUNDS: usize = 4;
/// About as many items of a level are put back in one go, and no fewer than one find may bring: so none that waits to
/// be put back is passed by others. Whoever looks waits for it, and a write that takes seconds counts as lost.
const STEP: i64 = 2_000;

/// The leases of one queue, as one broker knows them.
pub(crate) struct Lapses(Mutex<State>);

struct State {
    /// No lease ends before this, as far as known here.
    first: i64,
    /// The same of those made since the running look began.
    made: i64,
    /// Leases that end before this have been dealt with.
    mark: i64,
    looked: Option<Timestamp>,
    cost: Duration,
}

impl State {
    /// `pause`: look for others' leases this seldom at most.
    fn is_due(&self, now: Timestamp, pause: Duration) -> bool {
        let Some(looked) = self.looked else { return true };
        let pause = pause.max(self.cost * LOOK_SHARE);
        self.first <= now.0 || now < looked || looked + pause <= now
    }
}

impl Lapses {
    pub(crate) fn new() -> Self {
        let (first, made) = (i64::MAX, i64::MAX);
        Self(Mutex::new(State { first, made, mark: START, looked: None, cost: Duration::ZERO }))
    }

    /// A lease may end then.
    pub(crate) fn expect(&self, until: Timestamp) {
        let mut state = self.0.lock();
        state.first = state.first.min(until.0);
        state.made = state.made.min(until.0);
    }

    /// True if a lease known here has ended, or it is time to look for others.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.0.lock().is_due(now, Duration::ZERO)
    }

    /// The same while items wait to be handed out: others' leases can wait until there are none, within reason.
    pub(crate) fn is_pressing(&self, now: Timestamp) -> bool {
        self.0.lock().is_due(now, BUSY)
    }

    /// When the first lease ends, as far as known.
    pub(crate) fn first(&self) -> Option<Timestamp> {
        let first = self.0.lock().first;
        (first != i64::MAX).then_some(Timestamp(first))
    }

    /// The next look starts at the beginning.
    pub(crate) fn forget(&self) {
        let mut state = self.0.lock();
        (state.mark, state.looked) = (START, None);
    }

    fn begin(&self) -> i64 {
        let mut state = self.0.lock();
        state.made = i64::MAX;
        state.mark
    }

    fn seen(&self, first: Option<Timestamp>, now: Timestamp, cost: Duration) {
        let mut state = self.0.lock();
        let first = first.map_or(i64::MAX, |first| first.0);
        state.first = first.min(state.made);
        state.mark = first.min(now.0) - UNCERTAINTY;
        state.looked = Some(now);
        state.cost = cost;
    }
}

/// The reserved items of a queue.
pub(crate) struct Leases<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) group: &'a Group,
    pub(crate) head: &'a Head,
    pub(crate) queue: &'a QueueName,
    /// The levels in which there may be some.
    pub(crate) used: LevelSet,
}

impl Leases<'_> {
    /// When the first lease ends: what is known, or a look if one is due.
    pub(crate) async fn first(&self, now: Timestamp) -> Result<Option<Timestamp>> {
        if self.head.lapses.is_due(now) {
            self.look(now).await?;
        }
        Ok(self.head.lapses.first())
    }

    /// Puts the items whose leases have ended back among the ready; true if there were any.
    pub(crate) async fn reclaim(&self, now: Timestamp) -> Result<bool> {
        let mut any = false;
        for _ in 0..ROUNDS {
            match self.look(now).await? {
                Some(first) if first <= now => {
                    any = true;
                    if !self.put_back(first, now).await? {
                        break; // the next look goes on
                    }
                }
                _ => break,
            }
        }
        Ok(any)
    }

    /// When the first lease ends or has ended, asked of the index.
    async fn look(&self, now: Timestamp) -> Result<Option<Timestamp>> {
        let begun = Instant::now();
        let from = self.head.lapses.begin();
        let name = self.group.items.name();
        let range = (LEASED + from.max(START), BLOCKED);
        let first =
            priorities::first_between(self.inner, name, self.queue, self.used, range).await?;
        let first = first.map(|when| Timestamp(when - LEASED));
        self.head.lapses.seen(first, now, begun.elapsed());
        Ok(first)
    }

    /// Puts back a step of those whose leases ended in this time; true if that was all.
    async fn put_back(&self, first: Timestamp, now: Timestamp) -> Result<bool> {
        let name = self.group.items.name();
        let range = (LEASED + first.0, LEASED + now.0 + 1);
        let cuts =
            priorities::nth_between(self.inner, name, self.queue, self.used, range, STEP).await?;
        let mut statements = Vec::new();
        for level in each_level(self.used) {
            let cut = cuts.iter().find(|(of, _)| *of == level).map(|(_, when)| millis(*when));
            let filter = rawdoc! {
                "q": self.queue.as_str(),
                "priority": level,
                "when": { "$gte": leased(first), "$lte": cut.unwrap_or_else(|| leased(now)) },
            };
            let end = doc! { "$subtract": ["$when", LEASED] };
            let change = doc! { "$set": { "when": end.clone(), "eligible": end } };
            statements.push(statement_by(HANDOUT, filter, Update::pipeline(&[change])?));
        }
        let done = update(self.inner, self.group, statements).await;
        // Also if the outcome is unknown: what may be there must not be passed over.
        self.head.lower(self.used, first.0);
        done?;
        Ok(cuts.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_made_during_a_look_is_not_forgotten() {
        let lapses = Lapses::new();
        assert!(lapses.is_due(Timestamp(0)), "nothing is known yet");
        let _ = lapses.begin();
        lapses.expect(Timestamp(5_000));
        lapses.seen(Some(Timestamp(9_000)), Timestamp(1_000), Duration::from_millis(2));
        assert_eq!(lapses.first(), Some(Timestamp(5_000)));
        assert!(!lapses.is_due(Timestamp(1_099)));
        assert!(lapses.is_due(Timestamp(1_100)), "others may have made some");
        assert!(!lapses.is_pressing(Timestamp(1_999)), "which can wait");
        assert!(lapses.is_pressing(Timestamp(2_000)));
        let _ = lapses.begin();
        lapses.seen(Some(Timestamp(9_000)), Timestamp(1_200), Duration::from_mins(1));
        assert_eq!(lapses.first(), Some(Timestamp(9_000)));
        assert!(!lapses.is_due(Timestamp(8_999)));
        assert!(lapses.is_due(Timestamp(9_000)));
        assert!(lapses.is_due(Timestamp(1_100)), "the clock was set back");
        assert_eq!(lapses.begin(), 200);
        lapses.forget();
        assert_eq!(lapses.begin(), START);
    }
}
