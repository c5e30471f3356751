//! Errors as gRPC statuses. No other module turns an error into a status.
//!
//! Every status carries an `ErrorInfo` with a reason of the enum `ErrorReason` and the domain [`DOMAIN`]. Further details are added
//! where they help: `BadRequest` names the field, `RetryInfo` says when to try again, `ResourceInfo` says what is
//! missing, `PreconditionFailure` and `QuotaFailure` name the obstacle.

mod engine;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use prost::Message;
use sluicegate_proto::v1::ErrorReason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use self::engine::{engine, too_many};
use super::concurrency::TooMany;
use crate::{access::Refused, domain::Invalid, engine::EngineError};

/// The `domain` of every `ErrorInfo`.
pub(crate) const DOMAIN: &str = "sluicegate";

/// Everything that can go wrong between a request and its answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
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
    /// The caller is not known, or may not do this.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Too many calls are under way.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// The gRPC library refused: the message could not be read, the method is not known.
    #[error("{0}")]
    Transport(Status),
    /// The client of a push stream does not read its answers.
    #[error("the stream's answers were not read: what is not answered may be stored or not")]
    AnswersNotRead,
    /// There is no room to receive the request.
    #[error("too many large requests are being received")]
    TooManyLargeRequests,
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

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        self::refused(&refused)
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
            let mut details = error_info(ErrorReason::PayloadTooLarge, info);
            details.add_bad_request_violation(field, format!("{bytes} bytes, more than {limit}"));
            let message = format!(
                "{error}: store the content elsewhere and push a reference, or raise the broker's max_payload_bytes"
            );
            Status::with_error_details(Code::ResourceExhausted, message, details)
        }
        ApiError::Refused(refused) => self::refused(refused),
        ApiError::TooMany(error) => too_many(*error),
        ApiError::Transport(status) => transport(status),
        ApiError::AnswersNotRead => {
            let details = error_info(ErrorReason::AnswersNotRead, []);
            Status::with_error_details(Code::DeadlineExceeded, error.to_string(), details)
        }
        ApiError::TooManyLargeRequests => {
            let mut details = error_info(ErrorReason::TooManyLargeRequests, []);
            details.set_retry_info(Some(engine::RETRY_AFTER));
            let message = format!("{error}: nothing was done; try again, with fewer at a time");
            Status::with_error_details(Code::Unavailable, message, details)
        }
        ApiError::TaskDied => {
            let message = format!("{error}: this is a defect, the broker's log says more");
            Status::with_error_details(
                Code::Internal,
                message,
                error_info(ErrorReason::Internal, []),
            )
        }
    }
}

fn reason_of(refused: &Refused) -> ErrorReason {
    match refused {
        Refused::NoSuchCall => ErrorReason::Unimplemented,
        Refused::TokenMissing => ErrorReason::TokenMissing,
        Refused::TokenUnknown => ErrorReason::TokenUnknown,
        Refused::TokenExpired => ErrorReason::TokenExpired,
        Refused::PermissionMissing { .. } => ErrorReason::PermissionMissing,
    }
}

/// Converts a refusal.
fn refused(refused: &Refused) -> Status {
    let reason = reason_of(refused);
    let (code, next, details) = match refused {
        Refused::NoSuchCall => {
            let details = error_info(reason, []);
            return Status::with_error_details(Code::Unimplemented, refused.to_string(), details);
        }
        Refused::TokenMissing | Refused::TokenUnknown => {
            let next = "send the metadata 'authorization: Bearer TOKEN'";
            (Code::Unauthenticated, next.to_owned(), error_info(reason, []))
        }
        Refused::TokenExpired => {
            (Code::Unauthenticated, "use another token".to_owned(), error_info(reason, []))
        }
        Refused::PermissionMissing { action, queue, call } => {
            let permission = format!("{action}@{queue}");
            let info = [("permission", permission), ("method", (*call).to_owned())];
            let next = format!("{call} needs it: use another token");
            (Code::PermissionDenied, next, error_info(reason, info))
        }
    };
    Status::with_error_details(code, format!("{refused}: {next}"), details)
}

/// Converts a status, including its details, into a message that can be embedded in another one.
pub(crate) fn embedded(status: &Status) -> tonic_types::Status {
    // The details are themselves an encoded google.rpc.Status, of which only the list is wanted.
    let details = tonic_types::Status::decode(status.details()).unwrap_or_default().details;
    let (code, message) = (status.code().into(), status.message().to_owned());
    tonic_types::Status { code, message, details }
}

fn bad_field(invalid: &Invalid) -> Status {
    let mut details = error_info(ErrorReason::InvalidField, [("field", invalid.field.clone())]);
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
            (Code::ResourceExhausted, ErrorReason::RequestTooLarge)
        }
        Code::Unimplemented => (Code::Unimplemented, ErrorReason::Unimplemented),
        Code::NotFound => (Code::NotFound, ErrorReason::ServiceNotFound),
        // Tonic's code when the bytes are no message of the expected type.
        Code::Internal => (Code::InvalidArgument, ErrorReason::MalformedMessage),
        code => (code, ErrorReason::Transport),
    };
    let message = match reason {
        ErrorReason::Unimplemented if status.message().is_empty() => {
            "this broker has no such method"
        }
        _ => status.message(),
    };
    Status::with_error_details(code, message, error_info(reason, []))
}

fn error_info<const N: usize>(reason: ErrorReason, metadata: [(&str, String); N]) -> ErrorDetails {
    let metadata: HashMap<String, String> =
        metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    ErrorDetails::with_error_info(reason.reason(), DOMAIN, metadata)
}
