//! Commits items. Concurrent calls share a delete. Items that must be remembered are updated instead.

use std::sync::Arc;

use futures_util::future::try_join_all;
use mongodb::bson::{RawArrayBuf, rawdoc};

use crate::{
    domain::{GroupName, IdSet, LeaseToken, Outcome, Timestamp},
    store::{
        Reservation, Result, StoreError,
        mongo::{
            Inner, ordering,
            schema::{
                item::{oids, token_oid},
                layout::{BY_ID, Group, durable},
            },
            segment,
            server::{
                connect::write,
                error::{broken, repeat},
            },
            settle::receipts::{
                Ending, end_exactly, first_places, known_key, look, lose_crossed, repeated, stale,
            },
        },
    },
};

/// Size in bytes of a receipt in a command.
const RECEIPT_BYTES: usize = 24;

/// Commits items and returns the outcome of each.
pub(crate) async fn commit(inner: &Arc<Inner>, items: Vec<Reservation>) -> Result<Vec<Outcome>> {
    let count = items.len();
    let mut lots: Vec<(GroupName, Vec<usize>, Vec<Reservation>)> = Vec::new();
    for (at, held) in items.into_iter().enumerate() {
        let group = &held.receipt.group;
        let place = lots.iter().position(|lot| lot.0 == *group).unwrap_or_else(|| {
            lots.push((group.clone(), Vec::new(), Vec::new()));
            lots.len() - 1
        });
        lots[place].1.push(at);
        lots[place].2.push(held);
    }
    let answered = try_join_all(lots.into_iter().map(|(group, at, items)| async move {
        Ok::<_, StoreError>(at.into_iter().zip(submit(inner, &group, items).await?))
    }))
    .await?;
    let mut outcomes = vec![None; count];
    for (at, outcome) in answered.into_iter().flatten() {
        outcomes[at] = Some(outcome);
    }
    outcomes.into_iter().collect::<Option<_>>().ok_or_else(|| broken("a commit was not answered"))
}

async fn submit(
    inner: &Arc<Inner>,
    group: &GroupName,
    items: Vec<Reservation>,
) -> Result<Vec<Outcome>> {
    let group = inner.group(group).await?;
    let batcher = Arc::clone(&group.commits);
    let bytes = items.len() * RECEIPT_BYTES;
    let inner = Arc::clone(inner);
    let tracker = inner.tracker.clone();
    let write = move |items: Vec<Reservation>| {
        let (inner, group) = (Arc::clone(&inner), Arc::clone(&group));
        inner.note_batch("settle", items.len());
        async move {
            let count = items.len();
            match commit_batch(&inner, &group, items).await {
                Ok(outcomes) => outcomes.into_iter().map(Ok).collect(),
                Err(error) => (0..count).map(|_| Err(repeat(&error))).collect::<Vec<_>>(),
            }
        }
    };
    batcher.submit(&tracker, items, bytes, None, write).await
}

async fn commit_batch(
    inner: &Inner,
    group: &Group,
    items: Vec<Reservation>,
) -> Result<Vec<Outcome>> {
    let now = inner.now();
    let (first, is_first) = first_places(items.iter().map(|held| &held.receipt));
    let receipts: Vec<_> = items.iter().map(|h| (h.receipt.item, h.receipt.token)).collect();
    let (mut direct, mut shared, mut exact) = (Vec::new(), Vec::new(), Vec::new());
    let (mut direct_at, mut shared_at, mut exact_at) = (Vec::new(), Vec::new(), Vec::new());
    for (at, held) in items.into_iter().enumerate() {
        if !is_first[at] {
            continue;
        }
        let cached_lease = inner.lease_cache.take(&held.receipt);
        let plain = held.queue.retention.is_zero()
            && cached_lease.as_ref().is_some_and(|i| {
                (!i.dedup || i.in_segment) && !i.leaves_tombstone && i.is_exclusive(now)
            });
        let in_segment = cached_lease.as_ref().is_some_and(|cached_lease| cached_lease.in_segment);
        let ending =
            Ending { receipt: held.receipt, queue: held.queue, cached_lease, failure: None };
        if plain && in_segment {
            shared.push(ending);
            shared_at.push(at);
        } else if plain {
            direct.push(ending);
            direct_at.push(at);
        } else {
            exact.push(ending);
            exact_at.push(at);
        }
    }
    let (deleted, left, ended) = futures_util::future::try_join3(
        delete(inner, group, &direct, now),
        segment::settle::commit(inner, group, &shared),
        end_exactly(inner, group, &exact),
    )
    .await?;
    let mut outcomes = vec![Outcome::Gone; first.len()];
    let answers = direct_at.into_iter().zip(deleted).chain(shared_at.into_iter().zip(left));
    for (at, outcome) in answers.chain(exact_at.into_iter().zip(ended)) {
        outcomes[at] = outcome;
    }
    lose_crossed(&receipts, &mut outcomes);
    for at in 0..first.len() {
        if !is_first[at] {
            outcomes[at] = repeated(outcomes[first[at]], true);
        }
    }
    Ok(outcomes)
}

/// Deletes items that only this broker can have changed.
async fn delete(
    inner: &Inner,
    group: &Group,
    endings: &[Ending],
    now: Timestamp,
) -> Result<Vec<Outcome>> {
    if endings.is_empty() {
        return Ok(Vec::new());
    }
    // One statement serves all items. Each of them was last handed out under the token of its receipt, so it cannot be
    // held under the token of another.
    let tokens: IdSet<LeaseToken> = endings.iter().map(|ending| ending.receipt.token).collect();
    let tokens: RawArrayBuf = tokens.into_iter().map(token_oid).collect();
    let ids = oids(endings.iter().map(|ending| ending.receipt.item));
    let delete = rawdoc! {
        "q": { "_id": { "$in": ids }, "lock": { "$in": tokens } },
        "limit": 0,
        "hint": BY_ID,
    };
    let command = rawdoc! {
        "delete": group.items.name(),
        "deletes": [delete],
        "ordered": false,
        "writeConcern": durable(),
    };
    let n = write(&inner.db, command).await?.n;
    let outcomes = if n == endings.len() as u64 {
        vec![Outcome::Ok; endings.len()]
    } else {
        let found = look(inner, group, endings.iter().map(|e| e.receipt.item)).await?;
        let outcome = |ending: &Ending| match found.get(&ending.receipt.item) {
            None => Outcome::Ok, // any other broker would have left a tombstone
            found => stale(found, now),
        };
        endings.iter().map(outcome).collect()
    };
    let keys: Vec<_> = endings.iter().filter_map(known_key).collect();
    ordering::unblock_settled(inner, group, &keys).await;
    Ok(outcomes)
}
