//! Extends leases, and finds out which of them still hold.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{
    DateTime, RawArrayBuf, doc,
    raw::{CStr, cstr},
    rawdoc,
};

use crate::{
    domain::{GroupName, ItemId, LeaseToken, Outcome, Timestamp},
    store::{
        Extension, Reservation, Result,
        mongo::{
            Inner,
            schema::{
                layout::{date, leased},
                settled::{held_filter, witness_end},
            },
            segment::{self, detach::detach_held},
            server::statement::{Update, statement, update},
            settle::receipts::{look, stale},
        },
    },
};

/// Returns the positions of a call's items by group.
pub(crate) fn by_group<'a>(
    groups: impl Iterator<Item = &'a GroupName>,
) -> HashMap<&'a GroupName, Vec<usize>> {
    let mut places: HashMap<&GroupName, Vec<usize>> = HashMap::new();
    for (at, group) in groups.enumerate() {
        places.entry(group).or_default().push(at);
    }
    places
}

/// Sets the ends of leases and returns the outcome of each.
pub(crate) async fn extend(inner: &Arc<Inner>, items: Vec<Extension>) -> Result<Vec<Outcome>> {
    let mut outcomes = vec![Outcome::Gone; items.len()];
    let asked = inner.now();
    for (name, mut places) in by_group(items.iter().map(|item| &item.held.receipt.group)) {
        let group = inner.group(name).await?;
        for &at in &places {
            let Extension { held: Reservation { receipt, .. }, until, .. } = &items[at];
            inner.lease_cache.extend(receipt, *until, true);
        }
        let wanted = places.iter().map(|at| &items[*at]);
        let extended = segment::extend::extend(inner, &group, wanted, asked).await?;
        places.retain(|at| {
            let Extension { held: Reservation { queue, receipt }, until, .. } = &items[*at];
            let in_segment = extended.contains(&(receipt.item, receipt.token));
            if in_segment {
                outcomes[*at] = Outcome::Ok;
                inner.lease_cache.extend(receipt, *until, false);
                inner.cursor(&queue.name).lease_deadlines.expect(*until);
            }
            !in_segment
        });
        if places.is_empty() {
            continue;
        }
        let mut lots: HashMap<(LeaseToken, Timestamp, bool), Vec<usize>> = HashMap::new();
        for &at in &places {
            let Extension { held: Reservation { receipt, .. }, until, is_renewal } = &items[at];
            lots.entry((receipt.token, *until, *is_renewal)).or_default().push(at);
        }
        let held = places.iter().map(|at| &items[*at].held.receipt);
        detach_held(inner, &group, held.map(|receipt| (receipt.item, receipt.token))).await?;
        let now = inner.now();
        let mut statements = Vec::new();
        for ((token, until, is_renewal), places) in &lots {
            let ids = places.iter().map(|at| items[*at].held.receipt.item);
            let mut filter = held_filter(ids, *token, now);
            let end = (cstr!("when"), leased(*until));
            filter.append(cstr!("$or"), not_overtaken(asked, *is_renewal, end));
            let is_own = token.broker() == inner.broker;
            let times = (asked, now);
            statements.push(statement(filter, change(*until, *is_renewal, is_own, times)?));
        }
        let distinct: std::collections::HashSet<(ItemId, LeaseToken)> = places
            .iter()
            .map(|at| &items[*at].held.receipt)
            .map(|of| (of.item, of.token))
            .collect();
        let n = update(inner, &group, statements).await?;
        let found = if n == places.len() as u64 && distinct.len() == places.len() {
            None
        } else {
            Some(look(inner, &group, places.iter().map(|at| items[*at].held.receipt.item)).await?)
        };
        for at in places {
            let Extension { held: Reservation { queue, receipt }, until, .. } = &items[at];
            let mut until = *until;
            let stored = found.as_ref().map(|found| found.get(&receipt.item));
            // Of two extensions the one that was asked for last holds.
            if let Some(Some(stored)) = stored
                && stored.leased
            {
                until = Timestamp(stored.when);
            }
            outcomes[at] = match stored {
                None => Outcome::Ok,
                Some(Some(stored)) if stored.is_held_by(receipt.token, now) => Outcome::Ok,
                Some(stored) => stale(stored, now),
            };
            if outcomes[at] == Outcome::Ok {
                inner.lease_cache.extend(receipt, until, false);
                inner.cursor(&queue.name).lease_deadlines.expect(until);
            }
        }
    }
    Ok(outcomes)
}

/// Returns what leases must match, one of these, whose ends are to be set because of what was asked for at this time. A repeated command may come
/// late: it must not take back an extension that followed it, nor, when it has taken effect before, a renewal.
pub(crate) fn not_overtaken(
    asked: Timestamp,
    is_renewal: bool,
    (field, end): (&CStr, DateTime),
) -> RawArrayBuf {
    let mut conditions = RawArrayBuf::new();
    if is_renewal {
        // It leaves a later end anyway.
        conditions.push(rawdoc! { "extended": { "$not": { "$gt": date(asked) } } });
    } else {
        conditions.push(rawdoc! { "extended": { "$not": { "$gte": date(asked) } } });
        let mut again = rawdoc! { "extended": date(asked) };
        again.append(field, rawdoc! { "$lte": end });
        conditions.push(again);
    }
    conditions
}

/// Returns the change of items whose lease was made by this broker, or by another one. A renewal leaves a later end, and the time of the last
/// extension: one that was asked for before the renewal and comes after it counts.
fn change(
    until: Timestamp,
    is_renewal: bool,
    is_own: bool,
    (asked, now): (Timestamp, Timestamp),
) -> Result<Update> {
    let end = leased(until);
    if is_own {
        return Update::operators(&if is_renewal {
            doc! { "$max": { "when": end } }
        } else {
            doc! { "$set": { "when": end, "extended": date(asked) } }
        });
    }
    // The broker that made the reservation does not see this change. The tombstone time keeps it from taking the item for
    // one that only itself can have changed.
    let trace = doc! { "$max": ["$trace", witness_end(now)] };
    Update::pipeline(&[doc! { "$set": if is_renewal {
        doc! { "when": { "$max": ["$when", end] }, "trace": trace }
    } else {
        doc! { "when": end, "extended": date(asked), "trace": trace }
    } }])
}

/// Returns for each reservation when its lease ends or has ended, if the reservation holds its item.
pub(crate) async fn lease_ends(
    inner: &Arc<Inner>,
    items: Vec<Reservation>,
) -> Result<Vec<Option<Timestamp>>> {
    let mut ends = vec![None; items.len()];
    for (name, places) in by_group(items.iter().map(|held| &held.receipt.group)) {
        let group = inner.group(name).await?;
        let found = look(inner, &group, places.iter().map(|at| items[*at].receipt.item)).await?;
        let now = inner.now();
        for at in places {
            let receipt = &items[at].receipt;
            let stored = found.get(&receipt.item);
            let held = stored.filter(|stored| stored.is_held_by(receipt.token, now));
            ends[at] = held.map(|stored| Timestamp(stored.when));
            if held.is_none() {
                inner.lease_cache.take(receipt);
            }
        }
    }
    Ok(ends)
}
