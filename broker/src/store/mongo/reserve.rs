//! Handing out: find the head, deal it to those who wait, claim it in one command.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use mongodb::bson::{RawArrayBuf, RawDocumentBuf, doc, rawdoc};

use super::{
    Inner,
    connect::read,
    document::{Stored, oids, token_oid},
    errors::{broken, failed},
    head::{Head, Look, START, Seen, levels as each_level},
    issued::Issue,
    lapse::Leases,
    layout::{BY_ID, Group, HANDOUT, date, leased, millis},
    levels,
    settle::{Update, WITNESS, statement, update},
    spent,
};
use crate::{
    domain::{
        ConsumerName, Delivery, Fate, ItemId, ItemState, LeaseToken, Queue, QueueName, Receipt,
        Timestamp, Want, deal,
    },
    store::{Reserved, Result},
};

/// Most items of one find.
const MAX_FIND: usize = 1_000;
/// Most finds of one reserve.
const MAX_ROUNDS: usize = 8;
/// A find whose answer is this large was cut short by the server, or nearly.
const LARGE_ANSWER: usize = 12 * 1024 * 1024;

/// What a find brought.
struct Found {
    items: Vec<Stored>,
    extent: Extent,
}

/// How much was seen of what a look was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// All of it.
    All,
    /// The first part: there may be more behind it.
    Cut,
    /// What was read ahead by an earlier look: nothing new is known of any level.
    Ahead,
}

