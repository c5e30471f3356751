//! Items that happen again.

use axum::{Form as Body, extract::Path, http::StatusCode};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListSchedulesRequest,
    NewItem, PauseScheduleRequest, ResumeScheduleRequest, Schedule,
};

use super::{
    answer::{Answer, done, queue_address, rejected, shown},
    frame::{Field, Form, Section, badge, page},
};
use crate::{api::incomplete, problem::Problem, text, visitor::Visitor};

/// The most schedules that the page shows.
const MOST: usize = 1_000;
/// Characters of a payload in the list.
const PREVIEW: usize = 80;

pub(super) async fn show(visitor: Visitor) -> Answer {
    let mut api = visitor.api().schedule;
    let mut schedules = Vec::new();
    let mut page_token = String::new();
    let is_cut = loop {
        let request = ListSchedulesRequest { page_size: 1_000, page_token };
        let answer = match api.list_schedules(request).await {
            // A token without `manage` anywhere has no schedules to see.
            Err(status) if status.code() == tonic::Code::PermissionDenied => break false,
            answer => answer?.into_inner(),
        };
        schedules.extend(answer.schedules);
        page_token = answer.next_page_token;
        if page_token.is_empty() || schedules.len() >= MOST {
            break !page_token.is_empty();
        }
    };
    let body = html! {
        div.heading {
            h1 { "Schedules" }
            @if visitor.rights("").manage { a.button href="/new-schedule" data-dialog { "New schedule" } }
        }
        @if schedules.is_empty() {
            div.nothing { p { "There are no schedules. A schedule pushes an item at every tick of a cron expression." } }
        } @else { (table(&schedules)) }
        @if is_cut { p.quiet { "There are more, which this page does not show." } }
    };
    Ok(shown(page(&visitor, "Schedules", Section::Schedules, &body)))
}

fn table(schedules: &[Schedule]) -> Markup {
    html! {
        table.schedules {
            thead { tr {
                th scope="col" { "Schedule" }
                th scope="col" { "When" }
                th.middle scope="col" { "Next" }
                th.middle scope="col" { "Last" }
                th.wide scope="col" { "Item" }
                th scope="col" { span.quiet { "Action" } }
            } }
            tbody { @for schedule in schedules { (line(schedule)) } }
        }
    }
}

fn line(schedule: &Schedule) -> Markup {
    let address = format!("/schedules/{}", text::encode(&schedule.name));
    let payload = schedule.item.as_ref().map(|item| text::preview(&item.payload, PREVIEW));
    let zone = if schedule.time_zone.is_empty() { "UTC" } else { &schedule.time_zone };
    html! {
        tr {
            th scope="row" {
                (schedule.name) @if schedule.paused { " " (badge("warn", "paused")) }
                br; small { "into " a.row href=(queue_address(&schedule.queue)) { (schedule.queue) } }
            }
            td { code { (schedule.cron) } br; small { (zone) } }
            td.middle {
                @if schedule.paused { span.quiet { "not while paused" } } @else {
                    (text::away(schedule.next_time.as_ref())) br; small { (text::time(schedule.next_time.as_ref(), "")) }
                }
            }
            td.middle {
                @if schedule.last_time.is_some() {
                    (text::away(schedule.last_time.as_ref())) br; small { (text::time(schedule.last_time.as_ref(), "")) }
                } @else { span.quiet { "never" } }
            }
            td.wide.payload { code { (payload.unwrap_or_default()) } }
            td { div.row-actions {
                @if schedule.paused { a.button href={ (address) "/resume" } data-dialog { "Resume" } }
                @else { a.button href={ (address) "/pause" } data-dialog { "Pause" } }
                a.button.risky href={ (address) "/delete" } data-dialog { "Delete" }
            } }
        }
    }
}

