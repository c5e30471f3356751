//! What depth costs: the delivery rate of a deep queue beside that of a queue which producers only just keep from running
//! empty. Both get the same load, one after the other.

use std::{sync::Arc, time::Duration};

use sluicegate_client::CancellationToken;

use crate::{
    bench::{
        harness::{Bench, join, progress},
        measure::{
            figures::Window,
            report::{Report, round},
            tracker::Tracker,
        },
        workers::backlog_limit::BacklogLimit,
    },
    failure::Failure,
};

/// Long enough for no delayed item to become eligible during the run.
const DELAY: Duration = Duration::from_hours(24);

pub(super) async fn run(bench: &Bench, depth: u64) -> Result<Report, Failure> {
    // Both queues have the same history: --churn goes through both.
    let (deep, shallow) = (bench.on(&bench.queues[..1]), bench.on(&bench.queues[1..]));
    let (reference, mut verdict) = shallow.load().await?;
    let reference = reference.deliver_rate();

    let tracker = Arc::new(Tracker::new());
    let mut later = 0;
    let unmeasured = Window::none();
    let filling = deep.with(deep.settings.filling(depth));
    let no_limit = BacklogLimit::new(None);
    let mut errors = 0;
    for delay in [None, Some(DELAY)] {
        // Delayed items have a tracker of their own, as they do not arrive.
        let filled = if delay.is_some() { Arc::new(Tracker::new()) } else { tracker.clone() };
        let bar = progress(if delay.is_some() { "pushed, delayed" } else { "pushed" });
        let producers = filling.produce(&filled, &no_limit, unmeasured, delay);
        let filled_up =
            join(producers, unmeasured, || bar.set_position(filled.count_pushed())).await?;
        bar.finish_and_clear();
        errors += filled_up.errors;
        if delay.is_some() {
            later = filled.count_pushed();
        }
    }

    let window = deep.window();
    let backlog = BacklogLimit::new(deep.settings.backlog);
    let servers = deep.processor_time(window);
    let stop = CancellationToken::new();
    let consumers = deep.consume(&tracker, &backlog, window, &stop);
    // The numbers of the load follow those of the filling.
    let bar = progress("committed");
    let producers = deep.produce(&tracker, &backlog, window, None);
    let mut figures = join(producers, window, || {
        bar.set_position(tracker.count_committed());
    })
    .await?;
    bar.finish_and_clear();
    stop.cancel();
    figures.merge(&join(consumers, window, || {}).await?);
    figures.server_seconds = servers.finish().await;
    figures.errors += errors;
    // Items that are left in the deep queue are not read one by one, but they are counted.
    let left = deep.delete_queue(&deep.queues[0]).await?;
    verdict += tracker.verdict_with(left, later);
    let ratio = figures.deliver_rate() / reference.max(1e-9);
    let mut report = figures.without_latencies().into_report(&bench.name, verdict);
    report.put("depth", depth);
    report.put("almost_empty_deliver_per_s", round(reference, 1));
    report.put("ratio", round(ratio, 3));
    Ok(report)
}
