//! What this store does by itself for the queues that are consumed here: it finds ordering keys whose turn was lost in a
//! crash between two writes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::bson::{Bson, doc};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{GroupName, QueueName},
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

/// How often the queues are looked after.
const EVERY: Duration = Duration::from_secs(15);
/// How many entries of the index one step of [`repair`] looks at.
const STEP: i32 = 500;
/// How many steps one call of it takes.
const STEPS: usize = 4;

/// Looks after the queues until `stop`.
pub(super) async fn run(inner: Arc<Inner>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let started = Instant::now();
        round(&inner).await;
        if let Some(metrics) = inner.metrics.get() {
            metrics.swept(started.elapsed());
        }
    }
}

/// Makes ready what a crash between two writes left waiting for its turn, and says where. What fails is left for the
/// next round.
pub(super) async fn round(inner: &Inner) {
    for (queue, group) in inner.cursors.consumed() {
        if inner.stop.is_cancelled() || inner.check_format().is_err() {
            return;
        }
        match repair(inner, &queue, &group).await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(%queue, count, "gave ordering keys their turn back");
                inner.unblocked.add([queue]);
            }
            Err(error) => tracing::debug!(%queue, %error, "could not repair"),
        }
    }
}

/// Gives a turn to keys of the queue that have blocked items and no holder; answers how many. Walks on from
/// where the last call stopped, so that a call costs the same however many items are blocked.
pub(crate) async fn repair(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    ended::remove_ended(inner, &group, queue).await?;
    let cursor = inner.cursor(queue);
    let mut after = cursor.repaired.lock().take();
    let mut repaired = 0;
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

/// The same for all keys.
pub(crate) async fn repair_all(inner: &Inner, queue: &QueueName, group: &GroupName) -> Result<u64> {
    let group = inner.group(group).await?;
    ended::remove_ended(inner, &group, queue).await?;
    let (mut after, mut repaired) = (None, 0);
    loop {
        let (count, last) = repair_step(inner, &group, queue, after).await?;
        repaired += count;
        if last.is_none() {
            return Ok(repaired);
        }
        after = last;
    }
}

/// Repairs the keys of the next entries of the index; answers how many, and the last key looked at, `None` at
/// the end.
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
        .filter_map(|document| document.get_str("key").ok())
        .map(|key| (queue.clone(), key.to_owned()))
        .collect();
    keys.dedup();
    // The rest of the last key's items is passed over by one seek.
    let last = keys.last().map(|(_, key)| key.clone());
    let repaired = unblock(inner, group, &keys).await?.len() as u64;
    Ok((repaired, last))
}
