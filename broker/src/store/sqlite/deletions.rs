//! The queues that are being deleted with all their items, which takes many steps. No queue can be linked to
//! one of these, so that the last step is not refused after items were deleted. One broker works on a file,
//! so that its memory is enough; a broker that ends during a deletion leaves a queue with fewer items.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

use crate::domain::QueueName;

#[derive(Debug, Default)]
pub(super) struct Deletions(Mutex<HashSet<QueueName>>);

/// A deletion under way, until it is dropped.
#[derive(Debug)]
pub(super) struct Deletion {
    all: Arc<Deletions>,
    queue: QueueName,
}

impl Deletions {
    /// Begins the deletion of a queue. Returns `None` if another one is under way.
    pub(super) fn begin(self: &Arc<Self>, queue: &QueueName) -> Option<Deletion> {
        let begun = self.0.lock().insert(queue.clone());
        begun.then(|| Deletion { all: Arc::clone(self), queue: queue.clone() })
    }

    /// Returns true if the queue is being deleted.
    pub(super) fn includes(&self, queue: &QueueName) -> bool {
        self.0.lock().contains(queue)
    }
}

impl Drop for Deletion {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.queue);
    }
}
