//! The end of a cycle: everything is taken out, and what is left is recorded.

use std::time::{Duration, Instant};

use sluicegate_checker::history::{Listed, QueueAtRest, State, What};

use super::Load;

/// How long queues may hold what they should not, once all faults have ended.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);
/// The lease of what is drained.
const LEASE: Duration = Duration::from_secs(10);

fn is_unsettled(item: &Listed) -> bool {
    item.state != State::Processed
}

impl Load {
    /// Takes everything out of the queues when no client is left, and records what is there then. Returns what is wrong.
    pub(crate) async fn rest(&self) -> Vec<String> {
        let mut wrong = self.drain().await;
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

    async fn drain(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let (mut taken, mut left) = (0, Vec::new());
            for queue in self.all_queues() {
                let way = self.way();
                let items = self.reserve("drain", &way, &queue, 200, Duration::ZERO, LEASE).await;
                let receipts: Vec<String> =
                    items.unwrap_or_default().into_iter().map(|one| one.receipt).collect();
                taken += receipts.len();
                if !receipts.is_empty() {
                    let _ = self.commit("drain", &way, receipts).await;
                    continue;
                }
                match self.list(&way, &queue).await {
                    Ok(items) => left.extend(items.into_iter().filter(is_unsettled)),
                    Err(status) => return vec![format!("{queue} cannot be listed: {status:?}")],
                }
            }
            if taken == 0 && left.is_empty() {
                return Vec::new();
            }
            if begun.elapsed() > LIMIT {
                return vec![format!("still there {LIMIT:?} after the faults: {left:?}")];
            }
            if taken == 0 {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
