//! Items at a limit: their destination, metrics and log messages.

use std::{collections::HashMap, mem, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    domain::{AtLimit, Cause, FailureOutcome, LimitReason, Queue, QueueName, Receipt, Totals},
    store::{AtLimitCounts, EndedDelivery, Reservation, Rollback, RollbackTo},
};

use super::{Engine, Result, depths::Change};

/// Shortest interval between two log messages about one queue.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Items that left their queues at a limit and have not been logged yet.
#[derive(Default)]
pub(super) struct FailureLog(Mutex<HashMap<QueueName, Entry>>);

#[derive(Default)]
struct Entry {
    counts: HashMap<LimitReason, u64>,
    /// The destination; `None` if the items were discarded.
    to: Option<QueueName>,
    /// When the queue was last logged.
    logged: Option<Instant>,
}

impl FailureLog {
    fn note(&self, queue: &QueueName, to: Option<&QueueName>, reason: LimitReason, items: u64) {
        let mut entries = self.0.lock();
        let entry = entries.entry(queue.clone()).or_default();
        *entry.counts.entry(reason).or_default() += items;
        entry.to = to.cloned();
    }

    /// Removes and returns the entries to be logged now, and drops entries without items. `all`
    /// ignores the interval.
    fn take_due(&self, all: bool) -> Vec<(QueueName, Entry)> {
        let mut due = Vec::new();
        self.0.lock().retain(|queue, entry| {
            if !all && entry.logged.is_some_and(|logged| logged.elapsed() < LOG_EVERY) {
                return true;
            }
            if entry.counts.is_empty() {
                return false;
            }
            let (counts, to) = (mem::take(&mut entry.counts), entry.to.clone());
            due.push((queue.clone(), Entry { counts, to, logged: None }));
            entry.logged = Some(Instant::now());
            true
        });
        due
    }
}

impl Engine {
    /// Returns the queue with a known [`Queue::at_limit`]. This is the only place that decides
    /// where items at a limit go. The dead-letter queue is created before anything refers to it, so
    /// that no item is put into a queue that does not exist. The deletion of a queue must therefore
    /// be refused while the queue is the [`Queue::dead_letter_target`] of another one.
    pub(super) async fn with_known_limit(&self, queue: &Arc<Queue>) -> Result<Arc<Queue>> {
        if queue.at_limit != AtLimit::Unknown {
            return Ok(Arc::clone(queue));
        }
        let generation = self.queues.generation();
        let at_limit = match queue.dead_letter_target() {
            _ if queue.discard_failed => AtLimit::Discard,
            None => AtLimit::Nowhere,
            Some(target) => {
                let group = self.make_dead_letter_queue(&target, queue).await?;
                if group == queue.group {
                    AtLimit::DeadLetter(target)
                } else {
                    tracing::warn!(
                        queue = %queue.name, group = %queue.group, dead_letter_queue = %target, other_group = %group,
                        "items at a limit stay in their queue: its dead-letter queue is of another group"
                    );
                    AtLimit::Nowhere
                }
            }
        };
        Ok(self.queues.note_limit(queue, at_limit, generation))
    }

    /// Returns true if a reservation that ends unsettled meets a limit, and the destination of items
    /// at a limit has to be determined before the rollback is planned.
    pub(super) fn needs_limit(queue: &Queue, receipt: &Receipt, cause: Cause) -> bool {
        let outcome =
            || queue.failure_outcome(cause, receipt.attempt, receipt.deliveries_here(), 0.0);
        queue.at_limit == AtLimit::Unknown && matches!(outcome(), FailureOutcome::Limit { .. })
    }

