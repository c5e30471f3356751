//! Producers and consumers at once: what sets these scenarios apart are their defaults.

use crate::{
    bench::{harness::Bench, measure::report::Report},
    failure::Failure,
};

pub(super) async fn run(bench: &Bench) -> Result<Report, Failure> {
    let (figures, verdict) = bench.load().await?;
    Ok(figures.into_report(&bench.name, verdict))
}
