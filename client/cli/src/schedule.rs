//! `sluice schedule`: items that are pushed at set times.

use std::path::PathBuf;

use clap::Subcommand;
use prost_types::FieldMask;
use serde_json::json;
use sluicegate_client::{
    Client,
    proto::{
        CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListSchedulesRequest,
        NewItem, PauseScheduleRequest, ResumeScheduleRequest, Schedule, TriggerScheduleRequest,
        UpdateScheduleRequest,
    },
};

use crate::{
    confirm::{self, Confirmation},
    context::Context,
    failure::Failure,
    json,
    push::{ItemArgs, read_file},
    repeat,
};

/// The command line of `sluice schedule`.
#[derive(Debug, Subcommand)]
pub(crate) enum ScheduleCommand {
    /// Create a schedule
    Create(Box<CreateArgs>),
    /// Show a schedule
    Get(Name),
    /// List the schedules
    List,
    /// Change some of a schedule's settings
    Update(UpdateArgs),
    /// Push a schedule's item now; its ticks stay as they are
    Run(Name),
    /// Delete a schedule; items it pushed stay
    Delete {
        /// The schedule
        name: String,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Pause a schedule; ticks that pass meanwhile are skipped
    Pause(Name),
    /// Resume a schedule at its next tick
    Resume(Name),
}

/// Names a schedule.
#[derive(Debug, clap::Args)]
pub(crate) struct Name {
    /// The schedule
    name: String,
}

/// The command line of `sluice schedule create`.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// Its name
    name: String,
    /// The queue that gets the items
    queue: String,
    /// Minute, hour, day of month, month, day of week, as one argument; or six fields with seconds in front
    cron: String,
    /// The payload of each item
    #[arg(conflicts_with = "file", default_value = "", hide_default_value = true)]
    text: String,
    /// A file whose content is the payload
    #[arg(long, short)]
    file: Option<PathBuf>,
    /// Time zone of the fields
    #[arg(long, value_name = "NAME", default_value = "UTC")]
    time_zone: String,
    /// Create it paused
    #[arg(long)]
    paused: bool,
    #[command(flatten)]
    item: ItemArgs,
}

/// The command line of `sluice schedule update`.
#[derive(Debug, clap::Args)]
pub(crate) struct UpdateArgs {
    /// The schedule
    name: String,
    /// The queue that gets the items
    #[arg(long)]
    queue: Option<String>,
    /// Minute, hour, day of month, month, day of week; or six fields with seconds in front
    #[arg(long)]
    cron: Option<String>,
    /// Time zone of the fields
    #[arg(long, value_name = "NAME")]
    time_zone: Option<String>,
    /// The payload of each item; the rest of the item stays
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    payload: Option<String>,
    /// A file whose content is the payload
    #[arg(long, short)]
    file: Option<PathBuf>,
}

async fn update(client: &Client, args: UpdateArgs) -> Result<Option<Schedule>, Failure> {
    let mut service = client.schedule_service();
    let payload = match &args.file {
        Some(path) => Some(read_file(path)?),
        None => args.payload.map(String::into_bytes),
    };
    let mut schedule = Schedule { name: args.name.clone(), ..Schedule::default() };
    let mut paths = Vec::new();
    let mut given = |path: &str, is_given: bool| {
        if is_given {
            paths.push(path.to_owned());
        }
    };
    given("queue", args.queue.is_some());
    given("cron", args.cron.is_some());
    given("time_zone", args.time_zone.is_some());
    given("item", payload.is_some());
    schedule.queue = args.queue.unwrap_or_default();
    schedule.cron = args.cron.unwrap_or_default();
    schedule.time_zone = args.time_zone.unwrap_or_default();
    if paths.is_empty() {
        return Err(Failure::Usage("say which settings to change".into()));
    }
    if let Some(payload) = payload {
        let request = client.request(GetScheduleRequest { name: args.name });
        let there = service.get_schedule(request).await?.into_inner().schedule;
        let item = there.and_then(|schedule| schedule.item).unwrap_or_default();
        schedule.item = Some(NewItem { payload: payload.into(), ..item });
    }
    let update_mask = Some(FieldMask { paths });
    let request = UpdateScheduleRequest { schedule: Some(schedule), update_mask };
    Ok(service.update_schedule(client.request(request)).await?.into_inner().schedule)
}

