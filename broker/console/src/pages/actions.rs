//! What is done to a queue, each thing with a page that says what will happen and to how many items.

use axum::{Form as Body, extract::Path};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{
    DeleteQueueRequest, NewItem, PauseQueueRequest, PurgeQueueRequest, PushRequest, QueueStats,
    RedriveFilter, RedriveItemsRequest, ReplayItemsRequest, ResumeQueueRequest, TimeRange,
    new_item::Eligibility, operation_work::Kind, replay_items_request::Selection,
};

use super::{
    answer::{Answer, done, queue_address, rejected, shown},
    frame::{Field, Form, Section},
    operations,
};
use crate::{
    api::incomplete,
    board::held,
    operation::Name,
    problem::{Problem, duration, number},
    text,
    visitor::Visitor,
};

/// Returns the page of a form about a queue.
fn ask(
    visitor: &Visitor,
    queue: &str,
    verb: &str,
    form: Asked<'_>,
    problem: Option<&Problem>,
) -> Markup {
    let back = queue_address(queue);
    let action = format!("{back}/{verb}");
    let Asked { title, text, fields, button, is_danger } = form;
    let form = Form { title, text, fields, action: &action, button, is_danger, back: &back };
    form.page(visitor, Section::Queues, problem)
}

/// What is different from form to form.
struct Asked<'a> {
    title: &'a str,
    text: Markup,
    fields: Markup,
    button: &'a str,
    is_danger: bool,
}

impl<'a> Asked<'a> {
    fn new(title: &'a str, text: Markup, button: &'a str) -> Self {
        Self { title, text, fields: html! {}, button, is_danger: false }
    }
}

// --- push ---

/// What is asked of someone who pushes an item.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Push {
    payload: String,
    content_type: String,
    priority: String,
    delay: String,
    ordering_key: String,
}

pub(super) async fn push_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    visitor.api().get_queue(&queue).await?;
    let push = Push { payload: "{\"test\": true}".to_owned(), ..Push::default() };
    Ok(shown(push_page(&visitor, &queue, &push, None)))
}

fn push_page(visitor: &Visitor, queue: &str, push: &Push, problem: Option<&Problem>) -> Markup {
    let field = |name, label, value, hint, placeholder| {
        Field { name, label, value, hint, placeholder }.line(problem)
    };
    let form = Asked {
        fields: html! {
            div.field {
                label for="payload" { "Payload" }
                textarea #payload name="payload" rows="6" spellcheck="false" { "\n" (push.payload) }
            }
            (field("content_type", "Content type", &push.content_type, "Optional.", "application/json"))
            (field("priority", "Priority", &push.priority, "0 to 9; 9 is handed out first.", "0"))
            (field("delay", "Delay", &push.delay, "Not handed out before this has passed.", "30s"))
            (field("ordering_key", "Ordering key", &push.ordering_key, "Items with the same key are handed out one at a time, in order.", ""))
        },
        ..Asked::new(
            "Push an item",
            html! { p { "Pushes 1 item into " strong { (queue) } "." } },
            "Push 1 item",
        )
    };
    ask(visitor, queue, "push", form, problem)
}

pub(super) async fn push(
    visitor: Visitor,
    Path(queue): Path<String>,
    Body(push): Body<Push>,
) -> Answer {
    let pushed = async {
        let priority = number("priority", &push.priority)?.unwrap_or(0);
        let delay = duration("delay", &push.delay)?;
        let item = NewItem {
            payload: push.payload.replace("\r\n", "\n").into(),
            content_type: push.content_type.trim().to_owned(),
            priority,
            eligibility: delay.map(Eligibility::Delay),
            ordering_key: push.ordering_key.clone(),
            ..NewItem::default()
        };
        let (items, producer) = (vec![item], "console".to_owned());
        let request = PushRequest { queue: queue.clone(), items, producer };
        visitor.api().queue.push(request).await?;
        Ok::<_, Problem>(done(&queue_address(&queue), "pushed", 1))
    };
    match pushed.await {
        Ok(answer) => Ok(answer),
        Err(problem) => Ok(rejected(&problem, push_page(&visitor, &queue, &push, Some(&problem)))),
    }
}

// --- pause and resume ---

