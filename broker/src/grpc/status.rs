//! Errors as gRPC statuses. No other module turns an error into a status.
//!
//! Every status carries an `ErrorInfo` with a stable reason and the domain [`DOMAIN`]. Further details are added
//! where they help: `BadRequest` names the field, `RetryInfo` says when to try again, `ResourceInfo` says what is
//! missing, `PreconditionFailure` and `QuotaFailure` name the obstacle.

use std::{collections::HashMap, time::Duration};

use prost::Message;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    domain::{Invalid, QueueName},
    engine::EngineError,
    store::StoreError,
};

/// The `domain` of every `ErrorInfo`.
pub(crate) const DOMAIN: &str = "sluicegate";

/// When to retry after a temporary failure: a restart, an election, a full queue.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// When to try again after losing a race.
const RETRY_RACE: Duration = Duration::from_millis(50);

/// Everything that can go wrong between a request and its answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A payload is larger than the broker's limit.
    #[error("{field} is {bytes} bytes; this broker takes at most {limit}")]
    PayloadTooLarge {
        /// The path of the field in the request.
        field: String,
        /// Its size.
        bytes: usize,
        /// The broker's `max_payload_bytes`.
        limit: usize,
    },
    /// The call carries no token this broker knows.
    #[error("{}", if *.given { "the token is not known" } else { "a token is needed" })]
    Unauthenticated {
        /// True if the call carries a token, of whatever form.
        given: bool,
    },
    /// The token is known, but does not allow this call.
    #[error("the token lacks the role {role}")]
    PermissionDenied {
        /// The role that is missing.
        role: &'static str,
        /// The path of the call, `/package.Service/Method`.
        method: String,
    },
    /// The gRPC library refused: the message could not be read, the method is not known.
    #[error("{0}")]
    Transport(Status),
    /// The client of a push stream does not read its answers.
    #[error("the stream's answers were not read: what is not answered may be stored or not")]
    AnswersNotRead,
    /// The task that did the work died: a defect.
    #[error("the broker failed to finish the call")]
    TaskDied,
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        Self::Engine(invalid.into())
    }
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        status(&error)
    }
}

impl From<EngineError> for Status {
    fn from(error: EngineError) -> Self {
        status(&error.into())
    }
}

impl From<Invalid> for Status {
    fn from(invalid: Invalid) -> Self {
        status(&invalid.into())
    }
}

/// Returns the status for `error`, which includes what the client can do about it.
pub(crate) fn status(error: &ApiError) -> Status {
    match error {
        ApiError::Engine(error) => engine(error),
        ApiError::PayloadTooLarge { field, bytes, limit } => {
            let info = [("field", field.clone()), ("max_payload_bytes", limit.to_string())];
            let mut details = error_info("PAYLOAD_TOO_LARGE", info);
            details.add_bad_request_violation(field, format!("{bytes} bytes, more than {limit}"));
            let message = format!(
                "{error}: store the content elsewhere and push a reference, or raise the broker's max_payload_bytes"
            );
            Status::with_error_details(Code::ResourceExhausted, message, details)
        }
        ApiError::Unauthenticated { given } => {
            let reason = if *given { "TOKEN_UNKNOWN" } else { "TOKEN_MISSING" };
            let message = format!("{error}: send the metadata 'authorization: Bearer TOKEN'");
            Status::with_error_details(Code::Unauthenticated, message, error_info(reason, []))
        }
        ApiError::PermissionDenied { role, method } => {
            let info = [("role", (*role).to_owned()), ("method", method.clone())];
            let message = format!("{error}, which {method} needs: use another token");
            let details = error_info("ROLE_MISSING", info);
            Status::with_error_details(Code::PermissionDenied, message, details)
        }
        ApiError::Transport(status) => transport(status),
        ApiError::AnswersNotRead => {
            let details = error_info("ANSWERS_NOT_READ", []);
            Status::with_error_details(Code::DeadlineExceeded, error.to_string(), details)
        }
        ApiError::TaskDied => {
            let message = format!("{error}: this is a defect, the broker's log says more");
            Status::with_error_details(Code::Internal, message, error_info("INTERNAL", []))
        }
    }
}

/// Converts a status, including its details, into a message that can be embedded in another one.
pub(crate) fn embedded(status: &Status) -> tonic_types::Status {
    // The details are themselves an encoded google.rpc.Status, of which only the list is wanted.
    let details = tonic_types::Status::decode(status.details()).unwrap_or_default().details;
    let (code, message) = (status.code().into(), status.message().to_owned());
    tonic_types::Status { code, message, details }
}

