//! What producers and consumers count.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde_json::json;

use super::{
    report::{Report, round},
    tracker::Verdict,
};

/// The span of time in which events are counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) from: Instant,
    /// `None`: the window ends with the last event.
    pub(crate) to: Option<Instant>,
}

impl Window {
    /// A window in which nothing is counted.
    pub(crate) fn none() -> Self {
        let now = Instant::now();
        Self { from: now, to: Some(now) }
    }
}

/// What one producer or consumer has counted inside the window. Errors are counted at any time.
#[derive(Debug, Clone)]
pub(crate) struct Figures {
    window: Window,
    pushed: u64,
    delivered: u64,
    committed: u64,
    pub(crate) errors: u64,
    last: Instant,
    latency: Histogram<u64>,
    /// Processor time of the servers inside the window, in seconds, if it is known.
    pub(crate) server_seconds: Option<f64>,
}

/// A histogram of latencies in microseconds, up to an hour, to three digits.
fn histogram() -> Histogram<u64> {
    // Cannot fail: the bounds are valid.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("valid bounds")
}

impl Figures {
    pub(crate) fn new(window: Window) -> Self {
        Self {
            window,
            pushed: 0,
            delivered: 0,
            committed: 0,
            errors: 0,
            last: window.from,
            latency: histogram(),
            server_seconds: None,
        }
    }

    fn counts(&mut self, now: Instant) -> bool {
        let counts = now >= self.window.from && self.window.to.is_none_or(|to| now < to);
        if counts {
            self.last = now;
        }
        counts
    }

    /// Counts an error, and logs the first one.
    pub(crate) fn failed(&mut self, error: &(dyn Error + 'static)) {
        self.errors += 1;
        if self.errors == 1 {
            tracing::warn!(%error, "the first error");
        }
    }

    pub(crate) fn pushed(&mut self, n: u64, now: Instant) {
        if self.counts(now) {
            self.pushed += n;
        }
    }

    pub(crate) fn delivered(&mut self, latencies: &[Duration], now: Instant) {
        if self.counts(now) {
            self.delivered += latencies.len() as u64;
            for latency in latencies {
                self.latency.saturating_record((latency.as_micros() as u64).max(1));
            }
        }
    }

    pub(crate) fn committed(&mut self, n: u64, now: Instant) {
        if self.counts(now) {
            self.committed += n;
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.pushed += other.pushed;
        self.delivered += other.delivered;
        self.committed += other.committed;
        self.errors += other.errors;
        self.last = self.last.max(other.last);
        // Cannot fail: both have the same bounds.
        self.latency.add(&other.latency).expect("equal bounds");
    }

    /// Drops the latencies, which mean nothing for items that were pushed long before.
    pub(crate) fn without_latencies(mut self) -> Self {
        self.latency.reset();
        self
    }

    fn seconds(&self) -> f64 {
        let to = self.window.to.unwrap_or(self.last);
        to.saturating_duration_since(self.window.from).as_secs_f64().max(1e-6)
    }

    /// Returns the deliveries per second.
    pub(crate) fn deliver_rate(&self) -> f64 {
        self.delivered as f64 / self.seconds()
    }

    /// Returns the figures that every scenario reports.
    pub(crate) fn into_report(self, scenario: &str, verdict: Verdict) -> Report {
        let seconds = self.seconds();
        let rate = |n: u64| round(n as f64 / seconds, 1);
        let mut report = Report::new(scenario);
        let items = self.pushed.max(self.delivered);
        report.put("items", items);
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
        if let Some(spent) = self.server_seconds {
            report.put("server_cpu_s_per_100k", round(spent * 1e5 / items.max(1) as f64, 3));
        }
        report
    }
}
