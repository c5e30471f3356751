//! Statistics: how many items are in which state, and what happened since a queue's creation.

use std::sync::atomic::Ordering;

use mongodb::{
    bson::{Bson, Document, RawDocumentBuf, doc},
    options::ReadConcern,
};

use crate::{
    domain::{Depth, Queue, QueueName, Timestamp, Totals},
    store::{
        Result, StoreError,
        mongo::{
            Inner, priorities,
            schema::layout::{
                BLOCKED, ENDS, Group, HANDOUT, LEASED, PROCESSED, READY_END, TOMBSTONE, date,
                millis,
            },
            segment::{self, count::Count, detach::detach_lapsed},
            server::{
                connect::{count, read_documents},
                error::{broken, failed, integer, written},
                time_limit::{in_time, read_in_time},
            },
        },
    },
};

/// Queues of up to this many items are counted by one command, which reads that many index entries. Per entry this
/// costs three times as much as a count of a range; per queue it costs a third of the seven commands for those counts.
const SHALLOW: i64 = 500;

/// Counts the items of a queue by the hand-out index alone.
pub(crate) async fn depth(inner: &Inner, queue: &Queue) -> Result<Depth> {
    let group = inner.group(&queue.group).await?;
    let counting = Counting { inner, group: &group, queue: &queue.name, now: inner.now() };
    let (depth, lapse) = counting.count().await?;
    if lapse.is_none_or(|lapse| lapse > counting.now) {
        return Ok(depth);
    }
    // Items whose leases have ended count as ready: when they have documents of their own.
    while detach_lapsed(inner, &group, &queue.name, counting.now).await?.is_some() {}
    Ok(counting.count().await?.0)
}

/// The count of one queue.
#[derive(Clone, Copy)]
struct Counting<'a> {
    inner: &'a Inner,
    group: &'a Group,
    queue: &'a QueueName,
    now: Timestamp,
}

