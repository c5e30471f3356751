//! What a run prints.

use std::io;

use serde_json::{Map, Value};

use crate::output::Output;

/// Rounds to `digits` digits after the decimal point.
pub(crate) fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}

/// The figures of one run, by the keys of the JSON output.
#[derive(Debug)]
pub(crate) struct Report(Map<String, Value>);

impl Report {
    pub(crate) fn new(scenario: &str) -> Self {
        let mut report = Self(Map::new());
        report.put("scenario", scenario);
        report
    }

    pub(crate) fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    /// Prints the report: one line of JSON with --json, else one line per figure.
    pub(crate) fn show(self, output: Output) -> io::Result<()> {
        output.object(&Value::Object(self.0))
    }
}
