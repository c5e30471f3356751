//! Detaching: items get documents of their own, in the state in which they are.

use std::collections::{BTreeSet, HashMap, HashSet};

use mongodb::{
    ClientSession,
    bson::{
        Document, RawArrayBuf, RawDocument, RawDocumentBuf, doc, oid::ObjectId, raw::cstr, rawdoc,
    },
    options::Hint,
};

use crate::{
    domain::{ItemId, LeaseToken, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{Stored, oid},
                layout::{CLAIMED, Group, SEGMENTS, date, millis},
                settled::settle_token,
            },
            segment::{
                document::{Run, Segment, burial, contents},
                lookup,
            },
            server::{
                connect::{command_of, read},
                error::broken,
                transaction::{Failure, Patience, attempt_in_time, begin, commit},
            },
        },
    },
};

/// About how many items are detached in one transaction.
const STEP: usize = 2_000;
/// About how many items are detached by one look at those whose leases have ended.
const LAPSED_STEP: usize = 4_000;
/// Documents of one insert.
const INSERT: usize = 1_000;

/// What becomes of an item of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detach {
    /// It stays.
    No,
    /// It gets a document of its own, as it is.
    AsIs,
    /// It gets a document of its own and is ready: whoever claimed it never had it.
    Ready,
    /// It is committed, by a settle with this token, and leaves a tombstone.
    Committed(ObjectId),
}

/// An item that has left its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Detached {
    pub(crate) item: ItemId,
    /// The lease that it was under.
    pub(crate) lock: Option<LeaseToken>,
}

/// Detaches the items that are held under the tokens beside them.
pub(crate) async fn detach_held(
    inner: &Inner,
    group: &Group,
    held: impl IntoIterator<Item = (ItemId, LeaseToken)>,
) -> Result<()> {
    detach_if_held(inner, group, held, Detach::AsIs, false).await?;
    Ok(())
}

/// Commits items that are held under the tokens beside them, and returns those: others are in no segment, or under
/// other leases.
pub(crate) async fn commit_held(
    inner: &Inner,
    group: &Group,
    held: impl IntoIterator<Item = (ItemId, LeaseToken)>,
) -> Result<HashSet<(ItemId, LeaseToken)>> {
    let how = Detach::Committed(settle_token(inner));
    let committed = detach_if_held(inner, group, held, how, false).await?;
    Ok(committed.into_iter().filter_map(|left| Some((left.item, left.lock?))).collect())
}

/// The same for items that may return to their places: what is ready in their segments is detached too. A segment
/// stands in its queue where its first item stood.
pub(crate) async fn detach_to_return(
    inner: &Inner,
    group: &Group,
    held: impl IntoIterator<Item = (ItemId, LeaseToken)>,
) -> Result<()> {
    detach_if_held(inner, group, held, Detach::AsIs, true).await?;
    Ok(())
}

async fn detach_if_held(
    inner: &Inner,
    group: &Group,
    held: impl IntoIterator<Item = (ItemId, LeaseToken)>,
    how: Detach,
    with_ready: bool,
) -> Result<Vec<Detached>> {
    let mut tokens: HashMap<ItemId, Vec<LeaseToken>> = HashMap::new();
    for (item, token) in held {
        if item.block().1 > 0 {
            tokens.entry(item).or_default().push(token);
        }
    }
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let choose = |segment: &Segment, at: usize, run: Option<&Run>| match run {
        None if with_ready => Detach::AsIs,
        Some(run) if tokens.get(&segment.id_of(at)).is_some_and(|t| t.contains(&run.lock)) => how,
        _ => Detach::No,
    };
    let segments: BTreeSet<ItemId> = tokens.keys().map(|item| item.block().0).collect();
    // Most items that have such an id are in no segment.
    let mut concerned = Vec::new();
    for segment in lookup::segments(inner, group, segments).await? {
        let mut chosen = segment.present().map(|at| choose(&segment, at, segment.run_of(at)));
        if chosen.any(|how| how != Detach::No) {
            concerned.push(segment.id);
        }
    }
    detach(inner, group, &concerned, choose).await
}

/// Detaches items, whatever their states.
pub(crate) async fn detach_items(inner: &Inner, group: &Group, items: &[ItemId]) -> Result<()> {
    let shared = items.iter().filter(|item| item.block().1 > 0);
    let segments: BTreeSet<ItemId> = shared.map(|item| item.block().0).collect();
    let items: HashSet<ItemId> = items.iter().copied().collect();
    let only = |segment: &Segment, at, _: Option<&Run>| {
        if items.contains(&segment.id_of(at)) { Detach::AsIs } else { Detach::No }
    };
    let segments: Vec<ItemId> = segments.into_iter().collect();
    detach(inner, group, &segments, only).await?;
    Ok(())
}

/// Detaches the ready items of segments.
pub(crate) async fn detach_ready(inner: &Inner, group: &Group, segments: &[ItemId]) -> Result<()> {
    let ready = |_: &Segment, _, run: Option<&Run>| {
        if run.is_none() { Detach::AsIs } else { Detach::No }
    };
    detach(inner, group, segments, ready).await?;
    Ok(())
}

