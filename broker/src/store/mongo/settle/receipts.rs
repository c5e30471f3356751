//! Ends reservations with an exact outcome for each.
//!
//! For a batch, the server returns only how many documents matched. So every settle but the cheapest writes a token of
//! its own into `settled`, and a count that is too small is resolved by reading the tokens. The cheapest settle is the
//! plain delete of items that only this broker can have changed (`commit`): what is missing afterwards, this delete has
//! removed. For that to be true, every other broker that ends such a reservation leaves a tombstone that outlives the
//! lease. If it rolls the item back instead, it sets the field `trace`, so that whoever ends the item later leaves a
//! tombstone too.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mongodb::bson::{RawDocumentBuf, oid::ObjectId, rawdoc};

use crate::{
    domain::{IdMap, ItemId, LeaseToken, Outcome, Queue, Receipt, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::lease_cache::CachedLease,
            ordering::{self, OrderKey},
            schema::{
                item::{Stored, oids},
                layout::{BY_ID, Group, PROCESSED, TOMBSTONE},
                settled::{Failure, finish, held_filter, settle_token},
            },
            segment::{
                detach::{commit_held, detach_held},
                lookup,
            },
            server::{
                connect::read,
                statement::{Update, statement, update, update_all},
            },
        },
    },
};

/// A reservation to end.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    pub(crate) receipt: Receipt,
    pub(crate) queue: Arc<Queue>,
    /// What this broker knows of the reservation, if it made it.
    pub(crate) cached_lease: Option<CachedLease>,
    /// Why the item is discarded; `None` for a commit.
    pub(crate) failure: Option<Failure>,
}

/// Reads items by id, without payload and headers. Items that do not exist are left out.
pub(crate) async fn look(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
) -> Result<HashMap<ItemId, Stored>> {
    look_at(inner, group, ids, rawdoc! { "payload": 0, "headers": 0, "items": 0 }).await
}

/// Like [`look`], without the fields that the projection `without` excludes.
pub(crate) async fn look_at(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
    without: RawDocumentBuf,
) -> Result<HashMap<ItemId, Stored>> {
    let ids: Vec<ItemId> = ids.into_iter().collect();
    // First, so that what is detached between the two reads is found by the second.
    let mut all = lookup::items(inner, group, ids.iter().copied()).await?;
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(ids) } },
        "projection": without,
        "hint": BY_ID,
        "batchSize": 100_000,
    };
    let found = read(&inner.db, &command, Stored::read).await?;
    let found = found.into_iter().filter(|stored| stored.ready_inside.is_none());
    all.extend(found.map(|stored| (stored.id(), stored)));
    Ok(all)
}

/// Runs statements that leave this settle token on the items they change, all of which are among `items`. Returns how
/// many were changed, also if the command had to be repeated because its answer was lost.
pub(crate) async fn update_counted(
    inner: &Inner,
    group: &Group,
    statements: Vec<RawDocumentBuf>,
    settled: ObjectId,
    items: impl IntoIterator<Item = ItemId>,
) -> Result<u64> {
    let written = update_all(inner, group, statements).await?;
    if !written.is_repeated {
        return Ok(written.n);
    }
    let found = look(inner, group, items).await?;
    Ok(found.values().filter(|stored| stored.was_settled_by(settled)).count() as u64)
}

/// Returns the outcome for a receipt that does not hold its item.
pub(crate) fn stale(found: Option<&Stored>, now: Timestamp) -> Outcome {
    match found {
        None => Outcome::Gone,
        Some(stored) if matches!(stored.when, PROCESSED | TOMBSTONE) => Outcome::Gone,
        Some(stored) if stored.is_over(now) => Outcome::Gone,
        Some(_) => Outcome::LeaseLost,
    }
}

/// Commits items with an exact outcome for each, whatever other brokers do. Each receipt must occur only once.
pub(crate) async fn end_exactly(
    inner: &Inner,
    group: &Group,
    endings: &[Ending],
) -> Result<Vec<Outcome>> {
    if endings.is_empty() {
        return Ok(Vec::new());
    }
    let held = |ending: &Ending| (ending.receipt.item, ending.receipt.token);
    let forgotten = endings.iter().filter(|ending| ending.queue.retention.is_zero());
    let ended = commit_held(inner, group, forgotten.map(held)).await?;
    let open: Vec<&Ending> = endings.iter().filter(|e| !ended.contains(&held(e))).collect();
    detach_held(inner, group, open.iter().map(|ending| held(ending))).await?;
    let mut outcomes = end_documents(inner, group, &open).await?.into_iter();
    let outcome = |ending| if ended.contains(&held(ending)) { None } else { outcomes.next() };
    Ok(endings.iter().map(outcome).map(|outcome| outcome.unwrap_or(Outcome::Ok)).collect())
}

