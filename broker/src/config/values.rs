//! Values as people write them. Each parser answers what would be right if it can not read one.

use std::{net::SocketAddr, time::Duration};

use super::{Role, SignalsUri, StoreUri, Token};

/// What is wrong with a value, and what would be right.
pub(super) type Parsed<T> = Result<T, String>;

/// A duration: a number and a unit, or several of them: `500ms`, `30s`, `1h30m`.
pub(super) fn duration(text: &str) -> Parsed<Duration> {
    let wrong =
        || format!("{text:?} is not a duration; write for example 500ms, 30s, 5m, 12h or 7d");
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let millis = match &rest[..unit] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(wrong()),
        };
        rest = rest[unit..].trim_start();
        let part = number.checked_mul(millis).ok_or_else(wrong)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
    }
    Ok(Duration::from_millis(total))
}

/// A number of bytes: `65536`, `512KiB`, `4MiB`.
pub(super) fn bytes(text: &str) -> Parsed<usize> {
    let wrong = || format!("{text:?} is not a size; write for example 65536, 512KiB or 4MiB");
    let trimmed = text.trim();
    let (number, unit) = if let Some(number) = trimmed.strip_suffix("KiB") {
        (number, 1 << 10)
    } else if let Some(number) = trimmed.strip_suffix("MiB") {
        (number, 1 << 20)
    } else {
        (trimmed.strip_suffix('B').unwrap_or(trimmed), 1)
    };
    let number: usize = number.trim().parse().map_err(|_| wrong())?;
    number.checked_mul(unit).ok_or_else(wrong)
}

/// A whole number; 0 means no limit.
pub(super) fn count(text: &str) -> Parsed<u32> {
    match text.trim().parse() {
        Ok(count) if count <= i32::MAX.unsigned_abs() => Ok(count),
        _ => Err(format!("{text:?} is not a whole number from 0 to {}", i32::MAX)),
    }
}

/// A number within bounds.
pub(super) fn number(text: &str, least: f64, most: f64) -> Parsed<f64> {
    match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{text:?} is not a number of {least} to {most}")),
    }
}

/// Yes or no.
pub(super) fn boolean(text: &str) -> Parsed<bool> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// An address to listen on.
pub(super) fn address(text: &str) -> Parsed<SocketAddr> {
    let text = match text.strip_prefix("localhost:") {
        Some(port) => &format!("127.0.0.1:{port}"),
        None => text,
    };
    text.parse().map_err(|_| {
        format!(
            "{text:?} is not an address and a port; write for example 127.0.0.1:7400, \
             0.0.0.0:7400 for all of the machine's addresses, or [::]:7400"
        )
    })
}

/// The name of a MongoDB database.
pub(super) fn database(text: &str) -> Parsed<String> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    if (1..=63).contains(&text.len()) && text.bytes().all(fine) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not 1 to 63 letters, digits, '_' or '-'"))
    }
}

/// Where items live.
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

/// How to signal; `mongodb:` is over the store.
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
        // A driver may quote what it can not read, and that may be a password.
        for part in user_info.split(':').filter(|part| !part.is_empty()) {
            reason = reason.replace(part, "***");
        }
    }
    format!("{:?} can not be used: {reason}", mask_credentials(uri))
}

/// Bearer tokens, one per entry.
pub(super) fn tokens<'a>(entries: impl IntoIterator<Item = &'a str>) -> Parsed<Vec<Token>> {
    let mut tokens: Vec<Token> = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        // Which entry it is, but not what it says: these are secrets.
        let token = token(entry).map_err(|wrong| format!("entry {}: {wrong}", index + 1))?;
        if let Some(same) = tokens.iter().find(|other| other.secret == token.secret) {
            return Err(format!("{} and {} have the same token", same.name, token.name));
        }
        tokens.push(token);
    }
    Ok(tokens)
}

/// Fewest characters of a token.
const MIN_TOKEN: usize = 16;

fn token(entry: &str) -> Parsed<Token> {
    let wrong =
        || "write NAME:TOKEN:ROLE, with roles produce, consume, admin, joined by +".to_owned();
    let (name, rest) = entry.split_once(':').ok_or_else(wrong)?;
    let (secret, roles) = rest.rsplit_once(':').ok_or_else(wrong)?;
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(wrong());
    }
    if secret.len() < MIN_TOKEN || !secret.bytes().all(|b| b.is_ascii_graphic() && b != b',') {
        return Err(format!(
            "the token of {name} is not {MIN_TOKEN} or more printable characters without spaces \
             or commas; `openssl rand -hex 24` makes one"
        ));
    }
    let roles = roles.split('+').map(|role| match role {
        "produce" => Ok(Role::Produce),
        "consume" => Ok(Role::Consume),
        "admin" => Ok(Role::Admin),
        other => Err(format!("{other:?} is not a role: produce, consume or admin")),
    });
    let roles = roles.collect::<Result<_, _>>()?;
    Ok(Token { name: name.to_owned(), secret: secret.to_owned(), roles })
}

/// The part of a URI between `//` and the last `@` before the path.
fn user_info(uri: &str) -> Option<&str> {
    let (_, rest) = uri.split_once("://")?;
    // A password with an unescaped slash is not valid, but must not be shown either.
    let (user_info, _) = rest.rsplit_once('@')?;
    Some(user_info)
}

/// A URI fit for logs: without user names, passwords and the query, which may hold more of them.
pub fn mask_credentials(uri: &str) -> String {
    let (uri, query) = match uri.split_once('?') {
        // An unescaped question mark in a password is no query.
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
