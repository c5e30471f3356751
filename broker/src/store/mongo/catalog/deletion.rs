//! Deletes queues so that no answered push is lost.
//!
//! The transaction that deletes a queue also tests that the queue is empty and that no other queue dead-letters into
//! it. A push writes no document that such a transaction writes, so it may still land afterwards, through a broker that
//! remembers the queue. By the entry that the transaction writes to `deletedQueues`,
//! [`crate::store::mongo::catalog::orphaned_items`] finds such items and creates their queue again.
//!
//! A deletion with force deletes most items before that transaction. First it marks the queue, if the links are as the
//! caller read them. A marked queue takes no new link, so that the deletion is not refused after items were deleted.

use mongodb::{
    ClientSession, Collection,
    bson::{Bson, Document, doc},
    options::{Hint, ReturnDocument},
};

use crate::{
    domain::{Priority, Queue, QueueName, Timestamp},
    store::{
        Deleted, Links, Result,
        mongo::{
            Inner,
            admin::stats::totals_id,
            catalog::{
                deleted::{DELETED, FORMER_GROUPS, REMEMBERED, former_groups},
                queues::QUEUES,
            },
            ordering, priorities,
            schema::{
                layout::{Group, HANDOUT, PROCESSED, READY_END, SEGMENTS, date, live, millis},
                settled::{bury, settle_token},
            },
            segment,
            server::{
                error::{failed, integer, is_duplicate_key, unavailable, written},
                time_limit::{bulk_in_time, in_time, read_in_time},
                transaction::{Failure, Patience, abort, attempt_in_time, begin, commit},
            },
        },
    },
};

/// The document of `counters` that changes with each link between queues.
const LINKS: &str = "deadLetterLinks";
/// Limit of items that are left to the transaction that deletes the queue.
const FEW: u64 = 1_000;
/// Limit of rounds that delete items before that transaction, because producers may push without end.
const ROUNDS: usize = 5;

/// Field of a queue that is being deleted: when a step of the deletion began.
const DELETING: &str = "deleting";
/// Milliseconds after which a mark is that of a broker that has ended. Longer than one round of deleting items.
const MARKED: i64 = 20 * 60_000;

/// Creates the index and the document that deletion needs.
pub(crate) async fn ensure_collections(inner: &Inner) -> Result<()> {
    let command = doc! {
        "createIndexes": DELETED,
        "indexes": [{ "name": "at", "key": { "at": 1 }, "expireAfterSeconds": REMEMBERED }],
    };
    written(&in_time(&inner.db, inner.db.run_command(command)).await.map_err(failed)?)?;
    let start = doc! { "$setOnInsert": { "n": 0_i64 } };
    let counters = counters(inner);
    let made = counters.update_one(doc! { "_id": LINKS }, start).upsert(true);
    match in_time(&inner.db, made).await {
        Err(error) if is_duplicate_key(&error) => Ok(()), // by another broker
        result => result.map(|_| ()).map_err(failed),
    }
}

fn counters(inner: &Inner) -> Collection<Document> {
    inner.db.collection("counters")
}

/// Returns the present state of all links between queues.
pub(crate) async fn links(inner: &Inner) -> Result<Links> {
    let counters = counters(inner);
    let found = read_in_time(&inner.db, || counters.find_one(doc! { "_id": LINKS })).await?;
    let n = found.as_ref().and_then(|found| found.get("n")).and_then(integer);
    n.map(Links).ok_or_else(|| unavailable("the state of the links between queues is missing"))
}

/// Changes the state of the links. Returns false if it is no longer `links`. Of two transactions with the same state
/// only one can commit.
pub(crate) async fn pass(
    inner: &Inner,
    links: Option<Links>,
    session: &mut ClientSession,
) -> Result<bool, Failure> {
    let mut filter = doc! { "_id": LINKS };
    if let Some(links) = links {
        filter.insert("n", links.0);
    }
    let change = doc! { "$inc": { "n": 1_i64 } };
    let passed = counters(inner).update_one(filter, change).session(session).await?;
    Ok(passed.matched_count == 1)
}

