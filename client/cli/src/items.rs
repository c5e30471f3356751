//! `sluice peek` and `sluice item`: single items.

use clap::{Subcommand, ValueEnum};
use sluicegate_client::{
    Client,
    proto::{
        DeleteItemRequest, DeleteItemsRequest, GetItemRequest, Item, ItemFilter, ItemState,
        ListItemsRequest, TimeRange, operation_work::Kind,
    },
};

use crate::{
    confirm::{self, Confirmation},
    context::Context,
    failure::Failure,
    json,
    operation::{self, Bounds, Mode},
    output::{self, preview},
    values,
};

/// The command line of `sluice peek`.
#[derive(Debug, clap::Args)]
pub(crate) struct PeekArgs {
    /// The queue
    queue: String,
    /// Only items in this state
    #[arg(long, short, value_enum)]
    state: Option<State>,
    /// At most this many items; 0: all
    #[arg(long, short = 'n', value_name = "N", default_value = "20")]
    limit: usize,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Conditions on items, all of which must hold.
#[derive(Debug, clap::Args)]
pub(crate) struct FilterArgs {
    /// Only items with this ordering key
    #[arg(long, value_name = "KEY", default_value = "", hide_default_value = true)]
    ordering_key: String,
    /// Only items with this dedup id
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true)]
    dedup_id: String,
    /// Only items with this header; can be repeated
    #[arg(long = "header", value_name = "KEY=VALUE", value_parser = values::key_value)]
    headers: Vec<(String, String)>,
    /// Only items whose last failure has this text in its reason
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    /// Only items dead-lettered from this queue
    #[arg(long, value_name = "QUEUE", default_value = "", hide_default_value = true)]
    origin: String,
    /// Only items pushed at this time or later
    #[arg(long, value_name = "TIME", value_parser = values::instant)]
    since: Option<prost_types::Timestamp>,
    /// Only items pushed before this time
    #[arg(long, value_name = "TIME", value_parser = values::instant)]
    until: Option<prost_types::Timestamp>,
    /// Only items with at least this many attempts
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    min_attempts: i32,
    /// Only items whose payload contains this text
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    contains: String,
}

impl FilterArgs {
    fn into_proto(self) -> ItemFilter {
        let range = self.since.is_some() || self.until.is_some();
        let range = range.then_some(TimeRange { start_time: self.since, end_time: self.until });
        ItemFilter {
            ordering_key: self.ordering_key,
            dedup_id: self.dedup_id,
            headers: self.headers.into_iter().collect(),
            reason_contains: self.reason,
            reason: None,
            origin_queue: self.origin,
            create_time: range,
            min_attempts: self.min_attempts,
            payload_contains: self.contains.into_bytes().into(),
        }
    }
}

/// The state of an item.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum State {
    /// Eligible now
    Ready,
    /// Eligible later
    Delayed,
    /// Leased to a consumer
    Reserved,
    /// Waiting for an earlier item of its key
    Blocked,
    /// Kept as history
    Processed,
}

impl State {
    fn into_proto(state: Option<Self>) -> ItemState {
        match state {
            None => ItemState::Unspecified,
            Some(Self::Ready) => ItemState::Ready,
            Some(Self::Delayed) => ItemState::Delayed,
            Some(Self::Reserved) => ItemState::Reserved,
            Some(Self::Blocked) => ItemState::Blocked,
            Some(Self::Processed) => ItemState::Processed,
        }
    }
}

