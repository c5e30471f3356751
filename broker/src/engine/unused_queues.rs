//! Deletes the queues that pushes and dead letters created and that nobody uses any more.
//!
//! The settings of such a queue hold the time of its last known use. A queue that an operator has created or changed holds
//! none, and stays. Every broker looks at the queues now and then, and notes the use of those that it consumes itself or
//! whose totals have changed. A note is written at most a few times until the queue would be deleted.
//!
//! The step that deletes a queue finds it empty and without a note since the queue was read. A push at the same time
//! restores its queue, as after every deletion, so nothing is lost. A template may give such a queue a retention: it is deleted
//! when its history has ended anyway.

use std::{
    collections::{HashMap, HashSet},
    mem,
    time::Duration,
};

use parking_lot::Mutex;

use super::{Engine, Result, dead_letter_links};
use crate::{
    domain::{Queue, QueueName, Timestamp, Totals},
    store::Deleted,
};

/// How often queues are looked at until an unused one is deleted.
const LOOKS: u32 = 100;
/// The shortest time between two looks.
const SHORTEST: Duration = Duration::from_mins(1);
/// How often a use is noted until the queue would be deleted.
const NOTES: u32 = 7;
/// Number of queues or schedules that are read at a time.
const PAGE: usize = 500;

/// The totals of such queues at the last look. Empty after a look that failed, so that the next one deletes nothing.
#[derive(Default)]
pub(super) struct UnusedQueues(Mutex<HashMap<QueueName, Totals>>);

/// What becomes of a queue.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Leave,
    /// The queue is used, and this is written.
    Note,
    /// The queue is deleted if it is empty.
    Delete,
}

/// Decides about a queue of which no use is noted for the time `unused`. `used` says whether the queue was used since the
/// last look; `None`: this is not known.
fn verdict(unused: Duration, used: Option<bool>, ttl: Duration) -> Verdict {
    match used {
        Some(true) if unused >= ttl / NOTES => Verdict::Note,
        // What is used between two notes is not written.
        Some(false) if unused >= ttl + ttl / NOTES => Verdict::Delete,
        Some(_) | None => Verdict::Leave,
    }
}

impl Engine {
    /// Returns how often [`Self::delete_unused_queues`] is to be called; `None`: never. A broker that creates no queues
    /// deletes none, because their next use would not create them again.
    pub(super) fn unused_queues_period(&self) -> Option<Duration> {
        let ttl = self.limits.unused_queue_ttl;
        (!ttl.is_zero() && self.limits.auto_create_queues).then(|| (ttl / LOOKS).max(SHORTEST))
    }

    /// Looks at all queues that pushes and dead letters created: notes which of them are used, and deletes those that
    /// nobody has used for long.
    pub(super) async fn delete_unused_queues(&self) -> Result<()> {
        let before = mem::take(&mut *self.unused_queues.0.lock());
        let totals: HashMap<_, _> = self.store.all_totals().await?.into_iter().collect();
        let scheduled = self.scheduled_queues().await?;
        let mut seen = HashMap::new();
        let mut after: Option<QueueName> = None;
        loop {
            let page = self.store.list_queues("", after.as_ref(), PAGE).await?;
            let is_last = page.len() < PAGE;
            after = page.last().map(|queue| queue.name.clone());
            for queue in page {
                let Some(since) = queue.unused_since else { continue };
                let total = totals.get(&queue.name).copied().unwrap_or_default();
                let is_busy =
                    scheduled.contains(&queue.name) || self.dispatcher(&queue.name).is_some();
                let has_changed = before.get(&queue.name).map(|before| *before != total);
                let used = if is_busy { Some(true) } else { has_changed };
                seen.insert(queue.name.clone(), total);
                match verdict(since.until(self.now()), used, self.unused_ttl(&queue)) {
                    Verdict::Leave => {}
                    Verdict::Note => self.note_use(queue).await?,
                    Verdict::Delete => self.delete_if_unused(queue).await?,
                }
            }
            if is_last {
                *self.unused_queues.0.lock() = seen;
                return Ok(());
            }
        }
    }

    /// Notes that the queue has a consumer, unless its use was noted a short while ago. Other brokers, which do not see the
    /// consumer, then leave the queue.
    pub(super) async fn note_consumer(&self, name: &QueueName) {
        let Ok(queue) = self.queues.get(name).await else { return };
        let unused = |since: Timestamp| since.until(self.now());
        let is_due =
            |since| verdict(unused(since), Some(true), self.unused_ttl(&queue)) == Verdict::Note;
        if self.unused_queues_period().is_some()
            && queue.unused_since.is_some_and(is_due)
            && let Err(error) = self.note_use((*queue).clone()).await
        {
            tracing::debug!(queue = %name, %error, "could not note that the queue is used");
        }
    }

    /// Returns how long the queue has to be unused. Until then its deduplication ids have been forgotten and its history has ended
    /// anyway.
    fn unused_ttl(&self, queue: &Queue) -> Duration {
        self.limits.unused_queue_ttl.max(queue.dedup_window).max(queue.retention)
    }

    async fn note_use(&self, queue: Queue) -> Result<()> {
        let used = Queue { unused_since: Some(self.now()), ..queue };
        // If the settings have changed since they were read, another broker has noted the use, or an operator keeps the
        // queue.
        if let Some(noted) = self.store.update_queue(&used).await? {
            self.queues.replace(noted);
        }
        Ok(())
    }

    async fn delete_if_unused(&self, queue: Queue) -> Result<()> {
        let links = self.store.links().await?;
        let is_linked = !dead_letter_links::sources(&*self.store, &queue.name).await?.is_empty();
        let deleted = if is_linked {
            Deleted::NotEmpty
        } else {
            self.store.delete_queue(&queue, false, links).await?
        };
        match deleted {
            Deleted::Done(_) => {
                self.queue_deleted(&queue.name);
                tracing::info!(queue = %queue.name, "deleted: nobody has used the queue for unused_queue_ttl");
            }
            // The queue is as good as used. It is not looked at again at once, because that costs more than a look.
            Deleted::NotEmpty => self.note_use(queue).await?,
            Deleted::Overtaken => {} // the next look sees what has changed
        }
        Ok(())
    }

    /// Returns the queues to which schedules push.
    async fn scheduled_queues(&self) -> Result<HashSet<QueueName>> {
        let mut queues = HashSet::new();
        let mut after = None;
        loop {
            let page = self.store.list_schedules(after.as_ref(), PAGE, false).await?;
            let is_last = page.len() < PAGE;
            after = page.last().map(|schedule| schedule.name.clone());
            queues.extend(page.into_iter().map(|schedule| schedule.queue));
            if is_last {
                return Ok(queues);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_noted_now_and_then_and_deleted_only_if_it_is_known_to_be_unused() {
        let day = Duration::from_hours(24);
        let verdict = |days, used| verdict(day * days, used, day * 7);
        assert_eq!(verdict(0, Some(true)), Verdict::Leave);
        assert_eq!(verdict(1, Some(true)), Verdict::Note);
        assert_eq!(verdict(7, Some(false)), Verdict::Leave);
        assert_eq!(verdict(8, Some(false)), Verdict::Delete);
        assert_eq!(verdict(70, None), Verdict::Leave, "it may be used by others");
    }
}
