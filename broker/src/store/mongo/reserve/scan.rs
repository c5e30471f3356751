//! Finds the head of a queue: among prefetched items, from the watermarks, or from the start.

use std::{collections::HashMap, sync::Arc, time::Instant};

use futures_util::future::try_join;
use mongodb::bson::{RawArrayBuf, RawDocument, RawDocumentBuf, raw::cstr, rawdoc};

use crate::{
    domain::{ItemId, PrioritySet, Queue, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::{
                START,
                prefetch::End,
                watermarks::{QueueCursor, Scan, Scanned},
            },
            priorities,
            reserve::lapse::Leases,
            schema::{
                item::{Stored, oid},
                layout::{Group, HANDOUT, date, millis},
            },
            segment::{
                claim::{Opened, is_too_few, open},
                detach::detach_ready,
                document::Segment,
            },
            server::{connect::read_first, error::unavailable},
        },
    },
};

/// Limit of items of one find.
pub(crate) const MAX_FIND: usize = 1_000;

/// So many segments at most are taken apart by one look.
const MAX_DETACHED: usize = 16;

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
    pub(crate) items: Vec<Box<Stored>>,
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
            if !items.is_empty() && !items.iter().any(|item| claims_too_few(item, wanted)) {
                return Ok(Found { items, extent: Extent::Prefetch, look, now });
            }
        }
        let limit = cursor.limit(wanted).min(MAX_FIND);
        let (mut found, new_levels) = try_join(self.find(look, (wanted, limit), now), async {
            Ok(look.reread
                && cursor.add_used(priorities::recorded(self.inner, &self.queue.name).await?))
        })
        .await?;
        if new_levels {
            cursor.lease_deadlines.forget(); // the last look for lapsed leases left these out
            found = self.find(cursor.look(), (wanted, limit), now).await?;
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

    /// Finds up to `limit` items, of which so many are `wanted` now.
    async fn find(
        &self,
        look: Scan,
        (wanted, limit): (usize, usize),
        now: Timestamp,
    ) -> Result<Found> {
        let mut is_repeated = false;
        for _ in 0..MAX_DETACHED {
            let mut found = Found { items: Vec::new(), extent: Extent::All, look, now };
            if look.used.is_empty() {
                return Ok(found);
            }
            let each = self.cursor.items_per_document();
            let documents = limit.div_ceil(each).min(limit);
            // Whoever wants the items of whole segments reads them along. Otherwise a second find reads no more of them
            // than is wanted.
            let contents = each > 1 && wanted >= each;
            let name = self.group.items.name();
            let filter = ready(&self.queue.name, &look, now);
            let command = find_command(name, filter, documents, contents);
            let read = |document: &RawDocument| Head::read(document, contents);
            let answer = read_first(&self.inner.db, &command, read).await?;
            if answer.values.len() == documents || answer.cut {
                found.extent = Extent::Cut;
            }
            match self.open(answer.values, (wanted, limit), &mut found).await? {
                // Once more if the documents hold far fewer items than those of the last find did.
                None if found.extent == Extent::Cut
                    && documents < limit
                    && found.items.len() < wanted / 2
                    && !is_repeated =>
                {
                    is_repeated = true;
                }
                None => return Ok(found),
                // Then once more: its items are documents of their own.
                Some(segment) => detach_ready(self.inner, self.group, &[segment]).await?,
            }
        }
        Err(unavailable("others were faster again and again"))
    }

    /// Reads up to `wanted` items behind `end` for the next reserve, and prefetches them. A failure changes nothing.
    pub(crate) async fn look_ahead(&self, found: &Found, end: End, wanted: usize) {
        let documents = wanted.div_ceil(self.cursor.items_per_document()).min(wanted);
        let filter = behind(&self.queue.name, end, found.now);
        let command = find_command(self.group.items.name(), filter, documents, true);
        let read = |document: &RawDocument| Head::read(document, true);
        let Ok(answer) = read_first(&self.inner.db, &command, read).await else { return };
        let mut ahead = Found { items: Vec::new(), extent: Extent::All, ..*found };
        if answer.values.len() == documents || answer.cut {
            ahead.extent = Extent::Cut;
        }
        if let Ok(None) = self.open(answer.values, (wanted, wanted), &mut ahead).await {
            self.cursor.append(end, ahead.items, ahead.extent == Extent::Cut);
        }
    }

    /// Reads the items of the segments among the documents, as many as are asked for. A segment is returned of which
    /// so few are wanted that its items had better be documents of their own.
    async fn open(
        &self,
        mut documents: Vec<Head>,
        (wanted, limit): (usize, usize),
        found: &mut Found,
    ) -> Result<Option<ItemId>> {
        let (mut items, mut used, mut segments) = (0, 0, Vec::new());
        for document in &documents {
            if items >= limit {
                break;
            }
            items += match document {
                Head::Item(_) => 1,
                Head::Segment(segment, opened) => {
                    let few = wanted.saturating_sub(items).max(1);
                    let claims = segment.runs.len();
                    if few < segment.ready && is_too_few(few, segment.n, claims) {
                        if items == 0 {
                            return Ok(Some(segment.id));
                        }
                        break; // what is before it comes first
                    }
                    if opened.is_none() {
                        segments.push(segment.id);
                    }
                    segment.ready
                }
            };
            used += 1;
        }
        if used < documents.len() {
            documents.truncate(used);
            found.extent = Extent::Cut;
        }
        let mut opened = if segments.is_empty() {
            HashMap::new()
        } else {
            open(self.inner, self.group, segments, limit).await?
        };
        for document in documents {
            match document {
                Head::Item(item) => found.items.push(item),
                Head::Segment(segment, read_along) => {
                    let Some(opened) = read_along.or_else(|| opened.remove(&segment.id)) else {
                        continue; // others have claimed it meanwhile
                    };
                    found.items.extend(opened.items);
                    if !opened.whole {
                        found.extent = Extent::Cut;
                        break;
                    }
                }
            }
        }
        self.cursor.found_in(items, used);
        Ok(None)
    }
}

