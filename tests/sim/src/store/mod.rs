//! The third store: an in-memory model of what a store promises.
//!
//! * `world`: what is stored, shared by all brokers. `stored`: one item.
//! * `items`: push, reserve and settle. `admin`: for operators. `catalog`: queues and schedules. `templates`: of queues. `operations`: long work of operators.
//! * `contract`: the traits of a store, each method one atomic step on the world.
//! * [`Link`]: the way between a broker and the store, on which calls are delayed and lost.

mod admin;
mod catalog;
mod contract;
mod items;
mod operations;
mod stored;
mod templates;
mod world;

use std::sync::Arc;

use parking_lot::Mutex;
use sluicegate_broker::{
    domain::{Item, Queue, QueueName, Timestamp},
    store::Result,
};
use tokio::sync::Notify;

use self::world::World;

/// The way between one broker and the store.
pub trait Link: Send + Sync + 'static {
    /// The request travels. After an error it never arrives.
    fn request(&self, call: &'static str) -> impl Future<Output = Result<()>> + Send;

    /// The answer travels. After an error the broker does not know what the call did.
    fn answer(&self, call: &'static str) -> impl Future<Output = Result<()>> + Send;

    /// Returns true while the broker lives, so that its store finishes what it began.
    fn is_alive(&self) -> bool;

    /// Returns the store's time, as this broker knows it.
    fn now(&self) -> Timestamp;
}

/// What is stored, without the brokers that use it.
#[derive(Clone, Default)]
pub struct Database(Arc<Shared>);

#[derive(Default)]
struct Shared {
    world: Mutex<World>,
    /// Notified when the store has made items ready by itself.
    unblocked: Notify,
}

impl Database {
    /// Removes what has expired, as a store does from time to time.
    pub fn sweep(&self, now: Timestamp) {
        self.0.world.lock().sweep(now);
        self.0.tell_unblocked();
    }

    /// Returns all queues, for the end of a run.
    pub fn queues(&self) -> Vec<Queue> {
        self.0.world.lock().queues.values().cloned().collect()
    }

    /// Returns all items of all queues, for the end of a run.
    pub fn items(&self, now: Timestamp) -> Vec<Item> {
        let world = self.0.world.lock();
        world
            .all()
            .filter(|stored| !stored.item.has_expired(now))
            .map(|stored| stored.view(now))
            .collect()
    }
}

impl Shared {
    fn tell_unblocked(&self) {
        if !self.world.lock().unblocked.is_empty() {
            self.unblocked.notify_waiters();
        }
    }
}

/// A broker's store.
pub struct ModelStore<L> {
    inner: Arc<Inner<L>>,
}

struct Inner<L> {
    shared: Arc<Shared>,
    link: Arc<L>,
    broker: [u8; 4],
    /// Held while a push travels, so that pushes arrive in the order in which they were begun.
    pushing: tokio::sync::Mutex<()>,
}

impl<L: Link> ModelStore<L> {
    /// Returns the store of one broker.
    pub fn new(database: &Database, link: Arc<L>, broker: [u8; 4]) -> Self {
        let shared = Arc::clone(&database.0);
        let pushing = tokio::sync::Mutex::default();
        Self { inner: Arc::new(Inner { shared, link, broker, pushing }) }
    }
}

impl<L: Link> Inner<L> {
    /// Makes one call: the request travels, the change is made in one step, the answer travels.
    async fn call<T>(
        &self,
        call: &'static str,
        work: impl FnOnce(&mut World, Timestamp) -> T,
    ) -> Result<T> {
        self.link.request(call).await?;
        let done = self.step(work);
        self.link.answer(call).await?;
        Ok(done)
    }

    /// Makes the change.
    fn step<T>(&self, work: impl FnOnce(&mut World, Timestamp) -> T) -> T {
        let now = self.link.now();
        let done = {
            let mut world = self.shared.world.lock();
            world.worker = self.broker;
            work(&mut world, now)
        };
        self.shared.tell_unblocked();
        done
    }

    async fn unblocked(&self) -> Vec<QueueName> {
        loop {
            let notified = self.shared.unblocked.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(queues) = self.shared.world.lock().unblocked.remove(&self.broker) {
                return queues.into_iter().collect();
            }
            notified.await;
        }
    }
}
