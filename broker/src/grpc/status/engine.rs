//! Errors of the engine, of the store behind it, and of a broker that has too much to do.

use std::time::Duration;

use sluicegate_proto::v1::ErrorReason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::{bad_field, error_info};
use crate::grpc::concurrency::TooMany;
use crate::{
    domain::{Invalid, OperationId, Pattern, QueueName, ScheduleName},
    engine::EngineError,
    store::StoreError,
};

/// When to retry after a temporary failure: a restart, an election, a full queue.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);
/// When to try again after losing a race.
const RETRY_RACE: Duration = Duration::from_millis(50);

/// What to do if a queue does not exist.
const CREATE_QUEUE: &str =
    "create it with CreateQueue, or push to it if the broker creates queues by itself";

/// Converts an error of the engine.
pub(super) fn engine(error: &EngineError) -> Status {
    let (code, details, next) = match error {
        EngineError::Invalid(invalid) => return bad_field(invalid),
        EngineError::Store(error) => return store(error),
        EngineError::QueueNotFound(name) => {
            (Code::NotFound, about_queue(ErrorReason::QueueNotFound, name), CREATE_QUEUE)
        }
        EngineError::MayNotCreate(name) => {
            let details = error_info(
                ErrorReason::PermissionMissing,
                [("permission", format!("create@{name}"))],
            );
            (Code::PermissionDenied, details, "have it created, or use another token")
        }
        EngineError::TooManyQueues { .. } => return too_many_queues(error),
        EngineError::QueueDeleted(name) => {
            let next = "its items are gone, consume another one";
            (Code::NotFound, about_queue(ErrorReason::QueueDeleted, name), next)
        }
        EngineError::ItemNotFound { queue, id } => {
            let info =
                error_info(ErrorReason::ItemNotFound, [queue_entry(queue), ("id", id.clone())]);
            let next = "it was settled, moved, deleted, or it expired";
            (Code::NotFound, about(info, "Item", id), next)
        }
        EngineError::OperationNotFound(id) => {
            let details = about_operation(ErrorReason::OperationNotFound, *id);
            (Code::NotFound, details, "operations are kept for a week after their end")
        }
        EngineError::OperationExists(id) => {
            let details = about_operation(ErrorReason::OperationExists, *id);
            (Code::AlreadyExists, details, "choose another request_id")
        }
        EngineError::TooManyOperations(most) => {
            let info = [("limit", most.to_string())];
            let details = error_info(ErrorReason::TooManyOperations, info);
            (Code::ResourceExhausted, details, "try again when one of them has ended")
        }
        EngineError::QueueExists(name) => {
            let details = about_queue(ErrorReason::QueueExists, name);
            (Code::AlreadyExists, details, "change them with UpdateQueue")
        }
        EngineError::QueueFull { queue, max_depth } => {
            let next = "push again when consumers have caught up, or raise its max_depth";
            (Code::ResourceExhausted, queue_full(queue, *max_depth, error), next)
        }
        EngineError::Conflict(queue) => {
            let info = error_info(ErrorReason::Conflict, [queue_entry(queue)]);
            (Code::Aborted, retry(info, RETRY_RACE), "try again")
        }
        EngineError::ShuttingDown => {
            let next = "connect to another one, or to this one again in a moment";
            (Code::Unavailable, retry(error_info(ErrorReason::ShuttingDown, []), RETRY_AFTER), next)
        }
        EngineError::NotRead => {
            let next = "open another stream, and read it, or have it hold less";
            (Code::ResourceExhausted, error_info(ErrorReason::ItemsNotRead, []), next)
        }
        EngineError::StreamTooOld => {
            let details = retry(error_info(ErrorReason::StreamTooOld, []), Duration::ZERO);
            (Code::Unavailable, details, "open another one at once, to any broker")
        }
        EngineError::ScheduleNotFound(_)
        | EngineError::ScheduleExists(_)
        | EngineError::TooManySchedules(_) => return schedule(error),
        EngineError::TemplateNotFound(_)
        | EngineError::TemplateExists(_)
        | EngineError::TooManyTemplates(_)
        | EngineError::TemplateConflict(_) => return template(error),
        EngineError::ItemInOtherState { .. }
        | EngineError::DifferentGroup { .. }
        | EngineError::QueueNotEmpty { .. }
        | EngineError::DeadLetterQueueInUse { .. }
        | EngineError::DeadLetterRing(_)
        | EngineError::DeadLetterGroup { .. } => return precondition(error),
    };
    Status::with_error_details(code, format!("{error}: {next}"), details)
}

