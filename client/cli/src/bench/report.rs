//! The figures of a run.

use std::{
    io,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::track::Verdict;
use crate::output::Output;

/// The time that counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub(super) from: Instant,
    /// None: until the last event.
    pub(super) to: Option<Instant>,
}

impl Window {
    /// Nothing counts.
    pub(super) fn none() -> Self {
        let now = Instant::now();
        Self { from: now, to: Some(now) }
    }
}

/// What one producer or consumer has counted, inside the window.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    window: Window,
    pushed: u64,
    delivered: u64,
    committed: u64,
    pub(super) errors: u64,
    last: Instant,
    latency: Histogram<u64>,
}

/// Microseconds up to an hour, three digits.
fn histogram() -> Histogram<u64> {
    // Proven: these bounds are valid.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("valid bounds")
}

impl Figures {
    pub(super) fn new(window: Window) -> Self {
        Self {
            window,
            pushed: 0,
            delivered: 0,
            committed: 0,
            errors: 0,
            last: window.from,
            latency: histogram(),
        }
    }

    fn counts(&mut self, now: Instant) -> bool {
        let counts = now >= self.window.from && self.window.to.is_none_or(|to| now < to);
        if counts {
            self.last = now;
        }
        counts
    }

    pub(super) fn pushed(&mut self, n: u64, now: Instant) {
        if self.counts(now) {
            self.pushed += n;
        }
    }

    pub(super) fn delivered(&mut self, latencies: &[Duration], now: Instant) {
        if self.counts(now) {
            self.delivered += latencies.len() as u64;
            for latency in latencies {
                self.latency.saturating_record((latency.as_micros() as u64).max(1));
            }
        }
    }

    pub(super) fn committed(&mut self, n: u64, now: Instant) {
        if self.counts(now) {
            self.committed += n;
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.pushed += other.pushed;
        self.delivered += other.delivered;
        self.committed += other.committed;
        self.errors += other.errors;
        self.last = self.last.max(other.last);
        // Proven: both have the same bounds.
        self.latency.add(&other.latency).expect("equal bounds");
    }

    /// Without latencies: its items were pushed long before.
    pub(super) fn untimed(mut self) -> Self {
        self.latency.reset();
        self
    }

    fn seconds(&self) -> f64 {
        let to = self.window.to.unwrap_or(self.last);
        to.saturating_duration_since(self.window.from).as_secs_f64().max(1e-6)
    }

    /// Deliveries per second.
    pub(super) fn deliver_rate(&self) -> f64 {
        self.delivered as f64 / self.seconds()
    }

    pub(super) fn into_report(self, scenario: &str, verdict: Verdict) -> Report {
        let seconds = self.seconds();
        let rate = |n: u64| round(n as f64 / seconds, 1);
        let mut report = Report::new(scenario);
        report.put("items", self.pushed.max(self.delivered));
        report.put("seconds", round(seconds, 3));
        report.put("push_per_s", rate(self.pushed));
        report.put("deliver_per_s", rate(self.delivered));
        report.put("commit_per_s", rate(self.committed));
        for (key, quantile) in
            [("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99), ("max_ms", 1.0)]
        {
            let value = (!self.latency.is_empty())
                .then(|| round(self.latency.value_at_quantile(quantile) as f64 / 1_000.0, 3));
            report.put(key, json!(value));
        }
        report.put("errors", self.errors);
        report.put("exactly_once", verdict.exactly_once());
        report.put("missing", verdict.missing);
        report.put("doubled", verdict.doubled);
        report
    }
}

pub(super) fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}

/// What a run answers.
#[derive(Debug)]
pub(super) struct Report(Map<String, Value>);

impl Report {
    pub(super) fn new(scenario: &str) -> Self {
        let mut report = Self(Map::new());
        report.put("scenario", scenario);
        report
    }

    pub(super) fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    pub(super) fn show(self, output: Output) -> io::Result<()> {
        output.object(&Value::Object(self.0))
    }
}