/// Returns a filter for items of all priorities that are neither settled nor expired, by the hand-out index.
pub(crate) fn unsettled(q: &str, now: Timestamp) -> Document {
    let levels: Vec<i32> = (0..i32::from(Priority::LEVELS)).collect();
    doc! {
        "q": q, "priority": { "$in": levels },
        "when": { "$lt": millis(PROCESSED), "$ne": millis(READY_END) },
        "deadline": { "$not": { "$lte": date(now) } },
        "left": { "$ne": 0 }, // a segment of which nothing is left is about to be deleted
    }
}

/// Returns true if the queue holds an item, as the transaction sees it.
pub(crate) async fn holds_items(
    inner: &Inner,
    group: &Group,
    q: &str,
    session: &mut ClientSession,
) -> Result<bool, Failure> {
    let found = group
        .items
        .clone_with_type::<Document>()
        .find_one(unsettled(q, inner.now()))
        .projection(doc! { "_id": 1 })
        .hint(Hint::Name(HANDOUT.to_owned()))
        .session(session)
        .await?;
    Ok(found.is_some())
}

/// Marks a queue as one that is being deleted. Returns false if its settings or the links have changed.
pub(crate) async fn mark(inner: &Inner, queue: &Queue, links: Links) -> Result<bool> {
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let attempt = async {
            let queues = inner.db.collection::<Document>(QUEUES);
            let filter = doc! { "_id": queue.name.as_str(), "revision": queue.revision };
            let mark = doc! { "$set": { DELETING: date(inner.now()) } };
            let marked = pass(inner, Some(links), &mut session).await?
                && queues.update_one(filter, mark).session(&mut *session).await?.matched_count == 1;
            if marked {
                commit(&mut session).await?;
            }
            Ok(marked)
        };
        let outcome = attempt_in_time(attempt).await;
        if let Some(marked) = patience.after(&mut session, outcome).await? {
            if !marked {
                abort(&mut session).await;
            }
            return Ok(marked);
        }
    }
}

/// Renews the mark. Returns false if it is gone: the deletion took too long, or another one has ended.
async fn renew_mark(inner: &Inner, queue: &QueueName) -> Result<bool> {
    let queues = inner.db.collection::<Document>(QUEUES);
    let filter = doc! { "_id": queue.as_str(), DELETING: { "$exists": true } };
    let mark = doc! { "$set": { DELETING: date(inner.now()) } };
    let marked = in_time(&inner.db, queues.update_one(filter, mark)).await.map_err(failed)?;
    Ok(marked.matched_count == 1)
}

/// Returns true if the queue takes no links, because it is being deleted. Removes a mark that was left behind.
async fn is_marked(
    inner: &Inner,
    queue: &QueueName,
    session: &mut ClientSession,
) -> Result<bool, Failure> {
    let queues = inner.db.collection::<Document>(QUEUES);
    let filter = doc! { "_id": queue.as_str(), DELETING: { "$exists": true } };
    let Some(found) = queues.find_one(filter.clone()).session(&mut *session).await? else {
        return Ok(false);
    };
    let at = found.get_datetime(DELETING).map_or(0, |at| at.timestamp_millis());
    if at + MARKED > inner.now().0 {
        return Ok(true);
    }
    queues.update_one(filter, doc! { "$unset": { DELETING: 1 } }).session(session).await?;
    Ok(false)
}

