//! All queues.

use axum::{Form as Body, extract::Query as Address};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{CreateQueueRequest, Queue};

use super::{
    answer::{Answer, done, queue_address, rejected, shown},
    frame::{Field, Form, Section, badge, page},
    live,
};
use crate::{
    api::incomplete,
    board::{Board, Histories, Query, Row, Selection, Show, Sort},
    problem::Problem,
    text,
    visitor::Visitor,
};

/// The columns: order, heading, explanation, and from which width on they are shown.
const COLUMNS: [(Sort, &str, &str, &str); 8] = [
    (Sort::Ready, "Ready", "Items that a consumer could have now", ""),
    (Sort::Delayed, "Delayed", "Items that become ready later", "middle"),
    (Sort::Reserved, "Reserved", "Items under a lease", "middle"),
    (Sort::Blocked, "Blocked", "Items behind another one of their ordering key", "wide"),
    (Sort::Oldest, "Oldest", "How long the first item has been ready", ""),
    (Sort::In, "In /s", "Items pushed per second", "middle"),
    (Sort::Out, "Out /s", "Items per second that were committed or left otherwise", "middle"),
    (Sort::Consumers, "Consumers", "Consumers connected to this broker", "wide"),
];

pub(super) async fn show(visitor: Visitor, Address(query): Address<Query>) -> Answer {
    let board = visitor.board();
    board.loaded().await?;
    let may_create = visitor.rights("").create;
    let body = html! {
        div.heading {
            h1 { "Queues" }
            form.search role="search" action="/queues" {
                input #search type="search" name="search" value=(query.search) placeholder="Search by name" aria-label="Search by name"
                    autocomplete="off" spellcheck="false";
                @if query.show != Show::All { input type="hidden" name="show" value=(word(query.show)); }
                @if query.sort != Sort::Name { input type="hidden" name="sort" value=(query.sort.word()); }
            }
            @if may_create { a.button href="/new-queue" data-dialog { "New queue" } }
        }
        div #live data-live={ "/queue-events" (address(&query)) } {
            (part(&board, &visitor.console.boards.histories, &query))
        }
    };
    Ok(shown(page(&visitor, "Queues", Section::Queues, &body)))
}

pub(super) async fn events(visitor: Visitor, Address(query): Address<Query>) -> Answer {
    let histories = std::sync::Arc::clone(&visitor.console.boards.histories);
    live::stream(&visitor, visitor.board(), move |board| Some(part(board, &histories, &query)))
}

fn word(show: Show) -> &'static str {
    Show::ALL.iter().find(|(this, ..)| *this == show).map_or("all", |(_, word, _)| word)
}

/// Returns the part of an address that asks for this.
fn address(query: &Query) -> String {
    let mut parts = Vec::new();
    if !query.search.is_empty() {
        parts.push(format!("search={}", text::encode(&query.search)));
    }
    if query.show != Show::All {
        parts.push(format!("show={}", word(query.show)));
    }
    if query.sort != Sort::Name {
        parts.push(format!("sort={}", query.sort.word()));
    }
    if query.page > 1 {
        parts.push(format!("page={}", query.page));
    }
    if parts.is_empty() { String::new() } else { format!("?{}", parts.join("&")) }
}

/// Returns the part of the page that changes.
fn part(board: &Board, histories: &Histories, query: &Query) -> Markup {
    let selection = board.select(query);
    html! {
        @if let Some(problem) = &selection.problem {
            p.problem { "These figures are not up to date: " (problem.message()) }
        }
        (summary(&selection))
        (filters(query, &selection))
        @if selection.rows.is_empty() { (nothing(query, &selection)) } @else { (table(query, &selection, histories)) }
        (pager(query, &selection))
    }
}

fn summary(selection: &Selection) -> Markup {
    html! {
        dl.tiles {
            div { dt { "Queues" } dd { (text::count(selection.queues as i64)) } }
            div { dt { "Ready" } dd { (text::count(selection.ready)) } }
            div { dt { "In /s" } dd { (text::rate(selection.rates.0)) } }
            div { dt { "Out /s" } dd { (text::rate(selection.rates.1)) } }
            div.bad[selection.dead_letters > 0] { dt { "Dead letters" } dd { (text::count(selection.dead_letters)) } }
        }
    }
}

fn filters(query: &Query, selection: &Selection) -> Markup {
    html! {
        nav.filters aria-label="Filter" {
            @for (show, _, name) in Show::ALL {
                @let target = Query { show, page: 0, ..query.clone() };
                a href={ "/queues" (address(&target)) } aria-current=[(show == query.show).then_some("true")] {
                    (name)
                    @match show {
                        Show::Stuck if selection.stuck > 0 => { " " span.number { (selection.stuck) } }
                        Show::Paused if selection.paused > 0 => { " " span.number { (selection.paused) } }
                        _ => {}
                    }
                }
            }
        }
    }
}

fn nothing(query: &Query, selection: &Selection) -> Markup {
    html! {
        div.nothing {
            @if selection.queues == 0 {
                p { "There are no queues yet. A queue comes into being with the first item that is pushed into it:" }
                pre { code { "sluice push hello 'first item'" } }
            } @else if query.search.is_empty() {
                p { "No queue is like this just now." }
            } @else {
                p { "No queue is called like “" (query.search) "”." }
            }
        }
    }
}

