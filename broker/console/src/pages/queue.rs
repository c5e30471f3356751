//! One queue: figures, charts, items.

use std::time::{Duration, SystemTime};

use axum::{
    Json,
    extract::{Path, Query as Address},
    response::IntoResponse as _,
};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{Item, ItemState, Queue, QueueStats};

use super::{
    answer::{Answer, queue_address, shown},
    frame::{Section, badge, page},
    live,
    queues::badges,
};
use crate::{
    Rights,
    board::{Row, dead_letter_queue},
    text,
    visitor::Visitor,
};

/// Items on a page.
const PAGE: i32 = 50;
/// Characters of a payload in the list.
const PREVIEW: usize = 100;

/// The spans of the charts.
const SPANS: [(&str, &str); 5] =
    [("300", "5 min"), ("900", "15 min"), ("3600", "1 h"), ("10800", "3 h"), ("86400", "24 h")];

/// The states of items, with their words in addresses and on the page.
const STATES: [(ItemState, &str, &str); 6] = [
    (ItemState::Unspecified, "all", "All"),
    (ItemState::Ready, "ready", "Ready"),
    (ItemState::Delayed, "delayed", "Delayed"),
    (ItemState::Reserved, "reserved", "Reserved"),
    (ItemState::Blocked, "blocked", "Blocked"),
    (ItemState::Processed, "processed", "Processed"),
];

/// What the address of the page asks for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    state: String,
    /// The token of the page of items.
    after: String,
}

/// Returns the word for a state.
pub(super) fn word(state: ItemState) -> &'static str {
    STATES.iter().find(|(this, ..)| *this == state).map_or("", |(_, word, _)| word)
}

pub(super) async fn show(
    visitor: Visitor,
    Path(name): Path<String>,
    Address(wanted): Address<Wanted>,
) -> Answer {
    let api = visitor.api();
    let state = STATES.iter().find(|(_, word, _)| *word == wanted.state);
    let state = state.map_or(ItemState::Unspecified, |(state, ..)| *state);
    let settings = api.get_queue(&name).await?;
    let (stats, items) =
        tokio::join!(api.stats(&name), api.items(&name, state, PAGE, wanted.after.clone()));
    let ((items, next), stats) = (items?, stats?);
    let board = visitor.board();
    // The board knows rates; the figures of the answer are newer.
    let row = board.row(&name).unwrap_or_else(|| Row::of(&settings));
    let row = row.with(&settings, stats);
    let address = queue_address(&name);
    let body = html! {
        (heading(&visitor, &row, &settings))
        div #live data-live={ (address) "/events" } { (figures(&row)) }
        (charts(&address))
        h2 #items { "Items" }
        nav.filters aria-label="State" {
            @for (this, word, name) in STATES {
                a href={ (address) "?state=" (word) "#items" } aria-current=[(this == state).then_some("true")] {
                    (name) @if let Some(number) = number(this, &row.stats) { " " span.number { (text::count(number)) } }
                }
            }
        }
        (list(&items, &address))
        nav.pager aria-label="Pages of items" {
            @if !wanted.after.is_empty() { a href={ (address) "?state=" (word(state)) "#items" } { "First" } }
            @if !next.is_empty() {
                a rel="next" href={ (address) "?state=" (word(state)) "&after=" (text::encode(&next)) "#items" } { "Next" }
            }
        }
    };
    Ok(shown(page(&visitor, &name, Section::Queues, &body)))
}

pub(super) async fn events(visitor: Visitor, Path(name): Path<String>) -> Answer {
    live::stream(&visitor, visitor.board(), move |board| Some(figures(&board.row(&name)?)))
}

/// What a chart asks for.
#[derive(Deserialize)]
pub(super) struct Span {
    seconds: u64,
}

pub(super) async fn series(
    visitor: Visitor,
    Path(name): Path<String>,
    Address(Span { seconds }): Address<Span>,
) -> Answer {
    // The history is shared by all tokens, so the rights are checked here.
    visitor.api().get_queue(&name).await?;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    let span = Duration::from_secs(seconds.min(86_400));
    Ok(Json(visitor.console.boards.histories.series(&name, span, now)).into_response())
}

