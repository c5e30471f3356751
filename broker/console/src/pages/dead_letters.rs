//! All dead letters, by where they come from and why.

use std::{
    cmp::Reverse,
    collections::HashMap,
    time::{Duration, Instant},
};

use axum::{Form as Body, extract::Query as Address, http::StatusCode};
use maud::{Markup, html};
use percent_encoding::percent_decode_str;
use prost_types::Timestamp;
use serde::{Deserialize, Serialize};
use sluicegate_proto::v1::{
    Item, ItemFilter, ItemState, ListItemsRequest, RedriveFilter, RedriveItemsRequest,
    operation_work::Kind,
};
use tonic::Status;

use super::{
    answer::{Answer, queue_address, shown},
    frame::{Form, Section, page},
    operations,
};
use crate::{api::Api, problem::Problem, text, visitor::Visitor};

/// Where the page is.
pub(super) const ADDRESS: &str = "/dead-letters";

/// The most items of one queue that the page reads.
const READ_OF_QUEUE: usize = 2_000;
/// The most items that the page reads.
const READ_IN_ALL: usize = 6_000;
/// How long the items of a group are counted before it is redriven.
const COUNTING: Duration = Duration::from_secs(2);
/// The size of a page of items.
const PAGE: i32 = 1_000;
/// Characters of a reason in the list.
const REASON: usize = 300;

/// Dead letters of one queue that came from the same queue for the same reason.
struct Group {
    queue: String,
    origin: String,
    reason: String,
    items: usize,
    /// The latest one.
    last: Option<Timestamp>,
    example: String,
}

impl Group {
    /// Returns a short name for addresses. Reasons are long and may hold anything.
    fn key(&self) -> String {
        format!("{:016x}", text::fingerprint(&format!("{}\0{}", self.origin, self.reason)))
    }
}

fn group(queue: &str, items: &[Item], groups: &mut Vec<Group>) {
    let mut known: HashMap<(&str, &str), usize> = HashMap::new();
    for item in items {
        let key = (item.origin_queue.as_str(), item.last_reason.as_str());
        let at = *known.entry(key).or_insert_with(|| {
            groups.push(Group {
                queue: queue.to_owned(),
                origin: item.origin_queue.clone(),
                reason: item.last_reason.clone(),
                items: 0,
                last: None,
                example: item.id.clone(),
            });
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.items += 1;
        let at = item.dead_letter_time;
        if at.map(|at| at.seconds) > group.last.map(|last| last.seconds) {
            (group.last, group.example) = (at, item.id.clone());
        }
    }
}

/// Reads the ready items of a queue, up to a limit. Reserved and delayed ones are on their way already.
async fn read(api: &Api, queue: &str, most: usize) -> Result<Vec<Item>, Status> {
    let mut items = Vec::new();
    let mut after = String::new();
    while items.len() < most {
        let size = PAGE.min((most - items.len()) as i32);
        let (page, next) = api.items(queue, ItemState::Ready, size, after).await?;
        // What the groups need. Payloads would fill the memory.
        items.extend(page.into_iter().map(|item| Item {
            payload: bytes::Bytes::new(),
            headers: HashMap::new(),
            ..item
        }));
        if next.is_empty() {
            break;
        }
        after = next;
    }
    Ok(items)
}

pub(super) async fn show(visitor: Visitor) -> Answer {
    let board = visitor.board();
    board.loaded().await?;
    let (api, mut groups) = (visitor.api(), Vec::new());
    let (mut in_all, mut read_items) = (0, 0);
    for row in board.dead_letter_queues() {
        let queue = &row.stats.queue;
        in_all += row.stats.ready;
        let most = READ_OF_QUEUE.min(READ_IN_ALL - read_items);
        if row.stats.ready == 0 || most == 0 {
            continue;
        }
        match read(&api, queue, most).await {
            Ok(items) => {
                read_items += items.len();
                group(queue, &items, &mut groups);
            }
            // Deleted a moment ago.
            Err(status) if status.code() == tonic::Code::NotFound => {}
            Err(status) => return Err(status.into()),
        }
    }
    groups.sort_by_key(|group| Reverse(group.items));
    let body = html! {
        div.heading { h1 { "Dead letters" } }
        @if groups.is_empty() {
            div.nothing { p { "There are no dead letters. An item becomes one when its last attempt has failed." } }
        } @else {
            p.quiet {
                (text::counted(in_all.max(read_items as i64), "item")) " that no attempt could finish, by origin and reason."
                @if (read_items as i64) < in_all { " The groups count the first " (text::count(read_items as i64)) "." }
            }
            (table(&visitor, &groups))
        }
    };
    Ok(shown(page(&visitor, "Dead letters", Section::DeadLetters, &body)))
}

fn table(visitor: &Visitor, groups: &[Group]) -> Markup {
    html! {
        table.groups {
            thead { tr {
                th scope="col" { "Came from" }
                th scope="col" { "Reason" }
                th.figure scope="col" { "Items" }
                th.middle scope="col" { "Latest" }
                th scope="col" { span.quiet { "Action" } }
            } }
            tbody { @for group in groups { tr {
                th scope="row" {
                    a.row href={ (queue_address(&group.queue)) } {
                        @if group.origin.is_empty() { (group.queue) } @else { (group.origin) }
                    }
                    @if !group.origin.is_empty() { br; small { "in " (group.queue) } }
                }
                td.payload {
                    a href={ (queue_address(&group.queue)) "/items/" (text::encode(&group.example)) } title="An example" {
                        @if group.reason.is_empty() { "no reason given" } @else { (text::preview(group.reason.as_bytes(), REASON)) }
                    }
                }
                td.figure { (text::count(group.items as i64)) }
                td.middle { (text::away(group.last.as_ref())) }
                td { div.row-actions {
                    @if visitor.rights(&group.queue).manage && !group.origin.is_empty() {
                        a.button href={ "/dead-letters/redrive?queue=" (text::encode(&group.queue)) "&group=" (group.key()) } data-dialog { "Redrive" }
                    }
                } }
            } } }
        }
    }
}

/// Names a group.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(super) struct Chosen {
    queue: String,
    group: String,
}

/// Returns the group, if it is among those that the page shows.
async fn find(api: &Api, chosen: &Chosen) -> Result<Group, Problem> {
    let items = read(api, &chosen.queue, READ_OF_QUEUE).await?;
    let mut groups = Vec::new();
    group(&chosen.queue, &items, &mut groups);
    let found = groups.into_iter().find(|group| group.key() == chosen.group);
    found.ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "There are no such dead letters any more.")
    })
}

