//! `sluice operation`, and how other commands run their work as operations, which go on when `sluice` has left.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use clap::Subcommand;
use sluicegate_client::{
    Client,
    proto::{
        CancelOperationRequest, GetOperationRequest, ListOperationsRequest, Operation,
        OperationState, OperationWork, StartOperationRequest, operation_work::Kind,
    },
    tonic::Code,
};

use crate::{context::Context, failure::Failure, json, output, repeat};

/// How often a command asks how far an operation is.
const POLL: Duration = Duration::from_millis(300);
/// How long a broker may be away while a command waits for an operation, which goes on elsewhere.
const PATIENCE: Duration = Duration::from_mins(1);
/// The size of a page of the list.
const PAGE: i32 = 1_000;

/// The command line of `sluice operation`.
#[derive(Debug, Subcommand)]
pub(crate) enum OperationCommand {
    /// List the operations, the newest first
    List {
        /// Only operations on this queue
        #[arg(default_value = "", hide_default_value = true)]
        queue: String,
    },
    /// Show an operation
    Get(Id),
    /// Cancel an operation; what is done stays done
    Cancel(Id),
    /// Wait for the end of an operation
    Wait(Id),
}

/// Names an operation.
#[derive(Debug, clap::Args)]
pub(crate) struct Id {
    /// The operation's id
    id: String,
}

/// How many items work may touch, and how fast.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Bounds {
    /// At most this many
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    pub(crate) max: i64,
    /// At most this many per second
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    pub(crate) rate: i32,
}

/// How work on many items is run.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Mode {
    /// Print the id of an operation that does it, and do not wait: the brokers go on by themselves
    #[arg(long)]
    pub(crate) background: bool,
    /// Count the items, and change nothing
    #[arg(long, conflicts_with = "background")]
    pub(crate) dry_run: bool,
}

impl Mode {
    /// Returns true if the work is to be run as an operation.
    pub(crate) fn is_operation(self) -> bool {
        self.background || self.dry_run
    }
}

/// Starts an operation and, unless it is to go on in the background, waits for its end.
pub(crate) async fn run_work(
    context: &Context,
    client: &Client,
    kind: Kind,
    mode: Mode,
) -> Result<(), Failure> {
    let operation = start(context, client, kind, mode.dry_run).await?;
    if mode.background {
        let text = format!(
            "operation {} is started: `sluice operation wait {0}` waits for its end",
            operation.id
        );
        return Ok(context.output.one(&json::operation(&operation), &text)?);
    }
    wait(context, client, &operation.id).await
}

/// Returns how many items an operation would change.
pub(crate) async fn count(context: &Context, client: &Client, kind: Kind) -> Result<i64, Failure> {
    let operation = start(context, client, kind, true).await?;
    let ended = ended(client, &operation.id, |_| ()).await?;
    outcome(&ended)?;
    Ok(ended.processed_items)
}

/// Starts one operation, however often the call has to be made.
async fn start(
    context: &Context,
    client: &Client,
    kind: Kind,
    dry_run: bool,
) -> Result<Operation, Failure> {
    let (work, request_id) = (Some(OperationWork { kind: Some(kind) }), repeat::new_request_id());
    let request = StartOperationRequest { work, dry_run, request_id };
    let call =
        async || client.operation_service().start_operation(client.request(request.clone())).await;
    let instead = if dry_run {
        "try again: what was to be counted is as it was"
    } else {
        "the operation may be running or not: see `sluice operation list` before you start it again"
    };
    Ok(repeat::until_known(context, instead, call).await?.operation.unwrap_or_default())
}

async fn get(client: &Client, id: &str) -> Result<Operation, Failure> {
    let request = client.request(GetOperationRequest { id: id.to_owned() });
    let answer = client.operation_service().get_operation(request).await?;
    Ok(answer.into_inner().operation.unwrap_or_default())
}

pub(crate) async fn run(context: &Context, command: OperationCommand) -> Result<(), Failure> {
    let client = context.client().await?;
    match command {
        OperationCommand::List { queue } => list(context, &client, queue).await,
        OperationCommand::Get(Id { id }) => {
            Ok(context.output.object(&json::operation(&get(&client, &id).await?))?)
        }
        OperationCommand::Cancel(Id { id }) => {
            let request = client.request(CancelOperationRequest { id });
            let answer = client.operation_service().cancel_operation(request).await?;
            let operation = answer.into_inner().operation.unwrap_or_default();
            Ok(context.output.one(&json::operation(&operation), &said(&operation))?)
        }
        OperationCommand::Wait(Id { id }) => wait(context, &client, &id).await,
    }
}

async fn list(context: &Context, client: &Client, queue: String) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListOperationsRequest { queue: queue.clone(), page_size: PAGE, page_token };
        let answer = client.operation_service().list_operations(client.request(request)).await?;
        let page = answer.into_inner();
        for operation in &page.operations {
            let cells = vec![
                operation.id.clone(),
                json::work(operation).to_owned(),
                queue_of(operation).to_owned(),
                json::operation_state(operation.state()),
                progress(operation),
                context.output.time(operation.create_time.as_ref()),
                operation.started_by.clone(),
            ];
            rows.push((json::operation(operation), cells));
        }
        page_token = page.next_page_token;
        if page_token.is_empty() {
            let head = ["ID", "WORK", "QUEUE", "STATE", "ITEMS", "STARTED", "BY"];
            return Ok(context.output.list(&head, rows)?);
        }
    }
}

