//! Consumers alone, on queues filled before.

use std::{sync::Arc, time::Instant};

use tokio::task::JoinSet;

use crate::{
    bench::{
        harness::{Bench, join, progress},
        measure::{figures::Window, report::Report, tracker::Tracker},
        workers::backlog_limit::BacklogLimit,
    },
    failure::Failure,
};

/// Fills the queues and measures how consumers empty them.
pub(super) async fn run(bench: &Bench) -> Result<Report, Failure> {
    let tracker = Arc::new(Tracker::new());
    let unmeasured = Window::none();
    let filling = bench.with(bench.settings.filling(bench.settings.items.unwrap_or(0)));
    let bar = progress("pushed");
    let producers = filling.produce(&tracker, &BacklogLimit::new(None), unmeasured, None);
    let filled = join(producers, unmeasured, || bar.set_position(tracker.count_pushed())).await?;
    bar.finish_and_clear();
    let window = Window { from: Instant::now(), to: None };
    let backlog = BacklogLimit::new(None);
    let servers = bench.processor_time(window);
    let mut figures = bench.consume_all(&tracker, &backlog, window, JoinSet::new()).await?;
    figures.server_seconds = servers.finish().await;
    figures.errors += filled.errors;
    Ok(figures.without_latencies().into_report(&bench.name, tracker.verdict()))
}
