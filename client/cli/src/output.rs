//! Writing to stdout, as text or JSON. A closed pipe is an error that ends the command quietly.

use std::{
    fmt::Write as _,
    io::{self, BufWriter, IsTerminal, Write},
    time::SystemTime,
};

use crossterm::style::Stylize;
use prost_types::Timestamp;
use serde_json::Value;
use sluicegate_client::proto::Item;

use crate::{json, values};

/// Where and how results are shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Returns true if people read it as it comes.
    pub(crate) fn is_terminal(self) -> bool {
        !self.json && io::stdout().is_terminal()
    }

    /// Prints a text: `value` with --json, else `text`, without what would control a terminal if stdout is one.
    pub(crate) fn one(self, value: &Value, text: &str) -> io::Result<()> {
        if self.is_terminal() {
            self.painted(value, &harmless(text, true))
        } else {
            self.painted(value, text)
        }
    }

    /// Prints a text whose colours are meant: all else in it is harmless.
    pub(crate) fn painted(self, value: &Value, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.json { writeln!(stdout, "{}", line(value)) } else { writeln!(stdout, "{text}") }
    }

    /// Prints an item: all of it with --json, else its payload and a newline. A program gets the payload as it is, a terminal
    /// without what would control it.
    pub(crate) fn payload(self, item: &Item) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.json {
            writeln!(stdout, "{}", line(&json::item(item)))
        } else if stdout.is_terminal() {
            writeln!(stdout, "{}", harmless(&String::from_utf8_lossy(&item.payload), true))
        } else {
            stdout.write_all(&item.payload)?;
            stdout.write_all(b"\n")?;
            stdout.flush()
        }
    }

    /// Prints a list: one object per line with --json, else a table.
    pub(crate) fn list(self, head: &[&str], rows: Vec<(Value, Vec<String>)>) -> io::Result<()> {
        let mut stdout = BufWriter::new(io::stdout().lock());
        if self.json {
            for (value, _) in rows {
                writeln!(stdout, "{}", line(&value))?;
            }
            return stdout.flush();
        }
        let has_colours = has_colours();
        let mut lines: Vec<Vec<String>> =
            vec![head.iter().map(ToString::to_string).collect::<Vec<_>>()];
        let cell = |text: String| harmless(&text, false);
        lines.extend(rows.into_iter().map(|(_, cells)| cells.into_iter().map(cell).collect()));
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
        let widths: Vec<usize> = (0..head.len()).map(|column| width(column).unwrap_or(0)).collect();
        for (number, line) in lines.iter().enumerate() {
            let cells = line.iter().zip(&widths).zip(head).map(|((cell, &width), title)| {
                // Colours have no width, and so come after it.
                let room = " ".repeat(width - cell.chars().count());
                let colour = if number == 0 { Some(Look::Head) } else { look(title, cell) };
                match colour.filter(|_| has_colours) {
                    Some(colour) => format!("{}{room}", colour.paint(cell)),
                    None => format!("{cell}{room}"),
                }
            });
            writeln!(stdout, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        stdout.flush()
    }

    /// Shows an instant: to people how long ago it was or is ahead, to programs as it is.
    pub(crate) fn time(self, time: Option<&Timestamp>) -> String {
        match time {
            Some(time) if self.is_terminal() => relative(time, SystemTime::now()),
            Some(time) => time.to_string(),
            None => String::new(),
        }
    }

    /// Prints an object: one line with --json, else one line per field.
    pub(crate) fn object(self, value: &Value) -> io::Result<()> {
        let mut stdout = BufWriter::new(io::stdout().lock());
        let Some(fields) = value.as_object().filter(|_| !self.json) else {
            writeln!(stdout, "{}", line(value))?;
            return stdout.flush();
        };
        let width = fields.keys().map(String::len).max().unwrap_or(0);
        for (name, value) in fields {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            writeln!(stdout, "{name:<width$}  {}", harmless(&text, false))?;
        }
        stdout.flush()
    }
}

/// Returns true if stdout may be coloured: it is a terminal, and `NO_COLOR` is not set.
pub(crate) fn has_colours() -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !is_refused
}

/// How a text looks on a terminal with colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    Head,
    Good,
    Note,
    Bad,
}

