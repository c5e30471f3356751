//! Durations as people write them.

use std::time::Duration;

/// Parses `500ms`, `10s`, `1.5m`, `1h30m`, `2d`; `0` needs no unit.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "expected a duration such as 500ms, 10s, 5m, 2h or 1d".to_owned())
}

/// A setting that can be taken back: a duration, or `none`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting(pub(crate) Option<Duration>);

/// Parses a duration or `none`.
pub(crate) fn parse_setting(text: &str) -> Result<Setting, String> {
    if text == "none" {
        return Ok(Setting(None));
    }
    parse(text).map(|duration| Setting(Some(duration))).map_err(|error| format!("{error}, or none"))
}

/// The way over the wire.
pub(crate) fn to_proto(duration: Duration) -> prost_types::Duration {
    duration.try_into().unwrap_or(prost_types::Duration { seconds: i64::MAX / 2, nanos: 0 })
}

/// Shows a duration the way [`parse`] reads it; milliseconds only below a minute.
pub(crate) fn show(duration: &prost_types::Duration) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn humane_durations_are_read() {
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
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "5", "s", "-1s", "5x", "1h30", "1..5s", "99999999999999999999d"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_shown_can_be_read() {
        for text in ["0s", "500ms", "1s500ms", "30s", "5m", "1h30m", "1d", "400d"] {
            let shown = show(&to_proto(parse(text).unwrap()));
            assert_eq!(shown, text);
        }
    }
}
