//! Notifies watchers of queues of their changes.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};
use tokio::{sync::mpsc, time::Instant};

use crate::domain::QueueName;

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

    async fn changed_stats(
        &self,
        queues: &[QueueName],
        last: &mut HashMap<QueueName, LastSent>,
    ) -> Result<Vec<QueueStats>> {
        self.notice_changes(TOTALS_AGE / 2).await?;
        let all = queues.is_empty();
        let names = if all { self.queue_names().await? } else { Arc::new(queues.to_vec()) };
        if all {
            let there: HashSet<_> = names.iter().collect();
            last.retain(|name, _| there.contains(name));
        }
        let outdated: Vec<_> = names
            .iter()
            .filter(|name| last.get(*name).is_none_or(|sent| self.is_outdated(name, sent)))
            .cloned()
            .collect();
        let mut counted = stream::iter(outdated)
            .map(|name| async move { (self.watched_stats(&name).await, name) })
            .buffered(COUNTED_AT_A_TIME);
        let mut changed = Vec::new();
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

    fn is_outdated(&self, name: &QueueName, sent: &LastSent) -> bool {
        sent.seen.is_outdated(self, name, sent.at) || sent.stats.consumers != self.consumers(name)
    }

    async fn watched_stats(&self, name: &QueueName) -> Result<LastSent> {
        let queue = self.queues.get(name).await?;
        let seen = self.stats.depths.watched(&queue).await?;
        let totals = self.stats.with_pending(name, || self.overview.totals(name));
        let consumers = self.consumers(name);
        let stats = QueueStats { queue: name.clone(), depth: seen.depth, totals, consumers };
        Ok(LastSent { stats, seen, at: Instant::now() })
    }
}