pub(super) async fn pause_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let stats = visitor.api().stats(&queue).await?;
    let text = html! {
        p { "No broker hands out items of " strong { (queue) } " any more. Pushes go on, and what is reserved can be settled." }
        p { (text::counted(stats.ready, "item")) (if stats.ready == 1 { " is" } else { " are" }) " ready now." }
    };
    Ok(shown(ask(&visitor, &queue, "pause", Asked::new("Pause this queue", text, "Pause"), None)))
}

pub(super) async fn pause(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let answer = visitor.api().admin.pause_queue(PauseQueueRequest { name: queue.clone() }).await?;
    visitor.board().put(answer.into_inner().queue.ok_or_else(incomplete)?);
    Ok(done(&queue_address(&queue), "paused", 0))
}

pub(super) async fn resume_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let stats = visitor.api().stats(&queue).await?;
    let text = html! {
        p { "Items of " strong { (queue) } " are handed out again. " (text::counted(stats.ready, "item")) (if stats.ready == 1 { " is" } else { " are" }) " ready now." }
    };
    Ok(shown(ask(
        &visitor,
        &queue,
        "resume",
        Asked::new("Resume this queue", text, "Resume"),
        None,
    )))
}

pub(super) async fn resume(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let request = ResumeQueueRequest { name: queue.clone() };
    let answer = visitor.api().admin.resume_queue(request).await?;
    visitor.board().put(answer.into_inner().queue.ok_or_else(incomplete)?);
    Ok(done(&queue_address(&queue), "resumed", 0))
}

// --- purge and delete ---

fn purged(stats: &QueueStats) -> i64 {
    held(stats) - stats.reserved + stats.processed
}

pub(super) async fn purge_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let stats = visitor.api().stats(&queue).await?;
    let items = text::counted(purged(&stats), "item");
    let button = format!("Delete {items}");
    let text = html! {
        p { strong { (items) } " of " strong { (queue) } " are deleted, history included. They cannot be brought back." }
        @if stats.reserved > 0 { p { (text::counted(stats.reserved, "item")) " that consumers hold just now stay." } }
    };
    let form = Asked {
        is_danger: true,
        fields: operations::once(),
        ..Asked::new("Purge this queue", text, &button)
    };
    Ok(shown(ask(&visitor, &queue, "purge", form, None)))
}

/// What the form of a purge sends.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Purge {
    request_id: String,
}

pub(super) async fn purge(
    visitor: Visitor,
    Path(queue): Path<String>,
    Body(Purge { request_id }): Body<Purge>,
) -> Answer {
    let purge = Kind::Purge(PurgeQueueRequest { name: queue });
    operations::start(&visitor, purge, request_id).await
}

/// The confirmation of a deletion.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Confirmed {
    confirm: String,
    /// How many unsettled items the form named.
    unsettled: i64,
}

pub(super) async fn delete_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    Ok(shown(delete_page(&visitor, &queue, None).await?))
}

async fn delete_page(
    visitor: &Visitor,
    queue: &str,
    problem: Option<&Problem>,
) -> Result<Markup, Problem> {
    let stats = visitor.api().stats(queue).await?;
    let items = text::counted(held(&stats) + stats.processed, "item");
    let button = format!("Delete the queue and {items}");
    let confirm = Field {
        name: "confirm",
        label: "Name of the queue",
        value: "",
        hint: "To be sure.",
        placeholder: queue,
    };
    let text = html! {
        p { "The queue " strong { (queue) } " is deleted with its settings, its totals and " strong { (items) } ", reserved ones included." }
    };
    let form = Asked {
        is_danger: true,
        fields: html! {
            input type="hidden" name="unsettled" value=(held(&stats));
            (confirm.line(problem))
        },
        ..Asked::new("Delete this queue", text, &button)
    };
    Ok(ask(visitor, queue, "delete", form, problem))
}

pub(super) async fn delete(
    visitor: Visitor,
    Path(queue): Path<String>,
    Body(Confirmed { confirm, unsettled }): Body<Confirmed>,
) -> Answer {
    if confirm.trim() != queue {
        let problem = Problem::field("confirm", "is not the name of the queue");
        return Ok(rejected(&problem, delete_page(&visitor, &queue, Some(&problem)).await?));
    }
    let board = visitor.board();
    let name =
        Name { title: format!("Delete {queue}"), back: "/queues".to_owned(), notice: "deleted" };
    let mut api = visitor.slow_api();
    operations::begin(&visitor, name, async move {
        // What came into a queue that was shown as empty is not deleted with it.
        let request = DeleteQueueRequest { name: queue.clone(), force: unsettled > 0 };
        let deleted = api.admin.delete_queue(request).await?.into_inner().deleted_items;
        board.forget(&queue);
        Ok(deleted)
    })
    .await
}

