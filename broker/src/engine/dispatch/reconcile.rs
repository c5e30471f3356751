//! Learns what happened on other brokers to the items that our streams hold.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Dispatcher, polls::Polls};
use crate::{
    domain::{Queue, Receipt, Timestamp},
    engine::{Engine, Result},
    store::Reservation,
};

/// Checks which reservations our streams no longer hold, if a signal of another broker or a timer
/// asks for it.
pub(super) async fn reconcile_if_due(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    polls: &mut Polls,
) -> Result<()> {
    let begun = Instant::now();
    if begun < dispatcher.next_reconcile(polls, engine.signals.healthy()) {
        return Ok(());
    }
    dispatcher.state.lock().reconcile = false;
    let reconciled = reconcile(engine, dispatcher, queue).await;
    match reconciled {
        Ok(()) => polls.reconciled(begun),
        Err(_) => dispatcher.state.lock().reconcile = true,
    }
    reconciled
}

/// Checks which items our streams no longer hold because they were settled on another broker, and
/// until when they hold the others.
async fn reconcile(engine: &Engine, dispatcher: &Dispatcher, queue: &Arc<Queue>) -> Result<()> {
    let receipts = dispatcher.state.lock().consumers.held();
    let ends = lease_ends(engine, queue, &receipts).await?;
    let void = receipts.iter().zip(&ends).filter(|(_, end)| end.is_none()).map(|(r, _)| r);
    dispatcher.found_void(void, engine.now());
    dispatcher.leases_end(&receipts, &ends);
    Ok(())
}

/// Asks the store for the ends of the leases that have ended as far as this broker knows: another
/// broker may have extended them. Until the store answers, they count as held.
pub(super) async fn confirm_lapses(
    engine: &Engine,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    now: Timestamp,
) -> Result<()> {
    let receipts = dispatcher.state.lock().consumers.lapsing(now);
    let ends = lease_ends(engine, queue, &receipts).await?;
    dispatcher.leases_end(&receipts, &ends);
    Ok(())
}

async fn lease_ends(
    engine: &Engine,
    queue: &Arc<Queue>,
    receipts: &[Receipt],
) -> Result<Vec<Option<Timestamp>>> {
    if receipts.is_empty() {
        return Ok(Vec::new());
    }
    let held = receipts
        .iter()
        .map(|receipt| Reservation { queue: Arc::clone(queue), receipt: receipt.clone() })
        .collect();
    Ok(engine.store.lease_ends(held).await?)
}
