//! Writing to stdout, as text or JSON. A closed pipe is an error that ends the command quietly.

use std::io::{self, BufWriter, Write};

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

    /// Prints one line: `value` with --json, else `text`.
    pub(crate) fn one(self, value: &Value, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.json { writeln!(stdout, "{value}") } else { writeln!(stdout, "{text}") }
    }

    /// Prints an item: all of it with --json, else its payload as it is, and a newline.
    pub(crate) fn payload(self, item: &Item) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.json {
            writeln!(stdout, "{}", json::item(item))
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
                writeln!(stdout, "{value}")?;
            }
            return stdout.flush();
        }
        let mut lines: Vec<Vec<String>> =
            vec![head.iter().map(ToString::to_string).collect::<Vec<_>>()];
        lines.extend(rows.into_iter().map(|(_, cells)| cells));
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
            writeln!(stdout, "{value}")?;
            return stdout.flush();
        };
        let width = fields.keys().map(String::len).max().unwrap_or(0);
        for (name, value) in fields {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            writeln!(stdout, "{name:<width$}  {text}")?;
        }
        stdout.flush()
    }
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
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(width).collect();
    if line.chars().count() == width { line + "…" } else { line }
}
