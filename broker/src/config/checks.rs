//! What each setting may be, and which settings go together.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use config::ValueKind;

use super::{
    ConfigError, OLD_TOKENS, Settings, SignalsUri, StoreUri, Tls, address,
    sources::{Given, scalar},
    values::{self, Parsed},
};
use crate::{
    access::tokens::{self, Tokens},
    domain::{
        FailureDefaults, Limit, RetryPolicy,
        limits::{LARGEST_MAX_LEASE, LARGEST_MAX_PAYLOAD_BYTES, MAX_RETRY_MULTIPLIER, MIN_LEASE},
    },
    telemetry::{self, LogFormat},
};

const MAX_WORKER_THREADS: u32 = 1024;
pub(super) const DAY: Duration = Duration::from_hours(24);

impl Given {
    pub(super) fn check(&self) -> Result<Settings, ConfigError> {
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
            worker_threads: self.required("worker_threads", |text| match values::count(text)? {
                count if count <= MAX_WORKER_THREADS => Ok(count as usize),
                _ => Err(format!("{text} is more than {MAX_WORKER_THREADS}")),
            })?,
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

    /// Refuses the tokens of earlier versions, and says what to write instead.
    pub(super) fn refuse_roles(&self) -> Result<(), ConfigError> {
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
    pub(super) fn refuse_open(&self, settings: &Settings) -> Result<(), ConfigError> {
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
}

/// Returns a parser of durations within bounds.
pub(super) fn span(least: Duration, most: Duration) -> impl Fn(&str) -> Parsed<Duration> {
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
