//! Pushes.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::{OptionFuture, join};

use crate::{
    domain::{
        ConsumerName, Eligibility, ItemId, NewItem, Pushed, Queue, QueueName, Timestamp, Totals,
    },
    store::{MAX_NAMED_BYTES, Push, StoreError},
};

use super::{Engine, EngineError, MAY_CREATE_ALL, MayCreate, Result, depths::Change};

/// How far the clocks of brokers may be apart without a delay of what is announced to be eligible now.
const CLOCKS_DIFFER: Duration = Duration::from_millis(10);

/// Returns true if consumers may find one of the items as soon as it is stored.
fn may_be_found(items: &[Push]) -> bool {
    let is_due = |push: &Push| push.item.eligibility == Eligibility::Immediate;
    items.iter().any(|push| !push.queue.paused && is_due(push))
}

impl Engine {
    /// Pushes items into a queue, which is created if it does not exist.
    #[cfg(test)]
    pub(crate) async fn push(
        self: &Arc<Self>,
        queue: &QueueName,
        items: Vec<NewItem>,
        producer: Option<ConsumerName>,
    ) -> Result<Vec<Pushed>> {
        let queue = self.open_for_push(queue, items.len(), MAY_CREATE_ALL).await?;
        self.push_into(queue, items, producer).await
    }

    /// First half of a push: returns the queue, checked to have room for `items` items.
    pub(crate) async fn open_for_push(
        &self,
        queue: &QueueName,
        items: usize,
        may_create: MayCreate<'_>,
    ) -> Result<Arc<Queue>> {
        self.check_open()?;
        self.queue_for_push(queue, items, may_create).await
    }

    /// Second half: stores the items, and returns when they are durable. Calls that reach the store in order store their items
    /// in order, with an exception of [`ItemStore::push`](crate::store::ItemStore::push).
    pub(crate) async fn push_into(
        self: &Arc<Self>,
        queue: Arc<Queue>,
        items: Vec<NewItem>,
        producer: Option<ConsumerName>,
    ) -> Result<Vec<Pushed>> {
        let mut items: Vec<Push> = items
            .into_iter()
            .map(|item| Push { producer: producer.clone(), ..Push::new(Arc::clone(&queue), item) })
            .collect();
        let dispatcher = self.dispatcher(&queue.name);
        let turn =
            OptionFuture::from(dispatcher.as_ref().map(|of| of.turns.next())).await.flatten();
        let mut in_flight = self.pushes_in_flight.begin(&queue);
        let direct = match (&dispatcher, turn) {
            (Some(dispatcher), Some(turn)) => {
                self.begin_in_turn(dispatcher, turn, &mut in_flight, &mut items).await
            }
            _ => None,
        };
        let is_awaited = direct.is_none()
            && in_flight.is_alone
            && may_be_found(&items)
            && self.signals.awaits(&queue.name);
        let item = if is_awaited { self.choose_id(&mut items) } else { None };
        let announcement = is_awaited.then(|| self.announce(&in_flight.queue, item));
        let (pushed, _) = join(self.store.push(items), OptionFuture::from(announcement)).await;
        let pushed = pushed.inspect_err(|error| self.wake_if_unknown(error, [&queue.name]))?;
        match direct {
            Some(direct) => self.deliver_pushed(direct, &pushed),
            None => self.notify_pushed(pushed.iter().map(|pushed| (&queue.name, pushed)), item),
        }
        Ok(pushed)
    }

    /// Chooses the id of the only item of a push, if a broker that knows it may claim the item by it.
    fn choose_id(&self, items: &mut [Push]) -> Option<ItemId> {
        let [only] = items else { return None };
        let is_small = only.item.payload.len() <= MAX_NAMED_BYTES;
        if is_small && only.item.may_start_reserved(&only.queue) {
            only.id = self.store.choose_id();
        }
        only.id
    }

    /// Tells a broker that waits for it of a push that is being stored, so that it looks for the items while they are being
    /// made durable: its claim is durable only after them. A single `item` it may claim at once.
    async fn announce(&self, queue: &Queue, item: Option<ItemId>) {
        let since = self.now() - CLOCKS_DIFFER;
        // The store goes first. Who looks before the items are there is told of them once more.
        tokio::task::yield_now().await;
        self.signals.announce(&queue.name, since, item);
    }

