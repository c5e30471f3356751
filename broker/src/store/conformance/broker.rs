//! A broker from the suite's point of view: a store, and a reserver for each queue, kept for as
//! long as the broker exists.

use std::{collections::HashMap, ops::Deref, sync::Arc};

use parking_lot::Mutex;

use crate::{
    domain::{Demand, Queue, QueueName, Timestamp},
    store::{Appeared, Reserved, Reserver, Result, Store},
};

/// A store with the reservers of an engine. [`Deref`] gives tests access to the store itself.
pub struct Broker<S: ?Sized = dyn Store> {
    store: Arc<S>,
    reservers: Mutex<HashMap<QueueName, Arc<Shared>>>,
}

/// One queue's reserver, which concurrent tests use in turn.
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

    /// Returns the store, for tasks.
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }

    fn reserver(&self, queue: &QueueName) -> Arc<Shared> {
        let mut reservers = self.reservers.lock();
        let new = || Arc::new(Shared::new(self.store.reserver(queue)));
        Arc::clone(reservers.entry(queue.clone()).or_insert_with(new))
    }

    /// Reserves without a signal of another broker.
    pub async fn reserve(&self, queue: &Arc<Queue>, demands: &[Demand]) -> Result<Reserved> {
        self.reserve_hearing(queue, demands, Appeared::Nothing).await
    }

    /// Reserves after signals of other brokers.
    pub async fn reserve_hearing(
        &self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved> {
        self.reserver(&queue.name).lock().await.reserve(queue, demands, appeared).await
    }

    /// Returns when the next item becomes eligible.
    pub async fn next_eligible(
        &self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        self.reserver(&queue.name).lock().await.next_eligible(queue, after).await
    }
}
