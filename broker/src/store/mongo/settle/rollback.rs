//! Rolls items back to their queue, or dead-letters them.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{Document, RawDocumentBuf, doc, oid::ObjectId};

use crate::{
    domain::{ItemId, LeaseToken, Outcome, PrioritySet, QueueName, Timestamp},
    store::{
        EndedDelivery, Result, Rollback, RollbackTo,
        mongo::{
            Inner,
            cursor::lease_cache::CachedLease,
            ordering::{self, OrderKey},
            priorities::{self, InUse},
            schema::{
                item::{Stored, literal, token_oid},
                layout::{Group, date},
                settled::{Failure, held_filter, settle_token, settled_before, witness_end},
            },
            segment::detach::detach_to_return,
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
                let failure = failure_of(&items[at]);
                (at, Ending { receipt, queue, cached_lease, failure })
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

fn failure_of(item: &Rollback) -> Option<Failure> {
    match item.to {
        RollbackTo::Discard { failed_attempts, .. } => {
            Some(Failure { failed_attempts, reason: item.reason.clone() })
        }
        RollbackTo::Queue { .. } | RollbackTo::DeadLetter { .. } => None,
    }
}

fn as_dead_letter(outcome: Outcome) -> Outcome {
    if outcome == Outcome::Ok { Outcome::DeadLettered } else { outcome }
}

/// Rolls back the items at the positions `given`, none of which is discarded.
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
    let held = given.iter().map(|at| &items[*at].held.receipt);
    detach_to_return(inner, group, held.map(|receipt| (receipt.item, receipt.token))).await?;
    let now = inner.now();
    let batch = Batch { inner, group, items, endings, given };
    let before = batch.record_dead_letter_priorities().await?;
    // One token per lease, so that of two receipts of an item only the one that held it finds its own.
    let mut settled: HashMap<LeaseToken, ObjectId> = HashMap::new();
    let statements = batch.statements(&mut settled, now)?;
    let updated = update(inner, group, statements).await;
    // Rewinds even if the outcome is unknown: the items may be ready, and a cursor must not skip them.
    batch.rewind_cursors(&before, now);
    let all = updated? == given.len() as u64;
    let after =
        if all && batch.keys_known() { None } else { Some(look(inner, group, batch.ids()).await?) };
    let mut keys = Vec::new();
    for &at in given {
        outcomes[at] = match &after {
            None => {
                keys.extend(known_key(&endings[&at]).filter(|_| batch.is_dead_letter(at)));
                batch.success(at)
            }
            Some(found) => batch.outcome_as_found(at, found, &settled, now, &mut keys),
        };
    }
    ordering::unblock_settled(inner, group, &keys).await;
    Ok(())
}

/// Items of one group that go back to their queues or to dead-letter queues in one update.
struct Batch<'a> {
    inner: &'a Inner,
    group: &'a Group,
    items: &'a [Rollback],
    endings: &'a HashMap<usize, Ending>,
    given: &'a [usize],
}

impl Batch<'_> {
    fn ids(&self) -> impl Iterator<Item = ItemId> {
        self.given.iter().map(|at| self.items[*at].held.receipt.item)
    }

    fn dead_letter_queue(&self, at: usize) -> Option<&QueueName> {
        match &self.items[at].to {
            RollbackTo::DeadLetter { to, .. } => Some(to),
            RollbackTo::Queue { .. } | RollbackTo::Discard { .. } => None,
        }
    }

    fn is_dead_letter(&self, at: usize) -> bool {
        self.dead_letter_queue(at).is_some()
    }

    fn cached_lease(&self, at: usize) -> Option<&CachedLease> {
        self.endings[&at].cached_lease.as_ref()
    }

    fn success(&self, at: usize) -> Outcome {
        if self.is_dead_letter(at) { Outcome::DeadLettered } else { Outcome::Ok }
    }

    /// Returns true if the key of every dead letter is known without a read.
    fn keys_known(&self) -> bool {
        self.given.iter().all(|at| {
            !self.is_dead_letter(*at)
                || self.cached_lease(*at).is_some()
                || !self.endings[at].receipt.keyed
        })
    }

    /// Returns the priority of an item; `before` holds the items that were read for it.
    fn priority(&self, at: usize, before: &HashMap<ItemId, Stored>) -> Option<PrioritySet> {
        let found = || before.get(&self.items[at].held.receipt.item).map(|stored| stored.priority);
        self.cached_lease(at).map(|lease| lease.priority).or_else(found).map(PrioritySet::of)
    }

    /// Records the priorities of dead letters with their target queues. Returns the items that had to be read for that:
    /// all of the batch, if this broker has no cached lease of a dead letter, otherwise none.
    async fn record_dead_letter_priorities(&self) -> Result<HashMap<ItemId, Stored>> {
        let dead = || self.given.iter().copied().filter(|at| self.is_dead_letter(*at));
        let before = if dead().any(|at| self.cached_lease(at).is_none()) {
            look(self.inner, self.group, self.ids()).await?
        } else {
            HashMap::new()
        };
        let used = dead().filter_map(|at| {
            // The priority of an item that is gone is not known, and not needed.
            let set = self.priority(at, &before).unwrap_or_default();
            Some(InUse { queue: self.dead_letter_queue(at)?, set, incarnation: None })
        });
        priorities::record(self.inner, self.group, used).await?;
        Ok(before)
    }

    /// Returns one statement for each set of items that are changed alike. Adds the settle token of each lease to
    /// `settled`.
    fn statements(
        &self,
        settled: &mut HashMap<LeaseToken, ObjectId>,
        now: Timestamp,
    ) -> Result<Vec<RawDocumentBuf>> {
        let mut lots: HashMap<Alike, Vec<usize>> = HashMap::new();
        for &at in self.given {
            let item = &self.items[at];
            let token = item.held.receipt.token;
            // If this broker has no cached lease, another settle may be under way, on this broker or another.
            let foreign = self.cached_lease(at).is_none();
            let alike = Alike { token, to: item.to.clone(), reason: item.reason.clone(), foreign };
            lots.entry(alike).or_default().push(at);
        }
        let mut statements = Vec::with_capacity(lots.len());
        for (alike, places) in &lots {
            let ids = places.iter().map(|at| self.items[*at].held.receipt.item);
            let filter = held_filter(ids, alike.token, now);
            let settled = *settled.entry(alike.token).or_insert_with(|| settle_token(self.inner));
            let queue = &self.items[places[0]].held.queue;
            if let Some(change) = alike.change(&queue.name, settled, now)? {
                statements.push(statement(filter, change));
            }
        }
        Ok(statements)
    }

    /// Rewinds the cursor of each queue to the items that have come into it.
    fn rewind_cursors(&self, before: &HashMap<ItemId, Stored>, now: Timestamp) {
        for &at in self.given {
            let item = &self.items[at];
            let (queue, when) = match &item.to {
                RollbackTo::Queue { eligible_time, .. } => (&item.held.queue.name, *eligible_time),
                RollbackTo::DeadLetter { to, .. } => (to, now),
                RollbackTo::Discard { .. } => continue,
            };
            let cursor = self.inner.cursor(queue);
            // An unknown priority is one of those in use.
            let priority = self.priority(at, before).unwrap_or_else(|| cursor.priorities_in_use());
            cursor.rewind(priority, when.0);
        }
    }

    /// Returns the outcome of one item from the documents as they are after the update. Adds the key of a dead letter
    /// to `keys`.
    fn outcome_as_found(
        &self,
        at: usize,
        found: &HashMap<ItemId, Stored>,
        settled: &HashMap<LeaseToken, ObjectId>,
        now: Timestamp,
        keys: &mut Vec<OrderKey>,
    ) -> Outcome {
        let receipt = &self.items[at].held.receipt;
        match found.get(&receipt.item) {
            // The first of two attempts rolled the item back, and its next holder has ended it since. Any other broker
            // would have left a tombstone.
            None if self.cached_lease(at).is_some_and(|lease| lease.deadline.is_none()) => {
                self.success(at)
            }
            Some(stored) if was_settled(stored, settled, receipt.token) => {
                if let Some(key) = stored.key.as_ref().filter(|_| self.is_dead_letter(at)) {
                    keys.push((receipt.queue.clone(), key.clone()));
                }
                self.success(at)
            }
            found => stale(found, now),
        }
    }
}

