//! The pushes of each queue that have begun and not ended.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use crate::domain::{Queue, QueueName};

/// The number of pushes of each queue that have begun and not ended.
#[derive(Default)]
pub(in crate::engine) struct PushesInFlight(Mutex<HashMap<QueueName, Count>>);

#[derive(Clone, Copy, Default)]
struct Count {
    all: usize,
    /// Those of them that are direct.
    direct: usize,
}

impl PushesInFlight {
    /// Counts a push, until the result is dropped.
    pub(in crate::engine) fn begin(&self, queue: &Arc<Queue>) -> PushInFlight<'_> {
        let mut pushes = self.0.lock();
        let before = if let Some(count) = pushes.get_mut(&queue.name) {
            let before = *count;
            count.all += 1;
            before
        } else {
            pushes.insert(queue.name.clone(), Count { all: 1, direct: 0 });
            Count::default()
        };
        PushInFlight {
            pushes: self,
            queue: Arc::clone(queue),
            is_alone: before.all == 0,
            others_are_direct: before.all == before.direct,
            is_direct: false,
        }
    }
}

/// A push that has begun. It ends when the dispatcher knows of its items, so that no later push
/// overtakes it.
pub(in crate::engine) struct PushInFlight<'a> {
    pushes: &'a PushesInFlight,
    pub(in crate::engine) queue: Arc<Queue>,
    /// True if no earlier push of the queue was in flight.
    pub(in crate::engine) is_alone: bool,
    /// True if all earlier pushes of the queue that were in flight were direct.
    pub(super) others_are_direct: bool,
    is_direct: bool,
}

impl PushInFlight<'_> {
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