/// Returns how many items the group has in all its queue, and whether there may be more: a deep queue is not read to its end.
async fn count(api: &Api, group: &Group) -> Result<(i64, bool), Status> {
    let filter = ItemFilter {
        origin_queue: group.origin.clone(),
        reason: Some(group.reason.clone()),
        ..ItemFilter::default()
    };
    let (begun, mut items, mut page_token) = (Instant::now(), 0, String::new());
    loop {
        let request = ListItemsRequest {
            queue: group.queue.clone(),
            state: ItemState::Ready.into(),
            page_size: PAGE,
            page_token,
            filter: Some(filter.clone()),
        };
        let page = api.admin.clone().list_items(request).await?.into_inner();
        items += page.items.len() as i64;
        page_token = page.next_page_token;
        if page_token.is_empty() || begun.elapsed() > COUNTING {
            return Ok((items, !page_token.is_empty()));
        }
    }
}

pub(super) async fn form(visitor: Visitor, Address(chosen): Address<Chosen>) -> Answer {
    let api = visitor.api();
    let group = find(&api, &chosen).await?;
    let (items, is_more) = count(&api, &group).await?;
    let items = text::counted(items, "item");
    let button = if is_more { "Redrive all".to_owned() } else { format!("Redrive {items}") };
    let form = Form {
        title: "Redrive dead letters",
        text: html! {
            p { "Moves " @if is_more { "at least " } strong { (items) } " back to " strong { (group.origin) } ", with new attempts." }
            p.quiet { @if group.reason.is_empty() { "No reason was given." } @else { (text::preview(group.reason.as_bytes(), REASON)) } }
            input type="hidden" name="queue" value=(group.queue);
            input type="hidden" name="origin" value=(group.origin);
            // Encoded: browsers change the line breaks of what they send.
            input type="hidden" name="reason" value=(text::encode(&group.reason));
            (operations::once())
        },
        fields: html! {},
        action: "/dead-letters/redrive",
        button: &button,
        is_danger: false,
        back: ADDRESS,
    };
    Ok(shown(form.page(&visitor, Section::DeadLetters, None)))
}

/// What the form sends.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Redrive {
    queue: String,
    origin: String,
    /// As [`text::encode`] writes it.
    reason: String,
    request_id: String,
}

/// Moves the whole group back, however large it is and whatever part of it the page has read.
pub(super) async fn redrive(visitor: Visitor, Body(asked): Body<Redrive>) -> Answer {
    if asked.origin.is_empty() {
        return Err(Problem::field("origin", "must not be empty")); // that would be any
    }
    let reason = percent_decode_str(&asked.reason).decode_utf8_lossy().into_owned();
    let filter = RedriveFilter {
        origin_queue: asked.origin,
        reason: Some(reason),
        ..RedriveFilter::default()
    };
    let redrive = RedriveItemsRequest {
        queue: asked.queue,
        filter: Some(filter),
        ..RedriveItemsRequest::default()
    };
    operations::start(&visitor, Kind::Redrive(redrive), asked.request_id).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_grouped_by_origin_and_reason() {
        let item = |id: &str, origin: &str, reason: &str, seconds| Item {
            id: id.to_owned(),
            origin_queue: origin.to_owned(),
            last_reason: reason.to_owned(),
            dead_letter_time: Some(Timestamp { seconds, nanos: 0 }),
            ..Item::default()
        };
        let items = [
            item("1", "a", "time-out", 5),
            item("2", "a", "refused", 6),
            item("3", "a", "time-out", 9),
            item("4", "b", "time-out", 1),
        ];
        let mut groups = Vec::new();
        group("a.dead", &items, &mut groups);
        let shown: Vec<_> =
            groups.iter().map(|group| (group.items, group.example.as_str())).collect();
        assert_eq!(shown, [(2, "3"), (1, "2"), (1, "4")]);
        assert_ne!(groups[0].key(), groups[2].key());
    }
}
