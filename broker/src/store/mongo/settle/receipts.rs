//! Ending reservations, exactly: who asks is told what became of each.
//!
//! The server answers a batch only with how many documents matched. So every settle but the
//! cheapest writes a token of its own into `settled`, by which a short count is cleared up
//! afterwards. The cheapest is the plain delete of items that this broker alone can have touched
//! (`commit`): what is missing afterwards, it has deleted. For that to be true, everybody else who
//! ends a reservation they did not make leaves a tombstone that outlives the lease, and puts a
//! `trace` on an item they give back, so that whoever ends it later leaves one too.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mongodb::bson::{Document, RawArrayBuf, RawDocumentBuf, doc, oid::ObjectId, rawdoc};

use crate::{
    domain::{ItemId, LeaseToken, Outcome, Queue, Receipt, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::lease_cache::{EXCLUSIVE, Issue},
            ordering::{self, OrderKey},
            schema::{
                item::{Stored, oids, token_oid},
                layout::{BY_ID, Group, PROCESSED, TOMBSTONE, date, durable, lease_end, millis},
            },
            server::{
                connect::{read, write},
                error::broken,
            },
        },
    },
};

/// A tombstone that only bears witness stays this long past the time for which the broker that made the
/// reservation may settle it the cheapest way, in milliseconds.
pub(crate) const WITNESS: i64 = 60_000;

/// Settles of an item whose tokens are remembered, beside the last one.
const SETTLES_REMEMBERED: i32 = 8;

/// A reservation to end.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    pub(crate) receipt: Receipt,
    pub(crate) queue: Arc<Queue>,
    /// What this broker knows of the item.
    pub(crate) issue: Option<Issue>,
}

/// A token that names one settle.
pub(crate) fn settle_token(inner: &Inner) -> ObjectId {
    token_oid(LeaseToken::fresh(inner.broker))
}

/// One statement of an `update` command, which finds its items by id; it changes all that match.
pub(crate) fn statement(filter: RawDocumentBuf, update: Update) -> RawDocumentBuf {
    statement_by(BY_ID, filter, update)
}

/// The same, by any index.
pub(crate) fn statement_by(index: &str, filter: RawDocumentBuf, update: Update) -> RawDocumentBuf {
    let mut statement = rawdoc! { "q": filter };
    let key = mongodb::bson::raw::cstr!("u");
    match update {
        Update::Operators(update) => statement.append(key, update),
        Update::Pipeline(update) => statement.append(key, update),
    }
    statement.append(mongodb::bson::raw::cstr!("multi"), true);
    statement.append(mongodb::bson::raw::cstr!("hint"), index);
    statement
}

/// How documents are changed.
pub(crate) enum Update {
    Operators(RawDocumentBuf),
    Pipeline(RawArrayBuf),
}

impl Update {
    /// By operators such as `$set`.
    pub(crate) fn operators(update: &Document) -> Result<Self> {
        let raw = RawDocumentBuf::try_from(update).map_err(|e| broken(e.to_string()))?;
        Ok(Self::Operators(raw))
    }

    /// By an aggregation pipeline.
    pub(crate) fn pipeline(stages: &[Document]) -> Result<Self> {
        let mut array = RawArrayBuf::new();
        for stage in stages {
            array.push(RawDocumentBuf::try_from(stage).map_err(|e| broken(e.to_string()))?);
        }
        Ok(Self::Pipeline(array))
    }
}

/// Runs statements that each change all that match; answers how many matched, of all together.
pub(crate) async fn update(
    inner: &Inner,
    group: &Group,
    statements: impl IntoIterator<Item = RawDocumentBuf>,
) -> Result<u64> {
    let command = rawdoc! {
        "update": group.items.name(),
        "updates": statements.into_iter().collect::<RawArrayBuf>(),
        "ordered": false,
        "writeConcern": durable(),
    };
    Ok(write(&inner.db, command).await?.n)
}

/// The documents as they are, without payload and headers; those that are not there are left out.
pub(crate) async fn look(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
) -> Result<HashMap<ItemId, Stored>> {
    look_at(inner, group, ids, rawdoc! { "payload": 0, "headers": 0 }).await
}