/// Detaches items of a queue whose leases have ended, those of the first segments in which there are such; answers
/// before when all have been, `None` if that is `now`.
pub(crate) async fn detach_lapsed(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    now: Timestamp,
) -> Result<Option<Timestamp>> {
    let lapse = doc! { "$lte": date(now) };
    let step = inner.segment_size.segments_of(LAPSED_STEP);
    let mut segments = with_runs(inner, group, queue, lapse, step + 1).await?;
    let next = segments.get(step).and_then(|segment| segment.lapse);
    segments.truncate(step);
    let lapsed = |_: &Segment, _, run: Option<&Run>| {
        if run.is_some_and(|run| run.until <= now) { Detach::AsIs } else { Detach::No }
    };
    let segments: Vec<ItemId> = segments.iter().map(|segment| segment.id).collect();
    detach(inner, group, &segments, lapsed).await?;
    Ok(next.map(Timestamp))
}

/// Detaches the reserved items of a queue.
pub(crate) async fn detach_reserved(inner: &Inner, group: &Group, queue: &QueueName) -> Result<()> {
    let any = doc! { "$gte": millis(0) };
    let reserved = |_: &Segment, _, run: Option<&Run>| {
        if run.is_some() { Detach::AsIs } else { Detach::No }
    };
    let segments = with_runs(inner, group, queue, any, 0).await?;
    let segments: Vec<ItemId> = segments.iter().map(|segment| segment.id).collect();
    detach(inner, group, &segments, reserved).await?;
    Ok(())
}

/// Detaches the items of a queue that are not reserved under a lease that lasts.
pub(crate) async fn detach_free(inner: &Inner, group: &Group, queue: &QueueName) -> Result<()> {
    let command = doc! {
        "find": group.items.name(), "hint": SEGMENTS, "projection": { "_id": 1 },
        "filter": { "q": queue.as_str(), "left": { "$gte": 0 } },
    };
    let now = inner.now();
    let free = |_: &Segment, _, run: Option<&Run>| {
        if run.is_none_or(|run| run.until <= now) { Detach::AsIs } else { Detach::No }
    };
    let id = |document: &RawDocument| Ok(Stored::read(document)?.id());
    let segments = read(&inner.db, &command_of(&command)?, id).await?;
    detach(inner, group, &segments, free).await?;
    Ok(())
}

/// The segments of a queue whose first lease ends then, at most so many (0: all), the first to end first.
async fn with_runs(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    lapse: Document,
    limit: usize,
) -> Result<Vec<Segment>> {
    let command = doc! {
        "find": group.items.name(), "hint": SEGMENTS, "projection": { "lapse": 1 },
        "filter": { "q": queue.as_str(), "lapse": lapse, "left": { "$gte": 0 } },
        "sort": { "lapse": 1 }, "limit": limit as i64,
    };
    read(&inner.db, &command_of(&command)?, Segment::read).await
}

/// Detaches the items of these segments that `choose` names, those of some segments in one transaction, and removes
/// segments that are empty. Returns the items that have left their segments.
pub(crate) async fn detach(
    inner: &Inner,
    group: &Group,
    segments: &[ItemId],
    choose: impl Fn(&Segment, usize, Option<&Run>) -> Detach,
) -> Result<Vec<Detached>> {
    let mut all = Vec::new();
    for segments in segments.chunks(inner.segment_size.segments_of(STEP)) {
        let mut patience = Patience::new();
        loop {
            let mut session = begin(&inner.db).await?;
            let attempt = async {
                let now = inner.now();
                let detached = detach_within(group, segments, &choose, now, &mut session).await?;
                commit(&mut session).await?;
                Ok(detached)
            };
            let outcome = attempt_in_time(attempt).await;
            if let Some(detached) = patience.after(&mut session, outcome).await? {
                for left in &detached {
                    inner.known_segments.detached(left.item.block().0);
                }
                inner.lease_cache.detached(detached.iter().map(|left| left.item));
                all.extend(detached);
                break;
            }
        }
    }
    Ok(all)
}

/// The same within a transaction.
async fn detach_within(
    group: &Group,
    segments: &[ItemId],
    choose: &impl Fn(&Segment, usize, Option<&Run>) -> Detach,
    now: Timestamp,
    session: &mut ClientSession,
) -> Result<Vec<Detached>, Failure> {
    let ids: Vec<_> = segments.iter().map(|segment| oid(*segment)).collect();
    let filter = doc! { "_id": { "$in": ids }, "left": { "$gte": 0 } };
    let mut cursor = group.items.find(filter).session(&mut *session).await?;
    let (mut documents, mut detached) = (Vec::new(), Vec::new());
    let (mut changes, mut empty) = (Vec::new(), Vec::new());
    while let Some(found) = cursor.next(&mut *session).await {
        let found = found?;
        let segment = Segment::read(&found)?;
        let before = detached.len();
        let Rest { segment, renamed } =
            take_apart(segment, &found, choose, now, (&mut documents, &mut detached));
        let remembers = segment.window.is_some_and(|window| window > now.0);
        if segment.left == 0 && !(remembers && renamed.len() < segment.n) {
            empty.push(oid(segment.id));
        } else if detached.len() > before
            || segment.left == 0
            || segment.first_end().map(|end| end.0) != segment.lapse
        {
            changes.push((oid(segment.id), change(&segment, renamed)?));
        }
    }
    // What leaves takes its deduplication id along, so that the segments change first.
    for (segment, change) in changes {
        group.items.update_one(doc! { "_id": segment }, change).session(&mut *session).await?;
    }
    if !empty.is_empty() {
        group.items.delete_many(doc! { "_id": { "$in": empty } }).session(&mut *session).await?;
    }
    for documents in documents.chunks(INSERT) {
        group.items.insert_many(documents).session(&mut *session).await?;
    }
    Ok(detached)
}

