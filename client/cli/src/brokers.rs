//! `sluice brokers` and `sluice consumers`.

use sluicegate_client::{
    Client,
    proto::{Broker, Consumer, ListBrokersRequest, ListConsumersRequest},
};

use crate::{context::Context, failure::Failure, json};

/// The command line of `sluice consumers`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConsumersArgs {
    /// Only consumers of this queue
    queue: Option<String>,
    /// Only consumers of the broker with this id
    #[arg(long, value_name = "ID")]
    broker: Option<String>,
}

pub(crate) async fn brokers(context: &Context) -> Result<(), Failure> {
    let client = context.client().await?;
    let request = client.request(ListBrokersRequest {});
    let answer = client.admin_service().list_brokers(request).await?.into_inner();
    let head = ["BROKER", "VERSION", "HOST", "ADDRESS", "STARTED", "CONSUMERS", "HEALTH"];
    let rows =
        answer.brokers.iter().map(|broker| (json::broker(broker), broker_row(context, broker)));
    Ok(context.output.list(&head, rows.collect())?)
}

fn broker_row(context: &Context, broker: &Broker) -> Vec<String> {
    let mut health = Vec::new();
    if broker.draining {
        health.push("shutting down");
    }
    if !broker.store_healthy {
        health.push("silent");
    }
    if !broker.signals_healthy {
        health.push("no signals");
    }
    if health.is_empty() {
        health.push("ok");
    }
    vec![
        broker.id.clone(),
        broker.version.clone(),
        broker.host.clone(),
        broker.address.clone(),
        context.output.time(broker.start_time.as_ref()),
        broker.consumers.to_string(),
        health.join(", "),
    ]
}

/// Reads the consumers page by page; of a queue or a broker if these are not empty.
pub(crate) async fn list_consumers(
    client: &Client,
    queue: &str,
    broker: &str,
) -> Result<Vec<Consumer>, Failure> {
    let (mut consumers, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = client.request(ListConsumersRequest {
            queue: queue.to_owned(),
            broker: broker.to_owned(),
            page_size: 1_000,
            page_token,
            ..ListConsumersRequest::default()
        });
        let page = client.admin_service().list_consumers(request).await?.into_inner();
        consumers.extend(page.consumers);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(consumers);
        }
    }
}

pub(crate) async fn consumers(context: &Context, args: ConsumersArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let (queue, broker) = (args.queue.unwrap_or_default(), args.broker.unwrap_or_default());
    let consumers = list_consumers(&client, &queue, &broker).await?;
    let rows = consumers.iter().map(|of| (json::consumer(of), consumer_row(context, of))).collect();
    let head = [
        "QUEUE",
        "NAME",
        "KIND",
        "PEER",
        "BROKER",
        "SINCE",
        "HOLDS",
        "OLDEST",
        "DELIVERED",
        "COMMITTED",
    ];
    Ok(context.output.list(&head, rows)?)
}

fn consumer_row(context: &Context, consumer: &Consumer) -> Vec<String> {
    vec![
        consumer.queue.clone(),
        consumer.name.clone(),
        json::consumer_kind(consumer.kind()),
        consumer.peer.clone(),
        consumer.broker.clone(),
        context.output.time(consumer.since.as_ref()),
        format!("{} of {}", consumer.in_flight, consumer.max_in_flight),
        context.output.time(consumer.oldest_since.as_ref()),
        consumer.delivered.to_string(),
        consumer.committed.to_string(),
    ]
}