/// The same, with all but what `without` names.
pub(crate) async fn look_at(
    inner: &Inner,
    group: &Group,
    ids: impl IntoIterator<Item = ItemId>,
    without: RawDocumentBuf,
) -> Result<HashMap<ItemId, Stored>> {
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(ids) } },
        "projection": without,
        "hint": BY_ID,
        "batchSize": 100_000,
    };
    let found = read(&inner.db, &command, Stored::read).await?;
    Ok(found.into_iter().map(|stored| (stored.id(), stored)).collect())
}

/// Matches items of one lease whose end has not come.
pub(crate) fn held_filter(
    ids: impl IntoIterator<Item = ItemId>,
    token: LeaseToken,
    now: Timestamp,
) -> RawDocumentBuf {
    rawdoc! {
        "_id": { "$in": oids(ids) },
        "lock": token_oid(token),
        "deadline": { "$not": { "$lte": date(now) } },
    }
}

/// What a receipt is answered that did not hold its item.
pub(crate) fn stale(found: Option<&Stored>, now: Timestamp) -> Outcome {
    match found {
        None => Outcome::Gone,
        Some(stored) if matches!(stored.when, PROCESSED | TOMBSTONE) => Outcome::Gone,
        Some(stored) if stored.is_over(now) => Outcome::Gone,
        Some(_) => Outcome::LeaseLost,
    }
}

/// Until when the broker that made the reservation may take it for one that nobody else touched: not for
/// a whole lease of hours, so that what bears witness against it need not stay for hours.
pub(crate) fn witness_end(now: Timestamp) -> Document {
    let exclusive = doc! { "$min": [lease_end(), millis(now.0 + EXCLUSIVE)] };
    doc! { "$add": [exclusive, WITNESS] }
}

/// Until when whoever was promised the item may ask; null if nobody was.
fn witnessed(now: Timestamp) -> Document {
    doc! { "$cond": [{ "$gt": ["$lock", null] }, witness_end(now), null] }
}

/// The tokens of the settles before this one, as an expression of the update that sets `settled`. The answer to an
/// update that took effect may be lost; until it is repeated the item can have been reserved and settled again.
pub(crate) fn settled_before() -> Document {
    doc! { "$cond": [
        { "$gt": ["$settled", null] },
        { "$slice": [
            { "$concatArrays": [["$settled"], { "$ifNull": ["$settledBefore", []] }] },
            SETTLES_REMEMBERED,
        ] },
        "$$REMOVE",
    ] }
}

/// Update that turns an item into a tombstone, for as long as anybody may ask.
pub(crate) fn bury(now: Timestamp, settled: ObjectId) -> Vec<Document> {
    vec![doc! { "$replaceWith": {
        "_id": "$_id", "q": "$q", "when": millis(TOMBSTONE), "settled": settled,
        "settledBefore": settled_before(),
        "key": "$key", "seq": "$seq", "dedup": "$dedup", "window": "$window", "created": "$created",
        "expires": { "$max": [
            millis(now.0 + WITNESS), witnessed(now), "$window", "$trace",
        ] },
    } }]
}

/// The same for an item that is deleted on purpose: its deduplication id counts no more.
pub(crate) fn bury_deleted(now: Timestamp, settled: ObjectId) -> Vec<Document> {
    let mut stages = bury(now, settled);
    stages.push(doc! { "$unset": ["dedup", "window"] });
    stages
}

/// Update that turns an item into history.
pub(crate) fn shelve(now: Timestamp, settled: ObjectId, retention: Duration) -> Vec<Document> {
    let deadline = now + retention;
    vec![
        doc! { "$set": {
            "when": millis(PROCESSED), "processed": date(now), "settled": settled,
            "settledBefore": settled_before(),
            "deadline": date(deadline),
            "expires": { "$max": [date(deadline), witnessed(now), "$window", "$trace"] },
        } },
        doc! { "$unset": ["lock", "turn", "due", "trace"] },
    ]
}

