//! `sluice queue`: queues and their settings.

use clap::Subcommand;
use prost_types::FieldMask;
use serde_json::json;
use sluicegate_client::{
    Client,
    proto::{
        CreateQueueRequest, DeleteQueueRequest, GetQueueRequest, PauseQueueRequest,
        PurgeQueueRequest, Queue, QueueStats, ResumeQueueRequest, RetryPolicy, UpdateQueueRequest,
        operation_work::Kind,
    },
};

use crate::{
    confirm::{self, Confirmation},
    context::Context,
    failure::Failure,
    json,
    operation::{self, Mode},
    output, stats, values,
};

/// Names longer than this are too long for a dead-letter queue named after them.
const LONGEST_SOURCE: usize = 123;

/// The command line of `sluice queue`.
#[derive(Debug, Subcommand)]
pub(crate) enum QueueCommand {
    /// Create a queue
    Create {
        /// Its name
        name: String,
        /// The group whose collection holds its items [default: default]
        #[arg(long)]
        group: Option<String>,
        #[command(flatten)]
        settings: Box<Settings>,
    },
    /// Show a queue's settings
    Get(Name),
    /// Change some of a queue's settings
    Update {
        /// Its name
        name: String,
        #[command(flatten)]
        settings: Box<Settings>,
    },
    /// Delete a queue
    Delete {
        /// Its name
        name: String,
        /// Delete it even if it holds items, and the items with it
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Stop deliveries; pushes are still accepted
    Pause(Name),
    /// Resume deliveries
    Resume(Name),
    /// Delete all items that are not reserved, history included
    Purge {
        /// The queue
        name: String,
        #[command(flatten)]
        mode: Mode,
        #[command(flatten)]
        confirmation: Confirmation,
    },
}

/// Names a queue.
#[derive(Debug, clap::Args)]
pub(crate) struct Name {
    /// The queue
    name: String,
}

/// A limit; `None`: the broker's default.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit(Option<i32>);

fn parse_limit(text: &str) -> Result<Limit, String> {
    match text {
        "default" => Ok(Limit(None)),
        _ => match text.parse() {
            Ok(limit) => Ok(Limit(Some(limit))),
            Err(error) => Err(format!("{error}; write a number or default")),
        },
    }
}

/// Settings that can be changed. `none` unsets a duration.
#[derive(Debug, clap::Args)]
pub(crate) struct Settings {
    /// Lease of consumers that ask for none; `none`: the broker's default
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    lease: Option<values::Setting>,
    /// The attempt whose failure dead-letters an item; 0: no limit; default: the broker's setting
    #[arg(long, value_name = "N|default", value_parser = parse_limit)]
    max_attempts: Option<Limit>,
    /// The delivery after which an unsettled item is dead-lettered; 0: no limit; default: the broker's setting
    #[arg(long, value_name = "N|default", value_parser = parse_limit)]
    max_deliveries: Option<Limit>,
    /// Queue for items at a limit; empty: the queue's name with .dead appended
    #[arg(long, value_name = "QUEUE")]
    dead_letter_queue: Option<String>,
    /// Discard items at a limit instead of dead-lettering them
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    discard_failed: Option<bool>,
    /// Delay after the first failed attempt
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    retry_initial: Option<values::Setting>,
    /// Factor from one delay to the next
    #[arg(long, value_name = "X")]
    retry_multiplier: Option<f64>,
    /// Longest delay
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    retry_max: Option<values::Setting>,
    /// Random share of each delay, 0 to 1
    #[arg(long, value_name = "X")]
    retry_jitter: Option<f64>,
    /// Time to live of items pushed without one
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    default_ttl: Option<values::Setting>,
    /// How long committed items are kept
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    retention: Option<values::Setting>,
    /// How long dedup ids are remembered
    #[arg(long, value_name = "DURATION", value_parser = values::setting)]
    dedup_window: Option<values::Setting>,
    /// Refuse pushes while it holds this many unsettled items; 0: no limit
    #[arg(long, value_name = "N")]
    max_depth: Option<i64>,
    /// Number the items in the order of their pushes
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    sequenced: Option<bool>,
    /// A label; can be repeated, and replaces all labels
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = values::key_value)]
    labels: Vec<(String, String)>,
}

