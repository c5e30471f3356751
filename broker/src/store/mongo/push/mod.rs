//! Storing items. Concurrent calls share an insert; each gets its own answer.

pub(super) mod dedup;
pub(super) mod ordered;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use futures_util::future::try_join_all;
use mongodb::{bson::RawDocumentBuf, error::ErrorKind};

use crate::{
    domain::{GroupName, ItemId, PrioritySet, Pushed, Queue, QueueName, Timestamp},
    store::{
        Push, Result, StoreError,
        mongo::{
            Inner,
            ordering::{self, OrderKey},
            priorities,
            push::dedup::{First, key_of},
            schema::{
                item::{Start, check, encode},
                layout::{BY_ID, DEDUP, Group},
            },
            server::{
                error::{
                    DUPLICATE_KEY, broken, failed, index_named, passing_code, repeat, unavailable,
                },
                group_commit::Lane,
                time_limit::in_time,
            },
        },
    },
};

/// Bytes an item takes beside its payload, roughly.
const ENVELOPE: usize = 300;
/// How often an item that is refused is looked at anew.
const ROUNDS: usize = 5;

/// Items of one call that are written together: those of one group, in order if any asks for it.
struct Lot {
    group: GroupName,
    ordered: bool,
    at: Vec<usize>,
    items: Vec<Push>,
}

/// True if the item has a place in an order.
pub(super) fn is_ordered(push: &Push) -> bool {
    push.queue.sequenced || !push.item.ordering_key.is_empty()
}

/// Stores items; answers for each. They stand in line for their write when this is first polled, and
/// the write is no part of the caller's task.
pub(super) async fn push(inner: &Arc<Inner>, items: Vec<Push>) -> Result<Vec<Pushed>> {
    // Before they share a write with the items of others.
    items.iter().try_for_each(|push| check(&push.item))?;
    let count = items.len();
    let mut lots: Vec<Lot> = Vec::new();
    for (at, push) in items.into_iter().enumerate() {
        let ordered = is_ordered(&push);
        let place = lots.iter().position(|lot| lot.group == push.queue.group);
        let place = place.unwrap_or_else(|| {
            let group = push.queue.group.clone();
            lots.push(Lot { group, ordered, at: Vec::new(), items: Vec::new() });
            lots.len() - 1
        });
        // One call's items stay together: they are handed out as they came.
        lots[place].ordered |= ordered;
        lots[place].at.push(at);
        lots[place].items.push(push);
    }
    let written = try_join_all(lots.into_iter().map(|lot| async move {
        let results = submit(inner, &lot.group, lot.ordered, lot.items).await?;
        Ok::<_, StoreError>(lot.at.into_iter().zip(results))
    }))
    .await?;
    let mut results: Vec<Option<Pushed>> = vec![None; count];
    for (at, pushed) in written.into_iter().flatten() {
        results[at] = Some(pushed);
    }
    results.into_iter().collect::<Option<_>>().ok_or_else(|| broken("a push was not answered"))
}

async fn submit(
    inner: &Arc<Inner>,
    group: &GroupName,
    ordered: bool,
    items: Vec<Push>,
) -> Result<Vec<Pushed>> {
    // Nothing may be awaited before the batcher has the items: calls keep their order up to there.
    let group = inner.group_as_it_is(group);
    let bytes = items.iter().map(|push| push.item.payload.len() + ENVELOPE).sum();
    let batcher = Arc::clone(if ordered { &group.ordered } else { &group.plain });
    let lanes = if ordered { Vec::new() } else { lanes(&items) };
    let inner = Arc::clone(inner);
    let tracker = inner.tracker.clone();
    let write = move |items: Vec<Push>| {
        let (inner, group) = (Arc::clone(&inner), Arc::clone(&group));
        inner.note_batch("push", items.len());
        // Given here, in the order of the calls: the writes themselves may run side by side.
        let starts = (!ordered).then(|| plain_starts(&inner, items.len()));
        async move {
            let count = items.len();
            match write(&inner, &group, items, starts).await {
                Ok(results) => results,
                Err(error) => (0..count).map(|_| Err(repeat(&error))).collect(),
            }
        }
    };
    batcher.submit(&tracker, items, bytes, lanes, write).await
}

