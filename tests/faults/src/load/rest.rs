//! The end of a cycle: everything is taken out, and what is left is recorded.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sluicegate_checker::history::{Listed, QueueAtRest, State, What};

use super::Load;

/// How long queues may hold items that they do not hand out, once all faults have ended.
const LIMIT: Duration = Duration::from_mins(1);
const PAUSE: Duration = Duration::from_millis(100);
/// The last second of other brokers may be missing in totals, and they are written in some more time.
const TOTALS: Duration = Duration::from_secs(2);
/// The lease of what is drained.
const LEASE: Duration = Duration::from_secs(10);

fn is_unsettled(item: &Listed) -> bool {
    item.state != State::Processed
}

impl Load {
    /// Takes everything out of the queues when no client is left, and records what is there then. Returns what is wrong.
    pub(crate) async fn rest(&self) -> Vec<String> {
        let mut wrong = self.drain().await;
        tokio::time::sleep(TOTALS).await;
        let begun = Instant::now();
        loop {
            let (mut queues, mut differs) = (Vec::new(), false);
            for queue in self.all_queues() {
                let way = self.way();
                let Ok(items) = self.list(&way, &queue).await else {
                    wrong.push(format!("{queue} cannot be listed"));
                    return wrong;
                };
                let figures = self.figures(&way, &queue).await.ok();
                let unsettled =
                    figures.map_or(0, |all| all.ready + all.delayed + all.reserved + all.blocked);
                let processed = figures.map_or(0, |all| all.processed);
                let count = items.iter().filter(|item| is_unsettled(item)).count();
                differs |= unsettled as usize != count;
                differs |= processed as usize != items.len() - count;
                if !items.is_empty() || figures.is_some() {
                    queues.push(QueueAtRest { queue, items, figures });
                }
            }
            if !differs || begun.elapsed() > Duration::from_secs(5) {
                self.recorder.mark(What::Rest { queues });
                return wrong;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Deletes the queues.
    pub(crate) async fn delete(&self) {
        for queue in self.all_queues() {
            self.delete_queue(&self.way(), &queue).await;
        }
    }

    /// Returns the queues of this cycle and their dead-letter queues.
    fn all_queues(&self) -> Vec<String> {
        let names = self.queues.iter().map(|(name, _)| name);
        let dead = names.clone().map(|name| format!("{name}.dead"));
        names.cloned().chain(dead).collect()
    }

    /// Takes out everything that comes. Returns what does not come, though nothing is away any more.
    async fn drain(&self) -> Vec<String> {
        let mut last = Instant::now();
        loop {
            let queues = self.all_queues();
            let rounds = join_all(queues.iter().map(|queue| self.take_out(queue))).await;
            let taken: usize = rounds.iter().map(|(taken, _)| taken).sum();
            let left: Vec<Listed> = rounds.into_iter().flat_map(|(_, left)| left).collect();
            if taken > 0 {
                last = Instant::now();
            } else if left.is_empty() {
                return Vec::new();
            } else if last.elapsed() > LIMIT {
                return vec![format!("nothing comes for {LIMIT:?}, and there is still {left:?}")];
            } else {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Commits what a queue hands out, and returns how much that is, and what else is in the queue.
    async fn take_out(&self, queue: &str) -> (usize, Vec<Listed>) {
        let way = self.way();
        let items = self.reserve("drain", &way, queue, 200, Duration::ZERO, LEASE).await;
        let receipts: Vec<String> =
            items.unwrap_or_default().into_iter().map(|one| one.receipt).collect();
        let taken = receipts.len();
        if taken > 0 {
            let _ = self.commit("drain", &way, receipts).await;
            return (taken, Vec::new());
        }
        match self.list(&way, queue).await {
            Ok(items) => (0, items.into_iter().filter(is_unsettled).collect()),
            // Nothing is known of it.
            Err(_) => (0, vec![Listed { name: queue.to_owned(), ..Listed::default() }]),
        }
    }
}
