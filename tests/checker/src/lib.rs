//! Checks histories of calls against the promises of docs/SEMANTICS.md.
//!
//! A test records what its clients ask and are told ([`Recorder`]), and the checker says which promise was
//! broken, for which item, and by which events ([`check`]). The checker knows nothing of the broker but
//! its API.
//!
//! # Layout
//! * `history`: the events, the recorder, files, text for people.
//! * `messages`: the same from messages of the API (feature `messages`).
//! * `settles`, `batches`: what is sent and told on a `ConsumeStream` and on a `PushStream` (the same feature).
//! * `rules`: one rule per promise.
//! * `checker`: what follows from the events so far. Each file holds the rules of one subject.
//! * `report`: violations and the events that prove them.

#[cfg(feature = "messages")]
pub mod batches;
mod checker;
pub mod history;
#[cfg(feature = "messages")]
pub mod messages;
mod report;
mod rules;
#[cfg(feature = "messages")]
pub mod settles;

use std::{io, path::Path};

pub use checker::{Checker, Options};
pub use history::Recorder;
pub use report::{AsEvent, Report, Violation};
pub use rules::Rule;

use history::Event;

/// Checks a history that is in memory. Calls that have not ended by then have an unknown outcome.
pub fn check(history: &[Event], options: &Options) -> Report {
    let mut checker = Checker::new(options.clone());
    for event in history {
        checker.observe(event.clone());
    }
    let mut report = checker.finish();
    report.explain(history);
    report
}

/// Checks the histories that several processes wrote to files, without reading them into memory.
pub fn check_files(paths: &[&Path], options: &Options) -> io::Result<Report> {
    let mut checker = Checker::new(options.clone());
    for event in history::read_merged(paths)? {
        checker.observe(event?);
    }
    let mut report = checker.finish();
    if !report.is_clean() {
        report.explain(history::read_merged(paths)?.map_while(Result::ok));
    }
    Ok(report)
}
