//! Rolls items back to their queue, or dead-letters them.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{Document, doc, oid::ObjectId};

use crate::{
    domain::{LeaseToken, Outcome, PrioritySet, QueueName, Timestamp},
    store::{
        Result, Rollback, RollbackTo,
        mongo::{
            Inner, ordering, priorities,
            schema::{
                item::literal,
                layout::{Group, date},
                settled::{held_filter, settle_token, settled_before, witness_end},
            },
            server::statement::{Update, statement, update},
            settle::{
                lease::by_group,
                receipts::{
                    Ending, end_exactly, first_places, known_key, look, repeated, stale,
                    was_settled,
                },
            },
        },
    },
};

/// What the items that one statement rolls back have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Alike {
    token: LeaseToken,
    to: RollbackTo,
    reason: Option<String>,
    /// Reserved by another broker, or being settled by another call.
    foreign: bool,
}

/// Rolls items back and returns the outcome of each.
pub(crate) async fn rollback(inner: &Arc<Inner>, items: Vec<Rollback>) -> Result<Vec<Outcome>> {
    let mut outcomes = vec![Outcome::Gone; items.len()];
    let (first, is_first) = first_places(items.iter().map(|item| &item.held.receipt));
    for (name, places) in by_group(items.iter().map(|item| &item.held.receipt.group)) {
        let group = inner.group(name).await?;
        let endings: HashMap<usize, Ending> = places
            .iter()
            .filter(|at| is_first[**at])
            .map(|&at| {
                let held = &items[at].held;
                let cached_lease = inner.lease_cache.take(&held.receipt);
                let (receipt, queue) = (held.receipt.clone(), Arc::clone(&held.queue));
                (at, Ending { receipt, queue, cached_lease })
            })
            .collect();
        let discards = |at: &usize| matches!(items[*at].to, RollbackTo::Discard { .. });
        let (discarded, given): (Vec<usize>, Vec<usize>) =
            endings.keys().partition(|at| discards(at));

        let ending: Vec<Ending> = discarded.iter().map(|at| endings[at].clone()).collect();
        let ended = end_exactly(inner, &group, &ending).await?;
        for (at, outcome) in discarded.into_iter().zip(ended) {
            outcomes[at] = as_dead_letter(outcome);
        }
        return_to_queues(inner, &group, &items, &endings, &given, &mut outcomes).await?;
    }
    for at in 0..items.len() {
        if !is_first[at] {
            outcomes[at] = repeated(outcomes[first[at]], false);
        }
    }
    Ok(outcomes)
}

fn as_dead_letter(outcome: Outcome) -> Outcome {
    if outcome == Outcome::Ok { Outcome::DeadLettered } else { outcome }
}

