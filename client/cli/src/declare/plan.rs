//! What has to be done so that a broker is as a file says.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Map, Value, json};
use sluicegate_client::proto::{Queue, QueueTemplate, Schedule};

use super::{Declaration, queue::QueueEntry, schedule::ScheduleEntry, template::TemplateEntry};
use crate::{failure::Failure, output, queue::dead_letter_queue};

/// A setting that changes. What is not set is `None`.
#[derive(Debug, PartialEq)]
pub(super) struct Change {
    /// Its name, which is its path in an update mask too.
    pub(super) field: String,
    from: Option<Value>,
    to: Option<Value>,
}

/// One thing to do.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    CreateTemplate(TemplateEntry),
    UpdateTemplate(TemplateEntry, Vec<Change>),
    DeleteTemplate(String),
    CreateQueue(QueueEntry),
    UpdateQueue(QueueEntry, Vec<Change>),
    PauseQueue(String),
    ResumeQueue(String),
    CreateSchedule(ScheduleEntry),
    UpdateSchedule(ScheduleEntry, Vec<Change>),
    PauseSchedule(String),
    ResumeSchedule(String),
    DeleteSchedule(String),
    DeleteQueue(String),
    /// A queue that would be deleted, if it did not hold that many items.
    KeepQueue(String, i64),
}

impl Step {
    /// Returns what is done, to what kind of thing, and its name.
    fn parts(&self) -> (&'static str, &'static str, &str) {
        match self {
            Self::CreateTemplate(entry) => ("create", "template", &entry.pattern),
            Self::UpdateTemplate(entry, _) => ("change", "template", &entry.pattern),
            Self::DeleteTemplate(pattern) => ("delete", "template", pattern),
            Self::CreateQueue(entry) => ("create", "queue", &entry.name),
            Self::UpdateQueue(entry, _) => ("change", "queue", &entry.name),
            Self::PauseQueue(name) => ("pause", "queue", name),
            Self::ResumeQueue(name) => ("resume", "queue", name),
            Self::CreateSchedule(entry) => ("create", "schedule", &entry.name),
            Self::UpdateSchedule(entry, _) => ("change", "schedule", &entry.name),
            Self::PauseSchedule(name) => ("pause", "schedule", name),
            Self::ResumeSchedule(name) => ("resume", "schedule", name),
            Self::DeleteSchedule(name) => ("delete", "schedule", name),
            Self::DeleteQueue(name) => ("delete", "queue", name),
            Self::KeepQueue(name, _) => ("keep", "queue", name),
        }
    }

    pub(super) fn is_deletion(&self) -> bool {
        matches!(self, Self::DeleteQueue(_) | Self::DeleteTemplate(_) | Self::DeleteSchedule(_))
    }

    /// Returns the kind and the name: `queue orders`.
    pub(super) fn subject(&self) -> String {
        let (_, kind, name) = self.parts();
        format!("{kind} {name}")
    }

    fn changes(&self) -> &[Change] {
        match self {
            Self::UpdateQueue(_, changes)
            | Self::UpdateTemplate(_, changes)
            | Self::UpdateSchedule(_, changes) => changes,
            _ => &[],
        }
    }

    /// Returns the step as a line of text.
    pub(super) fn line(&self) -> String {
        let (action, kind, name) = self.parts();
        let shown = |value: &Option<Value>| match value {
            None => "default".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        };
        let changes: Vec<String> = self
            .changes()
            .iter()
            .map(|change| {
                format!("{}: {} → {}", change.field, shown(&change.from), shown(&change.to))
            })
            .collect();
        let more = match self {
            Self::KeepQueue(name, items) => {
                format!(
                    "it holds {}: see `sluice queue delete {name} --force`",
                    output::items(*items)
                )
            }
            _ => changes.join(", "),
        };
        format!("{action:<6}  {kind} {name}  {more}").trim_end().to_owned()
    }

    pub(super) fn json(&self) -> Value {
        let (action, kind, name) = self.parts();
        let mut value = json!({ "action": action, "kind": kind, "name": name });
        let changes = self.changes().iter();
        let changes: Vec<Value> = changes
            .map(|change| json!({ "field": change.field, "from": change.from, "to": change.to }))
            .collect();
        if !changes.is_empty() {
            value["changes"] = changes.into();
        }
        if let Self::KeepQueue(_, items) = self {
            value["items"] = (*items).into();
        }
        value
    }
}

