//! The example `pipeline`, whose stations and brokers are killed at random points. Every item ends
//! up exactly once in the last queue.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use sluicegate_client::{Client, Error};
use sluicegate_proto::v1::{ItemState, Queue};

use crate::harness::{
    Api, Backend, Broker, Launch, binary, duration, on_both_backends, redis_url, until,
};

on_both_backends!(with_kills_at_random_points_every_item_reaches_the_last_queue_once);

const ORDERS: u32 = 80;
const BROKER_KILLS: usize = 6;
const STATION_KILLS: usize = 12;
/// Short, because the items held by a killed broker are delivered again only after their leases.
const LEASE: Duration = Duration::from_secs(2);

// The names in the example.
const STATIONS: [&str; 3] = ["check", "pack", "label"];
const QUEUES: [&str; 3] = ["pipeline.orders", "pipeline.packing", "pipeline.labels"];
const LAST: &str = "pipeline.sent";
/// The most that the example puts into one parcel, in kg.
const LARGEST: u32 = 20;

/// Random numbers that are the same in each run (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % end as u64).expect("less than a usize")
    }

    /// Returns `count` numbers below `end` in ascending order.
    fn places(&mut self, count: usize, end: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..count).map(|_| self.below(end)).collect();
        places.sort_unstable();
        places
    }
}

/// Returns the parcels that the example must make of an order, and the least number of times that a
/// station handles them.
fn expected(order: u32, weight: u32) -> (Vec<String>, usize) {
    match weight {
        0 => (Vec::new(), 1),
        1 => (vec![format!("order{order} 1")], 2),
        _ => {
            let (mut parcels, mut rest) = (Vec::new(), weight);
            while rest > LARGEST {
                parcels.push(format!("order{order}/{rest} {LARGEST}"));
                rest -= LARGEST;
            }
            parcels.push(format!("order{order}/last {rest}"));
            let steps = 1 + 2 * parcels.len();
            (parcels, steps)
        }
    }
}

/// The brokers. Each is restarted at its address after it is killed.
struct Brokers {
    launches: Vec<Launch>,
    running: Vec<Broker>,
}

impl Brokers {
    async fn start(backend: Backend, launch: impl Fn() -> Launch) -> Self {
        let count = if backend == Backend::Mongo { 2 } else { 1 };
        let mut brokers = Self { launches: Vec::new(), running: Vec::new() };
        for _ in 0..count {
            let broker = launch().start().await;
            let address = broker.address.trim_start_matches("http://").to_owned();
            brokers.launches.push(launch().flag("listen", &address));
            brokers.running.push(broker);
        }
        brokers
    }

    async fn kill_and_restart(&mut self, index: usize) {
        self.running.remove(index).kill();
        self.running.insert(index, self.launches[index].start().await);
    }

    /// Returns the addresses, beginning with that of broker `first`.
    fn addresses(&self, first: usize) -> Vec<&str> {
        let mut addresses: Vec<&str> = self.running.iter().map(|b| b.address.as_str()).collect();
        let first = first % addresses.len();
        addresses.rotate_left(first);
        addresses
    }

    /// Returns a client that uses the other brokers if the first cannot be reached.
    fn client(&self) -> Client {
        let addresses = self.addresses(0);
        let first = Client::builder(addresses[0]);
        let builder = addresses[1..].iter().fold(first, |builder, url| builder.endpoint(*url));
        builder.connect_lazy().expect("a client")
    }

    async fn api(&self) -> Api {
        self.running[0].api().await
    }
}

/// A running station: the example in a process of its own.
struct Worker {
    station: &'static str,
    program: Child,
}

