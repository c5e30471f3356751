use std::{future::Future, num::NonZeroU64, sync::Arc};

use mongodb::{Client, Database};

use super::*;
use crate::{
    domain::{
        Clock, DedupId, GroupName, Item, ItemState, Limit, NewItem, Outcome, Queue, QueueName,
        Receipt, ReceiptKeys, RetryPolicy, ScheduleName, Timestamp, Totals,
    },
    store::{
        ItemAdmin, ItemStore, Push, QueueStore, Reservation, ScheduleStore, StatsStore, Store,
        conformance::Broker,
        mongo::{
            MongoOptions, MongoStore,
            tests::{Scratch, take},
        },
    },
};

/// A database as the last program without a format left it, in the form of the commands that create it. The file never
/// changes, whatever today's documents look like. The database was written by a broker of commit c06d6bf through its
/// Python client. Only the times at which MongoDB itself deletes documents were put off, because the tests' clock
/// stands where the broker's stood.
const VERSION_1: &str = include_str!("version_1.json");
/// 2026-11-22T01:57:30Z, when the broker had just ended: one lease has lapsed, one has not.
const THEN: Timestamp = Timestamp(1_795_312_650_000);

const NOTHING: fn() -> Vec<Update> = Vec::new;
/// A change that counts how often it was made.
const COUNT: fn() -> Vec<Update> = || {
    let change = vec![doc! { "$set": { "steps": { "$add": [{ "$ifNull": ["$steps", 0] }, 1] } } }];
    vec![Update { collection: "queues", filter: doc! {}, change }]
};
/// A change that fails after another one.
const FAIL: fn() -> Vec<Update> = || {
    let change = vec![doc! { "$set": { "broken": { "$divide": [1, 0] } } }];
    vec![COUNT().remove(0), Update { collection: "queues", filter: doc! {}, change }]
};
/// The versions after the first that reads the document: one like this version, one whose database brokers of this
/// version can still use, and one whose database they cannot use.
const SECOND: Format =
    Format { steps: &[Step { updates: NOTHING, earlier_go_on: false }], notice: SOON };
const THIRD: Format = Format {
    steps: &[
        Step { updates: NOTHING, earlier_go_on: false },
        Step { updates: COUNT, earlier_go_on: true },
    ],
    notice: NEVER,
};
const FOURTH: Format = Format {
    steps: &[
        Step { updates: NOTHING, earlier_go_on: false },
        Step { updates: COUNT, earlier_go_on: true },
        Step { updates: COUNT, earlier_go_on: false },
    ],
    notice: NEVER,
};
const SOON: Duration = Duration::ZERO;
/// Longer than a test runs.
const NEVER: Duration = Duration::from_hours(1);

fn options() -> MongoOptions {
    let clock = Clock::system();
    clock.set(THEN);
    MongoOptions {
        clock: Arc::new(clock),
        discipline: false,
        pool_size: 16,
        ..MongoOptions::default()
    }
}

async fn open_as(format: Format, scratch: &Scratch) -> Result<Broker<MongoStore>> {
    let store = MongoStore::connect_as(format, &scratch.uri, &scratch.name, options()).await?;
    Ok(Broker::new(Arc::new(store)))
}

async fn database(scratch: &Scratch) -> (Client, Database) {
    let client = Client::with_uri_str(&scratch.uri).await.unwrap();
    let db = client.database(&scratch.name);
    (client, db)
}

async fn old_database() -> Scratch {
    let scratch = Scratch::new();
    let (_client, db) = database(&scratch).await;
    let commands: Vec<Document> = serde_json::from_str(VERSION_1).unwrap();
    for command in commands {
        let reply = db.run_command(command).await.unwrap();
        assert!(!reply.contains_key("writeErrors"), "{reply}");
    }
    scratch
}

async fn format_of(scratch: &Scratch) -> Option<(i64, i64)> {
    let (_client, db) = database(scratch).await;
    let found = db.collection::<Document>(FORMAT).find_one(doc! {}).await.unwrap()?;
    let found = Found::read(&found).unwrap();
    Some((found.version, found.oldest_reader))
}

/// Returns how often the counting change was made to each queue.
async fn counts(scratch: &Scratch) -> Vec<i64> {
    let (_client, db) = database(scratch).await;
    let queues = db.collection::<Document>("queues").distinct("steps", doc! {}).await.unwrap();
    queues.iter().filter_map(integer).collect()
}

