//! How commands fail: exit codes, and what to do next.

use std::{io, path::PathBuf, process::ExitCode};

use serde_json::{Value, json};
use sluicegate_client::{
    Error,
    tonic::{Code, Status},
};

use crate::{
    output::{harmless, line},
    protocol::Protocol,
};

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Client(#[from] Error),
    /// A call was given up that may have taken effect.
    #[error("outcome unknown: {source}")]
    Unknown {
        /// Why the last try failed.
        source: Error,
        /// What to do: the same command could do its work twice.
        instead: &'static str,
    },
    #[error("{0}")]
    Usage(String),
    /// There is no item for pop, reserve or consume. Only the exit code says so.
    #[error("no item")]
    Nothing,
    /// Some settles had no effect; the output says which.
    #[error("not every receipt was valid")]
    NotSettled,
    /// There is no terminal for the question that the command has to ask.
    #[error("`sluice {0}` asks before it goes on, and there is no terminal to ask on")]
    Unconfirmed(&'static str),
    /// The question was answered with no.
    #[error("nothing was changed")]
    Declined,
    /// Queues that a file does not name hold items.
    #[error("queues that hold items were not deleted: {0}")]
    NotPruned(usize),
    /// What is at the address of the broker is no broker.
    #[error("{url} speaks {}, but gRPC {}", in_words(*.spoken), expected(.url))]
    NotGrpc { url: String, spoken: Protocol },
    /// What is at the address of the broker serves pages.
    #[error("{0} answers as a web server does, not as a broker")]
    WebServer(String),
    /// An operation did not do all of its work.
    #[error("{0}")]
    Operation(String),
    /// `sluice doctor` has found something, which its output says.
    #[error("something is wrong")]
    Unwell,
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
    /// Prints what went wrong on stderr, as JSON if `json`, and returns the exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        // The reader of the output has closed the pipe, as `head` does.
        if let Self::Io(error) = self
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            return ExitCode::SUCCESS;
        }
        if !matches!(self, Self::Nothing | Self::Unwell) {
            let mut stderr = io::stderr().lock();
            let printed = if json {
                io::Write::write_all(&mut stderr, format!("{}\n", line(&self.json())).as_bytes())
            } else {
                self.print(&mut stderr)
            };
            // If stderr is gone, there is nowhere left to report to.
            let _ = printed;
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

    fn json(&self) -> Value {
        let reason = match self {
            Self::Client(error) | Self::Unknown { source: error, .. } => error.reason(),
            _ => None,
        };
        error_json(&self.code_name(), reason.as_deref(), &self.with_causes(), self.hint())
    }

    /// Returns the gRPC code by name, or a name of the same form for what did not come from a broker.
    fn code_name(&self) -> String {
        let name = match self {
            Self::Client(error) | Self::Unknown { source: error, .. } => match error.code() {
                Some(code) => return name_of(code),
                None if matches!(error, Error::Unreachable { .. }) => "UNREACHABLE",
                None => "CLIENT",
            },
            Self::Usage(_) => "USAGE",
            Self::Nothing => "NO_ITEM",
            Self::NotSettled => "NOT_SETTLED",
            Self::Unconfirmed(_) => "UNCONFIRMED",
            Self::Declined => "DECLINED",
            Self::NotPruned(_) => "NOT_PRUNED",
            Self::Operation(_) => "OPERATION",
            Self::NotGrpc { .. } | Self::WebServer(_) => "NOT_GRPC",
            Self::Unwell => "UNWELL",
            Self::File { .. } => "FILE",
            Self::Io(_) => "IO",
        };
        name.to_owned()
    }

    /// Returns true if the connection failed rather than the call: what is at the address may be no broker.
    pub(crate) fn is_of_connection(&self) -> bool {
        match self {
            Self::Client(Error::Unreachable { .. }) => true,
            // Made by this process from a broken connection, not sent by a broker.
            Self::Client(error) => {
                error.status().is_some_and(|status| std::error::Error::source(status).is_some())
            }
            _ => false,
        }
    }

    /// Returns true if the answer is one of HTTP and not of gRPC. Only the text of the status says so.
    pub(crate) fn is_of_web_server(&self) -> bool {
        let Self::Client(error) = self else { return false };
        error.status().is_some_and(|status| {
            let message = status.message();
            message.contains("receiving response with status")
                || message.contains("mapped from HTTP status")
        })
    }

    /// Returns the message with those causes that add to it: why TLS failed, for example, is the last of them.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let inner = error.to_string();
            // A status as text repeats the message and adds its details in a form for debugging.
            let is_status = error.is::<Status>() || error.is::<Box<Status>>();
            if !text.contains(&inner) && !is_status {
                text.push_str(": ");
                text.push_str(&inner);
            }
            cause = error.source();
        }
        with_commands(&text)
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Client(error) if error.is_not_found() => 4,
            Self::Client(Error::Unreachable { .. }) | Self::NotGrpc { .. } | Self::WebServer(_) => {
                5
            }
            Self::Client(error) | Self::Unknown { source: error, .. }
                if error.code() == Some(Code::Unavailable) =>
            {
                5
            }
            Self::Client(_)
            | Self::Unknown { .. }
            | Self::File { .. }
            | Self::Io(_)
            | Self::NotSettled
            | Self::Declined
            | Self::NotPruned(_)
            | Self::Operation(_)
            | Self::Unwell => 1,
            Self::Usage(_) | Self::Unconfirmed(_) => 2,
            Self::Nothing => 3,
        }
    }

    /// Returns what to do next.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Client(error) => hint_of(error),
            Self::Unknown { instead, .. } => Some(instead),
            Self::Usage(_) => Some("see `sluice help`"),
            Self::NotSettled => {
                Some("those items were delivered again or are gone; nothing was changed for them")
            }
            Self::Unconfirmed(_) => Some("give it --yes if it is meant"),
            Self::NotGrpc { spoken: Protocol::Http1, .. } | Self::WebServer(_) => Some(
                "that is the port of the console and of metrics, or of a proxy without HTTP/2; gRPC is at the broker's \
                 `listen` address, by default port 7400",
            ),
            Self::NotGrpc { spoken: Protocol::Tls, .. } => {
                Some("write https:// in place of http://, and name its authorities with --ca")
            }
            Self::NotGrpc { spoken: Protocol::Http2, .. } => {
                Some("write http:// in place of https://, or turn TLS on at the broker")
            }
            Self::NotPruned(_) => Some("consume them first, or delete such a queue with --force"),
            Self::Operation(_) => {
                Some("what is done stays done, and the same command goes on with the rest")
            }
            Self::Declined | Self::Unwell | Self::Nothing | Self::File { .. } | Self::Io(_) => None,
        }
    }
}

