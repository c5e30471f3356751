//! Finds the head of a queue: among prefetched items, from the watermarks, or from the start.

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

/// Limit of items of one find.
pub(crate) const MAX_FIND: usize = 1_000;

/// How much of its range a scan has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The whole range.
    All,
    /// The first part. There may be more items behind it.
    Cut,
    /// None: the items were prefetched by an earlier scan. Nothing new is known of any priority.
    Prefetch,
}

/// The result of a scan.
pub(crate) struct Found {
    pub(crate) items: Vec<Stored>,
    pub(crate) extent: Extent,
    /// The range of the scan.
    look: Scan,
    /// The time of the scan.
    pub(crate) now: Timestamp,
}

/// The queue to scan.
pub(crate) struct Place<'a> {
    pub(crate) inner: &'a Arc<Inner>,
    pub(crate) group: &'a Arc<Group>,
    pub(crate) cursor: &'a Arc<QueueCursor>,
    pub(crate) queue: &'a Arc<Queue>,
}

impl Place<'_> {
    /// Finds up to `wanted` items, or more to prefetch. A sweep starts at the start instead of the watermarks.
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
        // From here on the cursor notes items that get ahead of those to be found.
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

    /// Returns items whose leases have ended to the ready ones. True if there were any.
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
    /// Returns the priority and time of each item.
    pub(crate) fn places(&self) -> Vec<(i32, i64)> {
        self.items.iter().map(|item| (item.priority, item.when)).collect()
    }

    /// Returns where the next scan of each priority may start, if `items` are the priorities and times of the items
    /// found, and `left` those of the items that stay at the head.
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
                    // The scan was cut before it reached this priority.
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

/// Returns the command that finds the head. Its filter consists only of bounds of the hand-out index.
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
        "batchSize": limit as i64 + 1, // larger than `limit`, so that the server closes the cursor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::PrioritySet;

    #[test]
    fn a_priority_that_a_scan_did_not_reach_keeps_its_watermark() {
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
        // Cut in priority 5: the priorities above are known, priority 5 up to the last item, those below not at all.
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
