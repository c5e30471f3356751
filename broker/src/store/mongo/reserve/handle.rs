//! The handle through which one queue's items are handed out.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{
    domain::{Demand, Queue, QueueName, Timestamp},
    store::{
        Appeared, Reserved, Reserver, Result,
        mongo::{
            Inner,
            cursor::{heads::ConsumedHead, watermarks::Head},
            reserve::{self, next_eligible::next_eligible},
        },
    },
};

pub(crate) struct MongoReserver {
    inner: Arc<Inner>,
    queue: QueueName,
    /// Where the queue's head is. Held, so that it stays what it is while the queue is consumed.
    head: ConsumedHead,
}

impl MongoReserver {
    pub(crate) fn new(inner: Arc<Inner>, queue: QueueName) -> Self {
        let head = ConsumedHead::new(inner.head(&queue));
        // Of what appeared while nobody consumed the queue here, nobody told.
        head.appeared(Appeared::FromStart);
        Self { inner, queue, head }
    }

    /// Returns the queue's head, to which all others in this broker tell what they write: another one once the queue
    /// was deleted.
    fn head(&mut self, queue: &Queue) -> Arc<Head> {
        let head = self.inner.head(&self.queue);
        if !Arc::ptr_eq(&head, &self.head) {
            self.head = ConsumedHead::new(Arc::clone(&head));
        }
        let mut consumed = head.consumed.lock();
        if consumed.group.as_ref() != Some(&queue.group) {
            consumed.group = Some(queue.group.clone());
        }
        drop(consumed);
        head
    }
}

#[async_trait]
impl Reserver for MongoReserver {
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved> {
        let head = self.head(queue);
        head.appeared(appeared);
        let (queue, demands) = (Arc::clone(queue), demands.to_vec());
        // If nobody waits for the answer any more, dropping it undoes the claim.
        let operation = |inner: Arc<Inner>| async move {
            // One that was given up may still be under way.
            let _turn = head.turn.lock().await;
            reserve::reserve(&inner, &head, &queue, &demands).await
        };
        Ok(self.inner.run(operation).await?.take())
    }

    async fn next_eligible(
        &mut self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        let (head, name, group) = (self.head(queue), self.queue.clone(), queue.group.clone());
        let operation = |inner: Arc<Inner>| async move {
            next_eligible(&inner, &head, &name, &group, after).await
        };
        self.inner.run(operation).await
    }
}
