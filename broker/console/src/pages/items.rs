//! One item: what it is, what has happened to it, what is in it.

use axum::{extract::Path, http::header, response::IntoResponse as _};
use maud::{Markup, html};
use sluicegate_proto::v1::{DeleteItemRequest, Item, ItemState};

use super::{
    answer::{Answer, done, queue_address, shown},
    frame::{Form, Section, page},
    payload, queue,
};
use crate::{text, visitor::Visitor};

pub(super) async fn show(visitor: Visitor, Path((name, id)): Path<(String, String)>) -> Answer {
    let item = visitor.api().item(&name, &id).await?;
    let up = queue_address(&name);
    let address = item_address(&name, &id);
    let body = html! {
        div.heading {
            div {
                a.up href=(up) data-up { (name) }
                h1.mono { (item.id) " " (queue::state(item.state())) }
            }
            @if visitor.rights(&name).manage {
                div.buttons { a.button.risky href={ (address) "/delete" } data-dialog { "Delete" } }
            }
        }
        @if !item.last_reason.is_empty() {
            p.problem { strong { "Why the last attempt failed: " } (text::preview(item.last_reason.as_bytes(), 1_024)) }
        }
        div.sides {
            section aria-labelledby="story" { h2 #story { "What has happened" } (story(&item)) }
            section aria-labelledby="facts" { h2 #facts { "Item" } (facts(&item)) }
        }
        @if !item.headers.is_empty() { h2 { "Headers" } (headers(&item)) }
        h2 { "Payload" }
        (payload::show(&item.payload, &item.content_type, &format!("{address}/payload")))
    };
    Ok(shown(page(&visitor, &id, Section::Queues, &body)))
}

fn item_address(queue: &str, id: &str) -> String {
    format!("{}/items/{}", queue_address(queue), text::encode(id))
}

/// Returns the events of an item's life as far as the item tells them, in order.
fn story(item: &Item) -> Markup {
    let time = |at| text::time(at, "not known when");
    let (create, due) = (item.create_time.as_ref(), item.due_time.as_ref());
    let failed = item.attempt - 1;
    html! {
        ol.story {
            li { (time(create)) " Pushed" @if !item.producer.is_empty() { " by " strong { (item.producer) } } "." }
            @if let Some(dead) = &item.dead_letter_time {
                li.bad {
                    (time(Some(dead))) " Given up after "
                    (text::counted(i64::from(item.dead_letter_attempts), "failed attempt"))
                    @if !item.origin_queue.is_empty() {
                        " in " a href=(queue_address(&item.origin_queue)) { (item.origin_queue) }
                    }
                    "."
                }
            }
            @if item.deliveries > 0 {
                li {
                    "Handed out " (text::counted(i64::from(item.deliveries), "time"))
                    @if !item.consumer.is_empty() { ", last to " strong { (item.consumer) } }
                    @if failed > 0 { "; " (text::counted(i64::from(failed), "attempt")) " failed here" }
                    "."
                }
            }
            @match item.state() {
                ItemState::Ready => li.now { (time(due)) " Ready: the next consumer may have it." }
                ItemState::Delayed => li.now {
                    (time(item.eligible_time.as_ref())) " Will be ready, " (text::away(item.eligible_time.as_ref())) "."
                }
                ItemState::Reserved => li.now {
                    "Held" @if !item.consumer.is_empty() { " by " strong { (item.consumer) } }
                    "; the lease ends " (time(item.eligible_time.as_ref())) ", " (text::away(item.eligible_time.as_ref())) "."
                }
                ItemState::Blocked => li.now { "Waits for an earlier item of the ordering key " code { (item.ordering_key) } "." }
                ItemState::Processed => li.now { (time(item.process_time.as_ref())) " Done. Kept as history." }
                ItemState::Unspecified => {}
            }
            @if item.expire_time.is_some() && item.state() != ItemState::Processed {
                li { (time(item.expire_time.as_ref())) " Expires unless it is done before." }
            }
        }
    }
}

fn facts(item: &Item) -> Markup {
    let facts = [
        ("Priority", item.priority.to_string()),
        ("Attempt", item.attempt.to_string()),
        ("Deliveries", item.deliveries.to_string()),
        ("Sequence", if item.sequence > 0 { item.sequence.to_string() } else { String::new() }),
        ("Ordering key", item.ordering_key.clone()),
        ("Deduplication id", item.dedup_id.clone()),
        ("Producer", item.producer.clone()),
        ("Consumer", item.consumer.clone()),
        ("Came from", item.origin_queue.clone()),
    ];
    html! {
        dl.facts {
            @for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
                dt { (name) } dd { (text::preview(value.as_bytes(), 300)) }
            }
        }
    }
}

fn headers(item: &Item) -> Markup {
    let mut headers: Vec<_> = item.headers.iter().collect();
    headers.sort();
    html! {
        dl.facts {
            @for (name, value) in headers {
                dt { (text::preview(name.as_bytes(), 300)) } dd { (text::preview(value.as_bytes(), 2_000)) }
            }
        }
    }
}

pub(super) async fn download(visitor: Visitor, Path((name, id)): Path<(String, String)>) -> Answer {
    let item = visitor.api().item(&name, &id).await?;
    let file: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let headers = [
        // Whatever it says it is: nothing that a browser would show.
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{file}.bin\"")),
    ];
    Ok((headers, item.payload).into_response())
}

pub(super) async fn delete_form(
    visitor: Visitor,
    Path((name, id)): Path<(String, String)>,
) -> Answer {
    let item = visitor.api().item(&name, &id).await?;
    let (action, back) = (format!("{}/delete", item_address(&name, &id)), item_address(&name, &id));
    let form = Form {
        title: "Delete this item",
        text: html! {
            p { "1 item of " strong { (name) } " is deleted, which is " (queue::word(item.state())) " now. It cannot be brought back." }
            @if item.state() == ItemState::Reserved {
                p { "A consumer holds it. Whatever the consumer answers is without effect afterwards." }
            }
        },
        fields: html! {},
        action: &action,
        button: "Delete 1 item",
        is_danger: true,
        back: &back,
    };
    Ok(shown(form.page(&visitor, Section::Queues, None)))
}

pub(super) async fn delete(visitor: Visitor, Path((name, id)): Path<(String, String)>) -> Answer {
    let request =
        DeleteItemRequest { queue: name.clone(), id, only_if: ItemState::Unspecified.into() };
    visitor.api().admin.delete_item(request).await?;
    Ok(done(&queue_address(&name), "item-deleted", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_story_is_told_and_nothing_in_it_is_markup() {
        let hostile = "<script>alert(1)</script>".to_owned();
        let item = Item {
            producer: hostile.clone(),
            consumer: hostile.clone(),
            origin_queue: hostile.clone(),
            ordering_key: hostile.clone(),
            dead_letter_time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            dead_letter_attempts: 25,
            deliveries: 26,
            attempt: 2,
            state: ItemState::Blocked.into(),
            headers: [(hostile.clone(), hostile.clone())].into(),
            ..Item::default()
        };
        let page = html! { (story(&item)) (facts(&item)) (headers(&item)) }.into_string();
        assert!(!page.contains("<script"), "{page}");
        assert!(
            page.contains("after 25 failed attempts") && page.contains("Handed out 26 times"),
            "{page}"
        );
        let list =
            queue::list(&[Item { id: hostile.clone(), last_reason: hostile, ..item }], "/queues/q")
                .into_string();
        assert!(!list.contains("<script") && list.contains("/items/%3Cscript"), "{list}");
    }
}
