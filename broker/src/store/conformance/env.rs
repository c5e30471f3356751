//! The environment of the suite's tests, and their common operations.

use std::{any::Any, future::Future, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;

use super::Broker;

use crate::{
    domain::{
        AtLimit, Clock, ConsumerName, DedupId, Delivery, Demand, Eligibility, FailureDefaults,
        Item, ItemId, ItemState, LimitReason, NewItem, OrderingKey, Outcome, Priority, Pushed,
        Queue, QueueName, Timestamp,
    },
    store::{
        Appeared, EndedDelivery, Extension, ItemDeleted, Move, Push, Reservation, Reserved,
        Result as StoreResult, Rollback, RollbackTo, Store,
    },
};

/// An empty store and its clock.
pub struct Env {
    /// The store under test.
    pub store: Arc<Broker>,
    /// A second broker on the same data, or `store` itself if there can be only one.
    pub other: Arc<Broker>,
    /// The clock of both brokers.
    pub clock: Arc<Clock>,
    /// Runs a round of upkeep of the store under test.
    upkeep: Upkeep,
    /// A value to be dropped after the stores.
    _guard: Box<dyn Any + Send + Sync>,
}

/// Runs a round of upkeep.
type Upkeep = Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// The lease of [`Env::take`].
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// Returns a duration in seconds, the unit of these tests.
pub(crate) const fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Returns an item with only a payload.
pub(crate) fn item(payload: &str) -> NewItem {
    NewItem { payload: payload.to_owned().into(), ..NewItem::default() }
}

/// Returns an item with an ordering key.
pub(crate) fn keyed(payload: &str, key: &str) -> NewItem {
    NewItem { ordering_key: OrderingKey::new(key), ..item(payload) }
}

/// Returns an item with a deduplication id.
pub(crate) fn dedup(payload: &str, id: &str) -> NewItem {
    NewItem { dedup_id: DedupId::new(id), ..item(payload) }
}

/// Returns an item with a priority.
pub(crate) fn urgent(payload: &str, level: i32) -> NewItem {
    NewItem { priority: Priority::parse("priority", level).unwrap(), ..item(payload) }
}

/// Returns a delayed item.
pub(crate) fn delayed(payload: &str, delay: Duration) -> NewItem {
    NewItem { eligibility: Eligibility::After(delay), ..item(payload) }
}

/// Returns an item with a time to live.
pub(crate) fn mortal(payload: &str, ttl: Duration) -> NewItem {
    NewItem { ttl: Some(ttl), ..item(payload) }
}

/// Returns the name of a queue.
pub(crate) fn name(text: &str) -> QueueName {
    QueueName::parse("queue", text).unwrap()
}

/// Returns a demand without a limit on bytes.
pub(crate) fn demand(max_items: usize) -> Demand {
    Demand {
        max_items,
        max_bytes: usize::MAX,
        may_exceed: true,
        lease: LEASE,
        consumer: Some(ConsumerName::parse("consumer", "tester").unwrap()),
        spare: false,
    }
}

/// Returns the payloads of deliveries.
pub(crate) fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| payload(&delivery.item)).collect()
}

/// Returns the payload of an item.
pub(crate) fn payload(item: &Item) -> String {
    String::from_utf8(item.payload.to_vec()).unwrap()
}

/// Returns a receipt to settle.
pub(crate) fn held(queue: &Arc<Queue>, delivery: &Delivery) -> Reservation {
    Reservation { queue: queue.clone(), receipt: delivery.receipt.clone() }
}

/// Returns a move of a delivered item without changes or delay.
pub(crate) fn move_of(from: &Arc<Queue>, delivery: &Delivery, to: &Arc<Queue>) -> Move {
    Move {
        held: held(from, delivery),
        to: to.clone(),
        payload: None,
        content_type: None,
        headers: [].into(),
        priority: None,
        eligible_time: delivery.item.create_time,
    }
}

impl Broker {
    /// Returns which reservations still hold their items.
    pub(crate) async fn holds(&self, items: Vec<Reservation>) -> StoreResult<Vec<bool>> {
        Ok(self.lease_ends(items).await?.iter().map(Option::is_some).collect())
    }

