//! What depth costs: the rate of taking from a deep queue, against that from one which producers just keep from running
//! dry. Both have the same load, one after the other.

use std::{sync::Arc, time::Duration};

use sluicegate_client::CancellationToken;

use super::{
    report::{Report, Window, round},
    room::Room,
    scenario::{Bench, join, progress},
    track::Track,
};
use crate::failure::Failure;

/// Far enough off for delayed items not to come.
const DELAY: Duration = Duration::from_hours(24);

pub(super) async fn run(bench: &Bench, name: &str, depth: u64) -> Result<Report, Failure> {
    // By `churn` both have the same past.
    let (deep, shallow) = (bench.on(&bench.queues[..1]), bench.on(&bench.queues[1..]));
    let (reference, mut verdict) = shallow.load().await?;
    let reference = reference.deliver_rate();

    let track = Arc::new(Track::new());
    let mut later = 0;
    let unmeasured = Window::none();
    let filling = deep.with(deep.settings.filling(depth));
    let unbound = Room::new(None);
    let mut errors = 0;
    for delay in [None, Some(DELAY)] {
        // The delayed ones are numbered apart: they do not come.
        let filled = if delay.is_some() { Arc::new(Track::new()) } else { track.clone() };
        let bar = progress(if delay.is_some() { "pushed, delayed" } else { "pushed" });
        let producers = filling.produce(&filled, &unbound, unmeasured, delay);
        let filled_up =
            join(producers, unmeasured, || bar.set_position(filled.count_pushed())).await?;
        bar.finish_and_clear();
        errors += filled_up.errors;
        if delay.is_some() {
            later = filled.count_pushed();
        }
    }

    let window = deep.window();
    let room = Room::new(deep.settings.backlog);
    let stop = CancellationToken::new();
    let consumers = deep.consume(&track, &room, window, &stop);
    // Its numbers go on where those of the filling end.
    let bar = progress("committed");
    let producers = deep.produce(&track, &room, window, None);
    let mut figures = join(producers, window, || {
        bar.set_position(track.count_committed());
    })
    .await?;
    bar.finish_and_clear();
    stop.cancel();
    figures.merge(&join(consumers, window, || {}).await?);
    figures.errors += errors;
    // Nobody can tell one item of the deep queue from another that was left there, but they can be counted.
    let left = deep.delete_queue(&deep.queues[0]).await?;
    verdict += track.verdict_with(left, later);
    let ratio = figures.deliver_rate() / reference.max(1e-9);
    let mut report = figures.untimed().into_report(name, verdict);
    report.put("depth", depth);
    report.put("almost_empty_deliver_per_s", round(reference, 1));
    report.put("ratio", round(ratio, 3));
    Ok(report)
}
