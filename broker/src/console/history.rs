//! The console's history of queues, in the store.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use sluicegate_console::{HistoryKeeper, PastFigures, TakeFigures};

use crate::store::{FiguresPlace, KeptFigures, QueueFigures, Store};

/// Figures are read so many times at a time. Each of them may be of 1,000 queues.
const PAGE: usize = 20;

/// Keeps the history in a store.
pub(crate) struct StoredHistory(pub(crate) Arc<dyn Store>);

impl HistoryKeeper for StoredHistory {
    fn keep(&self, step: u32, lasting: Duration, queues: Vec<PastFigures>) -> BoxFuture<'_, ()> {
        let place = FiguresPlace { time: self.0.now(), step, broker: self.0.broker_id() };
        let kept = KeptFigures { place, queues: queues.into_iter().map(kept).collect() };
        async move {
            if let Err(error) = self.0.keep_figures(&kept, lasting).await {
                tracing::debug!(%error, "could not keep the figures of queues");
            }
        }
        .boxed()
    }

    fn read<'a>(&'a self, take: &'a mut TakeFigures<'a>) -> BoxFuture<'a, bool> {
        async move {
            let mut after = None;
            loop {
                let page = match self.0.kept_figures(after, PAGE).await {
                    Ok(page) => page,
                    Err(error) => {
                        tracing::debug!(%error, "could not read the past figures of queues");
                        return false;
                    }
                };
                let Some(last) = page.last() else { return true };
                after = Some(last.place);
                let now = self.0.now();
                for KeptFigures { place, queues } in page {
                    let queues = queues.into_iter().map(past).collect();
                    take(place.time.until(now), place.step, queues);
                }
            }
        }
        .boxed()
    }
}

fn kept(figures: PastFigures) -> QueueFigures {
    let PastFigures { queue, ready, delayed, reserved, blocked, pushed, left } = figures;
    QueueFigures { queue, ready, delayed, reserved, blocked, pushed, left }
}

fn past(figures: QueueFigures) -> PastFigures {
    let QueueFigures { queue, ready, delayed, reserved, blocked, pushed, left } = figures;
    PastFigures { queue, ready, delayed, reserved, blocked, pushed, left }
}
