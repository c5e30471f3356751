//! In: pushes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::{
    domain::{ConsumerName, NewItem, Pushed, Queue, QueueName, Timestamp, Totals},
    store::Push,
};

use super::{Engine, EngineError, Result};

impl Engine {
    /// Puts items into a queue; answers when they are durable, in order.
    pub async fn push(
        &self,
        queue: &QueueName,
        items: Vec<NewItem>,
        producer: Option<ConsumerName>,
    ) -> Result<Vec<Pushed>> {
        let queue = self.open_for_push(queue, items.len()).await?;
        self.push_into(queue, items, producer).await
    }

    /// The first half of [`Engine::push`]: the queue to push so many items into.
    pub(crate) async fn open_for_push(
        &self,
        queue: &QueueName,
        items: usize,
    ) -> Result<Arc<Queue>> {
        self.check_open()?;
        self.queue_for_push(queue, items).await
    }

    /// The second half: what is given to the store in order is stored in order.
    pub(crate) async fn push_into(
        &self,
        queue: Arc<Queue>,
        items: Vec<NewItem>,
        producer: Option<ConsumerName>,
    ) -> Result<Vec<Pushed>> {
        let items = items
            .into_iter()
            .map(|item| Push {
                queue: Arc::clone(&queue),
                item,
                producer: producer.clone(),
                dedup_window: None,
            })
            .collect();
        let pushed = self.timed("push", self.store.push(items)).await?;
        self.tell_pushed(pushed.iter().map(|pushed| (&queue.name, pushed)));
        Ok(pushed)
    }

    /// Pushes one item under a `dedup_id` that is remembered for `window`: the tick of a schedule.
    pub(crate) async fn push_once(
        &self,
        queue: &QueueName,
        item: NewItem,
        window: Duration,
    ) -> Result<Option<Pushed>> {
        let queue = self.queue_for_push(queue, 1).await?;
        let name = queue.name.clone();
        let push = Push { queue, item, producer: None, dedup_window: Some(window) };
        let pushed = self.store.push(vec![push]).await?;
        self.tell_pushed(pushed.iter().map(|pushed| (&name, pushed)));
        Ok(pushed.first().copied())
    }

    pub(super) async fn queue_for_push(
        &self,
        name: &QueueName,
        items: usize,
    ) -> Result<Arc<Queue>> {
        let (queue, new) = self.queues.get_or_create(name).await?;
        if new {
            self.tell_settings(&queue.name);
        }
        if queue.max_depth > 0 {
            let depth = self.depth_for_limit(&queue).await?;
            if depth + items as u64 > queue.max_depth {
                return Err(EngineError::QueueFull {
                    queue: queue.name.clone(),
                    max_depth: queue.max_depth,
                });
            }
        }
        Ok(queue)
    }

    /// Counts what was stored, and wakes its queues' consumers from when on it is eligible.
    pub(super) fn tell_pushed<'a>(
        &self,
        pushed: impl Iterator<Item = (&'a QueueName, &'a Pushed)>,
    ) {
        let mut by_queue: HashMap<&QueueName, (u64, Option<Timestamp>)> = HashMap::new();
        for (queue, pushed) in pushed {
            if pushed.deduplicated {
                continue;
            }
            let (count, since) = by_queue.entry(queue).or_default();
            *count += 1;
            *since = match (*since, pushed.eligible_time) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        for (queue, (pushed, since)) in by_queue {
            self.count(queue, &Totals { pushed, ..Totals::default() });
            if since.is_some() {
                self.tell_inserted(queue, since);
            }
        }
    }
}