fn in_words(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Http1 => "HTTP/1 only",
        Protocol::Http2 => "HTTP/2 without TLS",
        Protocol::Tls => "TLS",
    }
}

fn expected(url: &str) -> &'static str {
    if url.starts_with("https://") {
        "at https:// needs TLS and HTTP/2"
    } else {
        "at http:// needs HTTP/2 without TLS"
    }
}

/// The form of all errors with --json.
pub(crate) fn error_json(
    code: &str,
    reason: Option<&str>,
    message: &str,
    hint: Option<&str>,
) -> Value {
    json!({ "error": { "code": code, "reason": reason, "message": message, "hint": hint } })
}

/// Returns the name of a code as the specification of gRPC writes it: `NOT_FOUND`.
fn name_of(code: Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_uppercase());
    }
    name
}

/// What the calls that messages of brokers name are on this command line.
const COMMANDS: &[(&str, &str)] = &[
    ("CreateQueue", "queue create"),
    ("UpdateQueue", "queue update"),
    ("DeleteQueue", "queue delete"),
    ("PauseQueue", "queue pause"),
    ("ResumeQueue", "queue resume"),
    ("PurgeQueue", "queue purge"),
    ("ListQueues", "queues"),
    ("GetQueueStats", "stats"),
    ("ListItems", "peek"),
    ("GetItem", "item get"),
    ("DeleteItem", "item delete"),
    ("RedriveItems", "redrive"),
    ("ReplayItems", "replay"),
    ("ListBrokers", "brokers"),
    ("ListConsumers", "consumers"),
    ("CreateSchedule", "schedule create"),
    ("UpdateSchedule", "schedule update"),
    ("DeleteSchedule", "schedule delete"),
    ("PauseSchedule", "schedule pause"),
    ("ResumeSchedule", "schedule resume"),
    ("TriggerSchedule", "schedule run"),
    ("CreateTemplate", "template set"),
    ("UpdateTemplate", "template set"),
    ("DeleteTemplate", "template delete"),
    ("CommitAndPush", "fork"),
];

/// Returns the text with commands in place of the calls that it names. A name within a longer word stays: queues may have any name.
fn with_commands(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let name = word.trim_matches(|c: char| !c.is_alphanumeric());
        let command = COMMANDS.iter().find(|(call, _)| *call == name);
        words.push(match command {
            // Not within quotation marks, where names of users are.
            Some((call, command)) if word.trim_end_matches([',', ';', '.', ':']) == *call => {
                word.replacen(call, &format!("`sluice {command}`"), 1)
            }
            _ => word.to_owned(),
        });
    }
    words.join(" ")
}

/// Returns what to do after a call failed: the broker's reason says more than the code of the status.
fn hint_of(error: &Error) -> Option<&'static str> {
    match error {
        Error::Unreachable { .. } => {
            return Some(
                "is the broker running? start one with `sluicegate`, or name another with --server, SLUICE_SERVER or a context",
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
        "TEMPLATE_NOT_FOUND" => Some("`sluice template list` shows what exists"),
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

    #[test]
    fn messages_name_commands_in_place_of_calls() {
        let message = "queue orders does not exist; create it with CreateQueue, or push to it";
        let shown = Failure::from(Status::not_found(message)).with_causes();
        assert_eq!(
            shown,
            "queue orders does not exist; create it with `sluice queue create`, or push to it"
        );
        let named = "queue MyCreateQueue and \"CreateQueue\" exist";
        assert_eq!(Failure::from(Status::not_found(named)).with_causes(), named);
    }

    #[test]
    fn json_has_code_reason_message_and_hint() {
        let details = ErrorDetails::with_error_info("QUEUE_FULL", "sluicegate", []);
        let status = Status::with_error_details(Code::ResourceExhausted, "full", details);
        let value = Failure::from(status).json();
        assert_eq!(value["error"]["code"], "RESOURCE_EXHAUSTED");
        assert_eq!(value["error"]["reason"], "QUEUE_FULL");
        assert_eq!(value["error"]["message"], "full");
        assert!(value["error"]["hint"].as_str().unwrap().contains("--max-depth"));
        let local = Failure::Usage("say which".into()).json();
        assert_eq!(local["error"]["code"], "USAGE");
        assert_eq!(local["error"]["reason"], Value::Null);
    }
}
