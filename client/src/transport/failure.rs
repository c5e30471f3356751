//! Calls that got no answer from a broker, and whether they may have taken effect.

use std::{error::Error, fmt::Write, sync::Arc};

use h2::Reason;
use tonic::{Code, Status};

use super::Endpoint;

/// Why a call has no answer: the source of its status.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub(super) struct Unanswered {
    /// True if no broker has begun the call, so that it can be made again without doing its work twice.
    pub(super) is_unsent: bool,
    code: Code,
    cause: String,
}

impl Unanswered {
    /// Returns the failure of a call for which no connection could be made.
    pub(super) fn before(endpoint: &Endpoint, error: &(dyn Error + 'static)) -> Self {
        let mut cause = format!("cannot connect to {endpoint}");
        let mut source: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(error) = source {
            let _ = write!(cause, ": {error}"); // writing to a string does not fail
            source = error.source();
        }
        Self { is_unsent: true, code: Code::Unavailable, cause }
    }

    /// Returns the failure of a call that was not begun, because its connection takes no more.
    pub(super) fn refused(error: &h2::Error) -> Self {
        Self { is_unsent: true, code: Code::Unavailable, cause: broken(error) }
    }

    /// Returns the failure of a call that ended with this error.
    pub(super) fn by(error: &h2::Error) -> Self {
        // The broker names the last call that it has taken, and this was a later one; or it refuses just this one.
        let is_unsent = error.is_remote()
            && (error.is_go_away() || error.reason() == Some(Reason::REFUSED_STREAM));
        let code = match error.reason() {
            Some(reason) if error.is_reset() => code_of(reason),
            _ => Code::Unavailable, // that was the end of the connection
        };
        Self { is_unsent, code, cause: broken(error) }
    }

    /// Returns the failure of a call whose answer had begun: the broker has begun the call, whatever it says now.
    pub(super) fn amid(error: &h2::Error) -> Self {
        Self { is_unsent: false, ..Self::by(error) }
    }
}

/// Returns the code of a call that was reset for this reason, as gRPC has it.
fn code_of(reason: Reason) -> Code {
    match reason {
        Reason::REFUSED_STREAM => Code::Unavailable,
        Reason::CANCEL => Code::Cancelled,
        Reason::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        Reason::INADEQUATE_SECURITY => Code::PermissionDenied,
        _ => Code::Internal,
    }
}

fn broken(error: &h2::Error) -> String {
    if error.is_go_away() && error.reason() == Some(Reason::NO_ERROR) {
        "the broker ended the connection".to_owned()
    } else if error.is_library() && error.reason() == Some(Reason::FRAME_SIZE_ERROR) {
        // What a server with TLS says to those who begin without reads like the length of a frame.
        format!(
            "what answers is no broker ({error}), or it uses TLS, and its address begins with https://"
        )
    } else {
        format!("the connection to the broker broke: {error}")
    }
}

impl From<Unanswered> for Status {
    fn from(unanswered: Unanswered) -> Self {
        let mut status = Self::new(unanswered.code, unanswered.cause.clone());
        status.set_source(Arc::new(unanswered));
        status
    }
}

/// Returns the failure of a call whose time is over.
pub(super) fn overdue() -> Status {
    Status::deadline_exceeded("the broker did not answer in time")
}

/// Returns true if the status was made in this process, of a call whose connection broke or was not made.
pub(crate) fn is_broken(status: &Status) -> bool {
    unanswered(status).is_some()
}

/// Returns true if the status was made in this process, of a call that no broker has begun.
pub(crate) fn is_unsent(status: &Status) -> bool {
    unanswered(status).is_some_and(|unanswered| unanswered.is_unsent)
}

fn unanswered(status: &Status) -> Option<&Unanswered> {
    status.source()?.downcast_ref()
}
