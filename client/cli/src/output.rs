//! Writing to stdout, as text or JSON. A closed pipe is an error that ends the command quietly.

use std::{
    fmt::Write as _,
    io::{self, BufWriter, IsTerminal, Write},
};

use serde_json::Value;
use sluicegate_client::proto::Item;

use crate::json;

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

    /// Prints one line: `value` with --json, else `text`.
    pub(crate) fn one(self, value: &Value, text: &str) -> io::Result<()> {
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
        let mut lines: Vec<Vec<String>> =
            vec![head.iter().map(ToString::to_string).collect::<Vec<_>>()];
        let cell = |text: String| harmless(&text, false);
        lines.extend(rows.into_iter().map(|(_, cells)| cells.into_iter().map(cell).collect()));
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
        let widths: Vec<usize> = (0..head.len()).map(|column| width(column).unwrap_or(0)).collect();
        for line in &lines {
            let cells: Vec<String> =
                line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            writeln!(stdout, "{}", cells.join("  ").trim_end())?;
        }
        stdout.flush()
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
    fn json_stays_the_same_json() {
        let value = serde_json::json!({ "payload": HOSTILE });
        let text = line(&value);
        assert!(!text.chars().any(controls), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