    /// Decides what becomes of a reservation that ends unsettled. `delay` overrides the retry
    /// policy. If the destination at the limit is not known, the item stays in its queue and meets
    /// the limit again later.
    pub(super) fn plan_rollback(
        &self,
        held: Reservation,
        cause: Cause,
        delay: Option<Duration>,
        mut reason: Option<String>,
    ) -> Rollback {
        let (attempt, deliveries) = (held.receipt.attempt, held.receipt.deliveries_here());
        let queue = &held.queue;
        let back = |attempt, wait: Duration| RollbackTo::Queue {
            eligible_time: self.now() + delay.unwrap_or(wait),
            attempt,
            ended: match cause {
                Cause::Undelivered => EndedDelivery::Withdrawn,
                _ => EndedDelivery::Counted,
            },
        };
        let outcome = queue.failure_outcome(cause, attempt, deliveries, rand::random());
        let to = match (outcome, &queue.at_limit) {
            (FailureOutcome::Retry { attempt, delay: wait }, _) => back(attempt, wait),
            (FailureOutcome::Limit { reason, failed_attempts }, AtLimit::DeadLetter(to)) => {
                RollbackTo::DeadLetter { to: to.clone(), failed_attempts, reason }
            }
            (FailureOutcome::Limit { reason, failed_attempts }, AtLimit::Discard) => {
                RollbackTo::Discard { failed_attempts, reason }
            }
            (FailureOutcome::Limit { .. }, AtLimit::Unknown | AtLimit::Nowhere) => {
                back(attempt, Duration::ZERO)
            }
        };
        if let RollbackTo::DeadLetter { reason: limit, .. }
        | RollbackTo::Discard { reason: limit, .. } = &to
            && *limit == LimitReason::MaxDeliveries
        {
            let why = || format!("handed out {deliveries} times and never settled");
            reason = reason.or_else(|| Some(why()));
        }
        Rollback { held, to, reason }
    }

    /// Reports items that left their queue at a limit because of lapsed leases.
    pub(super) fn report_lapsed_at_limit(&self, queue: &Queue, counts: AtLimitCounts) {
        let to = match &queue.at_limit {
            AtLimit::DeadLetter(to) => Some(to),
            _ => None,
        };
        self.report_at_limit(&queue.name, to, LimitReason::MaxAttempts, counts.max_attempts);
        self.report_at_limit(&queue.name, to, LimitReason::MaxDeliveries, counts.max_deliveries);
        if let Some(to) = to.filter(|_| counts.total() > 0) {
            self.stats.depths.changed(to, || Change::arrived(counts.total()));
            self.notify_inserted(to, None);
        }
    }

    /// Counts items that left their queue at a limit and records them for the log. `to` is `None`
    /// if the items were discarded.
    pub(super) fn report_at_limit(
        &self,
        queue: &QueueName,
        to: Option<&QueueName>,
        reason: LimitReason,
        items: u64,
    ) {
        if items == 0 {
            return;
        }
        let mut totals = Totals::default();
        if to.is_some() {
            totals.dead_lettered = items;
            self.metrics.dead_lettered(queue, reason, items);
        } else {
            totals.discarded = items;
            self.metrics.discarded(queue, reason, items);
        }
        self.count(queue, &totals);
        self.failure_log.note(queue, to, reason, items);
    }

    /// Logs the recorded items, each queue at most once per interval. `all` ignores the interval.
    pub(super) fn log_failures(&self, all: bool) {
        for (queue, entry) in self.failure_log.take_due(all) {
            let of = |reason| entry.counts.get(&reason).copied().unwrap_or_default();
            let max_attempts = of(LimitReason::MaxAttempts);
            let max_deliveries = of(LimitReason::MaxDeliveries);
            let rejected = of(LimitReason::Rejected);
            if let Some(to) = entry.to {
                tracing::warn!(
                    %queue, %to, max_attempts, max_deliveries, rejected, "items were dead-lettered"
                );
            } else {
                tracing::warn!(
                    %queue, max_attempts, max_deliveries, rejected,
                    "items at a limit were discarded, as the queue's discard_failed asks"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dead-lettering is logged, but a queue whose items fail continuously does not flood the log.
    #[tokio::test(start_paused = true)]
    async fn a_queue_is_logged_once_in_ten_seconds() {
        let log = FailureLog::default();
        let [queue, dead] = ["q", "q.dead"].map(|name| QueueName::parse("queue", name).unwrap());
        let count = |due: &[(QueueName, Entry)]| -> u64 {
            due.iter().flat_map(|(_, entry)| entry.counts.values()).sum()
        };
        let mut said = 0;
        for second in 0..20 {
            log.note(&queue, Some(&dead), LimitReason::MaxAttempts, 5);
            let due = log.take_due(false);
            assert_eq!(due.len(), usize::from(second % 10 == 0), "second {second}");
            said += count(&due);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        said += count(&log.take_due(true));
        assert_eq!(said, 100, "all items are logged eventually");
        tokio::time::advance(LOG_EVERY).await;
        assert!(log.take_due(false).is_empty());
        assert!(log.0.lock().is_empty(), "a queue without failures has no entry");
    }
}