    /// Reserves up to `count` items after a signal, repeating the call as long as there are more.
    pub(crate) async fn take(
        &self,
        queue: &Arc<Queue>,
        count: usize,
        mut appeared: Appeared,
    ) -> Vec<Delivery> {
        let mut taken = Vec::new();
        for _ in 0..1_000 {
            let want = demand(count - taken.len());
            let reserved = self.reserve_hearing(queue, &[want], appeared).await.unwrap();
            appeared = Appeared::Nothing;
            taken.extend(reserved.deliveries.into_iter().map(|(_, delivery)| delivery));
            if taken.len() == count || !reserved.more {
                return taken;
            }
        }
        panic!("there are more items forever");
    }
}

impl Env {
    /// Returns an environment of an empty store. `guard` is dropped after the store. `upkeep` runs
    /// immediately, for the queues consumed through `store`, the upkeep that the store otherwise
    /// runs periodically.
    pub fn new<F>(
        store: Arc<dyn Store>,
        other: Arc<dyn Store>,
        clock: Arc<Clock>,
        upkeep: impl Fn() -> F + Send + Sync + 'static,
        guard: impl Any + Send + Sync,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (store, other) = (Arc::new(Broker::new(store)), Arc::new(Broker::new(other)));
        let upkeep: Upkeep = Box::new(move || Box::pin(upkeep()));
        Self { store, other, clock, upkeep, _guard: Box::new(guard) }
    }

    /// Runs the upkeep of the store, which it would otherwise do sooner or later.
    pub async fn upkeep(&self) {
        (self.upkeep)().await;
    }

    /// Returns the store's time.
    pub fn now(&self) -> Timestamp {
        self.store.now()
    }

    /// Returns when the next item becomes eligible.
    pub async fn next_eligible(&self, queue: &Queue) -> Option<Timestamp> {
        self.store.next_eligible(queue, self.now()).await.unwrap()
    }