impl Worker {
    /// Starts a station, which increments `started` each time it begins to handle an item.
    fn start(station: &'static str, addresses: &[&str], started: &Arc<AtomicUsize>) -> Self {
        let mut program = Command::new(binary("examples/pipeline"))
            .args([&addresses.join(","), station])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let output = BufReader::new(program.stdout.take().expect("its output"));
        let started = Arc::clone(started);
        // The thread ends with the program.
        thread::spawn(move || {
            for _ in output.lines() {
                started.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { station, program }
    }

    /// Kills the station at any point of its work.
    fn kill(mut self) {
        let ended = self.program.try_wait().expect("a program to wait for");
        assert!(ended.is_none(), "the station {} ended by itself: {ended:?}", self.station);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.program.kill(); // SIGKILL
        let _ = self.program.wait();
    }
}

async fn wait_until_only_the_last_queue_holds_items(api: &Api) {
    // Each queue is checked twice in a row, because an item that moves in a loop is in one of the
    // queues at one of the two checks.
    until("all queues are empty", || async {
        for queue in QUEUES.into_iter().chain(QUEUES) {
            if !api.list(queue, ItemState::Unspecified).await.is_empty() {
                return None;
            }
        }
        Some(())
    })
    .await;
}

/// Returns how much more often than wanted each parcel is in the last queue; parcels that are there exactly as often are
/// left out.
async fn surplus(api: &Api, wanted: &[String]) -> BTreeMap<String, i32> {
    let mut counts: BTreeMap<String, i32> = BTreeMap::new();
    for item in api.list(LAST, ItemState::Unspecified).await {
        let parcel = String::from_utf8(item.payload.to_vec()).expect("text");
        *counts.entry(parcel).or_default() += 1;
    }
    for parcel in wanted {
        *counts.entry(parcel.clone()).or_default() -= 1;
    }
    counts.retain(|_, count| *count != 0);
    counts
}

async fn with_kills_at_random_points_every_item_reaches_the_last_queue_once(backend: Backend) {
    let seed = 20_260_731;
    let mut random = Random(seed);
    let store = backend.store();
    let mut brokers = Brokers::start(backend, || match backend {
        Backend::Mongo => store.launch().signals(&redis_url()),
        Backend::Sqlite => store.launch(),
    })
    .await;
    let api = brokers.api().await;
    for name in QUEUES.into_iter().chain([LAST]) {
        api.create(Queue { name: name.to_owned(), lease: duration(LEASE), ..Queue::default() })
            .await;
    }

    let mut orders = Vec::new();
    let mut wanted: Vec<String> = Vec::new();
    let mut steps = 0;
    for order in 0..ORDERS {
        let weight = u32::try_from(random.below(75)).expect("a small number");
        orders.push(format!("order{order} {weight}"));
        let (parcels, at_least) = expected(order, weight);
        wanted.extend(parcels);
        steps += at_least;
    }

    // Orders are pushed while brokers are being killed. Each has a `dedup_id`, so that a repetition
    // is safe.
    let producer = brokers.client().producer(QUEUES[0]).with_auto_dedup();
    let pushing = tokio::spawn(async move {
        for batch in orders.chunks(7) {
            producer.push_all(batch.to_vec()).await?;
        }
        Ok::<(), Error>(())
    });
    let started = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for (number, station) in STATIONS.into_iter().cycle().take(2 * STATIONS.len()).enumerate() {
        workers.push(Worker::start(station, &brokers.addresses(number), &started));
    }

    // Stations begin to handle items at least `steps` times, so that each of these points is
    // reached.
    let mut kills: Vec<(usize, bool)> = Vec::new();
    kills.extend(random.places(BROKER_KILLS, steps).into_iter().map(|place| (place, true)));
    kills.extend(random.places(STATION_KILLS, steps).into_iter().map(|place| (place, false)));
    kills.sort_unstable();
    for (place, of_broker) in kills {
        until(&format!("work begins for the {place}th time (seed {seed})"), || async {
            (started.load(Ordering::SeqCst) >= place).then_some(())
        })
        .await;
        if of_broker {
            let index = random.below(brokers.running.len());
            brokers.kill_and_restart(index).await;
        } else {
            let worker = workers.swap_remove(random.below(workers.len()));
            let station = worker.station;
            worker.kill();
            workers.push(Worker::start(station, &brokers.addresses(random.below(2)), &started));
        }
    }

    pushing.await.expect("no panic").expect("all orders are pushed");
    let api = brokers.api().await;
    wait_until_only_the_last_queue_holds_items(&api).await;
    for worker in workers {
        worker.kill();
    }
    let counts = surplus(&api, &wanted).await;
    assert!(counts.is_empty(), "too many (>0) or lost (<0), seed {seed}: {counts:?}");
    assert!(started.load(Ordering::SeqCst) > steps, "the kills interrupted nothing");
}
