//! The pushes of each queue that have begun and not ended.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use crate::domain::{Queue, QueueName};

/// The number of pushes of each queue that have begun and not ended.
#[derive(Default)]
pub(in crate::engine) struct PushesInFlight(Mutex<HashMap<QueueName, Count>>);

struct Count {
    all: usize,
    /// Those of them that are direct.
    direct: usize,
}

impl PushesInFlight {
    /// Counts a push, until the result is dropped.
    pub(in crate::engine) fn begin(&self, queue: &Arc<Queue>) -> PushInFlight<'_> {
        let mut pushes = self.0.lock();
        let is_alone = if let Some(count) = pushes.get_mut(&queue.name) {
            count.all += 1;
            false
        } else {
            pushes.insert(queue.name.clone(), Count { all: 1, direct: 0 });
            true
        };
        PushInFlight { pushes: self, queue: Arc::clone(queue), is_alone, is_direct: false }
    }
}

/// A push that has begun. It ends when the dispatcher knows of its items, so that no later push
/// overtakes it.
pub(in crate::engine) struct PushInFlight<'a> {
    pushes: &'a PushesInFlight,
    pub(in crate::engine) queue: Arc<Queue>,
    /// True if no earlier push of the queue was in flight.
    pub(in crate::engine) is_alone: bool,
    is_direct: bool,
}

impl PushInFlight<'_> {
    /// Returns true if all other pushes of the queue that are in flight are direct. This one is not yet.
    pub(super) fn others_are_direct(&self) -> bool {
        let pushes = self.pushes.0.lock();
        pushes.get(&self.queue.name).is_some_and(|count| count.all == count.direct + 1)
    }

    /// Notes that the push is direct.
    pub(super) fn goes_directly(&mut self) {
        self.is_direct = true;
        if let Some(count) = self.pushes.0.lock().get_mut(&self.queue.name) {
            count.direct += 1;
        }
    }
}

impl Drop for PushInFlight<'_> {
    fn drop(&mut self) {
        let mut pushes = self.pushes.0.lock();
        if let Some(count) = pushes.get_mut(&self.queue.name) {
            count.all -= 1;
            count.direct -= usize::from(self.is_direct);
            if count.all == 0 {
                pushes.remove(&self.queue.name);
            }
        }
    }
}
