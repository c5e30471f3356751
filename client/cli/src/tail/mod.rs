//! `sluice tail`: items as they come into queues, without taking them.

mod sight;

use std::{
    collections::HashMap,
    fmt::Write as _,
    time::{Duration, Instant},
};

use prost_types::Timestamp;
use serde_json::json;
use sluicegate_client::{
    Client,
    proto::{
        GetBrokerRequest, Item, ItemFilter, ItemState, ListItemsRequest, QueueStats, TimeRange,
        WatchQueuesRequest,
    },
    tonic::{Code, Request, Status},
};

use self::sight::{Look, Sight, arrival};
use crate::{
    context::Context,
    failure::Failure,
    json,
    output::{self, harmless, preview},
};

const AFTER_HELP: &str = "\
The tail looks into a queue after the broker has said that something happened there, once a second at most. It takes nothing and changes \
nothing. An item that comes and goes between two looks is not seen, unless the queue keeps history (`retention`); how many these were is \
said on stderr, with --json on stdout. Of a queue with more than 1,000 items, items that were moved here are seen among the first 1,000 only, and new ones \
among the first 100,000.";

/// Items that are read without a condition.
const PAGE: i32 = 1_000;
/// The most calls that look for new items of a deep queue, each of which looks at 10,000 items.
const CALLS: usize = 10;
/// The states of items that are not history.
const UNSETTLED: [ItemState; 4] =
    [ItemState::Ready, ItemState::Delayed, ItemState::Reserved, ItemState::Blocked];

/// The command line of `sluice tail`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// The queues
    #[arg(required = true)]
    queues: Vec<String>,
    /// Exit after this many items
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// The queues and what was seen of them.
struct Tail<'a> {
    context: &'a Context,
    client: Client,
    sights: HashMap<String, Sight>,
    /// How many more items are shown.
    left: u64,
}

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    let client = context.client().await?;
    let answer = client.admin_service().get_broker(client.request(GetBrokerRequest {})).await?;
    let start =
        answer.into_inner().broker.and_then(|broker| broker.report_time).unwrap_or_default();
    let mut sights = HashMap::new();
    for queue in &args.queues {
        let first = look(&client, queue, start, 0).await?;
        sights.insert(queue.clone(), Sight::new(start, &first));
    }
    let request = Request::new(WatchQueuesRequest { queues: args.queues });
    let mut changes = client.admin_service().watch_queues(request).await?.into_inner();
    let mut tail = Tail { context, client, sights, left: args.count.unwrap_or(u64::MAX) };
    while tail.left > 0 {
        let changed = tokio::select! {
            changed = changes.message() => changed?,
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let Some(changed) = changed else {
            return Err(Status::unavailable("the broker ended the stream").into());
        };
        let begun = Instant::now();
        for stats in changed.stats {
            tail.look_into(&stats).await?;
        }
        // Deep queues take long to look into: no more than half of the time is spent on that.
        tokio::time::sleep(begun.elapsed().min(Duration::from_secs(10))).await;
    }
    Ok(())
}

impl Tail<'_> {
    async fn look_into(&mut self, stats: &QueueStats) -> Result<(), Failure> {
        let Some(sight) = self.sights.get_mut(&stats.queue) else { return Ok(()) };
        let found = look(&self.client, &stats.queue, sight.new_since(), stats.processed).await;
        let found = match found {
            Ok(found) => found,
            // Deleted meanwhile; a push may create it again.
            Err(status) if status.code() == Code::NotFound => Look::default(),
            Err(status) => return Err(status.into()),
        };
        for item in sight.new_items(found) {
            if self.left == 0 {
                return Ok(());
            }
            self.left -= 1;
            self.context.output.one(&json::item(&item), &line(&item))?;
        }
        let missed = sight.missed(stats.pushed);
        if missed > 0 && self.context.output.is_json() {
            let value = json!({ "queue": stats.queue, "passed_unseen": missed });
            self.context.output.one(&value, "")?;
        } else if missed > 0 {
            let queue = harmless(&stats.queue, false);
            eprintln!("sluice: {} passed through {queue} unseen", output::items(missed));
        }
        Ok(())
    }
}

/// Looks into a queue: at its first items, and if there are more, at those pushed since `since`.
async fn look(
    client: &Client,
    queue: &str,
    since: Timestamp,
    processed: i64,
) -> Result<Look, Status> {
    let (items, next) = page(client, queue, ItemState::Unspecified, None, String::new()).await?;
    let mut look = Look { items, is_complete: next.is_empty() };
    if look.is_complete {
        return Ok(look);
    }
    let create_time = Some(TimeRange { start_time: Some(since), end_time: None });
    let filter = ItemFilter { create_time, ..ItemFilter::default() };
    for state in UNSETTLED {
        let mut token = String::new();
        for _ in 0..CALLS {
            let (items, next) = page(client, queue, state, Some(filter.clone()), token).await?;
            look.items.extend(items);
            token = next;
            if token.is_empty() {
                break;
            }
        }
    }
    if processed > 0 {
        // The latest come first.
        let (items, _) = page(client, queue, ItemState::Processed, None, String::new()).await?;
        look.items.extend(items);
    }
    Ok(look)
}

async fn page(
    client: &Client,
    queue: &str,
    state: ItemState,
    filter: Option<ItemFilter>,
    page_token: String,
) -> Result<(Vec<Item>, String), Status> {
    let (queue, state) = (queue.to_owned(), state.into());
    let request = ListItemsRequest { queue, state, page_size: PAGE, page_token, filter };
    let page = client.admin_service().list_items(client.request(request)).await?.into_inner();
    Ok((page.items, page.next_page_token))
}

/// Returns an item as one line: when it came, where it is, and what is in it.
fn line(item: &Item) -> String {
    let time = arrival(item).as_ref().map(ToString::to_string).unwrap_or_default();
    let mut text = format!(
        "{time}  {}  {:<9}  {}  {}",
        harmless(&item.queue, false),
        json::state(item.state()),
        harmless(&item.id, false),
        preview(&item.payload, 100)
    );
    if !item.origin_queue.is_empty() {
        let (origin, reason) =
            (harmless(&item.origin_queue, false), harmless(&item.last_reason, false));
        let attempts = item.dead_letter_attempts;
        let _ = write!(text, "  from {origin} after {attempts} attempts: {reason}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_where_a_dead_letter_is_from_and_controls_no_terminal() {
        let item = Item {
            id: "id-1".to_owned(),
            queue: "orders.dead".to_owned(),
            state: ItemState::Ready.into(),
            payload: "apples\u{1b}[2J".into(),
            create_time: Some(Timestamp { seconds: 1, nanos: 0 }),
            dead_letter_time: Some(Timestamp { seconds: 2, nanos: 0 }),
            dead_letter_attempts: 25,
            origin_queue: "orders".to_owned(),
            last_reason: "no\u{9b}31m stock".to_owned(),
            ..Item::default()
        };
        assert_eq!(
            line(&item),
            "1970-01-01T00:00:02Z  orders.dead  ready      id-1  apples [2J  from orders after 25 attempts: no\\u{9b}31m stock"
        );
    }
}