/// Deletes a queue and everything that belongs to it.
pub(crate) async fn delete_queue(
    inner: &Inner,
    queue: &Queue,
    force: bool,
    links: Links,
) -> Result<Deleted> {
    let group = inner.group(&queue.group).await?;
    let mut count = 0;
    if force {
        if !mark(inner, queue, links).await? {
            return Ok(Deleted::Overtaken);
        }
        // Most items are deleted before, so that the transaction stays small. A crash then leaves a queue that can be
        // deleted again.
        for _ in 0..ROUNDS {
            if !renew_mark(inner, &queue.name).await? {
                return Ok(Deleted::Overtaken);
            }
            let shared = segment::purge::purge(inner, &group, &queue.name).await?;
            let deleted = shared + delete_items(inner, &group, &queue.name, None).await?;
            count += deleted;
            if deleted < FEW {
                break;
            }
        }
    }
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let attempt = async {
            let deleted = attempt(inner, &group, queue, force, links, &mut session).await?;
            if matches!(deleted, Deleted::Done(_)) {
                commit(&mut session).await?;
            }
            Ok(deleted)
        };
        let outcome = attempt_in_time(attempt).await;
        match patience.after(&mut session, outcome).await? {
            Some(Deleted::Done(last)) => {
                count += last;
                break;
            }
            Some(refused) => {
                abort(&mut session).await;
                return Ok(refused);
            }
            None => {}
        }
    }
    inner.cursors.forget(&queue.name);
    if !force {
        count += delete_remains(inner, &group, queue.name.as_str()).await?;
    }
    Ok(Deleted::Done(count))
}

async fn attempt(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    force: bool,
    links: Links,
    session: &mut ClientSession,
) -> Result<Deleted, Failure> {
    let q = queue.name.as_str();
    // With force the mark stands for what the caller read.
    let (links, as_read) = if force {
        (None, doc! { "_id": q, DELETING: { "$exists": true } })
    } else {
        (Some(links), doc! { "_id": q, "revision": queue.revision })
    };
    if !pass(inner, links, session).await? {
        return Ok(Deleted::Overtaken);
    }
    let mut count = 0;
    if force {
        count = delete_items(inner, group, &queue.name, Some(&mut *session)).await?;
    } else if holds_items(inner, group, q, session).await? {
        return Ok(Deleted::NotEmpty);
    }
    let queues = inner.db.collection::<Document>(QUEUES);
    let found = queues.find_one_and_delete(as_read).session(&mut *session).await?;
    let Some(mut settings) = found else { return Ok(Deleted::Overtaken) };
    settings.remove(DELETING);
    let now = inner.now();
    settings.insert("at", date(now));
    let deleted = inner.db.collection::<Document>(DELETED);
    // Items may still come for the queue that was deleted before in another group.
    if let Some(before) = deleted.find_one(doc! { "_id": q }).session(&mut *session).await? {
        settings.insert(FORMER_GROUPS, former_groups(&before, &queue.group, now.0));
    }
    let note = deleted.replace_one(doc! { "_id": q }, settings).upsert(true);
    note.session(&mut *session).await?;
    // Deleted within the transaction, because the counters of the next queue of this name must stay.
    let ids = [ordering::counter_id(&queue.name), totals_id(&queue.name)];
    let mine = doc! { "_id": { "$in": ids.to_vec() } };
    counters(inner).delete_many(mine).session(&mut *session).await?;
    let sentinels = doc! { "_id": { "$in": priorities::sentinel_ids(&queue.name) } };
    group.items.delete_many(sentinels).session(session).await?;
    Ok(Deleted::Done(count))
}

/// Removes what is left of a queue without items: history, deduplication ids, and expired items. Returns how much
/// history there was. Anything later than the deletion stays.
async fn delete_remains(inner: &Inner, group: &Group, q: &str) -> Result<u64> {
    let now = date(inner.now());
    let forget = doc! { "$unset": { "dedup": 1, "window": 1 } };
    let mut ids = ids_of(q);
    ids.insert("created", doc! { "$lt": now });
    bulk_in_time(&inner.db, group.items.update_many(ids, forget)).await.map_err(failed)?;
    let empty = doc! { "q": q, "left": 0 };
    bulk_in_time(&inner.db, group.items.delete_many(empty).hint(Hint::Name(SEGMENTS.to_owned())))
        .await
        .map_err(failed)?;
    let history = doc! { "q": q, "processed": { "$lt": now } };
    let history =
        bulk_in_time(&inner.db, group.items.delete_many(history)).await.map_err(failed)?;
    let ended = doc! { "q": q, "when": live(), "deadline": { "$lte": now } };
    let settled = settle_token(inner);
    let bury = group.items.update_many(ended, bury(inner.now(), settled));
    bulk_in_time(&inner.db, bury).await.map_err(failed)?;
    Ok(history.deleted_count)
}

