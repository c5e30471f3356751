//! Producers and consumers at the same time. These scenarios differ only in their defaults.

use crate::{
    bench::{harness::Bench, measure::report::Report},
    failure::Failure,
};

pub(super) async fn run(bench: &Bench) -> Result<Report, Failure> {
    let (figures, verdict) = bench.load().await?;
    Ok(figures.into_report(&bench.name, verdict))
}
