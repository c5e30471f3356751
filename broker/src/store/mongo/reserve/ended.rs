//! Removes items at the head that must not be handed out: expired items, and items whose last allowed attempt ended
//! with a lapsed lease.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{DateTime, RawArrayBuf, doc, rawdoc};

use crate::{
    domain::{AtLimit, LimitReason, Outcome, Queue, QueueName, Receipt, Timestamp},
    store::{
        AtLimitCounts, Result,
        mongo::{
            Inner,
            ordering::{self, OrderKey},
            priorities::{self, InUse},
            schema::{
                item::{Stored, oids, token_oid},
                layout::{BY_ID, ENDS, Group, PROCESSED, date, durable, millis},
                settled::{Failure, WITNESS, bury, settle_token, settled_before},
            },
            server::{
                connect::{command_of, read, write},
                statement::{Update, statement},
            },
            settle::{
                receipts::{Ending, end_exactly, look, update_counted},
                rollback::dead_letter,
            },
        },
    },
};

/// Reason of a dead letter for which no consumer gave one.
const LAPSED: &str = "lease lapsed";
/// Limit of items that one step removes.
const STEP: i32 = 500;

fn keys_of(queue: &QueueName, items: &[Stored]) -> Vec<OrderKey> {
    items.iter().filter_map(|item| item.key.clone()).map(|key| (queue.clone(), key)).collect()
}

/// Removes expired items and returns how many there were. Items that another broker removed first are not counted.
pub(crate) async fn remove_expired(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    items: &[Stored],
    now: Timestamp,
) -> Result<u64> {
    if items.is_empty() {
        return Ok(0);
    }
    // An item leaves a tombstone if its deduplication window is open, or if a consumer, perhaps of another broker, may
    // still settle it.
    let remembered = |item: &Stored| {
        item.window.is_some_and(|window| window > now.0)
            || item.tombstone_until.is_some()
            || item.lock.is_some()
    };
    let (buried, deleted): (Vec<&Stored>, Vec<&Stored>) =
        items.iter().partition(|item| remembered(item));
    let filter = |items: &[&Stored]| {
        rawdoc! {
            "_id": { "$in": oids(items.iter().map(|item| item.id())) },
            "q": queue.as_str(),
            "when": { "$lt": millis(PROCESSED) },
            "deadline": { "$lte": date(now) },
        }
    };
    let mut n = 0;
    if !deleted.is_empty() {
        let delete = rawdoc! { "q": filter(&deleted), "limit": 0, "hint": BY_ID };
        let deletes: RawArrayBuf = [delete].into_iter().collect();
        let command = rawdoc! {
            "delete": group.items.name(),
            "deletes": deletes,
            "writeConcern": durable(),
        };
        let written = write(&inner.db, command).await?;
        n += written.n;
        if written.is_repeated {
            // Those that are gone were removed by one of the attempts, or by another broker at the same time.
            let there = look(inner, group, deleted.iter().map(|item| item.id())).await?;
            n = (deleted.len() - there.len()) as u64;
        }
    }
    if !buried.is_empty() {
        let settled = settle_token(inner);
        let statements = vec![statement(filter(&buried), Update::pipeline(&bury(now, settled))?)];
        let ids = buried.iter().map(|item| item.id());
        n += update_counted(inner, group, statements, settled, ids).await?;
    }
    ordering::unblock(inner, group, &keys_of(queue, items)).await?;
    Ok(n)
}

/// Removes expired ordered items, reserved or not, so that the next item of their keys is unblocked. Returns how many.
pub(crate) async fn remove_ended(inner: &Inner, group: &Group, queue: &QueueName) -> Result<u64> {
    let now = inner.now();
    let mut removed = 0;
    loop {
        let command = doc! {
            "find": group.items.name(), "hint": ENDS,
            "filter": {
                "q": queue.as_str(), "deadline": { "$lte": date(now) },
                "turn": { "$exists": true },
            },
            "projection": { "payload": 0, "headers": 0 }, "limit": STEP, "batchSize": STEP + 1,
        };
        let items = read(&inner.db, &command_of(&command)?, Stored::read).await?;
        match remove_expired(inner, group, queue, &items, now).await? {
            0 => return Ok(removed),
            count => removed += count,
        }
    }
}

/// An item whose lease lapsed at a limit.
pub(crate) struct Failed {
    pub(crate) item: Stored,
    pub(crate) reason: LimitReason,
    /// Number of failed attempts.
    pub(crate) attempts: u32,
}

