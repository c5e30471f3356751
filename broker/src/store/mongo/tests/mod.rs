//! The conformance suite on a real MongoDB, and tests of what only this store promises.

use mongodb::{
    Client,
    bson::{Document, doc},
};

use super::*;
use crate::{
    domain::{Delivery, Demand, NewItem, Outcome, Priority, Queue},
    store::{
        self, Appeared, Created, Deleted, EndedDelivery, Extension, ItemAdmin, ItemStore, Move,
        Push, QueueStore, Reservation, Rollback, RollbackTo, StatsStore, Store,
        conformance::{self, Broker, Env},
    },
};

mod announced;
mod brokers;
mod deletion_races;
mod faults;
mod first_leases;
mod fuzz;
mod half_open;
mod own_server;
mod plans;
mod segments;

/// The variable that names the server for the tests.
const VARIABLE: &str = "SLUICEGATE_TEST_MONGODB_URI";

fn uri() -> String {
    std::env::var(VARIABLE).unwrap_or_else(|_| {
        panic!(
            "{VARIABLE} is not set: these tests need a MongoDB replica set, for example \
             mongodb://127.0.0.1:27017/?replicaSet=rs0"
        )
    })
}

/// A database of the test's own, dropped at the end.
pub(super) struct Scratch {
    pub(super) uri: String,
    pub(super) name: String,
    segments: SegmentSize,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self::with_segments(SegmentSize::SHARED)
    }

    fn with_segments(segments: SegmentSize) -> Self {
        let name = format!("sluicegate_test_{:016x}", rand::random::<u64>());
        Self { uri: uri(), name, segments }
    }

    async fn open(&self, clock: &Arc<Clock>) -> Broker<MongoStore> {
        let clock = clock.clone();
        let segments = self.segments;
        let options = MongoOptions { clock, discipline: false, pool_size: 16, segments };
        connected(&self.uri, &self.name, options).await
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let (uri, name) = (self.uri.clone(), self.name.clone());
        // The test's runtime may be gone by now.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let client = Client::with_uri_str(&uri).await?;
                client.database(&name).drop().await
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("the test's database stays: {error}");
        }
    }
}

async fn connected(uri: &str, database: &str, options: MongoOptions) -> Broker<MongoStore> {
    Broker::new(Arc::new(MongoStore::connect(uri, database, options).await.expect("a store")))
}

/// Returns two brokers on one empty database.
pub(crate) async fn open_shared() -> Env {
    open(SegmentSize::SHARED).await
}

async fn open(segments: SegmentSize) -> Env {
    let scratch = Scratch::with_segments(segments);
    let clock = Arc::new(Clock::system());
    let store = Arc::clone(scratch.open(&clock).await.store());
    let other = Arc::clone(scratch.open(&clock).await.store());
    let inner = Arc::clone(&store.inner);
    let upkeep = move || {
        let inner = Arc::clone(&inner);
        async move { upkeep::round(&inner).await }
    };
    Env::new(store, other, clock, upkeep, scratch)
}

/// The suite with segments as brokers form them.
mod segments_of_200 {
    async fn open() -> super::Env {
        super::open(super::SegmentSize::SHARED).await
    }

    crate::store::conformance::conformance!(super::open);
}

/// The suite with segments of a forced size, which are cut and shared everywhere.
mod segments_of_forced_size {
    async fn open() -> super::Env {
        super::open(super::forced_size()).await
    }

    crate::store::conformance::conformance!(super::open);
}

/// Returns the size that `SLUICEGATE_TEST_SEGMENT_SIZE` asks for: 0 for none, else 2.
fn forced_size() -> SegmentSize {
    let size = std::env::var("SLUICEGATE_TEST_SEGMENT_SIZE").unwrap_or_else(|_| "2".to_owned());
    match size.parse().expect("SLUICEGATE_TEST_SEGMENT_SIZE is a number of items") {
        0 => SegmentSize::NONE,
        max => SegmentSize { max, alone: true },
    }
}

/// The model with the sizes that the suite does not run with by itself.
#[tokio::test(flavor = "multi_thread")]
async fn segments_of_every_size_agree_with_the_model() {
    let sizes = [1, 7, 1_000].map(|max| SegmentSize { max, alone: true });
    for size in sizes.into_iter().chain([SegmentSize::NONE]) {
        println!("{size:?}");
        conformance::model::random_sequences_agree(&open(size).await, 12).await;
    }
}

/// Opens several brokers on one database with one clock.
async fn brokers(
    scratch: &Scratch,
    clock: &Arc<Clock>,
    count: usize,
) -> Vec<Arc<Broker<MongoStore>>> {
    let mut stores = Vec::new();
    for _ in 0..count {
        stores.push(Arc::new(scratch.open(clock).await));
    }
    stores
}

fn queue_named(name: &str) -> Queue {
    let name = QueueName::parse("queue", name).unwrap();
    Queue::with_defaults(name, Timestamp(1_700_000_000_000))
}

async fn make(store: &MongoStore, queue: Queue) -> Arc<Queue> {
    match store.create_queue(&queue).await.unwrap() {
        Created::New(queue) | Created::Existing(queue) => Arc::new(queue),
    }
}

fn push_of(queue: &Arc<Queue>, payload: &str, priority: i32) -> Push {
    let item = NewItem {
        payload: payload.to_owned().into(),
        priority: Priority::parse("priority", priority).unwrap(),
        ..NewItem::default()
    };
    Push::new(queue.clone(), item)
}