fn table(query: &Query, selection: &Selection, histories: &Histories) -> Markup {
    html! {
        table.queues {
            thead { tr {
                (heading(query, Sort::Name, "Queue", "Name of the queue", ""))
                th.spark.middle scope="col" title="Ready items, the last 15 minutes" { "15 min" }
                @for (sort, name, title, class) in COLUMNS { (heading(query, sort, name, title, class)) }
            } }
            tbody { @for row in &selection.rows { (line(row, histories)) } }
        }
    }
}

fn heading(query: &Query, sort: Sort, name: &str, title: &str, class: &str) -> Markup {
    let target = Query { sort, page: 0, ..query.clone() };
    let is_this = query.sort == sort;
    let order = if sort == Sort::Name { "ascending" } else { "descending" };
    let figure = if sort == Sort::Name { "" } else { "figure " };
    html! {
        th scope="col" class={ (figure) (class) } aria-sort=[is_this.then_some(order)] title=(title) {
            a href={ "/queues" (address(&target)) } { (name) }
        }
    }
}

fn line(row: &Row, histories: &Histories) -> Markup {
    let (name, stats) = (&row.stats.queue, &row.stats);
    let oldest = row.oldest().map_or_else(|| "–".to_owned(), text::length);
    html! {
        tr id={ "queue-" (name) } {
            th scope="row" { a.row href=(queue_address(name)) { (name) } (badges(row)) }
            td.spark.middle { (spark(&histories.spark(name))) }
            (figure(stats.ready, ""))
            (figure(stats.delayed, "middle"))
            (figure(stats.reserved, "middle"))
            (figure(stats.blocked, "wide"))
            td.figure.late[row.is_stuck()] { (oldest) }
            td.figure.middle.zero[row.rates.0 < 0.05] { (text::rate(row.rates.0)) }
            td.figure.middle.zero[row.rates.1 < 0.05] { (text::rate(row.rates.1)) }
            (figure(i64::from(stats.consumers_of_all_brokers), "wide"))
        }
    }
}

fn figure(number: i64, class: &str) -> Markup {
    html! { td class={ "figure " (class) @if number == 0 { " zero" } } { (text::count(number)) } }
}

/// Returns the words that make a queue stand out.
pub(super) fn badges(row: &Row) -> Markup {
    html! {
        @if row.is_stuck() { " " (badge("bad", "stuck")) }
        @if row.settings.paused { " " (badge("warn", "paused")) }
        @if row.has_dead_letters() { " " (badge("bad", "dead letters")) }
    }
}

/// Returns a line of the last 15 minutes, as large as the line's own highest point.
fn spark(points: &[(f64, i64)]) -> Markup {
    let highest = points.iter().map(|(_, value)| *value).max().unwrap_or(0).max(1) as f64;
    let line: Vec<String> = points
        .iter()
        .map(|(place, value)| {
            format!("{:.1},{:.1}", place * 80.0, 19.0 - *value as f64 / highest * 18.0)
        })
        .collect();
    html! {
        svg viewBox="0 0 80 20" width="80" height="20" aria-hidden="true" {
            @if points.len() > 1 { polyline points=(line.join(" ")) {} }
        }
    }
}

fn pager(query: &Query, selection: &Selection) -> Markup {
    let target = |page| format!("/queues{}", address(&Query { page, ..query.clone() }));
    html! {
        @if selection.pages > 1 {
            nav.pager aria-label="Pages of queues" {
                @if selection.page > 1 { a rel="prev" href=(target(selection.page - 1)) { "Previous" } }
                span { "Page " (selection.page) " of " (selection.pages) ", " (text::counted(selection.matching as i64, "queue")) }
                @if selection.page < selection.pages { a rel="next" href=(target(selection.page + 1)) { "Next" } }
            }
        }
    }
}

/// What is asked of someone who creates a queue.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NewQueue {
    name: String,
    group: String,
}

pub(super) async fn create_form(visitor: Visitor) -> Answer {
    Ok(shown(create_page(&visitor, &NewQueue::default(), None)))
}

fn create_page(visitor: &Visitor, new: &NewQueue, problem: Option<&Problem>) -> Markup {
    let name = Field {
        name: "name",
        label: "Name",
        value: &new.name,
        hint: "Letters, digits and . _ -; up to 128 characters.",
        placeholder: "orders",
    };
    let group = Field {
        name: "group",
        label: "Group",
        value: &new.group,
        hint: "Items move between queues of one group in one step. Cannot be changed later.",
        placeholder: "default",
    };
    let form = Form {
        title: "New queue",
        text: html! { p { "All settings can be changed afterwards, except for name and group." } },
        fields: html! { (name.line(problem)) (group.line(problem)) },
        action: "/queues",
        button: "Create",
        is_danger: false,
        back: "/queues",
    };
    form.page(visitor, Section::Queues, problem)
}

pub(super) async fn create(visitor: Visitor, Body(new): Body<NewQueue>) -> Answer {
    let (name, group) = (new.name.trim().to_owned(), new.group.trim().to_owned());
    let queue = Queue { name, group, ..Queue::default() };
    let request = CreateQueueRequest { queue: Some(queue) };
    match visitor.api().admin.create_queue(request).await {
        Ok(answer) => {
            let queue = answer.into_inner().queue.ok_or_else(incomplete)?;
            let back = queue_address(&queue.name);
            visitor.board().put(queue);
            Ok(done(&back, "created", 0))
        }
        Err(status) => {
            let problem = Problem::from(status);
            let page = create_page(&visitor, &new, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}