    /// Wakes the consumers of queues in which a write whose outcome is unknown may have made items
    /// ready. If the write took effect, repeating it changes nothing and so wakes nobody.
    pub(super) fn wake_if_unknown<'a>(
        &self,
        error: &StoreError,
        queues: impl IntoIterator<Item = &'a QueueName>,
    ) {
        if matches!(error, StoreError::Unavailable { .. }) {
            for queue in queues.into_iter().collect::<HashSet<_>>() {
                self.notify_inserted(queue, None);
            }
        }
    }

    /// Pushes one item of a schedule. Its `dedup_id`, if it has one, is remembered for `window`.
    pub(crate) async fn push_once(
        &self,
        queue: &QueueName,
        item: NewItem,
        window: Duration,
    ) -> Result<Option<Pushed>> {
        // Whoever made the schedule may manage the queue.
        let queue = self.queue_for_push(queue, 1, MAY_CREATE_ALL).await?;
        let _in_flight = self.pushes_in_flight.begin(&queue);
        let name = queue.name.clone();
        let push = Push { dedup_window: Some(window), ..Push::new(queue, item) };
        let pushed = self.store.push(vec![push]).await;
        let pushed = pushed.inspect_err(|error| self.wake_if_unknown(error, [&name]))?;
        self.notify_pushed(pushed.iter().map(|pushed| (&name, pushed)), None);
        Ok(pushed.first().copied())
    }

    pub(super) async fn queue_for_push(
        &self,
        name: &QueueName,
        items: usize,
        may_create: MayCreate<'_>,
    ) -> Result<Arc<Queue>> {
        let queue = self.queue_or_create(name, may_create).await?;
        if !self.stats.depths.has_room(&queue, items).await? {
            return Err(EngineError::queue_full(&queue));
        }
        Ok(queue)
    }

    /// Returns the queue, which is created if it is not there and that is allowed.
    pub(super) async fn queue_or_create(
        &self,
        name: &QueueName,
        may_create: MayCreate<'_>,
    ) -> Result<Arc<Queue>> {
        match self.queues.get(name).await {
            Err(EngineError::QueueNotFound(_)) if self.limits.auto_create_queues => {}
            queue => return queue,
        }
        let _creation = self.check_create(name, may_create).await?;
        self.create_by_use(name).await
    }

    /// Counts the stored items, and wakes the consumers of their queues for the time at which they
    /// are eligible. `item` is the only one, if other brokers may claim it by its id.
    pub(super) fn notify_pushed<'a>(
        &self,
        pushed: impl Iterator<Item = (&'a QueueName, &'a Pushed)>,
        item: Option<ItemId>,
    ) {
        #[derive(Default)]
        struct QueueChange {
            pushed: u64,
            deduplicated: u64,
            /// The items that are not ready.
            later: Change,
            since: Option<Timestamp>,
        }
        let now = self.now();
        let mut by_queue: HashMap<&QueueName, QueueChange> = HashMap::new();
        for (queue, pushed) in pushed {
            let change = by_queue.entry(queue).or_default();
            if pushed.deduplicated {
                change.deduplicated += 1;
                continue;
            }
            change.pushed += 1;
            match pushed.eligible_time {
                None => change.later.blocked += 1,
                Some(at) if at > now => change.later.delayed += 1,
                Some(_) => {}
            }
            let since = &mut change.since;
            *since = match (*since, pushed.eligible_time) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        for (queue, QueueChange { pushed, deduplicated, later, since }) in by_queue {
            self.metrics.deduplicated(queue, deduplicated);
            self.count(queue, &Totals { pushed, ..Totals::default() });
            if later != Change::default() {
                let ready = -(later.blocked + later.delayed);
                self.stats.depths.changed(queue, || Change { ready, ..later });
            }
            if since.is_some() {
                self.notify_inserted_item(queue, since, item);
            }
        }
    }
}
