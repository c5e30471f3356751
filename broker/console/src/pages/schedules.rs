//! Items that happen again.

use axum::{Form as Body, extract::Path, http::StatusCode};
use croner::parser::{CronParser, Seconds, Year};
use maud::{Markup, html};
use prost_types::FieldMask;
use serde::Deserialize;
use sluicegate_proto::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListSchedulesRequest,
    NewItem, PauseScheduleRequest, ResumeScheduleRequest, Schedule, TriggerScheduleRequest,
    UpdateScheduleRequest,
};
use tonic::Status;

use super::{
    answer::{Answer, done, queue_address, rejected, shown},
    frame::{Field, Form, Section, badge, page},
    operations,
};
use crate::{api::incomplete, problem::Problem, text, visitor::Visitor};

/// The most schedules that the page shows.
const MOST: usize = 1_000;
/// Characters of a payload in the list.
const PREVIEW: usize = 80;
/// Characters of the reason why a tick was not pushed.
const REASON: usize = 300;

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
    html! {
        tr {
            th scope="row" {
                (schedule.name) @if schedule.paused { " " (badge("warn", "paused")) }
                br; small { "into " a.row href=(queue_address(&schedule.queue)) { (schedule.queue) } }
            }
            td { @if let Some(words) = in_words(&schedule.cron) { (words) br; } code { (schedule.cron) } " " small { (zone(schedule)) } }
            td.middle { (next(schedule)) }
            td.middle { (last(schedule)) }
            td.wide.payload { code { (payload.unwrap_or_default()) } }
            td { div.row-actions {
                a.button href={ (address) "/run" } data-dialog { "Run now" }
                a.button href={ (address) "/edit" } data-dialog { "Edit" }
                @if schedule.paused { a.button href={ (address) "/resume" } data-dialog { "Resume" } }
                @else { a.button href={ (address) "/pause" } data-dialog { "Pause" } }
                a.button.risky href={ (address) "/delete" } data-dialog { "Delete" }
            } }
        }
    }
}

fn zone(schedule: &Schedule) -> &str {
    if schedule.time_zone.is_empty() { "UTC" } else { &schedule.time_zone }
}

/// Returns what a cron expression means: `Every day at 03:00`; `None` for one that is new to this broker.
fn in_words(cron: &str) -> Option<String> {
    let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
    let words = parser.parse(cron).ok()?.describe();
    let words = words.trim_end_matches('.');
    if let Some(rest) = words.strip_prefix("At every ") {
        return Some(format!("Every {rest}"));
    }
    let is_time = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b':');
    match words.strip_prefix("At ") {
        Some(time) if is_time(time) => Some(format!("Every day at {time}")),
        _ => Some(words.to_owned()),
    }
}

/// Returns the next ticks: how far away the first one is, and when they are.
fn next(schedule: &Schedule) -> Markup {
    if schedule.paused {
        return html! { span.quiet { "not while paused" } };
    }
    html! {
        @match schedule.next_times.first() {
            Some(first) => (text::away(Some(first))),
            None => span.quiet { "never again" },
        }
        @for tick in &schedule.next_times { br; small { (text::time(Some(tick), "")) } }
    }
}

/// Returns what became of the last tick.
fn last(schedule: &Schedule) -> Markup {
    let last = schedule.last_time.as_ref();
    html! {
        @if !schedule.last_error.is_empty() {
            (badge("bad", "not pushed"))
            br; small.reason { (text::preview(schedule.last_error.as_bytes(), REASON)) " It is tried again." }
            br;
        }
        @if last.is_some() {
            "pushed " (text::away(last)) br; small { (text::time(last, "")) }
        } @else { span.quiet { "never" } }
    }
}

async fn get(visitor: &Visitor, name: &str) -> Result<Schedule, Status> {
    let request = GetScheduleRequest { name: name.to_owned() };
    let answer = visitor.api().schedule.get_schedule(request).await?.into_inner();
    answer.schedule.ok_or_else(incomplete)
}

