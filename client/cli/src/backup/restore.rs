//! `sluice restore`.
//!
//! The dedup id of each pushed item is made from its id in the file, so that a restore can be repeated after it was cut off. The queue
//! has to remember these ids for long enough: for the time of the restore its `dedup_window` is a week, and a label keeps what it was
//! before. Whoever repeats the restore reads it there. Ids that were pushed stay remembered for a week in any case.

use std::{
    fs,
    io::{self, BufReader},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use prost_types::FieldMask;
use serde_json::json;
use sluicegate_client::{
    Client, NewItem, Producer,
    proto::{CreateQueueRequest, GetBrokerRequest, GetQueueRequest, Queue, UpdateQueueRequest},
    tonic::{Code, Status},
};

use super::{
    file::{Contents, Restored},
    progress,
};
use crate::{context::Context, declare::queue::QueueEntry, failure::Failure, output, values};

const AFTER_HELP: &str = "\
The items are pushed anew: payload, content type, headers, priority, ordering key, delay and end of life are as they were; ids, attempts, \
reasons, origins of dead letters and dedup ids are not. Reserved items are ready. Items with sequence numbers keep their order. A queue \
that is not there is created with the settings of the file.

A restore that was cut off is repeated by the same command: what was stored is not stored again, for a week. To that end the queue's \
dedup_window is a week until the restore is done, and its label `sluicegate.restore` says since when, and what it was before. A token \
needs `manage` on the queue for this.";

/// How long ids are remembered while a restore is not done.
const WINDOW: Duration = Duration::from_hours(7 * 24);
/// A repeated restore must end before the ids of the first one are forgotten.
const MARGIN: Duration = Duration::from_hours(12);
/// The label of a queue that is being restored.
const LABEL: &str = "sluicegate.restore";
/// After this time all brokers know the settings of a queue.
const SETTINGS_KNOWN: Duration = Duration::from_millis(1_500);
/// The most items and bytes that are pushed at a time.
const BATCH: usize = 500;
const BATCH_BYTES: usize = 2 << 20;

/// The command line of `sluice restore`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RestoreArgs {
    /// A file of `sluice backup`
    file: PathBuf,
    /// The queue to put the items into [default: the queue of the backup]
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    /// Restore what is there of a backup that was cut off
    #[arg(long)]
    partial: bool,
}

#[derive(Debug, Default)]
struct Counts {
    pushed: u64,
    /// Stored before, by a restore that was cut off.
    before: u64,
    expired: u64,
}

pub(crate) async fn restore(context: &Context, args: RestoreArgs) -> Result<(), Failure> {
    let failed = |source| Failure::File { path: args.file.clone(), source };
    let open = || fs::File::open(&args.file).map(BufReader::new);
    let contents = open().and_then(|mut file| Contents::read(&mut file)).map_err(failed)?;
    if contents.is_cut && !args.partial {
        let why = format!(
            "the backup was cut off after {}; --partial restores these",
            output::items(contents.items)
        );
        return Err(failed(io::Error::new(io::ErrorKind::UnexpectedEof, why)));
    }
    let client = context.client().await?;
    let now = BrokerTime::ask(&client).await?;
    let name = args.to.unwrap_or_else(|| contents.queue.name.clone());
    let queue = open_queue(&client, &contents.queue, &name, now.get()).await?;
    let input = open().map_err(failed)?;
    let pushing = Pushing {
        producer: client.producer(&name),
        path: &args.file,
        now,
        has_ttl: queue.default_ttl.is_some(),
    };
    let mut counts = Counts::default();
    let pushed = pushing.push_all(&contents, input, &mut counts).await;
    if pushed.is_err() && !context.output.is_json() {
        let stored = output::items(counts.pushed + counts.before);
        eprintln!("sluice: {stored} stored before this; the same command goes on from there");
    }
    pushed?;
    close_queue(&client, &name).await?;
    let value = json!({
        "queue": name, "items": counts.pushed, "stored_before": counts.before, "expired": counts.expired
    });
    let mut parts = vec![format!("{} restored to {name}", output::items(counts.pushed))];
    for (count, what) in [(counts.before, "stored before"), (counts.expired, "expired meanwhile")] {
        if count > 0 {
            parts.push(format!("{} {what}", output::items(count)));
        }
    }
    let text = parts.join(", ");
    Ok(context.output.one(&value, &output::harmless(&text, false))?)
}

/// The broker's clock, by which items expire.
struct BrokerTime {
    asked: Instant,
    answer: SystemTime,
}

impl BrokerTime {
    async fn ask(client: &Client) -> Result<Self, Failure> {
        let answer = client.admin_service().get_broker(client.request(GetBrokerRequest {})).await?;
        let time = answer.into_inner().broker.and_then(|broker| broker.report_time);
        let answer = time.and_then(|time| time.try_into().ok()).unwrap_or_else(SystemTime::now);
        Ok(Self { asked: Instant::now(), answer })
    }

    fn get(&self) -> SystemTime {
        self.answer + self.asked.elapsed()
    }
}

/// What the label says: since when the queue is being restored, and how long it remembered ids before.
#[derive(Debug, PartialEq)]
struct Mark {
    began: SystemTime,
    window: Duration,
}

impl Mark {
    fn text(&self) -> String {
        let began = prost_types::Timestamp::from(self.began);
        format!("{began} {}", values::exact(self.window))
    }

    fn parse(text: &str) -> Option<Self> {
        let (began, window) = text.split_once(' ')?;
        let began = SystemTime::try_from(values::instant(began).ok()?).ok()?;
        Some(Self { began, window: values::duration(window).ok()? })
    }
}

