//! Moves a reserved item to another queue of its group, by one update of its document.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{Document, RawDocumentBuf, doc, rawdoc};

use crate::{
    domain::{Outcome, PrioritySet, Queue, QueueName, Timestamp},
    store::{
        Move, Result,
        mongo::{
            Inner,
            ordering::{self, OrderKey},
            priorities::{self, InUse},
            schema::{
                item::{Stored, binary, literal, oid, texts, token_oid},
                layout::{BLOCKED, Group, millis},
                settled::{settle_token, settled_before, witness_end},
            },
            segment::detach::detach_held,
            server::statement::{Update, statement, update},
            settle::{
                lease::by_group,
                receipts::{first_places, look, look_at, repeated, stale},
            },
        },
    },
};

/// Limit of bytes of statements in one command, which MongoDB limits to 16 MiB.
const COMMAND_BYTES: usize = 12 * 1024 * 1024;

/// Moves items and returns the outcome of each.
pub(crate) async fn move_items(inner: &Arc<Inner>, items: Vec<Move>) -> Result<Vec<Outcome>> {
    let mut outcomes = vec![Outcome::Gone; items.len()];
    let (first, is_first) = first_places(items.iter().map(|item| &item.held.receipt));
    for (name, mut places) in by_group(items.iter().map(|item| &item.held.receipt.group)) {
        let group = inner.group(name).await?;
        places.retain(|at| is_first[*at]);
        move_in_group(inner, &group, &items, &places, &mut outcomes).await?;
    }
    for at in 0..items.len() {
        if !is_first[at] {
            outcomes[at] = repeated(outcomes[first[at]], false);
        }
    }
    Ok(outcomes)
}

async fn move_in_group(
    inner: &Inner,
    group: &Group,
    items: &[Move],
    places: &[usize],
    outcomes: &mut [Outcome],
) -> Result<()> {
    let ids = || places.iter().map(|at| items[*at].held.receipt.item);
    let held = places.iter().map(|at| &items[*at].held.receipt);
    detach_held(inner, group, held.map(|receipt| (receipt.item, receipt.token))).await?;
    let before = look_at(inner, group, ids(), rawdoc! { "payload": 0 }).await?;
    let now = inner.now();
    let mut held: Vec<(usize, &Stored)> = Vec::new();
    for &at in places {
        let receipt = &items[at].held.receipt;
        match before.get(&receipt.item) {
            Some(stored) if stored.is_held_by(receipt.token, now) => held.push((at, stored)),
            found => outcomes[at] = stale(found, now),
        }
    }
    let used = held.iter().map(|(at, stored)| InUse {
        queue: &items[*at].to.name,
        set: PrioritySet::of(priority(&items[*at], stored)),
        incarnation: None,
    });
    priorities::record(inner, group, used).await?;
    let numbers = numbers(inner, held.iter().map(|(at, s)| (&*items[*at].to, *s))).await?;

    let settled = settle_token(inner);
    let mut commands: Vec<Vec<RawDocumentBuf>> = Vec::new();
    let mut bytes = COMMAND_BYTES;
    let mut ours = Vec::with_capacity(held.len());
    for ((at, stored), number) in held.iter().zip(&numbers) {
        let item = &items[*at];
        let cached_lease = inner.lease_cache.take(&item.held.receipt);
        let statement = move_statement(
            item,
            stored,
            *number,
            settled,
            cached_lease.is_none().then(|| inner.now()),
        )?;
        ours.push(cached_lease.is_some_and(|cached_lease| cached_lease.deadline.is_none()));
        bytes += statement.as_bytes().len();
        if bytes > COMMAND_BYTES {
            bytes = statement.as_bytes().len();
            commands.push(Vec::new());
        }
        if let Some(command) = commands.last_mut() {
            command.push(statement);
        }
    }
    let mut n = Ok(0);
    for command in commands {
        if let Ok(sum) = n {
            n = update(inner, group, command).await.map(|n| n + sum);
        }
    }
    // Rewinds even if the outcome is unknown: the items may have moved, and a cursor must not skip them.
    for (at, stored) in held.iter().filter(|(_, stored)| stored.key.is_none()) {
        let item = &items[*at];
        inner
            .cursor(&item.to.name)
            .rewind(PrioritySet::of(priority(item, stored)), item.eligible_time.0);
    }
    let after = if n? == held.len() as u64 { None } else { Some(look(inner, group, ids()).await?) };
    let mut keys: Vec<OrderKey> = Vec::new();
    for ((at, stored), ours) in held.iter().zip(ours) {
        let receipt = &items[*at].held.receipt;
        outcomes[*at] = match after.as_ref().map(|found| found.get(&receipt.item)) {
            None => Outcome::Ok,
            Some(Some(found)) if found.was_settled_by(settled) => Outcome::Ok,
            // The first of two attempts moved the item, and its next holder has ended it since. Any other broker would
            // have left a tombstone.
            Some(None) if ours => Outcome::Ok,
            Some(found) => stale(found, now),
        };
        if let Some(key) = stored.key.as_ref().filter(|_| outcomes[*at] == Outcome::Ok) {
            keys.push((receipt.queue.clone(), key.clone()));
            keys.push((items[*at].to.name.clone(), key.clone()));
        }
    }
    ordering::unblock_settled(inner, group, &keys).await;
    Ok(())
}