fn heading(visitor: &Visitor, row: &Row, settings: &Queue) -> Markup {
    let Rights { produce, manage, .. } = visitor.rights(&settings.name);
    let address = queue_address(&settings.name);
    html! {
        div.heading {
            div {
                a.up href="/queues" data-up { "Queues" }
                h1 { (settings.name) span #badges { (badges(row)) } }
                @if let Some(dead) = dead_letter_queue(settings) {
                    p.quiet { "Dead letters go to " a href=(queue_address(&dead)) { (dead) } "." }
                }
            }
            div.buttons {
                @if produce { a.button href={ (address) "/push" } data-dialog { "Push an item" } }
                @if manage {
                    @if settings.paused { a.button href={ (address) "/resume" } data-dialog { "Resume" } }
                    @else { a.button href={ (address) "/pause" } data-dialog { "Pause" } }
                    @if row.is_dead_letter_queue { a.button href={ (address) "/redrive" } data-dialog { "Redrive" } }
                    @if row.stats.processed > 0 { a.button href={ (address) "/replay" } data-dialog { "Replay" } }
                }
                a.button href={ (address) "/settings" } { "Settings" }
                @if manage {
                    a.button.risky href={ (address) "/purge" } data-dialog { "Purge" }
                    a.button.risky href={ (address) "/delete" } data-dialog { "Delete" }
                }
            }
        }
    }
}

fn figures(row: &Row) -> Markup {
    let stats = &row.stats;
    let oldest = row.oldest().map_or_else(|| "–".to_owned(), text::length);
    let totals = [
        ("pushed", stats.pushed),
        ("handed out", stats.delivered),
        ("committed", stats.committed),
        ("rolled back", stats.rolled_back),
        ("moved", stats.moved),
        ("dead-lettered", stats.dead_lettered),
        ("expired", stats.expired),
        ("discarded", stats.discarded),
    ];
    html! {
        dl.tiles {
            div { dt { "Ready" } dd { (text::count(stats.ready)) } }
            div { dt { "Delayed" } dd { (text::count(stats.delayed)) } }
            div { dt { "Reserved" } dd { (text::count(stats.reserved)) } }
            div { dt { "Blocked" } dd { (text::count(stats.blocked)) } }
            div.bad[row.is_stuck()] { dt { "Oldest" } dd { (oldest) } }
            div { dt { "In /s" } dd { (text::rate(row.rates.0)) } }
            div { dt { "Out /s" } dd { (text::rate(row.rates.1)) } }
            div { dt { "Consumers" } dd { (stats.consumers) } }
        }
        p.quiet.totals {
            "Since it was created: "
            @for (at, (name, number)) in totals.iter().filter(|(_, number)| *number > 0).enumerate() {
                @if at > 0 { ", " } (text::count(*number)) " " (name)
            }
            @if totals.iter().all(|(_, number)| *number == 0) { "nothing has happened" }
            "."
        }
    }
}

fn charts(address: &str) -> Markup {
    html! {
        section.charts aria-label="Charts" data-series={ (address) "/series" } data-style=(crate::assets::address("uplot.css"))
            data-script=(crate::assets::address("uplot.js")) {
            fieldset.spans {
                legend { "Charts of the last" }
                @for (seconds, name) in SPANS {
                    label { input type="radio" name="span" value=(seconds) checked[seconds == "900"]; span { (name) } }
                }
            }
            div.pair {
                figure { figcaption { "Items by state" } div.chart data-chart="depth" {} }
                figure { figcaption { "Items per second" } div.chart data-chart="rate" {} }
            }
            p.quiet.empty hidden { "The charts begin when someone first looks at the console. In a few seconds they show something." }
        }
    }
}

fn number(state: ItemState, stats: &QueueStats) -> Option<i64> {
    let number = match state {
        ItemState::Unspecified => return None,
        ItemState::Ready => stats.ready,
        ItemState::Delayed => stats.delayed,
        ItemState::Reserved => stats.reserved,
        ItemState::Blocked => stats.blocked,
        ItemState::Processed => stats.processed,
    };
    Some(number).filter(|number| *number > 0)
}

/// Returns a list of items.
pub(super) fn list(items: &[Item], address: &str) -> Markup {
    if items.is_empty() {
        return html! { div.nothing { p { "There is no such item." } } };
    }
    html! {
        table.items {
            thead { tr {
                th scope="col" { "Item" }
                th scope="col" { "State" }
                th.middle scope="col" { "When" }
                th.figure.middle scope="col" title="The attempt that is next or under way" { "Attempt" }
                th scope="col" { "Payload" }
            } }
            tbody { @for item in items { (line(item, address)) } }
        }
    }
}

fn line(item: &Item, address: &str) -> Markup {
    let when = match item.state() {
        ItemState::Delayed => format!("ready {}", text::away(item.eligible_time.as_ref())),
        ItemState::Reserved => format!("lease ends {}", text::away(item.eligible_time.as_ref())),
        ItemState::Processed => text::away(item.process_time.as_ref()),
        _ => format!("pushed {}", text::away(item.create_time.as_ref())),
    };
    html! {
        tr {
            th scope="row" { a.row.mono href={ (address) "/items/" (text::encode(&item.id)) } { (item.id) } }
            td { (state(item.state())) }
            td.middle { (when) }
            td.figure.middle { (item.attempt) }
            td.payload {
                code { (text::preview(&item.payload, PREVIEW)) }
                @if !item.last_reason.is_empty() {
                    small.reason { (text::preview(item.last_reason.as_bytes(), PREVIEW)) }
                }
            }
        }
    }
}

/// Returns the word for a state, in its colour.
pub(super) fn state(state: ItemState) -> Markup {
    badge(word(state), word(state))
}
