//! Pushes alone.

use std::sync::Arc;

use crate::{
    bench::{
        harness::{Bench, join, progress},
        measure::{report::Report, tracker::Tracker},
        workers::backlog_limit::BacklogLimit,
    },
    failure::Failure,
};

/// Measures pushes. Afterwards consumers check that every item was stored.
pub(super) async fn run(bench: &Bench) -> Result<Report, Failure> {
    let tracker = Arc::new(Tracker::new());
    let window = bench.window();
    let bar = progress("pushed");
    let servers = bench.processor_time(window);
    let producers = bench.produce(&tracker, &BacklogLimit::new(None), window, None);
    let mut figures = join(producers, window, || bar.set_position(tracker.count_pushed())).await?;
    bar.finish_and_clear();
    figures.server_seconds = servers.finish().await;
    figures.errors += bench.check(&tracker).await?;
    Ok(figures.into_report(&bench.name, tracker.verdict()))
}