    /// Advances the clock.
    pub fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }

    /// Creates a queue with the default settings.
    pub async fn queue(&self, name: &str) -> Arc<Queue> {
        self.queue_with(name, |_| {}).await
    }

    /// Creates a queue.
    pub async fn queue_with(&self, text: &str, set: impl FnOnce(&mut Queue)) -> Arc<Queue> {
        let mut queue = Queue::with_defaults(name(text), self.now());
        set(&mut queue);
        match self.store.create_queue(&queue).await.unwrap() {
            crate::store::Created::New(queue) => Arc::new(with_limit(queue)),
            crate::store::Created::Existing(queue) => panic!("{queue:?} is there"),
        }
    }

    /// Deletes a queue with all its items. Returns their number.
    pub async fn delete_queue(&self, queue: &Queue) -> u64 {
        let links = self.store.links().await.unwrap();
        match self.store.delete_queue(queue, true, links).await.unwrap() {
            crate::store::Deleted::Done(items) => items,
            other => panic!("{other:?}"),
        }
    }

    /// Pushes items in one call.
    pub async fn push(&self, queue: &Arc<Queue>, items: Vec<NewItem>) -> Vec<Pushed> {
        let items = items.into_iter().map(|item| push_of(queue, item)).collect();
        self.store.push(items).await.unwrap()
    }

    /// Pushes one item.
    pub async fn push_one(&self, queue: &Arc<Queue>, item: NewItem) -> Pushed {
        self.push(queue, vec![item]).await[0]
    }

    /// Pushes plain items.
    pub async fn push_plain(&self, queue: &Arc<Queue>, payloads: &[&str]) -> Vec<Pushed> {
        self.push(queue, payloads.iter().map(|payload| item(payload)).collect()).await
    }

    /// Reserves once.
    pub async fn reserve(&self, queue: &Arc<Queue>, demands: &[Demand]) -> Reserved {
        self.store.reserve(queue, demands).await.unwrap()
    }

    /// Reserves up to `count` items, repeating the call as long as there are more.
    pub async fn take(&self, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
        self.store.take(queue, count, Appeared::Nothing).await
    }

    /// Reserves the first item.
    pub async fn take_one(&self, queue: &Arc<Queue>) -> Delivery {
        self.take(queue, 1).await.pop().expect("an item is ready")
    }

    /// Reserves all ready items and returns their payloads.
    pub async fn drain(&self, queue: &Arc<Queue>) -> Vec<String> {
        payloads(&self.take(queue, 5_000).await)
    }

    /// Commits deliveries of one queue.
    pub async fn commit(&self, queue: &Arc<Queue>, of: &[Delivery]) -> Vec<Outcome> {
        self.store.commit(of.iter().map(|delivery| held(queue, delivery)).collect()).await.unwrap()
    }

    /// Commits one delivery.
    pub async fn commit_one(&self, queue: &Arc<Queue>, of: &Delivery) -> Outcome {
        self.commit(queue, std::slice::from_ref(of)).await[0]
    }

    /// Rolls one delivery back as a failed attempt, without a delay.
    pub async fn fail(&self, queue: &Arc<Queue>, of: &Delivery) -> Outcome {
        self.roll_back(queue, of, Duration::ZERO, of.receipt.attempt + 1, Some("failed")).await
    }

    /// Rolls one delivery back.
    pub async fn roll_back(
        &self,
        queue: &Arc<Queue>,
        of: &Delivery,
        delay: Duration,
        attempt: u32,
        reason: Option<&str>,
    ) -> Outcome {
        let to = RollbackTo::Queue {
            eligible_time: self.now() + delay,
            attempt,
            ended: EndedDelivery::Counted,
        };
        let reason = reason.map(str::to_owned);
        let rollback = Rollback { held: held(queue, of), to, reason };
        self.store.rollback(vec![rollback]).await.unwrap()[0]
    }

    /// Rolls one delivery back as its last attempt.
    pub async fn bury(&self, queue: &Arc<Queue>, of: &Delivery, reason: Option<&str>) -> Outcome {
        let reason = reason.map(str::to_owned);
        let rollback = Rollback { held: held(queue, of), to: last(queue, of), reason };
        self.store.rollback(vec![rollback]).await.unwrap()[0]
    }

    /// Sets the ends of leases, all to the same time.
    pub async fn extend(&self, items: Vec<Reservation>, until: Timestamp) -> Vec<Outcome> {
        let items = items.into_iter().map(|held| Extension { held, until, is_renewal: false });
        self.store.extend(items.collect()).await.unwrap()
    }

    /// Renews leases through a broker, all until the same time, unless they last longer.
    pub async fn renew(
        &self,
        store: &Broker,
        items: Vec<Reservation>,
        until: Timestamp,
    ) -> Vec<Outcome> {
        let items = items.into_iter().map(|held| Extension { held, until, is_renewal: true });
        store.extend(items.collect()).await.unwrap()
    }

    /// Moves one delivery.
    pub async fn move_one(&self, from: &Arc<Queue>, of: &Delivery, to: &Arc<Queue>) -> Outcome {
        self.store.move_items(vec![move_of(from, of, to)]).await.unwrap()[0]
    }

    /// Deletes an item whatever its state. Returns false if the item does not exist.
    pub async fn delete(&self, queue: &Queue, id: ItemId) -> bool {
        self.store.delete_item(queue, id, None).await.unwrap() == ItemDeleted::Done
    }

    /// Returns the item, which must exist.
    pub async fn get(&self, queue: &Queue, id: ItemId) -> Item {
        self.store.get_item(queue, id).await.unwrap().expect("the item exists")
    }

    /// Returns all items of a state, or of all states.
    pub async fn list(&self, queue: &Queue, state: Option<ItemState>) -> Vec<Item> {
        let page = self.store.list_items(queue, state, None, 10_000).await.unwrap();
        assert_eq!(page.next, None);
        page.entries
    }
}

/// Returns the queue with a known limit, as an engine determines it: its dead-letter queue exists.
pub(crate) fn with_limit(queue: Queue) -> Queue {
    let mut queue = queue.in_force(&FailureDefaults::default());
    if let Some(to) = &queue.dead_letter_queue {
        queue.at_limit = AtLimit::DeadLetter(to.clone());
    }
    queue
}

/// Returns the rollback of an item's last allowed attempt in this queue.
pub(crate) fn last(queue: &Queue, of: &Delivery) -> RollbackTo {
    let (reason, failed_attempts) = (LimitReason::MaxAttempts, of.receipt.attempt);
    match &queue.at_limit {
        AtLimit::DeadLetter(to) => {
            RollbackTo::DeadLetter { to: to.clone(), failed_attempts, reason }
        }
        // The store does what the caller asks for, whatever the settings.
        AtLimit::Discard | AtLimit::Nowhere | AtLimit::Unknown => {
            RollbackTo::Discard { failed_attempts, reason }
        }
    }
}

/// Returns a push of one item.
pub(crate) fn push_of(queue: &Arc<Queue>, item: NewItem) -> Push {
    Push::new(queue.clone(), item)
}