/// Update that ends an item as its queue's settings say.
pub(crate) fn finish(now: Timestamp, settled: ObjectId, queue: &Queue) -> Vec<Document> {
    if queue.retention.is_zero() {
        bury(now, settled)
    } else {
        shelve(now, settled, queue.retention)
    }
}

/// Commits, with the answer known exactly for each whatever other brokers do. No receipt may be
/// given twice.
pub(crate) async fn end_exactly(
    inner: &Inner,
    group: &Group,
    endings: &[Ending],
) -> Result<Vec<Outcome>> {
    if endings.is_empty() {
        return Ok(Vec::new());
    }
    let now = inner.now();
    let mut lots: HashMap<(LeaseToken, Duration), Vec<&Ending>> = HashMap::new();
    // One for each lease: of two receipts of an item only the right one is to find its own.
    let mut settled: HashMap<LeaseToken, ObjectId> = HashMap::new();
    for ending in endings {
        let lot = (ending.receipt.token, ending.queue.retention);
        lots.entry(lot).or_default().push(ending);
    }
    let mut statements = Vec::with_capacity(lots.len());
    for ((token, _), lot) in &lots {
        let filter = held_filter(lot.iter().map(|ending| ending.receipt.item), *token, now);
        let settled = *settled.entry(*token).or_insert_with(|| settle_token(inner));
        let change = Update::pipeline(&finish(now, settled, &lot[0].queue))?;
        statements.push(statement(filter, change));
    }
    let n = update(inner, group, statements).await?;
    let mut keys = Vec::new();
    let all = n == endings.len() as u64;
    let outcomes = if all && endings.iter().all(|e| e.issue.is_some() || !e.receipt.keyed) {
        keys.extend(endings.iter().filter_map(known_key));
        vec![Outcome::Ok; endings.len()]
    } else {
        let found = look(inner, group, endings.iter().map(|e| e.receipt.item)).await?;
        let outcome = |ending: &Ending| match found.get(&ending.receipt.item) {
            Some(stored) if was_settled(stored, &settled, ending.receipt.token) => {
                if !stored.key.is_empty() {
                    keys.push((ending.receipt.queue.clone(), stored.key.clone()));
                }
                Outcome::Ok
            }
            found => stale(found, now),
        };
        endings.iter().map(outcome).collect()
    };
    ordering::promote(inner, group, &keys).await?;
    Ok(outcomes)
}

/// True if the item was settled by the token that stands for this lease.
pub(crate) fn was_settled(
    stored: &Stored,
    settled: &HashMap<LeaseToken, ObjectId>,
    lease: LeaseToken,
) -> bool {
    settled.get(&lease).is_some_and(|token| stored.was_settled_by(*token))
}

/// The key of an item this broker handed out.
pub(crate) fn known_key(ending: &Ending) -> Option<OrderKey> {
    let key = ending.issue.as_ref()?.key.as_ref()?;
    Some((ending.receipt.queue.clone(), key.to_string()))
}

/// Among equal receipts only the first can end the reservation: answers for each place where its
/// first is, and the first ones.
pub(crate) fn first_places<'a>(
    receipts: impl Iterator<Item = &'a Receipt>,
) -> (Vec<usize>, Vec<bool>) {
    let mut places: HashMap<(ItemId, LeaseToken), usize> = HashMap::new();
    let (mut first, mut is_first) = (Vec::new(), Vec::new());
    for (at, receipt) in receipts.enumerate() {
        let place = *places.entry((receipt.item, receipt.token)).or_insert(at);
        first.push(place);
        is_first.push(place == at);
    }
    (first, is_first)
}

/// Two receipts of one item in a call: the one that did not hold it was no longer good before the
/// other ended it.
pub(crate) fn lose_crossed(receipts: &[(ItemId, LeaseToken)], outcomes: &mut [Outcome]) {
    let ended: HashMap<ItemId, LeaseToken> = receipts
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

/// What a second, equal receipt of a call is answered.
pub(crate) fn repeated(first: Outcome, settled_means_gone: bool) -> Outcome {
    match first {
        Outcome::Ok if settled_means_gone => Outcome::Gone,
        Outcome::Ok | Outcome::DeadLettered => Outcome::LeaseLost,
        other => other,
    }
}
