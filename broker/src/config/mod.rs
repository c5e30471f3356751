//! Settings: from `sluicegate.toml`, the environment and flags, in rising precedence. An unknown key or a wrong
//! value stops the start. The message names the key, where it was given, and what would be right.

mod address;
mod bounds;
mod keys;
mod otlp;
mod values;

use std::{
    collections::HashMap,
    ffi::OsString,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use config::{Config, File, FileFormat, Map, Source, Value, ValueKind};

#[cfg(feature = "otlp")]
pub(crate) use self::otlp::OtlpProtocol;
pub(crate) use self::{
    address::{SignalsUri, StoreUri},
    bounds::Bounds,
    otlp::Otlp,
};
use self::{
    keys::{CONFIG_VARIABLE, KEYS, Key, PREFIX},
    values::Parsed,
};
use crate::{
    access::tokens::{self, Tokens},
    domain::{
        FailureDefaults, Limit, RetryPolicy,
        limits::{LARGEST_MAX_LEASE, LARGEST_MAX_PAYLOAD_BYTES, MAX_RETRY_MULTIPLIER, MIN_LEASE},
    },
    telemetry::{self, LogFormat},
};

/// The file that is read if none is named.
pub(crate) const DEFAULT_FILE: &str = "sluicegate.toml";

/// Variables with this prefix are for tests; the broker ignores them.
const TEST_PREFIX: &str = "SLUICEGATE_TEST_";

/// A setting of earlier versions: tokens with roles.
const OLD_TOKENS: &str = "tokens";

const DAY: Duration = Duration::from_hours(24);

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
        let (from_environment, config_variable) = environment_layer(environment)?;
        let mut flags = Layer::default();
        for key in KEYS {
            if let Some(value) = matches.get_one::<String>(key.name) {
                flags.set(key, &format!("flag --{}", key.flag()), value);
            }
        }
        if let Some(value) = matches.get_one::<String>(OLD_TOKENS) {
            let value = Value::new(Some(&"flag --tokens".to_owned()), value.as_str());
            flags.0.insert(OLD_TOKENS.to_owned(), value);
        }
        let named = matches.get_one::<String>("config").map(PathBuf::from).or(config_variable);
        let file = match named {
            Some(path) => Some(path),
            None => default_file.exists().then(|| default_file.to_owned()),
        };
        let mut builder = Config::builder();
        if let Some(path) = file {
            builder = builder.add_source(file_layer(&path)?);
        }
        let merged = builder.add_source(from_environment).add_source(flags).build();
        let merged = merged.and_then(|config| config.cache.into_table());
        let values = merged.map_err(|error| ConfigError::File {
            path: "settings".to_owned(),
            reason: error.to_string(),
        })?;
        let mut given = Given(values);
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

/// Settings from one place, each with the name of that place.
#[derive(Debug, Clone, Default)]
struct Layer(Map<String, Value>);

impl Layer {
    fn set(&mut self, key: &Key, origin: &str, value: &str) {
        self.0.insert(key.name.to_owned(), Value::new(Some(&origin.to_owned()), value));
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

fn environment_layer(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<(Layer, Option<PathBuf>), ConfigError> {
    let mut layer = Layer::default();
    let mut config = None;
    for (name, value) in environment {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        if name.starts_with(TEST_PREFIX) || value.is_empty() || is_service_link(name) {
            continue;
        }
        if name == CONFIG_VARIABLE {
            config = Some(PathBuf::from(value));
            continue;
        }
        if name == "SLUICEGATE_TOKENS" {
            let origin = format!("environment variable {name}");
            let value = Value::new(Some(&origin), value.to_string_lossy().into_owned());
            layer.0.insert(OLD_TOKENS.to_owned(), value);
            continue;
        }
        let Some(key) = KEYS.iter().find(|key| key.variable() == name) else {
            return Err(ConfigError::UnknownKey {
                key: name.to_owned(),
                origin: "the environment".to_owned(),
                known: join(KEYS.iter().map(Key::variable)),
            });
        };
        let origin = format!("environment variable {name}");
        if let Some(value) = value.to_str() {
            layer.set(key, &origin, value);
        } else {
            let problem = "it is not UTF-8".to_owned();
            return Err(ConfigError::BadValue { key: key.name, origin, problem });
        }
    }
    Ok((layer, config))
}

/// Returns true for variables that Kubernetes sets for every service. A service called `sluicegate` leads to
/// `SLUICEGATE_SERVICE_HOST`, `SLUICEGATE_PORT`, `SLUICEGATE_PORT_7400_TCP_ADDR` and more.
fn is_service_link(name: &str) -> bool {
    let port = |rest: &str| rest.is_empty() || rest[1..].starts_with(|c: char| c.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.rsplit_once("_PORT").is_some_and(|(_, rest)| port(rest))
        || name.split_once("_PORT_").is_some_and(|(_, rest)| port(&format!("_{rest}")))
}

fn file_layer(path: &Path) -> Result<Layer, ConfigError> {
    let shown = path.display().to_string();
    let wrong = |reason: String| ConfigError::File { path: shown.clone(), reason };
    let text = fs::read_to_string(path)
        .map_err(|error| wrong(format!("the settings cannot be read: {error}")))?;
    let table = File::from_str(&text, FileFormat::Toml)
        .collect()
        .map_err(|error| wrong(format!("this is not TOML: {error}")))?;
    let mut layer = Layer::default();
    for (name, value) in table {
        if name != OLD_TOKENS && !KEYS.iter().any(|key| key.name == name) {
            return Err(ConfigError::UnknownKey {
                key: name,
                origin: shown,
                known: join(KEYS.iter().map(|key| key.name.to_owned())),
            });
        }
        layer.0.insert(name, Value::new(Some(&shown), value.kind));
    }
    Ok(layer)
}

fn join(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// The values given, merged.
struct Given(HashMap<String, Value>);

impl Given {
    fn check(&self) -> Result<Settings, ConfigError> {
        let store = self.required("store", address::store)?;
        let signals = match self.optional("signals", |text| address::signals(text, &store))? {
            Some(signals) => signals,
            None => match &store {
                StoreUri::Mongo { uri } => SignalsUri::Mongo { uri: uri.clone() },
                StoreUri::Sqlite { .. } | StoreUri::SqliteMemory => SignalsUri::Local,
            },
        };
        let max_lease = self.required("max_lease", span(MIN_LEASE, LARGEST_MAX_LEASE))?;
        let poll_min =
            self.required("poll_min", span(Duration::from_millis(10), Duration::from_hours(1)))?;
        Ok(Settings {
            listen: self.required("listen", values::address)?,
            http_listen: self.required("http_listen", values::address)?,
            database: self.required("database", values::database)?,
            auto_create_queues: self.required("auto_create_queues", values::boolean)?,
            max_payload_bytes: self.required("max_payload_bytes", |text| {
                match values::bytes(text)? {
                    bytes @ 1..=LARGEST_MAX_PAYLOAD_BYTES => Ok(bytes),
                    _ => Err(format!("{text} is not within 1 byte and 15MiB")),
                }
            })?,
            default_lease: self.required("default_lease", span(MIN_LEASE, max_lease))?,
            failure_defaults: self.failure_defaults()?,
            shutdown_grace: self.required("shutdown_grace", span(Duration::ZERO, DAY))?,
            poll_max: self.required("poll_max", span(poll_min, Duration::from_hours(1)))?,
            log_format: self.required("log_format", |text| match text {
                "text" => Ok(LogFormat::Text),
                "json" => Ok(LogFormat::Json),
                _ => Err(format!("{text:?} is neither text nor json")),
            })?,
            log_level: self.required("log_level", |text| match telemetry::parse_filter(text) {
                Ok(_) => Ok(text.to_owned()),
                Err(error) => Err(format!(
                    "{text:?} is not a filter ({error}); write for example info, or \
                     info,sluicegate_broker::signals=debug"
                )),
            })?,
            tls: self.tls()?,
            max_connection_age: self
                .required("max_connection_age", span(Duration::ZERO, DAY.saturating_mul(30)))?,
            tokens: self.tokens()?,
            max_refusals: self.required("max_refusals", values::count)?,
            insecure: self.required("insecure", values::boolean)?,
            bounds: self.bounds()?,
            otlp: self.otlp()?,
            max_lease,
            poll_min,
            store,
            signals,
        })
    }

    /// Reads the settings that are in files of their own, because they hold passwords.
    fn read_files(&mut self) -> Result<(), ConfigError> {
        for (key, file_key) in [("store", "store_file"), ("signals", "signals_file")] {
            let Some(path) = self.optional(file_key, |path| Ok(PathBuf::from(path)))? else {
                continue;
            };
            if self.0.contains_key(key) {
                return Err(self.bad(file_key, format!("give either {key} or {file_key}")));
            }
            let text = fs::read_to_string(&path).map_err(|error| {
                self.bad(file_key, format!("\"{}\" cannot be read: {error}", path.display()))
            })?;
            let origin = path.display().to_string();
            self.0.insert(key.to_owned(), Value::new(Some(&origin), text.trim()));
        }
        Ok(())
    }

    /// Refuses the tokens of earlier versions, and says what to write instead.
    fn refuse_roles(&self) -> Result<(), ConfigError> {
        let Some(value) = self.0.get(OLD_TOKENS) else { return Ok(()) };
        let entries: Vec<String> = match &value.kind {
            ValueKind::Array(entries) => {
                entries.iter().filter_map(|entry| scalar(&entry.kind)).collect()
            }
            kind => scalar(kind).unwrap_or_default().split(',').map(str::to_owned).collect(),
        };
        let instead = tokens::instead_of_roles(entries.iter().map(String::as_str));
        let problem = instead.unwrap_or_else(|| {
            "tokens are in a TOML file that tokens_file names; `sluicegate token new NAME --allow PERMISSION` makes one"
                .to_owned()
        });
        Err(self.bad(OLD_TOKENS, problem))
    }

    /// Refuses to serve other machines while everyone may do everything, unless that is meant.
    fn refuse_open(&self, settings: &Settings) -> Result<(), ConfigError> {
        let certificate_required = settings.tls.as_ref().is_none_or(|tls| tls.certificate_required);
        if settings.tokens.is_none() && !certificate_required {
            let problem =
                "without tokens, clients without a certificate may do everything: set tokens_file";
            return Err(self.bad("tls_client_auth", problem.to_owned()));
        }
        if settings.tokens.is_some() || settings.insecure {
            return Ok(());
        }
        for (key, address) in [("listen", settings.listen), ("http_listen", settings.http_listen)] {
            if !address.ip().is_loopback() {
                let problem = format!(
                    "without tokens everyone who reaches {address} may do everything: set tokens_file \
                     (`sluicegate token new NAME --allow admin@*` makes the first token), or insecure = true if that is meant"
                );
                return Err(self.bad(key, problem));
            }
        }
        Ok(())
    }

    fn failure_defaults(&self) -> Result<FailureDefaults, ConfigError> {
        let month = DAY.saturating_mul(30);
        Ok(FailureDefaults {
            max_attempts: Limit::of(self.required("default_max_attempts", values::count)?),
            max_deliveries: Limit::of(self.required("default_max_deliveries", values::count)?),
            retry_policy: RetryPolicy {
                initial_delay: self
                    .required("default_retry_initial_delay", span(Duration::ZERO, month))?,
                multiplier: self.required("default_retry_multiplier", |text| {
                    values::number(text, 1.0, MAX_RETRY_MULTIPLIER)
                })?,
                max_delay: self.required("default_retry_max_delay", span(Duration::ZERO, month))?,
                jitter: self
                    .required("default_retry_jitter", |text| values::number(text, 0.0, 1.0))?,
            },
        })
    }

    fn tls(&self) -> Result<Option<Tls>, ConfigError> {
        let [cert, key, client_ca] = [
            self.optional("tls_cert", readable)?,
            self.optional("tls_key", readable)?,
            self.optional("tls_client_ca", readable)?,
        ];
        let certificate_required = self.required("tls_client_auth", |text| match text {
            "required" => Ok(true),
            "optional" => Ok(false),
            _ => Err(format!("{text:?} is neither required nor optional")),
        })?;
        if !certificate_required && client_ca.is_none() {
            return Err(self.bad("tls_client_auth", "it needs tls_client_ca beside it".to_owned()));
        }
        match (cert, key) {
            (Some(cert), Some(key)) => Ok(Some(Tls { cert, key, client_ca, certificate_required })),
            (Some(_), None) => Err(self.bad("tls_cert", "it needs tls_key beside it".to_owned())),
            (None, Some(_)) => Err(self.bad("tls_key", "it needs tls_cert beside it".to_owned())),
            (None, None) if client_ca.is_some() => {
                Err(self.bad("tls_client_ca", "it needs tls_cert and tls_key beside it".to_owned()))
            }
            (None, None) => Ok(None),
        }
    }

    fn tokens(&self) -> Result<Option<(PathBuf, Arc<Tokens>)>, ConfigError> {
        self.optional("tokens_file", |path| {
            let path = PathBuf::from(path);
            let tokens = Tokens::read(&path)?;
            Ok((path, Arc::new(tokens)))
        })
    }

    /// Returns a setting that has a default.
    fn required<T>(
        &self,
        key: &'static str,
        parse: impl Fn(&str) -> Parsed<T>,
    ) -> Result<T, ConfigError> {
        if let Some(value) = self.optional(key, &parse)? {
            return Ok(value);
        }
        let default = KEYS.iter().find(|k| k.name == key).map_or("", |k| k.default);
        parse(default).map_err(|problem| self.bad(key, problem))
    }

    fn optional<T>(
        &self,
        key: &'static str,
        parse: impl Fn(&str) -> Parsed<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let text = scalar(&value.kind)
            .ok_or_else(|| self.bad(key, "one plain value is expected".to_owned()))?;
        parse(&text).map(Some).map_err(|problem| self.bad(key, problem))
    }

    fn bad(&self, key: &'static str, problem: String) -> ConfigError {
        let origin = self.0.get(key).and_then(Value::origin).unwrap_or("the defaults").to_owned();
        ConfigError::BadValue { key, origin, problem }
    }
}

fn scalar(kind: &ValueKind) -> Option<String> {
    match kind {
        ValueKind::Boolean(_)
        | ValueKind::I64(_)
        | ValueKind::I128(_)
        | ValueKind::U64(_)
        | ValueKind::U128(_)
        | ValueKind::Float(_)
        | ValueKind::String(_) => Some(kind.to_string()),
        ValueKind::Nil | ValueKind::Table(_) | ValueKind::Array(_) => None,
    }
}

/// Returns a parser of durations within bounds.
fn span(least: Duration, most: Duration) -> impl Fn(&str) -> Parsed<Duration> {
    move |text| {
        let span = values::duration(text)?;
        if (least..=most).contains(&span) {
            Ok(span)
        } else {
            Err(format!("{text} is not within {least:?} and {most:?}"))
        }
    }
}

fn readable(path: &str) -> Parsed<PathBuf> {
    match fs::File::open(path) {
        Ok(_) => Ok(PathBuf::from(path)),
        Err(error) => Err(format!("{path:?} cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests;
