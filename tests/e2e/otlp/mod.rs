//! What brokers send to a collector of OpenTelemetry.

mod collector;
mod metrics;
mod traces;

use self::collector::Collector;
use crate::harness::Launch;

fn sending(launch: Launch, collector: &Collector) -> Launch {
    launch.flag("otlp-endpoint", &collector.endpoint())
}

/// Returns how many lines of a log say this.
fn lines(log: &str, said: &str) -> usize {
    log.lines().filter(|line| line.contains(said)).count()
}