impl Counting<'_> {
    /// The depth of the queue, and a time before which no lease ends of those in segments.
    async fn count(&self) -> Result<(Depth, Option<Timestamp>)> {
        // A deep queue stays deep for a while: not to be tried each time.
        let cursor = self.inner.cursor(self.queue);
        if !cursor.deep.load(Ordering::Relaxed)
            && let Some(counted) = self.all_at_once().await?
        {
            return Ok(counted);
        }
        let (mut depth, segments) = tokio::try_join!(
            self.range_by_range(),
            segment::count::count(self.inner, self.group, self.queue),
        )?;
        let documents = depth.unsettled() + depth.processed;
        cursor.deep.store(documents > SHALLOW.cast_unsigned(), Ordering::Relaxed);
        segments.add_to(&mut depth);
        Ok((depth, segments.lapse))
    }

    /// Returns an expression for the state of an item by its `when`. An item whose lease has lapsed is in the state
    /// `lapsed`.
    fn state(&self) -> Document {
        let below = |end: i64, state: &str| {
            doc! {
                "case": { "$lt": ["$when", millis(end)] }, "then": state,
            }
        };
        let only = |when: i64, state: &str| {
            doc! {
                "case": { "$eq": ["$when", millis(when)] }, "then": state,
            }
        };
        doc! { "$switch": { "branches": [
            below(self.now.0 + 1, "ready"), below(READY_END, "delayed"), below(LEASED, "sentinel"),
            below(LEASED + self.now.0 + 1, "lapsed"), below(BLOCKED, "reserved"),
            only(BLOCKED, "blocked"), only(PROCESSED, "processed"),
        ], "default": "sentinel" } }
    }

    /// Returns the depth of a shallow queue by one command, or `None` if the queue is deep.
    async fn all_at_once(&self) -> Result<Option<(Depth, Option<Timestamp>)>> {
        let collection = self.group.items.name();
        let ended = doc! { "coll": collection, "pipeline": [
            { "$match": {
                "q": self.queue.as_str(), "deadline": { "$lte": date(self.now) },
                "when": { "$lt": millis(TOMBSTONE) },
            } },
            { "$group": { "_id": self.state(), "n": { "$sum": 1 } } },
            { "$set": { "ended": true } },
        ] };
        let segments =
            doc! { "coll": collection, "pipeline": segment::count::pipeline(self.queue) };
        let command = doc! {
            "aggregate": collection, "hint": HANDOUT, "cursor": {},
            "pipeline": [
                { "$match": { "q": self.queue.as_str(), "when": { "$lt": millis(TOMBSTONE) } } },
                { "$limit": SHALLOW + 1 },
                { "$group": {
                    "_id": { "state": self.state(), "level": "$priority" },
                    "n": { "$sum": 1 }, "first": { "$min": "$when" },
                } },
                { "$unionWith": ended },
                { "$unionWith": segments },
            ],
        };
        let (mut depth, mut all, mut any_ended) = (Depth::default(), 0, false);
        let mut ready: Vec<(i64, i64)> = Vec::new(); // negated priorities, and since when
        let mut later: Option<i64> = None;
        let (mut ended, mut counted) = (Vec::new(), Vec::new());
        let mut segments = Count::default();
        for part in read_documents(&self.inner.db, command).await? {
            if part.contains_key("segments") {
                segments = Count::read(&part);
            } else if part.contains_key("ended") {
                ended.push(part);
            } else {
                counted.push(part);
            }
        }
        for part in counted {
            let whole = |name: &str| part.get(name).and_then(integer).unwrap_or_default();
            let Ok(id) = part.get_document("_id") else { continue };
            let state = id.get_str("state").unwrap_or_default();
            let n = whole("n");
            all += n;
            if let Some(count) = place(&mut depth, state) {
                *count += n as u64;
            }
            let first = part.get_datetime("first").map_or(0, |at| at.timestamp_millis());
            let level = id.get("level").and_then(integer).unwrap_or_default();
            match state {
                "ready" => ready.push((-level, first)),
                "lapsed" => ready.push((-level, first - LEASED)),
                "delayed" => later = later.into_iter().chain([first]).min(),
                "reserved" => later = later.into_iter().chain([first - LEASED]).min(),
                _ => {}
            }
        }
        if all > SHALLOW {
            return Ok(None);
        }
        for part in ended {
            let n = part.get("n").and_then(integer).unwrap_or_default() as u64;
            if let Some(count) = place(&mut depth, part.get_str("_id").unwrap_or_default()) {
                *count = count.saturating_sub(n);
                any_ended = true;
            }
        }
        depth.next_eligible = later.map(Timestamp);
        depth.oldest_ready = if any_ended {
            let mut levels: Vec<i32> = ready.iter().map(|(level, _)| -*level as i32).collect();
            levels.sort_unstable_by(|a, b| b.cmp(a));
            levels.dedup();
            self.oldest_ready(levels).await?
        } else {
            ready.into_iter().min().map(|(_, since)| Timestamp(since))
        };
        segments.add_to(&mut depth);
        Ok(Some((depth, segments.lapse)))
    }

    /// Returns the depth of a deep queue, one range of an index at a time, which the server counts quickest.
    async fn range_by_range(&self) -> Result<Depth> {
        let Self { inner, group, queue, now } = *self;
        let name = group.items.name();
        let used = priorities::in_index(inner, name, queue).await?;
        let mut depth = Depth::default();
        for level in used.iter() {
            let count = |from: i64, below: i64| {
                let when = doc! { "$gte": millis(from), "$lt": millis(below) };
                let range = doc! { "q": queue.as_str(), "priority": level, "when": when };
                count(&inner.db, name, range, HANDOUT)
            };
            // The counts run concurrently, so that an item that changes its place meanwhile is seldom missed or counted
            // twice.
            let (ready, lapsed, delayed, reserved, blocked, processed) = tokio::try_join!(
                count(i64::MIN, now.0 + 1),
                count(LEASED, LEASED + now.0 + 1),
                count(now.0 + 1, READY_END),
                count(LEASED + now.0 + 1, BLOCKED),
                count(BLOCKED, BLOCKED + 1),
                count(PROCESSED, PROCESSED + 1),
            )?;
            depth.ready += ready + lapsed;
            depth.delayed += delayed;
            depth.reserved += reserved;
            depth.blocked += blocked;
            depth.processed += processed;
        }
        self.subtract_ended(&mut depth).await?;
        let first = |from: i64, below: i64| async move {
            priorities::first_between(inner, name, queue, used, (from, below)).await
        };
        let (delayed, reserved, oldest_ready) = tokio::try_join!(
            first(now.0 + 1, READY_END),
            first(LEASED + now.0 + 1, BLOCKED),
            self.oldest_ready(used.iter()),
        )?;
        let leased = reserved.map(|when| when - LEASED);
        depth.next_eligible = delayed.into_iter().chain(leased).min().map(Timestamp);
        depth.oldest_ready = oldest_ready;
        Ok(depth)
    }

    /// Subtracts items that have expired and are not removed yet. There are few, because the server removes them every
    /// minute.
    async fn subtract_ended(&self, depth: &mut Depth) -> Result<()> {
        let command = doc! {
            "aggregate": self.group.items.name(), "hint": ENDS, "cursor": {},
            "pipeline": [
                { "$match": { "q": self.queue.as_str(), "deadline": { "$lte": date(self.now) } } },
                { "$group": { "_id": self.state(), "n": { "$sum": 1 } } },
            ],
        };
        for ended in read_documents(&self.inner.db, command).await? {
            let n = ended.get("n").and_then(integer).unwrap_or_default() as u64;
            if let Some(count) = place(depth, ended.get_str("_id").unwrap_or_default()) {
                *count = count.saturating_sub(n);
            }
        }
        Ok(())
    }

    /// Returns since when the first item in hand-out order has been eligible.
    async fn oldest_ready(
        &self,
        levels: impl IntoIterator<Item = i32>,
    ) -> Result<Option<Timestamp>> {
        for level in levels {
            let first = |from: i64, below: i64| async move {
                let command = doc! {
                    "find": self.group.items.name(), "hint": HANDOUT,
                    "filter": {
                        "q": self.queue.as_str(), "priority": level,
                        "when": { "$gte": millis(from), "$lt": millis(below) },
                        "deadline": { "$not": { "$lte": date(self.now) } },
                    },
                    "sort": { "when": 1 }, "projection": { "_id": 0, "when": 1 },
                    "limit": 1, "singleBatch": true,
                };
                let found = read_documents(&self.inner.db, command).await?;
                let when = found.first().and_then(|found| found.get_datetime("when").ok());
                Ok::<_, StoreError>(when.map(|when| when.timestamp_millis()))
            };
            let (ready, lapsed) = tokio::try_join!(
                first(i64::MIN, self.now.0 + 1),
                first(LEASED, LEASED + self.now.0 + 1),
            )?;
            let lapsed = lapsed.map(|when| when - LEASED);
            if let Some(since) = ready.into_iter().chain(lapsed).min() {
                return Ok(Some(Timestamp(since)));
            }
        }
        Ok(None)
    }
}

