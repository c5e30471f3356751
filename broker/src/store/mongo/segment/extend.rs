//! Extending the lease of all items of a claim: the end of the run moves.

use std::collections::{BTreeMap, HashSet};

use mongodb::bson::{RawDocumentBuf, doc, raw::cstr, rawdoc};

use crate::{
    domain::{ItemId, LeaseToken, Timestamp},
    store::{
        Extension, Result,
        mongo::{
            Inner,
            schema::{
                item::{oid, token_oid},
                layout::{Group, date},
            },
            segment::{
                claim::number_of,
                document::{Bits, Segment},
                lookup,
                settle::name,
            },
            server::{
                error::broken,
                statement::{Update, statement, update},
            },
            settle::lease::not_overtaken,
        },
    },
};

/// Items of one segment under one lease.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
struct Part {
    segment: ItemId,
    lock: LeaseToken,
    until: Timestamp,
    is_renewal: bool,
}

/// Moves the ends of leases that this broker made, where all items of a run are among `items`. Returns the items whose
/// leases now end then, or later if they were renewed; the others are as they were, or have left their segments. `asked`
/// is when the extensions were asked for.
pub(crate) async fn extend<'a>(
    inner: &Inner,
    group: &Group,
    items: impl IntoIterator<Item = &'a Extension>,
    asked: Timestamp,
) -> Result<HashSet<(ItemId, LeaseToken)>> {
    let mut parts: BTreeMap<Part, HashSet<usize>> = BTreeMap::new();
    for Extension { held, until, is_renewal } in items {
        let (item, lock) = (held.receipt.item, held.receipt.token);
        // Another broker would not see the change of a lease that it made.
        if item.block().1 > 0 && lock.broker() == inner.broker {
            let segment = item.block().0;
            let part = Part { segment, lock, until: *until, is_renewal: *is_renewal };
            parts.entry(part).or_default().insert(number_of(item));
        }
    }
    if parts.is_empty() {
        return Ok(HashSet::new());
    }
    let segments = parts.keys().map(|part| part.segment);
    let segments = lookup::segments(inner, group, segments).await?;
    let (mut statements, mut extended) = (Vec::new(), HashSet::new());
    for (part, items) in &parts {
        let segment = segments.iter().find(|segment| segment.id == part.segment);
        let Some(held) = segment.and_then(|segment| whole(segment, part.lock, items)) else {
            continue;
        };
        statements.push(extension(part, &held, asked)?);
        extended.extend(held.into_iter().map(|at| (part.segment.at_offset(at + 1), part.lock)));
    }
    if statements.is_empty() {
        return Ok(HashSet::new());
    }
    let count = statements.len() as u64;
    // If not all matched, it is not known which did: then each item is looked at by itself.
    let all = update(inner, group, statements).await? == count;
    Ok(if all { extended } else { HashSet::new() })
}

/// Returns the items that are left of a run, if there are any and all of them are among `items`.
fn whole(segment: &Segment, lock: LeaseToken, items: &HashSet<usize>) -> Option<Vec<usize>> {
    let run = segment.runs.iter().find(|run| run.lock == lock)?;
    let held: Vec<usize> = segment.present().filter(|at| run.items.contains(*at)).collect();
    (!held.is_empty() && held.iter().all(|at| items.contains(at))).then_some(held)
}

/// Matches the segment if none of the items has left it and nothing has overtaken the extension. `lapse` may stay where
/// it is: it is no later than the first end.
fn extension(part: &Part, held: &[usize], asked: Timestamp) -> Result<RawDocumentBuf> {
    let mut bits = Bits::default();
    for at in held {
        bits.set(*at);
    }
    let end = (cstr!("until"), date(part.until));
    let run = rawdoc! {
        "lock": token_oid(part.lock), "$or": not_overtaken(asked, part.is_renewal, end),
    };
    let mut filter = rawdoc! { "_id": oid(part.segment), "runs": { "$elemMatch": run } };
    for (place, word) in bits.words() {
        filter.append(name("done", place)?, rawdoc! { "$bitsAllClear": word });
    }
    let change = if part.is_renewal {
        doc! { "$max": { "runs.$.until": date(part.until) } }
    } else {
        doc! {
            "$set": { "runs.$.until": date(part.until), "runs.$.extended": date(asked) },
            "$min": { "lapse": date(part.until) },
        }
    };
    let change = RawDocumentBuf::try_from(&change).map_err(|e| broken(e.to_string()))?;
    Ok(statement(filter, Update::Operators(change)))
}
