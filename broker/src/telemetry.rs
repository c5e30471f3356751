//! The log: to standard error, as text for people or JSON for machines.

use std::io::{self, IsTerminal};

use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum LogFormat {
    /// A line of text per event, coloured on a terminal.
    #[default]
    Text,
    /// A JSON object per line.
    Json,
}

/// The reason why the log could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TelemetryError {
    /// The filter does not parse.
    #[error("log filter: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// This process has a log already.
    #[error("log: {0}")]
    Installed(Box<dyn std::error::Error + Send + Sync>),
}

/// Reads a filter: a level (`info`) or levels by module (`info,sluicegate_broker::signals=debug`). Without a level of its own,
/// the HTTP/2 library logs errors alone: it warns of each connection that a client abuses, thousands of times a minute.
pub(crate) fn parse_filter(text: &str) -> Result<Targets, TelemetryError> {
    let quiet = if text.trim() == "off" { "" } else { "h2=error," };
    Ok(format!("{quiet}{text}").parse()?)
}

/// Sets up the log of this process. Call it once, before anything is logged.
pub(crate) fn init(format: LogFormat, filter: &str) -> Result<(), TelemetryError> {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(format == LogFormat::Text && io::stderr().is_terminal());
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let filter = parse_filter(filter)?;
    let log = tracing_subscriber::registry().with(lines.with_filter(filter));
    log.try_init().map_err(|error| TelemetryError::Installed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_checked() {
        for good in ["info", "warn,sluicegate_broker::signals=debug", "off"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        let directives = |text| parse_filter(text).unwrap().to_string();
        assert!(directives("info").contains("h2=error"));
        assert!(!directives("info,h2=debug").contains("h2=error"));
        assert_eq!(directives("off"), "off");
        for bad in ["a=b=c", "sluicegate_broker=loudly", "=="] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }
}
