//! Addresses of stores and signals, and their text forms without credentials.

use std::{fmt, path::PathBuf};

use super::values::Parsed;

/// The address of the store. Its text forms contain no credentials.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum StoreUri {
    /// One file.
    Sqlite {
        /// The file; created if it does not exist.
        path: PathBuf,
    },
    /// In memory, for as long as the broker runs.
    SqliteMemory,
    /// A MongoDB database.
    Mongo {
        /// The deployment's address, with credentials if it needs any.
        uri: String,
    },
}

impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite { path } => write!(f, "sqlite:{}", path.display()),
            Self::SqliteMemory => f.write_str("sqlite::memory:"),
            Self::Mongo { uri } => f.write_str(&mask_credentials(uri)),
        }
    }
}

impl fmt::Debug for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The kind and address of the signals between brokers. Its text forms contain no credentials.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum SignalsUri {
    /// None, for a broker that is alone on its store.
    Local,
    /// Redis, `redis://` or `rediss://`.
    Redis {
        /// Its address, with credentials if it needs any.
        uri: String,
    },
    /// A capped collection in the MongoDB database of the store.
    Mongo {
        /// The store's address, with credentials if it needs any.
        uri: String,
    },
}

impl fmt::Display for SignalsUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local:"),
            Self::Redis { uri } => f.write_str(&mask_credentials(uri)),
            Self::Mongo { .. } => f.write_str("mongodb:"),
        }
    }
}

impl fmt::Debug for SignalsUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Parses the address of the store.
pub(super) fn store(text: &str) -> Parsed<StoreUri> {
    if text == "sqlite::memory:" {
        return Ok(StoreUri::SqliteMemory);
    }
    if let Some(path) = text.strip_prefix("sqlite:") {
        if path.is_empty() || path.starts_with("//") || path.starts_with(':') {
            return Err(format!(
                "{text:?} names no file; write sqlite:PATH, for example sqlite:sluicegate.db or \
                 sqlite:/var/lib/sluicegate/sluicegate.db, or sqlite::memory:"
            ));
        }
        return Ok(StoreUri::Sqlite { path: path.into() });
    }
    if text.starts_with("mongodb://") || text.starts_with("mongodb+srv://") {
        return match mongodb::options::ConnectionString::parse(text) {
            Ok(_) => Ok(StoreUri::Mongo { uri: text.to_owned() }),
            Err(error) => Err(not_an_address(text, &error.kind.to_string())),
        };
    }
    Err(format!(
        "{:?} is not sqlite:PATH, sqlite::memory:, mongodb://HOST:PORT/ or mongodb+srv://HOST/",
        mask_credentials(text)
    ))
}

/// Parses the address of the signals; `mongodb:` means signals over the store.
pub(super) fn signals(text: &str, store: &StoreUri) -> Parsed<SignalsUri> {
    match text {
        "local:" => return Ok(SignalsUri::Local),
        "mongodb:" => {
            return match store {
                StoreUri::Mongo { uri } => Ok(SignalsUri::Mongo { uri: uri.clone() }),
                _ => Err(format!(
                    "mongodb: sends signals through the store, which is {store}; write local: or \
                     redis://HOST:PORT"
                )),
            };
        }
        _ => {}
    }
    if text.starts_with("redis://") || text.starts_with("rediss://") {
        return match redis::Client::open(text) {
            Ok(_) => Ok(SignalsUri::Redis { uri: text.to_owned() }),
            Err(error) => Err(not_an_address(text, &error.to_string())),
        };
    }
    Err(format!(
        "{:?} is not local:, redis://HOST:PORT, rediss://HOST:PORT or mongodb: (the store's own \
         database)",
        mask_credentials(text)
    ))
}

fn not_an_address(uri: &str, reason: &str) -> String {
    let mut reason = reason.to_owned();
    if let Some(user_info) = user_info(uri) {
        // A driver may quote text that it cannot read, and that text may be a password.
        for part in user_info.split(':').filter(|part| !part.is_empty()) {
            reason = reason.replace(part, "***");
        }
    }
    format!("{:?} cannot be used: {reason}", mask_credentials(uri))
}

/// Returns the part of a URI between `//` and the last `@` before the path.
fn user_info(uri: &str) -> Option<&str> {
    let (_, rest) = uri.split_once("://")?;
    // A password with an unescaped slash is not valid, but must not be shown either.
    let (user_info, _) = rest.rsplit_once('@')?;
    Some(user_info)
}

/// Returns a URI fit for logs: without user names and passwords, and without the query, which may
/// contain more of them.
pub(super) fn mask_credentials(uri: &str) -> String {
    let (uri, query) = match uri.split_once('?') {
        // An unescaped question mark in a password does not begin a query.
        Some((before, after)) if !after.contains('@') => (before, "?***"),
        _ => (uri, ""),
    };
    match user_info(uri) {
        Some(user_info) => {
            let scheme = uri.find("://").map_or(0, |at| at + 3);
            let host = &uri[scheme + user_info.len() + 1..];
            format!("{}***@{host}{query}", &uri[..scheme])
        }
        None => format!("{uri}{query}"),
    }
}