pub(crate) async fn run(context: &Context, command: ScheduleCommand) -> Result<(), Failure> {
    let is_asked = match &command {
        ScheduleCommand::Delete { confirmation, .. } => {
            confirmation.is_needed("schedule delete")?
        }
        _ => false,
    };
    let client = context.client().await?;
    let mut service = client.schedule_service();
    let schedule = match command {
        ScheduleCommand::Create(args) => {
            let payload = match &args.file {
                Some(path) => read_file(path)?,
                None => args.text.into_bytes(),
            };
            let schedule = Schedule {
                name: args.name,
                queue: args.queue,
                cron: args.cron,
                time_zone: args.time_zone,
                item: Some(args.item.item(payload).into_proto()),
                paused: args.paused,
                ..Default::default()
            };
            let request = client.request(CreateScheduleRequest { schedule: Some(schedule) });
            service.create_schedule(request).await?.into_inner().schedule
        }
        ScheduleCommand::Get(Name { name }) => {
            let request = client.request(GetScheduleRequest { name });
            service.get_schedule(request).await?.into_inner().schedule
        }
        ScheduleCommand::Pause(Name { name }) => {
            let request = client.request(PauseScheduleRequest { name });
            service.pause_schedule(request).await?.into_inner().schedule
        }
        ScheduleCommand::Resume(Name { name }) => {
            let request = client.request(ResumeScheduleRequest { name });
            service.resume_schedule(request).await?.into_inner().schedule
        }
        ScheduleCommand::Update(args) => update(&client, args).await?,
        ScheduleCommand::Run(Name { name }) => {
            let request_id = repeat::new_request_id();
            let request = TriggerScheduleRequest { name: name.clone(), request_id };
            let call = async || {
                client.schedule_service().trigger_schedule(client.request(request.clone())).await
            };
            let instead = "the item may be pushed or not: see `sluice peek` and `sluice stats` of the schedule's queue before you run it \
                           again";
            let answer = repeat::until_known(context, instead, call).await?;
            let id = answer.result.map(|result| result.id).unwrap_or_default();
            let value = json!({ "schedule": name, "id": id });
            return Ok(context.output.one(&value, &id)?);
        }
        ScheduleCommand::List => return list(context).await,
        ScheduleCommand::Delete { name, .. } => {
            if is_asked {
                confirm::ask(&format!("Delete schedule {name}? The items it pushed stay."))?;
            }
            service
                .delete_schedule(client.request(DeleteScheduleRequest { name: name.clone() }))
                .await?;
            return Ok(context
                .output
                .one(&json!({ "deleted": name }), &format!("{name} deleted"))?);
        }
    };
    Ok(context.output.object(&json::schedule(&schedule.unwrap_or_default()))?)
}

/// Reads the schedules page by page.
pub(crate) async fn list_schedules(client: &Client) -> Result<Vec<Schedule>, Failure> {
    let (mut schedules, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = client.request(ListSchedulesRequest { page_size: 1_000, page_token });
        let page = client.schedule_service().list_schedules(request).await?.into_inner();
        schedules.extend(page.schedules);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(schedules);
        }
    }
}

async fn list(context: &Context) -> Result<(), Failure> {
    let client = context.client().await?;
    let rows = list_schedules(&client).await?.into_iter().map(|schedule| {
        let value = json::schedule(&schedule);
        let next = match (&schedule.next_time, schedule.paused) {
            (_, true) => "paused".to_owned(),
            (time, false) => context.output.time(time.as_ref()),
        };
        let cells = vec![schedule.name, schedule.queue, schedule.cron, schedule.time_zone, next];
        (value, cells)
    });
    let head = ["SCHEDULE", "QUEUE", "CRON", "TIME ZONE", "NEXT"];
    Ok(context.output.list(&head, rows.collect())?)
}
