//! `sluice apply`.

use std::path::PathBuf;

use prost_types::FieldMask;
use sluicegate_client::{
    Client,
    proto::{
        CreateQueueRequest, CreateScheduleRequest, CreateTemplateRequest, DeleteQueueRequest,
        DeleteScheduleRequest, DeleteTemplateRequest, PauseQueueRequest, PauseScheduleRequest,
        ResumeQueueRequest, ResumeScheduleRequest, Schedule, UpdateQueueRequest,
        UpdateScheduleRequest, UpdateTemplateRequest,
    },
};

use super::{
    Declaration,
    plan::{self, Change, Step, There},
    schedule::ScheduleEntry,
};
use crate::{
    confirm::{self, Confirmation},
    context::Context,
    failure::Failure,
    output::harmless,
    schedule::list_schedules,
    stats::{Which, batch, list_queues},
    template::list_templates,
};

const AFTER_HELP: &str = "\
Queues, templates and schedules that the file names are created, or changed so that they are as the file says: a setting that is left out gets its \
default. Whether something is paused changes only if the file says so. `sluice export` writes such a file.

--prune also deletes what the file does not name, of the kinds for which it has a section, after a question. Queues that hold items stay, \
and so do dead-letter queues of queues that stay. The exit code is 1 if a queue stays because it holds items.

Each step is one call, and what is done is not done again: after a failure, run the same command again.";

/// The command line of `sluice apply`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ApplyArgs {
    /// The file, in YAML or JSON; `-`: stdin
    #[arg(long, short)]
    file: PathBuf,
    /// Show what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Delete what the file does not name
    #[arg(long)]
    prune: bool,
    /// With --prune: delete only what has a name that begins with this text
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        requires = "prune"
    )]
    prefix: String,
    #[command(flatten)]
    confirmation: Confirmation,
}

pub(crate) async fn apply(context: &Context, args: ApplyArgs) -> Result<(), Failure> {
    let is_asked = args.prune && !args.dry_run && args.confirmation.is_needed("apply --prune")?;
    let declared = Declaration::read(&args.file)?;
    let client = context.client().await?;
    let queues = list_queues(&client, &Which::default()).await?;
    let schedules = match declared.schedules {
        Some(_) => list_schedules(&client).await?,
        None => Vec::new(),
    };
    let templates = match declared.templates {
        Some(_) => list_templates(&client).await?,
        None => Vec::new(),
    };
    let there = There { queues: &queues, templates: &templates, schedules: &schedules };
    let mut steps = plan::steps(&declared, &there)?;
    if args.prune {
        steps.extend(deletions(&client, &declared, &there, &args.prefix).await?);
    }
    if is_asked {
        ask(&steps)?;
    }
    let mut kept = 0;
    for step in &steps {
        if !args.dry_run {
            run(&client, step).await?;
        }
        kept += usize::from(matches!(step, Step::KeepQueue(..)));
        context.output.one(&step.json(), &harmless(&step.line(), false))?;
    }
    if !context.output.is_json() {
        let text = match (steps.len() - kept, args.dry_run) {
            (0, _) => "nothing to do".to_owned(),
            (n, true) => format!("{n} steps to do; nothing was changed"),
            (n, false) => format!("{n} steps done"),
        };
        eprintln!("sluice: {}", text.replace("1 steps", "1 step"));
    }
    if kept > 0 { Err(Failure::NotPruned(kept)) } else { Ok(()) }
}

/// Returns the deletions, templates and schedules first. Queues that hold items are kept.
async fn deletions(
    client: &Client,
    declared: &Declaration,
    there: &There<'_>,
    prefix: &str,
) -> Result<Vec<Step>, Failure> {
    let (queues, schedules) = plan::surplus(declared, there, prefix);
    let templates = plan::surplus_templates(declared, there, prefix).into_iter();
    let mut steps: Vec<Step> = templates.map(Step::DeleteTemplate).collect();
    steps.extend(schedules.into_iter().map(Step::DeleteSchedule));
    let stats = batch(client, &queues).await?.stats;
    for queue in queues {
        let of_queue = stats.iter().find(|stats| stats.queue == queue);
        let held = of_queue.map_or(0, |of| of.ready + of.delayed + of.reserved + of.blocked);
        steps.push(if held > 0 { Step::KeepQueue(queue, held) } else { Step::DeleteQueue(queue) });
    }
    Ok(steps)
}

