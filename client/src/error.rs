//! The one error type of this crate, with the broker's details kept.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::proto::{ErrorReason, PushResult};

/// What calls of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address is not a URL of the form `http://host:port` or `https://host:port`.
    #[error("broker address {url:?} is not valid")]
    InvalidAddress {
        /// The address as given.
        url: String,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The bearer token holds characters that cannot be sent.
    #[error("the bearer token holds characters that cannot be sent")]
    InvalidToken,
    /// No broker answered at any of the addresses.
    #[error("no broker reachable at {addresses}")]
    Unreachable {
        /// The addresses tried, separated by commas.
        addresses: String,
        /// Why the last one failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The broker, or the connection to it, refused or broke a call.
    #[error("{}", describe(.0))]
    Status(#[source] Box<Status>),
    /// The connection broke before the answer came, and repeating the call could do the work twice:
    /// the items may be stored or not. Give items a `dedup_id` to have such calls repeated safely.
    /// Also if the broker refused a call that was repeated, or ended the stream on which the items were sent: they may have been
    /// stored before. And if the broker, or a proxy before it, says `INTERNAL` or `UNKNOWN`: it cannot tell either.
    #[error("outcome unknown: {}", describe(.0))]
    OutcomeUnknown(#[source] Box<Status>),
    /// Some of the calls a large push was split into succeeded before one failed.
    #[error("pushed {} items, then failed: {source}", results.len())]
    PartlyPushed {
        /// Results of the items that were stored: the first ones, in order.
        results: Vec<PushResult>,
        /// Why the next call failed.
        #[source]
        source: Box<Error>,
    },
    /// The push stream was closed.
    #[error("the push stream is closed")]
    Closed,
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl Error {
    /// Returns the error of a push that is not repeated any more. `is_unknown`: an earlier try may have stored its items.
    pub(crate) fn refused(status: Status, is_unknown: bool) -> Self {
        let status = Box::new(status);
        if is_unknown { Self::OutcomeUnknown(status) } else { Self::Status(status) }
    }

    /// Returns the gRPC status that caused the error, if there is one.
    pub fn status(&self) -> Option<&Status> {
        match self {
            Self::Status(status) | Self::OutcomeUnknown(status) => Some(status),
            Self::PartlyPushed { source, .. } => source.status(),
            _ => None,
        }
    }

    /// Returns the code of the gRPC status that caused the error, if there is one.
    pub fn code(&self) -> Option<Code> {
        self.status().map(Status::code)
    }

    /// Returns the broker's stable reason (`QUEUE_NOT_FOUND`, …), if the broker gave one.
    pub fn reason(&self) -> Option<String> {
        let details = self.status()?.get_error_details();
        details.error_info().map(|info| info.reason.clone())
    }

    /// Returns the broker's reason as a value of the enum; `None` if the broker gave none, or one that this version does not
    /// know.
    pub fn error_reason(&self) -> Option<ErrorReason> {
        ErrorReason::from_reason(&self.reason()?)
    }

    /// Returns the fields of the request that were wrong: pairs of field and description.
    pub fn field_violations(&self) -> Vec<(String, String)> {
        self.status().map(field_violations).unwrap_or_default()
    }

    /// Returns how long the broker asks to wait before the next try.
    pub fn retry_delay(&self) -> Option<Duration> {
        self.status().and_then(retry_delay)
    }

    /// Returns true if no broker could be reached, or the broker is shutting down or cannot reach its store.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unreachable { .. }) || self.status().is_some_and(is_transient)
    }

    /// Returns true if the queue, item or schedule does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(Code::NotFound)
    }
}

/// Returns the delay that the broker asks for by `RetryInfo`.
pub(crate) fn retry_delay(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

/// Returns true if the broker ended a stream only because of its age, so that load spreads over brokers.
pub(crate) fn is_too_old(status: &Status) -> bool {
    status.get_details_error_info().is_some_and(|info| info.reason == "STREAM_TOO_OLD")
}

/// Returns true if another try, perhaps at another broker, may help. Whether the call took effect is then unknown.
pub(crate) fn is_transient(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Aborted => true,
        // Made by this process from a broken connection, not sent by a broker.
        Code::Unknown | Code::Internal => std::error::Error::source(status).is_some(),
        _ => false,
    }
}

fn field_violations(status: &Status) -> Vec<(String, String)> {
    let Some(bad) = status.get_details_bad_request() else {
        return Vec::new();
    };
    bad.field_violations.into_iter().map(|v| (v.field, v.description)).collect()
}

/// Returns the broker's message, with the fields that were wrong unless the message names them already.
fn describe(status: &Status) -> String {
    let mut text = if status.message().is_empty() {
        status.code().description().to_lowercase()
    } else {
        status.message().to_owned()
    };
    for (field, description) in field_violations(status) {
        if !text.contains(&field) || !text.contains(&description) {
            text.push_str("; ");
            text.push_str(&field);
            text.push_str(": ");
            text.push_str(&description);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn details_of_the_status_are_kept() {
        let mut details = ErrorDetails::new();
        details.set_error_info("QUEUE_FULL", "sluicegate", [("k".to_owned(), "v".to_owned())]);
        details.add_bad_request_violation("queue", "must not be empty");
        details.set_retry_info(Some(Duration::from_millis(250)));
        let status = Status::with_error_details(Code::InvalidArgument, "bad request", details);
        let error = Error::from(status);
        assert_eq!(error.reason().as_deref(), Some("QUEUE_FULL"));
        assert_eq!(error.error_reason(), Some(ErrorReason::QueueFull));
        assert_eq!(error.retry_delay(), Some(Duration::from_millis(250)));
        assert_eq!(error.to_string(), "bad request; queue: must not be empty");
        assert!(!error.is_unavailable());
    }

    #[test]
    fn only_temporary_failures_are_transient() {
        assert!(is_transient(&Status::unavailable("")));
        assert!(!is_transient(&Status::internal("a bug in the broker")));
        assert!(!is_transient(&Status::resource_exhausted("queue is full")));
    }
}