fn engine(error: &EngineError) -> Status {
    let (code, message, details) = match error {
        EngineError::Invalid(invalid) => return bad_field(invalid),
        EngineError::QueueNotFound(name) => {
            let info = of_queue("QUEUE_NOT_FOUND", name);
            let next =
                "create it with CreateQueue, or push to it if the broker makes queues by itself";
            (Code::NotFound, format!("{error}: {next}"), about(info, "Queue", name.as_str()))
        }
        EngineError::QueueDeleted(name) => {
            let info = of_queue("QUEUE_DELETED", name);
            let next = "its items are gone, consume another one";
            (Code::NotFound, format!("{error}: {next}"), about(info, "Queue", name.as_str()))
        }
        EngineError::ItemNotFound { queue, id } => {
            let info = [("queue", queue.to_string()), ("id", id.clone())];
            let details = about(error_info("ITEM_NOT_FOUND", info), "Item", id);
            let next = "it was settled, moved, deleted, or it expired";
            (Code::NotFound, format!("{error}: {next}"), details)
        }
        EngineError::ItemInOtherState { queue, id, state } => {
            let info =
                [("queue", queue.to_string()), ("id", id.clone()), ("state", state.to_string())];
            let mut details = error_info("ITEM_IN_OTHER_STATE", info);
            details.add_precondition_failure_violation("STATE", id.as_str(), error.to_string());
            let next = "nothing was changed; leave out only_if to delete it whatever its state";
            (Code::FailedPrecondition, format!("{error}: {next}"), details)
        }
        EngineError::ScheduleNotFound(name) => {
            let info = error_info("SCHEDULE_NOT_FOUND", [("schedule", name.to_string())]);
            let details = about(info, "Schedule", name.as_str());
            (Code::NotFound, format!("{error}: create it with CreateSchedule"), details)
        }
        EngineError::QueueExists(name) => {
            let details = about(of_queue("QUEUE_EXISTS", name), "Queue", name.as_str());
            (Code::AlreadyExists, format!("{error}: change them with UpdateQueue"), details)
        }
        EngineError::ScheduleExists(name) => {
            let info = error_info("SCHEDULE_EXISTS", [("schedule", name.to_string())]);
            let details = about(info, "Schedule", name.as_str());
            (
                Code::AlreadyExists,
                format!("{error}: delete it first, or choose another name"),
                details,
            )
        }
        EngineError::DifferentGroup { from, to } => {
            let info = [("from", from.to_string()), ("to", to.to_string())];
            let mut details = error_info("DIFFERENT_GROUP", info);
            details.add_precondition_failure_violation("GROUP", to.as_str(), error.to_string());
            let next = "use CommitAndPush, which spans groups";
            (Code::FailedPrecondition, format!("{error}: {next}"), details)
        }
        EngineError::QueueNotEmpty { queue, items } => {
            let info = [("queue", queue.to_string()), ("items", items.to_string())];
            let mut details = error_info("QUEUE_NOT_EMPTY", info);
            details.add_precondition_failure_violation("EMPTY", queue.as_str(), error.to_string());
            let next = "consume or purge them, or set force to delete them with it";
            (Code::FailedPrecondition, format!("{error}: {next}"), details)
        }
        EngineError::DeadLetterQueueInUse { queue, sources } => {
            let sources: Vec<&str> = sources.iter().map(QueueName::as_str).collect();
            let info = [("queue", queue.to_string()), ("sources", sources.join(","))];
            let mut details = error_info("DEAD_LETTER_QUEUE_IN_USE", info);
            details.add_precondition_failure_violation("UNUSED", queue.as_str(), error.to_string());
            let next = "give those another dead_letter_queue, or delete them first";
            (Code::FailedPrecondition, format!("{error}: {next}"), details)
        }
        EngineError::DeadLetterRing(ring) => {
            let names: Vec<&str> = ring.iter().map(QueueName::as_str).collect();
            let info = [("queue", names[0].to_owned()), ("ring", names.join(","))];
            let mut details = error_info("DEAD_LETTER_RING", info);
            details.add_precondition_failure_violation("RING", names[0], error.to_string());
            (Code::FailedPrecondition, error.to_string(), details)
        }
        EngineError::DeadLetterGroup { queue, group, .. } => {
            let info = [("queue", queue.to_string()), ("group", group.to_string())];
            let mut details = error_info("DIFFERENT_GROUP", info);
            details.add_precondition_failure_violation("GROUP", group.as_str(), error.to_string());
            (Code::FailedPrecondition, error.to_string(), details)
        }
        EngineError::QueueFull { queue, max_depth } => {
            let info = [("queue", queue.to_string()), ("max_depth", max_depth.to_string())];
            let mut details = error_info("QUEUE_FULL", info);
            details
                .add_quota_failure_violation(queue.as_str(), error.to_string())
                .set_retry_info(Some(RETRY_AFTER));
            let next = "push again when consumers have caught up, or raise its max_depth";
            (Code::ResourceExhausted, format!("{error}: {next}"), details)
        }
        EngineError::Conflict(queue) => {
            let mut details = of_queue("CONFLICT", queue);
            details.set_retry_info(Some(RETRY_RACE));
            (Code::Aborted, format!("{error}: nothing was changed, try again"), details)
        }
        EngineError::ShuttingDown => {
            let mut details = error_info("SHUTTING_DOWN", []);
            details.set_retry_info(Some(RETRY_AFTER));
            let next = "connect to another one, or to this one again in a moment";
            (Code::Unavailable, format!("{error}: {next}"), details)
        }
        EngineError::StreamTooOld => {
            let mut details = error_info("STREAM_TOO_OLD", []);
            details.set_retry_info(Some(Duration::ZERO));
            let next = "open another one at once, to any broker";
            (Code::Unavailable, format!("{error}: {next}"), details)
        }
        EngineError::Store(error) => return store(error),
    };
    Status::with_error_details(code, message, details)
}

