//! Settings: from `sluicegate.toml`, the environment and flags, in rising precedence. An unknown key or a wrong
//! value stops the start. The message names the key, where it was given, and what would be right.

mod address;
mod bounds;
mod checks;
mod keys;
mod otlp;
mod sources;
mod values;

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

#[cfg(feature = "otlp")]
pub(crate) use self::otlp::OtlpProtocol;
use self::sources::Given;
pub(crate) use self::{
    address::{SignalsUri, StoreUri},
    bounds::Bounds,
    otlp::Otlp,
};
use crate::{access::tokens::Tokens, domain::FailureDefaults, telemetry::LogFormat};

/// The file that is read if none is named.
pub(crate) const DEFAULT_FILE: &str = "sluicegate.toml";

/// A setting of earlier versions: tokens with roles.
const OLD_TOKENS: &str = "tokens";

/// Files for TLS, known to be readable when the broker started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tls {
    /// Certificate chain, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Authorities that clients' certificates must be from, PEM; `None`: no client is asked for one.
    pub client_ca: Option<PathBuf>,
    /// True if a client without a certificate is not served.
    pub certificate_required: bool,
}

/// All settings, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    /// Where gRPC is served.
    pub listen: SocketAddr,
    /// Where HTTP is served.
    pub http_listen: SocketAddr,
    /// Where items live.
    pub store: StoreUri,
    /// How brokers notify each other; depends on the store if not given.
    pub signals: SignalsUri,
    /// Name of the MongoDB database and of the signals' channel.
    pub database: String,
    /// Create queues when they are first used.
    pub auto_create_queues: bool,
    /// Largest payload of an item, 1 byte to 15 MiB.
    pub max_payload_bytes: usize,
    /// Lease if neither queue nor consumer asks for one; at most `max_lease`.
    pub default_lease: Duration,
    /// Longest lease, renewals included.
    pub max_lease: Duration,
    /// Limits and delays of queues without settings of their own.
    pub failure_defaults: FailureDefaults,
    /// How long a shutdown may take.
    pub shutdown_grace: Duration,
    /// Shortest time between fallback polls of a waiting queue.
    pub poll_min: Duration,
    /// Longest time between them; at least `poll_min`.
    pub poll_max: Duration,
    /// Threads that serve calls; 0: one for each processor.
    pub worker_threads: usize,
    /// How the log is written.
    pub log_format: LogFormat,
    /// What is logged; known to parse.
    pub log_level: String,
    /// TLS for gRPC; `None`: plain text.
    pub tls: Option<Tls>,
    /// About how old a connection gets; zero: no limit.
    pub max_connection_age: Duration,
    /// The file of tokens and certificates, and what was in it when the broker started; `None`: everyone may do everything.
    pub tokens: Option<(PathBuf, Arc<Tokens>)>,
    /// How many calls of a peer may be refused in a minute before its refusals come later and later; 0: any number.
    pub max_refusals: u32,
    /// Serve other machines without tokens.
    pub insecure: bool,
    /// How much of the broker its clients may use.
    pub bounds: Bounds,
    /// Where spans and metrics are sent; `None`: there are no spans, and metrics are on `/metrics` alone.
    pub otlp: Option<Otlp>,
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The command line is wrong, or asks for help or the version. Print this error and leave with its
    /// exit code, as [`clap::Error::exit`] does.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// The file cannot be read.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such setting.
    #[error("unknown key `{key}` in {origin}; there are: {known}")]
    UnknownKey {
        /// What was given.
        key: String,
        /// Where it was given.
        origin: String,
        /// What could be given there.
        known: String,
    },
    /// A value is wrong.
    #[error("bad value for `{key}` in {origin}: {problem}")]
    BadValue {
        /// The setting.
        key: &'static str,
        /// Where it was given.
        origin: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

/// What the command line asks for in place of a broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    /// Check the file of an SQLite store.
    Check {
        /// The file.
        file: PathBuf,
        /// Repair what can be repaired with nothing lost.
        repair: bool,
    },
    /// Ask a running broker whether it takes requests.
    Healthcheck,
    /// Make a token.
    NewToken {
        /// The name of its bearer.
        name: String,
        /// Its permissions.
        allow: Vec<String>,
        /// When it expires.
        expires: Option<String>,
        /// The file to add its entry to.
        file: Option<PathBuf>,
    },
}

/// Returns the task that the command line asks for; `None` if the broker is to run.
pub(crate) fn task() -> Result<Option<Task>, ConfigError> {
    let matches = keys::command().try_get_matches()?;
    if let Some(check) = matches.subcommand_matches("check") {
        let Some(file) = check.get_one::<PathBuf>("file") else { return Ok(None) };
        return Ok(Some(Task::Check { file: file.clone(), repair: check.get_flag("repair") }));
    }
    if matches.subcommand_matches("healthcheck").is_some() {
        return Ok(Some(Task::Healthcheck));
    }
    let new = matches.subcommand_matches("token").and_then(|token| token.subcommand_matches("new"));
    Ok(new.and_then(|new| {
        Some(Task::NewToken {
            name: new.get_one::<String>("name")?.clone(),
            allow: new.get_many::<String>("allow")?.cloned().collect(),
            expires: new.get_one::<String>("expires").cloned(),
            file: new.get_one::<PathBuf>("file").cloned(),
        })
    }))
}

impl Settings {
    /// Reads the settings of this process.
    pub(crate) fn from_process() -> Result<Self, ConfigError> {
        Self::load(std::env::args_os(), std::env::vars_os(), Path::new(DEFAULT_FILE))
    }

    /// Reads settings from a command line (the program's name first), an environment, and a file: the file
    /// that these name, or else `default_file` if that exists. Empty variables count as not set.
    pub(crate) fn load(
        args: impl IntoIterator<Item = OsString>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        default_file: &Path,
    ) -> Result<Self, ConfigError> {
        let matches = keys::command().try_get_matches_from(args)?;
        let mut given = Given::gather(&matches, environment, default_file)?;
        given.refuse_roles()?;
        given.read_files()?;
        let settings = given.check()?;
        given.refuse_open(&settings)?;
        Ok(settings)
    }

    /// Returns warnings for the log about settings that are allowed but risky.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if matches!((&self.store, &self.signals), (StoreUri::Mongo { .. }, SignalsUri::Local)) {
            warnings.push(
                "signals = local: with a MongoDB store: consumers of one broker learn of pushes to \
                 another by polls only"
                    .to_owned(),
            );
        }
        let open = !self.listen.ip().is_loopback();
        if self.insecure && (open || !self.http_listen.ip().is_loopback()) && self.tokens.is_none()
        {
            warnings
                .push("insecure: everyone who reaches this broker may do everything".to_owned());
        }
        if open && self.tokens.is_some() && self.tls.is_none() {
            warnings.push("tokens without TLS: they can be read on the way".to_owned());
        }
        warnings
    }
}

#[cfg(test)]
mod tests;