fn name(text: &str) -> QueueName {
    QueueName::parse("queue", text).unwrap()
}

async fn queue(store: &MongoStore, text: &str) -> Arc<Queue> {
    Arc::new(store.get_queue(&name(text)).await.unwrap().expect("the queue is there"))
}

async fn item(store: &MongoStore, in_queue: &str, payload: &str) -> Item {
    let queue = queue(store, in_queue).await;
    let page = store.list_items(&queue, None, None, 100).await.unwrap();
    page.entries.into_iter().find(|item| item.payload == payload).expect("the item is there")
}

fn push(queue: &Arc<Queue>, item: NewItem) -> Push {
    Push::new(Arc::clone(queue), item)
}

/// Repeats a call until it fails, and returns the error.
async fn until_refused<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> StoreError {
    let refused = async {
        loop {
            match call().await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(error) => return error,
            }
        }
    };
    tokio::time::timeout(Duration::from_mins(1), refused).await.expect("a refusal in time")
}

/// A database of the version before opens with everything in it, and a limit that was not set is the broker's default.
#[tokio::test]
async fn a_database_of_version_1_keeps_everything_in_it() {
    let scratch = old_database().await;
    let store = open_as(THIS, &scratch).await.unwrap();
    assert_eq!(format_of(&scratch).await, Some((THIS.version(), THIS.version())));
    let plain = queue(&store, "plain").await;
    let with_defaults = Queue::with_defaults(name("plain"), plain.create_time);
    assert_eq!(*plain, Queue { revision: 1, ..with_defaults });
    let work = queue(&store, "work").await;
    let policy = RetryPolicy {
        initial_delay: Duration::ZERO,
        multiplier: 3.0,
        max_delay: Duration::from_mins(1),
        jitter: 0.5,
    };
    assert_eq!((work.max_attempts, work.max_deliveries), (Some(Limit::of(3)), None));
    assert_eq!((work.dead_letter_queue.clone(), work.discard_failed), (Some(name("dead")), false));
    assert_eq!((&work.retry_policy, work.max_depth), (&Some(policy), NonZeroU64::new(9)));
    assert_eq!(
        (work.group.clone(), work.lease),
        (GroupName::parse("group", "eu").unwrap(), Some(Duration::from_secs(5)))
    );
    assert!(work.sequenced && !work.paused && queue(&store, "kept").await.paused);
    let sources = store.dead_letter_sources(&name("dead")).await.unwrap();
    assert_eq!(sources.len(), 1, "found by the new index");

    for (in_queue, payload, state, has_due_time) in [
        ("plain", "ready", ItemState::Ready, true),
        ("plain", "lapsed", ItemState::Ready, true),
        ("plain", "delayed", ItemState::Delayed, true),
        ("plain", "ends", ItemState::Ready, true),
        ("work", "reserved", ItemState::Reserved, true),
        ("work", "first", ItemState::Ready, true),
        ("work", "blocked", ItemState::Blocked, false),
        ("dead", "dead", ItemState::Ready, true),
        ("kept", "processed", ItemState::Processed, false),
    ] {
        let item = item(&store, in_queue, payload).await;
        assert_eq!((item.state, item.due_time.is_some()), (state, has_due_time), "{payload}");
        assert_eq!((item.dead_letter_time, item.dead_letter_attempts), (None, 0));
    }
    let dead = item(&store, "dead", "dead").await;
    assert_eq!((dead.origin_queue, dead.last_reason.as_str()), (Some(name("work")), "broken"));
    let depth = store.depth(&work).await.unwrap();
    assert_eq!((depth.reserved, depth.ready, depth.blocked), (1, 1, 1));

    let expected =
        Totals { pushed: 4, delivered: 5, rolled_back: 3, dead_lettered: 1, ..Totals::default() };
    assert_eq!(store.totals(&work.name).await.unwrap(), expected);
    let schedule = ScheduleName::parse("schedule", "nightly").unwrap();
    let schedule = store.get_schedule(&schedule).await.unwrap().unwrap();
    assert_eq!(
        (schedule.cron.as_str(), schedule.item.payload.as_ref()),
        ("0 3 * * *", &b"tick"[..])
    );
}

