//! Committing items of segments that this broker claimed: their bits are set, or the document is deleted with the last.

use std::collections::BTreeMap;

use futures_util::future::try_join;
use mongodb::bson::{
    RawArrayBuf, RawDocumentBuf,
    raw::{CString, cstr},
    rawdoc,
};

use crate::{
    domain::{IdSet, ItemId, LeaseToken, Outcome, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{oid, oids, token_oid},
                layout::{BY_ID, Group, date, durable},
            },
            segment::{
                claim::number_of,
                document::{Bits, burial, burial_of_many},
                known::Leaving,
                lookup,
            },
            server::{
                connect::write,
                error::broken,
                places::Db,
                statement::{Update, statement, update},
            },
            settle::receipts::{Ending, end_exactly, look},
        },
    },
};

/// Items of one segment that are committed together.
#[derive(Default)]
struct Part {
    count: usize,
    items: Bits,
    runs: Vec<(LeaseToken, Bits)>,
}

impl Part {
    fn add(&mut self, at: usize, lock: LeaseToken) {
        self.count += 1;
        self.items.set(at);
        let place = self.runs.iter().position(|(token, _)| *token == lock).unwrap_or_else(|| {
            self.runs.push((lock, Bits::default()));
            self.runs.len() - 1
        });
        self.runs[place].1.set(at);
    }

    /// Matches the segment if all of the items are still in it and under their leases.
    fn filter(&self, segment: ItemId) -> Result<RawDocumentBuf> {
        let mut runs = RawArrayBuf::new();
        for (lock, items) in &self.runs {
            let mut run = rawdoc! { "lock": token_oid(*lock) };
            for (place, word) in items.words() {
                run.append(name("items", place)?, rawdoc! { "$bitsAllSet": word });
            }
            runs.push(rawdoc! { "runs": { "$elemMatch": run } });
        }
        let mut filter = rawdoc! { "_id": oid(segment), "$and": runs };
        for (place, word) in self.items.words() {
            filter.append(name("done", place)?, rawdoc! { "$bitsAllClear": word });
        }
        Ok(filter)
    }

    fn update(&self, segment: ItemId) -> Result<RawDocumentBuf> {
        let mut bits = RawDocumentBuf::new();
        for (place, word) in self.items.words() {
            bits.append(name("done", place)?, rawdoc! { "or": word });
        }
        let change = rawdoc! { "$bit": bits, "$inc": { "left": -(self.count as i32) } };
        Ok(statement(self.filter(segment)?, Update::Operators(change)))
    }

    /// Matches the segment if nothing else is left in it.
    fn filter_of_last(&self, segment: ItemId) -> Result<RawDocumentBuf> {
        let mut filter = self.filter(segment)?;
        filter.append(cstr!("left"), self.count as i32);
        Ok(filter)
    }

    fn delete(&self, segment: ItemId) -> Result<RawDocumentBuf> {
        Ok(rawdoc! { "q": self.filter_of_last(segment)?, "limit": 1, "hint": BY_ID })
    }

    fn bury(&self, segment: ItemId, window: i64) -> Result<RawDocumentBuf> {
        Ok(statement(self.filter_of_last(segment)?, Update::operators(&burial(window))?))
    }
}

/// Segments of so many items each, all of which are committed together.
#[derive(Default)]
struct Wholes {
    segments: Vec<ItemId>,
    tokens: IdSet<LeaseToken>,
}

impl Wholes {
    fn add(&mut self, segment: ItemId, part: &Part) {
        self.segments.push(segment);
        self.tokens.extend(part.runs.iter().map(|(token, _)| *token));
    }

    /// Deletes the segments from which no item has left. If none has, nobody but this broker has touched an item, and
    /// each is still under its lease.
    fn delete(&self, n: usize) -> RawDocumentBuf {
        let tokens: RawArrayBuf = self.tokens.iter().copied().map(token_oid).collect();
        rawdoc! {
            "q": {
                "_id": { "$in": oids(self.segments.iter().copied()) },
                "left": n as i32,
                "runs.lock": { "$in": tokens },
            },
            "limit": 0,
            "hint": BY_ID,
        }
    }
}

/// Returns the name of a word of a set.
pub(super) fn name(field: &str, place: usize) -> Result<CString> {
    CString::try_from(format!("{field}.{place}")).map_err(|e| broken(e.to_string()))
}

