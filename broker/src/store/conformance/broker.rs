//! A broker as the suite sees it: a store, and what hands out each queue's items, which stays as long as the broker.

use std::{collections::HashMap, ops::Deref, sync::Arc};

use parking_lot::Mutex;

use crate::{
    domain::{Demand, Queue, QueueName, Timestamp},
    store::{Appeared, Reserved, Reserver, Result, Store},
};

/// A store with the handles of an engine. What tests need of the store itself, it gives by [`Deref`].
pub struct Broker<S: ?Sized = dyn Store> {
    store: Arc<S>,
    reservers: Mutex<HashMap<QueueName, Arc<Shared>>>,
}

/// One queue's handle: concurrent tests take turns.
type Shared = tokio::sync::Mutex<Box<dyn Reserver>>;

impl<S: ?Sized> Deref for Broker<S> {
    type Target = S;
    fn deref(&self) -> &S {
        &self.store
    }
}

impl<S: Store + ?Sized> Broker<S> {
    pub fn new(store: Arc<S>) -> Self {
        Self { store, reservers: Mutex::default() }
    }

    /// The store, for tasks.
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }

    fn reserver(&self, queue: &QueueName) -> Arc<Shared> {
        let mut reservers = self.reservers.lock();
        let new = || Arc::new(Shared::new(self.store.reserver(queue)));
        Arc::clone(reservers.entry(queue.clone()).or_insert_with(new))
    }

    /// A reserve of which no other broker's signal told.
    pub async fn reserve(&self, queue: &Arc<Queue>, demands: &[Demand]) -> Result<Reserved> {
        self.reserve_hearing(queue, demands, Appeared::Nothing).await
    }

    /// A reserve after other brokers' signals told of something.
    pub async fn reserve_hearing(
        &self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved> {
        self.reserver(&queue.name).lock().await.reserve(queue, demands, appeared).await
    }

    /// When the next item becomes eligible.
    pub async fn next_eligible(
        &self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        self.reserver(&queue.name).lock().await.next_eligible(queue, after).await
    }
}
