//! Where settings are given: a file, the environment, and flags. Each value is kept with the name of its place.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use clap::ArgMatches;
use config::{Config, File, FileFormat, Map, Source, Value, ValueKind};

use super::{
    ConfigError, OLD_TOKENS,
    keys::{CONFIG_VARIABLE, KEYS, Key, PREFIX},
    values::Parsed,
};

/// Variables with this prefix are for tests; the broker ignores them.
const TEST_PREFIX: &str = "SLUICEGATE_TEST_";

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
pub(super) struct Given(pub(super) HashMap<String, Value>);

impl Given {
    /// Merges what a command line, an environment, and a file give: the file that these name, or else `default_file` if that exists.
    pub(super) fn gather(
        matches: &ArgMatches,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        default_file: &Path,
    ) -> Result<Self, ConfigError> {
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
        Ok(Self(values))
    }

    /// Reads the settings that are in files of their own, because they hold passwords.
    pub(super) fn read_files(&mut self) -> Result<(), ConfigError> {
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

    /// Returns a setting that has a default.
    pub(super) fn required<T>(
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

    pub(super) fn optional<T>(
        &self,
        key: &'static str,
        parse: impl Fn(&str) -> Parsed<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let text = scalar(&value.kind)
            .ok_or_else(|| self.bad(key, "one plain value is expected".to_owned()))?;
        parse(&text).map(Some).map_err(|problem| self.bad(key, problem))
    }

    pub(super) fn bad(&self, key: &'static str, problem: String) -> ConfigError {
        let origin = self.0.get(key).and_then(Value::origin).unwrap_or("the defaults").to_owned();
        ConfigError::BadValue { key, origin, problem }
    }
}

pub(super) fn scalar(kind: &ValueKind) -> Option<String> {
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
