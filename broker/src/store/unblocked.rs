//! Queues in which a store itself made items ready, until
//! [`ItemStore::unblocked`](super::ItemStore::unblocked) returns them.

use std::{collections::BTreeSet, mem};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::QueueName;

/// Queues in which the store made items ready, and which nobody has taken yet.
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

    /// Waits until there are queues, and takes them.
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