/// What is at the broker.
pub(super) struct There<'a> {
    pub(super) queues: &'a [Queue],
    pub(super) templates: &'a [QueueTemplate],
    pub(super) schedules: &'a [Schedule],
}

/// Returns the steps to what is declared, without deletions.
pub(super) fn steps(declared: &Declaration, there: &There<'_>) -> Result<Vec<Step>, Failure> {
    // Before the queues, whose dead-letter queues may come into being by their creation.
    let mut steps = template_steps(declared, there);
    let queues: BTreeMap<&str, &Queue> =
        there.queues.iter().map(|queue| (queue.name.as_str(), queue)).collect();
    for wanted in declared.queues.iter().flatten() {
        let Some(queue) = queues.get(wanted.name.as_str()) else {
            steps.push(Step::CreateQueue(wanted.clone()));
            continue;
        };
        let found = QueueEntry::from(*queue);
        if found.group != wanted.group {
            let group = |entry: &QueueEntry| entry.group.clone().unwrap_or("default".to_owned());
            return Err(Failure::Usage(format!(
                "queue {} is of group {} and the file says {}: the group of a queue cannot be changed",
                wanted.name,
                group(&found),
                group(wanted)
            )));
        }
        let changes = changes(&found, wanted);
        if !changes.is_empty() {
            steps.push(Step::UpdateQueue(wanted.clone(), changes));
        }
        match wanted.paused {
            Some(true) if !queue.paused => steps.push(Step::PauseQueue(wanted.name.clone())),
            Some(false) if queue.paused => steps.push(Step::ResumeQueue(wanted.name.clone())),
            _ => {}
        }
    }
    let schedules: BTreeMap<&str, &Schedule> =
        there.schedules.iter().map(|schedule| (schedule.name.as_str(), schedule)).collect();
    for wanted in declared.schedules.iter().flatten() {
        let Some(schedule) = schedules.get(wanted.name.as_str()) else {
            steps.push(Step::CreateSchedule(wanted.clone()));
            continue;
        };
        let changes = changes(&ScheduleEntry::from(*schedule), wanted);
        if !changes.is_empty() {
            steps.push(Step::UpdateSchedule(wanted.clone(), changes));
        }
        match wanted.paused {
            Some(true) if !schedule.paused => steps.push(Step::PauseSchedule(wanted.name.clone())),
            Some(false) if schedule.paused => steps.push(Step::ResumeSchedule(wanted.name.clone())),
            _ => {}
        }
    }
    Ok(steps)
}

fn template_steps(declared: &Declaration, there: &There<'_>) -> Vec<Step> {
    let templates: BTreeMap<&str, &QueueTemplate> =
        there.templates.iter().map(|template| (template.pattern.as_str(), template)).collect();
    let mut steps = Vec::new();
    for wanted in declared.templates.iter().flatten() {
        let Some(template) = templates.get(wanted.pattern.as_str()) else {
            steps.push(Step::CreateTemplate(wanted.clone()));
            continue;
        };
        let changes = all_changes(&TemplateEntry::from(*template).settings, &wanted.settings);
        if !changes.is_empty() {
            steps.push(Step::UpdateTemplate(wanted.clone(), changes));
        }
    }
    steps
}

/// Returns the settings in which two entries differ.
fn changes<T: Serialize>(from: &T, to: &T) -> Vec<Change> {
    let is_setting =
        |change: &Change| !matches!(change.field.as_str(), "name" | "group" | "paused");
    all_changes(from, to).into_iter().filter(is_setting).collect()
}

/// Returns the fields in which two entries differ.
fn all_changes<T: Serialize>(from: &T, to: &T) -> Vec<Change> {
    let (from, to) = (fields(from), fields(to));
    let names: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
    names
        .iter()
        .filter(|name| from.get(**name) != to.get(**name))
        .map(|name| Change {
            field: (*name).clone(),
            from: from.get(*name).cloned(),
            to: to.get(*name).cloned(),
        })
        .collect()
}

