//! Rollbacks of items that reached nobody, or that a stream held when it ended.
//!
//! The store may be unreachable at that time, for however long. Rollbacks therefore wait here, in
//! the order in which they arrived, and are retried for as long as the process lives. Otherwise the
//! leases would lapse, which counts as a failed attempt.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::Mutex;
use sluicegate_proto::backoff::Backoff;

use crate::{
    domain::{Cause, Delivery, Queue, Receipt, Timestamp},
    engine::{Engine, Result, consumers::InFlight},
    essential::essential,
    store::{EndedDelivery, Reservation, Rollback, RollbackTo},
};

/// Most items rolled back in one call of the store.
const MAX_BATCH: usize = 1_000;
/// While more items than this wait to be rolled back, at about 300 bytes each, additional ones are
/// left to the end of their leases. A single batch is never refused for its size, because what
/// streams hold is in memory already.
const MAX_PENDING: usize = 500_000;
/// Pauses after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
/// Number of failures in a row after which a broker that shuts down gives up.
const LAST_TRIES: u32 = 3;
/// The reason recorded for items of an ended stream if they count as failed attempts.
const DISCONNECTED: &str = "the consumer's stream ended";

/// What happens to the items that a stream holds when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum OnDisconnect {
    /// They are ready again immediately, without a failed attempt.
    #[default]
    Release,
    /// They count as failed attempts.
    Count,
    /// They stay leased.
    KeepLease,
}

/// Items that wait to be rolled back.
#[derive(Default)]
pub(super) struct PendingRollbacks(Mutex<Pending>);

#[derive(Default)]
struct Pending {
    batches: VecDeque<Vec<Rollback>>,
    items: usize,
    /// True while a task works on the batches.
    running: bool,
}

impl PendingRollbacks {
    /// Adds a batch. Returns true if a task has to be started.
    fn add(&self, mut batch: Vec<Rollback>) -> bool {
        let mut pending = self.0.lock();
        if pending.items > MAX_PENDING {
            tracing::warn!(
                items = batch.len(),
                "too many items wait to be rolled back: these are ready again when their leases end"
            );
            return false;
        }
        pending.items += batch.len();
        // At shutdown the streams of a queue may hold more items than one call of a store can take.
        while batch.len() > MAX_BATCH {
            let rest = batch.split_off(MAX_BATCH);
            pending.batches.push_back(std::mem::replace(&mut batch, rest));
        }
        pending.batches.push_back(batch);
        !std::mem::replace(&mut pending.running, true)
    }

    /// Takes the next batches, up to [`MAX_BATCH`] items. With `alone`, takes a single batch,
    /// because it is not known which batch made the last call fail. Returns no batch if the task is
    /// to end.
    fn next(&self, alone: bool) -> Vec<Vec<Rollback>> {
        let mut pending = self.0.lock();
        let mut taken: Vec<Vec<Rollback>> = Vec::new();
        let mut items = 0;
        while let Some(batch) = pending.batches.front() {
            items += batch.len();
            if !taken.is_empty() && (alone || items > MAX_BATCH) {
                break;
            }
            taken.extend(pending.batches.pop_front());
        }
        pending.items -= taken.iter().map(Vec::len).sum::<usize>();
        pending.running = !taken.is_empty();
        taken
    }

    /// Adds batches whose rollback failed behind the others.
    fn add_again(&self, batches: Vec<Vec<Rollback>>) {
        let mut pending = self.0.lock();
        pending.items += batches.iter().map(Vec::len).sum::<usize>();
        pending.batches.extend(batches);
    }
}

/// Returns a rollback to the item's queue that counts no attempt, and a delivery only if there was
/// one. An item that was reserved because its former lease had lapsed returns to that lease.
fn released(
    queue: &Arc<Queue>,
    receipt: Receipt,
    eligible_time: Timestamp,
    ended: EndedDelivery,
) -> Rollback {
    // The lapse was counted with the reservation, and is counted again with the next one.
    let lapses = u32::from(matches!(ended, EndedDelivery::Unsent { former_lease: Some(_) }));
    let attempt = receipt.attempt.saturating_sub(lapses);
    let to = RollbackTo::Queue { eligible_time, attempt, ended };
    Rollback { held: Reservation { queue: Arc::clone(queue), receipt }, to, reason: None }
}

/// Returns a rollback of an item that was never sent, to its previous place.
fn unsent_item(queue: &Arc<Queue>, held: InFlight) -> Rollback {
    let ended = EndedDelivery::Unsent { former_lease: held.former_lease };
    released(queue, held.receipt, held.previous_eligible_time, ended)
}

impl Engine {
    /// Rolls back items that were reserved but reached nobody, to their previous places.
    pub(super) fn release_undelivered(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        unwanted: Vec<Delivery>,
    ) {
        let back = |delivery: Delivery| {
            let since = delivery.previous_eligible_time;
            let ended = EndedDelivery::Unsent { former_lease: delivery.former_lease };
            released(queue, delivery.receipt, since, ended)
        };
        self.roll_back_later(unwanted.into_iter().map(back).collect());
    }

    /// Rolls back the items of an answer whose caller has gone.
    pub(crate) async fn release_unanswered(self: &Arc<Self>, deliveries: Vec<Delivery>) {
        let Some(first) = deliveries.first() else { return };
        let queue = self.queues.get(&first.receipt.queue).await.unwrap_or_else(|_| {
            // The settings cannot be read now. The receipt alone says where the item belongs.
            let Receipt { queue, group, .. } = first.receipt.clone();
            Arc::new(Queue { group, ..Queue::with_defaults(queue, self.now()) })
        });
        self.release_undelivered(&queue, deliveries);
    }

