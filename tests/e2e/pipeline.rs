//! A pipeline of stations whose brokers and stations are killed at random places: every item is
//! exactly once in the last queue.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sluicegate_client::{Backoff, Client, NewItem, Next, Retry, Station};
use sluicegate_proto::v1::{ItemState, Queue};
use tokio::task::JoinHandle;

use crate::harness::{Api, Backend, Broker, Launch, duration, on_both_backends, redis_url, until};

on_both_backends!(killed_at_random_places_every_item_ends_up_in_the_last_queue_once);

type Error = Box<dyn std::error::Error + Send + Sync>;

const ORDERS: u32 = 80;
const BROKER_KILLS: usize = 6;
const STATION_KILLS: usize = 12;
/// Short, for what a killed broker held comes back only after it.
const LEASE: Duration = Duration::from_secs(2);
/// What fits into one parcel, in kg.
const LARGEST: u32 = 20;

/// The three stations, by the queues they work on.
const STATIONS: [&str; 3] = ["orders", "packing", "labels"];
const LAST: &str = "sent";

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

    /// `count` numbers below `end`, the smallest first.
    fn places(&mut self, count: usize, end: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..count).map(|_| self.below(end)).collect();
        places.sort_unstable();
        places
    }
}

/// Where an item of a station goes. `attempt` makes some of them fail at first.
fn route(station: &str, payload: &str, attempt: u32) -> Result<Next, Error> {
    let (order, weight) = payload.split_once(' ').ok_or("no weight")?;
    let weight: u32 = weight.parse()?;
    Ok(match station {
        // A choice: letters need no packing, and what weighs nothing is dropped.
        "orders" => match weight {
            0 => Next::done(),
            1 => Next::move_to("labels").header("kind", "letter").into(),
            _ => Next::move_to("packing").header("kind", "parcel").into(),
        },
        // A fork and a loop: what is too heavy becomes a parcel and a lighter order.
        "packing" if weight > LARGEST => {
            let parcel = format!("{order}/{weight} {LARGEST}");
            let rest = format!("{order} {}", weight - LARGEST);
            Next::fork([("labels", NewItem::new(parcel)), ("packing", NewItem::new(rest))])
        }
        "packing" => Next::move_to("labels").payload(format!("{order}/last {weight}")).into(),
        // Some labels stick only at the second attempt.
        _ if attempt == 1 && weight.is_multiple_of(3) => {
            Next::retry(Retry::new("the label came off"))
        }
        _ => Next::move_to(LAST).payload(format!("sent {payload}")).into(),
    })
}

/// What one order must become, and how often a station works on it at the least.
fn expected(order: u32, weight: u32) -> (Vec<String>, usize) {
    match weight {
        0 => (Vec::new(), 1),
        1 => (vec![format!("sent order{order} 1")], 2),
        _ => {
            let (mut parcels, mut rest) = (Vec::new(), weight);
            while rest > LARGEST {
                parcels.push(format!("sent order{order}/{rest} {LARGEST}"));
                rest -= LARGEST;
            }
            parcels.push(format!("sent order{order}/last {rest}"));
            let steps = 1 + 2 * parcels.len();
            (parcels, steps)
        }
    }
}

/// The brokers, each of which comes back at its address after it was killed.
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

    /// A client that starts with the broker of this number, and turns to the others if need be.
    fn client(&self, first: usize) -> Client {
        let mut addresses: Vec<&str> = self.running.iter().map(|b| b.address.as_str()).collect();
        let first = first % addresses.len();
        addresses.rotate_left(first);
        let mut builder = Client::builder(addresses[0]);
        for address in &addresses[1..] {
            builder = builder.endpoint(*address);
        }
        builder.connect_lazy().expect("a client")
    }

    async fn api(&self) -> Api {
        self.running[0].api().await
    }
}

/// A station at work, as a process would be: with a connection of its own.
struct Worker {
    station: &'static str,
    started: Arc<AtomicUsize>,
    running: JoinHandle<sluicegate_client::Result<sluicegate_client::Summary>>,
}

impl Worker {
    fn start(
        station: &'static str,
        client: &Client,
        streaming: bool,
        started: &Arc<AtomicUsize>,
    ) -> Self {
        let backoff = Backoff { max: Duration::from_millis(500), ..Backoff::default() };
        let consumer = client.consumer(station).max_in_flight(6).lease(LEASE).backoff(backoff);
        let consumer = if streaming { consumer.streaming() } else { consumer };
        let counter = Arc::clone(started);
        let running = tokio::spawn(Station::from_consumer(consumer).run(move |item| {
            let counter = Arc::clone(&counter);
            async move {
                counter.fetch_add(1, Ordering::SeqCst);
                // So that there is something under way when the next kill comes.
                tokio::time::sleep(Duration::from_millis(10)).await;
                route(station, item.text()?, item.attempt())
            }
        }));
        Self { station, started: Arc::clone(started), running }
    }

    /// Ends it in the middle of whatever it does.
    async fn kill(self) {
        self.running.abort();
        let _ = self.running.await;
    }
}

async fn killed_at_random_places_every_item_ends_up_in_the_last_queue_once(backend: Backend) {
    let seed = 20_260_731;
    let mut random = Random(seed);
    let store = backend.store();
    let mut brokers = Brokers::start(backend, || match backend {
        Backend::Mongo => store.launch().signals(&redis_url()),
        Backend::Sqlite => store.launch(),
    })
    .await;
    let api = brokers.api().await;
    for name in STATIONS.into_iter().chain([LAST]) {
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
    wanted.sort();

    // Orders come in while brokers are killed already; each has a `dedup_id`, so asking again is safe.
    let producer = brokers.client(0).producer(STATIONS[0]).with_auto_dedup();
    let pushing = tokio::spawn(async move {
        for batch in orders.chunks(7) {
            producer.push_all(batch.to_vec()).await?;
        }
        Ok::<(), sluicegate_client::Error>(())
    });
    let started = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for (number, station) in STATIONS.into_iter().cycle().take(2 * STATIONS.len()).enumerate() {
        workers.push(Worker::start(station, &brokers.client(number), number >= 3, &started));
    }

    // A station starts on an item at least `steps` times: each of these places is passed.
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
            let (station, streaming) = (worker.station, random.below(2) == 0);
            let counter = Arc::clone(&worker.started);
            worker.kill().await;
            let client = brokers.client(random.below(2));
            workers.push(Worker::start(station, &client, streaming, &counter));
        }
    }

    pushing.await.expect("no panic").expect("all orders are pushed");
    let api = brokers.api().await;
    // Twice in a row: what goes round in a loop is in the queue at one of two looks.
    until("nothing is on its way", || async {
        for station in STATIONS.into_iter().chain(STATIONS) {
            if !api.list(station, ItemState::Unspecified).await.is_empty() {
                return None;
            }
        }
        Some(())
    })
    .await;
    for worker in workers {
        worker.kill().await;
    }
    let items = api.list(LAST, ItemState::Unspecified).await;
    let mut sent: Vec<String> =
        items.iter().map(|item| String::from_utf8(item.payload.to_vec()).expect("text")).collect();
    sent.sort();
    let mut counts: BTreeMap<&str, i32> = BTreeMap::new();
    for parcel in &sent {
        *counts.entry(parcel).or_default() += 1;
    }
    for parcel in &wanted {
        *counts.entry(parcel).or_default() -= 1;
    }
    counts.retain(|_, count| *count != 0);
    assert!(counts.is_empty(), "too many (>0) or lost (<0), seed {seed}: {counts:?}");
    assert!(started.load(Ordering::SeqCst) > steps, "the kills interrupted nothing");
}