/// Dead-letters or discards items whose leases lapsed at a limit, as the queue says, and returns how many there were of
/// each limit. Items that another broker removed first are not counted.
pub(crate) async fn remove_all_failed(
    inner: &Inner,
    group: &Group,
    queue: &Arc<Queue>,
    items: Vec<Failed>,
    now: Timestamp,
) -> Result<AtLimitCounts> {
    let mut counts = AtLimitCounts::default();
    let mut lots: HashMap<(LimitReason, u32), Vec<Stored>> = HashMap::new();
    for failed in items {
        lots.entry((failed.reason, failed.attempts)).or_default().push(failed.item);
    }
    for ((reason, failed_attempts), items) in lots {
        let n = remove_failed(inner, group, queue, &items, failed_attempts, now).await?;
        counts.add(reason, n);
    }
    Ok(counts)
}

async fn remove_failed(
    inner: &Inner,
    group: &Group,
    queue: &Arc<Queue>,
    items: &[Stored],
    failed_attempts: u32,
    now: Timestamp,
) -> Result<u64> {
    for item in items {
        inner.lease_cache.forget(item.id());
    }
    let to = match &queue.at_limit {
        AtLimit::DeadLetter(to) => to,
        AtLimit::Discard => return discard(inner, group, queue, items, failed_attempts).await,
        // The caller handles `Unknown`, and with `Nowhere` no item is at a limit.
        AtLimit::Unknown | AtLimit::Nowhere => return Ok(0),
    };
    let set = items.iter().map(|item| item.priority).collect();
    priorities::record(inner, group, [InUse { queue: to, set, incarnation: None }]).await?;
    let mut lots: HashMap<_, Vec<&Stored>> = HashMap::new();
    for item in items {
        lots.entry(item.lock).or_default().push(item);
    }
    let (settled, mut statements) = (settle_token(inner), Vec::new());
    for (token, lot) in lots {
        let Some(token) = token else { continue };
        let filter = rawdoc! {
            "_id": { "$in": oids(lot.iter().map(|item| item.id())) },
            "lock": token_oid(token),
            "when": { "$lte": date(now) },
        };
        let mut fields = dead_letter(&queue.name, to, failed_attempts, now);
        fields.insert("settled", settled);
        fields.insert("settledBefore", settled_before());
        fields.insert("reason", doc! { "$ifNull": ["$reason", LAPSED] });
        // The consumer may still settle the item through another broker, which must not take this settle for its own.
        let tombstone_until: DateTime = date(Timestamp(now.0 + WITNESS));
        fields.insert("trace", doc! { "$max": ["$trace", tombstone_until] });
        let stages = [doc! { "$set": fields }, doc! { "$unset": ["lock", "turn", "due"] }];
        statements.push(statement(filter, Update::pipeline(&stages)?));
    }
    let ids = items.iter().map(Stored::id);
    let n = update_counted(inner, group, statements, settled, ids).await;
    // Rewinds even if the outcome is unknown: the items may have moved, and a cursor must not skip them.
    inner.cursor(to).rewind(set, now.0);
    let n = n?;
    ordering::unblock(inner, group, &keys_of(&queue.name, items)).await?;
    Ok(n)
}

/// Ends items like a commit.
async fn discard(
    inner: &Inner,
    group: &Group,
    queue: &Arc<Queue>,
    items: &[Stored],
    failed_attempts: u32,
) -> Result<u64> {
    let receipt = |item: &Stored| {
        Some(Receipt {
            item: item.id(),
            token: item.lock?,
            deliveries: item.deliveries,
            earlier_deliveries: item.earlier,
            attempt: item.attempt,
            keyed: item.key.is_some(),
            queue: queue.name.clone(),
            group: queue.group.clone(),
        })
    };
    let endings: Vec<Ending> = items
        .iter()
        .filter_map(|item| {
            let receipt = receipt(item)?;
            let reason = item.reason.is_empty().then(|| LAPSED.to_owned());
            let failure = Some(Failure { failed_attempts, reason });
            Some(Ending { receipt, queue: Arc::clone(queue), cached_lease: None, failure })
        })
        .collect();
    let ended = end_exactly(inner, group, &endings).await?;
    Ok(ended.iter().filter(|outcome| **outcome == Outcome::Ok).count() as u64)
}