    /// Rolls back the items of a stream that were never sent to it, to their previous places. The
    /// consumer may still settle the others.
    pub(super) fn release_unsent(self: &Arc<Self>, queue: &Arc<Queue>, held: Vec<InFlight>) {
        let unsent = held.into_iter().filter(|held| !held.is_sent());
        self.roll_back_later(unsent.map(|held| unsent_item(queue, held)).collect());
    }

    /// Does the same before it returns, if the store answers.
    pub(super) async fn return_unsent(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        held: Vec<InFlight>,
    ) -> Result<()> {
        let mut items: Vec<_> = held.into_iter().map(|held| unsent_item(queue, held)).collect();
        while !items.is_empty() {
            let batch = items[..items.len().min(MAX_BATCH)].to_vec();
            let count = batch.len();
            if let Err(error) = self.roll_back(batch).await {
                self.roll_back_later(items);
                return Err(error);
            }
            items.drain(..count);
        }
        Ok(())
    }

    /// Rolls back all items held by streams that the broker itself has ended.
    pub(super) fn release_held(self: &Arc<Self>, queue: &Arc<Queue>, held: Vec<InFlight>) {
        let now = self.now();
        let back = |held: InFlight| {
            if held.is_sent() {
                return released(queue, held.receipt, now, EndedDelivery::Withdrawn);
            }
            unsent_item(queue, held)
        };
        self.roll_back_later(held.into_iter().map(back).collect());
    }

    /// Handles the items that a stream held when it ended, as the stream requested. Items that were
    /// never sent are always released, and so are all items when the broker shuts down.
    pub(super) fn stream_ended(
        self: &Arc<Self>,
        opened: &Arc<Queue>,
        held: Vec<InFlight>,
        on_disconnect: OnDisconnect,
    ) {
        if held.is_empty() {
            return;
        }
        if self.is_draining() {
            return self.release_held(opened, held);
        }
        let (cause, delay, reason) = match on_disconnect {
            OnDisconnect::KeepLease => return self.release_unsent(opened, held),
            OnDisconnect::Release => (Cause::Disconnect, Some(Duration::ZERO), None),
            OnDisconnect::Count => (Cause::Rollback, None, Some(DISCONNECTED.to_owned())),
        };
        let (engine, opened) = (Arc::clone(self), Arc::clone(opened));
        self.tasks.spawn(async move {
            // The settings may have changed since the stream was opened. The current ones apply.
            let mut queue = engine.queues.get(&opened.name).await.unwrap_or(opened);
            let (sent, unsent): (Vec<_>, Vec<_>) = held.into_iter().partition(InFlight::is_sent);
            engine.release_unsent(&queue, unsent);
            // Determined once for all items, even if that fails.
            if sent.iter().any(|held| Self::needs_limit(&queue, &held.receipt, cause)) {
                queue = engine.with_known_limit(&queue).await.unwrap_or(queue);
            }
            let plan = |InFlight { receipt, .. }| {
                let held = Reservation { queue: Arc::clone(&queue), receipt };
                engine.plan_rollback(held, cause, delay, reason.clone())
            };
            engine.roll_back_later(sent.into_iter().map(plan).collect());
        });
    }

    /// Rolls back items in the background until that succeeds.
    fn roll_back_later(self: &Arc<Self>, batch: Vec<Rollback>) {
        if !batch.is_empty() && self.pending_rollbacks.add(batch) {
            self.tasks.spawn(essential("rollbacks", Arc::clone(self).keep_rolling_back()));
        }
    }

    async fn keep_rolling_back(self: Arc<Self>) {
        let mut failures = 0;
        loop {
            let batches = self.pending_rollbacks.next(failures > 0);
            if batches.is_empty() {
                return;
            }
            let items = batches.concat();
            let count = items.len();
            match self.roll_back(items).await {
                Ok(_) => {
                    if failures > 0 {
                        tracing::info!(items = count, "items were rolled back after all");
                    }
                    failures = 0;
                    continue;
                }
                Err(error) if failures == 0 => {
                    tracing::warn!(%error, items = count, "could not roll items back; trying again");
                }
                Err(error) => {
                    tracing::debug!(%error, items = count, "could not roll items back; trying again");
                }
            }
            let pause = BACKOFF.delay(failures);
            failures += 1;
            self.pending_rollbacks.add_again(batches);
            if self.stopping.is_cancelled() && failures >= LAST_TRIES {
                let items = self.pending_rollbacks.0.lock().items;
                tracing::warn!(
                    items,
                    "not rolled back: these are ready again when their leases end"
                );
                return;
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(pause) => {}
                () = self.stopping.cancelled(), if !self.stopping.is_cancelled() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ItemId, QueueName};

    /// At shutdown, everything that many streams hold is rolled back, in batches that a store can
    /// take.
    #[test]
    fn a_large_rollback_is_split_into_batches() {
        const ITEMS: usize = 120_500;
        let name = QueueName::parse("queue", "q").unwrap();
        let queue = Arc::new(Queue::with_defaults(name.clone(), Timestamp(0)));
        let receipt = Receipt {
            item: ItemId([1; 12]),
            token: crate::domain::LeaseToken([2; 12]),
            deliveries: 1,
            earlier_deliveries: 0,
            attempt: 1,
            keyed: false,
            queue: name,
            group: queue.group.clone(),
        };
        let back = PendingRollbacks::default();
        let batch = vec![released(&queue, receipt, Timestamp(0), EndedDelivery::Withdrawn); ITEMS];
        assert!(back.add(batch), "a task has to be started");
        let mut taken = 0;
        loop {
            let items: usize = back.next(false).iter().map(Vec::len).sum();
            if items == 0 {
                break;
            }
            assert!(items <= MAX_BATCH, "{items} in one call");
            taken += items;
        }
        assert_eq!(taken, ITEMS);
    }
}
