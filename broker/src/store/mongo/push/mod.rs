//! Stores items. Concurrent calls share an insert, and each call gets its own results.

pub(super) mod dedup;
pub(super) mod ordered;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use crate::{
    domain::{ItemId, PrioritySet, Pushed, QueueName},
    store::{
        Push, Result,
        mongo::{
            Inner,
            cursor::lease_cache::CachedLease,
            ordering::{self, OrderKey},
            priorities::{self, InUse},
            push::dedup::{First, key_of},
            reserve::claims::Claim,
            schema::{
                item::{self, Start, check},
                layout::Group,
            },
            segment::{
                form::{self, Plan, Unit},
                seen::{Front, Seen},
            },
            server::{
                error::{repeat, unavailable},
                group_commit::Lane,
                insert::{Refusal, insert_documents},
            },
        },
    },
};

/// Approximate size in bytes of an item besides its payload, headers and deduplication id.
const ENVELOPE: usize = 300;
/// Limit of attempts to insert an item that a unique index refuses.
const ROUNDS: usize = 5;

/// Returns true if the item takes a sequence number.
pub(super) fn is_ordered(push: &Push) -> bool {
    push.queue.numbers(&push.item)
}

/// Stores items and returns the result of each. The items queue for their write when this future is first polled. The
/// write does not belong to the caller's task, so that it runs to its end even if the caller goes away.
pub(super) async fn push(inner: &Arc<Inner>, mut items: Vec<Push>) -> Result<Vec<Pushed>> {
    // A document that is too large is refused here: in a shared insert it would fail the items of other calls.
    items.iter().try_for_each(|push| check(&push.item))?;
    let Some(queue) = items.first().map(|push| Arc::clone(&push.queue)) else {
        return Ok(Vec::new());
    };
    // All items are ordered if one is, so that they are handed out in the order of the call.
    let ordered = items.iter().any(is_ordered);
    // Nothing may be awaited before the batcher has the items: until then the order of the calls holds.
    let group = inner.group_as_it_is(&queue.group);
    let lease = first_lease(inner, &group, &queue.name, &mut items);
    let bytes = items.iter().map(|push| form::bytes_of(push) + ENVELOPE).sum();
    let batcher = Arc::clone(if ordered { &group.ordered } else { &group.plain });
    // The items of a queue become visible in the order of the calls.
    let lane = (!ordered).then(|| Lane::of(queue.name.as_str()));
    let inner = Arc::clone(inner);
    let tracker = inner.tracker.clone();
    let write = move |items: Vec<Push>| {
        let (inner, group) = (Arc::clone(&inner), Arc::clone(&group));
        inner.note_batch("push", items.len());
        // Ids are taken here, in the order of the calls, because the writes themselves may run concurrently.
        let plan =
            (!ordered).then(|| form::plan(&inner.ids, inner.now(), &items, inner.segment_size));
        async move {
            let count = items.len();
            match write(&inner, &group, items, plan).await {
                Ok(results) => results,
                Err(error) => (0..count).map(|_| Err(repeat(&error))).collect(),
            }
        }
    };
    // If the push fails, or nobody waits for it any more, dropping the claim undoes it.
    let pushed = batcher.submit(&tracker, items, bytes, lane, write).await?;
    if let Some(lease) = lease {
        lease.arrived();
    }
    Ok(pushed)
}

/// Chooses the ids of items that are stored as reserved, and returns their claim.
fn first_lease(
    inner: &Arc<Inner>,
    group: &Arc<Group>,
    queue: &QueueName,
    items: &mut [Push],
) -> Option<Claim> {
    if items.iter().all(|push| push.first_lease.is_none()) {
        return None;
    }
    let now = inner.now();
    form::choose_ids(&inner.ids, now, items, inner.segment_size);
    let mut claim = Claim::begin_push(inner, group, &inner.cursor(queue), queue);
    for push in items.iter() {
        if let (Some(lease), Some(id)) = (&push.first_lease, push.id) {
            claim.add_new(id, lease.token, i32::from(push.item.priority.level()), now);
        }
    }
    Some(claim)
}

/// Notes the leases of the documents, which are about to be stored.
fn expect_leases(inner: &Inner, items: &[Push], starts: &[Start], units: &[Unit]) {
    let firsts = units.iter().filter_map(|unit| unit.present().next());
    for (push, start) in firsts.map(|at| (&items[at], &starts[at])) {
        if let Some(lease) = &push.first_lease {
            let cursor = inner.cursor(&push.queue.name);
            cursor.add_used(PrioritySet::of(i32::from(push.item.priority.level())));
            cursor.lease_deadlines.expect(start.now + lease.lasts);
        }
    }
}

