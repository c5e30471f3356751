//! Returns what was reserved ahead of consumers and is not wanted.

use std::{sync::Arc, time::Duration};

use super::Dispatcher;
use crate::{
    domain::{Queue, Timestamp},
    engine::{Engine, Result},
};

/// Longest time between two looks at a stock, whatever the clock of the store does.
const LOOK: Duration = Duration::from_millis(100);

impl Dispatcher {
    /// Returns what nobody takes, and what is withdrawn, in a task of its own until nothing is in stock: a reserve that hangs
    /// must not keep it.
    pub(super) fn watch_stock(self: &Arc<Self>, engine: &Arc<Engine>) {
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

/// Rolls back what was withdrawn from the stock, and what is in stock if it hides items from consumers that it does not suit, before
/// they are looked for.
pub(super) async fn return_hiding(
    engine: &Arc<Engine>,
    dispatcher: &Dispatcher,
    queue: &Arc<Queue>,
    now: Timestamp,
) -> Result<()> {
    let hiding = dispatcher.take_hiding(now);
    if !hiding.is_empty() {
        engine.return_unsent(queue, hiding).await?;
        dispatcher.state.lock().dirty = true;
    }
    Ok(())
}
