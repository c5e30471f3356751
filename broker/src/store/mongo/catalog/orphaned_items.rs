//! Items that landed in a queue just after it was deleted, through a broker that still remembered it. Their pushes were
//! answered, so the items must not be lost. Their queue is created again with the settings it had. If it was created
//! anew in another group meanwhile, all of them are moved there.
//!
//! All brokers do this, so that it does not matter which of them survives. A push may land for as long as one write may
//! take and a broker may remember settings. Each group in which a queue was deleted is scanned a few times until well
//! after that, at growing intervals, and for as long as there are such items.

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
    domain::{GroupName, PrioritySet, Queue, QueueName, Timestamp},
    store::{
        Appeared, Result,
        mongo::{
            Inner,
            catalog::{
                deleted::{DELETED, FORMER_GROUPS, deletions, group_of, name_of},
                deletion::{holds_items, pass, unsettled},
                queues::{self, QUEUES},
            },
            ordering,
            priorities::{self, InUse},
            schema::{
                item::Stored,
                layout::{
                    BLOCKED, Group, HANDOUT, LEASED, PROCESSED, READY_END, date, leased, millis,
                },
            },
            segment::detach::detach_free,
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
const EVERY: Duration = Duration::from_secs(1);
/// Pause between the first two scans of a deleted queue; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The last scan is at least this long after the deletion.
const LAST_PAUSE: Duration = Duration::from_mins(1);
/// Milliseconds after a deletion at which its entry has certainly been read.
const LATE: i64 = 30_000;
/// Limit of items that one step moves to another group.
const STEP: i64 = 500;

/// A group in which a queue was deleted.
struct Watched {
    /// Time of the deletion.
    at: i64,
    next: Instant,
    pause: Duration,
}

impl Watched {
    fn new(at: i64) -> Self {
        Self { at, next: Instant::now(), pause: FIRST_PAUSE }
    }

    /// Returns true after the last scan.
    fn is_over(&self) -> bool {
        self.pause > 2 * LAST_PAUSE
    }

    /// Plans the next scan.
    fn scanned(&mut self, found: Found, now: Instant) {
        if found == Found::Items {
            self.pause = FIRST_PAUSE;
        }
        self.next = now + self.pause;
        self.pause *= 2;
        if found == Found::Reserved {
            self.pause = self.pause.min(LAST_PAUSE);
        }
    }
}

/// What a scan found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// No item without a queue.
    Nothing,
    /// Items that were given a queue. More may come.
    Items,
    /// Items whose leases have not ended.
    Reserved,
}

/// The groups in which queues were deleted lately. A queue may have been deleted in several.
type Deletions = HashMap<(QueueName, GroupName), Watched>;

/// Handles items of deleted queues until stopped.
pub(crate) async fn recover_orphans(inner: Arc<Inner>, stop: CancellationToken) {
    let mut watched = HashMap::new();
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
        "projection": { "at": 1, "group": 1, FORMER_GROUPS: 1 },
    };
    for entry in read_documents(&inner.db, command).await? {
        let Some(name) = name_of(&entry) else { continue };
        for (group, at) in deletions(&entry) {
            let watched = watched.entry((name.clone(), group)).or_insert_with(|| Watched::new(at));
            if watched.at != at {
                *watched = Watched::new(at);
            }
        }
    }
    *from = now - LATE;
    for ((name, group), watched) in watched.iter_mut() {
        if watched.next > Instant::now() || watched.is_over() {
            continue;
        }
        match recover(inner, name, group).await {
            Ok(found) => watched.scanned(found, Instant::now()),
            Err(error) => {
                // This queue is scanned again soon; the others meanwhile.
                tracing::debug!(queue = %name, %error, "could not scan a deleted queue for items");
                watched.next = Instant::now() + FIRST_PAUSE;
            }
        }
    }
    watched.retain(|_, watched| !watched.is_over() || watched.at >= *from);
    Ok(())
}

/// Makes sure that the items of a queue that was deleted in this group have a queue again.
async fn recover(inner: &Inner, name: &QueueName, group_name: &GroupName) -> Result<Found> {
    let group = inner.group(group_name).await?;
    let filter = unsettled(name.as_str(), inner.now());
    let find = || {
        let found = group.items.find_one(filter.clone()).hint(Hint::Name(HANDOUT.to_owned()));
        found.projection(doc! { "_id": 1 })
    };
    if read_in_time(&inner.db, find).await?.is_none() {
        return Ok(Found::Nothing);
    }
    match queues::get(inner, name).await? {
        Some(queue) if queue.group == *group_name => Ok(Found::Nothing),
        Some(queue) => move_to_new_group(inner, &group, &queue).await,
        None => revive(inner, name, &group).await,
    }
}