// --- redrive and replay ---

/// What is asked of someone who moves dead letters back.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Redrive {
    origin_queue: String,
    reason_contains: String,
    to_queue: String,
    max_items: String,
    rate: String,
    request_id: String,
}

pub(super) async fn redrive_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    Ok(shown(redrive_page(&visitor, &queue, &Redrive::default(), None).await?))
}

async fn redrive_page(
    visitor: &Visitor,
    queue: &str,
    asked: &Redrive,
    problem: Option<&Problem>,
) -> Result<Markup, Problem> {
    let stats = visitor.api().stats(queue).await?;
    let items = text::counted(stats.ready, "item");
    let button = format!("Redrive up to {items}");
    let field = |name, label, value, hint, placeholder| {
        Field { name, label, value, hint, placeholder }.line(problem)
    };
    let form = Asked {
        fields: html! {
            (operations::once())
            (field("origin_queue", "Only from the queue", &asked.origin_queue, "Empty: from any.", ""))
            (field("reason_contains", "Only with the reason", &asked.reason_contains, "A part of it. Empty: any.", ""))
            (field("to_queue", "To the queue", &asked.to_queue, "Empty: each item to the queue it came from.", ""))
            (field("max_items", "At most", &asked.max_items, "Empty: all.", ""))
            (field("rate", "Per second", &asked.rate, "Empty: as fast as possible.", ""))
        },
        ..Asked::new(
            "Redrive dead letters",
            html! { p { "Moves up to " strong { (items) } " of " strong { (queue) } " back to where they came from, with new attempts." } },
            &button,
        )
    };
    Ok(ask(visitor, queue, "redrive", form, problem))
}

pub(super) async fn redrive(
    visitor: Visitor,
    Path(queue): Path<String>,
    Body(asked): Body<Redrive>,
) -> Answer {
    let parsed = number("max_items", &asked.max_items)
        .and_then(|most| Ok((most, number("rate", &asked.rate)?)));
    let (most, rate) = match parsed {
        Ok((most, rate)) => (most.unwrap_or_default(), rate.unwrap_or_default()),
        Err(problem) => {
            let page = redrive_page(&visitor, &queue, &asked, Some(&problem)).await?;
            return Ok(rejected(&problem, page));
        }
    };
    let filter = RedriveFilter {
        origin_queue: asked.origin_queue.trim().to_owned(),
        reason_contains: asked.reason_contains.clone(),
        ..RedriveFilter::default()
    };
    let to_queue = asked.to_queue.trim().to_owned();
    let redrive =
        RedriveItemsRequest { queue, to_queue, filter: Some(filter), max_items: most, rate };
    operations::start(&visitor, Kind::Redrive(redrive), asked.request_id).await
}

pub(super) async fn replay_form(visitor: Visitor, Path(queue): Path<String>) -> Answer {
    let stats = visitor.api().stats(&queue).await?;
    let items = text::counted(stats.processed, "item");
    let button = format!("Replay up to {items}");
    let field = Field {
        name: "max_items",
        label: "At most",
        value: "",
        hint: "The oldest ones. Empty: all.",
        placeholder: "",
    };
    let form = Asked {
        fields: html! { (operations::once()) (field.line(None)) },
        ..Asked::new(
            "Replay processed items",
            html! { p { "Makes up to " strong { (items) } " of the history of " strong { (queue) } " ready again: consumers receive them anew." } },
            &button,
        )
    };
    Ok(shown(ask(&visitor, &queue, "replay", form, None)))
}

/// What is asked of someone who replays items.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Replay {
    max_items: String,
    request_id: String,
}

pub(super) async fn replay(
    visitor: Visitor,
    Path(queue): Path<String>,
    Body(asked): Body<Replay>,
) -> Answer {
    let max_items = number("max_items", &asked.max_items)?.unwrap_or_default();
    let selection = Some(Selection::ProcessTime(TimeRange::default()));
    let replay = ReplayItemsRequest { queue, max_items, selection };
    operations::start(&visitor, Kind::Replay(replay), asked.request_id).await
}
