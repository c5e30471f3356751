//! Items at a limit: where they go, and what is counted and said of it.

use std::{collections::HashMap, mem, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    domain::{AtLimit, Cause, FailureOutcome, GroupName, LimitReason, Queue, QueueName, Totals},
    store::{AtLimitCounts, Created, Reservation, Rollback, RollbackTo},
};

use super::{Engine, Result, depths::Change};

/// How often the log speaks of one queue at the most.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// What the log has still to say of items that left their queues at a limit.
#[derive(Default)]
pub(super) struct FailureLog(Mutex<HashMap<QueueName, Entry>>);

#[derive(Default)]
struct Entry {
    counts: HashMap<LimitReason, u64>,
    /// Where they went; `None`: away.
    to: Option<QueueName>,
    /// When the log last spoke of the queue.
    logged: Option<Instant>,
}

impl FailureLog {
    fn note(&self, queue: &QueueName, to: Option<&QueueName>, reason: LimitReason, items: u64) {
        let mut entries = self.0.lock();
        let entry = entries.entry(queue.clone()).or_default();
        *entry.counts.entry(reason).or_default() += items;
        entry.to = to.cloned();
    }

    /// Takes what is to be logged now, and forgets queues of which there is nothing to say.
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
    /// The queue with [`Queue::at_limit`] known. This is the only place that decides where items at a limit go, and the
    /// dead-letter queue is there before it is named: nothing is put into a queue that does not exist. Whoever
    /// deletes queues has to refuse those that are the [`Queue::dead_letter_target`] of another.
    pub(super) async fn with_known_limit(&self, queue: &Arc<Queue>) -> Result<Arc<Queue>> {
        if queue.at_limit != AtLimit::Unknown {
            return Ok(Arc::clone(queue));
        }
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
        Ok(self.queues.note_limit(queue, at_limit))
    }

    /// Makes a dead-letter queue if it is not there; answers the group it is of.
    pub(super) async fn make_dead_letter_queue(
        &self,
        name: &QueueName,
        source: &Queue,
    ) -> Result<GroupName> {
        let mut wanted = Queue::with_defaults(name.clone(), self.now());
        wanted.group = source.group.clone();
        Ok(match self.store.create_queue(&wanted).await? {
            Created::New(made) => {
                let group = made.group.clone();
                self.queues.replace(made);
                self.notify_settings(name);
                tracing::info!(queue = %name, of = %source.name, "made a dead-letter queue");
                group
            }
            Created::Existing(there) => there.group,
        })
    }

    /// What is to be done with a reservation that ends unsettled; `delay` wins over what the policy says.
    pub(super) async fn plan_rollback(
        &self,
        held: Reservation,
        cause: Cause,
        delay: Option<Duration>,
        mut reason: Option<String>,
    ) -> Result<Rollback> {
        let (attempt, deliveries) = (held.receipt.attempt, held.receipt.deliveries_here());
        let failure_outcome =
            |queue: &Queue| queue.failure_outcome(cause, attempt, deliveries, rand::random());
        let mut queue = Arc::clone(&held.queue);
        if queue.at_limit == AtLimit::Unknown
            && matches!(failure_outcome(&queue), FailureOutcome::Limit { .. })
        {
            queue = self.with_known_limit(&queue).await?;
        }
        let back = |attempt, wait: Duration| RollbackTo::Queue {
            eligible_time: self.now() + delay.unwrap_or(wait),
            attempt,
            undelivered: cause == Cause::Undelivered,
        };
        let to = match (failure_outcome(&queue), &queue.at_limit) {
            (FailureOutcome::Retry { attempt, delay: wait }, _) => back(attempt, wait),
            (FailureOutcome::Limit { reason: limit, failed_attempts }, AtLimit::DeadLetter(to)) => {
                if limit == LimitReason::MaxDeliveries {
                    let why = || format!("handed out {deliveries} times and never settled");
                    reason = reason.or_else(|| Some(why()));
                }
                RollbackTo::DeadLetter { to: to.clone(), failed_attempts, reason: limit }
            }
            (FailureOutcome::Limit { reason, .. }, AtLimit::Discard) => {
                RollbackTo::Discard { reason }
            }
            // Neither can be: it was looked into above. If it could, the item would stay.
            (FailureOutcome::Limit { .. }, AtLimit::Unknown | AtLimit::Nowhere) => {
                back(attempt, Duration::ZERO)
            }
        };
        Ok(Rollback { held: Reservation { queue, ..held }, to, reason })
    }

    /// Items left their queue at a limit by lapsed leases.
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

    /// Counts and notes for the log items that left their queue at a limit: for `to`, or away.
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

    /// Logs what has gathered, of each queue at most so often; `all`: now or never.
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

    /// Dead-lettering is logged, and a queue that fails all the time does not fill the log.
    #[tokio::test(start_paused = true)]
    async fn the_log_speaks_of_a_queue_once_in_ten_seconds() {
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
        assert_eq!(said, 100, "all are told of in the end");
        tokio::time::advance(LOG_EVERY).await;
        assert!(log.take_due(false).is_empty());
        assert!(log.0.lock().is_empty(), "nothing is remembered of a queue that is well");
    }
}
