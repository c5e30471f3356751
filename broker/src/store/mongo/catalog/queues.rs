//! Queues and their settings.

use std::{collections::BTreeMap, num::NonZeroU64, time::Duration};

use mongodb::{
    bson::{Bson, Document, doc},
    options::ReturnDocument,
};

use crate::{
    domain::{GroupName, Invalid, Limit, Queue, QueueName, RetryPolicy, Timestamp},
    store::{
        Created, Result,
        mongo::{
            Inner,
            catalog::named::Named,
            priorities,
            schema::{
                item::{literal, texts},
                layout::date,
            },
            server::{
                connect::read_documents,
                error::{broken, failed, integer, written},
                time_limit::in_time,
            },
        },
    },
};

/// The collection of all queues.
pub(crate) const QUEUES: &str = "queues";
/// Name of the index of dead-letter queues.
const LINKS: &str = "deadLetterQueue";
/// Limit of source queues that are returned for one dead-letter queue.
const MAX_SOURCES: i64 = 100;
const NAMED: Named<Queue> = Named { collection: QUEUES, read };

/// Creates the indexes that find changed settings and the sources of dead-letter queues.
pub(crate) async fn ensure_indexes(inner: &Inner) -> Result<()> {
    let command = doc! {
        "createIndexes": QUEUES,
        "indexes": [
            { "name": "updated", "key": { "updated": 1, "revision": 1 } },
            {
                "name": LINKS, "key": { "deadLetterQueue": 1 },
                "partialFilterExpression": { "deadLetterQueue": { "$exists": true } },
            },
        ],
    };
    let reply = in_time(&inner.db, inner.db.run_command(command)).await.map_err(failed)?;
    written(&reply)?;
    Ok(())
}

/// Makes sure that the server can be reached and takes writes.
pub(crate) async fn ping(inner: &Inner) -> Result<()> {
    let counters = inner.db.collection::<Document>("counters");
    let at = doc! { "$set": { "at": date(inner.now()) } };
    in_time(&inner.db, counters.update_one(doc! { "_id": "ping" }, at).upsert(true))
        .await
        .map_err(failed)?;
    Ok(())
}

