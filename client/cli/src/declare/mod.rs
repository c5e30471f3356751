//! `sluice export` and `sluice apply`: queues, templates and schedules in a file.
//!
//! # Layout
//! `queue`, `template` and `schedule` are the entries of the file, `plan` is what has to be done so that a broker is as the file says, `apply`
//! does it.

mod apply;
mod plan;
pub(crate) mod queue;
mod schedule;
pub(crate) mod template;

use std::{collections::HashSet, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use sluicegate_client::proto::{Queue, QueueTemplate, Schedule};

pub(crate) use self::apply::{ApplyArgs, apply};
use self::{queue::QueueEntry, schedule::ScheduleEntry, template::TemplateEntry};
use crate::{
    context::Context,
    failure::Failure,
    push::read_file,
    schedule::list_schedules,
    stats::{Which, list_queues},
    template::list_templates,
};

const EXPORT_HELP: &str = "\
The file names settings that differ from their defaults. `sluice apply` reads it. Schedules are those of the exported queues, as far \
as the token may manage them. Templates are left out if only some queues are asked for.";

/// The command line of `sluice export`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXPORT_HELP)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    which: Which,
}

/// A file of queues, templates and schedules. What has no section is not looked at.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Declaration {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queues: Option<Vec<QueueEntry>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    templates: Option<Vec<TemplateEntry>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schedules: Option<Vec<ScheduleEntry>>,
}

impl Declaration {
    fn of(queues: &[Queue], templates: &[QueueTemplate], schedules: &[Schedule]) -> Self {
        let templates: Vec<_> = templates.iter().map(TemplateEntry::from).collect();
        let schedules: Vec<_> = schedules.iter().map(ScheduleEntry::from).collect();
        Self {
            queues: Some(queues.iter().map(QueueEntry::from).collect()),
            // A token that may not see templates or schedules gets none: that must not read as that there are none.
            templates: (!templates.is_empty()).then_some(templates),
            schedules: (!schedules.is_empty()).then_some(schedules),
        }
    }

    /// Reads a file; `-` is stdin.
    fn read(path: &PathBuf) -> Result<Self, Failure> {
        let text = read_file(path)?;
        let failed = |why: String| {
            let path = path.clone();
            Failure::File { path, source: io::Error::new(io::ErrorKind::InvalidData, why) }
        };
        let read: Self =
            yaml_serde::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        read.check().map_err(failed)?;
        Ok(Self {
            queues: read.queues.map(|all| all.into_iter().map(QueueEntry::brief).collect()),
            templates: read
                .templates
                .map(|all| all.into_iter().map(TemplateEntry::brief).collect()),
            schedules: read
                .schedules
                .map(|all| all.into_iter().map(ScheduleEntry::brief).collect()),
        })
    }

    fn check(&self) -> Result<(), String> {
        let queues = self.queues.iter().flatten().map(|entry| ("queue", &entry.name));
        let schedules = self.schedules.iter().flatten().map(|entry| ("schedule", &entry.name));
        let templates = self.templates.iter().flatten();
        if templates.clone().any(|entry| !entry.settings.name.is_empty()) {
            return Err("the settings of a template have no `name`".to_owned());
        }
        let templates = templates.map(|entry| ("template", &entry.pattern));
        let mut seen = HashSet::new();
        for entry in queues.chain(templates).chain(schedules) {
            if entry.1.is_empty() {
                return Err(format!("missing field `name` of a {}", entry.0));
            }
            if !seen.insert(entry) {
                return Err(format!("{} {} is there twice", entry.0, entry.1));
            }
        }
        // Before the first step, so that a fault of the last entry leaves nothing half done.
        self.schedules
            .iter()
            .flatten()
            .try_for_each(|entry| Schedule::try_from(entry.clone()).map(drop))
    }
}

pub(crate) async fn export(context: &Context, args: ExportArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let queues = list_queues(&client, &args.which).await?;
    let mut schedules = list_schedules(&client).await?;
    let templates = if args.which.is_all() { list_templates(&client).await? } else { Vec::new() };
    if !args.which.is_all() {
        let names: HashSet<&str> = queues.iter().map(|queue| queue.name.as_str()).collect();
        schedules.retain(|schedule| names.contains(schedule.queue.as_str()));
    }
    let declaration = Declaration::of(&queues, &templates, &schedules);
    let text = yaml_serde::to_string(&declaration).map_err(io::Error::other)?;
    let value = serde_json::to_value(&declaration).map_err(io::Error::other)?;
    Ok(context.output.one(&value, text.trim_end())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Declaration, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queues.yaml");
        std::fs::write(&path, text).unwrap();
        Declaration::read(&path)
    }

    #[test]
    fn a_file_reads_back_as_it_was_exported() {
        let queues = [queue::tests::full(), Queue { name: "q".to_owned(), ..Queue::default() }];
        let schedules = [Schedule {
            name: "s".to_owned(),
            queue: "q".to_owned(),
            cron: "@daily".to_owned(),
            ..Schedule::default()
        }];
        let settings = Some(Queue { max_attempts: Some(3), ..Queue::default() });
        let pattern = "q.*".to_owned();
        let templates = [QueueTemplate { pattern, settings, ..QueueTemplate::default() }];
        let declaration = Declaration::of(&queues, &templates, &schedules);
        let none = Declaration::of(&queues, &[], &[]);
        assert_eq!((none.schedules, none.templates), (None, None), "they may not be shown");
        let text = yaml_serde::to_string(&declaration).unwrap();
        assert_eq!(read(&text).ok(), Some(declaration), "{text}");
    }

    #[test]
    fn faults_of_a_file_are_named() {
        for (text, why) in [
            ("queue: []", "unknown field `queue`"),
            ("queues:\n  - name: a\n  - name: a\n", "queue a is there twice"),
            ("queues:\n  - max_attempts: 3\n", "missing field `name`"),
            ("templates: [{pattern: a}, {pattern: a}]", "template a is there twice"),
            ("templates: [{settings: {max_attempts: 3}}]", "missing field `pattern`"),
            ("templates: [{pattern: a, max_attempts: 3}]", "unknown field `max_attempts`"),
            ("templates: [{pattern: a, settings: {name: b}}]", "have no `name`"),
            ("queues:\n  - name: a\n    lease: soon\n", "expected a duration"),
            ("queues: [", "line"),
            (
                "schedules: [{name: s, queue: q, cron: '@daily', item: {payload_base64: '?'}}]",
                "schedule s: payload_base64",
            ),
        ] {
            let shown = read(text).unwrap_err().to_string();
            assert!(shown.contains(why) && shown.contains("queues.yaml"), "{text:?}: {shown}");
        }
    }
}
