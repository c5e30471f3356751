//! `sluice backup` and `sluice restore`: the items of a queue in a file.
//!
//! # Layout
//! `file` is the file, `restore` puts its items into a queue.

mod file;
mod restore;

use std::{
    fs,
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use sluicegate_client::{
    Client,
    proto::{GetQueueRequest, ItemFilter, ItemState, ListItemsRequest, QueueStats},
    tonic::Code,
};

use self::file::Writer;
pub(crate) use self::restore::{RestoreArgs, restore};
use crate::{
    context::Context, declare::queue::QueueEntry, failure::Failure, files::put_in_place, output,
    stats,
};

const AFTER_HELP: &str = "\
The file has one line of JSON about the queue, one for each item, and one at the end, without which `sluice restore` takes the file for \
cut off. It holds items that are ready, delayed, reserved or blocked, and no history. The queue stays as it is.

The items are read page by page. Of a queue that is in use meanwhile the backup is no picture of one moment: an item that changes its \
state while it is read can be missing or be there twice, which the command says. For an exact backup, pause the queue, stop what pushes \
to it, and wait until nothing is reserved.";

/// Items of a page.
const PAGE: i32 = 1_000;

/// The command line of `sluice backup`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BackupArgs {
    /// The queue
    queue: String,
    /// The file to write, which is there only when it is complete; `-`: stdout
    file: PathBuf,
    /// Replace a file that is there
    #[arg(long)]
    replace: bool,
}

pub(crate) async fn backup(context: &Context, args: BackupArgs) -> Result<(), Failure> {
    let client = context.client().await?;
    let before = stats::of_queue(&client, &args.queue).await?;
    check_payloads(&client, &args.queue).await?;
    let (items, after) = if args.file.as_os_str() == "-" {
        let mut output = BufWriter::new(io::stdout());
        let items = write(&client, &args.queue, &before, &mut output).await?;
        (items, stats::of_queue(&client, &args.queue).await?)
    } else {
        let new = NewFile::create(&args.file, args.replace)?;
        let mut output = BufWriter::new(&new.file);
        let items = write(&client, &args.queue, &before, &mut output).await?;
        drop(output);
        let after = stats::of_queue(&client, &args.queue).await?;
        new.finish()?;
        (items, after)
    };
    let in_use = activity(&before) != activity(&after);
    let is_told = context.output.is_json() && args.file.as_os_str() != "-";
    if in_use && !is_told {
        eprintln!(
            "sluice: the queue was in use meanwhile: items that changed their state can be missing or be there twice"
        );
    }
    let text = format!("{} of {} backed up", output::items(items), args.queue);
    if args.file.as_os_str() == "-" {
        if !context.output.is_json() {
            eprintln!("sluice: {text}");
        }
        return Ok(());
    }
    let value = json!({ "queue": args.queue, "items": items, "in_use": in_use });
    Ok(context.output.one(&value, &output::harmless(&text, false))?)
}

/// Fails if the token may not read payloads: they would be left out of the items.
async fn check_payloads(client: &Client, queue: &str) -> Result<(), Failure> {
    let filter = ItemFilter { payload_contains: "x".into(), ..ItemFilter::default() };
    let request = client.request(ListItemsRequest {
        queue: queue.to_owned(),
        state: ItemState::Blocked.into(),
        page_size: 1,
        filter: Some(filter),
        ..ListItemsRequest::default()
    });
    match client.admin_service().list_items(request).await {
        Err(status) if status.code() == Code::PermissionDenied => {
            let why = format!(
                "the payloads of queue {queue} are not shown to this token: {}",
                status.message()
            );
            Err(sluicegate_client::tonic::Status::permission_denied(why).into())
        }
        Err(status) => Err(status.into()),
        Ok(_) => Ok(()),
    }
}

/// Returns a number that grows with whatever happens to items.
fn activity(stats: &QueueStats) -> i64 {
    stats.pushed
        + stats.delivered
        + stats.committed
        + stats.rolled_back
        + stats.moved
        + stats.dead_lettered
        + stats.expired
        + stats.discarded
}

/// Writes all unsettled items, and returns how many these are.
async fn write(
    client: &Client,
    queue: &str,
    stats: &QueueStats,
    output: &mut impl Write,
) -> Result<u64, Failure> {
    let mut admin = client.admin_service();
    let request = client.request(GetQueueRequest { name: queue.to_owned() });
    let settings = admin.get_queue(request).await?.into_inner().queue.unwrap_or_default();
    let mut writer = Writer::new(output, QueueEntry::from(&settings))?;
    let expected = stats.ready + stats.delayed + stats.reserved + stats.blocked;
    let progress = progress(expected.max(0) as u64, &format!("backed up from {queue}"));
    let mut page_token = String::new();
    'pages: loop {
        let request = client.request(ListItemsRequest {
            queue: queue.to_owned(),
            page_size: PAGE,
            page_token,
            ..ListItemsRequest::default()
        });
        let page = admin.list_items(request).await?.into_inner();
        for item in &page.items {
            // History comes last.
            if item.state() == ItemState::Processed {
                break 'pages;
            }
            writer.item(item)?;
        }
        progress.set_position(writer.items);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    progress.finish_and_clear();
    let items = writer.items;
    writer.end()?;
    Ok(items)
}

/// Returns a bar that is shown on terminals only.
fn progress(length: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    let template = "{bar:30} {human_pos} of {human_len} items {msg}, {per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(output::harmless(what, false));
    bar
}

/// A file that gets its name when it is complete. Only its owner can read it.
struct NewFile {
    file: fs::File,
    part: PathBuf,
    path: PathBuf,
}

impl NewFile {
    fn create(path: &Path, replace: bool) -> Result<Self, Failure> {
        if !replace && path.exists() {
            let why = format!("{} is there already; --replace replaces it", path.display());
            return Err(Failure::Usage(why));
        }
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let opened =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part);
        let file = opened.map_err(|source| Failure::File { path: part.clone(), source })?;
        Ok(Self { file, part, path: path.to_owned() })
    }

    fn finish(self) -> Result<(), Failure> {
        let finish = || {
            self.file.sync_all()?;
            put_in_place(&self.part, &self.path)
        };
        finish().map_err(|source| Failure::File { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_gets_its_name_when_it_is_complete_and_replaces_none_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q.ndjson");
        for replace in [false, true] {
            let mut new = NewFile::create(&path, replace).ok().unwrap();
            new.file.write_all(b"x").unwrap();
            assert_eq!(path.exists(), replace);
            assert!(new.finish().is_ok());
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert!(matches!(NewFile::create(&path, false), Err(Failure::Usage(_))));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