/// Returns the form for something that is done to a schedule.
pub(super) async fn form(visitor: Visitor, Path((name, verb)): Path<(String, String)>) -> Answer {
    let schedule = get(&visitor, &name).await?;
    let (title, button, text, is_danger) = match verb.as_str() {
        "edit" => return Ok(shown(edit_page(&visitor, &Entered::of(&schedule), None))),
        "run" => (
            "Run this schedule now",
            "Push 1 item",
            "This pushes one more item now; the ticks stay as they are.",
            false,
        ),
        "pause" => ("Pause this schedule", "Pause", "Ticks that pass meanwhile are lost.", false),
        "resume" => ("Resume this schedule", "Resume", "It goes on with its next tick.", false),
        "delete" => ("Delete this schedule", "Delete", "Items that it has pushed stay.", true),
        _ => return Err(unknown()),
    };
    let action = format!("/schedules/{}/{verb}", text::encode(&name));
    let form = Form {
        title,
        text: html! { p { strong { (name) } " pushes 1 item into " strong { (schedule.queue) } " at each tick of " code { (schedule.cron) } ". " (text) } },
        fields: html! {
            @if verb == "run" { (operations::once()) }
        },
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

pub(super) async fn act(
    visitor: Visitor,
    Path((name, verb)): Path<(String, String)>,
    Body(entered): Body<Entered>,
) -> Answer {
    let mut api = visitor.api().schedule;
    let notice = match verb.as_str() {
        "edit" => return change(&visitor, Entered { name, ..entered }).await,
        "run" => {
            let request_id = entered.request_id;
            api.trigger_schedule(TriggerScheduleRequest { name, request_id }).await?;
            "schedule-run"
        }
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

/// What is entered in a form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Entered {
    name: String,
    queue: String,
    cron: String,
    time_zone: String,
    /// Not asked for if it is no text.
    payload: Option<String>,
    /// Names one run.
    request_id: String,
}

impl Entered {
    fn of(schedule: &Schedule) -> Self {
        let payload = schedule.item.as_ref().map(|item| item.payload.to_vec()).unwrap_or_default();
        Self {
            name: schedule.name.clone(),
            queue: schedule.queue.clone(),
            cron: schedule.cron.clone(),
            time_zone: schedule.time_zone.clone(),
            payload: String::from_utf8(payload).ok(),
            request_id: String::new(),
        }
    }

    fn payload(&self) -> String {
        self.payload.clone().unwrap_or_default().replace("\r\n", "\n")
    }

    /// Returns the schedule with what was changed in the form, and the names of those fields. What nobody touched stays as
    /// it is, even if it was changed elsewhere meanwhile.
    fn change(&self, before: &Schedule) -> (Schedule, Vec<String>) {
        let shown = Self::of(before);
        let mut schedule = before.clone();
        let mut paths = Vec::new();
        let fields = [
            ("queue", &self.queue, &shown.queue, &mut schedule.queue),
            ("cron", &self.cron, &shown.cron, &mut schedule.cron),
            ("time_zone", &self.time_zone, &shown.time_zone, &mut schedule.time_zone),
        ];
        for (name, entered, shown, value) in fields {
            if entered.trim() != shown {
                entered.trim().clone_into(value);
                paths.push(name.to_owned());
            }
        }
        if self.payload.is_some() && self.payload() != shown.payload() {
            schedule.item.get_or_insert_default().payload = self.payload().into();
            paths.push("item".to_owned());
        }
        (schedule, paths)
    }

    fn fields(&self, problem: Option<&Problem>) -> Markup {
        let field = |name, label, value: &String, placeholder, hint| {
            Field { name, label, value, hint, placeholder }.line(problem)
        };
        html! {
            (field("queue", "Queue", &self.queue, "reports", "The queue that gets an item at each tick."))
            (field("cron", "Cron", &self.cron, "0 3 * * *", "Minute, hour, day of month, month, day of week; seconds in front if wanted."))
            (field("time_zone", "Time zone", &self.time_zone, "UTC", "For example Europe/Vienna."))
            @if let Some(payload) = &self.payload {
                div.field {
                    label for="payload" { "Payload of each item" }
                    textarea #payload name="payload" rows="4" spellcheck="false" { "\n" (payload) }
                }
            } @else { p.quiet { "The payload is no text, and stays as it is." } }
        }
    }
}

pub(super) async fn create_form(visitor: Visitor) -> Answer {
    let empty = Entered { payload: Some(String::new()), ..Entered::default() };
    Ok(shown(create_page(&visitor, &empty, None)))
}

fn create_page(visitor: &Visitor, new: &Entered, problem: Option<&Problem>) -> Markup {
    let name = Field {
        name: "name",
        label: "Name",
        value: &new.name,
        hint: "Letters, digits and . _ -",
        placeholder: "nightly-report",
    };
    let form = Form {
        title: "New schedule",
        text: html! {},
        fields: html! { (name.line(problem)) (new.fields(problem)) },
        action: "/schedules",
        button: "Create",
        is_danger: false,
        back: "/schedules",
    };
    form.page(visitor, Section::Schedules, problem)
}

pub(super) async fn create(visitor: Visitor, Body(new): Body<Entered>) -> Answer {
    let item = NewItem { payload: new.payload().into(), ..NewItem::default() };
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

fn edit_page(visitor: &Visitor, entered: &Entered, problem: Option<&Problem>) -> Markup {
    let action = format!("/schedules/{}/edit", text::encode(&entered.name));
    let form = Form {
        title: "Edit this schedule",
        text: html! { p { strong { (entered.name) } ": if its times change, its next tick is the first one from now." } },
        fields: entered.fields(problem),
        action: &action,
        button: "Save",
        is_danger: false,
        back: "/schedules",
    };
    form.page(visitor, Section::Schedules, problem)
}

async fn change(visitor: &Visitor, entered: Entered) -> Answer {
    let before = get(visitor, &entered.name).await?;
    let (schedule, paths) = entered.change(&before);
    if paths.is_empty() {
        return Ok(done("/schedules", "schedule-saved", 0));
    }
    let update_mask = Some(FieldMask { paths });
    let request = UpdateScheduleRequest { schedule: Some(schedule), update_mask };
    match visitor.api().schedule.update_schedule(request).await {
        Ok(_) => Ok(done("/schedules", "schedule-saved", 1)),
        Err(status) => {
            let problem = Problem::from(status);
            let page = edit_page(visitor, &entered, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cron_expressions_are_said_in_words() {
        for (cron, words) in [
            ("0 3 * * *", "Every day at 03:00"),
            ("*/15 * * * *", "Every 15 minutes"),
            ("*/10 * * * * *", "Every 10 seconds"),
            ("0 12 * * MON", "At 12:00, on Monday"),
            ("0 12 15 * *", "At 12:00, on day 15"),
        ] {
            assert_eq!(in_words(cron).as_deref(), Some(words), "{cron}");
        }
        assert_eq!(in_words("now and then"), None);
    }

    #[test]
    fn what_nobody_touched_is_not_changed() {
        let item = NewItem { payload: "a\r\nb".into(), priority: 3, ..NewItem::default() };
        let schedule =
            Schedule { cron: "0 3 * * *".to_owned(), item: Some(item), ..Schedule::default() };
        // Browsers send lines of text areas with both characters.
        let shown = Entered { payload: Some("a\r\nb".to_owned()), ..Entered::of(&schedule) };
        assert_eq!(shown.change(&schedule), (schedule.clone(), vec![]));
        let edited = Entered { payload: Some("c\r\nd".to_owned()), ..Entered::of(&schedule) };
        let (changed, paths) =
            Entered { cron: " 0 4 * * * ".to_owned(), ..edited }.change(&schedule);
        assert_eq!(paths, ["cron", "item"]);
        let item = changed.item.unwrap();
        assert_eq!((changed.cron.as_str(), item.payload.as_ref()), ("0 4 * * *", &b"c\nd"[..]));
        assert_eq!(item.priority, 3, "the rest of the item stays");
        let binary = NewItem { payload: vec![0xff].into(), ..NewItem::default() };
        let binary = Schedule { item: Some(binary), ..schedule };
        assert_eq!(Entered { payload: None, ..Entered::of(&binary) }.change(&binary).1, [""; 0]);
    }
}
