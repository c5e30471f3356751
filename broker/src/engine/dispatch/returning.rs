//! Rolls back what was reserved and is not wanted: what nobody takes of the stock, and what its consumer cannot receive. The next
//! reserve begins afterwards, so that a lone consumer receives items in their order.

use std::{sync::Arc, time::Duration};

use super::{Dispatcher, State};
use crate::{
    domain::{Delivery, Queue, Timestamp},
    engine::{Engine, Result, consumers::InFlight},
};

/// Longest time between two looks at a stock, whatever the clock of the store does.
const LOOK: Duration = Duration::from_millis(100);

impl State {
    /// Notes items whose consumers cannot receive them, and what is in stock, which is behind them, as to be rolled back.
    pub(super) fn give_back(&mut self, unwanted: &[Delivery], now: Timestamp) {
        if unwanted.is_empty() {
            return;
        }
        self.consumers.stock.withdraw(now);
        let unsent = unwanted.iter().map(|delivery| InFlight::unsent(delivery, now));
        self.consumers.stock.give_back(unsent.collect());
        self.dirty = true;
    }
}

impl Dispatcher {
    /// Returns items whose consumers cannot receive them, and what is in stock, which is behind them.
    pub(super) fn give_back(self: &Arc<Self>, engine: &Arc<Engine>, unwanted: &[Delivery]) {
        if unwanted.is_empty() {
            return;
        }
        self.state.lock().give_back(unwanted, engine.now());
        self.return_soon(engine);
    }

    /// Returns what is not wanted, in a task of its own until nothing is in stock: a reserve that hangs must not keep it.
    pub(super) fn return_soon(self: &Arc<Self>, engine: &Arc<Engine>) {
        {
            let mut state = self.state.lock();
            let is_empty = state.consumers.stock.next_unused().is_none();
            if is_empty || std::mem::replace(&mut state.consumers.stock.is_watched, true) {
                return;
            }
        }
        let (dispatcher, engine_) = (Arc::clone(self), Arc::clone(engine));
        engine.tasks.spawn(async move {
            while let Some(pause) = dispatcher.return_unused(&engine_).await {
                tokio::time::sleep(pause.min(LOOK)).await;
            }
        });
    }

    /// Rolls back what is not wanted. Returns for how long the rest may stay; `None` if there is no rest.
    async fn return_unused(&self, engine: &Arc<Engine>) -> Option<Duration> {
        let _returning = self.returning.lock().await;
        let now = engine.now();
        let (unused, next, queue) = {
            let mut state = self.state.lock();
            let unused = state.consumers.stock.take_unused(now);
            let next = state.consumers.stock.next_unused();
            state.consumers.stock.is_watched = next.is_some();
            (unused, next, state.queue.clone())
        };
        if let Some(queue) = queue.filter(|_| !unused.is_empty())
            && let Err(error) = engine.return_unsent(&queue, unused).await
        {
            tracing::debug!(queue = %self.queue, %error, "could not return items at once");
        }
        next.map(|next| now.until(next))
    }
}

/// Rolls back what has to be in the queue before the next reserve.
pub(super) async fn return_first(
    engine: &Arc<Engine>,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    now: Timestamp,
) -> Result<()> {
    let returning = dispatcher.take_returning(now);
    if !returning.is_empty() {
        engine.return_unsent(queue, returning).await?;
        dispatcher.state.lock().dirty = true;
    }
    Ok(())
}
