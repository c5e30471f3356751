//! The command line of `sluice bench`.

use std::time::Duration;

use clap::ValueEnum;

use crate::values;

const AFTER_HELP: &str = "\
Latency is counted from the instant at which an item was due to be pushed to its arrival at a consumer: with \
--rate, a broker that falls behind cannot hide it. Rates count what happened after the warm-up.

Without --rate, producers go as fast as consumers let them (except in push): they wait while --backlog items are pushed and \
not delivered, so that the rates of push and delivery are one. With --rate or --backlog 0 they do not wait.

Each run creates queues of its own, named bench-..., and deletes them at the end.

JSON keys: scenario, items, seconds, push_per_s, deliver_per_s, commit_per_s, p50_ms, p95_ms, p99_ms, max_ms, errors, \
exactly_once; and missing, doubled, server_cpu_s_per_100k with --server-pid, and what the scenario adds.";

/// The command line of `sluice bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// What to measure
    #[arg(value_enum)]
    pub(super) scenario: Scenario,
    /// Number of producers [default: by scenario]
    #[arg(long, value_name = "N")]
    pub(super) producers: Option<usize>,
    /// Number of consumers [default: by scenario]
    #[arg(long, value_name = "N")]
    pub(super) consumers: Option<usize>,
    /// Size of each payload, at least 16 bytes
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = payload_size)]
    pub(super) size: usize,
    /// Queues to spread producers and consumers over [default: 100 for crowd, else 1]
    #[arg(long, value_name = "N")]
    pub(super) queues: Option<usize>,
    /// Items per push, and per reserve of unary consumers [default: by scenario]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) batch: Option<u16>,
    /// Items a streaming consumer may hold [default: by scenario]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) in_flight: Option<u32>,
    /// Batches a streaming producer may have unanswered
    #[arg(long, value_name = "N", default_value = "8")]
    pub(super) batches_in_flight: usize,
    /// How producers push [default: by scenario]
    #[arg(long, value_enum)]
    pub(super) push: Option<Mode>,
    /// How consumers take and settle [default: by scenario]
    #[arg(long, value_enum)]
    pub(super) take: Option<Mode>,
    /// Push this many items per second in all [default: as fast as possible]
    #[arg(long, value_name = "N")]
    pub(super) rate: Option<f64>,
    /// Items pushed and not delivered at most; producers wait for room; 0: they run as far ahead as they get [default: 5000]
    #[arg(long, value_name = "N", conflicts_with = "rate")]
    pub(super) backlog: Option<u32>,
    /// How long to measure [default: by scenario]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub(super) duration: Option<Duration>,
    /// Push this many items instead of measuring for a time; for backlog: how many are ready and how many delayed
    #[arg(long, value_name = "N")]
    pub(super) items: Option<u64>,
    /// How long the load runs before it is measured
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = values::duration)]
    pub(super) warm_up: Duration,
    /// Push and consume this many items first, so that the queues have a history
    #[arg(long, value_name = "N", default_value = "0")]
    pub(super) churn: u64,
    /// Let the consumers wait at empty queues first, for this long
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub(super) idle: Option<Duration>,
    /// Connections to share [default: one per 50 producers or consumers]
    #[arg(long, value_name = "N")]
    pub(super) connections: Option<usize>,
    /// A local process of the server, for example the broker or its database; may be repeated. Reports their processor time
    #[arg(long, value_name = "PID")]
    pub(super) server_pid: Vec<u32>,
    /// Another broker on the same database, for the consumers
    #[arg(long, value_name = "URL")]
    pub(super) consume_server: Option<String>,
    /// For raw-mongo: the database to drive
    #[arg(
        long,
        value_name = "URI",
        env = "SLUICE_BENCH_MONGODB_URI",
        hide_env_values = true,
        default_value = "mongodb://127.0.0.1:27017"
    )]
    pub(super) mongodb: String,
}

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Scenario {
    /// Pushes alone
    Push,
    /// Consumers alone, on a queue filled before
    Drain,
    /// Producers and consumers at once
    Steady,
    /// Single items at a low rate, to an idle consumer
    Latency,
    /// Many producers of single items, few consumers
    Fanin,
    /// 1,000 consumers on 100 queues, at a low rate
    Crowd,
    /// Consumers on a queue with a million ready and a million delayed items, against an almost empty queue
    Backlog,
    /// The queue scenario of the MongoDB schema simulator: 25 seconds, 1,000 publishing and 300 fetching users each
    Simulator,
    /// The database alone, driven by batched insert, claim and delete: the limit (build with --features mongodb)
    RawMongo,
}

impl Scenario {
    /// The name on the command line and in the report.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// How to talk to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// One call after the other: Push; Reserve and Commit
    Unary,
    /// Many in flight: PushStream; ConsumeStream
    Stream,
}

/// Room for the number of the item and the instant at which it was due.
pub(super) const MIN_PAYLOAD: usize = 16;

fn payload_size(text: &str) -> Result<usize, String> {
    match values::size(text)? {
        size @ MIN_PAYLOAD.. => Ok(size),
        _ => Err(format!("a payload has at least {MIN_PAYLOAD} bytes")),
    }
}