/// Creates the queue if it is not there, and lets it remember ids for long enough. Returns the queue as it is now.
async fn open_queue(
    client: &Client,
    settings: &QueueEntry,
    name: &str,
    now: SystemTime,
) -> Result<Queue, Failure> {
    let there = match get(client, name).await {
        Ok(queue) => Some(queue),
        Err(status) if status.code() == Code::NotFound => None,
        Err(status) => return Err(status.into()),
    };
    let is_new = there.is_none();
    let mut queue =
        there.unwrap_or_else(|| Queue { name: name.to_owned(), ..settings.clone().into() });
    let window = QueueEntry::from(&queue).dedup_window();
    if let Some(mark) = queue.labels.get(LABEL) {
        check_mark(name, mark, now)?;
    } else if window < WINDOW {
        queue.labels.insert(LABEL.to_owned(), Mark { began: now, window }.text());
        queue.dedup_window = Some(values::to_proto(WINDOW));
        if !is_new {
            update(client, queue.clone()).await?;
        }
    }
    if is_new {
        let request = client.request(CreateQueueRequest { queue: Some(queue.clone()) });
        client.admin_service().create_queue(request).await?;
    }
    // Pushes may go through another broker.
    tokio::time::sleep(SETTINGS_KNOWN).await;
    Ok(queue)
}

/// Fails if the restore that was cut off began too long ago to be repeated.
fn check_mark(name: &str, mark: &str, now: SystemTime) -> Result<(), Failure> {
    let Some(mark) = Mark::parse(mark) else {
        let why = format!("the label {LABEL} of queue {name} is not one of a restore");
        return Err(Failure::Usage(why));
    };
    if now.duration_since(mark.began).is_ok_and(|since| since + MARGIN > WINDOW) {
        return Err(Failure::Usage(format!(
            "the restore of queue {name} that was cut off began almost a week ago or earlier: the broker forgets which items it \
             stored. Purge or delete the queue, or remove its label {LABEL} to store all items again"
        )));
    }
    Ok(())
}

/// Gives the queue back the window that it had before.
async fn close_queue(client: &Client, name: &str) -> Result<(), Failure> {
    let mut queue = get(client, name).await?;
    let Some(mark) = queue.labels.remove(LABEL).and_then(|text| Mark::parse(&text)) else {
        return Ok(());
    };
    queue.dedup_window = Some(values::to_proto(mark.window));
    update(client, queue).await
}

async fn get(client: &Client, name: &str) -> Result<Queue, Status> {
    let request = client.request(GetQueueRequest { name: name.to_owned() });
    Ok(client.admin_service().get_queue(request).await?.into_inner().queue.unwrap_or_default())
}

/// Changes the window and the labels of a queue.
async fn update(client: &Client, queue: Queue) -> Result<(), Failure> {
    let paths = vec!["dedup_window".to_owned(), "labels".to_owned()];
    let update_mask = Some(FieldMask { paths });
    let request = client.request(UpdateQueueRequest { queue: Some(queue), update_mask });
    client.admin_service().update_queue(request).await?;
    Ok(())
}

/// What pushing needs.
struct Pushing<'a> {
    producer: Producer,
    path: &'a Path,
    now: BrokerTime,
    /// True if the queue gives items a time to live that have none.
    has_ttl: bool,
}

impl Pushing<'_> {
    async fn push_all(
        &self,
        contents: &Contents,
        input: BufReader<fs::File>,
        counts: &mut Counts,
    ) -> Result<(), Failure> {
        let failed = |source| Failure::File { path: self.path.to_owned(), source };
        let invalid = |why| failed(io::Error::new(io::ErrorKind::InvalidData, why));
        let progress = progress(contents.items, &format!("restored to {}", self.producer.queue()));
        let (mut batch, mut bytes): (Vec<NewItem>, usize) = (Vec::with_capacity(BATCH), 0);
        for item in contents.items(input) {
            let item = item.map_err(failed)?;
            let size = item.size();
            match item.restored(self.now.get(), self.has_ttl).map_err(invalid)? {
                Restored::Push(item) => batch.push(*item),
                Restored::Expired => {
                    counts.expired += 1;
                    continue;
                }
            }
            bytes += size;
            if batch.len() >= BATCH || bytes >= BATCH_BYTES {
                self.push(&mut batch, counts).await?;
                bytes = 0;
                progress.set_position(counts.pushed + counts.before + counts.expired);
            }
        }
        self.push(&mut batch, counts).await?;
        progress.finish_and_clear();
        Ok(())
    }

    async fn push(&self, batch: &mut Vec<NewItem>, counts: &mut Counts) -> Result<(), Failure> {
        let results = self.producer.push_all(batch.drain(..)).await?;
        let before = results.iter().filter(|result| result.deduplicated).count() as u64;
        counts.before += before;
        counts.pushed += results.len() as u64 - before;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_keeps_what_it_says() {
        let began = SystemTime::UNIX_EPOCH + Duration::from_hours(500_000);
        let mark = Mark { began, window: Duration::from_mins(5) };
        assert_eq!(mark.text(), "2027-01-15T08:00:00Z 5m");
        assert_eq!(Mark::parse(&mark.text()), Some(mark));
        assert_eq!(Mark::parse("by hand"), None);
    }

    #[test]
    fn a_restore_is_not_repeated_after_its_ids_are_forgotten() {
        let began = SystemTime::UNIX_EPOCH + Duration::from_hours(500_000);
        let mark = Mark { began, window: Duration::from_mins(5) }.text();
        let days = |days: u64| began + Duration::from_hours(24 * days);
        assert!(check_mark("q", &mark, days(6)).is_ok());
        let why = check_mark("q", &mark, days(7)).unwrap_err().to_string();
        assert!(why.contains("sluicegate.restore"), "{why}");
        assert!(check_mark("q", "by hand", days(0)).is_err());
    }
}