/// A broker of today finishes what a broker of version 1 began: leases, keys, deduplication ids, numbers, limits.
#[tokio::test]
async fn a_database_of_version_1_works_like_a_new_one() {
    let scratch = old_database().await;
    let store = open_as(THIS, &scratch).await.unwrap();
    let (plain, work) = (queue(&store, "plain").await, queue(&store, "work").await);
    for (queue, id, payload) in [(&plain, "gone", None), (&work, "once", Some("reserved"))] {
        let again = NewItem { dedup_id: DedupId::new(id), ..NewItem::default() };
        let again = store.push(vec![push(queue, again)]).await.unwrap()[0];
        assert!(again.deduplicated, "{id}");
        if let Some(payload) = payload {
            assert_eq!(again.id, item(&store, "work", payload).await.id);
        }
    }
    let pushed = store.push(vec![push(&work, NewItem::default())]).await.unwrap()[0];
    assert_eq!(pushed.sequence, Some(5));

    // A receipt that the old broker handed out, and one whose item it committed.
    // They were not signed, so that the broker takes no lease token from them.
    let keys = ReceiptKeys::new([]);
    let receipt = |text: &str| Receipt {
        token: text[26..50].parse().unwrap(),
        ..Receipt::parse("receipt", text, &keys).unwrap()
    };
    let reserved = receipt(
        "016b024be5680000005c74c5ac70cc87a2d1ec63ff847bce0000000002000000020004776f726b65758ddab81a",
    );
    let gone = receipt(
        "016b024be5838000005c74c5ac70cc87a210904a086cd48a1b00000001000000010005706c61696e64656661756c741f89f999",
    );
    let held = vec![
        Reservation { queue: work.clone(), receipt: reserved },
        Reservation { queue: plain.clone(), receipt: gone },
    ];
    assert_eq!(store.commit(held).await.unwrap(), [Outcome::Ok, Outcome::Gone]);

    let taken = take(&store, &work, 10).await;
    let payloads: Vec<_> = taken.iter().map(|delivery| delivery.item.payload.clone()).collect();
    assert_eq!(payloads, ["first", ""], "the second item of the key is blocked by the first");
    let first = Reservation { queue: work.clone(), receipt: taken[0].receipt.clone() };
    assert_eq!(store.commit(vec![first]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(take(&store, &work, 10).await[0].item.payload, "blocked");

    let taken = take(&store, &plain, 10).await;
    let mut payloads: Vec<_> = taken.iter().map(|delivery| delivery.item.payload.clone()).collect();
    payloads.sort();
    assert_eq!(payloads, ["ends", "lapsed", "ready"]);
    let attempts = taken.iter().map(|delivery| delivery.item.attempt).max();
    assert_eq!(attempts, Some(2), "the lease that lapsed counts as a failed attempt");
}

/// A migrated database opens as it is, and holds no field of the version before.
#[tokio::test]
async fn an_old_database_gets_the_documents_of_a_new_one() {
    let scratch = old_database().await;
    let (_client, db) = database(&scratch).await;
    let deleted = doc! { "_id": "deleted", "group": "default", "maxAttempts": 7_i64 };
    db.collection::<Document>("deletedQueues").insert_one(deleted).await.unwrap();
    drop(open_as(THIS, &scratch).await.unwrap());
    drop(open_as(THIS, &scratch).await.unwrap());
    let limits = async |collection: &str| {
        let collection = db.collection::<Document>(collection);
        let old = doc! { "maxAttempts": { "$exists": true } };
        assert_eq!(collection.count_documents(old).await.unwrap(), 0);
        collection.distinct("attemptLimit", doc! {}).await.unwrap()
    };
    assert_eq!(limits("queues").await.iter().filter_map(integer).collect::<Vec<_>>(), [3]);
    assert_eq!(limits("deletedQueues").await.iter().filter_map(integer).collect::<Vec<_>>(), [7]);
}

/// A step that fails half way leaves the database as it was.
#[tokio::test]
async fn a_migration_is_all_or_nothing() {
    let scratch = old_database().await;
    let breaks =
        Format { steps: &[TO_VERSION_2, Step { updates: FAIL, earlier_go_on: true }], ..THIS };
    let Err(error) = open_as(breaks, &scratch).await else { panic!("the step did not fail") };
    assert!(error.to_string().contains("divide by zero"), "{error}");
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((1, 1)), vec![]));
    let (_client, db) = database(&scratch).await;
    let old = doc! { "maxAttempts": { "$exists": true } };
    assert_eq!(db.collection::<Document>("queues").count_documents(old).await.unwrap(), 4);
}