/// Waits for the end of an operation, and shows on a terminal how far it is.
async fn wait(context: &Context, client: &Client, id: &str) -> Result<(), Failure> {
    let is_shown = !context.output.is_json() && std::io::stderr().is_terminal();
    let show = |operation: &Operation| {
        if is_shown {
            // Whoever does not read stderr does not see it.
            let _ = write!(std::io::stderr(), "\r{}\x1b[K", progress(operation));
        }
    };
    let ended = ended(client, id, show).await;
    if is_shown {
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    let ended = ended.map_err(|failure| match failure {
        Failure::Client(source) if source.is_unavailable() => Failure::Unknown {
            source,
            instead: "the operation goes on by itself: `sluice operation list` shows it, and `sluice operation wait ID` waits for its \
                      end",
        },
        other => other,
    })?;
    context.output.one(&json::operation(&ended), &said(&ended))?;
    outcome(&ended)
}

/// Asks until an operation has ended. A broker that is away for a moment is no reason to give up.
async fn ended(
    client: &Client,
    id: &str,
    mut show: impl FnMut(&Operation),
) -> Result<Operation, Failure> {
    let mut heard = Instant::now();
    loop {
        match get(client, id).await {
            Ok(operation) if operation.state() != OperationState::Running => return Ok(operation),
            Ok(operation) => {
                heard = Instant::now();
                show(&operation);
            }
            Err(failure) if !is_away(&failure) || heard.elapsed() > PATIENCE => {
                return Err(failure);
            }
            Err(_) => {}
        }
        tokio::time::sleep(POLL).await;
    }
}

fn is_away(failure: &Failure) -> bool {
    let Failure::Client(error) = failure else { return false };
    matches!(error.code(), Some(Code::Unavailable | Code::DeadlineExceeded))
}

fn outcome(operation: &Operation) -> Result<(), Failure> {
    match operation.state() {
        OperationState::Cancelled => Err(Failure::Operation("the operation was cancelled".into())),
        OperationState::Failed => Err(Failure::Operation(operation.error.clone())),
        _ => Ok(()),
    }
}

/// Says in words what became of an operation.
fn said(operation: &Operation) -> String {
    let items = output::items(operation.processed_items);
    let done = match (&kind(operation), operation.dry_run) {
        (Some(Kind::Redrive(_)), false) => "moved back",
        (Some(Kind::Replay(_)), false) => "made ready again",
        (Some(Kind::Purge(_) | Kind::Delete(_)), false) => "deleted",
        (Some(Kind::Redrive(_)), true) => "would be moved back",
        (Some(Kind::Replay(_)), true) => "would be made ready again",
        (Some(Kind::Purge(_) | Kind::Delete(_)), true) => "would be deleted",
        (None, _) => "done",
    };
    match operation.state() {
        OperationState::Succeeded => format!("{items} {done}"),
        state => format!("{}: {items} {done}", json::operation_state(state)),
    }
}

fn kind(operation: &Operation) -> Option<&Kind> {
    operation.work.as_ref().and_then(|work| work.kind.as_ref())
}

fn queue_of(operation: &Operation) -> &str {
    match kind(operation) {
        Some(Kind::Redrive(redrive)) => &redrive.queue,
        Some(Kind::Replay(replay)) => &replay.queue,
        Some(Kind::Purge(purge)) => &purge.name,
        Some(Kind::Delete(delete)) => &delete.queue,
        None => "",
    }
}

fn progress(operation: &Operation) -> String {
    let counted = if operation.dry_run { " (dry run)" } else { "" };
    format!("{} of {}{counted}", operation.processed_items, operation.total_items)
}

#[cfg(test)]
mod tests {
    use sluicegate_client::proto::PurgeQueueRequest;

    use super::*;

    #[test]
    fn the_end_of_an_operation_is_said_in_words() {
        let kind = Some(Kind::Purge(PurgeQueueRequest { name: "q".to_owned() }));
        let purge = |state: OperationState, dry_run| Operation {
            work: Some(OperationWork { kind: kind.clone() }),
            state: state.into(),
            dry_run,
            processed_items: 2,
            total_items: 9,
            error: "why".to_owned(),
            ..Operation::default()
        };
        let done = purge(OperationState::Succeeded, false);
        assert_eq!((said(&done).as_str(), outcome(&done).is_ok()), ("2 items deleted", true));
        assert_eq!(said(&purge(OperationState::Succeeded, true)), "2 items would be deleted");
        let failed = purge(OperationState::Failed, false);
        assert_eq!(said(&failed), "failed: 2 items deleted");
        assert!(matches!(outcome(&failed), Err(Failure::Operation(why)) if why == "why"));
        assert!(outcome(&purge(OperationState::Cancelled, false)).is_err());
        assert_eq!(progress(&failed), "2 of 9");
        assert_eq!(queue_of(&failed), "q");
    }
}
