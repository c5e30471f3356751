//! Frees the items of our streams that were settled on other brokers.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Dispatcher, polls::Polls};
use crate::{
    domain::Queue,
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

/// Checks which items our streams no longer hold because they were settled on another broker.
async fn reconcile(engine: &Engine, dispatcher: &Dispatcher, queue: &Arc<Queue>) -> Result<()> {
    let receipts = dispatcher.state.lock().consumers.held();
    if receipts.is_empty() {
        return Ok(());
    }
    let held = receipts
        .iter()
        .map(|receipt| Reservation { queue: Arc::clone(queue), receipt: receipt.clone() })
        .collect();
    let holds = engine.store.holds(held).await?;
    let void = receipts.iter().zip(holds).filter(|(_, holds)| !holds).map(|(r, _)| r);
    dispatcher.found_void(void, engine.now());
    Ok(())
}
