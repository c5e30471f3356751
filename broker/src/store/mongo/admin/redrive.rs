//! Redrives: sends items of a dead-letter queue back.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{doc, rawdoc};

use crate::{
    domain::{ItemState, Queue, QueueName},
    store::{
        RedriveFilter, Redriven, Result,
        mongo::{
            Inner,
            admin::listing::{Listing, Position, reclaim},
            ordering::{self, OrderKey},
            priorities::{self, InUse},
            schema::{
                item::{Stored, oid},
                layout::{Group, date, millis},
                settled::{WITNESS, settle_token, settled_before},
            },
            server::{
                statement::{Update, statement},
                time_limit::read_in_time,
            },
            settle::{
                move_item::{enter, numbers},
                receipts::update_counted,
            },
        },
    },
};

/// Limit of items of one step.
const STEP: usize = 500;

/// Returns the queues from which the ready items of a dead-letter queue came.
pub(crate) async fn origins(inner: &Inner, queue: &Queue) -> Result<Vec<QueueName>> {
    let group = inner.group(&queue.group).await?;
    reclaim(inner, &group, queue, inner.now()).await?;
    let filter = doc! {
        "q": queue.name.as_str(), "when": { "$lte": date(inner.now()) },
        "origin": { "$exists": true },
    };
    let found = read_in_time(&inner.db, || group.items.distinct("origin", filter.clone())).await?;
    let names = found.iter().filter_map(|name| name.as_str());
    Ok(names.filter_map(|name| QueueName::parse("origin", name).ok()).collect())
}

fn matches(item: &Stored, filter: &RedriveFilter) -> bool {
    (filter.ids.is_empty() || filter.ids.contains(&item.id()))
        && filter.origin_queue.as_ref().is_none_or(|o| item.origin.as_deref() == Some(o.as_str()))
        && item.reason.contains(&filter.reason_contains)
        && filter.reason.as_ref().is_none_or(|reason| item.reason == *reason)
        && filter.created_from.is_none_or(|from| item.created >= from.0)
        && filter.created_before.is_none_or(|before| item.created < before.0)
}

/// Moves ready items of a dead-letter queue in hand-out order.
pub(crate) async fn redrive(
    inner: &Inner,
    queue: &Queue,
    to: &Arc<Queue>,
    filter: &RedriveFilter,
    cursor: Option<&str>,
    limit: u64,
) -> Result<Redriven> {
    let mut after = cursor.map(Position::parse).transpose()?;
    let group = inner.group(&queue.group).await?;
    let now = inner.now();
    let used = reclaim(inner, &group, queue, now).await?;
    let listing = Listing {
        group: &group,
        queue,
        used,
        state: Some(ItemState::Ready),
        now: filter.ready_by.map_or(now, |by| by.min(now)),
        with_payload: false,
    };
    let mut moved = 0;
    while moved < limit {
        let (mut items, mut next) = if filter.ids.is_empty() {
            listing.ready(inner, after, STEP).await?
        } else {
            listing.ready_of(inner, &filter.ids).await?
        };
        items.retain(|item| matches(item, filter) && !item.is_over(now));
        let room = usize::try_from(limit - moved).unwrap_or(usize::MAX);
        if items.len() >= room {
            items.truncate(room);
            next = items.last().map(Position::of);
        }
        moved += send(inner, &group, queue, to, &items).await?;
        after = next;
        if after.is_none() {
            break;
        }
    }
    Ok(Redriven { items: moved, next: after.map(|after| after.to_string()) })
}

async fn send(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    to: &Arc<Queue>,
    items: &[Stored],
) -> Result<u64> {
    if items.is_empty() {
        return Ok(0);
    }
    let set = items.iter().map(|item| item.priority).collect();
    let used = InUse { queue: &to.name, set, incarnation: Some(to.create_time) };
    priorities::record(inner, group, [used]).await?;
    let (now, settled) = (inner.now(), settle_token(inner));
    let returns = |item: &Stored| item.origin.as_deref() == Some(to.name.as_str());
    let entering: Vec<(&Queue, &Stored)> =
        items.iter().filter(|item| !returns(item)).map(|item| (&**to, item)).collect();
    let given = numbers(inner, entering.iter().copied()).await?;
    let given: HashMap<_, i64> = entering.iter().map(|(_, item)| item.id()).zip(given).collect();
    let mut statements = Vec::with_capacity(items.len());
    for item in items {
        // Matches the item only as it was read, not if it has been reserved meanwhile.
        let filter = rawdoc! {
            "_id": oid(item.id()),
            "q": queue.name.as_str(),
            "when": millis(item.when),
            "deliveries": i64::from(item.deliveries),
        };
        let mut set = doc! {
            "q": to.name.as_str(), "attempt": 1, "earlier": "$deliveries", "settled": settled,
            "settledBefore": settled_before(),
        };
        let mut unset = vec!["lock", "origin", "deadLettered", "failedAttempts", "started"];
        enter(&mut set, &mut unset, item, now.0, given.get(&item.id()).copied().unwrap_or(0));
        if returns(item) {
            unset.retain(|field| *field != "seq");
        }
        if item.lock.is_some() {
            set.insert("trace", millis(now.0 + WITNESS));
        }
        let stages = [doc! { "$set": set }, doc! { "$unset": unset }];
        statements.push(statement(filter, Update::pipeline(&stages)?));
        inner.lease_cache.forget(item.id());
    }
    let ids = items.iter().map(Stored::id);
    let n = update_counted(inner, group, statements, settled, ids).await;
    // Rewinds even if the outcome is unknown: the items may have moved, and a cursor must not skip them.
    inner.cursor(&to.name).rewind(set, now.0);
    let n = n?;
    let keys: Vec<OrderKey> = items
        .iter()
        .filter_map(|item| item.key.clone())
        .map(|key| (to.name.clone(), key))
        .collect();
    ordering::unblock(inner, group, &keys).await?;
    Ok(n)
}
