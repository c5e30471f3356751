//! The primary of a replica set is killed under load: no acknowledged item is lost, and no
//! committed item is delivered again.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use mongodb::{
    bson::{DateTime, doc},
    options::ReadConcern,
};
use prost_types::FieldMask;
use sluicegate_proto::v1::{NewItem, Outcome, Queue, ReserveRequest, UpdateQueueRequest};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::harness::{Api, MongoSet, TestStore, duration, new_item, redis_url, text, until};

/// Items of one push.
const BATCH: usize = 10;
/// Pushes to be acknowledged before the primary is killed, and again after that.
const PUSHES: usize = 30;

/// The answers that producers and consumers received.
#[derive(Default)]
struct Told {
    /// Names of items whose pushes were acknowledged.
    stored: HashSet<String>,
    /// Names of items whose commits were acknowledged.
    done: HashSet<String>,
    /// Names of items delivered after their commit.
    late: Vec<String>,
}

type Ledger = Arc<Mutex<Told>>;

/// Pushes until told to stop. Repeats each push until it is acknowledged.
async fn produce(
    api: Api,
    producer: usize,
    ledger: Ledger,
    pushes: Arc<AtomicUsize>,
    stop: CancellationToken,
) {
    for number in 0.. {
        if stop.is_cancelled() {
            return;
        }
        let names: Vec<String> = (0..BATCH).map(|n| format!("{producer}-{number}-{n}")).collect();
        let named = |name: &String| NewItem { dedup_id: name.clone(), ..new_item(name) };
        until("an answered push", || async {
            api.try_push("work", names.iter().map(named).collect()).await.ok()
        })
        .await;
        pushes.fetch_add(1, Ordering::Relaxed);
        ledger.lock().unwrap().stored.extend(names);
    }
}

