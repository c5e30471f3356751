//! Notifies watchers of queues of their changes.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};
use tokio::{sync::mpsc, time::Instant};

use crate::domain::{Queue, QueueName};

use super::{Engine, EngineError, QueueStats, Result, depths::Seen, overview::TOTALS_AGE};

/// Number of watched queues that are counted at the same time.
const COUNTED_AT_A_TIME: usize = 8;
/// How often watched queues are compared with what was last reported.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// What was last reported about a queue.
struct LastSent {
    stats: QueueStats,
    seen: Seen,
    at: Instant,
}

impl Engine {
    /// Streams the stats of the given queues, or of all queues if none are given: first of each
    /// queue, and then of those that have changed. A queue in which nothing is known to have
    /// happened is not counted.
    pub(crate) async fn watch_queues(
        self: &Arc<Self>,
        queues: Vec<QueueName>,
    ) -> Result<mpsc::Receiver<Result<Vec<QueueStats>>>> {
        self.check_open()?;
        for name in &queues {
            self.queues.get(name).await?;
        }
        let (sender, receiver) = mpsc::channel(4);
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            let mut last: HashMap<QueueName, LastSent> = HashMap::new();
            let mut first = true;
            loop {
                let stats = tokio::select! {
                    stats = engine.changed_stats(&queues, &mut last) => stats,
                    () = sender.closed() => return,
                };
                let changed = stats.as_ref().map_or(true, |stats| !stats.is_empty());
                let failed = stats.is_err();
                if changed || first {
                    // A client that does not read must not hold up a shutdown.
                    tokio::select! {
                        sent = sender.send(stats) => if sent.is_err() { return },
                        () = engine.stopping.cancelled() => return,
                    }
                }
                if failed {
                    return;
                }
                first = false;
                tokio::select! {
                    () = tokio::time::sleep(WATCH_INTERVAL) => {}
                    () = sender.closed() => return,
                    () = engine.draining.cancelled() => {
                        tokio::select! {
                            _ = sender.send(Err(EngineError::ShuttingDown)) => {} // the watcher may have gone
                            () = engine.stopping.cancelled() => {}
                        }
                        return;
                    }
                }
            }
        });
        Ok(receiver)
    }

    /// Returns the stats of the queues that exist, in the order of the names, and the names of the others. Totals are at most
    /// [`TOTALS_AGE`] old. A queue in which nothing is known to have happened is not counted.
    pub(crate) async fn batch_stats(
        &self,
        names: &[QueueName],
    ) -> Result<(Vec<QueueStats>, Vec<QueueName>)> {
        self.notice_changes(TOTALS_AGE).await?;
        self.notice_consumers().await;
        let queues = self.queues.get_all(names).await?;
        let there: Vec<Arc<Queue>> =
            names.iter().filter_map(|name| queues.get(name).cloned()).collect();
        let missing = names.iter().filter(|name| !queues.contains_key(*name)).cloned().collect();
        let mut counted = stream::iter(there)
            .map(|queue| async move { self.stats_if_changed(&queue).await })
            .buffered(COUNTED_AT_A_TIME);
        let mut stats = Vec::with_capacity(names.len());
        while let Some(counted) = counted.next().await {
            stats.push(counted?);
        }
        Ok((stats, missing))
    }

    /// Returns the queue's stats. The queue is counted if something is known to have happened since the last count.
    async fn stats_if_changed(&self, queue: &Arc<Queue>) -> Result<QueueStats> {
        let last = self.stats.depths.last_count(&queue.name);
        let seen = match last.filter(|(seen, at)| !seen.is_outdated(self, &queue.name, *at)) {
            Some((seen, _)) => seen,
            None => self.stats.depths.watched(queue).await?,
        };
        Ok(self.stats_of(&queue.name, &seen))
    }

    async fn changed_stats(
        &self,
        queues: &[QueueName],
        last: &mut HashMap<QueueName, LastSent>,
    ) -> Result<Vec<QueueStats>> {
        self.notice_changes(TOTALS_AGE / 2).await?;
        self.notice_consumers().await;
        let all = queues.is_empty();
        let names = if all { self.queue_names().await? } else { Arc::new(queues.to_vec()) };
        if all {
            let there: HashSet<_> = names.iter().collect();
            last.retain(|name, _| there.contains(name));
        }
        let (mut changed, mut outdated) = (Vec::new(), Vec::new());
        for name in names.iter() {
            match last.get_mut(name) {
                Some(sent) if !sent.seen.is_outdated(self, name, sent.at) => {
                    // Consumers that come and go are no reason to count the items.
                    if self.has_other_consumers(&sent.stats) {
                        sent.stats = self.stats_of(name, &sent.seen);
                        changed.push(sent.stats.clone());
                    }
                }
                _ => outdated.push(name.clone()),
            }
        }
        let mut counted = stream::iter(outdated)
            .map(|name| async move { (self.watched_stats(&name).await, name) })
            .buffered(COUNTED_AT_A_TIME);
        while let Some((current, name)) = counted.next().await {
            let current = match current {
                Ok(counted) => counted,
                Err(EngineError::QueueNotFound(_)) if all => {
                    last.remove(&name);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if last.get(&name).is_none_or(|before| before.stats != current.stats) {
                changed.push(current.stats.clone());
            }
            last.insert(name, current);
        }
        Ok(changed)
    }

    fn has_other_consumers(&self, sent: &QueueStats) -> bool {
        sent.consumers != self.consumers(&sent.queue)
            || sent.consumers_of_all_brokers != self.consumers_of_all_brokers(&sent.queue)
    }

    async fn watched_stats(&self, name: &QueueName) -> Result<LastSent> {
        let queue = self.queues.get(name).await?;
        let seen = self.stats.depths.watched(&queue).await?;
        Ok(LastSent { stats: self.stats_of(name, &seen), seen, at: Instant::now() })
    }

    fn stats_of(&self, name: &QueueName, seen: &Seen) -> QueueStats {
        let totals = self.stats.with_pending(name, || self.overview.totals(name));
        self.stats_with(name, seen.depth, totals)
    }
}
