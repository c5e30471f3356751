//! Items that landed in a queue just after it was deleted, through a broker that still remembered it. Their pushes were
//! answered, so the items must not be lost. Their queue is created again with the settings it had. If it was created
//! anew in another group meanwhile, the items are moved there.
//!
//! All brokers do this, so that it does not matter which of them survives. A push may land for as long as one write may
//! take and a broker may remember settings. Each deleted queue is scanned a few times until well after that, at growing
//! intervals, and for longer while consumers hold items of it.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{
    ClientSession,
    bson::{Bson, Document, doc},
    options::Hint,
};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{GroupName, PrioritySet, Queue, QueueName},
    store::{
        Appeared, Result,
        mongo::{
            Inner,
            catalog::{
                deleted::{DELETED, name_of},
                deletion::{holds_items, pass, unsettled},
                queues::{self, QUEUES},
            },
            ordering, priorities,
            schema::{
                item::Stored,
                layout::{BLOCKED, Group, HANDOUT, LEASED, date, millis},
            },
            server::{
                connect::{command_of, read_documents, read_first},
                error::{broken, integer},
                time_limit::read_in_time,
                transaction::{Failure, abort, attempt_in_time, begin, commit},
            },
        },
    },
};

/// Pause between reads of the deleted queues.
const EVERY: Duration = Duration::from_millis(500);
/// Pause between the first two scans of a deleted queue; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The last scan is at least this long after the deletion.
const LAST_PAUSE: Duration = Duration::from_mins(1);
/// Milliseconds after a deletion at which its entry has certainly been read.
const LATE: i64 = 30_000;
/// Pause between two scans while consumers hold items that are to be moved.
const RESERVED_PAUSE: Duration = Duration::from_secs(5);
/// Limit of items that one step moves to another group.
const STEP: i64 = 100;

/// A queue that was deleted.
struct Watched {
    /// Time of the deletion.
    at: i64,
    next: Instant,
    pause: Duration,
}

/// Deleted queues with their groups: each incarnation of a queue may have been in another group.
type Deletions = HashMap<(QueueName, GroupName), Watched>;

/// What is left of the items of a deleted queue.
enum Left {
    Nothing,
    /// Items that consumers hold.
    Reserved,
    /// Items that other brokers are moving.
    Others,
}

/// Handles items of deleted queues until stopped.
pub(crate) async fn adopt_all(inner: Arc<Inner>, stop: CancellationToken) {
    let mut watched = Deletions::new();
    let mut from = 0;
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        if let Err(error) = look(&inner, &mut watched, &mut from).await {
            tracing::debug!(%error, "could not scan deleted queues for items");
        }
    }
}

async fn look(inner: &Inner, watched: &mut Deletions, from: &mut i64) -> Result<()> {
    let now = inner.now().0;
    let command = doc! {
        "find": DELETED, "filter": { "at": { "$gte": millis(*from) } }, "hint": "at",
        "projection": { "at": 1, "group": 1 },
    };
    for entry in read_documents(&inner.db, command).await? {
        let at = entry.get_datetime("at").map_or(0, |at| at.timestamp_millis());
        let group = GroupName::parse("group", entry.get_str("group").unwrap_or_default());
        let (Some(name), Ok(group)) = (name_of(&entry), group) else { continue };
        let queue = (name, group);
        if watched.get(&queue).is_none_or(|watched| watched.at != at) {
            watched.insert(queue, Watched { at, next: Instant::now(), pause: FIRST_PAUSE });
        }
    }
    *from = now - LATE;
    for ((name, group), watched) in watched.iter_mut() {
        if watched.next <= Instant::now() && watched.pause <= 2 * LAST_PAUSE {
            match adopt(inner, name, group).await {
                Ok(Left::Nothing) => {
                    watched.next = Instant::now() + watched.pause;
                    watched.pause *= 2;
                }
                Ok(Left::Reserved) => watched.next = Instant::now() + RESERVED_PAUSE,
                Ok(Left::Others) => watched.next = Instant::now() + FIRST_PAUSE,
                Err(error) => {
                    tracing::debug!(queue = %name, %error, "could not scan a deleted queue for items");
                    watched.next = Instant::now() + FIRST_PAUSE;
                }
            }
        }
    }
    watched.retain(|_, watched| watched.pause <= 2 * LAST_PAUSE || watched.at >= *from);
    Ok(())
}

/// Makes sure that the items of a deleted queue have a queue again.
async fn adopt(inner: &Inner, name: &QueueName, group: &GroupName) -> Result<Left> {
    let group_name = group;
    let group = inner.group(group).await?;
    let filter = unsettled(name.as_str(), inner.now());
    let find = || {
        let found = group.items.find_one(filter.clone()).hint(Hint::Name(HANDOUT.to_owned()));
        found.projection(doc! { "_id": 1 })
    };
    if read_in_time(find).await?.is_none() {
        return Ok(Left::Nothing);
    }
    match queues::get(inner, name).await? {
        Some(queue) if queue.group == *group_name => Ok(Left::Nothing),
        Some(queue) => bring_all(inner, &group, &queue).await,
        None => revive(inner, name, &group).await.map(|()| Left::Nothing),
    }
}