/// The command line of `sluice item`.
#[derive(Debug, Subcommand)]
pub(crate) enum ItemCommand {
    /// Show one item
    Get(ItemArgs),
    /// Delete one item, whatever its state
    Delete {
        #[command(flatten)]
        item: ItemArgs,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Delete all items that meet some conditions
    DeleteAll(Box<DeleteAllArgs>),
}

/// The command line of `sluice item delete-all`.
#[derive(Debug, clap::Args)]
pub(crate) struct DeleteAllArgs {
    /// The queue
    queue: String,
    /// Only items in this state; without it also those that consumers hold
    #[arg(long, short, value_enum)]
    state: Option<State>,
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    bounds: Bounds,
    #[command(flatten)]
    mode: Mode,
    #[command(flatten)]
    confirmation: Confirmation,
}

/// Names an item.
#[derive(Debug, clap::Args)]
pub(crate) struct ItemArgs {
    /// The queue
    queue: String,
    /// The item's id
    id: String,
}

pub(crate) async fn peek(context: &Context, args: PeekArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let state = State::into_proto(args.state);
    let mut left = if args.limit == 0 { usize::MAX } else { args.limit };
    let mut page_token = String::new();
    let mut table: Vec<(serde_json::Value, Vec<String>)> = Vec::new();
    let mut has_reasons = false;
    let filter = Some(args.filter.into_proto());
    loop {
        let request = client.request(ListItemsRequest {
            queue: args.queue.clone(),
            state: state.into(),
            page_size: left.min(1_000) as i32,
            page_token,
            filter: filter.clone(),
        });
        let page = client.admin_service().list_items(request).await?.into_inner();
        for item in page.items.iter().take(left) {
            // JSON is printed page by page; a table needs all rows first for its widths.
            if context.output.is_json() {
                context.output.one(&json::item(item), "")?;
            } else {
                has_reasons |= !item.last_reason.is_empty();
                table.push((serde_json::Value::Null, row(context, item)));
            }
        }
        left = left.saturating_sub(page.items.len());
        page_token = page.next_page_token;
        if page_token.is_empty() || left == 0 {
            break;
        }
    }
    if !context.output.is_json() {
        let mut head = vec!["ID", "STATE", "PRIORITY", "ATTEMPT", "ELIGIBLE", "REASON", "PAYLOAD"];
        if !has_reasons {
            head.remove(REASON);
            for (_, cells) in &mut table {
                cells.remove(REASON);
            }
        }
        context.output.list(&head, table)?;
    }
    Ok(())
}

/// The place of the column that is there only if an attempt has failed.
const REASON: usize = 5;

fn row(context: &Context, item: &Item) -> Vec<String> {
    vec![
        item.id.clone(),
        json::state(item.state()),
        item.priority.to_string(),
        item.attempt.to_string(),
        context.output.time(item.eligible_time.as_ref()),
        preview(item.last_reason.as_bytes(), 60),
        preview(&item.payload, 60),
    ]
}

pub(crate) async fn run(context: &Context, command: ItemCommand) -> Result<(), Failure> {
    let is_asked = match &command {
        ItemCommand::Get(_) => false,
        ItemCommand::Delete { confirmation, .. } => confirmation.is_needed("item delete")?,
        ItemCommand::DeleteAll(args) => {
            !args.mode.dry_run && args.confirmation.is_needed("item delete-all")?
        }
    };
    let client = context.client().await?;
    let mut admin = client.admin_service();
    match command {
        ItemCommand::Get(ItemArgs { queue, id }) => {
            let request = client.request(GetItemRequest { queue, id });
            let item = admin.get_item(request).await?.into_inner().item.unwrap_or_default();
            context.output.object(&json::item(&item))?;
        }
        ItemCommand::Delete { item: ItemArgs { queue, id }, .. } => {
            if is_asked {
                let (queue, id) = (queue.clone(), id.clone());
                let request = client.request(GetItemRequest { queue: queue.clone(), id });
                let item = admin.get_item(request).await?.into_inner().item.unwrap_or_default();
                let (state, payload) = (json::state(item.state()), preview(&item.payload, 40));
                confirm::ask(&format!("Delete 1 {state} item of queue {queue}, {payload:?}?"))?;
            }
            let value = serde_json::json!({ "deleted": id });
            let text = format!("{id} deleted");
            admin
                .delete_item(client.request(DeleteItemRequest { queue, id, ..Default::default() }))
                .await?;
            context.output.one(&value, &text)?;
        }
        ItemCommand::DeleteAll(args) => delete_all(context, &client, *args, is_asked).await?,
    }
    Ok(())
}

async fn delete_all(
    context: &Context,
    client: &Client,
    args: DeleteAllArgs,
    is_asked: bool,
) -> Result<(), Failure> {
    let delete = Kind::Delete(DeleteItemsRequest {
        queue: args.queue.clone(),
        state: State::into_proto(args.state).into(),
        filter: Some(args.filter.into_proto()),
        max_items: args.bounds.max,
        rate: args.bounds.rate,
    });
    if is_asked {
        let items = output::items(operation::count(context, client, delete.clone()).await?);
        confirm::ask(&format!("Delete {items} of queue {}?", args.queue))?;
    }
    operation::run_work(context, client, delete, args.mode).await
}
