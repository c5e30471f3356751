//! Looking at a queue's head: at what was read ahead, from the watermarks, or from the start.

use std::{sync::Arc, time::Instant};

use futures_util::future::try_join;
use mongodb::bson::{RawArrayBuf, RawDocumentBuf, rawdoc};

use crate::{
    domain::{PrioritySet, Queue, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::{
                START,
                watermarks::{QueueCursor, Scan, Scanned},
            },
            priorities,
            reserve::lapse::Leases,
            schema::{
                item::Stored,
                layout::{Group, HANDOUT, date, millis},
            },
            server::connect::read_first,
        },
    },
};

/// Most items of one find.
pub(crate) const MAX_FIND: usize = 1_000;

/// How much was seen of what a look was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of it.
    All,
    /// The first part: there may be more behind it.
    Cut,
    /// What was read ahead by an earlier look: nothing new is known of any level.
    Prefetch,
}

/// What a look brought.
pub(crate) struct Found {
    pub(crate) items: Vec<Stored>,
    pub(crate) extent: Extent,
    /// Where it looked.
    look: Scan,
    /// As of when.
    pub(crate) now: Timestamp,
}

/// Where to look.
pub(crate) struct Place<'a> {
    pub(crate) inner: &'a Arc<Inner>,
    pub(crate) group: &'a Arc<Group>,
    pub(crate) cursor: &'a Arc<QueueCursor>,
    pub(crate) queue: &'a Arc<Queue>,
}

impl Place<'_> {
    /// Looks for so many items; from the start if it is a sweep.
    pub(crate) async fn look(&self, wanted: usize, sweep: bool) -> Result<Found> {
        let cursor = self.cursor;
        let begun = Instant::now();
        if sweep {
            let before = cursor.priorities_in_use();
            cursor.set_used(self.priorities_in_index().await?, before);
            cursor.lease_deadlines.forget();
        }
        let now = self.inner.now();
        if cursor.lease_deadlines.is_pressing(now) {
            self.reclaim(now).await?;
        }
        // From here on what gets ahead of the items to come is kept apart.
        let mut look = cursor.look();
        if sweep {
            look.marks = [START; 10];
        } else if !look.reread {
            let items = cursor.take_prefetched(wanted);
            if !items.is_empty() {
                return Ok(Found { items, extent: Extent::Prefetch, look, now });
            }
        }
        let limit = cursor.limit(wanted).min(MAX_FIND);
        let (mut found, new_levels) = try_join(self.find(look, limit, now), async {
            Ok(look.reread
                && cursor.add_used(priorities::recorded(self.inner, &self.queue.name).await?))
        })
        .await?;
        if new_levels {
            found = self.find(cursor.look(), limit, now).await?;
        }
        let highest = found.look.used.iter().next();
        let lowest = found.items.last().map(|item| item.priority);
        cursor.found(&found.items, found.extent == Extent::Cut && lowest == highest);
        if sweep {
            cursor.swept(begun.elapsed());
        }
        Ok(found)
    }

    /// Puts items whose leases have ended back among the ready; true if there were any.
    pub(crate) async fn reclaim(&self, now: Timestamp) -> Result<bool> {
        let Self { inner, group, cursor, queue } = *self;
        let used = cursor.priorities_in_use();
        Leases { inner, group, cursor, queue: &queue.name, used }.reclaim(now).await
    }

    async fn priorities_in_index(&self) -> Result<PrioritySet> {
        priorities::in_index(self.inner, self.group.items.name(), &self.queue.name).await
    }

    async fn find(&self, look: Scan, limit: usize, now: Timestamp) -> Result<Found> {
        let mut found = Found { items: Vec::new(), extent: Extent::All, look, now };
        if look.used.is_empty() {
            return Ok(found);
        }
        let name = self.group.items.name();
        let command = find_command(name, &self.queue.name, &look, now, limit);
        let answer = read_first(&self.inner.db, &command, Stored::read).await?;
        found.items = answer.values;
        if found.items.len() == limit || answer.cut {
            found.extent = Extent::Cut;
        }
        Ok(found)
    }
}

