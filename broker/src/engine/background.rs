//! Background work, each part in a task owned by the engine.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::sync::broadcast::error::RecvError;

use crate::{
    engine::{Engine, Gauges, Result, operations, presence, receipt_keys},
    essential::essential,
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
    let run = |name, task: BoxFuture<'static, ()>| {
        let stop = engine.stopping.clone();
        engine.tasks.spawn(async move { stop.run_until_cancelled(essential(name, task)).await });
    };
    run("signals", receive(Arc::clone(engine)).boxed());
    run("totals", flush_totals(Arc::clone(engine)).boxed());
    run("settings", watch_settings(Arc::clone(engine)).boxed());
    run("receipt keys", refresh_receipt_keys(Arc::clone(engine)).boxed());
    run("gauges", keep_gauges(Arc::clone(engine)).boxed());
    run("schedules", tick(Arc::clone(engine)).boxed());
    run("operations", operations::run_operations(Arc::clone(engine)).boxed());
    run("old operations", clean_operations(Arc::clone(engine)).boxed());
    if let Some(period) = engine.unused_queues_period() {
        run("unused queues", delete_unused_queues(Arc::clone(engine), period).boxed());
    }
    if engine.store().capabilities().shared {
        run("report", report_presence(Arc::clone(engine)).boxed());
    }
    run("unsent items", Arc::clone(engine).bound_unsent().boxed());
    run("unblocked items", receive_unblocked(Arc::clone(engine)).boxed());
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

async fn delete_unused_queues(engine: Arc<Engine>, period: Duration) {
    every(period, "could not look for unused queues", || engine.delete_unused_queues()).await;
}

async fn clean_operations(engine: Arc<Engine>) {
    every(operations::CLEANING, "could not delete old operations", || engine.clean_operations())
        .await;
}

/// Tells the other brokers of this one and its consumers.
async fn report_presence(engine: Arc<Engine>) {
    every(presence::REPORT, "could not report this broker", || engine.report_presence()).await;
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
            biased;
            () = tokio::time::sleep(pause.max(Duration::from_millis(1))) => {}
            () = engine.schedules_changed() => {}
        }
    }
}