/// Converts an error about schedules.
fn schedule(error: &EngineError) -> Status {
    let (code, details, next) = match error {
        EngineError::ScheduleNotFound(name) => {
            let details = about_schedule(ErrorReason::ScheduleNotFound, name);
            (Code::NotFound, details, "create it with CreateSchedule")
        }
        EngineError::TooManySchedules(most) => {
            let info = [("limit", most.to_string())];
            let details = error_info(ErrorReason::TooManySchedules, info);
            (Code::ResourceExhausted, details, "delete some")
        }
        EngineError::ScheduleExists(name) => {
            let details = about_schedule(ErrorReason::ScheduleExists, name);
            (Code::AlreadyExists, details, "delete it first, or choose another name")
        }
        _ => return Status::internal(error.to_string()),
    };
    Status::with_error_details(code, format!("{error}: {next}"), details)
}

/// Converts an error about templates.
fn template(error: &EngineError) -> Status {
    let (code, details, next) = match error {
        EngineError::TemplateNotFound(pattern) => {
            let details = about_template(ErrorReason::TemplateNotFound, pattern);
            (Code::NotFound, details, "create it with CreateTemplate")
        }
        EngineError::TemplateExists(pattern) => {
            let details = about_template(ErrorReason::TemplateExists, pattern);
            (Code::AlreadyExists, details, "change them with UpdateTemplate")
        }
        EngineError::TooManyTemplates(most) => {
            let info = [("limit", most.to_string())];
            let details = error_info(ErrorReason::TooManyTemplates, info);
            (Code::ResourceExhausted, details, "delete some, or use one for several queues")
        }
        EngineError::TemplateConflict(pattern) => {
            let info = error_info(ErrorReason::Conflict, [("template", pattern.to_string())]);
            (Code::Aborted, retry(info, RETRY_RACE), "try again")
        }
        _ => return Status::internal(error.to_string()),
    };
    Status::with_error_details(code, format!("{error}: {next}"), details)
}

/// Converts an error that says that something is not as the call needs it.
fn precondition(error: &EngineError) -> Status {
    match error {
        EngineError::ItemInOtherState { queue, id, state } => {
            let info = [queue_entry(queue), ("id", id.clone()), ("state", state.to_string())];
            let next = "nothing was changed; leave out only_if to delete it whatever its state";
            refused(ErrorReason::ItemInOtherState, info, ("STATE", id), error, Some(next))
        }
        EngineError::DifferentGroup { from, to } => {
            let info = [("from", from.to_string()), ("to", to.to_string())];
            let next = "use CommitAndPush, which spans groups";
            refused(ErrorReason::DifferentGroup, info, ("GROUP", to.as_str()), error, Some(next))
        }
        EngineError::QueueNotEmpty { queue, items } => {
            let info = [queue_entry(queue), ("items", items.to_string())];
            let next = "consume or purge them, or set force to delete them with it";
            refused(ErrorReason::QueueNotEmpty, info, ("EMPTY", queue.as_str()), error, Some(next))
        }
        EngineError::DeadLetterQueueInUse { queue, sources } => {
            let info = [queue_entry(queue), ("sources", joined(sources))];
            let violation = ("UNUSED", queue.as_str());
            let next = "give those another dead_letter_queue, or delete them first";
            refused(ErrorReason::DeadLetterQueueInUse, info, violation, error, Some(next))
        }
        EngineError::DeadLetterRing(ring) => {
            let info = [queue_entry(&ring[0]), ("ring", joined(ring))];
            refused(ErrorReason::DeadLetterRing, info, ("RING", ring[0].as_str()), error, None)
        }
        EngineError::DeadLetterGroup { queue, group, .. } => {
            let info = [queue_entry(queue), ("group", group.to_string())];
            refused(ErrorReason::DifferentGroup, info, ("GROUP", group.as_str()), error, None)
        }
        _ => Status::failed_precondition(error.to_string()),
    }
}