/// Creates a deleted queue again, in the group in which it was deleted last. Items in another group follow in the next
/// scan.
async fn revive(inner: &Inner, name: &QueueName, items_in: &Group) -> Result<Found> {
    let deleted = inner.db.collection::<Document>(DELETED);
    let last = read_in_time(&inner.db, || deleted.find_one(doc! { "_id": name.as_str() })).await?;
    let Some(group) = last.as_ref().and_then(group_of) else { return Ok(Found::Nothing) };
    let group_items = inner.group(&group).await?;
    let used = priorities::in_index(inner, group_items.items.name(), name).await?;
    let used: Vec<Bson> = used.iter().map(Bson::Int32).collect();
    let mut session = begin(&inner.db).await?;
    let attempt = async {
        let made = insert_again(inner, name, items_in, (&group, used), &mut session).await?;
        if made {
            commit(&mut session).await?;
        }
        Ok(made)
    };
    let made = attempt_in_time(attempt).await;
    if !matches!(made, Ok(true)) {
        abort(&mut session).await;
    }
    if made? {
        inner.cursor(name).appeared(Appeared::FromStart);
        inner.unblocked.add([name.clone()]);
        tracing::warn!(queue = %name, "items landed in a deleted queue: created the queue again");
    }
    Ok(Found::Items)
}

/// Creates the queue within a transaction, so that a deletion of the queue and its items comes before or after.
async fn insert_again(
    inner: &Inner,
    name: &QueueName,
    items_in: &Group,
    (group, used): (&GroupName, Vec<Bson>),
    session: &mut ClientSession,
) -> Result<bool, Failure> {
    let queues = inner.db.collection::<Document>(QUEUES);
    let by_name = doc! { "_id": name.as_str() };
    if !pass(inner, None, session).await?
        || queues.find_one(by_name.clone()).session(&mut *session).await?.is_some()
        || !holds_items(inner, items_in, name.as_str(), session).await?
    {
        return Ok(false);
    }
    let deleted = inner.db.collection::<Document>(DELETED);
    let Some(mut settings) = deleted.find_one(by_name).session(&mut *session).await? else {
        return Ok(false);
    };
    if group_of(&settings).as_ref() != Some(group) {
        return Ok(false); // deleted once more meanwhile
    }
    // The dead-letter queue may have been deleted meanwhile.
    if let Ok(target) = settings.get_str("deadLetterQueue").map(str::to_owned)
        && queues.find_one(doc! { "_id": target }).session(&mut *session).await?.is_none()
    {
        settings.remove("deadLetterQueue");
    }
    let revision = settings.get("revision").and_then(integer).unwrap_or_default() + 1;
    settings.remove("at");
    settings.remove(FORMER_GROUPS);
    settings.insert("revision", revision);
    settings.insert("created", date(inner.now()));
    settings.insert("updated", date(inner.now()));
    settings.insert("levels", used);
    queues.insert_one(settings).session(session).await?;
    Ok(true)
}

/// Moves items to the group in which their queue was created anew. Reserved items follow in later scans, when their
/// leases have ended.
async fn move_to_new_group(inner: &Inner, from: &Group, queue: &Queue) -> Result<Found> {
    let group = inner.group(&queue.group).await?;
    let mut found = Found::Reserved;
    // Ends when no item is left that could be moved: nobody remembers the former settings for long.
    loop {
        match move_some(inner, from, &group, queue).await? {
            Some(0) => break,
            Some(moved) => {
                tracing::warn!(queue = %queue.name, moved, "moved items into the queue's new group");
                found = Found::Items;
            }
            None => return Ok(Found::Items), // the next scan goes on
        }
    }
    if found == Found::Items {
        inner.cursor(&queue.name).appeared(Appeared::FromStart);
        inner.unblocked.add([queue.name.clone()]);
    }
    Ok(found)
}

/// Returns a filter for the items that can be moved: not those that are reserved.
fn movable(queue: &QueueName, now: Timestamp) -> Document {
    let mut filter = unsettled(queue.as_str(), now);
    let reserved = doc! { "$gt": leased(now), "$lt": millis(BLOCKED) };
    filter.insert("left", doc! { "$exists": false }); // what is left in segments is reserved
    filter.insert(
        "when",
        doc! { "$lt": millis(PROCESSED), "$ne": millis(READY_END), "$not": reserved },
    );
    filter
}

