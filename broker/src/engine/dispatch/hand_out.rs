//! Hands the items of a reserve to the consumers they are for.

use std::sync::Arc;

use super::Dispatcher;
use crate::{
    domain::{Delivery, Outcome, Queue, Totals},
    engine::{
        Engine, Result,
        consumers::{Claimant, Round, is_too_late},
    },
    store::{Reservation, Reserved},
};

/// Hands each consumer its items, and returns those that nobody can take any more. When they are back, the next reserve finds
/// them before later ones. So are those that were pushed behind a direct push which waits for the reserve. Returns true if others were returned, which are
/// ahead of such a push.
pub(super) async fn hand_out(
    engine: &Arc<Engine>,
    dispatcher: &Arc<Dispatcher>,
    queue: &Arc<Queue>,
    round: &Round,
    reserved: Reserved,
) -> Result<bool> {
    let delivered = reserved.deliveries.len() as u64;
    if reserved.damaged > 0 {
        engine.metrics.damaged(&queue.name, reserved.damaged);
    }
    let Reserved { mut deliveries, at_limit, expired, .. } = reserved;
    let mut totals = Totals { delivered, expired, ..Totals::default() };
    engine.report_lapsed_at_limit(queue, at_limit);
    let behind: Vec<_> = {
        let state = dispatcher.state.lock();
        deliveries.extract_if(.., |(_, found)| state.direct.is_behind(found.item.id)).collect()
    };
    let mut unwanted = Vec::new();
    let mut failed = None;
    if round.claimants.iter().any(|claimant| claimant.auto_commit) {
        let committed =
            commit_at_once(engine, dispatcher, queue, round, &mut deliveries, &mut unwanted).await;
        match committed {
            Ok(AtOnce { popped, expired }) => {
                totals.popped = popped;
                totals.committed += popped;
                totals.delivered -= expired;
                totals.expired += expired;
            }
            Err(error) => failed = Some(error), // the other consumers still receive their items
        }
    }
    engine.count(&queue.name, &totals);
    let now = engine.now();
    // The answer of the store may have been under way for most of a lease.
    let is_late = |(claimant, delivery): &mut (usize, Delivery)| {
        let lease = round.demands[*claimant].lease;
        !round.claimants[*claimant].auto_commit
            && is_too_late(now, lease, delivery.lease_expire_time)
    };
    unwanted.extend(deliveries.extract_if(.., is_late).map(|(_, delivery)| delivery));
    let mut counts = vec![0; round.claimants.len()];
    for (claimant, _) in &deliveries {
        counts[*claimant] += 1;
    }
    let mut assigned: Vec<Vec<Delivery>> = counts.into_iter().map(Vec::with_capacity).collect();
    for (claimant, delivery) in deliveries {
        assigned[claimant].push(delivery);
    }
    {
        let mut state = dispatcher.state.lock();
        for (claimant, deliveries) in round.claimants.iter().zip(assigned) {
            if deliveries.is_empty() {
                continue;
            }
            let back = state.consumers.hand_reserved(claimant, deliveries, now);
            // Auto-committed items are no longer in the store, so that there is nothing to roll
            // back if their consumer has gone since.
            if !claimant.auto_commit {
                unwanted.extend(back);
            }
        }
    }
    let some_return = !unwanted.is_empty();
    unwanted.extend(behind.into_iter().map(|(_, found)| found));
    dispatcher.give_back(engine, &unwanted);
    failed.map_or(Ok(some_return), Err)
}

/// What became of items that were committed before they are handed out.
struct AtOnce {
    /// Number of items that are handed out.
    popped: u64,
    /// Number of items that expired while their commit was under way, and reach nobody.
    expired: u64,
}

/// Commits the items of auto-commit consumers, and keeps those whose commit succeeded and that have not expired meanwhile. Items
/// whose consumer has gone are not committed and are moved to `unwanted`, as are all items if the commit fails.
async fn commit_at_once(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    round: &Round,
    deliveries: &mut Vec<(usize, Delivery)>,
    unwanted: &mut Vec<Delivery>,
) -> Result<AtOnce> {
    let claimants = &round.claimants;
    let is_gone: Vec<bool> = {
        let state = dispatcher.state.lock();
        let gone =
            |claimant: &Claimant| claimant.auto_commit && !state.consumers.is_there(claimant.id);
        claimants.iter().map(gone).collect()
    };
    unwanted.extend(deliveries.extract_if(.., |(claimant, _)| is_gone[*claimant]).map(|(_, d)| d));
    let held: Vec<Reservation> = deliveries
        .iter()
        .filter(|(claimant, _)| claimants[*claimant].auto_commit)
        .map(|(_, delivery)| Reservation {
            queue: Arc::clone(queue),
            receipt: delivery.receipt.clone(),
        })
        .collect();
    if held.is_empty() {
        return Ok(AtOnce { popped: 0, expired: 0 });
    }
    let outcomes = match engine.store.commit(held).await {
        Ok(outcomes) => outcomes,
        Err(error) => {
            // It is unknown whether the commit took effect. Items that still exist are made ready
            // again.
            let theirs =
                deliveries.extract_if(.., |(claimant, _)| claimants[*claimant].auto_commit);
            unwanted.extend(theirs.map(|(_, delivery)| delivery));
            return Err(error.into());
        }
    };
    let mut outcomes = outcomes.into_iter();
    let mut taken = AtOnce { popped: 0, expired: 0 };
    let now = engine.now();
    deliveries.retain(|(claimant, delivery)| {
        if !claimants[*claimant].auto_commit {
            return true;
        }
        let is_committed = outcomes.next() == Some(Outcome::Ok);
        // The commit may have taken long. What expired meanwhile counts as any other item that was found expired.
        let has_expired = is_committed && delivery.item.has_expired(now);
        taken.expired += u64::from(has_expired);
        taken.popped += u64::from(is_committed && !has_expired);
        is_committed && !has_expired
    });
    Ok(taken)
}