/// Reserves items from the head of the queue.
pub(super) async fn reserve(inner: &Inner, queue: &Arc<Queue>, wants: &[Want]) -> Result<Reserved> {
    let wanted: usize = wants.iter().map(|want| want.max_items).sum();
    if wanted == 0 {
        return Ok(Reserved::default());
    }
    let group = inner.group(&queue.group).await?;
    let head = inner.head(&queue.name);
    let wanted = wanted.min(MAX_FIND);
    let mut sweep = head.sweep_due(false);
    let mut answer = Reserved::default();
    // Rounds that find nothing but what must be removed are not the caller's concern, within reason.
    for _ in 0..MAX_ROUNDS {
        let now = inner.now();
        let (look, found) = look(inner, &group, &head, queue, now, wanted, sweep).await?;
        if found.items.is_empty() {
            head.seen(&seen(look, &[], &[], found.extent, now));
            answer.more = false;
            // Perhaps a hint was lost.
            if sweep || !head.sweep_due(true) {
                break;
            }
            sweep = true;
            continue;
        }
        let round = hand_out(inner, &group, &head, queue, wants, look, found, now).await;
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

/// Looks at the head: at what was read ahead, from the watermarks, or from the start if it is a sweep.
async fn look(
    inner: &Inner,
    group: &Group,
    head: &Head,
    queue: &Queue,
    now: Timestamp,
    wanted: usize,
    sweep: bool,
) -> Result<(Look, Found)> {
    let begun = Instant::now();
    let Look { used, reread, .. } = head.look();
    if sweep {
        head.set_used(levels::in_index(inner, group.items.name(), &queue.name).await?, used);
        head.lapses.forget();
    } else if reread {
        head.add_used(levels::recorded(inner, &queue.name).await?);
    }
    if head.lapses.is_due(now) {
        let used = head.look_used();
        Leases { inner, group, head, queue: &queue.name, used }.reclaim(now).await?;
    }
    // From here on what gets ahead of the items to come is kept apart.
    let mut look = head.look();
    if sweep {
        look.marks = [START; 10];
    } else {
        let items = head.take_ahead(wanted);
        if !items.is_empty() {
            return Ok((look, Found { items, extent: Extent::Ahead }));
        }
    }
    let limit = head.limit(wanted).min(MAX_FIND);
    let found = find(inner, group, &queue.name, &look, now, limit).await?;
    let highest = each_level(look.used).next();
    let lowest = found.items.last().map(|item| item.priority);
    let more = found.extent == Extent::Cut && lowest == highest;
    head.found(&found.items, more);
    if sweep {
        head.swept(begun.elapsed());
    }
    Ok((look, found))
}

/// The command that finds the head: bounds of the hand-out index alone.
pub(super) fn find_command(
    collection: &str,
    queue: &QueueName,
    look: &Look,
    now: Timestamp,
    limit: usize,
) -> RawDocumentBuf {
    let range = |level: i32| {
        rawdoc! {
            "q": queue.as_str(),
            "priority": level,
            "when": { "$gte": millis(look.marks[level as usize]), "$lte": date(now) },
        }
    };
    let mut used = each_level(look.used);
    let filter = if let (Some(only), None) = (used.next(), used.next()) {
        range(only)
    } else {
        rawdoc! { "$or": each_level(look.used).map(range).collect::<RawArrayBuf>() }
    };
    rawdoc! {
        "find": collection,
        "filter": filter,
        "sort": { "priority": -1, "when": 1, "_id": 1 },
        "hint": HANDOUT,
        "limit": limit as i64,
        "batchSize": limit as i64,
        "singleBatch": true,
    }
}

async fn find(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    look: &Look,
    now: Timestamp,
    limit: usize,
) -> Result<Found> {
    let mut found = Found { items: Vec::new(), extent: Extent::All };
    if look.used == 0 {
        return Ok(found);
    }
    let command = find_command(group.items.name(), queue, look, now, limit);
    if let Some(batch) = read(&inner.db, command).await? {
        for document in batch.doc_slices().map_err(failed)? {
            let document = document.map_err(|e| broken(e.to_string()))?;
            let document = document.as_document().ok_or_else(|| broken("not a document"))?;
            found.items.push(Stored::read(document)?);
        }
        let bytes = batch.as_raw_document().as_bytes().len();
        if found.items.len() == limit || bytes > LARGE_ANSWER {
            found.extent = Extent::Cut;
        }
    }
    Ok(found)
}

/// Where the next look of each level may start, of items at these levels and times. `left`: those
/// that stay at the head.
fn seen(
    look: Look,
    items: &[(i32, i64)],
    left: &[(i32, i64)],
    found: Extent,
    now: Timestamp,
) -> Vec<Seen> {
    let lowest = items.last().map(|(level, _)| *level);
    each_level(look.used)
        .map(|level| {
            let before = look.before[level as usize];
            let first_left = left.iter().find(|(l, _)| *l == level).map(|(_, when)| *when);
            let last = items.iter().rev().find(|(l, _)| *l == level).map(|(_, when)| *when);
            let mark = match (first_left, last, found) {
                (Some(when), ..) => when,
                (None, last, Extent::Ahead) => last.unwrap_or(before),
                (None, Some(when), Extent::Cut) if lowest == Some(level) => when,
                // Cut before this level was reached: nothing is known of it.
                (None, None, Extent::Cut) if lowest.is_some_and(|lowest| level < lowest) => before,
                (None, last, _) => last.unwrap_or(START).max(Head::mark_of_empty(now)),
            };
            Seen { level, mark }
        })
        .collect()
}

#[expect(clippy::too_many_arguments, reason = "the steps of one operation")]
async fn hand_out(
    inner: &Inner,
    group: &Group,
    head: &Head,
    queue: &Arc<Queue>,
    wants: &[Want],
    look: Look,
    found: Found,
    now: Timestamp,
) -> Result<Reserved> {
    let Found { items, extent } = found;
    let places: Vec<(i32, i64)> = items.iter().map(|item| (item.priority, item.when)).collect();
    let (mut expired, mut dead, mut good) = (Vec::new(), Vec::new(), Vec::new());
    let mut good_at = Vec::new();
    for (at, item) in items.into_iter().enumerate() {
        if item.is_over(now) {
            expired.push(item);
        } else if item.lock.is_some() && queue.after_failure(item.attempt) == Fate::DeadLetter {
            dead.push(item);
        } else {
            good.push(item);
            good_at.push(at);
        }
    }
    let sizes: Vec<usize> = good.iter().map(|item| item.payload.len()).collect();
    let dealt = deal(&sizes, wants);
    let left: Vec<(i32, i64)> = good_at[dealt.len()..].iter().map(|at| places[*at]).collect();
    let some_left = !left.is_empty();
    let rest = good.split_off(dealt.len());
    let dealt_count = dealt.len();

    let (expired, dead_lettered, deliveries) = futures_util::future::try_join3(
        spent::remove_expired(inner, group, &queue.name, &expired, now),
        spent::remove_failed(inner, group, queue, &dead, now),
        claim(inner, group, head, queue, wants, good, &dealt, now),
    )
    .await?;

    head.seen(&seen(look, &places, &left, extent, now));
    let outrun = deliveries.len() < dealt_count;
    if outrun {
        head.forget_ahead();
    } else {
        head.put_back(rest);
    }
    // What was removed may have passed its turn on.
    let removed = expired + dead_lettered > 0;
    let more = extent != Extent::All || some_left || removed || outrun;
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
#[expect(clippy::too_many_arguments, reason = "the steps of one operation")]
async fn claim(
    inner: &Inner,
    group: &Group,
    head: &Head,
    queue: &Arc<Queue>,
    wants: &[Want],
    items: Vec<Stored>,
    dealt: &[usize],
    now: Timestamp,
) -> Result<Vec<(usize, Delivery)>> {
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
        "batchSize": MAX_FIND as i64,
        "singleBatch": true,
    };
    let mut won = HashSet::new();
    if let Some(batch) = read(&inner.db, command).await? {
        for document in batch.doc_slices().map_err(failed)? {
            let document = document.map_err(|e| broken(e.to_string()))?;
            let document = document.as_document().ok_or_else(|| broken("not a document"))?;
            won.insert(Stored::read(document)?.id());
        }
    }
    Ok(won)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::mongo::head::bit;

    #[test]
    fn a_level_that_a_sweep_did_not_reach_keeps_its_mark() {
        let look = Look {
            used: bit(9) | bit(5) | bit(0),
            marks: [START; 10],
            before: [500; 10],
            reread: false,
        };
        let now = Timestamp(10_000);
        let mark = |seen: &[Seen], level| seen.iter().find(|s| s.level == level).unwrap().mark;
        // Cut in level 5: above it all is known, in it up to the last item, below it nothing.
        let cut = seen(look, &[(9, 700), (5, 800)], &[], Extent::Cut, now);
        assert_eq!(mark(&cut, 9), Head::mark_of_empty(now));
        assert_eq!(mark(&cut, 5), 800);
        assert_eq!(mark(&cut, 0), 500);
        let whole = seen(look, &[(9, 700), (5, 800)], &[(5, 800)], Extent::All, now);
        assert_eq!(mark(&whole, 5), 800);
        assert_eq!(mark(&whole, 0), Head::mark_of_empty(now));
        let ahead = seen(look, &[(9, 700)], &[], Extent::Ahead, now);
        assert_eq!(mark(&ahead, 9), 700);
        assert_eq!(mark(&ahead, 0), 500);
    }
}