/// Returns the form for something that is done to a schedule.
pub(super) async fn form(visitor: Visitor, Path((name, verb)): Path<(String, String)>) -> Answer {
    let request = GetScheduleRequest { name: name.clone() };
    let answer = visitor.api().schedule.get_schedule(request).await?.into_inner();
    let schedule = answer.schedule.ok_or_else(incomplete)?;
    let (title, text, is_danger) = match verb.as_str() {
        "pause" => ("Pause this schedule", "Ticks that pass meanwhile are lost.", false),
        "resume" => ("Resume this schedule", "It goes on with its next tick.", false),
        "delete" => ("Delete this schedule", "Items that it has pushed stay.", true),
        _ => return Err(unknown()),
    };
    let (button, _) = title.split_once(' ').unwrap_or((title, ""));
    let action = format!("/schedules/{}/{verb}", text::encode(&name));
    let form = Form {
        title,
        text: html! { p { strong { (name) } " pushes 1 item into " strong { (schedule.queue) } " at each tick of " code { (schedule.cron) } ". " (text) } },
        fields: html! {},
        action: &action,
        button,
        is_danger,
        back: "/schedules",
    };
    Ok(shown(form.page(&visitor, Section::Schedules, None)))
}

fn unknown() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "There is no such page.")
}

pub(super) async fn act(visitor: Visitor, Path((name, verb)): Path<(String, String)>) -> Answer {
    let mut api = visitor.api().schedule;
    let notice = match verb.as_str() {
        "pause" => {
            api.pause_schedule(PauseScheduleRequest { name }).await?;
            "schedule-paused"
        }
        "resume" => {
            api.resume_schedule(ResumeScheduleRequest { name }).await?;
            "schedule-resumed"
        }
        "delete" => {
            api.delete_schedule(DeleteScheduleRequest { name }).await?;
            "schedule-deleted"
        }
        _ => return Err(unknown()),
    };
    Ok(done("/schedules", notice, 1))
}

/// What is asked of someone who creates a schedule.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NewSchedule {
    name: String,
    queue: String,
    cron: String,
    time_zone: String,
    payload: String,
}

pub(super) async fn create_form(visitor: Visitor) -> Answer {
    Ok(shown(create_page(&visitor, &NewSchedule::default(), None)))
}

fn create_page(visitor: &Visitor, new: &NewSchedule, problem: Option<&Problem>) -> Markup {
    let field = |name, label, value: &String, placeholder, hint| {
        Field { name, label, value, hint, placeholder }.line(problem)
    };
    let form = Form {
        title: "New schedule",
        text: html! {},
        fields: html! {
            (field("name", "Name", &new.name, "nightly-report", "Letters, digits and . _ -"))
            (field("queue", "Queue", &new.queue, "reports", "The queue that gets an item at each tick."))
            (field("cron", "Cron", &new.cron, "0 3 * * *", "Minute, hour, day of month, month, day of week; seconds in front if wanted."))
            (field("time_zone", "Time zone", &new.time_zone, "UTC", "For example Europe/Vienna."))
            div.field {
                label for="payload" { "Payload of each item" }
                textarea #payload name="payload" rows="4" spellcheck="false" { "\n" (new.payload) }
            }
        },
        action: "/schedules",
        button: "Create",
        is_danger: false,
        back: "/schedules",
    };
    form.page(visitor, Section::Schedules, problem)
}

pub(super) async fn create(visitor: Visitor, Body(new): Body<NewSchedule>) -> Answer {
    let item = NewItem { payload: new.payload.replace("\r\n", "\n").into(), ..NewItem::default() };
    let schedule = Schedule {
        name: new.name.trim().to_owned(),
        queue: new.queue.trim().to_owned(),
        cron: new.cron.trim().to_owned(),
        time_zone: new.time_zone.trim().to_owned(),
        item: Some(item),
        ..Schedule::default()
    };
    let request = CreateScheduleRequest { schedule: Some(schedule) };
    match visitor.api().schedule.create_schedule(request).await {
        Ok(_) => Ok(done("/schedules", "schedule-created", 1)),
        Err(status) => {
            let problem = Problem::from(status);
            let page = create_page(&visitor, &new, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}
