//! Batches of 500 items of 256 bytes on each store: `cargo bench -p sluicegate-broker --bench
//! stores`. MongoDB is included if SLUICEGATE_TEST_MONGODB_URI is set. The benchmark uses a
//! database of its own, which is deleted at the end.

use std::{cell::RefCell, env, fmt, sync::Arc, time::Duration};

use divan::{Bencher, counter::ItemsCount};
use sluicegate_broker::{
    domain::{Clock, Demand, NewItem, Queue, QueueName},
    store::{
        Appeared, Push, Reservation, Reserver, Store,
        mongo::{MongoOptions, MongoStore},
        sqlite::SqliteStore,
    },
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const ITEMS: usize = 500;
const MONGODB_URI: &str = "SLUICEGATE_TEST_MONGODB_URI";

fn main() {
    if env::var(MONGODB_URI).is_err() {
        eprintln!("without MongoDB: set {MONGODB_URI} to have it measured too");
    }
    divan::main();
}

/// The store to measure.
#[derive(Debug, Clone, Copy)]
enum Kind {
    File,
    Memory,
    MongoDb,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "SQLite file",
            Self::Memory => "SQLite memory",
            Self::MongoDb => "MongoDB",
        })
    }
}

fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::File, Kind::Memory];
    if env::var(MONGODB_URI).is_ok() {
        kinds.push(Kind::MongoDb);
    }
    kinds
}

/// A store with one queue.
struct Bed {
    runtime: Runtime,
    store: Arc<dyn Store>,
    reserver: RefCell<Box<dyn Reserver>>,
    mongo: Option<Arc<MongoStore>>,
    queue: Arc<Queue>,
    _directory: TempDir,
}

impl Bed {
    fn new(kind: Kind) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(Clock::system());
        let sqlite = |uri: &str| -> Arc<dyn Store> {
            Arc::new(SqliteStore::open(uri, clock.clone()).expect("a store"))
        };
        let mut mongo = None;
        let store = match kind {
            Kind::File => sqlite(&directory.path().join("bench.db").display().to_string()),
            Kind::Memory => sqlite("sqlite::memory:"),
            Kind::MongoDb => {
                let uri = env::var(MONGODB_URI).expect("known to be set");
                let database = format!("bench_{}", std::process::id());
                let options = MongoOptions { clock: clock.clone(), ..MongoOptions::default() };
                let connecting = MongoStore::connect(&uri, &database, options);
                let store = Arc::new(runtime.block_on(connecting).expect("MongoDB"));
                mongo = Some(store.clone());
                store as Arc<dyn Store>
            }
        };
        let name = QueueName::parse("queue", "bench").expect("a name");
        let queue = Queue::with_defaults(name, store.now());
        runtime.block_on(store.create_queue(&queue)).expect("a queue");
        let reserver = RefCell::new(store.reserver(&queue.name));
        Self { runtime, store, reserver, mongo, queue: Arc::new(queue), _directory: directory }
    }

    fn items(&self) -> Vec<Push> {
        let item = NewItem { payload: vec![b'.'; 256].into(), ..NewItem::default() };
        let push = Push::new(self.queue.clone(), item);
        vec![push; ITEMS]
    }

    fn push(&self, items: Vec<Push>) {
        self.runtime.block_on(self.store.push(items)).expect("pushed");
    }

    fn reserve(&self) -> Vec<Reservation> {
        let demand = Demand {
            max_items: ITEMS,
            max_bytes: usize::MAX,
            may_exceed: true,
            lease: Duration::from_mins(10),
            consumer: None,
            spare: false,
        };
        let demands = [demand];
        let mut reserver = self.reserver.borrow_mut();
        let reserve = reserver.reserve(&self.queue, &demands, Appeared::Nothing);
        let reserved = self.runtime.block_on(reserve);
        let deliveries = reserved.expect("reserved").deliveries;
        assert_eq!(deliveries.len(), ITEMS, "all that were pushed");
        let hold = |receipt| Reservation { queue: self.queue.clone(), receipt };
        deliveries.into_iter().map(|(_, delivery)| hold(delivery.receipt)).collect()
    }

    fn commit(&self, held: Vec<Reservation>) {
        self.runtime.block_on(self.store.commit(held)).expect("committed");
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(mongo) = self.mongo.take() {
            self.runtime.block_on(async {
                mongo.close().await;
                mongo.database().drop().await.expect("dropped");
            });
        }
    }
}

#[divan::bench(args = kinds(), sample_count = 50, sample_size = 1)]
fn push_500(bencher: Bencher<'_, '_>, kind: Kind) {
    let bed = Bed::new(kind);
    bencher
        .counter(ItemsCount::new(ITEMS))
        .with_inputs(|| bed.items())
        .bench_local_values(|items| bed.push(items));
}

#[divan::bench(args = kinds(), sample_count = 50, sample_size = 1)]
fn reserve_500(bencher: Bencher<'_, '_>, kind: Kind) {
    let bed = Bed::new(kind);
    bencher
        .counter(ItemsCount::new(ITEMS))
        .with_inputs(|| bed.push(bed.items()))
        .bench_local_values(|()| bed.reserve());
}

#[divan::bench(args = kinds(), sample_count = 50, sample_size = 1)]
fn commit_500(bencher: Bencher<'_, '_>, kind: Kind) {
    let bed = Bed::new(kind);
    bencher
        .counter(ItemsCount::new(ITEMS))
        .with_inputs(|| {
            bed.push(bed.items());
            bed.reserve()
        })
        .bench_local_values(|held| bed.commit(held));
}
