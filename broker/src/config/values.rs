//! Values as people write them. Each parser answers what would be right if it can not read one.

use std::{net::SocketAddr, time::Duration};

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
