//! The settings of a run: the defaults of its scenario, overridden by the command line.

use std::time::Duration;

use super::args::{Args, Mode};

/// Most items pushed and not delivered, where producers go as fast as consumers let them.
const BACKLOG: u32 = 5_000;

/// What a scenario does where the command line says nothing.
#[derive(Debug, Clone)]
pub(super) struct Defaults {
    pub(super) producers: usize,
    pub(super) consumers: usize,
    pub(super) queues: Queues,
    pub(super) batch: u16,
    pub(super) in_flight: u32,
    pub(super) push: Mode,
    pub(super) take: Mode,
    /// Items per second in all; `None`: as fast as possible.
    pub(super) rate: Option<f64>,
    pub(super) duration: Duration,
    pub(super) items: Items,
    /// Whether producers wait while [`BACKLOG`] items are not delivered.
    pub(super) bounded: bool,
}

/// The queues over which producers and consumers are spread.
#[derive(Debug, Clone, Copy)]
pub(super) enum Queues {
    /// This many, unless --queues says otherwise.
    Spread(usize),
    /// One, whatever --queues says, and this many more for the scenario's own use.
    One { and_spare: usize },
}

/// When producers end.
#[derive(Debug, Clone, Copy)]
pub(super) enum Items {
    /// After --duration, or after --items if that is given.
    Unlimited,
    /// After this many items, or as --items says.
    Fixed(u64),
    /// After --duration; --items means something else.
    Timed,
}

/// The settings of a run.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) producers: usize,
    pub(super) consumers: usize,
    pub(super) queues: usize,
    /// Queues of this run over which no load is spread.
    pub(super) spare_queues: usize,
    pub(super) batch: u16,
    pub(super) in_flight: u32,
    pub(super) batches_in_flight: usize,
    pub(super) push: Mode,
    pub(super) take: Mode,
    pub(super) rate: Option<f64>,
    /// `None`: producers do not wait for consumers.
    pub(super) backlog: Option<u32>,
    /// `None`: until all items are committed.
    pub(super) duration: Option<Duration>,
    pub(super) items: Option<u64>,
    pub(super) warm_up: Duration,
    pub(super) size: usize,
    /// Processes whose processor time is reported.
    pub(super) servers: Vec<u32>,
}

/// Returns the bound of --backlog, which lets at least `batch` items pass; `None`: there is none.
pub(super) fn backlog(args: &Args, batch: u32) -> Option<u32> {
    match args.backlog.unwrap_or(BACKLOG) {
        0 => None,
        items => Some(items.max(batch)),
    }
}

impl Settings {
    pub(super) fn new(args: &Args, defaults: &Defaults) -> Self {
        let rate = args.rate.or(defaults.rate);
        let items = match defaults.items {
            Items::Unlimited => args.items,
            Items::Fixed(items) => Some(args.items.unwrap_or(items)),
            Items::Timed => None,
        };
        let (queues, spare_queues) = match defaults.queues {
            Queues::Spread(queues) => (args.queues.unwrap_or(queues).max(1), 0),
            Queues::One { and_spare } => (1, and_spare),
        };
        let batch = args.batch.unwrap_or(defaults.batch);
        let backlog =
            backlog(args, u32::from(batch)).filter(|_| defaults.bounded && rate.is_none());
        Self {
            producers: args.producers.unwrap_or(defaults.producers).max(queues),
            consumers: args.consumers.unwrap_or(defaults.consumers).max(queues),
            queues,
            spare_queues,
            batch,
            in_flight: args.in_flight.unwrap_or(defaults.in_flight),
            batches_in_flight: args.batches_in_flight.max(1),
            push: args.push.unwrap_or(defaults.push),
            take: args.take.unwrap_or(defaults.take),
            rate,
            backlog,
            duration: match items {
                Some(_) => None,
                None => Some(args.duration.unwrap_or(defaults.duration)),
            },
            items,
            warm_up: if items.is_some() { Duration::ZERO } else { args.warm_up },
            size: args.size,
            servers: args.server_pid.clone(),
        }
    }

    /// Returns settings of producers that put `items` into the queues in the quickest way.
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

    /// Returns settings of producers and consumers that get `items` through the queues in the quickest way.
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
