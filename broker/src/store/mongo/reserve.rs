//! Handing out: look at the head, deal what is there to those who wait, claim it in one command.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use mongodb::bson::{RawArrayBuf, RawDocumentBuf, doc, rawdoc};

use super::{
    Inner,
    connect::read,
    document::{Stored, oids, token_oid},
    issued::Issue,
    layout::{BY_ID, Group, date, leased, millis},
    look::{Extent, Found, MAX_FIND, Place},
    settle::{Update, WITNESS, statement, update},
    spent,
};
use crate::{
    domain::{
        ConsumerName, Delivery, Fate, ItemId, ItemSize, ItemState, LeaseToken, Queue, Receipt,
        Timestamp, Want, deal,
    },
    store::{Reserved, Result},
};

/// Most rounds of one reserve.
const MAX_ROUNDS: usize = 8;

/// Reserves items from the head of the queue.
pub(super) async fn reserve(inner: &Inner, queue: &Arc<Queue>, wants: &[Want]) -> Result<Reserved> {
    let wanted: usize = wants.iter().map(|want| want.max_items).sum();
    if wanted == 0 {
        return Ok(Reserved::default());
    }
    let group = inner.group(&queue.group).await?;
    let head = inner.head(&queue.name);
    let place = Place { inner, group: &group, head: &head, queue };
    let mut sweep = head.sweep_due(false);
    let mut answer = Reserved::default();
    // Rounds that find nothing but what must be removed are not the caller's concern, within reason.
    for _ in 0..MAX_ROUNDS {
        let found = place.look(wanted.min(MAX_FIND), sweep).await?;
        if found.items.is_empty() {
            head.seen(&found.seen(&[], &[]));
            // Perhaps a lease of another broker has ended,
            answer.more = head.lapses.is_due(found.now) && place.reclaim(found.now).await?;
            if answer.more {
                continue;
            }
            // or a hint was lost.
            if sweep || !head.sweep_due(true) {
                break;
            }
            sweep = true;
            continue;
        }
        let round = hand_out(&place, wants, found).await;
        let round = round.inspect_err(|_| head.forget_ahead())?;
        answer.dead_lettered += round.dead_lettered;
        answer.expired += round.expired;
        answer.deliveries = round.deliveries;
        answer.more = round.more;
        if !answer.deliveries.is_empty() || round.dead_lettered + round.expired == 0 {
            break;
        }
        sweep = false;
    }
    Ok(answer)
}

/// Deals what was found, claims it, and removes what is over.
async fn hand_out(place: &Place<'_>, wants: &[Want], mut found: Found) -> Result<Reserved> {
    let Place { inner, group, head, queue } = *place;
    let now = inner.now();
    let places = found.places();
    let (mut expired, mut dead, mut good) = (Vec::new(), Vec::new(), Vec::new());
    let mut good_at = Vec::new();
    for (at, item) in std::mem::take(&mut found.items).into_iter().enumerate() {
        if item.is_over(now) {
            expired.push(item);
        } else if item.lock.is_some() && queue.after_failure(item.attempt) == Fate::DeadLetter {
            dead.push(item);
        } else {
            good.push(item);
            good_at.push(at);
        }
    }
    let sizes: Vec<ItemSize> = good.iter().map(Stored::size).collect();
    let dealt = deal(&sizes, wants);
    let left: Vec<(i32, i64)> = good_at[dealt.len()..].iter().map(|at| places[*at]).collect();
    let rest = good.split_off(dealt.len());

    let (expired, dead_lettered, deliveries) = futures_util::future::try_join3(
        spent::remove_expired(inner, group, &queue.name, &expired, now),
        spent::remove_failed(inner, group, queue, &dead, now),
        claim(place, wants, good, &dealt, now),
    )
    .await?;

    head.seen(&found.seen(&places, &left));
    let outrun = deliveries.len() < dealt.len();
    if outrun {
        head.forget_ahead();
    } else {
        head.put_back(rest);
    }
    // What was removed may have passed its turn on.
    let removed = expired + dead_lettered > 0;
    let more = found.extent != Extent::All || !left.is_empty() || removed || outrun;
    Ok(Reserved { deliveries, dead_lettered, expired, more })
}

/// Items that are claimed by one statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Alike {
    consumer: Option<ConsumerName>,
    until: Timestamp,
    /// As read: fences the claim.
    deliveries: u32,
    attempt: u32,
    lapsed: bool,
    /// The lapsed lease was another broker's.
    foreign: bool,
}