async fn return_to_queues(
    inner: &Inner,
    group: &Group,
    items: &[Rollback],
    endings: &HashMap<usize, Ending>,
    given: &[usize],
    outcomes: &mut [Outcome],
) -> Result<()> {
    if given.is_empty() {
        return Ok(());
    }
    let now = inner.now();
    // One token per lease, so that of two receipts of an item only the one that held it finds its own.
    let mut settled: HashMap<LeaseToken, ObjectId> = HashMap::new();
    let ids = || given.iter().map(|at| items[*at].held.receipt.item);
    let target = |at: &usize| match &items[*at].to {
        RollbackTo::DeadLetter { to, .. } => Some(to),
        RollbackTo::Queue { .. } | RollbackTo::Discard { .. } => None,
    };
    let dead = |at: &usize| target(at).is_some();
    // The priority of a dead letter must be recorded with its target queue.
    let unknown_leases = given.iter().any(|at| dead(at) && endings[at].cached_lease.is_none());
    let before = if unknown_leases { look(inner, group, ids()).await? } else { HashMap::new() };
    let priority = |at: &usize| -> Option<PrioritySet> {
        let found = before.get(&items[*at].held.receipt.item).map(|stored| stored.priority);
        endings[at].cached_lease.as_ref().map(|i| i.priority).or(found).map(PrioritySet::of)
    };
    let mut dead_levels: HashMap<&QueueName, PrioritySet> = HashMap::new();
    for at in given.iter().filter(|at| dead(at)) {
        if let Some(to) = target(at) {
            // The priority of an item that is gone is not known, and not needed.
            let known = priority(at).unwrap_or_default();
            *dead_levels.entry(to).or_default() |= known;
        }
    }
    for (queue, set) in dead_levels {
        priorities::record(inner, group, queue, set, None).await?;
    }

    let mut lots: HashMap<Alike, Vec<usize>> = HashMap::new();
    for at in given {
        let item = &items[*at];
        let token = item.held.receipt.token;
        // If this broker has no cached lease, another settle may be under way, on this broker or another.
        let foreign = endings[at].cached_lease.is_none();
        let alike = Alike { token, to: item.to.clone(), reason: item.reason.clone(), foreign };
        lots.entry(alike).or_default().push(*at);
    }
    let mut statements = Vec::new();
    for (alike, places) in &lots {
        let ids = places.iter().map(|at| items[*at].held.receipt.item);
        let filter = held_filter(ids, alike.token, now);
        let settled = *settled.entry(alike.token).or_insert_with(|| settle_token(inner));
        let queue = &items[places[0]].held.queue;
        let mut unset = vec!["lock"];
        let mut set = match &alike.to {
            RollbackTo::DeadLetter { to, failed_attempts, .. } => {
                unset.extend(["turn", "due"]);
                dead_letter(&queue.name, to, *failed_attempts, now)
            }
            RollbackTo::Queue { eligible_time, attempt, undelivered } => {
                let when = date(*eligible_time);
                let mut set =
                    doc! { "when": when, "eligible": when, "attempt": i64::from(*attempt) };
                if *undelivered {
                    let earlier = doc! { "$ifNull": ["$earlier", 0] };
                    set.insert("earlier", doc! { "$add": [earlier, 1] });
                }
                set
            }
            RollbackTo::Discard { .. } => continue, // committed above
        };
        set.insert("settled", settled);
        set.insert("settledBefore", settled_before());
        if let Some(reason) = &alike.reason {
            set.insert("reason", literal(reason.as_str()));
        }
        if alike.foreign {
            set.insert("trace", doc! { "$max": ["$trace", witness_end(now)] });
        }
        let change = Update::pipeline(&[doc! { "$set": set }, doc! { "$unset": unset }])?;
        statements.push(statement(filter, change));
    }
    let updated = update(inner, group, statements).await;
    // Rewinds even if the outcome is unknown: the items may be ready, and a cursor must not skip them.
    for at in given {
        let item = &items[*at];
        match &item.to {
            RollbackTo::Queue { eligible_time, .. } => {
                rewind(inner, &item.held.queue.name, priority(at), *eligible_time);
            }
            RollbackTo::DeadLetter { to, .. } => rewind(inner, to, priority(at), now),
            RollbackTo::Discard { .. } => {}
        }
    }
    let n = updated?;
    let keys_known = given
        .iter()
        .all(|at| !dead(at) || endings[at].cached_lease.is_some() || !endings[at].receipt.keyed);
    let after = if n == given.len() as u64 && keys_known {
        None
    } else {
        Some(look(inner, group, ids()).await?)
    };
    let mut keys = Vec::new();
    for at in given {
        let receipt = &items[*at].held.receipt;
        let ok = if dead(at) { Outcome::DeadLettered } else { Outcome::Ok };
        outcomes[*at] = match after.as_ref().map(|found| found.get(&receipt.item)) {
            None => {
                keys.extend(known_key(&endings[at]).filter(|_| dead(at)));
                ok
            }
            // The first of two attempts rolled the item back, and its next holder has ended it since. Any other broker
            // would have left a tombstone.
            Some(None)
                if endings[at].cached_lease.as_ref().is_some_and(|i| i.deadline.is_none()) =>
            {
                ok
            }
            Some(Some(stored)) if was_settled(stored, &settled, receipt.token) => {
                if dead(at) && !stored.key.is_empty() {
                    keys.push((receipt.queue.clone(), stored.key.clone()));
                }
                ok
            }
            Some(found) => stale(found, now),
        };
    }
    ordering::unblock(inner, group, &keys).await?;
    Ok(())
}

fn rewind(inner: &Inner, queue: &QueueName, priority: Option<PrioritySet>, when: Timestamp) {
    let cursor = inner.cursor(queue);
    // An unknown priority is one of those in use.
    cursor.rewind(priority.unwrap_or_else(|| cursor.priorities_in_use()), when.0);
}

/// Returns the fields that an update sets to dead-letter an item.
pub(crate) fn dead_letter(
    from: &QueueName,
    to: &QueueName,
    failed_attempts: u32,
    now: Timestamp,
) -> Document {
    let at = date(now);
    doc! {
        "q": to.as_str(), "when": at, "eligible": at, "origin": from.as_str(), "attempt": 1,
        "earlier": "$deliveries", "deadLettered": at, "failedAttempts": i64::from(failed_attempts),
    }
}