/// What must become visible in the order of the calls: the items of each queue.
fn lanes(items: &[Push]) -> Vec<Lane> {
    let mut lanes = Vec::with_capacity(1);
    let mut last: Option<&Arc<Queue>> = None;
    for push in items {
        if last.is_none_or(|last| !Arc::ptr_eq(last, &push.queue)) {
            last = Some(&push.queue);
            let lane = Lane::of(push.queue.name.as_str());
            if !lanes.contains(&lane) {
                lanes.push(lane);
            }
        }
    }
    lanes
}

/// The starts of items that need no order but that of their ids.
fn plain_starts(inner: &Inner, count: usize) -> Vec<Start> {
    let now = inner.now();
    let start = |_| Start { id: inner.ids.next(now), now, sequence: 0, blocked: false };
    (0..count).map(start).collect()
}

/// Writes a batch; one without starts gets them here, in order.
async fn write(
    inner: &Arc<Inner>,
    group: &Group,
    items: Vec<Push>,
    starts: Option<Vec<Start>>,
) -> Result<Vec<Result<Pushed>>> {
    group.ensure_indexes(&inner.db).await?;
    record_priorities(inner, group, &items).await?;
    if let Some(starts) = starts {
        return insert(inner, group, &items, starts).await;
    }
    // Numbers follow the order of the answers: they are given and stored in one step.
    let results = ordered::push_in_order(inner, group, &items).await?;
    Ok(results.into_iter().map(Ok).collect())
}

/// Sees to it that of each key that got blocked items one has its turn: the one they were blocked
/// behind may have been settled meanwhile.
pub(super) async fn wake<'a>(
    inner: &Inner,
    group: &Group,
    items: &[Push],
    stored: impl Iterator<Item = &'a mut Pushed>,
) -> Result<()> {
    let mut blocked: HashMap<ItemId, &mut Pushed> = stored
        .filter(|pushed| !pushed.deduplicated && pushed.eligible_time.is_none())
        .map(|pushed| (pushed.id, pushed))
        .collect();
    if blocked.is_empty() {
        return Ok(());
    }
    let keys: Vec<OrderKey> = items.iter().filter_map(order_key).collect();
    for unblocked in ordering::unblock(inner, group, &keys).await? {
        if let Some(pushed) = blocked.get_mut(&unblocked.id) {
            pushed.eligible_time = Some(unblocked.when);
        }
    }
    Ok(())
}

/// The key by which a push is ordered, if any.
pub(super) fn order_key(push: &Push) -> Option<OrderKey> {
    let key = &push.item.ordering_key;
    (!key.is_empty()).then(|| (push.queue.name.clone(), key.clone()))
}

/// The levels of new items, recorded before anyone can miss them.
pub(super) async fn record_priorities(inner: &Inner, group: &Group, items: &[Push]) -> Result<()> {
    let mut queues: HashMap<&QueueName, (PrioritySet, Timestamp)> = HashMap::new();
    for push in items {
        let entry =
            queues.entry(&push.queue.name).or_insert((PrioritySet::EMPTY, push.queue.create_time));
        entry.0 |= PrioritySet::of(i32::from(push.item.priority.level()));
    }
    for (queue, (set, created)) in queues {
        priorities::record(inner, group, queue, set, Some(created)).await?;
    }
    Ok(())
}

/// Why an insert left an item out.
enum Refusal {
    /// It is there already, by this very insert.
    Own,
    /// Its deduplication id is taken.
    Repeated,
    /// Anything else.
    Failed(StoreError),
}

