//! Consumers: calls that wait and calls that do not, and all that is done with an item.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::history::{Answer, Delivery, PushEntry, RollbackItem, Time};

use super::{
    Clients, TICKS,
    api::{NodeRef, is_open},
    streams,
};

/// A close call comes so many milliseconds before the end of a lease, or after it, at most.
const CLOSE: u64 = 30;

/// Consumes until the end, in one way after the other.
pub(super) async fn consume(clients: Arc<Clients>, number: u64) {
    let name = format!("consumer {number}");
    while clients.pause(0, 50).await {
        let Some(node) = clients.cluster.any() else { continue };
        if clients.plan.schedules > 0 && clients.dice.chance(0.2) {
            match clients.dice.number(0, 1) {
                0 => reserve(&clients, &name, &node, TICKS).await,
                _ => streams::consume_two_way(&clients, &name, &node, TICKS).await,
            }
            continue;
        }
        let queue = match clients.dice.number(0, 9) {
            0 => format!("{}.dead", clients.queue()),
            _ => clients.queue(),
        };
        let ways = if clients.plan.flows { 8 } else { 5 };
        let first = if clients.plan.has_bursts() { 3 } else { 0 };
        match clients.dice.number(first, ways) {
            0 => pop(&clients, &name, &node, &queue).await,
            1 | 2 => reserve(&clients, &name, &node, &queue).await,
            3 | 4 => streams::consume(&clients, &name, &node, &queue).await,
            _ => streams::consume_two_way(&clients, &name, &node, &queue).await,
        }
    }
}

async fn pop(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let (max_items, wait) = clients.taking();
    clients.pop(name, node, queue, max_items, wait).await;
}

async fn reserve(clients: &Arc<Clients>, name: &str, node: &NodeRef, queue: &str) {
    let (max_items, wait) = clients.taking();
    let lease = clients.lease();
    let deliveries = clients.reserve(name, node, queue, max_items, wait, lease).await;
    if clients.dice.chance(0.5) {
        let receipts: Vec<_> = deliveries.into_iter().map(|delivery| delivery.receipt).collect();
        if !receipts.is_empty() {
            clients.commit(name, node, receipts).await;
        }
        return;
    }
    start_work(clients, name, deliveries, lease);
}

/// Works on each of these items by itself.
pub(super) fn start_work(
    clients: &Arc<Clients>,
    name: &str,
    deliveries: Vec<Delivery>,
    lease: Duration,
) {
    for delivery in deliveries {
        let (clients, name) = (Arc::clone(clients), name.to_owned());
        clients.tasks.clone().spawn(work(clients, name, delivery, lease));
    }
}

/// Works on an item, and settles it in one way or the other.
async fn work(clients: Arc<Clients>, name: String, delivery: Delivery, lease: Duration) {
    let dice = &clients.dice;
    let mut lease_end = delivery.lease_end;
    if dice.chance(0.5) {
        tokio::time::sleep(dice.millis(0, lease.as_millis() as u64 / 2)).await;
    }
    if dice.chance(0.1)
        && let Some(node) = clients.cluster.any()
    {
        // Shorter than what is left, or longer.
        let lease = clients.lease();
        let end = clients.extend(&name, &node, &delivery.receipt, lease).await;
        lease_end = end.unwrap_or(lease_end);
        tokio::time::sleep(dice.millis(0, lease.as_millis() as u64)).await;
    }
    if dice.chance(clients.plan.close_calls) {
        clients.wait_for_close_call(lease_end).await;
    }
    let fails = dice.chance(clients.plan.failures);
    if fails && dice.chance(0.2) {
        return; // the lease lapses
    }
    let choice = dice.number(0, 19);
    // A settle whose answer was lost is repeated, through any broker.
    for _ in 0..dice.number(1, 3) {
        let Some(node) = clients.cluster.any() else { continue };
        let answer = match choice {
            _ if fails => clients.fail(&name, &node, &delivery, choice).await,
            0 => {
                let to = clients.queue_but(&delivery.queue);
                let delay = if dice.chance(0.3) { dice.millis(1, 2_000) } else { Duration::ZERO };
                clients.move_item(&name, &node, &delivery.receipt, &to, delay).await
            }
            1 => {
                let push = |_| PushEntry { queue: clients.queue(), item: clients.new_item() };
                let pushes = (0..dice.number(1, 3)).map(push).collect();
                clients.commit_and_push(&name, &node, &delivery.receipt, pushes).await
            }
            _ => clients.commit(&name, &node, vec![delivery.receipt.clone()]).await,
        };
        // Repeating what pushes would push it twice.
        if !is_open(&answer) || choice == 1 {
            return;
        }
        if dice.chance(0.5) {
            tokio::time::sleep(dice.millis(0, 1_000)).await;
        }
    }
}

impl Clients {
    /// Returns how many items a call takes, and for how long it waits.
    fn taking(&self) -> (u32, Duration) {
        let wait = match self.dice.number(0, 3) {
            0 => Duration::ZERO,
            1 => self.dice.millis(1, 50),
            _ => self.dice.millis(50, 25_000),
        };
        (self.dice.number(1, 10) as u32, wait)
    }

    /// Returns a lease as a client asks for it.
    pub(crate) fn lease(&self) -> Duration {
        self.lease_of(self.plan.leases)
    }

    /// Returns a lease in one of these spans.
    pub(super) fn lease_of(&self, spans: &[(u64, u64)]) -> Duration {
        let span = self.dice.one_of(spans);
        span.map_or(Duration::from_secs(1), |(least, most)| self.dice.millis(*least, *most))
    }

    /// Waits for the end of a lease, or for a moment close to it.
    async fn wait_for_close_call(&self, lease_end: Time) {
        let shift = Duration::from_millis(CLOSE);
        let left = Duration::from_micros(lease_end.saturating_sub(self.recorder.now()));
        tokio::time::sleep((left + self.dice.millis(0, 2 * CLOSE)).saturating_sub(shift)).await;
    }

    async fn fail(&self, name: &str, node: &NodeRef, delivery: &Delivery, choice: u64) -> Answer {
        let receipt = delivery.receipt.clone();
        let item = match choice {
            0..=2 => RollbackItem { receipt, dead_letter: true, ..RollbackItem::default() },
            3..=6 => RollbackItem { receipt, keep_attempt: true, ..RollbackItem::default() },
            7..=10 => {
                RollbackItem { receipt, delay: Some(choice * 100_000), ..RollbackItem::default() }
            }
            _ => RollbackItem { receipt, ..RollbackItem::default() },
        };
        self.roll_back(name, node, item).await
    }
}