impl Settings {
    /// Returns the queue with these settings, and the names of those that were given.
    pub(crate) fn apply(&self, name: String) -> (Queue, Vec<String>) {
        let mut queue = Queue { name, ..Default::default() };
        let mut policy = RetryPolicy::default();
        let mut paths = Vec::new();
        let mut given = |path: &str| paths.push(path.to_owned());
        let proto = |setting: values::Setting| setting.0.map(values::to_proto);
        if let Some(lease) = self.lease {
            queue.lease = proto(lease);
            given("lease");
        }
        if let Some(attempts) = self.max_attempts {
            queue.max_attempts = attempts.0;
            given("max_attempts");
        }
        if let Some(deliveries) = self.max_deliveries {
            queue.max_deliveries = deliveries.0;
            given("max_deliveries");
        }
        if let Some(discard) = self.discard_failed {
            queue.discard_failed = discard;
            given("discard_failed");
        }
        if let Some(name) = &self.dead_letter_queue {
            queue.dead_letter_queue.clone_from(name);
            given("dead_letter_queue");
        }
        if let Some(delay) = self.retry_initial {
            policy.initial_delay = proto(delay);
            given("retry_policy.initial_delay");
        }
        if let Some(multiplier) = self.retry_multiplier {
            policy.multiplier = multiplier;
            given("retry_policy.multiplier");
        }
        if let Some(delay) = self.retry_max {
            policy.max_delay = proto(delay);
            given("retry_policy.max_delay");
        }
        if let Some(jitter) = self.retry_jitter {
            policy.jitter = jitter;
            given("retry_policy.jitter");
        }
        if let Some(ttl) = self.default_ttl {
            queue.default_ttl = proto(ttl);
            given("default_ttl");
        }
        if let Some(retention) = self.retention {
            queue.retention = proto(retention);
            given("retention");
        }
        if let Some(window) = self.dedup_window {
            queue.dedup_window = proto(window);
            given("dedup_window");
        }
        if let Some(depth) = self.max_depth {
            queue.max_depth = depth;
            given("max_depth");
        }
        if let Some(sequenced) = self.sequenced {
            queue.sequenced = sequenced;
            given("sequenced");
        }
        if !self.labels.is_empty() {
            queue.labels = self.labels.iter().cloned().collect();
            given("labels");
        }
        if paths.iter().any(|path| path.starts_with("retry_policy")) {
            queue.retry_policy = Some(policy);
        }
        (queue, paths)
    }
}

/// Returns true for the name that dead-letter queues have unless their sources name another one.
pub(crate) fn is_called_dead(name: &str) -> bool {
    name.strip_suffix(".dead").is_some()
}

/// Returns the name of the queue that receives a queue's dead letters, if it has one.
pub(crate) fn dead_letter_queue(queue: &Queue) -> Option<String> {
    if !queue.dead_letter_queue.is_empty() {
        return Some(queue.dead_letter_queue.clone());
    }
    let has_none =
        queue.discard_failed || is_called_dead(&queue.name) || queue.name.len() > LONGEST_SOURCE;
    (!has_none).then(|| format!("{}.dead", queue.name))
}

pub(crate) async fn run(context: &Context, command: QueueCommand) -> Result<(), Failure> {
    let is_asked = match &command {
        QueueCommand::Delete { confirmation, .. } => confirmation.is_needed("queue delete")?,
        QueueCommand::Purge { mode, confirmation, .. } => {
            !mode.dry_run && confirmation.is_needed("queue purge")?
        }
        _ => false,
    };
    let client = context.client().await?;
    let mut admin = client.admin_service();
    let queue = match command {
        QueueCommand::Create { name, group, settings } => {
            let (mut queue, _) = settings.apply(name);
            queue.group = group.unwrap_or_default();
            let request = client.request(CreateQueueRequest { queue: Some(queue) });
            admin.create_queue(request).await?.into_inner().queue
        }
        QueueCommand::Update { name, settings } => {
            let (queue, paths) = settings.apply(name);
            if paths.is_empty() {
                return Err(Failure::Usage("say which settings to change".into()));
            }
            let update_mask = Some(FieldMask { paths });
            let request = client.request(UpdateQueueRequest { queue: Some(queue), update_mask });
            admin.update_queue(request).await?.into_inner().queue
        }
        QueueCommand::Get(Name { name }) => {
            admin.get_queue(client.request(GetQueueRequest { name })).await?.into_inner().queue
        }
        QueueCommand::Pause(Name { name }) => {
            admin.pause_queue(client.request(PauseQueueRequest { name })).await?.into_inner().queue
        }
        QueueCommand::Resume(Name { name }) => {
            admin
                .resume_queue(client.request(ResumeQueueRequest { name }))
                .await?
                .into_inner()
                .queue
        }
        QueueCommand::Delete { name, force, .. } => {
            return delete(context, &client, name, force, is_asked).await;
        }
        QueueCommand::Purge { name, mode, .. } => {
            return purge(context, &client, name, mode, is_asked).await;
        }
    };
    Ok(context.output.object(&json::queue(&queue.unwrap_or_default()))?)
}

