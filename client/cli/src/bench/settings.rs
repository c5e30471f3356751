//! What a scenario does if nothing else is said.

use std::time::Duration;

use super::{Args, Mode, Scenario};

/// Items pushed and not delivered, at most, where producers go as fast as consumers let them.
pub(super) const BACKLOG: u32 = 5_000;

/// A scenario's defaults, overruled by what is given.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) producers: usize,
    pub(super) consumers: usize,
    pub(super) queues: usize,
    pub(super) batch: u16,
    pub(super) in_flight: u32,
    pub(super) batches_in_flight: usize,
    pub(super) push: Mode,
    pub(super) take: Mode,
    pub(super) rate: Option<f64>,
    /// None: producers wait for nobody.
    pub(super) backlog: Option<u32>,
    /// None: until all items are through.
    pub(super) duration: Option<Duration>,
    pub(super) items: Option<u64>,
    pub(super) warm_up: Duration,
    pub(super) size: usize,
}

impl Settings {
    pub(super) fn new(args: &Args) -> Self {
        use Mode::{Stream, Unary};
        let (producers, consumers, batch, in_flight, push, take) = match args.scenario {
            Scenario::Latency => (1, 1, 1, 16, Unary, Stream),
            Scenario::Fanin => (200, 2, 1, 1_000, Unary, Stream),
            Scenario::Crowd => (100, 1_000, 1, 4, Unary, Stream),
            // Its users are its own; these are the connections they share, eight.
            Scenario::Simulator => (400, 2, 1, 1_000, Unary, Stream),
            _ => (2, 2, 500, 2_000, Stream, Stream),
        };
        let (rate, seconds) = match args.scenario {
            Scenario::Latency => (Some(100.0), 10),
            Scenario::Crowd => (Some(200.0), 20),
            _ => (None, 10),
        };
        let rate = args.rate.or(rate);
        let items = match args.scenario {
            Scenario::Drain => Some(args.items.unwrap_or(200_000)),
            Scenario::Backlog => None, // --items is its depth
            _ => args.items,
        };
        let queues = match args.scenario {
            Scenario::Crowd => args.queues.unwrap_or(100),
            Scenario::Backlog | Scenario::Simulator => 1,
            _ => args.queues.unwrap_or(1),
        }
        .max(1);
        let batch = args.batch.unwrap_or(batch);
        let backlog = match args.scenario {
            Scenario::Push | Scenario::Drain | Scenario::Simulator => None,
            _ if rate.is_some() => None,
            _ => Some(args.backlog.unwrap_or(BACKLOG).max(u32::from(batch))),
        };
        Self {
            producers: args.producers.unwrap_or(producers).max(queues),
            consumers: args.consumers.unwrap_or(consumers).max(queues),
            queues,
            batch,
            in_flight: args.in_flight.unwrap_or(in_flight),
            batches_in_flight: args.batches_in_flight.max(1),
            push: args.push.unwrap_or(push),
            take: args.take.unwrap_or(take),
            rate,
            backlog,
            duration: match items {
                Some(_) => None,
                None => Some(args.duration.unwrap_or(Duration::from_secs(seconds))),
            },
            items,
            warm_up: if items.is_some() { Duration::ZERO } else { args.warm_up },
            size: args.size as usize,
        }
    }

    /// Producers that put `items` into the queues in the quickest way.
    pub(super) fn filling(&self, items: u64) -> Self {
        Self {
            producers: self.queues.max(2),
            batch: 500,
            push: Mode::Stream,
            rate: None,
            backlog: None,
            duration: None,
            items: Some(items),
            warm_up: Duration::ZERO,
            ..self.clone()
        }
    }

    /// Producers and consumers that get `items` through the queues in the quickest way.
    pub(super) fn churning(&self, items: u64) -> Self {
        Self {
            consumers: self.queues.max(2),
            in_flight: 2_000,
            take: Mode::Stream,
            backlog: Some(BACKLOG),
            ..self.filling(items)
        }
    }
}