/// Inserts items; those a unique index refuses are looked at and tried again as what they are.
async fn insert(
    inner: &Inner,
    group: &Group,
    items: &[Push],
    starts: Vec<Start>,
) -> Result<Vec<Result<Pushed>>> {
    let mut results: Vec<Option<Result<Pushed>>> = items.iter().map(|_| None).collect();
    let mut open: Vec<usize> = (0..items.len()).collect();
    for _ in 0..ROUNDS {
        let mut documents = Vec::with_capacity(open.len());
        open.retain(|&at| match encode(&items[at], &starts[at]) {
            Ok(document) => {
                documents.push(document);
                true
            }
            Err(error) => {
                results[at] = Some(Err(error));
                false
            }
        });
        if open.is_empty() {
            break;
        }
        let refused = insert_documents(group, &documents).await;
        // Also if the outcome is unknown: what may be there must not be passed over.
        let mut marks = Marks::default();
        for &at in &open {
            marks.add(&items[at], &starts[at]);
        }
        marks.rewind(inner);
        let mut refused = refused?;
        let mut again = Vec::new();
        let mut repeated = Vec::new();
        for (place, &at) in open.iter().enumerate() {
            match refused.remove(&place) {
                None | Some(Refusal::Own) => {
                    results[at] = Some(Ok(stored(&items[at], &starts[at])));
                }
                Some(Refusal::Repeated) => repeated.push(at),
                Some(Refusal::Failed(error)) => results[at] = Some(Err(error)),
            }
        }
        if !repeated.is_empty() {
            let keys: HashSet<_> = repeated.iter().filter_map(|&at| key_of(&items[at])).collect();
            let keys: Vec<_> = keys.into_iter().collect();
            let firsts = dedup::resolve(inner, group, &keys, inner.now()).await?;
            for at in repeated {
                match key_of(&items[at]).and_then(|key| firsts.get(&key)) {
                    Some(first) if first.id == starts[at].id => {
                        results[at] = Some(Ok(stored(&items[at], &starts[at])));
                    }
                    Some(first) => results[at] = Some(Ok(duplicate(*first))),
                    None => again.push(at),
                }
            }
        }
        again.sort_unstable();
        open = again;
    }
    Ok(results
        .into_iter()
        .map(|r| r.unwrap_or_else(|| Err(unavailable("others were faster again and again"))))
        .collect())
}

/// The answer for an item that was stored.
pub(super) fn stored(push: &Push, start: &Start) -> Pushed {
    Pushed {
        id: start.id,
        deduplicated: false,
        sequence: start.sequence,
        eligible_time: (!start.blocked).then(|| push.item.eligible_from(start.now)),
    }
}

/// The answer for one that was there before.
pub(super) fn duplicate(first: First) -> Pushed {
    let First { id, sequence, .. } = first;
    Pushed { id, deduplicated: true, sequence, eligible_time: None }
}

async fn insert_documents(
    group: &Group,
    documents: &[RawDocumentBuf],
) -> Result<HashMap<usize, Refusal>> {
    let insert = group.items.insert_many(documents).ordered(false);
    let Err(error) = in_time(insert).await else {
        return Ok(HashMap::new());
    };
    let ErrorKind::InsertMany(insert) = error.kind.as_ref() else { return Err(failed(error)) };
    if insert.write_concern_error.is_some() {
        return Err(failed(error));
    }
    let refused = insert.write_errors.iter().flatten().map(|error| {
        let refusal = match (error.code, index_named(&error.message)) {
            (DUPLICATE_KEY, BY_ID) => Refusal::Own,
            (DUPLICATE_KEY, DEDUP) => Refusal::Repeated,
            (code, _) if passing_code(code) => Refusal::Failed(unavailable(error.message.clone())),
            _ => Refusal::Failed(broken(error.message.clone())),
        };
        (error.index, refusal)
    });
    Ok(refused.collect())
}

/// How far the watermarks of queues and levels must be lowered for what is pushed.
#[derive(Default)]
pub(super) struct Marks<'a>(HashMap<(&'a QueueName, u8), i64>);

impl<'a> Marks<'a> {
    /// Adds an item, unless it is blocked.
    pub(super) fn add(&mut self, push: &'a Push, start: &Start) {
        if start.blocked {
            return;
        }
        let when = push.item.eligible_from(start.now).0;
        let level = push.item.priority.level();
        let place = self.0.entry((&push.queue.name, level)).or_insert(when);
        *place = when.min(*place);
    }

    /// Lowers the marks. To be called when the items can be seen: a look before that raises them again.
    pub(super) fn rewind(self, inner: &Inner) {
        for ((queue, level), when) in self.0 {
            inner.cursor(queue).rewind(PrioritySet::of(i32::from(level)), when);
        }
    }
}