/// The same for items that have documents of their own.
async fn end_documents(inner: &Inner, group: &Group, endings: &[&Ending]) -> Result<Vec<Outcome>> {
    if endings.is_empty() {
        return Ok(Vec::new());
    }
    let now = inner.now();
    let mut lots: HashMap<(LeaseToken, Duration, Option<&Failure>), Vec<&Ending>> = HashMap::new();
    // One token per lease, so that of two receipts of an item only the one that held it finds its own.
    let mut settled: HashMap<LeaseToken, ObjectId> = HashMap::new();
    for ending in endings {
        let lot = (ending.receipt.token, ending.queue.retention, ending.failure.as_ref());
        lots.entry(lot).or_default().push(ending);
    }
    let mut statements = Vec::with_capacity(lots.len());
    for ((token, _, failure), lot) in &lots {
        let filter = held_filter(lot.iter().map(|ending| ending.receipt.item), *token, now);
        let settled = *settled.entry(*token).or_insert_with(|| settle_token(inner));
        let change = Update::pipeline(&finish(now, settled, &lot[0].queue, *failure))?;
        statements.push(statement(filter, change));
    }
    let n = update(inner, group, statements).await?;
    let mut keys = Vec::new();
    let all = n == endings.len() as u64;
    let outcomes = if all && endings.iter().all(|e| e.cached_lease.is_some() || !e.receipt.keyed) {
        keys.extend(endings.iter().filter_map(|ending| known_key(ending)));
        vec![Outcome::Ok; endings.len()]
    } else {
        let found = look(inner, group, endings.iter().map(|e| e.receipt.item)).await?;
        let mut outcome = |ending: &Ending| match found.get(&ending.receipt.item) {
            Some(stored) if was_settled(stored, &settled, ending.receipt.token) => {
                keys.extend(stored.key.clone().map(|key| (ending.receipt.queue.clone(), key)));
                Outcome::Ok
            }
            found => stale(found, now),
        };
        endings.iter().map(|ending| outcome(ending)).collect()
    };
    ordering::unblock_settled(inner, group, &keys).await;
    Ok(outcomes)
}

/// Returns true if the item was settled by the token that belongs to this lease.
pub(crate) fn was_settled(
    stored: &Stored,
    settled: &HashMap<LeaseToken, ObjectId>,
    lease: LeaseToken,
) -> bool {
    settled.get(&lease).is_some_and(|token| stored.was_settled_by(*token))
}

/// Returns the ordering key of an item that this broker handed out, if it has one.
pub(crate) fn known_key(ending: &Ending) -> Option<OrderKey> {
    let key = ending.cached_lease.as_ref()?.key.as_ref()?;
    Some((ending.receipt.queue.clone(), key.clone()))
}

/// Returns for each receipt the position of the first equal one, and whether it is that first one. Among equal receipts
/// only the first can end the reservation.
pub(crate) fn first_places<'a>(
    receipts: impl ExactSizeIterator<Item = &'a Receipt> + Clone,
) -> (Vec<usize>, Vec<bool>) {
    let count = receipts.len();
    // As consumers name them that commit what they received.
    if receipts.clone().is_sorted_by(|a, b| a.item < b.item) {
        return ((0..count).collect(), vec![true; count]);
    }
    let mut places: IdMap<(ItemId, LeaseToken), usize> = IdMap::default();
    places.reserve(count);
    let (mut first, mut is_first) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for (at, receipt) in receipts.enumerate() {
        let place = *places.entry((receipt.item, receipt.token)).or_insert(at);
        first.push(place);
        is_first.push(place == at);
    }
    (first, is_first)
}

/// If a call names two receipts of one item, the stale one is `LEASE_LOST`, not `GONE`: it was stale before the other ended
/// the item.
pub(crate) fn lose_crossed(receipts: &[(ItemId, LeaseToken)], outcomes: &mut [Outcome]) {
    if !outcomes.contains(&Outcome::Gone) {
        return;
    }
    let ended: IdMap<ItemId, LeaseToken> = receipts
        .iter()
        .zip(outcomes.iter())
        .filter(|(_, outcome)| **outcome == Outcome::Ok)
        .map(|((item, token), _)| (*item, *token))
        .collect();
    for ((item, token), outcome) in receipts.iter().zip(outcomes) {
        if *outcome == Outcome::Gone && ended.get(item).is_some_and(|other| other != token) {
            *outcome = Outcome::LeaseLost;
        }
    }
}

/// Returns the outcome of a receipt that repeats an earlier one of the same call.
pub(crate) fn repeated(first: Outcome, settled_means_gone: bool) -> Outcome {
    match first {
        Outcome::Ok if settled_means_gone => Outcome::Gone,
        Outcome::Ok | Outcome::DeadLettered => Outcome::LeaseLost,
        other => other,
    }
}
