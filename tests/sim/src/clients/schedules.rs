//! Schedules: created, paused, changed, triggered and deleted while they tick; others that tick rarely, and in storms. What they push goes to a
//! queue of its own, from which nobody takes items unseen: so a tick that nobody has seen was not pushed.

use std::{sync::Arc, time::Duration};

use prost_types::FieldMask;
use sluicegate_checker::{
    history::{Answer, NewItem, Request, Response, Settings, Times},
    messages::{TICK, pushed},
};
use sluicegate_proto::v1::{self as pb, schedule_service_server::ScheduleService as _};

use super::{
    Clients,
    api::{NodeRef, ask, is_open},
};
use crate::{cluster::Failed, plan::RARELY};

/// The queue that gets the items.
pub(crate) const TICKS: &str = "ticks";
/// Seconds between two ticks of schedules that are changed.
const EVERY: [u64; 4] = [5, 10, 15, 20];
const SECOND: u64 = 1_000_000;

/// Returns the settings of the queue, in which items stay until they are settled.
pub(crate) fn settings() -> Settings {
    let dedup_window = 600_000_000; // that of a trigger
    Settings { max_attempts: 0, max_deliveries: 0, dedup_window, ..Settings::default() }
}

fn name(number: u64) -> String {
    format!("schedule{number}")
}

/// Operates one schedule until the end.
pub(super) async fn operate(clients: Arc<Clients>, number: u64) {
    let (client, schedule) = (format!("scheduler {number}"), name(number));
    let times = || {
        let every = *clients.dice.one_of(&EVERY).unwrap_or(&EVERY[0]) * SECOND;
        Times { every, offset: 0 }
    };
    let change = |request| clients.change_schedule(&client, request);
    change(Request::CreateSchedule { schedule: schedule.clone(), times: times() }).await;
    let mut triggered = 0;
    while clients.pause(1_000, 30_000).await {
        let schedule = schedule.clone();
        match clients.dice.number(0, 5) {
            0 | 1 => {
                change(Request::PauseSchedule { schedule: schedule.clone() }).await;
                clients.pause(0, 20_000).await;
                change(Request::ResumeSchedule { schedule }).await;
            }
            2 => change(Request::UpdateSchedule { schedule, times: times() }).await,
            3 => {
                change(Request::DeleteSchedule { schedule: schedule.clone() }).await;
                clients.pause(0, 10_000).await;
                change(Request::CreateSchedule { schedule, times: times() }).await;
            }
            _ => {
                triggered += 1;
                clients.trigger(&client, &schedule, triggered).await;
            }
        }
    }
}

fn rare_name(second: u64) -> String {
    format!("rare{second}")
}

/// Creates a schedule that nobody changes until the end.
pub(super) async fn tick_rarely(clients: Arc<Clients>, second: u64) {
    let times = Times { every: RARELY * SECOND, offset: second * SECOND };
    let request = Request::CreateSchedule { schedule: rare_name(second), times };
    clients.change_schedule("scheduler", request).await;
}

/// Deletes all schedules.
pub(crate) async fn delete_all(clients: &Clients) {
    let names = (1..=clients.plan.schedules).map(name);
    for schedule in names.chain(clients.plan.rare_ticks.iter().copied().map(rare_name)) {
        clients.change_schedule("drain", Request::DeleteSchedule { schedule }).await;
    }
}

fn cron(Times { every, offset }: Times) -> String {
    let (every, offset) = (every / SECOND, offset / SECOND);
    if every < 60 {
        format!("*/{every} * * * * *")
    } else {
        format!("{} {}-59/{} * * * *", offset % 60, offset / 60, every / 60)
    }
}

fn message(name: &str, times: Times) -> pb::Schedule {
    pb::Schedule {
        name: name.to_owned(),
        queue: TICKS.to_owned(),
        cron: cron(times),
        item: Some(pb::NewItem { payload: TICK.into(), ..pb::NewItem::default() }),
        ..pb::Schedule::default()
    }
}

/// Makes a call whose answer is of no interest.
macro_rules! done {
    ($node:expr, $path:literal, $method:ident, $message:expr) => {
        match ask!($node, None, $path, $method, $message) {
            Ok(_) => Answer::Ok(Response::Done),
            Err(Failed(answer)) => answer,
        }
    };
}

impl Clients {
    /// Changes a schedule, and tries until that is answered.
    async fn change_schedule(&self, client: &str, request: Request) {
        for _ in 0..100 {
            if let Some(node) = self.cluster.any() {
                let call = self.recorder.start(client, &node.name, request.clone());
                let answer = ask_for_change(&node, &request).await;
                call.end(answer.clone());
                if !is_open(&answer) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Triggers a schedule, and again if it is not known whether that took effect. What it pushes is recorded as pushed by the client.
    async fn trigger(&self, client: &str, schedule: &str, number: u64) {
        let name = format!("{schedule}!{number}");
        let item = NewItem { name: name.clone(), dedup_id: name, ..NewItem::default() };
        for _ in 0..3 {
            let Some(node) = self.cluster.any() else { continue };
            let request =
                Request::Push { queue: TICKS.to_owned(), items: vec![item.clone()], stream: None };
            let call = self.recorder.start(client, &node.name, request);
            let message = pb::TriggerScheduleRequest {
                name: schedule.to_owned(),
                request_id: number.to_string(),
            };
            let patience = self.patience();
            let answer = match ask!(
                node,
                patience,
                "ScheduleService/TriggerSchedule",
                trigger_schedule,
                message
            ) {
                Ok(answer) => {
                    Answer::Ok(Response::Pushed(pushed(answer.result.into_iter().collect())))
                }
                Err(Failed(answer)) => answer,
            };
            call.end(answer.clone());
            if !is_open(&answer) {
                return;
            }
        }
    }
}

async fn ask_for_change(node: &NodeRef, request: &Request) -> Answer {
    match request {
        Request::CreateSchedule { schedule, times } => {
            let schedule = Some(message(schedule, *times));
            let message = pb::CreateScheduleRequest { schedule };
            done!(node, "ScheduleService/CreateSchedule", create_schedule, message)
        }
        Request::UpdateSchedule { schedule, times } => {
            let schedule = Some(message(schedule, *times));
            let update_mask = Some(FieldMask { paths: vec!["cron".to_owned()] });
            let message = pb::UpdateScheduleRequest { schedule, update_mask };
            done!(node, "ScheduleService/UpdateSchedule", update_schedule, message)
        }
        Request::PauseSchedule { schedule } => {
            let message = pb::PauseScheduleRequest { name: schedule.clone() };
            done!(node, "ScheduleService/PauseSchedule", pause_schedule, message)
        }
        Request::ResumeSchedule { schedule } => {
            let message = pb::ResumeScheduleRequest { name: schedule.clone() };
            done!(node, "ScheduleService/ResumeSchedule", resume_schedule, message)
        }
        Request::DeleteSchedule { schedule } => {
            let message = pb::DeleteScheduleRequest { name: schedule.clone() };
            done!(node, "ScheduleService/DeleteSchedule", delete_schedule, message)
        }
        _ => Answer::Refused("no change of a schedule".to_owned()),
    }
}