/// Returns the fields of an entry that are not left out.
pub(super) fn fields<T: Serialize>(entry: &T) -> Map<String, Value> {
    match serde_json::to_value(entry) {
        Ok(Value::Object(fields)) => fields,
        // Entries are structures of plain values.
        _ => Map::new(),
    }
}

/// Returns the templates whose patterns begin with `prefix` and that the file does not name, if it has a section for them.
pub(super) fn surplus_templates(
    declared: &Declaration,
    there: &There<'_>,
    prefix: &str,
) -> Vec<String> {
    let Some(named) = &declared.templates else { return Vec::new() };
    let named: BTreeSet<&str> = named.iter().map(|entry| entry.pattern.as_str()).collect();
    let patterns = there.templates.iter().map(|template| template.pattern.as_str());
    let is_surplus = |pattern: &&str| pattern.starts_with(prefix) && !named.contains(pattern);
    patterns.filter(is_surplus).map(str::to_owned).collect()
}

/// Returns the queues and schedules whose names begin with `prefix` and that the file does not name, as far as it has a section for
/// them. A queue that gets the dead letters of one that stays, stays. Queues come before those that get their dead letters.
pub(super) fn surplus(
    declared: &Declaration,
    there: &There<'_>,
    prefix: &str,
) -> (Vec<String>, Vec<String>) {
    let mut schedules = Vec::new();
    if let Some(named) = &declared.schedules {
        let named: BTreeSet<&str> = named.iter().map(|entry| entry.name.as_str()).collect();
        let names = there.schedules.iter().map(|schedule| schedule.name.as_str());
        schedules.extend(
            names
                .filter(|name| name.starts_with(prefix) && !named.contains(name))
                .map(str::to_owned),
        );
    }
    let Some(named) = &declared.queues else { return (Vec::new(), schedules) };
    let named: BTreeSet<&str> = named.iter().map(|entry| entry.name.as_str()).collect();
    // As the queues will be.
    let wanted = declared.queues.iter().flatten().map(|entry| Queue::from(entry.clone()));
    let others = there.queues.iter().filter(|queue| !named.contains(queue.name.as_str())).cloned();
    let target: BTreeMap<String, Option<String>> =
        wanted.chain(others).map(|queue| (queue.name.clone(), dead_letter_queue(&queue))).collect();
    let mut going: BTreeSet<&str> = there
        .queues
        .iter()
        .map(|queue| queue.name.as_str())
        .filter(|name| name.starts_with(prefix) && !named.contains(name))
        .collect();
    // What a queue that stays leads to stays too, and what that leads to.
    let mut staying: Vec<&str> =
        target.keys().map(String::as_str).filter(|name| !going.contains(name)).collect();
    while let Some(name) = staying.pop() {
        if let Some(Some(to)) = target.get(name)
            && going.remove(to.as_str())
        {
            staying.push(to);
        }
    }
    let mut queues = Vec::new();
    while !going.is_empty() {
        let targets: BTreeSet<&str> =
            going.iter().filter_map(|name| target.get(*name)?.as_deref()).collect();
        // There are no rings of dead-letter queues; if there were one, the broker would refuse the deletion.
        let first = going.iter().copied().find(|name| !targets.contains(name));
        let Some(first) = first.or_else(|| going.first().copied()) else { break };
        going.remove(first);
        queues.push(first.to_owned());
    }
    (queues, schedules)
}

#[cfg(test)]
mod tests {
    use super::{super::queue::tests::full, *};

    fn queue(name: &str) -> Queue {
        Queue { name: name.to_owned(), ..Queue::default() }
    }

    fn schedule(name: &str) -> Schedule {
        Schedule { name: name.to_owned(), queue: "q".to_owned(), ..Schedule::default() }
    }

    fn template(pattern: &str) -> QueueTemplate {
        let settings = Some(Queue { name: String::new(), ..full() });
        QueueTemplate { pattern: pattern.to_owned(), settings, ..QueueTemplate::default() }
    }

