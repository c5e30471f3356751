//! The store's own upkeep of the queues that are consumed here: it unblocks ordering keys whose next item was not
//! unblocked because a broker crashed between two writes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::bson::{Bson, doc};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{GroupName, OrderingKey, QueueName},
    store::{
        Result,
        mongo::{
            Inner,
            ordering::{OrderKey, unblock},
            reserve::ended,
            schema::layout::{Group, WAITING},
            server::connect::read_documents,
        },
    },
};

/// Pause between rounds.
const EVERY: Duration = Duration::from_secs(15);
/// Index entries that one step of [`repair`] reads.
const STEP: i32 = 500;
/// Steps of one call of [`repair`].
const STEPS: usize = 4;

/// Runs the upkeep until `stop`.
pub(super) async fn run(inner: Arc<Inner>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let started = Instant::now();
        round(&inner).await;
        if let Some(metrics) = inner.metrics.get() {
            metrics.swept(started.elapsed());
        }
    }
}

/// Unblocks items that a crash between two writes left blocked, and notes their queues. What fails is left to the next
/// round.
pub(super) async fn round(inner: &Inner) {
    for (queue, group) in inner.cursors.consumed() {
        if inner.stop.is_cancelled() || inner.check_format().is_err() {
            return;
        }
        match repair(inner, &queue, &group).await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(%queue, count, "unblocked items that a crash had left blocked");
                inner.unblocked.add([queue]);
            }
            Err(error) => tracing::debug!(%queue, %error, "could not repair"),
        }
    }
}

/// Removes expired ordered items of the queue, unblocks the first item of keys that have only blocked items, and returns
/// how many items that were in all. Goes on where the last call stopped, so that a call costs the same however many items are
/// blocked.
pub(crate) async fn repair(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    let mut repaired = ended::remove_ended(inner, &group, queue).await?;
    let cursor = inner.cursor(queue);
    let mut after = cursor.repaired.lock().take();
    for _ in 0..STEPS {
        let (count, last) = repair_step(inner, &group, queue, after).await?;
        repaired += count;
        after = last;
        if after.is_none() {
            break;
        }
    }
    *cursor.repaired.lock() = after;
    Ok(repaired)
}

/// Like [`repair`], for all keys.
pub(crate) async fn repair_all(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    let mut repaired = ended::remove_ended(inner, &group, queue).await?;
    let mut after = None;
    loop {
        let (count, last) = repair_step(inner, &group, queue, after).await?;
        repaired += count;
        if last.is_none() {
            return Ok(repaired);
        }
        after = last;
    }
}

/// Repairs the keys of the next index entries. Returns how many items it unblocked, and the last key that it read,
/// `None` at the end.
async fn repair_step(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    after: Option<String>,
) -> Result<(u64, Option<String>)> {
    let after = after.map_or(Bson::MinKey, Bson::String);
    let command = doc! {
        "find": group.items.name(),
        "filter": { "q": queue.as_str(), "key": { "$gt": after }, "due": { "$exists": true } },
        "sort": { "q": 1, "key": 1, "seq": 1 }, "projection": { "_id": 0, "key": 1 },
        "hint": WAITING, "limit": STEP, "batchSize": STEP + 1,
    };
    let found = read_documents(&inner.db, command).await?;
    let mut keys: Vec<OrderKey> = found
        .iter()
        .filter_map(|document| document.get_str("key").ok().and_then(OrderingKey::new))
        .map(|key| (queue.clone(), key))
        .collect();
    keys.dedup();
    // One seek skips the other items of the last key.
    let last = keys.last().map(|(_, key)| key.to_string());
    let repaired = unblock(inner, group, &keys).await?.len() as u64;
    Ok((repaired, last))
}
