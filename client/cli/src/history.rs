//! `sluice redrive` and `sluice replay`: making items ready again.

use prost_types::Timestamp;
use serde_json::json;
use sluicegate_client::{
    proto::{
        ItemIds, RedriveFilter, RedriveItemsRequest, ReplayItemsRequest, TimeRange,
        operation_work::Kind, replay_items_request::Selection,
    },
    tonic::Request,
};

use crate::{
    context::Context,
    failure::Failure,
    operation::{self, Bounds, Mode},
    output, values,
};

/// The command line of `sluice redrive`; the conditions that are given must all hold.
#[derive(Debug, clap::Args)]
pub(crate) struct RedriveArgs {
    /// The dead-letter queue
    queue: String,
    /// Queue to move them to [default: for each the queue it came from]
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    /// Only this item; can be repeated
    #[arg(long = "id", value_name = "ID")]
    ids: Vec<String>,
    /// Only items that came from this queue
    #[arg(long, value_name = "QUEUE")]
    origin: Option<String>,
    /// Only items whose last reason contains this text
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Only items first pushed at or after this instant (2026-01-31T12:00:00Z)
    #[arg(long, value_name = "INSTANT", value_parser = values::instant)]
    since: Option<Timestamp>,
    /// Only items first pushed before this instant
    #[arg(long, value_name = "INSTANT", value_parser = values::instant)]
    until: Option<Timestamp>,
    #[command(flatten)]
    bounds: Bounds,
    #[command(flatten)]
    mode: Mode,
}

/// The command line of `sluice replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// The queue
    queue: String,
    /// This item; can be repeated
    #[arg(long = "id", value_name = "ID", conflicts_with_all = ["since", "until"])]
    ids: Vec<String>,
    /// Items committed at or after this instant (2026-01-31T12:00:00Z)
    #[arg(long, value_name = "INSTANT", value_parser = values::instant)]
    since: Option<Timestamp>,
    /// Items committed before this instant
    #[arg(long, value_name = "INSTANT", value_parser = values::instant)]
    until: Option<Timestamp>,
    /// All items in the history
    #[arg(long, conflicts_with_all = ["ids", "since", "until"])]
    all: bool,
    /// At most this many
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    max: i64,
    #[command(flatten)]
    mode: Mode,
}

fn range(start_time: Option<Timestamp>, end_time: Option<Timestamp>) -> Option<TimeRange> {
    (start_time.is_some() || end_time.is_some()).then_some(TimeRange { start_time, end_time })
}

pub(crate) async fn redrive(context: &Context, args: RedriveArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let filter = RedriveFilter {
        ids: args.ids,
        origin_queue: args.origin.unwrap_or_default(),
        reason_contains: args.reason.unwrap_or_default(),
        reason: None,
        create_time: range(args.since, args.until),
    };
    let redrive = RedriveItemsRequest {
        queue: args.queue,
        to_queue: args.to.unwrap_or_default(),
        filter: Some(filter),
        max_items: args.bounds.max,
        rate: args.bounds.rate,
    };
    if args.mode.is_operation() {
        return operation::run_work(context, &client, Kind::Redrive(redrive), args.mode).await;
    }
    // No time-out: how long the call takes depends on the rate.
    let request = Request::new(redrive);
    let items = client.admin_service().redrive_items(request).await?.into_inner().redriven_items;
    let value = json!({ "redriven_items": items });
    Ok(context.output.one(&value, &format!("{} moved back", output::items(items)))?)
}

pub(crate) async fn replay(context: &Context, args: ReplayArgs) -> Result<(), Failure> {
    let selection = if !args.ids.is_empty() {
        Selection::Ids(ItemIds { ids: args.ids })
    } else if let Some(range) = range(args.since, args.until) {
        Selection::ProcessTime(range)
    } else if args.all {
        Selection::ProcessTime(TimeRange::default())
    } else {
        return Err(Failure::Usage("say which items: --id, --since, --until or --all".into()));
    };
    let client = context.client().await?;
    let replay =
        ReplayItemsRequest { queue: args.queue, selection: Some(selection), max_items: args.max };
    if args.mode.is_operation() {
        return operation::run_work(context, &client, Kind::Replay(replay), args.mode).await;
    }
    let request = Request::new(replay);
    let items = client.admin_service().replay_items(request).await?.into_inner().replayed_items;
    let value = json!({ "replayed_items": items });
    Ok(context.output.one(&value, &format!("{} made ready again", output::items(items)))?)
}
