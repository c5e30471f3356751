//! `sluice queues`, `stats` and `watch`.

use serde_json::Value;
use sluicegate_client::{
    Client,
    proto::{
        BatchGetQueueStatsRequest, BatchGetQueueStatsResponse, GetQueueStatsRequest,
        ListQueuesRequest, Queue, QueueStats, WatchQueuesRequest,
    },
    tonic::Request,
};

use crate::{context::Context, failure::Failure, json, values};

/// Which queues to list; by default all.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Which {
    /// Only queues whose names begin with this text
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prefix: String,
    /// Only queues with this label; can be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = values::key_value)]
    labels: Vec<(String, String)>,
}

impl Which {
    /// Returns true if it leaves no queue out.
    pub(crate) fn is_all(&self) -> bool {
        self.prefix.is_empty() && self.labels.is_empty()
    }
}

/// The command line of `sluice stats`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatsArgs {
    /// The queues [default: all]
    #[arg(conflicts_with_all = ["prefix", "labels"])]
    queues: Vec<String>,
    #[command(flatten)]
    which: Which,
}

/// Number of queues of which the stats are asked for at once.
const STATS_AT_A_TIME: usize = 1_000;

/// The command line of `sluice watch`.
#[derive(Debug, clap::Args)]
pub(crate) struct WatchArgs {
    /// The queues [default: all]
    queues: Vec<String>,
    /// Exit after this many messages
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
}

const HEAD: &[&str] = &[
    "QUEUE",
    "READY",
    "DELAYED",
    "RESERVED",
    "BLOCKED",
    "PROCESSED",
    "OLDEST",
    "CONSUMERS",
    "PUSHED",
    "COMMITTED",
    "DEAD",
];

/// Reads the queues, page by page.
pub(crate) async fn list_queues(client: &Client, which: &Which) -> Result<Vec<Queue>, Failure> {
    let mut queues = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = client.request(ListQueuesRequest {
            page_size: 1_000,
            page_token,
            prefix: which.prefix.clone(),
            labels: which.labels.iter().cloned().collect(),
        });
        let page = client.admin_service().list_queues(request).await?.into_inner();
        queues.extend(page.queues);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(queues);
        }
    }
}

pub(crate) async fn queues(context: &Context, which: Which) -> Result<(), Failure> {
    let client = context.client().await?;
    let rows = list_queues(&client, &which).await?.into_iter().map(|queue| {
        let value = json::queue(&queue);
        let lease = queue.lease.as_ref().map(values::show_duration).unwrap_or_default();
        let paused = if queue.paused { "paused" } else { "" };
        let cells = vec![
            queue.name,
            queue.group,
            lease,
            queue.max_attempts.map(|limit| limit.to_string()).unwrap_or_default(),
            queue.dead_letter_queue,
            paused.to_owned(),
        ];
        (value, cells)
    });
    let head = ["QUEUE", "GROUP", "LEASE", "ATTEMPTS", "DEAD LETTERS", "STATE"];
    Ok(context.output.list(&head, rows.collect())?)
}

pub(crate) async fn stats(context: &Context, args: StatsArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let is_named = !args.queues.is_empty();
    let names: Vec<String> = if args.queues.is_empty() {
        let queues = list_queues(&client, &args.which).await?;
        queues.into_iter().map(|queue| queue.name).collect()
    } else {
        args.queues
    };
    let answer = batch(&client, &names).await?;
    if let Some(missing) = answer.missing.first().filter(|_| is_named) {
        let why = format!("queue {missing} does not exist");
        return Err(sluicegate_client::tonic::Status::not_found(why).into());
    }
    let rows = answer.stats.iter().map(row).collect();
    Ok(context.output.list(HEAD, rows)?)
}

/// Returns the stats of any number of queues, and which of them do not exist.
pub(crate) async fn batch(
    client: &Client,
    names: &[String],
) -> Result<BatchGetQueueStatsResponse, Failure> {
    let mut all = BatchGetQueueStatsResponse::default();
    for queues in names.chunks(STATS_AT_A_TIME) {
        let request = client.request(BatchGetQueueStatsRequest { queues: queues.to_vec() });
        let answer = client.admin_service().batch_get_queue_stats(request).await?.into_inner();
        all.stats.extend(answer.stats);
        all.missing.extend(answer.missing);
    }
    Ok(all)
}

/// Returns the stats of one queue.
pub(crate) async fn of_queue(client: &Client, queue: &str) -> Result<QueueStats, Failure> {
    let request = client.request(GetQueueStatsRequest { queue: queue.to_owned() });
    let answer = client.admin_service().get_queue_stats(request).await?.into_inner();
    Ok(answer.stats.unwrap_or_default())
}

pub(crate) async fn watch(context: &Context, args: WatchArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let request = Request::new(WatchQueuesRequest { queues: args.queues });
    let mut changes = client.admin_service().watch_queues(request).await?.into_inner();
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        let changed = tokio::select! {
            changed = changes.message() => changed?,
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let Some(changed) = changed else {
            return Err(sluicegate_client::tonic::Status::unavailable(
                "the broker ended the stream",
            )
            .into());
        };
        context.output.list(HEAD, changed.stats.iter().map(row).collect())?;
        left -= 1;
    }
    Ok(())
}

fn row(stats: &QueueStats) -> (Value, Vec<String>) {
    let cells = vec![
        stats.queue.clone(),
        stats.ready.to_string(),
        stats.delayed.to_string(),
        stats.reserved.to_string(),
        stats.blocked.to_string(),
        stats.processed.to_string(),
        stats.oldest_ready_age.as_ref().map(values::show_duration).unwrap_or_default(),
        stats.consumers_of_all_brokers.to_string(),
        stats.pushed.to_string(),
        stats.committed.to_string(),
        stats.dead_lettered.to_string(),
    ];
    (json::stats(stats), cells)
}