/// Reserves at one broker and commits at the other, until told to stop. Repeats each commit until
/// it is acknowledged.
async fn consume(from: Api, to: Api, ledger: Ledger, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let request = ReserveRequest {
            queue: "work".to_owned(),
            max_items: 20,
            wait: duration(Duration::from_millis(200)),
            lease: duration(Duration::from_secs(5)),
            consumer: String::new(),
        };
        let Ok(answer) = from.queue.clone().reserve(request).await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let deliveries = answer.into_inner().deliveries;
        let names: Vec<String> = deliveries.iter().map(text).collect();
        {
            let mut told = ledger.lock().unwrap();
            let late: Vec<_> =
                names.iter().filter(|name| told.done.contains(*name)).cloned().collect();
            told.late.extend(late);
        }
        let receipts: Vec<&str> =
            deliveries.iter().map(|delivery| delivery.receipt.as_str()).collect();
        if receipts.is_empty() {
            continue;
        }
        let results =
            until("an answered commit", || async { to.try_commit(&receipts).await.ok() }).await;
        // GONE: an unacknowledged commit took effect. LEASE_LOST: the consumer that has the item
        // now will commit it.
        let is_done = |outcome: Outcome| matches!(outcome, Outcome::Ok | Outcome::Gone);
        let done = names.iter().zip(&results).filter(|(_, result)| is_done(result.outcome()));
        ledger.lock().unwrap().done.extend(done.map(|(name, _)| name.clone()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_killed_under_load_loses_and_doubles_nothing() {
    let mut set = MongoSet::start().await;
    let store = TestStore::mongo(&set.uri());
    let launch = store.launch().signals(&redis_url());
    let brokers = [launch.start().await, launch.start().await];
    let apis = [brokers[0].api().await, brokers[1].api().await];
    let (ledger, pushes) = (Ledger::default(), Arc::new(AtomicUsize::new(0)));
    let (last_push, end) = (CancellationToken::new(), CancellationToken::new());
    let mut producers = JoinSet::new();
    let mut consumers = JoinSet::new();
    for n in 0..4 {
        let (here, there) = (apis[n % 2].clone(), apis[(n + 1) % 2].clone());
        let pushes = Arc::clone(&pushes);
        producers.spawn(produce(here.clone(), n, Arc::clone(&ledger), pushes, last_push.clone()));
        consumers.spawn(consume(here, there, Arc::clone(&ledger), end.clone()));
    }
    let answered = async |from: usize| {
        until("pushes that are answered", || async {
            (pushes.load(Ordering::Relaxed) >= from + PUSHES).then_some(())
        })
        .await;
    };
    answered(0).await;
    let killed = set.kill_primary().await;
    // One push of each producer may have been acknowledged at that moment.
    answered(pushes.load(Ordering::Relaxed) + 4).await;
    set.restart(killed);
    answered(pushes.load(Ordering::Relaxed)).await;
    last_push.cancel();
    producers.join_all().await;
    until("all to be committed", || async {
        let told = ledger.lock().unwrap();
        told.stored.is_subset(&told.done).then_some(())
    })
    .await;
    end.cancel();
    consumers.join_all().await;

    let told = ledger.lock().unwrap();
    assert_eq!(told.stored, told.done, "no item is lost or invented");
    assert!(told.late.is_empty(), "committed, and delivered again: {:?}", told.late);
}

/// Totals never go back, so what an election may take back is not shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_are_those_that_a_majority_has() {
    let set = MongoSet::start().await;
    let store = TestStore::mongo(&set.uri());
    let TestStore::Mongo { database, .. } = &store else { unreachable!("it is asked for") };
    let launch = store.launch().signals(&redis_url());
    let brokers = [launch.start().await, launch.start().await];
    let apis = [brokers[0].api().await, brokers[1].api().await];
    apis[0].push("work", &["first"]).await;
    apis[1].until_stats("work", |stats| stats.pushed == 1).await;
    let counters = set.collection(database, "counters").await;
    let pushed = async |concern| {
        let find = counters.find_one(doc! { "_id": "totals/work" }).read_concern(concern);
        let totals = find.await.expect("a primary").expect("totals");
        totals.get_i64("pushed").expect("a number")
    };
    // The first broker writes its totals once a second. In some round this meets the hold.
    until("totals that only the primary has", || async {
        apis[0].push("work", &["one more"]).await;
        set.hold_secondaries(true).await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        if pushed(ReadConcern::local()).await > pushed(ReadConcern::majority()).await {
            return Some(());
        }
        set.hold_secondaries(false).await;
        None
    })
    .await;
    let (safe, shown) = (pushed(ReadConcern::majority()).await, apis[1].stats("work").await.pushed);
    // Before anything can fail, because the end of the test writes too.
    set.hold_secondaries(false).await;
    assert_eq!(shown, safe);
    apis[1].until_stats("work", |stats| stats.pushed > safe).await;
}

/// Settings that only the old primary had are forgotten, although nothing of them is left in the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_an_election_took_back_are_forgotten() {
    let mut set = MongoSet::start().await;
    let store = TestStore::mongo(&set.uri());
    let TestStore::Mongo { database, .. } = &store else { unreachable!("it is asked for") };
    let launch = store.launch().signals(&redis_url());
    let (broker, other) = (launch.start().await, launch.start().await);
    let (api, changing) = (broker.api().await, other.api().await);
    api.push("work", &["first", "second"]).await;
    // The settings before the change are old, as most are.
    let queues = set.collection(database, "queues").await;
    let old = DateTime::from_millis(DateTime::now().timestamp_millis() - 3_600_000);
    let age = doc! { "$set": { "updated": old } };
    queues.update_one(doc! { "_id": "work" }, age).await.expect("a primary");

    set.starve_secondaries(true).await;
    let full = UpdateQueueRequest {
        queue: Some(Queue { name: "work".to_owned(), max_depth: 1, ..Queue::default() }),
        update_mask: Some(FieldMask { paths: vec!["max_depth".to_owned()] }),
    };
    let change = tokio::spawn(async move { changing.admin.clone().update_queue(full).await });
    until("settings that only the primary has", || async {
        let here = queues.find_one(doc! { "_id": "work" }).read_concern(ReadConcern::local());
        here.await.ok()??.get_i64("maxDepth").is_ok_and(|depth| depth == 1).then_some(())
    })
    .await;
    other.kill(); // or its driver would repeat the change at the new primary
    assert!(change.await.expect("an answer").is_err(), "no majority has the change");
    let push = || api.try_push("work", vec![new_item("another")]);
    until("a push that those settings refuse", || async {
        let refused = tokio::time::timeout(Duration::from_millis(500), push()).await.ok()?.err()?;
        (refused.code() == Code::ResourceExhausted).then_some(())
    })
    .await;

    let killed = set.kill_primary().await;
    set.starve_secondaries(false).await;
    until("a push that the settings of the store allow", || async { push().await.ok() }).await;
    set.restart(killed);
}