/// What is left of a segment.
struct Rest {
    segment: Segment,
    /// New values in the place of deduplication ids that have left.
    renamed: Vec<(usize, ObjectId)>,
}

/// Makes documents of the items that `choose` names.
fn take_apart(
    mut segment: Segment,
    document: &RawDocument,
    choose: &impl Fn(&Segment, usize, Option<&Run>) -> Detach,
    now: Timestamp,
    (documents, detached): (&mut Vec<RawDocumentBuf>, &mut Vec<Detached>),
) -> Rest {
    let mut renamed = Vec::new();
    let present: Vec<usize> = segment.present().collect();
    for (at, content) in contents(document).enumerate() {
        let run = segment.run_of(at);
        let how = if present.contains(&at) { choose(&segment, at, run) } else { Detach::No };
        let document = match how {
            Detach::No => continue,
            Detach::AsIs => segment.detached(at, &content, false),
            Detach::Ready => segment.detached(at, &content, true),
            Detach::Committed(settled) => segment.tombstone(at, settled, now),
        };
        if content.dedup.is_some() && !matches!(how, Detach::Committed(_)) {
            renamed.push((at, oid(segment.id_of(at))));
        }
        documents.push(document);
        detached.push(Detached { item: segment.id_of(at), lock: run.map(|run| run.lock) });
        segment.ready -= usize::from(run.is_none());
        segment.done.set(at);
        segment.left -= 1;
    }
    Rest { segment, renamed }
}

/// The update that makes a segment what is left of it.
fn change(segment: &Segment, renamed: Vec<(usize, ObjectId)>) -> Result<Document> {
    let renamed = renamed.into_iter().map(|(at, id)| (format!("dedup.{at}"), id.into()));
    if let (0, Some(window)) = (segment.left, segment.window) {
        let mut burial = burial(window);
        if let Ok(set) = burial.get_document_mut("$set") {
            set.extend(renamed);
        }
        return Ok(burial);
    }
    let runs = segment.runs.iter();
    let runs = runs.filter(|run| segment.present().any(|at| run.items.contains(at)));
    let mut set = rawdoc! {
        "done": segment.done.to_array(),
        "runs": runs.map(Run::to_document).collect::<RawArrayBuf>(),
        "ready": segment.ready as i32,
        "left": segment.left as i32,
    };
    if segment.ready == 0 {
        set.append(cstr!("when"), millis(CLAIMED));
    }
    let mut change = RawDocumentBuf::new();
    match segment.first_end() {
        Some(end) => set.append(cstr!("lapse"), date(end)),
        None => change.append(cstr!("$unset"), rawdoc! { "lapse": 1 }),
    }
    change.append(cstr!("$set"), set);
    let mut change = Document::try_from(change).map_err(|e| broken(e.to_string()))?;
    if let Ok(set) = change.get_document_mut("$set") {
        set.extend(renamed);
    }
    Ok(change)
}

/// Detaches all items of a queue within a transaction.
pub(crate) async fn detach_queue(
    group: &Group,
    queue: &QueueName,
    now: Timestamp,
    session: &mut ClientSession,
) -> Result<(), Failure> {
    let filter = doc! { "q": queue.as_str(), "left": { "$gte": 0 } };
    let mut cursor = group
        .items
        .find(filter)
        .projection(doc! { "_id": 1 })
        .hint(Hint::Name(SEGMENTS.to_owned()))
        .session(&mut *session)
        .await?;
    let mut segments = Vec::new();
    while let Some(found) = cursor.next(&mut *session).await {
        segments.push(Stored::read(&found?)?.id());
    }
    detach_within(group, &segments, &|_, _, _| Detach::AsIs, now, session).await?;
    Ok(())
}

/// For documents of a listing, of which so many items are wanted: detaches what is ready in the first segments among
/// them; true if there were any.
pub(crate) async fn detach_found(
    inner: &Inner,
    group: &Group,
    found: &[Stored],
    wanted: usize,
) -> Result<bool> {
    let (mut items, mut segments) = (0, Vec::new());
    for stored in found {
        if items >= wanted {
            break;
        }
        if stored.ready_inside.is_some() {
            segments.push(stored.id());
        }
        items += stored.ready_inside.unwrap_or(1);
    }
    detach_ready(inner, group, &segments).await?;
    Ok(!segments.is_empty())
}
