//! One queue: figures, charts, items.

use std::time::{Duration, SystemTime};

use axum::{
    Json,
    extract::{Path, Query as Address},
    response::IntoResponse as _,
};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{
    Broker, Item, ItemState, ListConsumersRequest, ListConsumersResponse, Queue, QueueStats,
};
use tonic::{Code, Status};

use super::{
    answer::{Answer, queue_address, shown},
    consumers::{self, Rates},
    frame::{Section, badge, page},
    live,
    queues::badges,
};
use crate::{
    Rights,
    api::Api,
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
    let (stats, items, connected) = tokio::join!(
        api.stats(&name),
        api.items(&name, state, PAGE, wanted.after.clone()),
        Connected::read(api.clone(), name.clone()),
    );
    let ((items, next), stats, connected) = (items?, stats?, connected?);
    let board = visitor.board();
    // The board knows rates; the figures of the answer are newer.
    let row = board.row(&name).unwrap_or_else(|| Row::of(&settings));
    let row = row.with(&settings, stats);
    let address = queue_address(&name);
    let body = html! {
        (heading(&visitor, &row, &settings))
        div data-live={ (address) "/events" } data-parts {
            (figures(&row, &connected))
            (charts(&address))
            (connected.part(&name, &Rates::default()))
        }
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
    let (api, board, mut rates) = (visitor.api(), visitor.board(), Rates::default());
    let read = {
        let name = name.clone();
        move || {
            let row = board.row(&name).filter(|_| !board.has_ended());
            let connected = Connected::read(api.clone(), name.clone());
            async move {
                let gone = || Status::not_found("the queue is gone");
                Ok((row.ok_or_else(gone)?, connected.await?))
            }
        }
    };
    live::follow(&visitor, read, move |(row, connected): &(Row, Connected)| {
        rates.take(&connected.list.consumers);
        html! { (figures(row, connected)) (connected.part(&name, &rates)) }
    })
}

/// The first consumers of a queue, on all brokers.
struct Connected {
    list: ListConsumersResponse,
    /// Empty if the visitor may not view them.
    brokers: Vec<Broker>,
    /// Why the consumers are not known.
    problem: Option<Status>,
}

impl Connected {
    /// Reads the consumers. A failure that says nothing of the queue does not keep the page from showing it.
    async fn read(api: Api, queue: String) -> Result<Self, Status> {
        let page_size = consumers::OF_QUEUE;
        let request = ListConsumersRequest { queue, page_size, ..Default::default() };
        let (list, brokers) = tokio::join!(api.consumers(request), api.brokers());
        let (list, problem) = match list {
            Ok(list) => (list, None),
            Err(status)
                if matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied) =>
            {
                return Err(status);
            }
            Err(status) => (ListConsumersResponse::default(), Some(status)),
        };
        let brokers = brokers.ok().flatten().unwrap_or_default();
        Ok(Self { list, brokers, problem })
    }

    fn part(&self, queue: &str, rates: &Rates) -> Markup {
        let Self { list, brokers, problem } = self;
        let more = list.total_size - list.consumers.len() as i64;
        html! {
            section #consumers {
                h2 { "Consumers" @if list.total_size > 0 { " " span.number.quiet { (text::count(list.total_size)) } } }
                @if let Some(problem) = problem { (live::not_up_to_date(problem)) }
                @else if list.consumers.is_empty() { p.quiet { "Nobody is connected to this queue." } }
                @else { (consumers::table(&list.consumers, brokers, rates, false)) }
                @if more > 0 {
                    p { a href=(consumers::of_queue(queue)) { "All " (text::counted(list.total_size, "consumer")) } }
                }
            }
        }
    }
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

fn figures(row: &Row, connected: &Connected) -> Markup {
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
        div #figures {
            dl.tiles {
                div { dt { "Ready" } dd { (text::count(stats.ready)) } }
                div { dt { "Delayed" } dd { (text::count(stats.delayed)) } }
                div { dt { "Reserved" } dd { (text::count(stats.reserved)) } }
                div { dt { "Blocked" } dd { (text::count(stats.blocked)) } }
                div.bad[row.is_stuck()] { dt { "Oldest" } dd { (oldest) } }
                div { dt { "In /s" } dd { (text::rate(row.rates.0)) } }
                div { dt { "Out /s" } dd { (text::rate(row.rates.1)) } }
                div { dt { "Consumers" } dd { (text::count(connected.list.total_size)) } }
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