/// Notes what this broker needs to know of items that it has stored as reserved, to settle them in the cheapest way.
fn cache_leases(inner: &Inner, items: &[Push], starts: &[Start], unit: &Unit) {
    let Some(first) = unit.present().next() else { return };
    let Some(lease) = &items[first].first_lease else { return };
    let (now, until) = (starts[first].now, starts[first].now + lease.lasts);
    if let Some(segment) = unit.segment {
        let (n, count) = (unit.places.len(), unit.present().count());
        let window = item::window(&items[first], now).map(|window| window.0);
        let front = Front { head: n, ready: 0, runs: 1 };
        let seen = Seen::new(segment, (n, count), window, front);
        inner.known_segments.claimed(&seen, (count, count, 0), until, now);
    }
    let cached = |push: &Push| CachedLease {
        token: lease.token,
        made: now,
        until: until.0,
        priority: i32::from(push.item.priority.level()),
        dedup: push.item.dedup_id.is_some(),
        leaves_tombstone: false,
        deadline: push.item.expires(&push.queue, now).map(|end| end.0),
        key: None,
        in_segment: unit.segment.is_some(),
    };
    let leases = unit.present().map(|at| (starts[at].id, cached(&items[at])));
    inner.lease_cache.add(leases, now);
}

/// Writes a batch. A batch without a plan is ordered; its ids and numbers are taken within the write.
async fn write(
    inner: &Arc<Inner>,
    group: &Group,
    items: Vec<Push>,
    plan: Option<Plan>,
) -> Result<Vec<Result<Pushed>>> {
    group.ensure_indexes(&inner.db).await?;
    record_priorities(inner, group, &items).await?;
    if let Some(plan) = plan {
        return insert(inner, group, &items, plan).await;
    }
    // Sequence numbers follow the order of the answers, because they are taken and stored in one transaction.
    let results = ordered::push_in_order(inner, group, &items).await?;
    Ok(results.into_iter().map(Ok).collect())
}

/// Unblocks the first item of each pushed key, in case its predecessor settled during the write. The results of
/// unblocked items get their eligible time. The items are stored, so a failure does not concern their push: the next
/// push of the key or the upkeep unblocks them.
pub(super) async fn wake<'a>(
    inner: &Inner,
    group: &Group,
    items: &[Push],
    stored: impl Iterator<Item = &'a mut Pushed>,
) {
    let mut blocked: HashMap<ItemId, &mut Pushed> = stored
        .filter(|pushed| !pushed.deduplicated && pushed.eligible_time.is_none())
        .map(|pushed| (pushed.id, pushed))
        .collect();
    if blocked.is_empty() {
        return;
    }
    let keys: Vec<OrderKey> = items.iter().filter_map(order_key).collect();
    match ordering::unblock(inner, group, &keys).await {
        Ok(unblocked) => {
            for unblocked in unblocked {
                if let Some(pushed) = blocked.get_mut(&unblocked.id) {
                    pushed.eligible_time = Some(unblocked.when);
                }
            }
        }
        Err(error) => tracing::debug!(%error, "could not unblock the items of a push"),
    }
}

/// Returns the key by which a push is ordered, if it has one.
pub(super) fn order_key(push: &Push) -> Option<OrderKey> {
    let key = push.item.ordering_key.as_ref()?;
    Some((push.queue.name.clone(), key.clone()))
}

/// Records the priorities of new items. The record precedes the insert, so that no reserve overlooks a priority in use.
pub(super) async fn record_priorities(inner: &Inner, group: &Group, items: &[Push]) -> Result<()> {
    let used = items.iter().map(|push| InUse {
        queue: &push.queue.name,
        set: PrioritySet::of(i32::from(push.item.priority.level())),
        incarnation: Some(push.queue.create_time),
    });
    priorities::record(inner, group, used).await
}

