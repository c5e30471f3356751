//! Items that arrive just after their queue was deleted: their callers had read its settings before. The
//! queue is made again in the transaction that stores them, so that they can be found.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{queues, tx::Tx};
use crate::domain::Queue;

/// Nobody works with settings that were read longer ago.
const REMEMBERED: Duration = Duration::from_mins(2);

/// When a queue was deleted last: arrivals are checked only for a while after that.
#[derive(Debug)]
pub(super) struct LateArrivals {
    origin: Instant,
    /// In milliseconds since `origin`, until when to check.
    until: AtomicU64,
}

impl LateArrivals {
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), until: AtomicU64::new(0) }
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// A queue is being deleted. To be called by the transaction that does it.
    pub(super) fn queue_deleted(&self) {
        let remembered = u64::try_from(REMEMBERED.as_millis()).unwrap_or(u64::MAX);
        self.until.store(self.elapsed().saturating_add(remembered), Ordering::Relaxed);
    }

    /// Makes those of the queues again that items are about to enter and that are not there.
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
            // That may have been deleted meanwhile.
            if let Some(target) = &again.dead_letter_queue
                && queues::get(tx, target)?.is_none()
            {
                again.dead_letter_queue = None;
            }
            queues::create(tx, again)?;
            tracing::warn!(queue = %queue.name, "items came while the queue was deleted: it is there again");
        }
        Ok(())
    }
}
