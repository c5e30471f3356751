//! How commands fail: exit codes, and what to do next.

use std::{io, path::PathBuf, process::ExitCode};

use sluicegate_client::{
    Error,
    tonic::{Code, Status},
};

use crate::output::harmless;

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Client(#[from] Error),
    #[error("{0}")]
    Usage(String),
    /// There is no item for pop, reserve or consume. Only the exit code says so.
    #[error("no item")]
    Nothing,
    /// Some settles had no effect; the output says which.
    #[error("not every receipt was valid")]
    NotSettled,
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Client(status.into())
    }
}

impl Failure {
    /// Prints what went wrong on stderr and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        // The reader of the output has closed the pipe, as `head` does.
        if let Self::Io(error) = self
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            return ExitCode::SUCCESS;
        }
        if !matches!(self, Self::Nothing) {
            // If stderr is gone, there is nowhere left to report to.
            let _ = self.print(&mut io::stderr().lock());
        }
        ExitCode::from(self.code())
    }

    fn print(&self, stderr: &mut impl io::Write) -> io::Result<()> {
        writeln!(stderr, "sluice: {}", harmless(&self.with_causes(), true))?;
        if let Some(hint) = self.hint() {
            writeln!(stderr, "  {hint}")?;
        }
        Ok(())
    }

    /// Returns the message with those causes that add to it: why TLS failed, for example, is the last of them.
    fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let inner = error.to_string();
            // A status as text repeats the message and adds its details in a form for debugging.
            if !text.contains(&inner) && !error.is::<Status>() {
                text.push_str(": ");
                text.push_str(&inner);
            }
            cause = error.source();
        }
        text
    }

    fn code(&self) -> u8 {
        match self {
            Self::Client(error) if error.is_not_found() => 4,
            Self::Client(Error::Unreachable { .. }) => 5,
            Self::Client(error) if error.code() == Some(Code::Unavailable) => 5,
            Self::Client(_) | Self::File { .. } | Self::Io(_) | Self::NotSettled => 1,
            Self::Usage(_) => 2,
            Self::Nothing => 3,
        }
    }

    /// Returns what to do next.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Client(error) => hint_of(error),
            Self::Usage(_) => Some("see `sluice help`"),
            Self::NotSettled => {
                Some("those items were delivered again or are gone; nothing was changed for them")
            }
            Self::Nothing | Self::File { .. } | Self::Io(_) => None,
        }
    }
}

/// Returns what to do after a call failed: the broker's reason says more than the code of the status.
fn hint_of(error: &Error) -> Option<&'static str> {
    match error {
        Error::Unreachable { .. } => {
            return Some(
                "is the broker running? start one with `sluicegate`, or name another with --server or SLUICE_SERVER",
            );
        }
        Error::OutcomeUnknown(_) => {
            return Some(
                "the items may be stored or not: see `sluice peek QUEUE`; push --retry repeats such pushes safely",
            );
        }
        Error::InvalidToken => return Some("check --token or SLUICE_TOKEN"),
        _ => {}
    }
    let code = error.code()?;
    hint_of_reason(error.reason().as_deref()).or(match code {
        Code::NotFound => {
            Some("`sluice queues`, `sluice peek QUEUE` and `sluice schedule list` show what exists")
        }
        Code::AlreadyExists => {
            Some("show it with `get`; `sluice queue update` changes a queue's settings")
        }
        Code::Unauthenticated => Some("give a token with --token-file, --token or SLUICE_TOKEN"),
        Code::PermissionDenied => Some("use a token with the permission that is missing"),
        Code::Unavailable => {
            Some("the broker or its store is unavailable at the moment; try again")
        }
        Code::DeadlineExceeded | Code::Cancelled => Some("the call took too long; raise --timeout"),
        Code::Unimplemented => Some("the broker is of another version than this tool"),
        _ => None,
    })
}

/// Returns what to do about a reason of the broker, where one code has reasons that call for different things.
fn hint_of_reason(reason: Option<&str>) -> Option<&'static str> {
    match reason? {
        "QUEUE_FULL" => Some("wait for consumers, or raise the queue's --max-depth"),
        "STORE_FULL" => Some(
            "free disk space where the broker keeps its store; settles still go through and free some",
        ),
        "PAYLOAD_TOO_LARGE" => {
            Some("push a smaller payload, or raise the broker's max_payload_bytes")
        }
        "REQUEST_TOO_LARGE" => Some("send fewer items at a time, for example with a lower --batch"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    /// Issue 10: a full disk was answered with advice about the depth of queues.
    #[test]
    fn the_hint_follows_the_reason_of_the_broker() {
        let hint = |reason: &str| {
            let details = ErrorDetails::with_error_info(reason, "sluicegate", []);
            let status = Status::with_error_details(Code::ResourceExhausted, "full", details);
            Failure::from(status).hint()
        };
        assert!(hint("QUEUE_FULL").unwrap().contains("--max-depth"));
        let disk = hint("STORE_FULL").unwrap();
        assert!(disk.contains("disk") && !disk.contains("max-depth"), "{disk}");
        assert!(hint("PAYLOAD_TOO_LARGE").unwrap().contains("max_payload_bytes"));
        assert!(hint("REQUEST_TOO_LARGE").unwrap().contains("fewer"));
        assert_eq!(hint("SOMETHING_NEW"), None);
    }
}
