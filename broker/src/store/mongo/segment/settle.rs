//! Committing items of segments that this broker claimed: their bits are set, or the document is deleted with the last.

use std::collections::{BTreeMap, HashSet};

use futures_util::future::try_join;
use mongodb::bson::{RawArrayBuf, RawDocumentBuf, raw::CString, rawdoc};

use crate::{
    domain::{ItemId, LeaseToken, Outcome},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{oid, oids, token_oid},
                layout::{BY_ID, Group, durable},
            },
            segment::{claim::number_of, document::Bits, lookup},
            server::{
                connect::write,
                error::broken,
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

    /// Deletes the segment if nothing else is left in it.
    fn delete(&self, segment: ItemId) -> Result<RawDocumentBuf> {
        let mut filter = self.filter(segment)?;
        filter.append(mongodb::bson::raw::cstr!("left"), self.count as i32);
        Ok(rawdoc! { "q": filter, "limit": 1, "hint": BY_ID })
    }
}

fn name(field: &str, place: usize) -> Result<CString> {
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
    let (mut updates, mut deletes) = (Vec::new(), RawArrayBuf::new());
    let mut deleted: HashSet<ItemId> = HashSet::new();
    for (segment, part) in &parts {
        if inner.known_segments.leaving(*segment, part.count) {
            deletes.push(part.delete(*segment)?);
            deleted.insert(*segment);
        } else {
            updates.push(part.update(*segment)?);
        }
    }
    let update =
        async { if updates.is_empty() { Ok(0) } else { update(inner, group, updates).await } };
    let delete = async {
        if deleted.is_empty() {
            return Ok(0);
        }
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
        if inner.known_segments.left(*segment, part.count, all && deleted.contains(segment)) {
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
    let mut there: HashSet<ItemId> =
        lookup::items(inner, group, ids()).await?.into_keys().collect();
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

/// Deletes segments in which nothing is left, in the background. What is missed here is found when a lease would have ended.
fn remove_empty(inner: &Inner, group: &Group, segments: Vec<ItemId>) {
    if segments.is_empty() {
        return;
    }
    let delete = rawdoc! {
        "q": { "_id": { "$in": oids(segments) }, "left": 0_i32 }, "limit": 0, "hint": BY_ID,
    };
    let deletes: RawArrayBuf = [delete].into_iter().collect();
    let command = rawdoc! {
        "delete": group.items.name(), "deletes": deletes, "ordered": false, "writeConcern": durable(),
    };
    let db = inner.db.clone();
    inner.tracker.spawn(async move {
        if let Err(error) = write(&db, command).await {
            tracing::debug!(%error, "could not delete empty segments");
        }
    });
}
