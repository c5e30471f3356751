//! Ordered items. Their sequence numbers are stored in the order in which they are taken, across all brokers.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use mongodb::{
    ClientSession,
    bson::{Document, doc},
    options::Hint,
};
use tokio_stream::StreamExt;

use crate::{
    domain::{OrderingKey, Pushed, QueueName, Timestamp},
    store::{
        Push, Result,
        mongo::{
            Inner,
            ordering::{self, OrderKey, counter_id, taking},
            push::{
                Marks,
                dedup::{self, DedupKey, First, key_of},
                duplicate, is_ordered, order_key, stored, wake,
            },
            schema::{
                item::{Start, encode},
                layout::{DEDUP, Group, TURN, WAITING},
            },
            server::transaction::{Failure, Patience, attempt_in_time, begin, commit},
        },
    },
};

/// Stores items of one group. Their sequence numbers follow the order in which such calls are answered, because the
/// document of the counter lets one transaction through at a time.
pub(crate) async fn push_in_order(
    inner: &Arc<Inner>,
    group: &Group,
    items: &[Push],
) -> Result<Vec<Pushed>> {
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let mut marks = Marks::default();
        let attempt = async {
            let pushed = insert(inner, group, items, &mut session, &mut marks).await?;
            commit(&mut session).await?;
            Ok(pushed)
        };
        let outcome = attempt_in_time(attempt).await;
        // The rewind follows the commit: a scan between an earlier rewind and the commit would find nothing and advance
        // the watermarks again. It happens even if the outcome is unknown, because the items may be stored.
        marks.rewind(inner);
        if let Some(mut pushed) = patience.after(&mut session, outcome).await? {
            wake(inner, group, items, pushed.iter_mut()).await;
            return Ok(pushed);
        }
    }
}