/// Returns a duration in milliseconds, which is the unit of the store.
pub(crate) fn span(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the settings as fields, for a queue or a template. Settings that are not set are left out.
pub(super) fn settings(queue: &Queue) -> Document {
    let mut d = doc! {
        "group": queue.group.as_str(),
        "retention": span(queue.retention),
        "dedupWindow": span(queue.dedup_window),
        "maxDepth": queue.max_depth.map_or(0, NonZeroU64::get) as i64,
        "sequenced": queue.sequenced,
        "paused": queue.paused,
        "discardFailed": queue.discard_failed,
        "labels": texts(&queue.labels),
    };
    if let Some(lease) = queue.lease {
        d.insert("lease", span(lease));
    }
    if let Some(limit) = queue.max_attempts {
        d.insert("attemptLimit", i64::from(limit.number()));
    }
    if let Some(limit) = queue.max_deliveries {
        d.insert("deliveryLimit", i64::from(limit.number()));
    }
    if let Some(to) = &queue.dead_letter_queue {
        d.insert("deadLetterQueue", to.as_str());
    }
    if let Some(policy) = &queue.retry_policy {
        d.insert(
            "retryPolicy",
            doc! {
                "initialDelay": span(policy.initial_delay), "multiplier": policy.multiplier,
                "maxDelay": span(policy.max_delay), "jitter": policy.jitter,
            },
        );
    }
    if let Some(ttl) = queue.default_ttl {
        d.insert("defaultTtl", span(ttl));
    }
    d
}

/// Returns the fields of a queue that an update replaces.
fn fields(queue: &Queue) -> Document {
    let mut d = settings(queue);
    d.insert("created", date(queue.create_time));
    if let Some(since) = queue.unused_since {
        d.insert("unusedSince", date(since));
    }
    d
}

/// Fields that a change of the settings removes unless it sets them.
const OPTIONAL: [&str; 7] = [
    "lease",
    "attemptLimit",
    "deliveryLimit",
    "deadLetterQueue",
    "retryPolicy",
    "defaultTtl",
    "unusedSince",
];

/// Parses the document of a queue.
pub(crate) fn read(document: &Document) -> Result<Queue> {
    let name = QueueName::parse("_id", document.get_str("_id").unwrap_or_default());
    let name = name.map_err(|e| broken(format!("unreadable queue: {e}")))?;
    let time =
        |name: &str| document.get_datetime(name).ok().map(|at| Timestamp(at.timestamp_millis()));
    Ok(Queue {
        create_time: time("created").unwrap_or_default(),
        unused_since: time("unusedSince"),
        revision: document.get("revision").and_then(integer).unwrap_or_default(),
        ..read_settings(document, name)?
    })
}

/// Parses the fields that [`settings`] returns, into a queue of this name.
pub(super) fn read_settings(document: &Document, name: QueueName) -> Result<Queue> {
    let whole = |name: &str| document.get(name).and_then(integer);
    let time = |name: &str| whole(name).map(|ms| Duration::from_millis(ms as u64));
    let text = |name: &str| document.get_str(name).unwrap_or_default();
    let flag = |name: &str| document.get_bool(name).unwrap_or_default();
    let bad = |e: Invalid| broken(format!("unreadable queue: {e}"));
    let labels: BTreeMap<String, String> = document
        .get_document("labels")
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    let retry_policy = document.get_document("retryPolicy").ok().map(|policy| {
        let time = |name: &str| {
            let ms = policy.get(name).and_then(integer).unwrap_or_default();
            Duration::from_millis(ms as u64)
        };
        RetryPolicy {
            initial_delay: time("initialDelay"),
            multiplier: policy.get_f64("multiplier").unwrap_or(1.0),
            max_delay: time("maxDelay"),
            jitter: policy.get_f64("jitter").unwrap_or_default(),
        }
    });
    Ok(Queue {
        group: GroupName::parse("group", text("group")).map_err(bad)?,
        lease: time("lease"),
        max_attempts: whole("attemptLimit").map(|limit| Limit::of(limit as u32)),
        max_deliveries: whole("deliveryLimit").map(|limit| Limit::of(limit as u32)),
        discard_failed: flag("discardFailed"),
        dead_letter_queue: QueueName::parse_optional("deadLetterQueue", text("deadLetterQueue"))
            .map_err(bad)?,
        retry_policy,
        default_ttl: time("defaultTtl"),
        retention: time("retention").unwrap_or_default(),
        dedup_window: time("dedupWindow").unwrap_or_default(),
        max_depth: NonZeroU64::new(whole("maxDepth").unwrap_or_default() as u64),
        sequenced: flag("sequenced"),
        paused: flag("paused"),
        labels,
        ..Queue::with_defaults(name, Timestamp::default())
    })
}

/// Creates a queue, or returns the existing one.
pub(crate) async fn create(inner: &Inner, queue: &Queue) -> Result<Created<Queue>> {
    let document = new_document(inner, queue).await?;
    NAMED.create(inner, queue.name.as_str(), &document).await
}

/// Returns the document of a new queue.
pub(crate) async fn new_document(inner: &Inner, queue: &Queue) -> Result<Document> {
    // Items may precede their queue, by dead-lettering.
    let group = inner.group(&queue.group).await?;
    let used = priorities::in_index(inner, group.items.name(), &queue.name).await?;
    let mut document = doc! { "_id": queue.name.as_str() };
    document.extend(fields(queue));
    document.insert("revision", 1_i64);
    document.insert("updated", date(inner.now()));
    document.insert("levels", used.iter().map(Bson::Int32).collect::<Vec<_>>());
    Ok(document)
}

/// Returns the settings of a queue.
pub(crate) async fn get(inner: &Inner, name: &QueueName) -> Result<Option<Queue>> {
    NAMED.get(inner, name.as_str()).await
}

/// Returns queues sorted by name.
pub(crate) async fn list(
    inner: &Inner,
    prefix: &str,
    after: Option<&QueueName>,
    limit: usize,
) -> Result<Vec<Queue>> {
    let mut ids = doc! { "$gte": prefix, "$lt": QueueName::end_of_prefix(prefix) };
    if let Some(after) = after {
        ids.insert("$gt", after.as_str());
    }
    NAMED.list(inner, ids, limit, None).await
}

/// Returns those of the queues that exist.
pub(crate) async fn get_all(inner: &Inner, names: &[QueueName]) -> Result<Vec<Queue>> {
    let names: Vec<&str> = names.iter().map(QueueName::as_str).collect();
    let command = doc! { "find": QUEUES, "filter": { "_id": { "$in": names } } };
    read_documents(&inner.db, command).await?.iter().map(read).collect()
}

/// Returns queues whose dead-letter queue is this one.
pub(crate) async fn dead_letter_sources(inner: &Inner, name: &QueueName) -> Result<Vec<Queue>> {
    let command = doc! {
        "find": QUEUES, "filter": { "deadLetterQueue": name.as_str() }, "hint": LINKS,
        "limit": MAX_SOURCES, "batchSize": MAX_SOURCES, "singleBatch": true,
    };
    read_documents(&inner.db, command).await?.iter().map(read).collect()
}

/// Replaces the settings, if they still have this revision.
pub(crate) async fn update(inner: &Inner, queue: &Queue) -> Result<Option<Queue>> {
    let (filter, change) = change(inner, queue);
    let queues = inner.db.collection::<Document>(QUEUES);
    let update = queues.find_one_and_update(filter, change).return_document(ReturnDocument::After);
    let found = in_time(&inner.db, update).await.map_err(failed)?;
    found.as_ref().map(read).transpose()
}

/// Returns the filter and the update that replace the settings.
pub(crate) fn change(inner: &Inner, queue: &Queue) -> (Document, Vec<Document>) {
    let fields = fields(queue);
    let absent: Vec<&str> =
        OPTIONAL.into_iter().filter(|name| !fields.contains_key(name)).collect();
    let mut set: Document =
        fields.into_iter().map(|(name, value)| (name, literal(value).into())).collect();
    set.insert("revision", queue.revision + 1);
    set.insert("updated", date(inner.now()));
    let mut stages = vec![doc! { "$set": set }];
    if !absent.is_empty() {
        stages.push(doc! { "$unset": absent });
    }
    (doc! { "_id": queue.name.as_str(), "revision": queue.revision }, stages)
}
