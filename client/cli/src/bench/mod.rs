//! `sluice bench`: measures a broker, and checks that every item arrived exactly once.
//!
//! # Layout
//! `args` is the command line, `scenarios` says what each scenario does, `harness` has the parts scenarios are made of,
//! `settings` their defaults and what overrides them, `workers` the producers and consumers, `measure` what is counted.

mod args;
mod harness;
mod measure;
mod scenarios;
mod settings;
mod workers;

pub(crate) use self::args::Args;
use self::scenarios::Plan;
use crate::{context::Context, failure::Failure};

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    let report = match scenarios::of(args.scenario) {
        Plan::Broker(defaults, measure) => harness::run(context, &args, &defaults, measure).await?,
        Plan::Database(measure) => measure(&args).await?,
    };
    Ok(report.show(context.output)?)
}
