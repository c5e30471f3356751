//! `sluice push`.

use std::{
    io::{self, BufRead, IsTerminal, Read},
    path::PathBuf,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use sluicegate_client::{NewItem, Producer, proto::PushResult};
use tokio::sync::mpsc;

use crate::{context::Context, failure::Failure, json, output, values};

/// The command line of `sluice push`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The queue
    queue: String,
    /// The payload; without it and --file, each line of stdin is an item
    #[arg(conflicts_with = "file")]
    text: Option<String>,
    /// File whose content is the payload; `-`: all of stdin is one item
    #[arg(long, short)]
    file: Option<PathBuf>,
    #[command(flatten)]
    item: ItemArgs,
    /// A second push with the same id within the queue's dedup window stores nothing; for a single item
    #[arg(long, value_name = "ID")]
    dedup_id: Option<String>,
    /// Name of the producer, shown with each item
    #[arg(long, value_name = "NAME")]
    producer: Option<String>,
    /// Most lines per call
    #[arg(long, value_name = "N", default_value = "500", value_parser = clap::value_parser!(u16).range(1..=1000))]
    batch: u16,
    /// Give each item a random dedup id, so that interrupted calls can be repeated safely
    #[arg(long)]
    retry: bool,
}

/// The fields of a new item but its payload.
#[derive(Debug, clap::Args)]
pub(crate) struct ItemArgs {
    /// Header; can be repeated
    #[arg(long = "header", short = 'H', value_name = "KEY=VALUE", value_parser = values::key_value)]
    headers: Vec<(String, String)>,
    /// Media type of the payload
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Priority, 0 to 9; 9 is delivered first
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: Option<u8>,
    /// Deliver it no earlier than this long from now
    #[arg(long, value_name = "DURATION", value_parser = values::duration, conflicts_with = "at")]
    delay: Option<Duration>,
    /// Deliver it no earlier than this instant (2026-01-31T12:00:00Z)
    #[arg(long, value_name = "INSTANT", value_parser = values::instant)]
    at: Option<prost_types::Timestamp>,
    /// Time to live: do not deliver it later than this long from now
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    ttl: Option<Duration>,
    /// Items with the same key are delivered one at a time, in order
    #[arg(long, short = 'k', value_name = "KEY")]
    ordering_key: Option<String>,
}

impl ItemArgs {
    pub(crate) fn item(&self, payload: impl Into<bytes::Bytes>) -> NewItem {
        let mut item = NewItem::new(payload);
        for (key, value) in &self.headers {
            item = item.header(key, value);
        }
        if let Some(content_type) = &self.content_type {
            item = item.content_type(content_type);
        }
        if let Some(priority) = self.priority {
            item = item.priority(priority);
        }
        if let Some(delay) = self.delay {
            item = item.delay(delay);
        }
        if let Some(time) = self.at.and_then(|time| time.try_into().ok()) {
            item = item.eligible_at(time);
        }
        if let Some(ttl) = self.ttl {
            item = item.ttl(ttl);
        }
        if let Some(key) = &self.ordering_key {
            item = item.ordering_key(key);
        }
        item
    }
}

/// Reads the whole of a file; `-` is stdin.
pub(crate) fn read_file(path: &PathBuf) -> Result<Vec<u8>, Failure> {
    if path.as_os_str() == "-" {
        let mut content = Vec::new();
        io::stdin().lock().read_to_end(&mut content)?;
        return Ok(content);
    }
    std::fs::read(path).map_err(|source| Failure::File { path: path.clone(), source })
}

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    let payload = match (&args.text, &args.file) {
        (Some(text), _) => Some(text.clone().into_bytes()),
        (None, Some(path)) => Some(read_file(path)?),
        (None, None) => None,
    };
    if payload.is_none() && args.dedup_id.is_some() {
        return Err(Failure::Usage(
            "--dedup-id is for a single item; lines of stdin would all be duplicates".into(),
        ));
    }
    // To push each line of stdin for one instant is rarely meant; usually the payload or the instant was forgotten.
    if payload.is_none() && args.item.at.is_some() {
        return Err(Failure::Usage(
            "--at is for a single item: give its payload as TEXT, or with --file (- is stdin)"
                .into(),
        ));
    }
    let mut producer = context.client().await?.producer(&args.queue);
    if let Some(name) = &args.producer {
        producer = producer.name(name);
    }
    if args.retry {
        producer = producer.with_auto_dedup();
    }
    let Some(payload) = payload else {
        return push_lines(context, &args, &producer).await;
    };
    let mut item = args.item.item(payload);
    if let Some(id) = args.dedup_id {
        item = item.dedup_id(id);
    }
    let result = producer.push(item).await?;
    let note = if result.deduplicated { " (duplicate)" } else { "" };
    let text = format!("{}{note}", result.id);
    Ok(context.output.one(&json::push_result(&args.queue, &result), &text)?)
}

/// Pushes the lines of stdin, as many at a time as have been read: no line waits for a batch to fill up.
async fn push_lines(context: &Context, args: &Args, producer: &Producer) -> Result<(), Failure> {
    if io::stdin().is_terminal() {
        eprintln!("sluice: each line is an item; press Ctrl-D to end");
    }
    let batch = usize::from(args.batch);
    let (lines, mut incoming) = mpsc::channel(2 * batch);
    std::thread::spawn(move || read_lines(&lines));
    let progress = progress(&args.queue);
    let (mut pushed, mut duplicates) = (0_u64, 0_usize);
    let mut gathered = Vec::with_capacity(batch);
    while incoming.recv_many(&mut gathered, batch).await > 0 {
        let lines = gathered.drain(..).collect::<io::Result<Vec<Vec<u8>>>>()?;
        let items = lines.into_iter().map(|line| args.item.item(line));
        let results = match producer.push_all(items).await {
            Ok(results) => results,
            Err(error) => {
                progress.finish_and_clear();
                if !context.output.is_json() {
                    eprintln!("sluice: {} pushed before this:", output::items(pushed));
                }
                return Err(error.into());
            }
        };
        pushed += results.len() as u64;
        duplicates += results.iter().filter(|result| result.deduplicated).count();
        progress.set_position(pushed);
        show_results(context, &args.queue, &results)?;
    }
    progress.finish_and_clear();
    if !context.output.is_json() {
        let note = if duplicates > 0 {
            format!(", {duplicates} of them duplicates")
        } else {
            String::new()
        };
        context.output.one(
            &serde_json::Value::Null,
            &format!("{} pushed to {}{note}", output::items(pushed), args.queue),
        )?;
    }
    Ok(())
}

fn show_results(context: &Context, queue: &str, results: &[PushResult]) -> Result<(), Failure> {
    if context.output.is_json() {
        for result in results {
            context.output.one(&json::push_result(queue, result), "")?;
        }
    }
    Ok(())
}

/// Reads lines on a thread of its own: when a push fails, that thread may still be blocked in a read, which must not keep
/// the process from exiting.
fn read_lines(lines: &mpsc::Sender<io::Result<Vec<u8>>>) {
    for line in io::stdin().lock().split(b'\n') {
        let line = line.map(|mut line| {
            if line.ends_with(b"\r") {
                line.pop();
            }
            line
        });
        let failed = line.is_err();
        if lines.blocking_send(line).is_err() || failed {
            return;
        }
    }
}

/// Returns a progress bar, which is shown on terminals only.
fn progress(queue: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) =
        ProgressStyle::with_template("{spinner} {human_pos} items pushed to {msg}, {per_sec}")
    {
        bar.set_style(style);
    }
    bar.set_message(queue.to_owned());
    bar
}