/// A document at the head of a queue.
enum Head {
    Item(Box<Stored>),
    /// A segment, with its ready items if they were read along.
    Segment(Segment, Option<Opened>),
}

impl Head {
    fn read(document: &RawDocument, contents: bool) -> Result<Self> {
        if !Segment::is_one(document) {
            return Ok(Self::Item(Box::new(Stored::read(document)?)));
        }
        let segment = Segment::read(document)?;
        let opened = if contents { Some(Opened::read(&segment, document, 0)?) } else { None };
        Ok(Self::Segment(segment, opened))
    }
}

/// True if the item is in a segment of which more than so few must be claimed.
fn claims_too_few(item: &Stored, wanted: usize) -> bool {
    item.segment.as_ref().is_some_and(|seen| {
        let front = seen.front();
        wanted < front.ready && is_too_few(wanted, seen.n, front.runs)
    })
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

/// Returns the filter of a scan: bounds of the hand-out index, and nothing else.
pub(crate) fn ready(queue: &QueueName, look: &Scan, now: Timestamp) -> RawDocumentBuf {
    let range = |level: i32| {
        rawdoc! {
            "q": queue.as_str(),
            "priority": level,
            "when": { "$gte": millis(look.marks[level as usize]), "$lte": date(now) },
        }
    };
    let mut used = look.used.iter();
    if let (Some(only), None) = (used.next(), used.next()) {
        range(only)
    } else {
        rawdoc! { "$or": look.used.iter().map(range).collect::<RawArrayBuf>() }
    }
}

/// Returns the filter of what is ready behind an item.
pub(crate) fn behind(queue: &QueueName, end: End, now: Timestamp) -> RawDocumentBuf {
    let range = |when: RawDocumentBuf| {
        rawdoc! { "q": queue.as_str(), "priority": end.priority, "when": when }
    };
    let mut same_time = range(rawdoc! { "$eq": millis(end.when) });
    same_time.append(cstr!("_id"), rawdoc! { "$gt": oid(end.document) });
    let later = range(rawdoc! { "$gt": millis(end.when), "$lte": date(now) });
    rawdoc! { "$or": [same_time, later] }
}

/// Returns the command that finds the first documents of a range of the hand-out index, with what the items of
/// segments are if `contents` is true.
pub(crate) fn find_command(
    collection: &str,
    filter: RawDocumentBuf,
    limit: usize,
    contents: bool,
) -> RawDocumentBuf {
    rawdoc! {
        "find": collection,
        "filter": filter,
        "sort": { "priority": -1, "when": 1, "_id": 1 },
        "projection": if contents { rawdoc! {} } else { rawdoc! { "items": 0 } },
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