    #[test]
    fn templates_are_created_changed_and_deleted() {
        let templates = [template("a.*"), template("b.*"), template("c.*")];
        let there = There { queues: &[], templates: &templates, schedules: &[] };
        let text = "
templates:
  - {pattern: new.*, settings: {max_attempts: 3}}
  - {pattern: a.*, settings: {group: eu}}
queues:
  - {name: q}
";
        let steps = steps(&declared(text), &there).unwrap();
        let lines: Vec<String> = steps.iter().map(Step::line).collect();
        assert_eq!(lines[0], "create  template new.*");
        assert!(lines[1].starts_with("change  template a.*  "), "{}", lines[1]);
        for change in ["group: shop → eu", "paused: true → default", "labels: "] {
            assert!(lines[1].contains(change), "{}", lines[1]);
        }
        assert_eq!(lines[2..], ["create  queue q"]);
        assert_eq!(surplus_templates(&declared(text), &there, ""), ["b.*", "c.*"]);
        assert_eq!(surplus_templates(&declared(text), &there, "b"), ["b.*"]);
        let silent = surplus_templates(&declared("queues: []"), &there, "");
        assert!(silent.is_empty(), "the file says nothing of templates");
    }

    fn declared(text: &str) -> Declaration {
        yaml_serde::from_str(text).unwrap()
    }

    #[test]
    fn what_is_as_declared_needs_no_step() {
        let (queues, schedules) = ([full(), queue("q")], [schedule("s")]);
        let templates = [template("q.*")];
        let there = There { queues: &queues, templates: &templates, schedules: &schedules };
        let declared = Declaration::of(&queues, &templates, &schedules);
        assert_eq!(surplus_templates(&declared, &there, ""), Vec::<String>::new());
        assert_eq!(steps(&declared, &there).ok(), Some(vec![]));
        assert_eq!(surplus(&declared, &there, ""), (Vec::new(), Vec::new()));
    }

    #[test]
    fn exactly_what_differs_is_changed() {
        let queues = [full(), queue("q")];
        let there = There { queues: &queues, templates: &[], schedules: &[] };
        let text = "
queues:
  - {name: new, max_attempts: 3}
  - {name: q, labels: {team: a}, paused: true}
  - {name: orders, group: shop, paused: false}
schedules:
  - {name: s, queue: q, cron: '@daily'}
";
        let steps = steps(&declared(text), &there).unwrap();
        let lines: Vec<String> = steps.iter().map(Step::line).collect();
        assert_eq!(lines[0], "create  queue new");
        assert_eq!(lines[1], "change  queue q  labels: default → {\"team\":\"a\"}");
        assert_eq!(lines[2], "pause   queue q");
        assert!(lines[3].contains("lease: 1m30s500ms → default"), "{}", lines[3]);
        assert!(lines[3].contains("max_attempts: 0 → default"), "{}", lines[3]);
        assert_eq!(lines[4..], ["resume  queue orders", "create  schedule s"]);
        assert_eq!(steps[1].json()["changes"][0]["field"], "labels");
    }

    #[test]
    fn a_group_cannot_be_changed() {
        let queues = [full()];
        let there = There { queues: &queues, templates: &[], schedules: &[] };
        let failure = steps(&declared("queues: [{name: orders}]"), &there).unwrap_err();
        assert!(failure.to_string().contains("is of group shop"), "{failure}");
    }

    #[test]
    fn dead_letter_queues_of_what_stays_stay_and_sources_go_first() {
        let to =
            |name: &str, dead: &str| Queue { dead_letter_queue: dead.to_owned(), ..queue(name) };
        let queues = [
            queue("a.dead"),
            queue("b.dead"),
            queue("b"),
            to("c", "graves"),
            queue("graves"),
            queue("x.other"),
        ];
        let there = There { queues: &queues, templates: &[], schedules: &[schedule("s")] };
        let file = declared("queues: [{name: a}, {name: k, dead_letter_queue: graves}]");
        let (gone, schedules) = surplus(&file, &there, "");
        assert_eq!(gone, ["b", "b.dead", "c", "x.other"]);
        assert!(schedules.is_empty(), "the file says nothing of schedules");
        let (gone, _) = surplus(&file, &there, "x.");
        assert_eq!(gone, ["x.other"]);
        let (gone, schedules) = surplus(&declared("schedules: []"), &there, "");
        assert_eq!((gone, schedules), (vec![], vec!["s".to_owned()]));
    }
}
