//! Reserves items: finds the head of the queue, assigns its items to demands, and claims them in one command.

pub(super) mod announced;
pub(super) mod claims;
pub(super) mod ended;
pub(super) mod handle;
pub(super) mod lapse;
pub(super) mod next_eligible;
pub(super) mod scan;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::bson::{Document, RawArrayBuf, RawDocumentBuf, doc, oid::ObjectId, rawdoc};

use crate::{
    domain::{
        AtLimit, ConsumerName, Delivery, Demand, IdMap, IdSet, ItemId, ItemSize, ItemState,
        LeaseToken, Queue, Receipt, Timestamp, Triage, assign,
    },
    store::{
        Reserved, Result,
        mongo::{
            Inner,
            cursor::{lease_cache::CachedLease, watermarks::QueueCursor},
            reserve::{
                claims::{Claim, Handover, as_read},
                ended::Failed,
                scan::{Extent, Found, MAX_FIND, Place},
            },
            schema::{
                item::{Stored, oids, token_oid},
                layout::{BY_ID, Group, date, leased, millis},
                settled::WITNESS,
            },
            segment::{self, claim::Part},
            server::{
                connect::read,
                statement::{Update, statement, update},
            },
        },
    },
};

/// Limit of rounds of one reserve.
const MAX_ROUNDS: usize = 8;
/// A reserve of so many items reads those of the next one ahead.
const MANY: usize = 100;
/// Time limit of a reserve that finds only items to remove, because its caller may not want to wait for the removals.
const CLEARING: Duration = Duration::from_millis(100);

/// Reserves items from the head of the queue. If another broker has announced an item of a queue that was empty, that one is
/// claimed without looking for it.
pub(super) async fn reserve(
    inner: &Arc<Inner>,
    cursor: &Arc<QueueCursor>,
    queue: &Arc<Queue>,
    demands: &[Demand],
    announced: Option<ItemId>,
) -> Result<Handover> {
    let wanted: usize = demands.iter().map(|want| want.max_items).sum();
    let mut answer = Handover { reserved: Reserved::default(), claim: None };
    if wanted == 0 {
        return Ok(answer);
    }
    let group = inner.group(&queue.group).await?;
    cursor.claims.resolved().await?;
    let place = Place { inner, group: &group, cursor, queue };
    let mut sweep = cursor.sweep_due(false);
    if let Some(id) = announced.filter(|_| !sweep) {
        if let Some(claimed) = announced::claim(&place, demands, id).await? {
            return Ok(claimed);
        }
        cursor.claims.resolved().await?;
    }
    let begun = Instant::now();
    // Payloads that no demand has room for are not read.
    let bytes = demands.iter().fold(0, |sum: usize, want| sum.saturating_add(want.max_bytes));
    let mut limit = wanted.min(MAX_FIND).min(cursor.fitting(bytes));
    // A round that finds only items to remove is followed by another, within these limits.
    for _ in 0..MAX_ROUNDS {
        if answer.reserved.more && begun.elapsed() > CLEARING {
            break;
        }
        let found = place.look(limit, sweep).await?;
        if found.items.is_empty() {
            cursor.seen(&found.seen(&[], &[]));
            // Nothing is ready. Perhaps a lease of another broker has ended,
            answer.reserved.more =
                cursor.lease_deadlines.is_due(found.now) && place.reclaim(found.now).await?;
            if answer.reserved.more {
                continue;
            }
            // or a hint was lost.
            if sweep || !cursor.sweep_due(true) {
                break;
            }
            sweep = true;
            continue;
        }
        let round = hand_out(&place, demands, found, limit).await;
        let Handover { reserved: round, claim } =
            round.inspect_err(|_| cursor.forget_prefetched())?;
        let removed = round.at_limit.total() + round.expired;
        answer.reserved.at_limit.max_attempts += round.at_limit.max_attempts;
        answer.reserved.at_limit.max_deliveries += round.at_limit.max_deliveries;
        answer.reserved.limit_unknown = round.limit_unknown;
        answer.reserved.expired += round.expired;
        answer.reserved.deliveries = round.deliveries;
        answer.reserved.more = round.more;
        answer.claim = claim;
        if !answer.reserved.deliveries.is_empty() || removed == 0 {
            break;
        }
        // Where one item has ended, many may have. A caller that wants one item must not wait while they are removed
        // one by one.
        limit = MAX_FIND;
        sweep = false;
    }
    Ok(answer)
}