fn want(max_items: usize, lease: Duration) -> Demand {
    Demand {
        max_items,
        max_bytes: usize::MAX,
        may_exceed: true,
        lease,
        consumer: None,
        spare: false,
    }
}

const LEASE: Duration = Duration::from_secs(30);

pub(super) async fn take(
    store: &Broker<MongoStore>,
    queue: &Arc<Queue>,
    count: usize,
) -> Vec<Delivery> {
    let reserved = store.reserve(queue, &[want(count, LEASE)]).await.unwrap();
    reserved.deliveries.into_iter().map(|(_, delivery)| delivery).collect()
}

fn held(queue: &Arc<Queue>, delivery: &Delivery) -> Reservation {
    Reservation { queue: queue.clone(), receipt: delivery.receipt.clone() }
}

fn extension(held: Reservation, until: Timestamp) -> Extension {
    Extension { held, until, is_renewal: false }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_reached_is_named_within_seconds() {
    let uri = "mongodb://127.0.0.1:24999/?serverSelectionTimeoutMS=300";
    match MongoStore::connect(uri, "none", MongoOptions::default()).await {
        Err(crate::store::StoreError::Unavailable { reason, .. }) => {
            assert!(reason.starts_with("MongoDB at 127.0.0.1:24999 cannot be reached"), "{reason}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a server answers"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_of_many_new_queues_are_recorded_together() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let mut queues = Vec::new();
    for n in 0..20 {
        queues.push(make(&store, queue_named(&format!("q{n}"))).await);
    }
    let names: Vec<&str> = queues.iter().map(|queue| queue.name.as_str()).collect();
    let db = store.database();
    db.run_command(doc! { "profile": 2 }).await.unwrap();
    store.push(queues.iter().map(|queue| push_of(queue, "x", 3)).collect()).await.unwrap();
    db.run_command(doc! { "profile": 0 }).await.unwrap();

    let profile = db.collection::<Document>("system.profile");
    let updates = doc! { "op": "update", "ns": format!("{}.queues", scratch.name) };
    assert_eq!(profile.count_documents(updates).await.unwrap(), 1);
    let recorded = doc! { "_id": { "$in": names }, "levels": [3] };
    let settings = db.collection::<Document>("queues");
    assert_eq!(settings.count_documents(recorded).await.unwrap(), 20);
    let sentinels: Vec<String> =
        queues.iter().flat_map(|queue| priorities::sentinel_ids(&queue.name)).collect();
    let items = db.collection::<Document>("items.default");
    let count = items.count_documents(doc! { "_id": { "$in": sentinels } }).await.unwrap();
    assert_eq!(count, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_priority_in_use_ends_in_a_sentinel() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 9), push_of(&queue, "x", 3)]).await.unwrap();
    let sentinels = async || {
        let items = store.database().collection::<Document>("items.default");
        items
            .count_documents(doc! { "_id": { "$in": priorities::sentinel_ids(&queue.name) } })
            .await
    };
    assert_eq!(sentinels().await.unwrap(), 4);

    // Sentinels are not visible, and operations that empty the queue leave them.
    assert_eq!(take(&store, &queue, 10).await.len(), 2);
    assert_eq!(store.list_items(&queue, None, None, 10).await.unwrap().entries.len(), 2);
    assert_eq!(store.depth(&queue).await.unwrap().unsettled(), 2);
    clock.advance(LEASE);
    assert_eq!(store.purge(&queue).await.unwrap(), 2);
    assert_eq!(sentinels().await.unwrap(), 4);
    store.push(vec![push_of(&queue, "x", 9), push_of(&queue, "x", 3)]).await.unwrap();

    let links = store.links().await.unwrap();
    let deleted = store.delete_queue(&queue, true, links).await.unwrap();
    assert_eq!(deleted, Deleted::Done(2), "sentinels are no items");
    assert_eq!(sentinels().await.unwrap(), 0);
    let queue = make(&store, Queue { create_time: Timestamp(1), ..queue_named("q") }).await;
    store.push(vec![push_of(&queue, "x", 3)]).await.unwrap();
    assert_eq!(sentinels().await.unwrap(), 2, "a queue that is created again gets its own");
}

/// The time of a shard, which all brokers share, is the server's time.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_a_shard_is_the_time_of_the_server() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let [by_hello, by_shard] =
        [false, true].map(|sharded| server::clock::Source { db: store.inner.db.clone(), sharded });
    for source in [by_hello, by_shard] {
        let clock = Clock::system();
        clock.advance(Duration::from_hours(1));
        server::clock::set(&source, &clock).await.unwrap();
        let off = clock.now().0 - Clock::machine_time().0;
        assert!(off.abs() < 10_000, "{off} ms off");
    }
}

/// Waits for a condition, for longer than a busy machine needs.
async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let limit = std::time::Instant::now() + Duration::from_mins(2);
    while !condition().await {
        assert!(std::time::Instant::now() < limit, "not within two minutes: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Reserves items until there are `count`. Reserves that are refused are tried again.
async fn take_all(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
    let limit = std::time::Instant::now() + Duration::from_secs(30);
    let mut taken = Vec::new();
    while taken.len() < count {
        assert!(std::time::Instant::now() < limit, "only {} of {count} items found", taken.len());
        if let Ok(reserved) = store.reserve(queue, &[want(count - taken.len(), LEASE)]).await {
            taken.extend(reserved.deliveries.into_iter().map(|(_, delivery)| delivery));
        }
    }
    taken
}

fn assert_untouched(deliveries: &[Delivery]) {
    for delivery in deliveries {
        assert_eq!((delivery.item.attempt, delivery.item.deliveries), (1, 1));
    }
}
