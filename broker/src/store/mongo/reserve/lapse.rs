//! Leases that have ended. A reserved item stands behind all waiting items, at the end of its lease. When the lease has
//! ended, the next reserve returns the item to the ready ones; its eligible time is the end of the lease. The lock
//! stays on the item: until the item is reserved again, the old receipt may settle it.

use std::time::Instant;

use mongodb::bson::{doc, rawdoc};

use crate::{
    domain::{PrioritySet, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::{START, watermarks::QueueCursor},
            priorities,
            schema::layout::{BLOCKED, Group, HANDOUT, LEASED, leased, millis},
            segment::{detach::detach_lapsed, lookup},
            server::statement::{Update, statement_by, update},
        },
    },
};

/// Limit of rounds of one reclaim: more leases may lapse during a round.
const ROUNDS: usize = 4;
/// Approximate limit of the items that one step returns, per priority. The limit is not below that of a find, so that
/// no item is overtaken while it waits to be returned. It is not higher, because a reserve waits for the step, and a
/// write that takes seconds counts as lost.
const STEP: i64 = 2_000;

/// The reserved items of a queue.
pub(crate) struct Leases<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) group: &'a Group,
    pub(crate) cursor: &'a QueueCursor,
    pub(crate) queue: &'a QueueName,
    /// The priorities that may have reserved items.
    pub(crate) used: PrioritySet,
}

impl Leases<'_> {
    /// Returns when the first lease ends, from memory, or from the index if a scan is due.
    pub(crate) async fn first(&self, now: Timestamp) -> Result<Option<Timestamp>> {
        if self.cursor.lease_deadlines.is_due(now) {
            self.look(now).await?;
        }
        Ok(self.cursor.lease_deadlines.first())
    }

    /// Returns the items whose leases have ended to the ready ones. True if there were any.
    pub(crate) async fn reclaim(&self, now: Timestamp) -> Result<bool> {
        let mut any = false;
        for _ in 0..ROUNDS {
            match self.look(now).await? {
                Some(first) if first <= now => {
                    any = true;
                    // Then they stand among the others whose leases have ended.
                    let later = detach_lapsed(self.inner, self.group, self.queue, now).await?;
                    let until = later.map_or(now, |later| Timestamp(later.0 - 1));
                    if !self.restore(first, until).await? {
                        break; // the next scan goes on
                    }
                }
                _ => break,
            }
        }
        Ok(any)
    }

    /// Reads from the index when the first lease ends or has ended.
    async fn look(&self, now: Timestamp) -> Result<Option<Timestamp>> {
        if self.used.is_empty() {
            return Ok(None);
        }
        let begun = Instant::now();
        let from = self.cursor.lease_deadlines.begin();
        let name = self.group.items.name();
        let range = (LEASED + from.max(START), BLOCKED);
        // Segments first, so that what is detached between the two reads is found by the second.
        let segments = lookup::first_lapse(self.inner, self.group, self.queue).await?;
        let items =
            priorities::first_between(self.inner, name, self.queue, self.used, range).await?;
        let first = items.map(|when| Timestamp(when - LEASED)).into_iter().chain(segments).min();
        self.cursor.lease_deadlines.seen(first, now, begun.elapsed());
        Ok(first)
    }

    /// Returns one step of the items whose leases ended from `first` to `now`. True if that was all.
    async fn restore(&self, first: Timestamp, now: Timestamp) -> Result<bool> {
        let name = self.group.items.name();
        let range = (LEASED + first.0, LEASED + now.0 + 1);
        let cuts =
            priorities::nth_between(self.inner, name, self.queue, self.used, range, STEP).await?;
        let mut statements = Vec::new();
        for level in self.used.iter() {
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
        // Rewinds even if the outcome is unknown: the items may be ready, and a cursor must not skip them.
        self.cursor.rewind(self.used, first.0);
        done?;
        Ok(cuts.is_empty())
    }
}