impl Alike {
    /// Returns the update of these items, which are in `queue`; `None` if they are discarded, which another update does.
    fn change(
        &self,
        queue: &QueueName,
        settled: ObjectId,
        now: Timestamp,
    ) -> Result<Option<Update>> {
        let mut unset = vec!["lock"];
        let mut set = match &self.to {
            RollbackTo::DeadLetter { to, failed_attempts, .. } => {
                unset.extend(["turn", "due"]);
                dead_letter(queue, to, *failed_attempts, now)
            }
            RollbackTo::Queue { eligible_time, attempt, ended } => {
                let when = date(*eligible_time);
                let mut set =
                    doc! { "when": when, "eligible": when, "attempt": i64::from(*attempt) };
                match ended {
                    EndedDelivery::Counted => {}
                    EndedDelivery::Withdrawn => {
                        let earlier = doc! { "$ifNull": ["$earlier", 0] };
                        set.insert("earlier", doc! { "$add": [earlier, 1] });
                    }
                    EndedDelivery::Unsent { former_lease } => {
                        set.insert("deliveries", doc! { "$subtract": ["$deliveries", 1] });
                        if let Some(lease) = former_lease {
                            unset.clear();
                            set.insert("lock", token_oid(*lease));
                        }
                    }
                }
                set
            }
            RollbackTo::Discard { .. } => return Ok(None),
        };
        set.insert("settled", settled);
        set.insert("settledBefore", settled_before());
        if let Some(reason) = &self.reason {
            set.insert("reason", literal(reason.as_str()));
        }
        if self.foreign {
            set.insert("trace", doc! { "$max": ["$trace", witness_end(now)] });
        }
        let mut stages = vec![doc! { "$set": set }];
        if !unset.is_empty() {
            stages.push(doc! { "$unset": unset });
        }
        Update::pipeline(&stages).map(Some)
    }
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
