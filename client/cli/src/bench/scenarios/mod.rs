//! What each scenario is. [`of`] is the one place where a scenario's name chooses defaults and a measurement.

mod backlog;
mod drain;
mod load;
mod push;
#[cfg(feature = "mongodb")]
mod raw_mongo;
mod simulator;

use std::time::Duration;

use futures_util::{FutureExt, future::BoxFuture};

use super::{
    args::{Args, Mode, Scenario},
    harness::Measure,
    measure::report::Report,
    settings::{Defaults, Items, Queues},
};
use crate::failure::Failure;

/// How a scenario is run.
pub(super) enum Plan {
    /// With producers and consumers on a broker.
    Broker(Defaults, Measure),
    /// Without a broker.
    Database(for<'a> fn(&'a Args) -> BoxFuture<'a, Result<Report, Failure>>),
}

/// Two streaming producers and two streaming consumers.
const STREAMS: Defaults = Defaults {
    producers: 2,
    consumers: 2,
    queues: Queues::Spread(1),
    batch: 500,
    in_flight: 2_000,
    push: Mode::Stream,
    take: Mode::Stream,
    rate: None,
    duration: Duration::from_secs(10),
    items: Items::Unlimited,
    bounded: true,
};

/// Producers of single items.
const SINGLES: Defaults = Defaults { batch: 1, push: Mode::Unary, ..STREAMS };

/// The backlog scenario's depth, in ready items, and as many delayed ones.
const DEPTH: u64 = 1_000_000;

/// Returns what a scenario does.
pub(super) fn of(scenario: Scenario) -> Plan {
    match scenario {
        Scenario::Push => Plan::Broker(Defaults { bounded: false, ..STREAMS }, |bench, _| {
            push::run(bench).boxed()
        }),
        Scenario::Drain => Plan::Broker(
            Defaults { items: Items::Fixed(200_000), bounded: false, ..STREAMS },
            |bench, _| drain::run(bench).boxed(),
        ),
        Scenario::Steady => Plan::Broker(STREAMS, |bench, _| load::run(bench).boxed()),
        Scenario::Latency => Plan::Broker(
            Defaults { producers: 1, consumers: 1, in_flight: 16, rate: Some(100.0), ..SINGLES },
            |bench, _| load::run(bench).boxed(),
        ),
        Scenario::Fanin => {
            Plan::Broker(Defaults { producers: 200, in_flight: 1_000, ..SINGLES }, |bench, _| {
                load::run(bench).boxed()
            })
        }
        Scenario::Crowd => Plan::Broker(
            Defaults {
                producers: 100,
                consumers: 1_000,
                queues: Queues::Spread(100),
                in_flight: 4,
                rate: Some(200.0),
                duration: Duration::from_secs(20),
                ..SINGLES
            },
            |bench, _| load::run(bench).boxed(),
        ),
        // One queue is deep, and another, almost empty one is for comparison.
        Scenario::Backlog => Plan::Broker(
            Defaults { queues: Queues::One { and_spare: 1 }, items: Items::Timed, ..STREAMS },
            |bench, args| backlog::run(bench, args.items.unwrap_or(DEPTH)).boxed(),
        ),
        // The users are tasks of the scenario; 400 producers stand for the eight connections that the users share.
        Scenario::Simulator => Plan::Broker(
            Defaults {
                producers: 400,
                queues: Queues::One { and_spare: 0 },
                in_flight: 1_000,
                bounded: false,
                ..SINGLES
            },
            |bench, _| simulator::run(bench).boxed(),
        ),
        #[cfg(feature = "mongodb")]
        Scenario::RawMongo => Plan::Database(|args| raw_mongo::run(args).boxed()),
        #[cfg(not(feature = "mongodb"))]
        Scenario::RawMongo => Plan::Database(|_| {
            let how = "raw-mongo needs `cargo build -p sluicegate-cli --features mongodb`";
            std::future::ready(Err(Failure::Usage(how.into()))).boxed()
        }),
    }
}
