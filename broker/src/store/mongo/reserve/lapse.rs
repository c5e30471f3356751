//! Leases that have ended. A reserved item stands behind all that wait, by the end of its lease;
//! when that has come, whoever hands out next puts the item back among the ready, its eligible time
//! the end of the lease. The lock stays on it: until it is reserved anew the old receipt may settle it.

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
            server::statement::{Update, statement_by, update},
        },
    },
};

/// Most rounds of one look: others may lapse while these are put back.
const ROUNDS: usize = 4;
/// About as many items of a level are put back in one go, and no fewer than one find may bring: so none that waits to
/// be put back is passed by others. Whoever looks waits for it, and a write that takes seconds counts as lost.
const STEP: i64 = 2_000;

/// The reserved items of a queue.
pub(crate) struct Leases<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) group: &'a Group,
    pub(crate) cursor: &'a QueueCursor,
    pub(crate) queue: &'a QueueName,
    /// The levels in which there may be some.
    pub(crate) used: PrioritySet,
}

impl Leases<'_> {
    /// When the first lease ends: what is known, or a look if one is due.
    pub(crate) async fn first(&self, now: Timestamp) -> Result<Option<Timestamp>> {
        if self.cursor.lease_deadlines.is_due(now) {
            self.look(now).await?;
        }
        Ok(self.cursor.lease_deadlines.first())
    }

    /// Puts the items whose leases have ended back among the ready; true if there were any.
    pub(crate) async fn reclaim(&self, now: Timestamp) -> Result<bool> {
        let mut any = false;
        for _ in 0..ROUNDS {
            match self.look(now).await? {
                Some(first) if first <= now => {
                    any = true;
                    if !self.restore(first, now).await? {
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
        let from = self.cursor.lease_deadlines.begin();
        let name = self.group.items.name();
        let range = (LEASED + from.max(START), BLOCKED);
        let first =
            priorities::first_between(self.inner, name, self.queue, self.used, range).await?;
        let first = first.map(|when| Timestamp(when - LEASED));
        self.cursor.lease_deadlines.seen(first, now, begun.elapsed());
        Ok(first)
    }

    /// Puts back a step of those whose leases ended in this time; true if that was all.
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
        // Also if the outcome is unknown: what may be there must not be passed over.
        self.cursor.rewind(self.used, first.0);
        done?;
        Ok(cuts.is_empty())
    }
}