/// Inserts items. An item that the index of deduplication ids refuses is a duplicate, or is inserted again if the
/// window of the earlier item has ended.
async fn insert(
    inner: &Inner,
    group: &Group,
    items: &[Push],
    Plan { starts, units }: Plan,
) -> Result<Vec<Result<Pushed>>> {
    let mut results: Vec<Option<Result<Pushed>>> = items.iter().map(|_| None).collect();
    let (mut late, mut open): (Vec<Unit>, Vec<Unit>) =
        units.into_iter().partition(|unit| unit.is_late);
    for _ in 0..ROUNDS {
        if open.is_empty() {
            open = std::mem::take(&mut late);
        }
        let mut documents = Vec::with_capacity(open.len());
        open.retain(|unit| match form::encode(unit, items, &starts) {
            Ok(document) => {
                documents.push(document);
                true
            }
            Err(error) => {
                for at in unit.present() {
                    results[at] = Some(Err(repeat(&error)));
                }
                false
            }
        });
        if open.is_empty() {
            if late.is_empty() {
                break;
            }
            continue;
        }
        expect_leases(inner, items, &starts, &open);
        let refused = insert_documents(group, &documents).await;
        // Once more: a scan for lapsed leases that ran meanwhile may have missed these.
        expect_leases(inner, items, &starts, &open);
        // Rewinds even if the outcome is unknown: the items may be stored, and a cursor must not skip them.
        let mut marks = Marks::default();
        for at in open.iter().flat_map(Unit::present) {
            marks.add(&items[at], &starts[at]);
        }
        marks.rewind(inner);
        let mut refused = match refused {
            Ok(refused) => refused,
            // What an earlier round has stored is stored.
            Err(error) => {
                for at in open.drain(..).flat_map(|unit| unit.present().collect::<Vec<_>>()) {
                    results[at] = Some(Err(repeat(&error)));
                }
                continue;
            }
        };
        let mut repeated = Vec::new();
        for (place, unit) in std::mem::take(&mut open).into_iter().enumerate() {
            match refused.remove(&place) {
                Some(Refusal::Repeated) => repeated.push(unit),
                Some(Refusal::Failed(error)) => {
                    for at in unit.present() {
                        results[at] = Some(Err(repeat(&error)));
                    }
                }
                Some(Refusal::Own) | None => {
                    cache_leases(inner, items, &starts, &unit);
                    for at in unit.present() {
                        results[at] = Some(Ok(stored(&items[at], &starts[at])));
                    }
                }
            }
        }
        if repeated.is_empty() {
            continue; // with those that are late, if there are any
        }
        open = without_duplicates(inner, group, (items, &starts), repeated, &mut results).await;
    }
    Ok(results
        .into_iter()
        .map(|r| r.unwrap_or_else(|| Err(unavailable("concurrent pushes kept winning"))))
        .collect())
}

/// Gives duplicates their results, and returns the documents that are to be inserted again without them.
async fn without_duplicates(
    inner: &Inner,
    group: &Group,
    (items, starts): (&[Push], &[Start]),
    repeated: Vec<Unit>,
    results: &mut [Option<Result<Pushed>>],
) -> Vec<Unit> {
    let keys: HashSet<_> =
        repeated.iter().flat_map(Unit::present).filter_map(|at| key_of(&items[at])).collect();
    let keys: Vec<_> = keys.into_iter().collect();
    let firsts = dedup::resolve(inner, group, &keys, inner.now()).await;
    let mut again = Vec::new();
    for mut unit in repeated {
        let present: Vec<usize> = unit.present().collect();
        for at in present {
            let first = match &firsts {
                Ok(firsts) => key_of(&items[at]).and_then(|key| firsts.get(&key)),
                // The other items of this write are stored or refused, whatever becomes of these.
                Err(error) => {
                    results[at] = Some(Err(repeat(error)));
                    unit.left_out.insert(at);
                    continue;
                }
            };
            if let Some(first) = first {
                results[at] = Some(Ok(if first.id == starts[at].id {
                    stored(&items[at], &starts[at])
                } else {
                    duplicate(*first)
                }));
                unit.left_out.insert(at);
            }
        }
        // The others keep their ids and their places.
        if unit.present().next().is_some() {
            again.push(unit);
        }
    }
    again
}

/// Returns the result for an item that was stored.
pub(super) fn stored(push: &Push, start: &Start) -> Pushed {
    Pushed {
        id: start.id,
        deduplicated: false,
        sequence: start.sequence,
        eligible_time: (!start.blocked).then(|| push.item.eligible_from(start.now)),
    }
}

/// Returns the result for an item whose deduplication id another item has.
pub(super) fn duplicate(first: First) -> Pushed {
    let First { id, sequence, .. } = first;
    Pushed { id, deduplicated: true, sequence, eligible_time: None }
}

/// How far pushed items rewind the watermarks of their queues and priorities.
#[derive(Default)]
pub(super) struct Marks<'a>(HashMap<(&'a QueueName, u8), i64>);

impl<'a> Marks<'a> {
    /// Adds an item. Blocked and reserved items are ignored, because no scan looks for them.
    pub(super) fn add(&mut self, push: &'a Push, start: &Start) {
        if start.blocked || push.first_lease.is_some() {
            return;
        }
        let when = push.item.eligible_from(start.now).0;
        let priority = push.item.priority.level();
        let place = self.0.entry((&push.queue.name, priority)).or_insert(when);
        *place = when.min(*place);
    }

    /// Rewinds the watermarks. Must be called once the items are visible: an earlier rewind is lost if a scan follows
    /// it and finds nothing.
    pub(super) fn rewind(self, inner: &Inner) {
        for ((queue, priority), when) in self.0 {
            inner.cursor(queue).rewind(PrioritySet::of(i32::from(priority)), when);
        }
    }
}