impl Look {
    /// Returns the text with the sequences that make it look so.
    pub(crate) fn paint(self, text: &str) -> String {
        match self {
            Self::Head => text.bold().to_string(),
            Self::Good => text.green().to_string(),
            Self::Note => text.yellow().to_string(),
            Self::Bad => text.red().to_string(),
        }
    }
}

/// Returns how a cell looks: states stand out, whatever else is called like one does not.
fn look(title: &str, cell: &str) -> Option<Look> {
    match (title, cell) {
        ("HEALTH", "ok") => Some(Look::Good),
        ("HEALTH", "shutting down") | ("STATE", "paused" | "delayed" | "blocked") => {
            Some(Look::Note)
        }
        ("HEALTH", _) => Some(Look::Bad),
        _ => None,
    }
}

/// Returns how far an instant is from `now`: `5m 2s ago`, `in 3h`.
fn relative(time: &Timestamp, now: SystemTime) -> String {
    let Ok(time) = SystemTime::try_from(*time) else { return time.to_string() };
    match now.duration_since(time) {
        Ok(ago) if ago.as_secs() == 0 => "now".to_owned(),
        Ok(ago) => format!("{} ago", values::about(ago)),
        Err(ahead) if ahead.duration().as_secs() == 0 => "now".to_owned(),
        Err(ahead) => format!("in {}", values::about(ahead.duration())),
    }
}

/// Returns JSON as text on one line. Control characters that JSON allows to stand for themselves are escaped too.
pub(crate) fn line(value: &Value) -> String {
    let text = value.to_string();
    if !text.chars().any(controls) {
        return text;
    }
    // They stand within texts only.
    text.chars().fold(String::new(), |mut line, c| {
        if controls(c) {
            let _ = write!(line, "\\u{:04x}", c as u32);
        } else {
            line.push(c);
        }
        line
    })
}

/// Returns text with what would control a terminal escaped; line breaks and tabs may stay.
pub(crate) fn harmless(text: &str, lines: bool) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        if controls(c) && !(lines && matches!(c, '\n' | '\t')) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        shown
    })
}

/// Returns true for what terminals carry out in place of showing it, and for what makes text look as it is not: control
/// characters, and the marks that turn the direction of writing.
fn controls(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `1 item`, `2 items`.
pub(crate) fn items(n: impl Into<i128>) -> String {
    match n.into() {
        1 => "1 item".to_owned(),
        n => format!("{n} items"),
    }
}

/// The beginning of a payload, on one line.
pub(crate) fn preview(payload: &[u8], width: usize) -> String {
    let text = String::from_utf8_lossy(&payload[..payload.len().min(4 * width)]);
    let line: String =
        text.chars().map(|c| if controls(c) { ' ' } else { c }).take(width).collect();
    if line.chars().count() == width { line + "…" } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The title of the window, the colour, the cursor by a C1 control character, the direction of writing.
    const HOSTILE: &str = "a\u{1b}]0;title\u{7}b\u{1b}[31mc\u{9b}2Jd\u{202e}e\r\n\tf\u{7f}";

    #[test]
    fn nothing_that_is_printed_controls_a_terminal() {
        let shown = harmless(HOSTILE, true);
        assert!(shown.chars().all(|c| !controls(c) || matches!(c, '\n' | '\t')), "{shown:?}");
        assert!(shown.contains("a\\u{1b}]0;title"), "{shown}");
        assert!(!harmless(HOSTILE, false).chars().any(controls));
        assert!(!preview(HOSTILE.as_bytes(), 60).chars().any(controls));
        assert_eq!(harmless("plain, äöü, 日本語", false), "plain, äöü, 日本語");
    }

    #[test]
    fn instants_are_shown_to_people_as_distances() {
        let time = Timestamp { seconds: 1_000, nanos: 0 };
        let at = |seconds| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        for (now, shown) in [(1_302, "5m 2s ago"), (1_000, "now"), (940, "in 1m")] {
            assert_eq!(relative(&time, at(now)), shown);
        }
    }

    #[test]
    fn only_states_are_coloured() {
        assert_eq!(look("HEALTH", "ok"), Some(Look::Good));
        assert_eq!(look("STATE", "paused"), Some(Look::Note));
        assert_eq!(look("QUEUE", "paused"), None);
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = serde_json::json!({ "payload": HOSTILE });
        let text = line(&value);
        assert!(!text.chars().any(controls), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
