//! Looks into the database itself, for what no call shows.

use std::{collections::BTreeSet, time::Duration};

use futures_util::TryStreamExt as _;
use mongodb::{
    Database,
    bson::{Bson, Document, doc},
};

/// Milliseconds for which a tombstone may stay beyond the window of its deduplication id: what a lease is exclusive, and
/// some more.
const WITNESS: i64 = 4 * 60_000;
/// Milliseconds of the longest window of deduplication ids here: that of a schedule which ticks once a day.
const WINDOW: i64 = 24 * HOUR + 11 * 60_000;
/// The dates that stand for states, as in the broker's store/mongo/schema/layout.rs.
const LAST_DAY: i64 = 253_402_214_400_000;
const HOUR: i64 = 3_600_000;
const CLAIMED: i64 = LAST_DAY + 21 * HOUR + HOUR / 2;
const PROCESSED: i64 = LAST_DAY + 22 * HOUR;
const TOMBSTONE: i64 = LAST_DAY + 23 * HOUR;

async fn documents(database: &Database, queues: &[String]) -> Vec<Document> {
    let items = database.collection::<Document>("items.default");
    let found = items.find(doc! { "q": { "$in": queues } }).await.expect("the items of a case");
    let found: Vec<Document> = found.try_collect().await.expect("the items of a case");
    let is_item = |document: &Document| document.get_object_id("_id").is_ok();
    found.into_iter().filter(is_item).collect()
}

fn when(document: &Document) -> i64 {
    document.get_datetime("when").map_or(0, |when| when.timestamp_millis())
}

fn number(document: &Document, field: &str) -> i64 {
    document.get(field).map_or(0, integer)
}

fn integer(value: &Bson) -> i64 {
    match value {
        Bson::Int32(number) => i64::from(*number),
        Bson::Int64(number) => *number,
        Bson::Double(number) => *number as i64,
        _ => 0,
    }
}

fn words(document: &Document, field: &str) -> Vec<i64> {
    document.get_array(field).into_iter().flatten().map(integer).collect()
}

/// Returns the segments that contradict themselves.
pub(crate) async fn odd_segments(database: &Database, queues: &[String]) -> Vec<String> {
    let documents = documents(database, queues).await;
    let segments = documents.iter().filter(|document| document.contains_key("left"));
    segments.filter_map(|segment| Some(format!("{}: {segment}", oddity(segment)?))).collect()
}

fn oddity(segment: &Document) -> Option<&'static str> {
    let (n, left, ready) =
        (number(segment, "n"), number(segment, "left"), number(segment, "ready"));
    let done: i64 = words(segment, "done").iter().map(|word| i64::from(word.count_ones())).sum();
    if left != n - done {
        return Some("`left` is not what is not done");
    }
    if ready > left || ready < 0 || number(segment, "head") > n {
        return Some("more is ready than is left");
    }
    if (ready == 0) != (when(segment) == CLAIMED) {
        return Some("`when` does not say whether anything is ready");
    }
    let runs: Vec<&Document> =
        segment.get_array("runs").into_iter().flatten().filter_map(Bson::as_document).collect();
    if runs.iter().any(|run| run.get_datetime("until").is_err()) {
        return Some("a claim without an end");
    }
    let mut taken = vec![0; words(segment, "done").len()];
    for run in &runs {
        for (word, items) in taken.iter_mut().zip(words(run, "items")) {
            if *word & items != 0 {
                return Some("an item under two claims");
            }
            *word |= items;
        }
    }
    let held = |run: &&&Document| {
        let items = words(run, "items");
        items.iter().zip(words(segment, "done")).any(|(items, done)| items & !done != 0)
    };
    let until = |run: &&Document| run.get_datetime("until").ok().copied();
    let first = runs.iter().filter(held).filter_map(until).min();
    let lapse = segment.get_datetime("lapse").ok().copied();
    match (first, lapse) {
        (Some(_), None) => Some("claims, and no time when one lapses"),
        (Some(first), Some(lapse)) if lapse > first => Some("a claim lapses before `lapse`"),
        _ => None,
    }
}

/// Returns the queues that hold items which are not settled.
pub(crate) async fn unsettled(database: &Database, queues: &[String]) -> BTreeSet<String> {
    let documents = documents(database, queues).await;
    let is_live = |document: &&Document| {
        when(document) < PROCESSED && document.get("left").is_none_or(|left| integer(left) > 0)
    };
    let queue = |document: &Document| document.get_str("q").unwrap_or_default().to_owned();
    documents.iter().filter(is_live).map(queue).collect()
}

/// Returns the documents that should not be left after everything was settled, and their queues.
pub(crate) async fn leftovers(
    database: &Database,
    queues: &[String],
) -> (Vec<String>, BTreeSet<String>) {
    let documents = documents(database, queues).await;
    let (mut wrong, mut of) = (Vec::new(), BTreeSet::new());
    for document in &documents {
        if let Some(what) = leftover(document) {
            wrong.push(format!("{what}: {document}"));
            of.insert(document.get_str("q").unwrap_or_default().to_owned());
        }
    }
    (wrong, of)
}

fn leftover(document: &Document) -> Option<&'static str> {
    let now = mongodb::bson::DateTime::now().timestamp_millis();
    let expires = document.get_datetime("expires").map(|at| at.timestamp_millis());
    match when(document) {
        TOMBSTONE => match expires {
            Err(_) => Some("a tombstone that stays for ever"),
            Ok(at) if at > now + WINDOW + WITNESS => Some("a tombstone that stays long"),
            Ok(_) => None,
        },
        PROCESSED if expires.is_ok() && !document.contains_key("lock") => None,
        PROCESSED => Some("history that is locked or stays for ever"),
        _ if document.contains_key("left") => Some("a segment"),
        _ => Some("an item"),
    }
}

/// Returns how many transactions of these brokers have paused for longer than brokers leave them.
pub(crate) async fn open_transactions(database: &Database, app_name: &str) -> usize {
    let paused = i64::try_from(Duration::from_secs(10).as_micros()).unwrap_or(i64::MAX);
    let pipeline = vec![
        doc! { "$currentOp": { "idleSessions": true } },
        doc! { "$match": {
            "active": false, "appName": app_name, "transaction.timeInactiveMicros": { "$gt": paused },
        } },
    ];
    let found = database.client().database("admin").aggregate(pipeline).await;
    let found: Vec<Document> = match found {
        Ok(cursor) => cursor.try_collect().await.unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    found.len()
}
