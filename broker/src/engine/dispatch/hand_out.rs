//! What a reserve brought, to the consumers it is for.

use std::sync::Arc;

use super::Dispatcher;
use crate::{
    domain::{Delivery, Outcome, Queue, Totals},
    engine::{
        Engine, Result,
        consumers::{Claimant, Round},
    },
    store::{Reservation, Reserved},
};

/// Gives each consumer what it was dealt, and back to the queue what its consumer is no longer there for.
pub(super) async fn hand_out(
    engine: &Arc<Engine>,
    dispatcher: &Arc<Dispatcher>,
    queue: &Arc<Queue>,
    round: &Round,
    reserved: Reserved,
) -> Result<()> {
    let delivered = reserved.deliveries.len() as u64;
    if reserved.damaged > 0 {
        engine.metrics.damaged(&queue.name, reserved.damaged);
    }
    let Reserved { mut deliveries, at_limit, expired, .. } = reserved;
    let mut totals = Totals { delivered, expired, ..Totals::default() };
    engine.report_lapsed_at_limit(queue, at_limit);
    let mut unwanted = Vec::new();
    let mut failed = None;
    if round.claimants.iter().any(|claimant| claimant.auto_commit) {
        let committed =
            commit_at_once(engine, dispatcher, queue, round, &mut deliveries, &mut unwanted).await;
        match committed {
            Ok(committed) => {
                totals.popped = committed;
                totals.committed += committed;
            }
            Err(error) => failed = Some(error), // of these alone: the others are dealt theirs
        }
    }
    engine.count(&queue.name, &totals);
    let mut assigned: Vec<Vec<Delivery>> = round.claimants.iter().map(|_| Vec::new()).collect();
    for (claimant, delivery) in deliveries {
        assigned[claimant].push(delivery);
    }
    let now = engine.now();
    {
        let mut state = dispatcher.state.lock();
        for (claimant, deliveries) in round.claimants.iter().zip(assigned) {
            if deliveries.is_empty() {
                continue;
            }
            let back = state.consumers.hand(claimant.id, deliveries, now);
            // Items committed at once are gone from the store: nothing to give back if their claimant
            // has gone since.
            if !claimant.auto_commit {
                unwanted.extend(back);
            }
        }
    }
    engine.release_undelivered(queue, unwanted);
    failed.map_or(Ok(()), Err)
}

/// Commits what goes to claimants that want it so; keeps of that only what was there to commit. What is for
/// nobody any more is not committed, and goes to `unwanted`; so does all of it if the commit fails.
async fn commit_at_once(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    round: &Round,
    deliveries: &mut Vec<(usize, Delivery)>,
    unwanted: &mut Vec<Delivery>,
) -> Result<u64> {
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
        return Ok(0);
    }
    let outcomes = match engine.store.commit(held).await {
        Ok(outcomes) => outcomes,
        Err(error) => {
            // Whether it took effect is not known. What is still there is ready again.
            let theirs =
                deliveries.extract_if(.., |(claimant, _)| claimants[*claimant].auto_commit);
            unwanted.extend(theirs.map(|(_, delivery)| delivery));
            return Err(error.into());
        }
    };
    let mut outcomes = outcomes.into_iter();
    let mut committed = 0;
    deliveries.retain(|(claimant, _)| {
        if !claimants[*claimant].auto_commit {
            return true;
        }
        let ok = outcomes.next() == Some(Outcome::Ok);
        committed += u64::from(ok);
        ok
    });
    Ok(committed)
}