async fn delete(
    context: &Context,
    client: &Client,
    name: String,
    mut force: bool,
    is_asked: bool,
) -> Result<(), Failure> {
    if is_asked {
        let stats = stats::of_queue(client, &name).await?;
        let unsettled = stats.ready + stats.delayed + stats.reserved + stats.blocked;
        let held = output::items(unsettled + stats.processed);
        let (what, only) = match (unsettled + stats.processed, force) {
            (0, _) => (format!("Delete queue {name}, which is empty?"), ""),
            (_, true) => (format!("Delete queue {name} and {held} in it?"), ""),
            (_, false) => {
                (format!("Delete queue {name}, which holds {held}?"), " Refused without --force.")
            }
        };
        confirm::ask(&format!("{what}{}{only}", states(&stats)))?;
        // No one agreed to the deletion of items that have come since.
        force &= unsettled + stats.processed > 0;
    }
    let request = client.request(DeleteQueueRequest { name: name.clone(), force });
    let items = client.admin_service().delete_queue(request).await?.into_inner().deleted_items;
    let value = json!({ "deleted": name, "deleted_items": items });
    let text = format!("{name} deleted, with {}", output::items(items));
    Ok(context.output.one(&value, &text)?)
}

async fn purge(
    context: &Context,
    client: &Client,
    name: String,
    mode: Mode,
    is_asked: bool,
) -> Result<(), Failure> {
    if is_asked {
        let stats = stats::of_queue(client, &name).await?;
        let items = stats.ready + stats.delayed + stats.blocked + stats.processed;
        let (items, states) = (output::items(items), states(&stats));
        confirm::ask(&format!("Delete {items} of queue {name}?{states} Reserved items stay."))?;
    }
    let purge = PurgeQueueRequest { name: name.clone() };
    if mode.is_operation() {
        return operation::run_work(context, client, Kind::Purge(purge), mode).await;
    }
    let request = client.request(purge);
    let items = client.admin_service().purge_queue(request).await?.into_inner().purged_items;
    let value = json!({ "purged": name, "purged_items": items });
    let text = format!("{} deleted from {name}", output::items(items));
    Ok(context.output.one(&value, &text)?)
}

/// How many items are in which state, as a parenthesis after a question; nothing if there are none.
fn states(stats: &QueueStats) -> String {
    let states = [
        (stats.ready, "ready"),
        (stats.delayed, "delayed"),
        (stats.reserved, "reserved"),
        (stats.blocked, "blocked"),
        (stats.processed, "in its history"),
    ];
    let counts: Vec<String> = states
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, state)| format!("{count} {state}"))
        .collect();
    if counts.is_empty() { String::new() } else { format!(" ({})", counts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        command: QueueCommand,
    }

    #[test]
    fn the_question_names_states_that_hold_items() {
        let stats = QueueStats { ready: 2, processed: 3, ..QueueStats::default() };
        assert_eq!(states(&stats), " (2 ready, 3 in its history)");
        assert_eq!(states(&QueueStats::default()), "");
    }

    #[test]
    fn the_dead_letter_queue_is_the_named_one_or_called_after_its_source() {
        let queue = |name: &str| Queue { name: name.to_owned(), ..Queue::default() };
        let named = Queue { dead_letter_queue: "graves".to_owned(), ..queue("a") };
        assert_eq!(dead_letter_queue(&named).as_deref(), Some("graves"));
        assert_eq!(dead_letter_queue(&queue("a")).as_deref(), Some("a.dead"));
        assert_eq!(dead_letter_queue(&queue("a.dead")), None);
        assert_eq!(dead_letter_queue(&Queue { discard_failed: true, ..queue("a") }), None);
        assert_eq!(dead_letter_queue(&queue(&"a".repeat(124))), None);
    }

    #[test]
    fn an_update_names_exactly_the_given_settings() {
        let line = Line::parse_from([
            "x",
            "update",
            "q",
            "--retention",
            "none",
            "--retry-jitter",
            "0.5",
            "--sequenced",
        ]);
        let QueueCommand::Update { name, settings } = line.command else { panic!("not an update") };
        let (queue, paths) = settings.apply(name);
        assert_eq!(paths, ["retry_policy.jitter", "retention", "sequenced"]);
        assert!(queue.sequenced && queue.retention.is_none());
    }
}
