//! The queue scenario of the MongoDB schema simulator: in each of 25 iterations of one second, 1,000 users publish
//! and 300 fetch one item each, spread evenly over the second whether or not the ones before are done.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sluicegate_client::{
    Client, NewItem,
    proto::{CommitRequest, Outcome, ReserveRequest},
};
use tokio::task::JoinSet;

use crate::{
    bench::{
        harness::{Bench, progress},
        measure::{
            figures::{Figures, Window},
            report::{Report, round},
            tracker::Tracker,
        },
    },
    failure::Failure,
};

const ITERATIONS: u32 = 25;
const PUBLISHERS: u32 = 1_000;
const FETCHERS: u32 = 300;

/// A user who publishes or fetches once, when that is due, whether or not earlier users are done.
struct User {
    client: Client,
    queue: String,
    tracker: Arc<Tracker>,
    size: usize,
    figures: Figures,
    due: Instant,
}

/// How long each user took, in milliseconds from when the action was due.
#[derive(Default)]
struct Times {
    publish: Vec<f64>,
    fetch: Vec<f64>,
}

pub(super) async fn run(bench: &Bench) -> Result<Report, Failure> {
    let tracker = Arc::new(Tracker::new());
    let window = Window { from: Instant::now(), to: None };
    let servers = bench.processor_time(window);
    let second = Duration::from_secs(1);
    let mut users = JoinSet::new();
    for iteration in 0..ITERATIONS {
        let start = window.from + second * iteration;
        for n in 0..PUBLISHERS + FETCHERS {
            let publishes = n < PUBLISHERS;
            let due = if publishes {
                start + second * n / PUBLISHERS
            } else {
                start + second * (n - PUBLISHERS) / FETCHERS
            };
            let (clients, queue) = (bench.push_clients.clone(), bench.queues[0].clone());
            let (tracker, size) = (tracker.clone(), bench.settings.size);
            users.spawn(async move {
                tokio::time::sleep_until(due.into()).await;
                let client = clients[n as usize % clients.len()].clone();
                let figures = Figures::new(window);
                let user = User { client, queue, tracker, size, figures, due };
                let figures = if publishes { user.publish().await } else { user.fetch().await };
                (publishes, figures)
            });
        }
    }
    let (mut figures, mut times) = (Figures::new(window), Times::default());
    let bar = progress("users done");
    while let Some(user) = users.join_next().await {
        bar.inc(1);
        let (publishes, act) = user.map_err(std::io::Error::other)?;
        match act {
            Ok((counted, millis)) => {
                figures.merge(&counted);
                if publishes { &mut times.publish } else { &mut times.fetch }.push(millis);
            }
            Err(error) => figures.failed(&*error),
        }
    }
    bar.finish_and_clear();
    figures.server_seconds = servers.finish().await;
    figures.errors += bench.check(&tracker).await?;
    let mut report = figures.into_report(&bench.name, tracker.verdict());
    report.put("publish_ms", distribution(times.publish));
    report.put("fetch_ms", distribution(times.fetch));
    Ok(report)
}

type Act = Result<(Figures, f64), Box<dyn std::error::Error + Send + Sync>>;

impl User {
    fn waited(&self) -> f64 {
        self.due.elapsed().as_secs_f64() * 1_000.0
    }

    async fn publish(mut self) -> Act {
        let numbers = self.tracker.next_numbers(1, u64::MAX);
        let payload = self.tracker.payload(numbers.start, self.due, self.size);
        self.client.producer(self.queue.clone()).push(NewItem::new(payload)).await?;
        let millis = self.waited();
        self.figures.pushed(1, Instant::now());
        self.tracker.acknowledged(numbers);
        Ok((self.figures, millis))
    }

    async fn fetch(mut self) -> Act {
        let mut stub = self.client.queue_service();
        let reserve =
            ReserveRequest { queue: self.queue.clone(), max_items: 1, ..Default::default() };
        let answer = stub.reserve(self.client.request(reserve)).await?.into_inner();
        let (now, millis) = (Instant::now(), self.waited());
        let payloads = answer.deliveries.iter().filter_map(|d| d.item.as_ref()).map(|i| &i.payload);
        self.figures.delivered(&self.tracker.delivered(payloads, now), now);
        let receipts: Vec<String> = answer.deliveries.into_iter().map(|d| d.receipt).collect();
        if !receipts.is_empty() {
            let commit = self.client.request(CommitRequest { receipts });
            let results = stub.commit(commit).await?.into_inner().results;
            let good = results.iter().filter(|r| r.outcome() == Outcome::Ok).count() as u64;
            self.figures.errors += results.len() as u64 - good;
            self.figures.committed(good, Instant::now());
            self.tracker.settled(good);
        }
        Ok((self.figures, millis))
    }
}

fn distribution(mut millis: Vec<f64>) -> Value {
    if millis.is_empty() {
        return Value::Null;
    }
    millis.sort_by(f64::total_cmp);
    let n = millis.len() as f64;
    let mean = millis.iter().sum::<f64>() / n;
    let variance = millis.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n;
    // The smallest value that at least this share of the values does not exceed.
    let at = |share: f64| millis[((n * share).ceil() as usize).clamp(1, millis.len()) - 1];
    json!({
        "mean": round(mean, 2),
        "standard_deviation": round(variance.sqrt(), 2),
        "p75": round(at(0.75), 2),
        "p95": round(at(0.95), 2),
        "p99": round(at(0.99), 2),
        "min": round(at(0.0), 2),
        "max": round(at(1.0), 2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let figures = distribution((1..=100).map(f64::from).collect());
        assert_eq!(
            (&figures["min"], &figures["p75"], &figures["p99"]),
            (&json!(1.0), &json!(75.0), &json!(99.0))
        );
        assert_eq!((&figures["max"], &figures["mean"]), (&json!(100.0), &json!(50.5)));
    }
}
