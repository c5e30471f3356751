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

/// Converts a duration from its message; a negative one becomes zero.
pub(crate) fn from_proto(duration: &prost_types::Duration) -> Duration {
    Duration::try_from(*duration).unwrap_or_default()
}

/// Shows about how long something takes: the two largest units, such as `3s`, `5m 2s` or `2d 4h`.
pub(crate) fn about(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds == 0 {
        return format!("{}ms", duration.subsec_millis());
    }
    let units = [("d", seconds / 86_400), ("h", seconds / 3_600 % 24), ("m", seconds / 60 % 60)];
    let mut parts = units.into_iter().chain([("s", seconds % 60)]);
    let Some((unit, largest)) = parts.find(|(_, count)| *count > 0) else { return "0s".to_owned() };
    match parts.next() {
        Some((next, count)) if count > 0 => format!("{largest}{unit} {count}{next}"),
        _ => format!("{largest}{unit}"),
    }
}

/// Shows a duration so that [`duration`] can parse it; milliseconds only below a minute.
pub(crate) fn show_duration(duration: &prost_types::Duration) -> String {
    let millis = if duration.seconds < 60 { duration.nanos.max(0) / 1_000_000 } else { 0 };
    exact(Duration::new(duration.seconds.max(0) as u64, millis as u32 * 1_000_000))
}

/// Shows a duration so that [`duration`] returns the same one.
pub(crate) fn exact(duration: Duration) -> String {
    let (seconds, nanos) = (duration.as_secs(), u64::from(duration.subsec_nanos()));
    let units = [
        ("d", seconds / 86_400),
        ("h", seconds / 3_600 % 24),
        ("m", seconds / 60 % 60),
        ("s", seconds % 60),
        ("ms", nanos / 1_000_000),
        ("us", nanos / 1_000 % 1_000),
        ("ns", nanos % 1_000),
    ];
    let mut text = String::new();
    for (unit, count) in units.into_iter().filter(|(_, count)| *count > 0) {
        text.push_str(&count.to_string());
        text.push_str(unit);
    }
    if text.is_empty() { "0s".to_owned() } else { text }
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
    fn about_is_two_units_at_most() {
        for (seconds, shown) in [
            (3, "3s"),
            (302, "5m 2s"),
            (3_600, "1h"),
            (3_605, "1h"),
            (93_784, "1d 2h"),
            (86_400 * 400, "400d"),
        ] {
            assert_eq!(about(Duration::from_secs(seconds)), shown);
        }
        assert_eq!(about(Duration::from_millis(20)), "20ms");
    }

    #[test]
    fn shown_values_can_be_parsed() {
        for text in ["0s", "500ms", "1s500ms", "30s", "5m", "1h30m", "1d", "400d"] {
            let shown = show_duration(&to_proto(duration(text).unwrap()));
            assert_eq!(shown, text);
        }
        for text in ["1m30s500ms", "2d1ns", "7us"] {
            assert_eq!(exact(duration(text).unwrap()), text);
        }
        assert_eq!(show_duration(&to_proto(duration("1m30s500ms").unwrap())), "1m30s");
    }
}