/// Inserts items of one group within the transaction, and adds the items that become ready to `marks`. A unique index
/// that refuses a document ends the transaction, so ids and keys are looked up first.
pub(crate) async fn insert<'a>(
    inner: &Inner,
    group: &Group,
    items: &'a [Push],
    session: &mut ClientSession,
    marks: &mut Marks<'a>,
) -> Result<Vec<Pushed>, Failure> {
    let now = inner.now();
    let mut first = firsts(group, items, now, session).await?;
    let mut here: HashMap<DedupKey, usize> = HashMap::new();
    let mut results: Vec<Option<Pushed>> = vec![None; items.len()];
    let mut starts: Vec<Option<Start>> = Vec::with_capacity(items.len());
    for (at, push) in items.iter().enumerate() {
        let id = inner.ids.next(now);
        let key = key_of(push);
        let known = key.as_ref().and_then(|key| first.get(key)).copied();
        if let (None, Some(key)) = (known, key) {
            let new = First { id, document: id, sequence: None, window: now, tombstone: false };
            first.insert(key.clone(), new);
            here.insert(key, at);
        }
        results[at] = known.map(duplicate);
        let start = Start { id, now, sequence: None, blocked: false };
        starts.push(known.is_none().then_some(start));
    }
    let mut counts: HashMap<&QueueName, i64> = HashMap::new();
    for (push, _) in items.iter().zip(&starts).filter(|(p, s)| is_ordered(p) && s.is_some()) {
        *counts.entry(&push.queue.name).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_unstable(); // one order for all, so that transactions do not deadlock
    let mut next: HashMap<&QueueName, i64> = HashMap::new();
    for (queue, count) in counts {
        next.insert(queue, take_numbers(inner, queue, count, session).await?);
    }
    let keys: Vec<OrderKey> = items.iter().filter_map(order_key).collect();
    let mut behind = taken(group, &keys, session).await?;
    let mut documents = Vec::new();
    for (at, push) in items.iter().enumerate() {
        let Some(start) = &mut starts[at] else { continue };
        if is_ordered(push)
            && let Some(next) = next.get_mut(&push.queue.name)
        {
            start.sequence = Some(*next);
            *next += 1;
        }
        start.blocked = order_key(push).is_some_and(|key| !behind.insert(key));
        documents.push(encode(push, start)?);
        results[at] = Some(stored(push, start));
    }
    for (at, push) in items.iter().enumerate().filter(|(at, _)| starts[*at].is_none()) {
        // If the first item is in this call, it has its number only now.
        let original = key_of(push).and_then(|key| results[*here.get(&key)?]);
        if let (Some(result), Some(original)) = (&mut results[at], original) {
            result.sequence = original.sequence;
        }
    }
    for (push, start) in items.iter().zip(&starts) {
        if let Some(start) = start {
            marks.add(push, start);
        }
    }
    if !documents.is_empty() {
        group.items.insert_many(&documents).session(session).await?;
    }
    Ok(results.into_iter().flatten().collect())
}

/// Returns the first items with the deduplication ids of these items. Ids whose windows have ended are removed.
async fn firsts(
    group: &Group,
    items: &[Push],
    now: Timestamp,
    session: &mut ClientSession,
) -> Result<HashMap<DedupKey, First>, Failure> {
    let keys: HashSet<DedupKey> = items.iter().filter_map(key_of).collect();
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let keys: Vec<DedupKey> = keys.into_iter().collect();
    let mut cursor = group
        .items
        .clone_with_type::<Document>()
        .find(dedup::filter(&keys))
        .projection(dedup::projection())
        .hint(Hint::Name(DEDUP.to_owned()))
        .session(&mut *session)
        .await?;
    let found: Vec<Document> = cursor.stream(session).collect::<Result<_, _>>().await?;
    let mut firsts = dedup::firsts(&found)?;
    let over: Vec<DedupKey> =
        firsts.iter().filter(|(_, f)| f.window <= now).map(|(key, _)| key.clone()).collect();
    for key in over {
        if let Some(first) = firsts.remove(&key)
            && keys.contains(&key)
        {
            let (filter, update) = dedup::forgetting(&first);
            group.items.update_one(filter, update).session(&mut *session).await?;
        }
    }
    Ok(firsts)
}

async fn take_numbers(
    inner: &Inner,
    queue: &QueueName,
    n: i64,
    session: &mut ClientSession,
) -> Result<i64, Failure> {
    let counter = inner
        .db
        .collection::<Document>("counters")
        .find_one_and_update(doc! { "_id": counter_id(queue) }, taking(n))
        .upsert(true)
        .return_document(mongodb::options::ReturnDocument::After)
        .session(session)
        .await?;
    let last = counter
        .as_ref()
        .and_then(|c| c.get("next"))
        .and_then(crate::store::mongo::server::error::integer);
    Ok(last.unwrap_or(n) - n + 1)
}

/// Returns the keys whose new items are blocked: those with an item that is out or may go out, and those with blocked
/// items.
async fn taken(
    group: &Group,
    keys: &[OrderKey],
    session: &mut ClientSession,
) -> Result<HashSet<OrderKey>, Failure> {
    let mut taken = HashSet::new();
    for (queue, keys) in ordering::by_queue(keys) {
        for keys in keys.chunks(1_000) {
            let items = group.items.clone_with_type::<Document>();
            let mut cursor = items
                .find(doc! { "q": queue.as_str(), "turn": { "$in": keys } })
                .projection(doc! { "_id": 0, "turn": 1 })
                .hint(Hint::Name(TURN.to_owned()))
                .session(&mut *session)
                .await?;
            let held: Vec<Document> = cursor.stream(session).collect::<Result<_, _>>().await?;
            let held: HashSet<&str> = held.iter().filter_map(|d| d.get_str("turn").ok()).collect();
            let free: Vec<&str> = keys.iter().copied().filter(|key| !held.contains(key)).collect();
            taken.extend(
                held.into_iter().filter_map(OrderingKey::new).map(|key| (queue.clone(), key)),
            );
            if free.is_empty() {
                continue;
            }
            let mut cursor = items
                .aggregate(ordering::waiting_pipeline(queue, &free))
                .hint(Hint::Name(WAITING.to_owned()))
                .session(&mut *session)
                .await?;
            let waiting: Vec<Document> = cursor.stream(session).collect::<Result<_, _>>().await?;
            let waiting = waiting.iter().filter_map(|d| d.get_str("_id").ok());
            taken.extend(waiting.filter_map(OrderingKey::new).map(|key| (queue.clone(), key)));
        }
    }
    Ok(taken)
}
