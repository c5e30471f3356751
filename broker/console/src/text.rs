//! Figures, times and names in the form in which people read them.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime},
};

use maud::{Markup, html};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prost_types::{Duration as PbDuration, Timestamp};

/// Characters of names that stay as they are in addresses.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Returns a name as a part of an address.
pub(crate) fn encode(name: &str) -> String {
    utf8_percent_encode(name, PLAIN).to_string()
}

/// Returns a short name for a text, by FNV-1a. It tells texts apart, but not those that someone makes alike.
pub(crate) fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns a count with separators: `12,345`.
pub(crate) fn count(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::from(if number < 0 { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a count and its noun: `1 item`, `2 items`.
pub(crate) fn counted(number: i64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Returns a number per second: `0`, `0.4`, `12.3`, `1,234`.
pub(crate) fn rate(per_second: f64) -> String {
    if per_second < 0.05 {
        "0".to_owned()
    } else if per_second < 100.0 {
        format!("{per_second:.1}")
    } else {
        count(per_second.round() as i64)
    }
}

/// Returns a length of time in at most two units: `12 s`, `2 h 5 min`.
pub(crate) fn length(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let two = |large: u64, unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {small_unit}"),
    };
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{seconds} s"),
        60..600 => two(seconds / 60, "min", seconds % 60, "s"),
        600..3_600 => format!("{} min", seconds / 60),
        3_600..86_400 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

/// Returns a number of bytes: `12 B`, `1.5 KiB`.
pub(crate) fn bytes(number: usize) -> String {
    match number {
        0..1_024 => format!("{number} B"),
        1_024..1_048_576 => format!("{:.1} KiB", number as f64 / 1_024.0),
        _ => format!("{:.1} MiB", number as f64 / 1_048_576.0),
    }
}

/// Returns the length of time that a message gives; a negative one is zero.
pub(crate) fn duration(duration: PbDuration) -> Duration {
    Duration::try_from(duration).unwrap_or_default()
}

/// Returns a setting in the form in which it is entered: `1m 30s`; empty if it is not set.
pub(crate) fn setting(value: Option<&PbDuration>) -> String {
    value.map_or_else(String::new, |value| humantime::format_duration(duration(*value)).to_string())
}

/// Parses a setting; an empty one is not set.
pub(crate) fn parse_setting(text: &str) -> Result<Option<PbDuration>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let parsed = humantime::parse_duration(text);
    let parsed =
        parsed.map_err(|_| "is no length of time, such as 30s, 5m or 1h 30m".to_owned())?;
    PbDuration::try_from(parsed).map(Some).map_err(|_| "is too long".to_owned())
}

/// Returns an instant in UTC, which the script of the page turns into local time; `otherwise` if it is not set.
pub(crate) fn time(timestamp: Option<&Timestamp>, otherwise: &str) -> Markup {
    let instant = timestamp.and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok());
    let Some(instant) = instant else { return html! { span.quiet { (otherwise) } } };
    let shown = instant.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
    html! { time datetime=(instant) title=(relative(instant)) { (shown) } }
}

/// Returns how far away an instant is: `3 min ago`, `in 2 h`; empty if it is not set.
pub(crate) fn away(timestamp: Option<&Timestamp>) -> String {
    let instant = timestamp.and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok());
    instant.map_or_else(String::new, relative)
}

/// Returns how long ago an instant was: `3 min`, `1 s` at least; empty if it is not set.
pub(crate) fn since(timestamp: Option<&Timestamp>) -> String {
    let instant = timestamp.and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok());
    instant.map_or_else(String::new, |instant| {
        let past = SystemTime::now().duration_since(SystemTime::from(instant));
        length(Duration::from_secs(past.unwrap_or_default().as_secs().max(1)))
    })
}

fn relative(instant: jiff::Timestamp) -> String {
    let instant = SystemTime::from(instant);
    let now = SystemTime::now();
    match now.duration_since(instant) {
        Ok(past) if past < Duration::from_secs(1) => "now".to_owned(),
        Ok(past) => format!("{} ago", length(past)),
        Err(future) => format!("in {}", length(future.duration())),
    }
}

/// Returns bytes as text, with what is no text replaced, cut after so many characters.
pub(crate) fn preview(bytes: &[u8], most: usize) -> String {
    // A character has at most four bytes.
    let start = &bytes[..bytes.len().min(most * 4)];
    let mut text: String =
        String::from_utf8_lossy(start).chars().map(printable).take(most).collect();
    if text.len() < bytes.len() {
        text.push('…');
    }
    text
}

/// Returns characters that would change how the page around them reads as a replacement character.
pub(crate) fn printable(character: char) -> char {
    let is_direction = matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    match character {
        '\n' | '\t' => character,
        _ if character.is_control() || is_direction => '\u{fffd}',
        _ => character,
    }
}

/// Returns bytes as a dump: offset, sixteen bytes, the printable ones of them.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut dump = String::new();
    for (line, chunk) in bytes.chunks(16).enumerate() {
        let _ = write!(dump, "{:08x} ", line * 16); // writing to a string cannot fail
        for at in 0..16 {
            let gap = if at == 8 { " " } else { "" };
            let _ = match chunk.get(at) {
                Some(byte) => write!(dump, "{gap} {byte:02x}"),
                None => write!(dump, "{gap}   "),
            };
        }
        dump.push_str("  ");
        dump.extend(
            chunk.iter().map(|&byte| {
                if byte.is_ascii_graphic() || byte == b' ' { byte as char } else { '.' }
            }),
        );
        dump.push('\n');
    }
    dump
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        assert_eq!(
            [count(0), count(999), count(-1_000), count(1_234_567)],
            ["0", "999", "-1,000", "1,234,567"]
        );
        assert_eq!([counted(1, "item"), counted(2_000, "item")], ["1 item", "2,000 items"]);
        assert_eq!([rate(0.01), rate(0.4), rate(1_234.5)], ["0", "0.4", "1,235"]);
        let lengths =
            [250, 12_000, 90_000, 700_000, 7_500_000, 90_000_000].map(Duration::from_millis);
        assert_eq!(
            lengths.map(length),
            ["250 ms", "12 s", "1 min 30 s", "11 min", "2 h 5 min", "1 d 1 h"]
        );
        assert_eq!([bytes(12), bytes(1_536)], ["12 B", "1.5 KiB"]);
    }

    #[test]
    fn settings_are_shown_as_they_are_entered() {
        let setting_of = |text: &str| setting(parse_setting(text).unwrap().as_ref());
        assert_eq!([setting_of("90s"), setting_of(" "), setting_of("0s")], ["1m 30s", "", "0s"]);
        assert!(parse_setting("soon").is_err());
    }

    #[test]
    fn bytes_of_any_kind_are_shown() {
        assert_eq!(preview("añb".as_bytes(), 2), "añ…");
        assert_eq!(preview(b"\xff\x00ok\x1b[2J", 99), "\u{fffd}\u{fffd}ok\u{fffd}[2J");
        assert_eq!(preview("a\u{202e}b".as_bytes(), 9), "a\u{fffd}b");
        assert!(
            hex(b"0123456789abcdef!")
                .ends_with("00000010  21                                                !\n"),
            "{}",
            hex(b"0123456789abcdef!")
        );
        assert_eq!(encode("a/b c?<"), "a%2Fb%20c%3F%3C");
    }
}
