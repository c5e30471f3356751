//! `sluice commit`, `rollback`, `extend`, `move` and `fork`: settling by receipt.

use std::{path::PathBuf, time::Duration};

use serde_json::json;
use sluicegate_client::{
    NewItem,
    proto::{
        CommitAndPushRequest, CommitRequest, ExtendRequest, MoveRequest, Outcome, PushEntry,
        RollbackItem, RollbackRequest, SettleResult,
    },
};

use crate::{context::Context, failure::Failure, json, push::read_file, values};

/// The command line of `sluice commit`.
#[derive(Debug, clap::Args)]
pub(crate) struct CommitArgs {
    /// Receipts, as `sluice reserve` prints them
    #[arg(required = true)]
    receipts: Vec<String>,
}

/// The command line of `sluice rollback`.
#[derive(Debug, clap::Args)]
pub(crate) struct RollbackArgs {
    /// Receipts, as `sluice reserve` prints them
    #[arg(required = true)]
    receipts: Vec<String>,
    /// Deliver them again after this long [default: by the queue's retry policy]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    delay: Option<Duration>,
    /// Why the attempt failed
    #[arg(long, default_value = "")]
    reason: String,
    /// Do not count this as a failed attempt
    #[arg(long)]
    keep_attempt: bool,
}

/// The command line of `sluice extend`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExtendArgs {
    /// Receipts, as `sluice reserve` prints them
    #[arg(required = true)]
    receipts: Vec<String>,
    /// The lease from now on [default: the queue's]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    lease: Option<Duration>,
}

/// The command line of `sluice move`.
#[derive(Debug, clap::Args)]
pub(crate) struct MoveArgs {
    /// Receipt, as `sluice reserve` prints it
    receipt: String,
    /// The queue to move it to, of the same group
    to_queue: String,
    /// The new payload [default: unchanged]
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    payload: Option<String>,
    /// A file with the new payload
    #[arg(long, short)]
    file: Option<PathBuf>,
    /// The new media type [default: unchanged]
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Adds or replaces a header; can be repeated
    #[arg(long = "header", short = 'H', value_name = "KEY=VALUE", value_parser = values::key_value)]
    headers: Vec<(String, String)>,
    /// The new priority, 0 to 9 [default: unchanged]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(i32).range(0..=9))]
    priority: Option<i32>,
    /// Deliver it there no earlier than this long from now
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    delay: Option<Duration>,
}

/// The command line of `sluice fork`.
#[derive(Debug, clap::Args)]
pub(crate) struct ForkArgs {
    /// Receipt, as `sluice reserve` prints it
    receipt: String,
    /// An item to push; can be repeated
    #[arg(long = "push", value_name = "QUEUE=TEXT", value_parser = values::key_value, required = true)]
    pushes: Vec<(String, String)>,
}

pub(crate) async fn commit(context: &Context, args: CommitArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let request = client.request(CommitRequest { receipts: args.receipts });
    let results = client.queue_service().commit(request).await?.into_inner().results;
    show(context, &results)
}

pub(crate) async fn rollback(context: &Context, args: RollbackArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let items = args.receipts.into_iter().map(|receipt| RollbackItem {
        receipt,
        delay: args.delay.map(values::to_proto),
        reason: args.reason.clone(),
        keep_attempt: args.keep_attempt,
        ..Default::default()
    });
    let request = client.request(RollbackRequest { items: items.collect() });
    let results = client.queue_service().rollback(request).await?.into_inner().results;
    show(context, &results)
}

pub(crate) async fn extend(context: &Context, args: ExtendArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let lease = args.lease.map(values::to_proto);
    let request = client.request(ExtendRequest { receipts: args.receipts, lease });
    let results = client.queue_service().extend(request).await?.into_inner().results;
    for result in &results {
        let outcome = json::outcome(result.outcome());
        let until = result.lease_expire_time.map(|time| time.to_string()).unwrap_or_default();
        let value =
            json!({ "receipt": result.receipt, "outcome": outcome, "lease_expire_time": until });
        context.output.one(&value, &format!("{}\t{outcome}\t{until}", result.receipt))?;
    }
    judge(results.iter().map(sluicegate_client::proto::ExtendResult::outcome))
}

pub(crate) async fn forward(context: &Context, args: MoveArgs) -> Result<(), Failure> {
    let payload = match (args.payload, args.file) {
        (Some(text), _) => Some(text.into()),
        (None, Some(path)) => Some(read_file(&path)?.into()),
        (None, None) => None,
    };
    let client = context.client().await?;
    let request = client.request(MoveRequest {
        receipt: args.receipt,
        to_queue: args.to_queue,
        payload,
        content_type: args.content_type,
        headers: args.headers.into_iter().collect(),
        priority: args.priority,
        delay: args.delay.map(values::to_proto),
    });
    let answer = client.queue_service().r#move(request).await?.into_inner();
    let outcome = json::outcome(answer.outcome());
    let value = json!({ "id": answer.id, "outcome": outcome });
    context.output.one(&value, &format!("{}\t{outcome}", answer.id))?;
    judge([answer.outcome()])
}

pub(crate) async fn fork(context: &Context, args: ForkArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let queues: Vec<String> = args.pushes.iter().map(|(queue, _)| queue.clone()).collect();
    let pushes = args
        .pushes
        .into_iter()
        .map(|(queue, text)| PushEntry { queue, item: Some(NewItem::new(text).into_proto()) });
    let request =
        client.request(CommitAndPushRequest { receipt: args.receipt, pushes: pushes.collect() });
    let answer = client.queue_service().commit_and_push(request).await?.into_inner();
    for (queue, result) in queues.iter().zip(&answer.results) {
        context
            .output
            .one(&json::push_result(queue, result), &format!("{}\t{queue}", result.id))?;
    }
    judge([answer.outcome()])
}

fn show(context: &Context, results: &[SettleResult]) -> Result<(), Failure> {
    for result in results {
        let outcome = json::outcome(result.outcome());
        let value = json!({ "receipt": result.receipt, "outcome": outcome });
        context.output.one(&value, &format!("{}\t{outcome}", result.receipt))?;
    }
    judge(results.iter().map(SettleResult::outcome))
}

/// Fails unless every item was settled; an item that was dead-lettered was settled as well.
fn judge(outcomes: impl IntoIterator<Item = Outcome>) -> Result<(), Failure> {
    let good = |outcome| matches!(outcome, Outcome::Ok | Outcome::DeadLettered);
    if outcomes.into_iter().all(good) { Ok(()) } else { Err(Failure::NotSettled) }
}