/// Brokers that start together take each step once. A new database has the latest format at once.
#[tokio::test]
async fn brokers_that_start_together_migrate_once() {
    let scratch = old_database().await;
    let starts = (0..6).map(|_| open_as(THIRD, &scratch));
    for store in futures_util::future::join_all(starts).await {
        drop(store.unwrap());
    }
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((3, 2)), vec![1]));

    // A broker that read the version before the others migrated comes too late.
    let (_client, db) = database(&scratch).await;
    assert!(matches!(THIRD.migrate(&Db::new(db, 1), 1, 2).await, Err(Failure::Conflict(_))));
    assert_eq!(counts(&scratch).await, [1]);

    let new = Scratch::new();
    let starts = (0..6).map(|_| open_as(FOURTH, &new));
    for store in futures_util::future::join_all(starts).await {
        drop(store.unwrap());
    }
    assert_eq!(format_of(&new).await, Some((4, 4)));
}

/// The transaction of a broker that died during its migration does not block the next broker.
#[tokio::test]
async fn a_migration_whose_broker_died_is_done_by_the_next() {
    let scratch = old_database().await;
    drop(open_as(SECOND, &scratch).await.unwrap());
    let mut options = mongodb::options::ClientOptions::parse(&scratch.uri).await.unwrap();
    options.app_name = Some("sluicegate dead".to_owned());
    let dead = Client::with_options(options).unwrap();
    let db = dead.database(&scratch.name);
    let mut session = dead.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let reached = doc! { "$set": fields(3, 2) };
    db.collection::<Document>(FORMAT)
        .update_one(doc! { "_id": STORE }, reached)
        .session(&mut session)
        .await
        .unwrap();
    drop(open_as(THIRD, &scratch).await.unwrap());
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((3, 2)), vec![1]));
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_in_plain_words() {
    let scratch = Scratch::new();
    drop(open_as(FOURTH, &scratch).await.unwrap());
    let Err(StoreError::Unsupported(message)) = open_as(THIS, &scratch).await else {
        panic!("it was not refused")
    };
    assert!(
        message.contains("was written by a newer version of this program (format 4,"),
        "{message}"
    );
    assert!(message.contains("here 3,"), "{message}");
    assert!(message.contains("start that version or a later one here"), "{message}");
}

/// Brokers of two versions share a database whose format both can use, whichever starts first.
#[tokio::test]
async fn brokers_of_two_versions_work_side_by_side() {
    let scratch = old_database().await;
    let older = open_as(SECOND, &scratch).await.unwrap();
    let newer = open_as(THIRD, &scratch).await.unwrap();
    let late = open_as(SECOND, &scratch).await.unwrap();
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((3, 2)), vec![1]));
    let dead = queue(&newer, "dead").await;
    for pusher in [&older, &newer, &late] {
        pusher.push(vec![push(&dead, NewItem::default())]).await.unwrap();
        pusher.watch_settings().changes().await.unwrap();
    }
    assert_eq!(take(&older, &dead, 10).await.len(), 4, "the clock that is furthest ahead counts");
}

/// A version that earlier brokers would not survive tells them to stop before it changes anything. If its broker dies
/// then, only that version can go on.
#[tokio::test]
async fn a_newer_version_makes_brokers_of_earlier_ones_stop_first() {
    let scratch = old_database().await;
    let older = open_as(THIRD, &scratch).await.unwrap();
    let dead = queue(&older, "dead").await;
    let newer = tokio::spawn({
        let (uri, name) = (scratch.uri.clone(), scratch.name.clone());
        async move { MongoStore::connect_as(FOURTH, &uri, &name, options()).await.map(drop) }
    });
    let read_changes = || async { older.watch_settings().changes().await };
    let StoreError::Unavailable { reason, .. } = until_refused(read_changes).await else {
        panic!("callers may try another broker")
    };
    assert!(reason.contains("was written by a newer version of this program"), "{reason}");
    for refused in [
        older.ping().await.is_err(),
        older.push(vec![push(&dead, NewItem::default())]).await.is_err(),
        older.get_queue(&dead.name).await.is_err(),
        open_as(THIRD, &scratch).await.is_err(),
    ] {
        assert!(refused);
    }
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((3, 4)), vec![1]));

    newer.abort();
    assert!(newer.await.is_err_and(|error| error.is_cancelled()));
    let newer = open_as(Format { notice: SOON, ..FOURTH }, &scratch).await.unwrap();
    assert_eq!((format_of(&scratch).await, counts(&scratch).await), (Some((4, 4)), vec![2]));
    assert_eq!(take(&newer, &dead, 10).await.len(), 1);
}
