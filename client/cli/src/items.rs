//! `sluice peek` and `sluice item`: single items.

use clap::{Subcommand, ValueEnum};
use sluicegate_client::proto::{
    DeleteItemRequest, GetItemRequest, Item, ItemState, ListItemsRequest,
};

use crate::{context::Context, failure::Failure, json, output::preview};

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

/// The command line of `sluice item`.
#[derive(Debug, Subcommand)]
pub(crate) enum ItemCommand {
    /// Show one item
    Get(ItemArgs),
    /// Delete one item, whatever its state
    Delete(ItemArgs),
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
    let state = match args.state {
        None => ItemState::Unspecified,
        Some(State::Ready) => ItemState::Ready,
        Some(State::Delayed) => ItemState::Delayed,
        Some(State::Reserved) => ItemState::Reserved,
        Some(State::Blocked) => ItemState::Blocked,
        Some(State::Processed) => ItemState::Processed,
    };
    let mut left = if args.limit == 0 { usize::MAX } else { args.limit };
    let mut page_token = String::new();
    let mut table = Vec::new();
    loop {
        let request = client.request(ListItemsRequest {
            queue: args.queue.clone(),
            state: state.into(),
            page_size: left.min(1_000) as i32,
            page_token,
        });
        let page = client.admin_service().list_items(request).await?.into_inner();
        for item in page.items.iter().take(left) {
            // JSON is printed page by page; a table needs all rows first for its widths.
            if context.output.is_json() {
                context.output.one(&json::item(item), "")?;
            } else {
                table.push((serde_json::Value::Null, row(item)));
            }
        }
        left = left.saturating_sub(page.items.len());
        page_token = page.next_page_token;
        if page_token.is_empty() || left == 0 {
            break;
        }
    }
    if !context.output.is_json() {
        context
            .output
            .list(&["ID", "STATE", "PRIORITY", "ATTEMPT", "ELIGIBLE", "PAYLOAD"], table)?;
    }
    Ok(())
}

fn row(item: &Item) -> Vec<String> {
    vec![
        item.id.clone(),
        json::state(item.state()),
        item.priority.to_string(),
        item.attempt.to_string(),
        item.eligible_time.as_ref().map(ToString::to_string).unwrap_or_default(),
        preview(&item.payload, 60),
    ]
}

pub(crate) async fn run(context: &Context, command: ItemCommand) -> Result<(), Failure> {
    let client = context.client().await?;
    let mut admin = client.admin_service();
    match command {
        ItemCommand::Get(ItemArgs { queue, id }) => {
            let request = client.request(GetItemRequest { queue, id });
            let item = admin.get_item(request).await?.into_inner().item.unwrap_or_default();
            context.output.object(&json::item(&item))?;
        }
        ItemCommand::Delete(ItemArgs { queue, id }) => {
            let value = serde_json::json!({ "deleted": id });
            let text = format!("{id} deleted");
            admin
                .delete_item(client.request(DeleteItemRequest { queue, id, ..Default::default() }))
                .await?;
            context.output.one(&value, &text)?;
        }
    }
    Ok(())
}
