//! What a store's own doing made ready, on its way to whoever waits in [`ItemStore::unblocked`](super::ItemStore::unblocked).

use std::{collections::BTreeSet, mem};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::QueueName;

/// Queues in which items became ready by themselves, until somebody asks.
#[derive(Debug, Default)]
pub(super) struct Unblocked {
    queues: Mutex<BTreeSet<QueueName>>,
    some: Notify,
}

impl Unblocked {
    pub(super) fn add(&self, queues: impl IntoIterator<Item = QueueName>) {
        self.queues.lock().extend(queues);
        self.some.notify_one();
    }

    /// Waits until there are some, and takes them.
    pub(super) async fn take(&self) -> Vec<QueueName> {
        loop {
            let queues = mem::take(&mut *self.queues.lock());
            if !queues.is_empty() {
                return queues.into_iter().collect();
            }
            self.some.notified().await;
        }
    }
}