/// Returns a filter for the items that were pushed to the queue with a deduplication id, whichever queue they are in
/// now.
fn ids_of(q: &str) -> Document {
    doc! { "dedup": {
        "$gte": { "q": q, "id": Bson::MinKey }, "$lte": { "q": q, "id": Bson::MaxKey },
    } }
}

/// Deletes all items of the queue, including history, and returns how many.
async fn delete_items(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    mut session: Option<&mut ClientSession>,
) -> Result<u64, Failure> {
    let q = queue.as_str();
    if let Some(session) = session.as_deref_mut() {
        segment::detach::detach_queue(group, queue, inner.now(), session).await?;
    }
    // Deduplication ids of this queue no longer count.
    let forget = doc! { "$unset": { "dedup": 1, "window": 1 } };
    let forget = group.items.update_many(ids_of(q), forget);
    let own_document = doc! { "q": q, "when": live(), "left": { "$exists": false } };
    let mut free = own_document.clone();
    free.insert("lock", doc! { "$exists": false });
    let delete = group.items.delete_many(free);
    // Reserved items leave tombstones, because consumers may still settle them.
    let tombstones = bury(inner.now(), settle_token(inner));
    let bury = group.items.update_many(own_document, tombstones);
    let (deleted, buried) = if let Some(session) = session {
        forget.session(&mut *session).await?;
        (delete.session(&mut *session).await?, bury.session(session).await?)
    } else {
        bulk_in_time(&inner.db, forget).await?;
        (bulk_in_time(&inner.db, delete).await?, bulk_in_time(&inner.db, bury).await?)
    };
    Ok(deleted.deleted_count + buried.modified_count)
}

/// Creates or changes a queue together with its link to a dead-letter queue.
pub(crate) async fn link_queue(
    inner: &Inner,
    queue: &Queue,
    links: Links,
) -> Result<Option<Queue>> {
    let document = crate::store::mongo::catalog::queues::new_document(inner, queue).await?;
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let attempt = async {
            if !pass(inner, Some(links), &mut session).await? {
                return Ok(None);
            }
            if let Some(target) = queue.dead_letter_target()
                && is_marked(inner, &target, &mut session).await?
            {
                return Ok(None);
            }
            let done = if queue.revision == 0 {
                insert(inner, queue, &document, &mut session).await?
            } else {
                let (filter, change) = crate::store::mongo::catalog::queues::change(inner, queue);
                let queues = inner.db.collection::<Document>(QUEUES);
                queues
                    .find_one_and_update(filter, change)
                    .return_document(ReturnDocument::After)
                    .session(&mut *session)
                    .await?
            };
            if done.is_some() {
                commit(&mut session).await?;
            }
            Ok(done)
        };
        let outcome = attempt_in_time(attempt).await;
        if let Some(done) = patience.after(&mut session, outcome).await? {
            if done.is_none() {
                abort(&mut session).await;
            }
            return done.as_ref().map(crate::store::mongo::catalog::queues::read).transpose();
        }
    }
}

async fn insert(
    inner: &Inner,
    queue: &Queue,
    document: &Document,
    session: &mut ClientSession,
) -> Result<Option<Document>, Failure> {
    let queues = inner.db.collection::<Document>(QUEUES);
    let there = queues.find_one(doc! { "_id": queue.name.as_str() }).session(&mut *session).await?;
    if there.is_some() {
        return Ok(None);
    }
    queues.insert_one(document).session(session).await?;
    Ok(Some(document.clone()))
}