/// Converts an error of the store. What the driver said goes to the log only, because it may name hosts and users.
fn store(error: &StoreError) -> Status {
    let (code, message, details) = match error {
        StoreError::Unavailable { .. } => {
            tracing::debug!(%error, "answered UNAVAILABLE");
            let mut details = error_info(ErrorReason::StoreUnavailable, []);
            details.set_retry_info(Some(RETRY_AFTER));
            let message = "the store cannot be reached: the outcome is unknown; try again, \
                           which is safe for settles and for pushes with a dedup_id";
            (Code::Unavailable, message.to_owned(), details)
        }
        StoreError::Full { .. } => {
            tracing::debug!(%error, "answered RESOURCE_EXHAUSTED");
            let mut details = error_info(ErrorReason::StoreFull, []);
            details.set_retry_info(Some(RETRY_AFTER));
            let message = "the store is full: nothing was stored; items can be taken and settled";
            (Code::ResourceExhausted, message.to_owned(), details)
        }
        StoreError::Damaged { .. } => {
            tracing::error!(%error, "answered DATA_LOSS");
            let message = "what is stored is damaged: the broker's log says more";
            (Code::DataLoss, message.to_owned(), error_info(ErrorReason::Damaged, []))
        }
        StoreError::Unsupported(why) => {
            let mut details = error_info(ErrorReason::UnsupportedByStore, []);
            details.add_precondition_failure_violation("STORE", "store", why.clone());
            (Code::FailedPrecondition, why.clone(), details)
        }
        StoreError::BadCursor => return bad_field(&Invalid::new("page_token", error.to_string())),
        StoreError::Internal { .. } => {
            tracing::error!(%error, "answered INTERNAL");
            let message = "the store failed: the broker's log says more";
            (Code::Internal, message.to_owned(), error_info(ErrorReason::Internal, []))
        }
    };
    Status::with_error_details(code, message, details)
}

fn queue_entry(name: &QueueName) -> (&'static str, String) {
    ("queue", name.to_string())
}

fn joined(names: &[QueueName]) -> String {
    names.iter().map(QueueName::as_str).collect::<Vec<_>>().join(",")
}

fn about_queue(reason: ErrorReason, name: &QueueName) -> ErrorDetails {
    about(error_info(reason, [queue_entry(name)]), "Queue", name.as_str())
}

fn about_schedule(reason: ErrorReason, name: &ScheduleName) -> ErrorDetails {
    about(error_info(reason, [("schedule", name.to_string())]), "Schedule", name.as_str())
}

fn about_operation(reason: ErrorReason, id: OperationId) -> ErrorDetails {
    let id = id.to_string();
    about(error_info(reason, [("operation", id.clone())]), "Operation", &id)
}

fn about_template(reason: ErrorReason, pattern: &Pattern) -> ErrorDetails {
    let info = error_info(reason, [("template", pattern.to_string())]);
    about(info, "QueueTemplate", pattern.as_str())
}

fn about(mut details: ErrorDetails, kind: &str, name: &str) -> ErrorDetails {
    details.set_resource_info(format!("sluicegate.v1.{kind}"), name, "", "");
    details
}

fn queue_full(queue: &QueueName, max_depth: u64, error: &EngineError) -> ErrorDetails {
    let info = [queue_entry(queue), ("max_depth", max_depth.to_string())];
    let mut details = retry(error_info(ErrorReason::QueueFull, info), RETRY_AFTER);
    details.add_quota_failure_violation(queue.as_str(), error.to_string());
    details
}

fn too_many_queues(error: &EngineError) -> Status {
    let mut details = error_info(ErrorReason::TooManyQueues, []);
    details.add_quota_failure_violation("queues", error.to_string());
    let message = format!("{error}: delete some that are not used, or have the limit raised");
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

/// Converts a refusal of one call too many.
pub(super) fn too_many(error: TooMany) -> Status {
    let info = [("setting", error.setting.to_owned()), ("limit", error.most.to_string())];
    let mut details = retry(error_info(error.reason(), info), RETRY_AFTER);
    details.add_quota_failure_violation(error.setting, error.to_string());
    let message = format!("{error}: try again when some of them have ended");
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

fn retry(mut details: ErrorDetails, after: Duration) -> ErrorDetails {
    details.set_retry_info(Some(after));
    details
}

/// Returns the status FAILED_PRECONDITION; `next` says what to do, if anything helps.
fn refused<const N: usize>(
    reason: ErrorReason,
    info: [(&str, String); N],
    (kind, subject): (&str, &str),
    error: &EngineError,
    next: Option<&str>,
) -> Status {
    let mut details = error_info(reason, info);
    details.add_precondition_failure_violation(kind, subject, error.to_string());
    let message = next.map_or_else(|| error.to_string(), |next| format!("{error}: {next}"));
    Status::with_error_details(Code::FailedPrecondition, message, details)
}