/// Creates a deleted queue again.
async fn revive(inner: &Inner, name: &QueueName, group: &Group) -> Result<()> {
    let used = priorities::in_index(inner, group.items.name(), name).await?;
    let used: Vec<Bson> = used.iter().map(Bson::Int32).collect();
    let mut session = begin(&inner.client).await?;
    let attempt = async {
        let made = insert_again(inner, name, group, used, &mut session).await?;
        if made {
            commit(&mut session).await?;
        }
        Ok(made)
    };
    match attempt_in_time(attempt).await {
        Ok(true) => {
            inner.cursor(name).appeared(Appeared::FromStart);
            inner.unblocked.add([name.clone()]);
            tracing::warn!(queue = %name, "items landed in a deleted queue: created the queue again");
            Ok(())
        }
        Ok(false) => {
            abort(&mut session).await;
            Ok(())
        }
        Err(failure) => {
            abort(&mut session).await;
            Err(Failure::into(failure))
        }
    }
}

/// Creates the queue within a transaction, so that a deletion of the queue and its items comes before or after.
async fn insert_again(
    inner: &Inner,
    name: &QueueName,
    group: &Group,
    used: Vec<Bson>,
    session: &mut ClientSession,
) -> Result<bool, Failure> {
    let queues = inner.db.collection::<Document>(QUEUES);
    let by_name = doc! { "_id": name.as_str() };
    if !pass(inner, None, session).await?
        || queues.find_one(by_name.clone()).session(&mut *session).await?.is_some()
        || !holds_items(inner, group, name.as_str(), session).await?
    {
        return Ok(false);
    }
    let deleted = inner.db.collection::<Document>(DELETED);
    let Some(mut settings) = deleted.find_one(by_name).session(&mut *session).await? else {
        return Ok(false);
    };
    // The dead-letter queue may have been deleted meanwhile.
    if let Ok(target) = settings.get_str("deadLetterQueue").map(str::to_owned)
        && queues.find_one(doc! { "_id": target }).session(&mut *session).await?.is_none()
    {
        settings.remove("deadLetterQueue");
    }
    let revision = settings.get("revision").and_then(integer).unwrap_or_default() + 1;
    settings.remove("at");
    settings.insert("revision", revision);
    settings.insert("created", date(inner.now()));
    settings.insert("updated", date(inner.now()));
    settings.insert("levels", used);
    queues.insert_one(settings).session(session).await?;
    Ok(true)
}

/// Moves items to the group in which their queue was created anew. Reserved items follow in later scans, when their
/// leases have ended.
async fn bring_all(inner: &Inner, from: &Group, queue: &Queue) -> Result<Left> {
    loop {
        let (found, brought) = bring(inner, from, queue).await?;
        if found == 0 {
            return Ok(Left::Reserved); // if any items are left, which the next scan shows
        }
        if brought == 0 {
            return Ok(Left::Others);
        }
    }
}

/// Moves the items of one step. Returns how many it found, and how many of these this broker moved.
async fn bring(inner: &Inner, from: &Group, queue: &Queue) -> Result<(usize, u64)> {
    let group = inner.group(&queue.group).await?;
    let mut keys = Vec::new();
    let is_held = doc! { "$gt": millis(LEASED + inner.now().0), "$lt": millis(BLOCKED) };
    let filter = doc! {
        "$and": [unsettled(queue.name.as_str(), inner.now()), { "when": { "$not": is_held } }],
    };
    let find = command_of(&doc! {
        "find": from.items.name(), "filter": filter, "limit": STEP, "batchSize": STEP + 1,
    })?;
    // Items that the server cuts off come in the next step.
    let found = read_first(&inner.db, &find, |item| {
        let document = Document::try_from(item).map_err(|e| broken(e.to_string()))?;
        Ok((Stored::read(item)?, document))
    });
    let (found, mut brought) = (found.await?.values, 0);
    let count = found.len();
    for (stored, mut document) in found {
        if stored.leased && stored.when > inner.now().0 {
            continue;
        }
        for field in ["lock", "turn", "trace", "dedup", "window"] {
            document.remove(field);
        }
        let when = stored.due.unwrap_or(stored.when);
        document.insert("when", millis(when));
        if !stored.key.is_empty() {
            document.insert("when", millis(BLOCKED));
            document.insert("due", millis(when));
            keys.push((queue.name.clone(), stored.key.clone()));
        }
        if stored.sequence != 0 {
            document.insert("seq", ordering::take_numbers(inner, &queue.name, 1).await?);
        }
        let incarnation = Some(queue.create_time);
        priorities::record(
            inner,
            &group,
            &queue.name,
            PrioritySet::of(stored.priority),
            incarnation,
        )
        .await?;
        let place = if stored.leased { LEASED + stored.when } else { stored.when };
        let old = doc! { "_id": document.get("_id"), "when": millis(place) };
        brought += u64::from(exchange(inner, (from, old), (&group, document)).await?);
    }
    ordering::unblock(inner, &group, &keys).await?;
    inner.cursor(&queue.name).appeared(Appeared::FromStart);
    if brought > 0 {
        inner.unblocked.add([queue.name.clone()]);
        tracing::warn!(queue = %queue.name, brought, "moved items into the queue's new group");
    }
    Ok((count, brought))
}

/// Replaces an item by one in another collection. Returns false if the item is no longer as it was read.
async fn exchange(
    inner: &Inner,
    (from, old): (&Group, Document),
    (to, new): (&Group, Document),
) -> Result<bool> {
    let mut session = begin(&inner.client).await?;
    let attempt = async {
        let deleted = from.items.delete_one(old).session(&mut session).await?;
        if deleted.deleted_count == 0 {
            return Ok(false);
        }
        let to = to.items.clone_with_type::<Document>();
        to.insert_one(new).session(&mut session).await?;
        commit(&mut session).await?;
        Ok(true)
    };
    let result = attempt_in_time(attempt).await;
    if !matches!(result, Ok(true)) {
        abort(&mut session).await;
    }
    Ok(result?)
}