/// Claims the items, each for the want it was dealt to; those another broker was faster with are
/// left out.
async fn claim(
    place: &Place<'_>,
    wants: &[Want],
    items: Vec<Stored>,
    dealt: &[usize],
    now: Timestamp,
) -> Result<Vec<(usize, Delivery)>> {
    let Place { inner, group, head, queue } = *place;
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let mut lots: HashMap<Alike, (LeaseToken, Vec<ItemId>)> = HashMap::new();
    let mut claims = Vec::with_capacity(items.len());
    for (item, want) in items.iter().zip(dealt) {
        let lapsed = item.lock.is_some();
        let attempt = match queue.after_failure(item.attempt) {
            Fate::Retry { attempt } if lapsed => attempt,
            _ => item.attempt,
        };
        let alike = Alike {
            consumer: wants[*want].consumer.clone(),
            until: now + wants[*want].lease,
            deliveries: item.deliveries,
            attempt,
            lapsed,
            foreign: item.lock.is_some_and(|lock| lock.broker() != inner.broker),
        };
        let (until, foreign) = (alike.until, alike.foreign);
        head.lapses.expect(until);
        let lot =
            lots.entry(alike).or_insert_with(|| (LeaseToken::fresh(inner.broker), Vec::new()));
        lot.1.push(item.id());
        claims.push((lot.0, attempt, until, foreign));
    }
    let mut statements = Vec::with_capacity(lots.len());
    for (alike, (token, ids)) in &lots {
        statements.push(claim_statement(queue, alike, *token, ids, now)?);
    }
    let n = update(inner, group, statements).await?;
    let won: Option<HashSet<ItemId>> = if n == items.len() as u64 {
        None
    } else {
        let tokens = lots.values().map(|(token, _)| *token);
        Some(won(inner, group, items.iter().map(Stored::id), tokens).await?)
    };
    let mut deliveries = Vec::with_capacity(items.len());
    let mut issues = Vec::with_capacity(items.len());
    for ((item, want), (token, attempt, until, foreign)) in items.into_iter().zip(dealt).zip(claims)
    {
        let id = item.id();
        if won.as_ref().is_some_and(|won| !won.contains(&id)) {
            continue;
        }
        issues.push((
            id,
            Issue {
                token,
                until: until.0,
                priority: item.priority,
                dedup: !item.dedup_id.is_empty(),
                traced: foreign || item.trace.is_some_and(|trace| trace > now.0),
                deadline: item.deadline,
                key: (!item.key.is_empty()).then(|| item.key.as_str().into()),
            },
        ));
        let previous_eligible_time = Timestamp(item.when);
        let keyed = !item.key.is_empty();
        let mut item = item.into_item(&queue.name, now)?;
        item.state = ItemState::Reserved;
        item.attempt = attempt;
        item.deliveries += 1;
        item.consumer.clone_from(&wants[*want].consumer);
        item.eligible_time = Some(until);
        let receipt = Receipt {
            item: id,
            token,
            deliveries: item.deliveries,
            attempt,
            keyed,
            queue: queue.name.clone(),
            group: queue.group.clone(),
        };
        let delivery = Delivery { item, receipt, lease_expire_time: until, previous_eligible_time };
        deliveries.push((*want, delivery));
    }
    inner.issued.add(issues, now);
    Ok(deliveries)
}

fn claim_statement(
    queue: &Queue,
    alike: &Alike,
    token: LeaseToken,
    ids: &[ItemId],
    now: Timestamp,
) -> Result<RawDocumentBuf> {
    let filter = rawdoc! {
        "_id": { "$in": oids(ids.iter().copied()) },
        "q": queue.name.as_str(),
        "when": { "$lte": date(now) },
        "deliveries": i64::from(alike.deliveries),
    };
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
    if alike.foreign {
        change.insert("$max", doc! { "trace": millis(now.0 + WITNESS) });
    }
    Ok(statement(filter, Update::operators(&change)?))
}

/// Which of the items carry one of the tokens.
async fn won(
    inner: &Inner,
    group: &Group,
    ids: impl Iterator<Item = ItemId>,
    tokens: impl Iterator<Item = LeaseToken>,
) -> Result<HashSet<ItemId>> {
    let tokens: RawArrayBuf = tokens.map(token_oid).collect();
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(ids) }, "lock": { "$in": tokens } },
        "projection": { "_id": 1 },
        "hint": BY_ID,
        "batchSize": MAX_FIND as i64 + 1,
    };
    let ids = read(&inner.db, &command, |document| Ok(Stored::read(document)?.id())).await?;
    Ok(ids.into_iter().collect())
}