fn priority(item: &Move, stored: &Stored) -> i32 {
    item.priority.map_or(stored.priority, |priority| i32::from(priority.level()))
}

/// Takes sequence numbers for items that enter a queue in which they need one; 0 for the others.
pub(crate) async fn numbers<'a>(
    inner: &Inner,
    entering: impl Iterator<Item = (&'a Queue, &'a Stored)> + Clone,
) -> Result<Vec<i64>> {
    let needs = |queue: &Queue, stored: &Stored| queue.sequenced || stored.key.is_some();
    let mut counts: HashMap<&QueueName, usize> = HashMap::new();
    for (queue, stored) in entering.clone() {
        *counts.entry(&queue.name).or_default() += usize::from(needs(queue, stored));
    }
    let mut next: HashMap<&QueueName, i64> = HashMap::new();
    for (queue, count) in counts {
        if count > 0 {
            next.insert(queue, ordering::take_numbers(inner, queue, count).await?);
        }
    }
    let number = |(queue, stored): (&'a Queue, &'a Stored)| match next.get_mut(&queue.name) {
        Some(next) if needs(queue, stored) => {
            *next += 1;
            *next - 1
        }
        _ => 0,
    };
    Ok(entering.map(number).collect())
}

/// Returns the statement that moves an item. `foreign` is the current time if the item was reserved by another broker
/// or may be settled by another call.
fn move_statement(
    item: &Move,
    stored: &Stored,
    number: i64,
    settled: mongodb::bson::oid::ObjectId,
    foreign: Option<Timestamp>,
) -> Result<RawDocumentBuf> {
    let receipt = &item.held.receipt;
    let filter = rawdoc! { "_id": oid(receipt.item), "lock": token_oid(receipt.token) };
    let mut set = doc! {
        "q": item.to.name.as_str(), "attempt": 1, "earlier": "$deliveries", "settled": settled,
        "settledBefore": settled_before(),
        "priority": priority(item, stored),
    };
    let mut unset =
        vec!["lock", "turn", "origin", "deadLettered", "failedAttempts", "reason", "started"];
    enter(&mut set, &mut unset, stored, item.eligible_time.0, number);
    if let Some(payload) = &item.payload {
        set.insert("payload", literal(binary(payload)));
    }
    if let Some(content_type) = &item.content_type {
        set.insert("contentType", literal(content_type.as_str()));
    }
    if !item.headers.is_empty() {
        let mut headers = stored.headers.clone();
        headers.extend(item.headers.clone());
        set.insert("headers", literal(texts(&headers)));
    }
    if let Some(now) = foreign {
        set.insert("trace", doc! { "$max": ["$trace", witness_end(now)] });
    }
    let stages = [doc! { "$set": set }, doc! { "$unset": unset }];
    Ok(statement(filter, Update::pipeline(&stages)?))
}

/// Adds the fields by which an item enters a queue. An item with a key is blocked until it is unblocked. With `number`
/// 0 an item with a key keeps its sequence number, and an item without a key loses it.
pub(crate) fn enter(
    set: &mut Document,
    unset: &mut Vec<&'static str>,
    stored: &Stored,
    when: i64,
    number: i64,
) {
    if stored.key.is_none() {
        set.insert("when", millis(when));
        set.insert("eligible", millis(when));
    } else {
        set.insert("when", millis(BLOCKED));
        set.insert("due", millis(when));
    }
    match number {
        0 if stored.key.is_none() => unset.push("seq"),
        0 => {}
        number => {
            set.insert("seq", number);
        }
    }
}
