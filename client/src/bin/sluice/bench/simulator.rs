//! The queue scenario of the MongoDB schema simulator: in each of 25 iterations of one second, 1,000 users publish
//! and 300 fetch one item each, spread evenly over the second whether or not the ones before are done.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate_client::{
    Client, NewItem,
    proto::{CommitRequest, DeleteQueueRequest, ReserveRequest},
};
use tokio::task::JoinSet;

use super::{
    Args,
    report::{Report, round},
    scenario::create,
};
use crate::{context::Context, failure::Failure};

const ITERATIONS: u32 = 25;
const PUBLISHERS: u32 = 1_000;
const FETCHERS: u32 = 300;

/// One user's act: how long it took, in milliseconds.
enum Act {
    Published(f64),
    Fetched(f64),
    Failed,
}

pub(super) async fn run(context: &Context, args: &Args) -> Result<Report, Failure> {
    let queue = format!("bench-{:08x}", rand::random::<u32>());
    let mut clients = Vec::new();
    for _ in 0..args.connections.unwrap_or(8).max(1) {
        clients.push(context.client().await?);
    }
    create(&clients[0], &queue).await?;
    let began = Instant::now();
    let mut users = JoinSet::new();
    for iteration in 0..ITERATIONS {
        let start = began + Duration::from_secs(1) * iteration;
        for user in 0..PUBLISHERS + FETCHERS {
            let client = clients[user as usize % clients.len()].clone();
            let (queue, size) = (queue.clone(), args.size as usize);
            if user < PUBLISHERS {
                let due = start + Duration::from_secs(1) * user / PUBLISHERS;
                users.spawn(publish(client, queue, size, due));
            } else {
                let due = start + Duration::from_secs(1) * (user - PUBLISHERS) / FETCHERS;
                users.spawn(fetch(client, queue, due));
            }
        }
    }
    let (mut published, mut fetched, mut errors) = (Vec::new(), Vec::new(), 0_u64);
    while let Some(act) = users.join_next().await {
        match act.map_err(std::io::Error::other)? {
            Act::Published(millis) => published.push(millis),
            Act::Fetched(millis) => fetched.push(millis),
            Act::Failed => errors += 1,
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let request = DeleteQueueRequest { name: queue, force: true };
    clients[0].admin_service().delete_queue(request).await?;
    let mut report = Report::new("simulator");
    report.put("items", published.len());
    report.put("seconds", round(seconds, 3));
    report.put("push_per_s", round(published.len() as f64 / seconds, 1));
    report.put("deliver_per_s", round(fetched.len() as f64 / seconds, 1));
    report.put("publish_ms", distribution(published));
    report.put("fetch_ms", distribution(fetched));
    report.put("errors", errors);
    Ok(report)
}

async fn publish(client: Client, queue: String, size: usize, due: Instant) -> Act {
    tokio::time::sleep_until(due.into()).await;
    // From the instant it was due: waiting for one's turn counts.
    match client.producer(queue).push(NewItem::new(vec![b'.'; size])).await {
        Ok(_) => Act::Published(due.elapsed().as_secs_f64() * 1_000.0),
        Err(_) => Act::Failed,
    }
}

async fn fetch(client: Client, queue: String, due: Instant) -> Act {
    tokio::time::sleep_until(due.into()).await;
    let mut stub = client.queue_service();
    let request = client.request(ReserveRequest { queue, max_items: 1, ..Default::default() });
    let Ok(answer) = stub.reserve(request).await else { return Act::Failed };
    let millis = due.elapsed().as_secs_f64() * 1_000.0;
    let receipts: Vec<String> =
        answer.into_inner().deliveries.into_iter().map(|delivery| delivery.receipt).collect();
    if !receipts.is_empty()
        && stub.commit(client.request(CommitRequest { receipts })).await.is_err()
    {
        return Act::Failed;
    }
    Act::Fetched(millis)
}

fn distribution(mut millis: Vec<f64>) -> Value {
    if millis.is_empty() {
        return Value::Null;
    }
    millis.sort_by(f64::total_cmp);
    let n = millis.len() as f64;
    let mean = millis.iter().sum::<f64>() / n;
    let variance = millis.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n;
    // The smallest value that at least this share does not exceed.
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