/// Converts an error of the store. What the driver said goes to the log only, because it may name hosts and users.
fn store(error: &StoreError) -> Status {
    let (code, message, details) = match error {
        StoreError::Unavailable { .. } => {
            tracing::debug!(%error, "answered UNAVAILABLE");
            let mut details = error_info("STORE_UNAVAILABLE", []);
            details.set_retry_info(Some(RETRY_AFTER));
            let message = "the store cannot be reached: the outcome is unknown; try again, \
                           which is safe for settles and for pushes with a dedup_id";
            (Code::Unavailable, message.to_owned(), details)
        }
        StoreError::Full { .. } => {
            tracing::debug!(%error, "answered RESOURCE_EXHAUSTED");
            let mut details = error_info("STORE_FULL", []);
            details.set_retry_info(Some(RETRY_AFTER));
            let message = "the store is full: nothing was stored; items can be taken and settled";
            (Code::ResourceExhausted, message.to_owned(), details)
        }
        StoreError::Damaged { .. } => {
            tracing::error!(%error, "answered DATA_LOSS");
            let message = "what is stored is damaged: the broker's log says more";
            (Code::DataLoss, message.to_owned(), error_info("DAMAGED", []))
        }
        StoreError::Unsupported(why) => {
            let mut details = error_info("UNSUPPORTED_BY_STORE", []);
            details.add_precondition_failure_violation("STORE", "store", why.clone());
            (Code::FailedPrecondition, why.clone(), details)
        }
        StoreError::BadCursor => return bad_field(&Invalid::new("page_token", error.to_string())),
        StoreError::Internal { .. } => {
            tracing::error!(%error, "answered INTERNAL");
            let message = "the store failed: the broker's log says more";
            (Code::Internal, message.to_owned(), error_info("INTERNAL", []))
        }
    };
    Status::with_error_details(code, message, details)
}

fn bad_field(invalid: &Invalid) -> Status {
    let mut details = error_info("INVALID_FIELD", [("field", invalid.field.clone())]);
    details.add_bad_request_violation(&invalid.field, &invalid.description);
    Status::with_error_details(Code::InvalidArgument, invalid.to_string(), details)
}

/// Converts a status that tonic made: adds our details, and changes the code where the API promises another one.
fn transport(status: &Status) -> Status {
    if status.check_error_details().is_ok_and(|details| details.error_info().is_some()) {
        return status.clone();
    }
    let (code, reason) = match status.code() {
        // The message is over the receive limit; nothing else leads to OUT_OF_RANGE.
        Code::OutOfRange | Code::ResourceExhausted => {
            (Code::ResourceExhausted, "REQUEST_TOO_LARGE")
        }
        Code::Unimplemented => (Code::Unimplemented, "UNIMPLEMENTED"),
        Code::NotFound => (Code::NotFound, "SERVICE_NOT_FOUND"),
        // Tonic's code when the bytes are no message of the expected type.
        Code::Internal => (Code::InvalidArgument, "MALFORMED_MESSAGE"),
        code => (code, "TRANSPORT"),
    };
    let message = match reason {
        "UNIMPLEMENTED" if status.message().is_empty() => "this broker has no such method",
        _ => status.message(),
    };
    Status::with_error_details(code, message, error_info(reason, []))
}

