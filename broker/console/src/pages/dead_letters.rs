//! All dead letters, by where they come from and why.

use std::{cmp::Reverse, collections::HashMap};

use axum::{Form as Body, extract::Query as Address, http::StatusCode};
use maud::{Markup, html};
use prost_types::Timestamp;
use serde::{Deserialize, Serialize};
use sluicegate_proto::v1::{Item, ItemState, RedriveFilter, RedriveItemsRequest};
use tonic::Status;

use super::{
    answer::{Answer, done, queue_address, shown},
    frame::{Form, Section, page},
    operations,
};
use crate::{
    api::Api,
    operation::{Name, Progress},
    problem::Problem,
    text,
    visitor::Visitor,
};

/// The most items of one queue that the page reads.
const READ_OF_QUEUE: usize = 2_000;
/// The most items that the page reads.
const READ_IN_ALL: usize = 6_000;
/// The most items that are redriven by one action.
const MOST: usize = 100_000;
/// The most ids of one call.
const IDS: usize = 1_000;
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
    fn includes(&self, item: &Item) -> bool {
        self.origin == item.origin_queue && self.reason == item.last_reason
    }

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
        let size = (most - items.len()).min(IDS) as i32;
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

/// Returns the group as it is now, and the ids of its items.
async fn find(api: &Api, chosen: &Chosen) -> Result<(Group, Vec<String>), Problem> {
    let items = read(api, &chosen.queue, MOST).await?;
    let mut groups = Vec::new();
    group(&chosen.queue, &items, &mut groups);
    let found = groups.into_iter().find(|group| group.key() == chosen.group);
    let found = found.ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "There are no such dead letters any more.")
    })?;
    let ids =
        items.iter().filter(|item| found.includes(item)).map(|item| item.id.clone()).collect();
    Ok((found, ids))
}

pub(super) async fn form(visitor: Visitor, Address(chosen): Address<Chosen>) -> Answer {
    let (group, ids) = find(&visitor.api(), &chosen).await?;
    let items = text::counted(ids.len() as i64, "item");
    let button = format!("Redrive {items}");
    let form = Form {
        title: "Redrive dead letters",
        text: html! {
            p { "Moves " strong { (items) } " back to " strong { (group.origin) } ", with new attempts." }
            p.quiet { @if group.reason.is_empty() { "No reason was given." } @else { (text::preview(group.reason.as_bytes(), REASON)) } }
            input type="hidden" name="queue" value=(chosen.queue);
            input type="hidden" name="group" value=(chosen.group);
        },
        fields: html! {},
        action: "/dead-letters/redrive",
        button: &button,
        is_danger: false,
        back: "/dead-letters",
    };
    Ok(shown(form.page(&visitor, Section::DeadLetters, None)))
}

pub(super) async fn redrive(visitor: Visitor, Body(chosen): Body<Chosen>) -> Answer {
    let (group, ids) = find(&visitor.api(), &chosen).await?;
    if ids.is_empty() {
        return Ok(done("/dead-letters", "redriven", 0));
    }
    let name = Name {
        title: format!("Redrive to {}", group.origin),
        back: "/dead-letters".to_owned(),
        notice: "redriven",
    };
    operations::begin(&visitor, name, |api, progress| move_back(api, progress, chosen.queue, ids))
        .await
}

/// Moves items back by their ids, so that it is those that were counted and no others.
async fn move_back(
    mut api: Api,
    progress: Progress,
    queue: String,
    ids: Vec<String>,
) -> Result<i64, Status> {
    for ids in ids.chunks(IDS) {
        if progress.is_stopped() {
            break;
        }
        let filter = Some(RedriveFilter { ids: ids.to_vec(), ..RedriveFilter::default() });
        let request = RedriveItemsRequest { queue: queue.clone(), filter, ..Default::default() };
        progress.add(api.admin.redrive_items(request).await?.into_inner().redriven_items);
    }
    Ok(progress.done())
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
        assert!(groups[0].includes(&items[0]) && !groups[0].includes(&items[3]));
        assert_ne!(groups[0].key(), groups[2].key());
    }
}
