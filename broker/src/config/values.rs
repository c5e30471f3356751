//! Values as people write them. The error of each parser says what would be valid.

use std::{net::SocketAddr, time::Duration};

use bytesize::ByteSize;

/// Examples of durations, for messages and the help.
pub(super) const DURATIONS: &str = "500ms, 30s, 5m, 12h, 7d or 1h30m";
/// Examples of sizes.
pub(super) const SIZES: &str = "65536, 512KiB or 4MiB";

/// A parsed value, or what is wrong with it and what would be valid.
pub(super) type Parsed<T> = Result<T, String>;

/// Parses a duration: a number and a unit, or several of them: `500ms`, `1.5s`, `1h30m`.
pub(super) fn duration(text: &str) -> Parsed<Duration> {
    humantime::parse_duration(text)
        .map_err(|_| format!("{text:?} is not a duration; write for example {DURATIONS}"))
}

/// Parses a number of bytes: `65536`, `512KiB`, `4MiB`.
pub(super) fn bytes(text: &str) -> Parsed<usize> {
    let size: Option<ByteSize> = text.trim().parse().ok();
    size.and_then(|size| size.as_u64().try_into().ok())
        .ok_or_else(|| format!("{text:?} is not a size; write for example {SIZES}"))
}

/// Parses a whole number; 0 means no limit.
pub(super) fn count(text: &str) -> Parsed<u32> {
    match text.trim().parse() {
        Ok(count) if count <= i32::MAX.unsigned_abs() => Ok(count),
        _ => Err(format!("{text:?} is not a whole number from 0 to {}", i32::MAX)),
    }
}

/// Parses a number within bounds.
pub(super) fn number(text: &str, least: f64, most: f64) -> Parsed<f64> {
    match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{text:?} is not a number of {least} to {most}")),
    }
}

/// Parses a boolean.
pub(super) fn boolean(text: &str) -> Parsed<bool> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// Parses an address to listen on.
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

/// Parses the name of a MongoDB database.
pub(super) fn database(text: &str) -> Parsed<String> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    if (1..=63).contains(&text.len()) && text.bytes().all(fine) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not 1 to 63 letters, digits, '_' or '-'"))
    }
}