fn error_info<const N: usize>(reason: &str, metadata: [(&str, String); N]) -> ErrorDetails {
    let metadata: HashMap<String, String> =
        metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    ErrorDetails::with_error_info(reason, DOMAIN, metadata)
}

fn of_queue(reason: &str, name: &QueueName) -> ErrorDetails {
    error_info(reason, [("queue", name.to_string())])
}

fn about(mut details: ErrorDetails, kind: &str, name: &str) -> ErrorDetails {
    details.set_resource_info(format!("sluicegate.v1.{kind}"), name, "", "");
    details
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{GroupName, ItemState, ScheduleName};

    fn queue() -> QueueName {
        QueueName::parse("queue", "orders").unwrap()
    }

    fn group(name: &str) -> GroupName {
        GroupName::parse("group", name).unwrap()
    }

    fn schedule() -> ScheduleName {
        ScheduleName::parse("name", "nightly").unwrap()
    }

    fn unavailable() -> StoreError {
        StoreError::Unavailable { reason: "mongodb://user:secret@db".into(), source: None }
    }

    fn internal() -> StoreError {
        StoreError::Internal { reason: "at secret".into(), source: None }
    }

    /// Returns every variant, with the code and reason that clients may rely on.
    fn all() -> Vec<(ApiError, Code, &'static str)> {
        let engine = |error: EngineError, code, reason| (ApiError::Engine(error), code, reason);
        vec![
            engine(Invalid::new("wait", "bad").into(), Code::InvalidArgument, "INVALID_FIELD"),
            engine(EngineError::QueueNotFound(queue()), Code::NotFound, "QUEUE_NOT_FOUND"),
            engine(
                EngineError::ItemNotFound { queue: queue(), id: "ab".into() },
                Code::NotFound,
                "ITEM_NOT_FOUND",
            ),
            engine(
                EngineError::ItemInOtherState {
                    queue: queue(),
                    id: "ab".into(),
                    state: ItemState::Reserved,
                },
                Code::FailedPrecondition,
                "ITEM_IN_OTHER_STATE",
            ),
            engine(EngineError::ScheduleNotFound(schedule()), Code::NotFound, "SCHEDULE_NOT_FOUND"),
            engine(EngineError::QueueExists(queue()), Code::AlreadyExists, "QUEUE_EXISTS"),
            engine(EngineError::ScheduleExists(schedule()), Code::AlreadyExists, "SCHEDULE_EXISTS"),
            engine(
                EngineError::DifferentGroup { from: group("a"), to: group("b") },
                Code::FailedPrecondition,
                "DIFFERENT_GROUP",
            ),
            engine(
                EngineError::QueueNotEmpty { queue: queue(), items: 3 },
                Code::FailedPrecondition,
                "QUEUE_NOT_EMPTY",
            ),
            engine(
                EngineError::DeadLetterQueueInUse { queue: queue(), sources: vec![queue()] },
                Code::FailedPrecondition,
                "DEAD_LETTER_QUEUE_IN_USE",
            ),
            engine(
                EngineError::DeadLetterRing(vec![queue()]),
                Code::FailedPrecondition,
                "DEAD_LETTER_RING",
            ),
            engine(
                EngineError::DeadLetterGroup {
                    queue: queue(),
                    group: group("a"),
                    from: queue(),
                    from_group: group("b"),
                },
                Code::FailedPrecondition,
                "DIFFERENT_GROUP",
            ),
            engine(
                EngineError::QueueFull { queue: queue(), max_depth: 9 },
                Code::ResourceExhausted,
                "QUEUE_FULL",
            ),
            engine(EngineError::QueueDeleted(queue()), Code::NotFound, "QUEUE_DELETED"),
            engine(EngineError::Conflict(queue()), Code::Aborted, "CONFLICT"),
            engine(EngineError::ShuttingDown, Code::Unavailable, "SHUTTING_DOWN"),
            engine(EngineError::StreamTooOld, Code::Unavailable, "STREAM_TOO_OLD"),
            engine(unavailable().into(), Code::Unavailable, "STORE_UNAVAILABLE"),
            engine(
                StoreError::Unsupported("start it as a replica set".into()).into(),
                Code::FailedPrecondition,
                "UNSUPPORTED_BY_STORE",
            ),
            engine(
                StoreError::Full { reason: "disk".into() }.into(),
                Code::ResourceExhausted,
                "STORE_FULL",
            ),
            engine(
                StoreError::Damaged { reason: "checksum".into(), source: None }.into(),
                Code::DataLoss,
                "DAMAGED",
            ),
            engine(StoreError::BadCursor.into(), Code::InvalidArgument, "INVALID_FIELD"),
            engine(internal().into(), Code::Internal, "INTERNAL"),
            (
                ApiError::PayloadTooLarge { field: "items[0].payload".into(), bytes: 9, limit: 8 },
                Code::ResourceExhausted,
                "PAYLOAD_TOO_LARGE",
            ),
            (ApiError::Unauthenticated { given: false }, Code::Unauthenticated, "TOKEN_MISSING"),
            (ApiError::Unauthenticated { given: true }, Code::Unauthenticated, "TOKEN_UNKNOWN"),
            (
                ApiError::PermissionDenied { role: "admin", method: "/a/B".into() },
                Code::PermissionDenied,
                "ROLE_MISSING",
            ),
            (
                ApiError::Transport(Status::out_of_range("too large")),
                Code::ResourceExhausted,
                "REQUEST_TOO_LARGE",
            ),
            (
                ApiError::Transport(Status::resource_exhausted("unpacked too large")),
                Code::ResourceExhausted,
                "REQUEST_TOO_LARGE",
            ),
            (
                ApiError::Transport(Status::internal("failed to decode")),
                Code::InvalidArgument,
                "MALFORMED_MESSAGE",
            ),
            (ApiError::Transport(Status::unimplemented("")), Code::Unimplemented, "UNIMPLEMENTED"),
            (
                ApiError::Transport(Status::not_found("service not registered")),
                Code::NotFound,
                "SERVICE_NOT_FOUND",
            ),
            (ApiError::Transport(Status::cancelled("gone")), Code::Cancelled, "TRANSPORT"),
            (ApiError::AnswersNotRead, Code::DeadlineExceeded, "ANSWERS_NOT_READ"),
            (ApiError::TaskDied, Code::Internal, "INTERNAL"),
        ]
    }

    #[test]
    fn every_error_has_its_code_and_a_stable_reason() {
        for (error, code, reason) in all() {
            let status = status(&error);
            let details = status.get_error_details();
            let info = details.error_info().unwrap();
            assert_eq!((status.code(), info.reason.as_str()), (code, reason), "{error:?}");
            assert_eq!(info.domain, DOMAIN);
            assert!(!status.message().is_empty(), "{error:?}");
            let embedded = embedded(&status);
            assert_eq!((embedded.code, embedded.message.as_str()), (code as i32, status.message()));
            assert!(
                embedded.details.iter().any(|any| any.type_url.ends_with("google.rpc.ErrorInfo"))
            );
            // A status that passes through the conversion again stays the same.
            let again = super::status(&ApiError::Transport(status.clone()));
            assert_eq!((again.code(), again.details()), (status.code(), status.details()));
        }
    }

    #[test]
    fn details_match_the_documentation_of_the_code() {
        for (error, code, reason) in all() {
            let details = status(&error).get_error_details();
            assert_eq!(
                details.retry_info().is_some(),
                matches!(code, Code::Unavailable | Code::Aborted)
                    || matches!(reason, "QUEUE_FULL" | "STORE_FULL"),
                "{error:?}"
            );
            assert_eq!(
                details.resource_info().is_some(),
                matches!(code, Code::NotFound | Code::AlreadyExists)
                    && reason != "SERVICE_NOT_FOUND",
                "{error:?}"
            );
            assert_eq!(
                details.precondition_failure().is_some(),
                code == Code::FailedPrecondition,
                "{error:?}"
            );
            assert_eq!(
                details.bad_request().is_some(),
                matches!(reason, "INVALID_FIELD" | "PAYLOAD_TOO_LARGE"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_field_and_the_queue_are_named() {
        let details =
            Status::from(Invalid::new("items[3].priority", "too high")).get_error_details();
        let violations = &details.bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "items[3].priority");
        assert_eq!(violations[0].description, "too high");

        let details = Status::from(EngineError::QueueNotFound(queue())).get_error_details();
        assert_eq!(details.error_info().unwrap().metadata["queue"], "orders");
        let resource = details.resource_info().unwrap();
        assert_eq!(
            (&*resource.resource_type, &*resource.resource_name),
            ("sluicegate.v1.Queue", "orders")
        );

        let details = Status::from(EngineError::from(StoreError::BadCursor)).get_error_details();
        assert_eq!(details.bad_request().unwrap().field_violations[0].field, "page_token");
    }

    #[test]
    fn the_drivers_message_is_not_sent_to_clients() {
        for error in [unavailable(), internal()] {
            let status = Status::from(EngineError::from(error));
            assert!(!format!("{status:?}").contains("secret"), "{status:?}");
        }
    }
}
