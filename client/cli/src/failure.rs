//! How commands fail: exit codes, and what to do next.

use std::{io, path::PathBuf, process::ExitCode};

use sluicegate_client::{
    Error,
    tonic::{Code, Status},
};

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Client(#[from] Error),
    #[error("{0}")]
    Usage(String),
    /// No item for pop, reserve or consume; said by the exit code alone.
    #[error("nothing there")]
    Nothing,
    /// Some settles did not have the effect asked for; each is told on its own line.
    #[error("not every receipt was good")]
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
    /// Tells what went wrong on stderr and answers the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        // Whoever reads the output has seen enough, for example `head`.
        if let Self::Io(error) = self
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            return ExitCode::SUCCESS;
        }
        if !matches!(self, Self::Nothing) {
            // Nothing can be done if stderr is gone.
            let _ = self.tell(&mut io::stderr().lock());
        }
        ExitCode::from(self.code())
    }

    fn tell(&self, stderr: &mut impl io::Write) -> io::Result<()> {
        writeln!(stderr, "sluice: {}", self.with_causes())?;
        if let Some(hint) = self.hint() {
            writeln!(stderr, "  {hint}")?;
        }
        Ok(())
    }

    /// The message with its causes, as far as they say something new: why TLS failed is at the end of them.
    fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let inner = error.to_string();
            // A status as text repeats what was said already, with its details in the form of code.
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

    /// What to do next.
    fn hint(&self) -> Option<&'static str> {
        let Self::Client(error) = self else {
            return match self {
                Self::Usage(_) => Some("`sluice help` tells more"),
                Self::NotSettled => Some(
                    "the items were handed out anew, or are gone; nothing was changed for them",
                ),
                _ => None,
            };
        };
        match error {
            Error::Unreachable { .. } => Some(
                "is the broker running? start one with `sluicegate`, or name another with --server or SLUICE_SERVER",
            ),
            Error::OutcomeUnknown(_) => Some(
                "the items may be stored or not; `sluice peek QUEUE` shows, and push --retry repeats such pushes safely",
            ),
            Error::InvalidToken => Some("check --token or SLUICE_TOKEN"),
            _ => match error.code()? {
                Code::NotFound => Some(
                    "`sluice queues`, `sluice peek QUEUE` and `sluice schedule list` show what is there",
                ),
                Code::AlreadyExists => {
                    Some("look at it with `get`; `sluice queue update` changes a queue's settings")
                }
                Code::Unauthenticated => Some("give a token with --token or SLUICE_TOKEN"),
                Code::PermissionDenied => Some("use a token that is allowed to do this"),
                Code::ResourceExhausted => Some(
                    "push less at a time, or raise the queue's --max-depth or the broker's limits",
                ),
                Code::Unavailable => {
                    Some("the broker or its store is away for the moment; try again")
                }
                Code::DeadlineExceeded | Code::Cancelled => {
                    Some("it took too long; raise --timeout")
                }
                Code::Unimplemented => Some("the broker is of another version than this tool"),
                _ => None,
            },
        }
    }
}