/// Moves one step of items and returns their number, or `None` if one of them has changed since it was read.
async fn move_some(
    inner: &Inner,
    from: &Group,
    to: &Group,
    queue: &Queue,
) -> Result<Option<usize>> {
    detach_free(inner, from, &queue.name).await?;
    let find = command_of(&doc! {
        "find": from.items.name(), "filter": movable(&queue.name, inner.now()), "hint": HANDOUT,
        "limit": STEP, "batchSize": STEP + 1,
    })?;
    // Items that the server cuts off come in the next step.
    let found = read_first(&inner.db, &find, |item| {
        let document = Document::try_from(item).map_err(|e| broken(e.to_string()))?;
        Ok((Stored::read(item)?, document))
    });
    let mut found = found.await?.values;
    if found.is_empty() {
        return Ok(Some(0));
    }
    // Within a key the order of the numbers is kept.
    found.sort_by_key(|(stored, _)| (stored.sequence, stored.id()));
    let priorities = found
        .iter()
        .fold(PrioritySet::EMPTY, |set, (stored, _)| set | PrioritySet::of(stored.priority));
    let used = InUse { queue: &queue.name, set: priorities, incarnation: Some(queue.create_time) };
    priorities::record(inner, to, [used]).await?;
    let numbered = found.iter().filter(|(stored, _)| stored.sequence.is_some()).count();
    let mut next = match numbered {
        0 => 0,
        count => ordering::take_numbers(inner, &queue.name, count).await?,
    };
    let (mut old, mut new, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    for (stored, mut document) in found {
        let place = if stored.leased { LEASED + stored.when } else { stored.when };
        old.push(doc! { "_id": document.get("_id"), "when": millis(place) });
        for field in ["lock", "turn", "trace", "dedup", "window"] {
            document.remove(field);
        }
        let when = stored.due.unwrap_or(stored.when);
        document.insert("when", millis(when));
        if let Some(key) = stored.key {
            document.insert("when", millis(BLOCKED));
            document.insert("due", millis(when));
            keys.push((queue.name.clone(), key));
        }
        if stored.sequence.is_some() {
            document.insert("seq", next);
            next += 1;
        }
        new.push(document);
    }
    let count = new.len();
    if !exchange(inner, (from, old), (to, new)).await? {
        return Ok(None);
    }
    ordering::unblock(inner, to, &keys).await?;
    Ok(Some(count))
}

/// Replaces items by others in another collection. Returns false if one of the items is no longer as it was read.
async fn exchange(
    inner: &Inner,
    (from, old): (&Group, Vec<Document>),
    (to, new): (&Group, Vec<Document>),
) -> Result<bool> {
    let mut session = begin(&inner.db).await?;
    let attempt = async {
        let deleted = from.items.delete_many(doc! { "$or": old }).session(&mut *session).await?;
        if deleted.deleted_count != new.len() as u64 {
            return Ok(false);
        }
        let to = to.items.clone_with_type::<Document>();
        to.insert_many(new).session(&mut *session).await?;
        commit(&mut session).await?;
        Ok(true)
    };
    let result = attempt_in_time(attempt).await;
    if !matches!(result, Ok(true)) {
        abort(&mut session).await;
    }
    Ok(result?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns after how many minutes the scans end that find `found`, or `None` if they go on for a day.
    fn end(mut found: impl FnMut(u64) -> Found) -> Option<u64> {
        let start = Instant::now();
        let mut watched = Watched::new(0);
        while !watched.is_over() {
            let seconds = (watched.next - start).as_secs();
            if seconds > 86_400 {
                return None;
            }
            watched.scanned(found(seconds), watched.next);
        }
        Some((watched.next - start).as_secs() / 60)
    }

    #[test]
    fn a_deleted_queue_is_scanned_until_no_item_is_left() {
        assert_eq!(end(|_| Found::Nothing), Some(2));
        assert_eq!(end(|_| Found::Reserved), None);
        let lease = |seconds| if seconds < 3_600 { Found::Reserved } else { Found::Nothing };
        assert!((60..65).contains(&end(lease).unwrap()));
        let late = |seconds| if seconds < 60 { Found::Items } else { Found::Nothing };
        assert!((2..5).contains(&end(late).unwrap()), "{:?}", end(late));
    }
}