/// Assigns the items that were found, claims them, and removes those that have expired or are at a limit. While many
/// items are claimed, those of the next reserve are read.
async fn hand_out(
    place: &Place<'_>,
    demands: &[Demand],
    mut found: Found,
    wanted: usize,
) -> Result<Handover> {
    let Place { inner, group, cursor, queue } = *place;
    let now = inner.now();
    let places = found.places();
    let (mut expired, mut dead) = (Vec::new(), Vec::new());
    let mut good = Vec::with_capacity(places.len());
    // The attempt number and the position of each item in `good`.
    let (mut attempts, mut good_at) =
        (Vec::with_capacity(places.len()), Vec::with_capacity(places.len()));
    for (at, item) in std::mem::take(&mut found.items).into_iter().enumerate() {
        match queue.triage(item.at_head(), now) {
            Triage::Expired => expired.push(*item),
            Triage::AtLimit { reason, failed_attempts } => {
                dead.push(Failed { item: *item, reason, attempts: failed_attempts });
            }
            Triage::Live { attempt } => {
                good.push(item);
                attempts.push(attempt);
                good_at.push(at);
            }
        }
    }
    if !dead.is_empty() && queue.at_limit == AtLimit::Unknown {
        cursor.forget_prefetched();
        let reserved = Reserved { more: true, limit_unknown: true, ..Reserved::default() };
        return Ok(Handover { reserved, claim: None });
    }
    let sizes: Vec<ItemSize> = good.iter().map(|item| item.size()).collect();
    let assigned = assign(&sizes, demands);
    let left: Vec<(i32, i64)> = good_at[assigned.len()..].iter().map(|at| places[*at]).collect();
    let rest = good.split_off(assigned.len());

    let last = rest.last().or(good.last()).filter(|_| good.len() >= MANY);
    let end = last.and_then(|last| cursor.end(wanted, rest.len(), last));
    let ahead = async {
        if let Some(end) = end {
            place.look_ahead(&found, end, wanted).await;
        }
    };
    let (expired, at_limit, claimed, ()) = futures_util::future::join4(
        ended::remove_expired(inner, group, &queue.name, &expired, now),
        ended::remove_all_failed(inner, group, queue, dead, now),
        claim(place, demands, good, &attempts, &assigned, now),
        ahead,
    )
    .await;
    let (deliveries, claim) = claimed?;
    let (expired, at_limit) = match (expired, at_limit) {
        (Ok(expired), Ok(at_limit)) => {
            cursor.seen(&found.seen(&places, &left));
            (expired, at_limit)
        }
        // The watermarks stay, so that a later scan finds the items that could not be removed. Items that were claimed
        // are handed out.
        (expired, at_limit) if !deliveries.is_empty() => {
            let errors = (expired.as_ref().err(), at_limit.as_ref().err());
            tracing::debug!(queue = %queue.name, ?errors, "could not remove expired and failed items");
            cursor.forget_prefetched();
            let reserved = Reserved {
                deliveries,
                at_limit: at_limit.unwrap_or_default(),
                expired: expired.unwrap_or_default(),
                more: true,
                ..Reserved::default()
            };
            return Ok(Handover { reserved, claim: Some(claim) });
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    let outrun = deliveries.len() < assigned.len();
    if outrun {
        cursor.forget_prefetched();
    } else {
        cursor.restore(rest);
    }
    // The removal of an item may have unblocked the next one of its ordering key.
    let removed = expired + at_limit.total() > 0;
    let more = found.extent != Extent::All || !left.is_empty() || removed || outrun;
    let reserved = Reserved { deliveries, at_limit, expired, more, ..Reserved::default() };
    Ok(Handover { reserved, claim: Some(claim) })
}

/// What the items that one statement claims have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Alike {
    consumer: Option<ConsumerName>,
    until: Timestamp,
    /// As read; fences the claim.
    deliveries: u32,
    attempt: u32,
    lapsed: bool,
}

/// The items of one statement.
struct Lot {
    token: LeaseToken,
    ids: Vec<ItemId>,
    /// Lease token and settle token of each item as read; they fence the claim too.
    tokens: Vec<(Option<LeaseToken>, Option<ObjectId>)>,
}

/// What a claim makes of one item.
struct Lease {
    token: LeaseToken,
    attempt: u32,
    until: Timestamp,
    lapsed: bool,
}

/// Claims the items, each for the demand it is assigned to. Items that another broker claimed first are left out.
async fn claim(
    place: &Place<'_>,
    demands: &[Demand],
    items: Vec<Box<Stored>>,
    attempts: &[u32],
    assigned: &[usize],
    now: Timestamp,
) -> Result<(Vec<(usize, Delivery)>, Claim)> {
    let Place { inner, group, cursor, queue } = *place;
    let mut claim = Claim::begin(inner, group, cursor, &queue.name);
    if items.is_empty() {
        return Ok((Vec::new(), claim));
    }
    let mut lots: HashMap<Alike, Lot> = HashMap::new();
    let mut parts: IdMap<ItemId, Part> = IdMap::default();
    let mut singles = 0;
    let mut leases = Vec::with_capacity(items.len());
    for ((item, demand), &attempt) in items.iter().zip(assigned).zip(attempts) {
        let demand = &demands[*demand];
        let (until, lapsed) = (now + demand.lease, item.lock.is_some());
        let consumer = demand.consumer.clone();
        let alike = Alike { consumer, until, deliveries: item.deliveries, attempt, lapsed };
        let lot = lots.entry(alike).or_insert_with(|| Lot {
            token: LeaseToken::fresh(inner.broker),
            ids: Vec::new(),
            tokens: Vec::new(),
        });
        if let Some(seen) = &item.segment {
            let part = parts.entry(seen.id).or_insert_with(|| Part::new(seen));
            part.add(item.id(), lot.token, (now, until), demand.consumer.as_ref());
        } else {
            singles += 1;
            lot.ids.push(item.id());
            lot.tokens.push((item.lock, item.settled));
        }
        claim.add(item, lot.token);
        leases.push(Lease { token: lot.token, attempt, until, lapsed });
    }
    let first_end = leases.iter().map(|lease| lease.until).min().unwrap_or(now);
    cursor.lease_deadlines.expect(first_end);
    let mut statements = Vec::with_capacity(lots.len() + parts.len());
    statements.extend(segment::claim::statements(parts.values())?);
    for (alike, lot) in lots.iter().filter(|(_, lot)| !lot.ids.is_empty()) {
        statements.push(claim_statement(queue, alike, lot, now)?);
    }
    // If the update fails, dropping the claim undoes it.
    let written = update(inner, group, statements).await;
    // Once more: a scan for lapsed leases that ran meanwhile may have missed these.
    cursor.lease_deadlines.expect(first_end);
    let n = written?;
    let won: Option<IdSet<ItemId>> = if n == (singles + parts.len()) as u64 {
        None
    } else {
        let tokens = lots.values().map(|lot| lot.token);
        Some(won(inner, group, &items, &parts, tokens).await?)
    };
    claim.answered(won.as_ref());
    for part in parts.values() {
        if won.as_ref().is_none_or(|won| won.contains(&part.segment())) {
            part.won(inner, now);
        }
    }
    let mut deliveries = Vec::with_capacity(items.len());
    let mut cached_leases = Vec::with_capacity(items.len());
    for ((item, &demand), lease) in items.into_iter().zip(assigned).zip(leases) {
        let id = item.id();
        if won.as_ref().is_some_and(|won| !won.contains(&id)) {
            continue;
        }
        cached_leases.push((id, lease.cached(&item, now)));
        let consumer = demands[demand].consumer.as_ref();
        deliveries.push((demand, lease.delivery(*item, queue, consumer, now)?));
    }
    inner.lease_cache.add(cached_leases, now);
    Ok((deliveries, claim))
}

impl Lease {
    /// Returns what this broker needs to know of the item to settle it in the cheapest way.
    fn cached(&self, item: &Stored, now: Timestamp) -> CachedLease {
        let remembered = item.tombstone_until.is_some_and(|until| until > now.0);
        CachedLease {
            token: self.token,
            made: now,
            until: self.until.0,
            priority: item.priority,
            dedup: item.dedup_id.is_some(),
            leaves_tombstone: self.lapsed || remembered,
            deadline: item.deadline,
            key: item.key.clone(),
            in_segment: item.segment.is_some(),
        }
    }

    /// Returns the item as it is under this lease, with its receipt. `item` is as it was before the claim.
    fn delivery(
        &self,
        item: Stored,
        queue: &Queue,
        consumer: Option<&ConsumerName>,
        now: Timestamp,
    ) -> Result<Delivery> {
        let (previous_eligible_time, former_lease) = (Timestamp(item.when), item.lock);
        let (keyed, earlier_deliveries) = (item.key.is_some(), item.earlier);
        let mut item = item.into_item(&queue.name, now)?;
        item.state = ItemState::Reserved;
        item.attempt = self.attempt;
        item.deliveries += 1;
        item.consumer = consumer.cloned();
        item.eligible_time = Some(self.until);
        item.due_time = Some(previous_eligible_time);
        let receipt = Receipt {
            item: item.id,
            token: self.token,
            deliveries: item.deliveries,
            earlier_deliveries,
            attempt: self.attempt,
            keyed,
            queue: queue.name.clone(),
            group: queue.group.clone(),
        };
        let lease_expire_time = self.until;
        Ok(Delivery {
            item: Box::new(item),
            receipt,
            lease_expire_time,
            previous_eligible_time,
            former_lease,
            tag: 0,
        })
    }
}

fn claim_statement(
    queue: &Queue,
    alike: &Alike,
    lot: &Lot,
    now: Timestamp,
) -> Result<RawDocumentBuf> {
    let mut filter = rawdoc! {
        "_id": { "$in": oids(lot.ids.iter().copied()) },
        "q": queue.name.as_str(),
        "when": { "$lte": date(now) },
        "deliveries": i64::from(alike.deliveries),
    };
    as_read(&mut filter, lot.tokens.iter().copied());
    Ok(statement(filter, Update::operators(&change(alike, lot.token, now))?))
}

/// Returns what a claim changes in a document.
fn change(alike: &Alike, token: LeaseToken, now: Timestamp) -> Document {
    let mut set = doc! {
        "when": leased(alike.until), "lock": token_oid(token), "started": date(now),
    };
    if alike.lapsed {
        set.insert("attempt", i64::from(alike.attempt));
    }
    let mut change = doc! { "$inc": { "deliveries": 1 } };
    match &alike.consumer {
        Some(consumer) => {
            set.insert("consumer", consumer.as_str());
        }
        None => {
            change.insert("$unset", doc! { "consumer": 1 });
        }
    }
    change.insert("$set", set);
    // The previous holder may still settle the item, even by a command of this broker that is not answered yet.
    if alike.lapsed {
        change.insert("$max", doc! { "trace": millis(now.0 + WITNESS) });
    }
    change
}

/// Returns the ids of the items, and of the segments, that carry one of the tokens.
async fn won(
    inner: &Inner,
    group: &Group,
    items: &[Box<Stored>],
    parts: &IdMap<ItemId, Part>,
    tokens: impl Iterator<Item = LeaseToken> + Clone,
) -> Result<IdSet<ItemId>> {
    let segments = segment::claim::won(inner, group, parts.keys().copied(), tokens.clone());
    let mut won: IdSet<ItemId> =
        if parts.is_empty() { IdSet::default() } else { segments.await?.into_iter().collect() };
    let shared = items.iter().filter(|item| item.segment.is_some()).map(|item| item.id());
    let shared: Vec<ItemId> = shared.filter(|id| won.contains(&id.block().0)).collect();
    won.extend(shared);
    let singles = items.iter().filter(|item| item.segment.is_none()).map(|item| item.id());
    let tokens: RawArrayBuf = tokens.map(token_oid).collect();
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(singles) }, "lock": { "$in": tokens } },
        "projection": { "_id": 1 },
        "hint": BY_ID,
        "batchSize": MAX_FIND as i64 + 1,
    };
    let ids = read(&inner.db, &command, |document| Ok(Stored::read(document)?.id())).await?;
    won.extend(ids);
    Ok(won)
}