/// Commits items that nobody but this broker can have touched. No receipt may be given twice.
pub(crate) async fn commit(
    inner: &Inner,
    group: &Group,
    endings: &[Ending],
) -> Result<Vec<Outcome>> {
    if endings.is_empty() {
        return Ok(Vec::new());
    }
    let mut parts: BTreeMap<ItemId, Part> = BTreeMap::new();
    for ending in endings {
        let item = ending.receipt.item;
        parts.entry(item.block().0).or_default().add(number_of(item), ending.receipt.token);
    }
    let now = inner.now();
    let (mut updates, mut deletes) = (Vec::new(), Vec::new());
    let mut over: IdSet<ItemId> = IdSet::default();
    // By the number of their items. Most segments leave whole: one statement deletes all of a size.
    let mut wholes: BTreeMap<usize, Wholes> = BTreeMap::new();
    for (segment, part) in &parts {
        let how = inner.known_segments.leaving(*segment, part.count, now);
        match how {
            Leaving::Some => updates.push(part.update(*segment)?),
            Leaving::Whole => wholes.entry(part.count).or_default().add(*segment, part),
            Leaving::All => deletes.push(part.delete(*segment)?),
            Leaving::AllRemembered(window) => updates.push(part.bury(*segment, window)?),
        }
        if how != Leaving::Some {
            over.insert(*segment);
        }
    }
    deletes.extend(wholes.iter().map(|(n, wholes)| wholes.delete(*n)));
    let update =
        async { if updates.is_empty() { Ok(0) } else { update(inner, group, updates).await } };
    let delete = async {
        if deletes.is_empty() {
            return Ok(0);
        }
        let deletes: RawArrayBuf = deletes.into_iter().collect();
        let command = rawdoc! {
            "delete": group.items.name(), "deletes": deletes, "ordered": false,
            "writeConcern": durable(),
        };
        write(&inner.db, command).await.map(|written| written.n)
    };
    let changed = try_join(update, delete).await;
    let all =
        matches!(&changed, Ok((updated, deleted)) if (updated + deleted) as usize == parts.len());
    let mut empty = Vec::new();
    for (segment, part) in &parts {
        if inner.known_segments.left(*segment, part.count, all && over.contains(segment)) {
            empty.push(*segment);
        }
    }
    remove_empty(inner, group, empty);
    changed?;
    if all {
        return Ok(vec![Outcome::Ok; endings.len()]);
    }
    one_by_one(inner, group, endings).await
}

/// Finds out what became of each item after not all statements matched: one took effect and its answer was lost, or items
/// were detached meanwhile.
async fn one_by_one(inner: &Inner, group: &Group, endings: &[Ending]) -> Result<Vec<Outcome>> {
    let ids = || endings.iter().map(|ending| ending.receipt.item);
    // Whatever leaves its segment between the two reads is found by the second.
    let mut there: IdSet<ItemId> = lookup::items(inner, group, ids()).await?.into_keys().collect();
    there.extend(look(inner, group, ids()).await?.into_keys());
    let open: Vec<Ending> =
        endings.iter().filter(|ending| there.contains(&ending.receipt.item)).cloned().collect();
    let mut ended = end_exactly(inner, group, &open).await?.into_iter();
    let outcome = |ending: &Ending| {
        // What is gone this call has committed: anybody else would have left a tombstone.
        let open = there.contains(&ending.receipt.item);
        open.then(|| ended.next()).flatten().unwrap_or(Outcome::Ok)
    };
    Ok(endings.iter().map(outcome).collect())
}

/// Deletes segments in which nothing is left, in the background. What is missed here is found when a lease would have
/// ended.
fn remove_empty(inner: &Inner, group: &Group, segments: Vec<ItemId>) {
    if segments.is_empty() {
        return;
    }
    let (db, items, now) = (inner.db.clone(), group.items.name().to_owned(), inner.now());
    inner.tracker.spawn(async move {
        if let Err(error) = remove(&db, &items, segments, now).await {
            tracing::debug!(%error, "could not delete empty segments");
        }
    });
}

async fn remove(db: &Db, items: &str, segments: Vec<ItemId>, now: Timestamp) -> Result<()> {
    let mut empty = rawdoc! { "_id": { "$in": oids(segments) }, "left": 0_i32 };
    let mut remembered = empty.clone();
    remembered.append(cstr!("window"), rawdoc! { "$gt": date(now) });
    empty.append(cstr!("window"), rawdoc! { "$not": { "$gt": date(now) } });
    let bury = rawdoc! {
        "update": items,
        "updates": [statement(remembered, Update::pipeline(&burial_of_many())?)],
        "writeConcern": durable(),
    };
    write(db, bury).await?;
    let delete = rawdoc! { "q": empty, "limit": 0, "hint": BY_ID };
    let delete = rawdoc! { "delete": items, "deletes": [delete], "writeConcern": durable() };
    write(db, delete).await?;
    Ok(())
}
