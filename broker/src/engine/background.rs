//! Background work, each part in a task owned by the engine.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{Engine, Gauges, Result, receipt_keys},
    signals::Notice,
};

/// How often gathered totals are added to those in the store.
const FLUSH: Duration = Duration::from_secs(1);
/// How often the version of the settings is compared, so that a pause takes effect everywhere
/// within a second.
const SETTINGS: Duration = Duration::from_millis(500);
/// How often the store is read for schedules created on other brokers.
const SCHEDULES: Duration = Duration::from_secs(5);

/// Starts all tasks. The engine owns them and ends them at shutdown.
pub(crate) fn start(engine: &Arc<Engine>) {
    let (tasks, stop) = (&engine.tasks, &engine.stopping);
    tasks.spawn(until(stop.clone(), receive(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), flush_totals(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), watch_settings(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), refresh_receipt_keys(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), keep_gauges(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), tick(Arc::clone(engine))));
    tasks.spawn(until(stop.clone(), receive_unblocked(Arc::clone(engine))));
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = task => {}
    }
}

/// Passes the signals of other brokers to the engine.
async fn receive(engine: Arc<Engine>) {
    let mut notices = engine.signals().subscribe();
    loop {
        match notices.recv().await {
            Ok(notice) => engine.receive(&notice),
            Err(RecvError::Lagged(_)) => engine.receive(&Notice::Missed),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Wakes the consumers of queues in which the store itself made items ready.
async fn receive_unblocked(engine: Arc<Engine>) {
    loop {
        for queue in engine.store().unblocked().await {
            engine.unblocked(&queue);
        }
    }
}

async fn flush_totals(engine: Arc<Engine>) {
    every(FLUSH, "could not write totals", || engine.flush_totals()).await;
}

async fn watch_settings(engine: Arc<Engine>) {
    every(SETTINGS, "could not read settings", || engine.refresh_settings()).await;
}

async fn refresh_receipt_keys(engine: Arc<Engine>) {
    every(receipt_keys::REFRESH, "could not read the keys of receipts", || {
        engine.refresh_receipt_keys()
    })
    .await;
}

/// Keeps the depth gauges up to date.
async fn keep_gauges(engine: Arc<Engine>) {
    let mut gauges = Gauges::default();
    loop {
        if let Err(error) = gauges.keep(&engine).await {
            tracing::debug!(%error, "could not refresh the gauges of depth");
        }
    }
}

/// Runs `errand` periodically. A failure is logged once, and again only after a success.
async fn every<F: Future<Output = Result<()>>>(
    period: Duration,
    complaint: &str,
    errand: impl Fn() -> F,
) {
    let mut failing = false;
    loop {
        tokio::time::sleep(period).await;
        match errand().await {
            Ok(()) => failing = false,
            Err(error) if failing => tracing::debug!(%error, complaint),
            Err(error) => {
                tracing::warn!(%error, complaint);
                failing = true;
            }
        }
    }
}

/// Pushes the items of schedules that are due.
async fn tick(engine: Arc<Engine>) {
    loop {
        let next = match engine.tick().await {
            Ok(next) => next,
            Err(error) => {
                tracing::debug!(%error, "could not read schedules");
                None
            }
        };
        let pause = next.map_or(SCHEDULES, |next| engine.now().until(next).min(SCHEDULES));
        tokio::select! {
            () = tokio::time::sleep(pause.max(Duration::from_millis(1))) => {}
            () = engine.schedules_changed() => {}
        }
    }
}
