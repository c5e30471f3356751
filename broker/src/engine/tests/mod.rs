//! The engine on a store that can be delayed, with a clock that can be advanced.

mod announced;
mod calls;
mod committing;
mod direct;
mod direct_order;
mod faulty;
mod flow;
mod loops;
mod operations;
mod panics;
mod presence;
mod returned;
mod schedules;
mod stock;
mod streams;
mod templates;
mod turns;
mod unsent;
mod unused_queues;
mod up_to;

use std::{slice::from_ref, sync::Arc, time::Duration};

use tokio::time::timeout;

use self::faulty::{Fault, Faults};
use super::{
    ConsumeOptions, Engine, Identity, Limits, OnDisconnect, Received, Result, Subscription,
};
use crate::{
    domain::{Clock, Delivery, Item, NewItem, Queue, QueueName, Receipt},
    metrics::Metrics,
    signals::{LocalSignals, Signals},
    store::{Store, decorator::Decorated, sqlite::SqliteStore},
};

/// How long a test waits for something that must happen. Generous, because it is not a measurement.
const LIMIT: Duration = Duration::from_mins(1);
/// The lease that the tests use.
const LEASE: Duration = Duration::from_secs(30);

struct Bench {
    engine: Arc<Engine>,
    store: Arc<dyn Store>,
    /// The faults apply to calls of the engine, not to those of the tests.
    faults: Arc<Faults>,
    clock: Arc<Clock>,
}

/// Returns an engine with an empty queue, whose fallback poll is too rare to explain any result of a test.
async fn bench() -> Bench {
    bench_with(rare_polls()).await
}

fn rare_polls() -> Limits {
    Limits {
        poll_min: Duration::from_mins(10),
        poll_max: Duration::from_mins(10),
        ..Limits::default()
    }
}

async fn bench_with(limits: Limits) -> Bench {
    bench_over(Arc::new(LocalSignals::new()), limits).await
}

async fn bench_over(signals: Arc<dyn Signals>, limits: Limits) -> Bench {
    let clock = Arc::new(Clock::system());
    let store: Arc<dyn Store> =
        Arc::new(SqliteStore::open("sqlite::memory:", Arc::clone(&clock)).unwrap());
    store.create_queue(&Queue::with_defaults(name("q"), store.now())).await.unwrap();
    let faults = Arc::new(Faults::default());
    let faulty = Decorated { store: Arc::clone(&store), around: Arc::clone(&faults) };
    let engine = Engine::new(Arc::new(faulty), signals, Arc::new(Metrics::new()), limits);
    Bench { engine, store, faults, clock }
}

fn name(text: &str) -> QueueName {
    QueueName::parse("queue", text).unwrap()
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("{what}: nothing within {LIMIT:?}"))
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    within(what, async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

impl Bench {
    async fn push(&self, count: usize) {
        let items =
            (0..count).map(|n| NewItem { payload: n.to_string().into(), ..NewItem::default() });
        self.engine.push(&name("q"), items.collect(), None).await.unwrap();
    }

    /// Starts a reserve in a task of its own.
    fn reserve(
        &self,
        items: usize,
        wait: Duration,
    ) -> tokio::task::JoinHandle<Result<Vec<Delivery>>> {
        let engine = Arc::clone(&self.engine);
        tokio::spawn(async move {
            engine.reserve(&name("q"), items, wait, Some(LEASE), Identity::default()).await
        })
    }

    /// Starts a pop in a task of its own.
    fn pop(&self, items: usize, wait: Duration) -> tokio::task::JoinHandle<Result<Vec<Item>>> {
        let engine = Arc::clone(&self.engine);
        tokio::spawn(async move { engine.pop(&name("q"), items, wait, None).await })
    }

    fn options() -> ConsumeOptions {
        ConsumeOptions {
            queue: name("q"),
            max_in_flight: 10,
            max_in_flight_bytes: None,
            lease: Some(LEASE),
            consumer: None,
            peer: None,
            auto_commit: false,
            renew: false,
            on_disconnect: OnDisconnect::Release,
            tells_revoked: true,
        }
    }

    async fn stream(&self) -> Subscription {
        self.engine.consume(Self::options()).await.unwrap()
    }

    async fn queue(&self) -> Arc<Queue> {
        Arc::new(self.store.get_queue(&name("q")).await.unwrap().expect("the queue exists"))
    }

    /// Returns all items in the store.
    async fn items(&self) -> Vec<Item> {
        let queue = self.queue().await;
        self.store.list_items(&queue, None, None, 10_000).await.unwrap().entries
    }

    /// Waits until `count` items are ready, and returns them.
    async fn until_ready(&self, count: usize) -> Vec<Item> {
        let is_ready = async || {
            let queue = self.queue().await;
            self.store.depth(&queue).await.unwrap().ready == count as u64
        };
        until("items are ready", is_ready).await;
        self.items().await
    }

    /// Waits until `count` calls and streams wait for items of the queue.
    async fn until_waiting(&self, count: u32) {
        let waiting =
            async || self.engine.dispatcher(&name("q")).is_some_and(|d| d.consumers() == count);
        until("consumers wait", waiting).await;
    }
}

/// Returns the next items of a stream.
async fn deliveries(stream: &mut Subscription) -> Vec<Delivery> {
    match within("deliveries", stream.next()).await {
        Ok(Received::Deliveries(deliveries)) => deliveries,
        other => panic!("not {other:?}"),
    }
}

fn receipts(deliveries: &[Delivery]) -> Vec<Receipt> {
    deliveries.iter().map(|delivery| delivery.receipt.clone()).collect()
}

fn payloads<'a>(items: impl IntoIterator<Item = &'a Item>) -> Vec<String> {
    items.into_iter().map(|item| String::from_utf8(item.payload.to_vec()).unwrap()).collect()
}
