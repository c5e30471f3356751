//! Items that arrive just after their queue was deleted, because their callers had read its settings before. The
//! transaction that stores them creates the queue again, so that they can be found.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{queues, tx::Tx};
use crate::domain::Queue;

/// Time after which nobody uses settings that were read before a deletion.
const REMEMBERED: Duration = Duration::from_mins(2);

/// When a queue was last deleted: arrivals are checked only for a while after that.
#[derive(Debug)]
pub(super) struct LateArrivals {
    origin: Instant,
    /// End of the checks, in milliseconds since `origin`.
    until: AtomicU64,
}

impl LateArrivals {
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), until: AtomicU64::new(0) }
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Notes that a queue is being deleted. Must be called by the transaction that deletes it.
    pub(super) fn queue_deleted(&self) {
        let remembered = u64::try_from(REMEMBERED.as_millis()).unwrap_or(u64::MAX);
        self.until.store(self.elapsed().saturating_add(remembered), Ordering::Relaxed);
    }

    /// Creates the queues again that items are about to enter and that do not exist.
    pub(super) fn ensure<'a>(
        &self,
        tx: &Tx<'_>,
        entered: impl Iterator<Item = &'a Queue>,
    ) -> rusqlite::Result<()> {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 || self.elapsed() > until {
            return Ok(());
        }
        let mut last = None;
        for queue in entered {
            if last == Some(&queue.name) {
                continue;
            }
            last = Some(&queue.name);
            if queues::get(tx, &queue.name)?.is_some() {
                continue;
            }
            let mut again = Queue { create_time: tx.now, ..queue.clone() };
            // The dead-letter queue may have been deleted meanwhile.
            if let Some(target) = &again.dead_letter_queue
                && queues::get(tx, target)?.is_none()
            {
                again.dead_letter_queue = None;
            }
            queues::create(tx, again)?;
            tracing::warn!(queue = %queue.name, "items landed in a deleted queue: created the queue again");
        }
        Ok(())
    }
}