/// Returns the counter of a state.
fn place<'a>(depth: &'a mut Depth, state: &str) -> Option<&'a mut u64> {
    match state {
        "ready" | "lapsed" => Some(&mut depth.ready),
        "delayed" => Some(&mut depth.delayed),
        "reserved" => Some(&mut depth.reserved),
        "blocked" => Some(&mut depth.blocked),
        "processed" => Some(&mut depth.processed),
        _ => None,
    }
}

/// Start of the ids of totals among the counters.
const TOTALS: &str = "totals/";
/// The end of the range of these ids.
const TOTALS_END: &str = "totals0";

/// Returns the id of a queue's totals among the counters.
pub(crate) fn totals_id(queue: &QueueName) -> String {
    format!("{TOTALS}{queue}")
}

/// Returns the names and values of the fields of the totals.
fn fields(totals: &Totals) -> [(&'static str, u64); 9] {
    [
        ("pushed", totals.pushed),
        ("delivered", totals.delivered),
        ("committed", totals.committed),
        ("rolledBack", totals.rolled_back),
        ("moved", totals.moved),
        ("deadLettered", totals.dead_lettered),
        ("expired", totals.expired),
        ("popped", totals.popped),
        ("discarded", totals.discarded),
    ]
}

/// Adds to the totals of queues, in one command per thousand.
pub(crate) async fn add_totals(inner: &Inner, changes: Vec<(QueueName, Totals)>) -> Result<()> {
    let mut updates = Vec::with_capacity(changes.len());
    for (queue, totals) in &changes {
        let added: Document = fields(totals)
            .into_iter()
            .filter(|(_, n)| *n > 0)
            .map(|(name, n)| (name.to_owned(), Bson::Int64(n as i64)))
            .collect();
        if !added.is_empty() {
            updates.push(doc! {
                "q": { "_id": totals_id(queue) }, "u": { "$inc": added }, "upsert": true,
            });
        }
    }
    for updates in updates.chunks(1_000) {
        let mut command = RawDocumentBuf::try_from(
            &doc! { "update": "counters", "updates": updates.to_vec(), "ordered": false },
        )
        .map_err(|e| broken(e.to_string()))?;
        command.append(
            mongodb::bson::raw::cstr!("writeConcern"),
            crate::store::mongo::schema::layout::durable(),
        );
        // Not repeated if the outcome is unknown: the events would be counted twice.
        let reply = in_time(&inner.db, inner.db.run_raw_command(command)).await.map_err(failed)?;
        written(&reply)?;
    }
    Ok(())
}

/// Returns the totals of a queue: those that no election takes back, because totals never go back.
pub(crate) async fn totals(inner: &Inner, queue: &QueueName) -> Result<Totals> {
    let counters = inner.db.collection::<Document>("counters");
    let id = totals_id(queue);
    let find = || counters.find_one(doc! { "_id": &id }).read_concern(ReadConcern::majority());
    let found = read_in_time(&inner.db, find).await?;
    Ok(found.as_ref().map(read_totals).unwrap_or_default())
}

/// Returns the totals of all queues, read as those of one.
pub(crate) async fn all_totals(inner: &Inner) -> Result<Vec<(QueueName, Totals)>> {
    let named = doc! { "_id": { "$gte": TOTALS, "$lt": TOTALS_END } };
    let mut all = Vec::new();
    let find = doc! {
        "find": "counters", "filter": named, "readConcern": { "level": "majority" },
    };
    for totals in read_documents(&inner.db, find).await? {
        let name = totals.get_str("_id").ok().and_then(|id| id.strip_prefix(TOTALS));
        if let Some(Ok(name)) = name.map(|name| QueueName::parse("_id", name)) {
            all.push((name, read_totals(&totals)));
        }
    }
    Ok(all)
}

fn read_totals(found: &Document) -> Totals {
    let n = |name: &str| found.get(name).and_then(integer).unwrap_or_default() as u64;
    Totals {
        pushed: n("pushed"),
        delivered: n("delivered"),
        committed: n("committed"),
        rolled_back: n("rolledBack"),
        moved: n("moved"),
        dead_lettered: n("deadLettered"),
        expired: n("expired"),
        popped: n("popped"),
        discarded: n("discarded"),
    }
}