impl Found {
    /// The level and time of each item.
    pub(crate) fn places(&self) -> Vec<(i32, i64)> {
        self.items.iter().map(|item| (item.priority, item.when)).collect()
    }

    /// Where the next look of each level may start, of items at these levels and times; `left`: those that
    /// stay at the head.
    pub(crate) fn seen(&self, items: &[(i32, i64)], left: &[(i32, i64)]) -> Vec<Scanned> {
        let lowest = items.last().map(|(level, _)| *level);
        self.look
            .used
            .iter()
            .map(|level| {
                let before = self.look.before[level as usize];
                let first_left = left.iter().find(|(l, _)| *l == level).map(|(_, when)| *when);
                let last = items.iter().rev().find(|(l, _)| *l == level).map(|(_, when)| *when);
                let mark = match (first_left, last, self.extent) {
                    (Some(when), ..) => when,
                    (None, last, Extent::Prefetch) => last.unwrap_or(before),
                    (None, Some(when), Extent::Cut) if lowest == Some(level) => when,
                    // Cut before this level was reached: nothing is known of it.
                    (None, None, Extent::Cut) if lowest.is_some_and(|lowest| level < lowest) => {
                        before
                    }
                    (None, last, _) => {
                        last.unwrap_or(START).max(QueueCursor::mark_of_empty(self.now))
                    }
                };
                Scanned { level, mark }
            })
            .collect()
    }
}

/// The command that finds the head: bounds of the hand-out index alone.
pub(crate) fn find_command(
    collection: &str,
    queue: &QueueName,
    look: &Scan,
    now: Timestamp,
    limit: usize,
) -> RawDocumentBuf {
    let range = |level: i32| {
        rawdoc! {
            "q": queue.as_str(),
            "priority": level,
            "when": { "$gte": millis(look.marks[level as usize]), "$lte": date(now) },
        }
    };
    let mut used = look.used.iter();
    let filter = if let (Some(only), None) = (used.next(), used.next()) {
        range(only)
    } else {
        rawdoc! { "$or": look.used.iter().map(range).collect::<RawArrayBuf>() }
    };
    rawdoc! {
        "find": collection,
        "filter": filter,
        "sort": { "priority": -1, "when": 1, "_id": 1 },
        "hint": HANDOUT,
        "limit": limit as i64,
        "batchSize": limit as i64 + 1, // the server then knows the end when it has reached the limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::PrioritySet;

    #[test]
    fn a_level_that_a_sweep_did_not_reach_keeps_its_mark() {
        let look = Scan {
            used: PrioritySet::of(9) | PrioritySet::of(5) | PrioritySet::of(0),
            marks: [START; 10],
            before: [500; 10],
            reread: false,
        };
        let now = Timestamp(10_000);
        let seen = |items: &[(i32, i64)], left: &[(i32, i64)], extent| {
            Found { items: Vec::new(), extent, look, now }.seen(items, left)
        };
        let mark = |seen: &[Scanned], level| seen.iter().find(|s| s.level == level).unwrap().mark;
        // Cut in level 5: above it all is known, in it up to the last item, below it nothing.
        let cut = seen(&[(9, 700), (5, 800)], &[], Extent::Cut);
        assert_eq!(mark(&cut, 9), QueueCursor::mark_of_empty(now));
        assert_eq!(mark(&cut, 5), 800);
        assert_eq!(mark(&cut, 0), 500);
        let whole = seen(&[(9, 700), (5, 800)], &[(5, 800)], Extent::All);
        assert_eq!(mark(&whole, 5), 800);
        assert_eq!(mark(&whole, 0), QueueCursor::mark_of_empty(now));
        let prefetch = seen(&[(9, 700)], &[], Extent::Prefetch);
        assert_eq!(mark(&prefetch, 9), 700);
        assert_eq!(mark(&prefetch, 0), 500);
    }
}
