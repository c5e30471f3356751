//! Values of the command line as people write them.

use std::time::Duration;

use bytesize::ByteSize;

/// Parses `500ms`, `10s`, `1.5m`, `1h30m`, `2d`; `0` needs no unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "expected a duration such as 500ms, 10s, 5m, 2h or 1d".to_owned())
}

/// Parses a number of bytes: `65536`, `512KiB`, `4MiB`.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let size: Option<ByteSize> = text.trim().parse().ok();
    size.and_then(|size| size.as_u64().try_into().ok())
        .ok_or_else(|| "expected a size such as 65536, 512KiB or 4MiB".to_owned())
}

/// A setting that can be unset: a duration, or `none`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting(pub(crate) Option<Duration>);

/// Parses a duration or `none`.
pub(crate) fn setting(text: &str) -> Result<Setting, String> {
    if text == "none" {
        return Ok(Setting(None));
    }
    duration(text)
        .map(|duration| Setting(Some(duration)))
        .map_err(|error| format!("{error}, or none"))
}

/// Converts a duration to its message; one beyond the message's range becomes too long for any broker to accept.
pub(crate) fn to_proto(duration: Duration) -> prost_types::Duration {
    duration.try_into().unwrap_or(prost_types::Duration { seconds: i64::MAX / 2, nanos: 0 })
}

/// Shows a duration so that [`duration`] can parse it; milliseconds only below a minute.
pub(crate) fn show_duration(duration: &prost_types::Duration) -> String {
    let (seconds, millis) = (duration.seconds.max(0), duration.nanos.max(0) / 1_000_000);
    if seconds == 0 {
        return if millis == 0 { "0s".to_owned() } else { format!("{millis}ms") };
    }
    let mut text = String::new();
    let mut rest = seconds;
    for (unit, length) in [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)] {
        if rest >= length {
            text.push_str(&(rest / length).to_string());
            text.push_str(unit);
            rest %= length;
        }
    }
    if seconds < 60 && millis > 0 {
        text.push_str(&millis.to_string());
        text.push_str("ms");
    }
    text
}

/// Parses `key=value`.
pub(crate) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// Parses an instant such as `2026-01-31T12:00:00Z`.
pub(crate) fn instant(text: &str) -> Result<prost_types::Timestamp, String> {
    text.parse().map_err(|_| "expected an instant such as 2026-01-31T12:00:00Z".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read() {
        for (text, millis) in [
            ("0", 0),
            ("500ms", 500),
            ("10s", 10_000),
            ("1.5s", 1_500),
            ("5m", 300_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
            ("1h30m", 5_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "5", "s", "-1s", "5x", "1h30", "1..5s", "99999999999999999999d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [("256", 256), ("64KiB", 65_536), ("1.5 MiB", 1_572_864)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert!(size("-1").is_err() && size("4 flags").is_err());
    }

    #[test]
    fn shown_values_can_be_parsed() {
        for text in ["0s", "500ms", "1s500ms", "30s", "5m", "1h30m", "1d", "400d"] {
            let shown = show_duration(&to_proto(duration(text).unwrap()));
            assert_eq!(shown, text);
        }
    }
}