fn ask(steps: &[Step]) -> Result<(), Failure> {
    let names: Vec<String> =
        steps.iter().filter(|step| step.is_deletion()).map(Step::subject).collect();
    if names.is_empty() {
        return Ok(());
    }
    let (count, names) = (names.len(), names.join(", "));
    confirm::ask(&format!("Delete what the file does not name, {count} in all: {names}?"))
}

fn mask(changes: &[Change]) -> FieldMask {
    FieldMask { paths: changes.iter().map(|change| change.field.clone()).collect() }
}

fn settings_mask(changes: &[Change]) -> FieldMask {
    let path = |change: &Change| format!("settings.{}", change.field);
    FieldMask { paths: changes.iter().map(path).collect() }
}

fn schedule_of(entry: &ScheduleEntry) -> Result<Option<Schedule>, Failure> {
    Schedule::try_from(entry.clone()).map(Some).map_err(Failure::Usage)
}

async fn run(client: &Client, step: &Step) -> Result<(), Failure> {
    let (mut admin, mut service) = (client.admin_service(), client.schedule_service());
    let mut templates = client.template_service();
    match step {
        Step::CreateTemplate(entry) => {
            let template = Some(entry.clone().into());
            templates.create_template(client.request(CreateTemplateRequest { template })).await?;
        }
        Step::UpdateTemplate(entry, changes) => {
            let (template, update_mask) =
                (Some(entry.clone().into()), Some(settings_mask(changes)));
            let request = UpdateTemplateRequest { template, update_mask };
            templates.update_template(client.request(request)).await?;
        }
        Step::DeleteTemplate(pattern) => {
            let pattern = pattern.clone();
            templates.delete_template(client.request(DeleteTemplateRequest { pattern })).await?;
        }
        Step::CreateQueue(entry) => {
            let queue = Some(entry.clone().into());
            admin.create_queue(client.request(CreateQueueRequest { queue })).await?;
        }
        Step::UpdateQueue(entry, changes) => {
            let (queue, update_mask) = (Some(entry.clone().into()), Some(mask(changes)));
            admin.update_queue(client.request(UpdateQueueRequest { queue, update_mask })).await?;
        }
        Step::PauseQueue(name) => {
            let name = name.clone();
            admin.pause_queue(client.request(PauseQueueRequest { name })).await?;
        }
        Step::ResumeQueue(name) => {
            let name = name.clone();
            admin.resume_queue(client.request(ResumeQueueRequest { name })).await?;
        }
        Step::DeleteQueue(name) => {
            let (name, force) = (name.clone(), false);
            admin.delete_queue(client.request(DeleteQueueRequest { name, force })).await?;
        }
        Step::CreateSchedule(entry) => {
            let schedule = schedule_of(entry)?;
            service.create_schedule(client.request(CreateScheduleRequest { schedule })).await?;
        }
        Step::UpdateSchedule(entry, changes) => {
            let (schedule, update_mask) = (schedule_of(entry)?, Some(mask(changes)));
            let request = UpdateScheduleRequest { schedule, update_mask };
            service.update_schedule(client.request(request)).await?;
        }
        Step::PauseSchedule(name) => {
            let name = name.clone();
            service.pause_schedule(client.request(PauseScheduleRequest { name })).await?;
        }
        Step::ResumeSchedule(name) => {
            let name = name.clone();
            service.resume_schedule(client.request(ResumeScheduleRequest { name })).await?;
        }
        Step::DeleteSchedule(name) => {
            let name = name.clone();
            service.delete_schedule(client.request(DeleteScheduleRequest { name })).await?;
        }
        Step::KeepQueue(..) => {}
    }
    Ok(())
}
