//! The handle through which the items of one queue are reserved.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{
    domain::{Demand, Queue, QueueName, Timestamp},
    store::{
        Appeared, Reserved, Reserver, Result,
        mongo::{
            Inner,
            cursor::{cursors::ConsumedCursor, watermarks::QueueCursor},
            in_time,
            reserve::{self, next_eligible::next_eligible},
        },
    },
};

pub(crate) struct MongoReserver {
    inner: Arc<Inner>,
    queue: QueueName,
    /// The cursor of the queue. While it is held here, the cursor is kept.
    cursor: ConsumedCursor,
}

impl MongoReserver {
    pub(crate) fn new(inner: Arc<Inner>, queue: QueueName) -> Self {
        let cursor = ConsumedCursor::new(inner.cursor(&queue));
        // Nothing reported the items that appeared while nobody consumed the queue through this broker.
        cursor.appeared(Appeared::FromStart);
        Self { inner, queue, cursor }
    }

    /// Returns the cursor to which all writers of this broker report. After the queue was deleted this is another one.
    fn cursor(&mut self, queue: &Queue) -> Arc<QueueCursor> {
        let cursor = self.inner.cursor(&self.queue);
        if !Arc::ptr_eq(&cursor, &self.cursor) {
            self.cursor = ConsumedCursor::new(Arc::clone(&cursor));
        }
        let mut consumed = cursor.consumed.lock();
        if consumed.group.as_ref() != Some(&queue.group) {
            consumed.group = Some(queue.group.clone());
        }
        drop(consumed);
        cursor
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
        let cursor = self.cursor(queue);
        cursor.appeared(appeared);
        let announced = appeared.item();
        let (queue, demands) = (Arc::clone(queue), demands.to_vec());
        // If nobody waits for the answer any more, dropping it undoes the claim.
        let turn = Arc::clone(&cursor.turn);
        let reserving = async {
            // A reserve whose caller has gone may still be under way. The caller itself waits for its turn, so that no
            // tasks that nobody waits for gather while the server is stalled.
            let turn = turn.lock_owned().await;
            let operation = |inner: Arc<Inner>| async move {
                let _turn = turn;
                reserve::reserve(&inner, &cursor, &queue, &demands, announced).await
            };
            self.inner.run_long(operation).await
        };
        Ok(in_time(reserving).await?.take())
    }

    async fn next_eligible(
        &mut self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        let (cursor, name, group) = (self.cursor(queue), self.queue.clone(), queue.group.clone());
        let operation = |inner: Arc<Inner>| async move {
            next_eligible(&inner, &cursor, &name, &group, after).await
        };
        self.inner.run(operation).await
    }
}
