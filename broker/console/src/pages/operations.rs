//! Actions that may take long: operations, which any broker continues, and those that end with this broker.

use std::time::{Duration, SystemTime};

use axum::{
    extract::Path,
    http::StatusCode,
    response::{IntoResponse as _, Redirect},
};
use maud::{Markup, html};
use sluicegate_proto::v1::{
    CancelOperationRequest, GetOperationRequest, Operation, OperationState, OperationWork,
    StartOperationRequest, operation_work::Kind,
};
use tonic::Status;

use super::{
    answer::{Answer, done, queue_address, shown},
    dead_letters,
    frame::{Section, page},
};
use crate::{
    api::{Api, incomplete},
    operation::{Name, PATIENCE},
    problem::Problem,
    text,
    visitor::Visitor,
};

/// How often an operation is looked at while a request waits for its end.
const POLL: Duration = Duration::from_millis(50);
/// The length of the id of an operation of all brokers. Ids of this broker's actions are shorter.
const ID: usize = 24;

fn is_of_all_brokers(id: &str) -> bool {
    id.len() == ID
}

/// Returns the field by which a form that is sent twice, because its answer was lost or the button was pressed twice, is known
/// again: what it asks for is done once.
pub(super) fn once() -> Markup {
    html! { input type="hidden" name="request_id" value=(format!("{:032x}", rand::random::<u128>())); }
}

/// Starts an operation, and leads the browser to its result, or to its progress if it takes long. `request_id` is that of the
/// form.
pub(super) async fn start(visitor: &Visitor, kind: Kind, request_id: String) -> Answer {
    let api = visitor.api();
    let work = Some(OperationWork { kind: Some(kind) });
    let request = StartOperationRequest { work, dry_run: false, request_id };
    let answer = api.operation.clone().start_operation(request).await?;
    let mut operation = answer.into_inner().operation.ok_or_else(incomplete)?;
    let waiting = async {
        while operation.state() == OperationState::Running {
            tokio::time::sleep(POLL).await;
            operation = get(&api, operation.id.clone()).await?;
        }
        Ok::<_, Problem>(())
    };
    if let Ok(ended) = tokio::time::timeout(PATIENCE, waiting).await {
        ended?;
        return ending(&operation);
    }
    Ok(Redirect::to(&format!("/operations/{}", operation.id)).into_response())
}

async fn get(api: &Api, id: String) -> Result<Operation, Problem> {
    let answer = api.operation.clone().get_operation(GetOperationRequest { id }).await?;
    Ok(answer.into_inner().operation.ok_or_else(incomplete)?)
}

/// Returns what the operation is called, the queue it works on, and the word for what it did.
fn named(operation: &Operation) -> (String, String, &'static str) {
    let kind = operation.work.as_ref().and_then(|work| work.kind.as_ref());
    let (verb, queue, notice) = match kind {
        // Such a redrive is begun on the page of dead letters, and by nothing else of the console.
        Some(Kind::Redrive(redrive))
            if redrive.filter.as_ref().is_some_and(|filter| filter.reason.is_some()) =>
        {
            let title = format!("Redrive {}", redrive.queue);
            return (title, dead_letters::ADDRESS.to_owned(), "redriven");
        }
        Some(Kind::Redrive(redrive)) => ("Redrive", redrive.queue.as_str(), "redriven"),
        Some(Kind::Replay(replay)) => ("Replay", replay.queue.as_str(), "replayed"),
        Some(Kind::Purge(purge)) => ("Purge", purge.name.as_str(), "purged"),
        Some(Kind::Delete(delete)) => ("Delete items of", delete.queue.as_str(), "purged"),
        None => return ("An operation".to_owned(), "/queues".to_owned(), "purged"),
    };
    (format!("{verb} {queue}"), queue_address(queue), notice)
}

/// Leads the browser to what an operation was done to.
fn ending(operation: &Operation) -> Answer {
    let (_, back, notice) = named(operation);
    if operation.state() == OperationState::Failed {
        let items = match operation.processed_items {
            0 => String::new(),
            items => format!(" {} were done before.", text::counted(items, "item")),
        };
        return Err(Problem::new(StatusCode::CONFLICT, format!("{}.{items}", operation.error)));
    }
    Ok(done(&back, notice, operation.processed_items))
}

fn shown_progress(visitor: &Visitor, operation: &Operation) -> Answer {
    if operation.state() != OperationState::Running {
        return ending(operation);
    }
    let (title, back, _) = named(operation);
    let (items, total) = (operation.processed_items, operation.total_items);
    let begun = operation.create_time.and_then(|time| SystemTime::try_from(time).ok());
    let since = begun.and_then(|time| time.elapsed().ok()).unwrap_or_default();
    let body = html! {
        h1 { (title) }
        // The script loads the page again until it leads elsewhere.
        div.progress data-reload="1000" {
            @if items > 0 && total > 0 {
                progress aria-label=(title) value=(items.min(total)) max=(total) {}
            } @else {
                progress aria-label=(title) {}
            }
            p {
                "Under way for " (text::length(since))
                @if items > 0 { ": " (text::counted(items, "item")) " of " (text::count(total)) " so far" } "."
            }
            form method="post" action={ "/operations/" (operation.id) "/stop" } { button type="submit" { "Stop" } }
        }
        p.quiet { "It goes on if you leave this page, and if this broker ends. " a href=(back) { "Back" } }
    };
    Ok(shown(page(visitor, &title, Section::Queues, &body)))
}

/// Begins an action, and leads the browser to its result, or to its progress if it takes long.
pub(super) async fn begin(
    visitor: &Visitor,
    name: Name,
    work: impl Future<Output = Result<i64, Status>> + Send + 'static,
) -> Answer {
    let operation = visitor.console.operations.begin(name, visitor.token.clone(), work)?;
    operation.settled().await;
    match operation.result() {
        Some(Ok(items)) => Ok(done(&operation.back, operation.notice, items)),
        Some(Err(status)) => Err(status.into()),
        None => Ok(Redirect::to(&format!("/operations/{}", operation.id)).into_response()),
    }
}

pub(super) async fn progress(visitor: Visitor, Path(id): Path<String>) -> Answer {
    if is_of_all_brokers(&id) {
        return shown_progress(&visitor, &get(&visitor.api(), id).await?);
    }
    let operation = visitor.console.operations.get(&id, visitor.token.as_deref());
    let operation = operation.ok_or_else(forgotten)?;
    match operation.result() {
        Some(Ok(items)) => return Ok(done(&operation.back, operation.notice, items)),
        Some(Err(status)) => return Err(status.into()),
        None => {}
    }
    let body = html! {
        h1 { (operation.title) }
        // The script loads the page again until it leads elsewhere.
        div.progress data-reload="1000" {
            progress aria-label=(operation.title) {}
            p { "Under way for " (text::length(operation.began.elapsed())) "." }
        }
        p.quiet { "It goes on if you leave this page. " a href=(operation.back) { "Back" } }
    };
    Ok(shown(page(&visitor, &operation.title, Section::Queues, &body)))
}

pub(super) async fn stop(visitor: Visitor, Path(id): Path<String>) -> Answer {
    let request = CancelOperationRequest { id: id.clone() };
    visitor.api().operation.cancel_operation(request).await?;
    Ok(Redirect::to(&format!("/operations/{id}")).into_response())
}

fn forgotten() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "This action is not known any more.")
}
