//! `sluice consume`.

use std::{
    io,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use sluicegate_client::{
    CancellationToken, Consumer, Delivery, Error, Renewal, Summary, proto::Item, tonic::Code,
};
use tokio::{io::AsyncWriteExt, process::Command};

use crate::{context::Context, failure::Failure, output::Output, values};

const AFTER_HELP: &str = "\
Without --exec, payloads are printed one per line and committed.

With --exec, the command is run by `sh -c` for each item. The payload is its stdin; SLUICE_QUEUE, SLUICE_ITEM_ID, \
SLUICE_ATTEMPT, SLUICE_DELIVERIES, SLUICE_PRIORITY, SLUICE_SEQUENCE, SLUICE_CONTENT_TYPE, SLUICE_ORDERING_KEY, and \
SLUICE_HEADER_NAME for each header, are in its environment. Exit status 0 commits the item; any other rolls it \
back with the status as reason.

After Ctrl-C no more items are taken, running commands finish, and the other items are rolled back; a second Ctrl-C ends \
at once. If no item was delivered at all, the exit code is 3.";

/// The command line of `sluice consume`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// The queue
    queue: String,
    /// Run this shell command for each item
    #[arg(long, short, value_name = "CMD")]
    exec: Option<String>,
    /// Exit after this many items
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// How many items to hold, and commands to run, at a time [default: 1 with --exec, else 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    max_in_flight: Option<u32>,
    /// Lease of each item; renewed while its command runs [default: the queue's]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    lease: Option<Duration>,
    /// Do not renew leases: a command that takes longer than its lease loses its item
    #[arg(long)]
    no_renew: bool,
    /// Exit after this long without work
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    idle_exit: Option<Duration>,
    /// How long running commands may take after Ctrl-C
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = values::duration)]
    grace: Duration,
    /// Name of the consumer, shown with each item
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Commit items as they are delivered: at-most-once delivery
    #[arg(long)]
    auto_commit: bool,
}

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    let client = context.client().await?;
    let stop = CancellationToken::new();
    let in_flight = args.max_in_flight.unwrap_or(if args.exec.is_some() { 1 } else { 100 });
    let mut consumer = client
        .consumer(&args.queue)
        .max_in_flight(in_flight)
        .shutdown(stop.clone())
        .shutdown_grace(args.grace);
    if args.exec.is_none() {
        consumer = consumer.concurrency(1); // keeps the order
    }
    if let Some(lease) = args.lease {
        consumer = consumer.lease(lease);
    }
    if args.no_renew {
        consumer = consumer.renewal(Renewal::Off);
    }
    if let Some(name) = &args.name {
        consumer = consumer.name(name);
    }
    if args.auto_commit {
        consumer = consumer.at_most_once();
    }
    if let Some(count) = args.count {
        consumer = consumer.limit(count);
    }
    if let Some(time) = args.idle_exit {
        consumer = consumer.idle_exit(time);
    }
    let interrupted = stop.clone();
    let watching = tokio::spawn(async move { watch_interrupts(interrupted).await });
    let work = Work {
        output: context.output,
        exec: args.exec.map(Arc::from),
        stop,
        failed: Arc::default(),
    };
    // ConsumeStream rolls back exactly the items that were not started; a broker without it has Consume.
    let mut ended = work.clone().run(consumer.clone()).await;
    if matches!(&ended, Err(error) if error.code() == Some(Code::Unimplemented)) {
        ended = work.clone().run(consumer.unary()).await;
    }
    watching.abort();
    if let Some(error) = work.failed.lock().ok().and_then(|mut failed| failed.take()) {
        return Err(error.into());
    }
    let summary = ended?;
    if summary.started == 0 {
        return Err(Failure::Nothing);
    }
    if !context.output.is_json() && work.exec.is_some() {
        eprintln!("sluice: {} committed, {} rolled back", summary.committed, summary.rolled_back);
    }
    Ok(())
}

/// Shuts down gracefully at the first interrupt, and immediately at the second.
async fn watch_interrupts(stop: CancellationToken) {
    if tokio::signal::ctrl_c().await.is_ok() {
        eprintln!("sluice: finishing the items at work; press Ctrl-C again to exit at once");
        stop.cancel();
    }
    if tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(130);
    }
}

/// What to do with each item.
#[derive(Clone)]
struct Work {
    output: Output,
    exec: Option<Arc<str>>,
    stop: CancellationToken,
    /// Why items cannot be printed any more.
    failed: Arc<Mutex<Option<io::Error>>>,
}

impl Work {
    async fn run(self, consumer: Consumer) -> Result<Summary, Error> {
        consumer
            .run(move |delivery| {
                let work = self.clone();
                async move {
                    match &work.exec {
                        Some(command) => execute(command, &delivery).await,
                        None => work.print(delivery.item()),
                    }
                }
            })
            .await
    }

    fn print(&self, item: &Item) -> Result<(), String> {
        self.output.payload(item).map_err(|error| {
            // No one reads the output any more: this item is rolled back, and so are all others.
            let reason = error.to_string();
            if let Ok(mut failed) = self.failed.lock() {
                *failed = Some(error);
            }
            self.stop.cancel();
            reason
        })
    }
}

async fn execute(command: &str, delivery: &Delivery) -> Result<(), String> {
    let item = delivery.item();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", command])
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .env("SLUICE_QUEUE", &item.queue)
        .env("SLUICE_ITEM_ID", &item.id)
        .env("SLUICE_ATTEMPT", item.attempt.to_string())
        .env("SLUICE_DELIVERIES", item.deliveries.to_string())
        .env("SLUICE_PRIORITY", item.priority.to_string())
        .env("SLUICE_SEQUENCE", item.sequence.to_string())
        .env("SLUICE_CONTENT_TYPE", &item.content_type)
        .env("SLUICE_ORDERING_KEY", &item.ordering_key);
    for (name, value) in &item.headers {
        // An environment cannot hold NUL: such values are left out.
        if !value.contains('\0') {
            shell.env(header_variable(name), value);
        }
    }
    // Ctrl-C on the terminal is for this process, which lets the command finish.
    #[cfg(unix)]
    shell.process_group(0);
    let mut child = shell.spawn().map_err(|error| format!("could not start sh: {error}"))?;
    let stdin = child.stdin.take();
    let feeding = async {
        if let Some(mut stdin) = stdin {
            // A command may end without reading its input.
            let _ = stdin.write_all(&item.payload).await;
        }
    };
    let ((), status) = tokio::join!(feeding, child.wait());
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(error) => Err(format!("could not wait for the command: {error}")),
    }
}

/// `trace-id` becomes `SLUICE_HEADER_TRACE_ID`.
fn header_variable(name: &str) -> String {
    let name: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
        .collect();
    format!("SLUICE_HEADER_{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_names_become_variable_names() {
        assert_eq!(header_variable("trace-id.2"), "SLUICE_HEADER_TRACE_ID_2");
    }
}
