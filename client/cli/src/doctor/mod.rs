//! `sluice doctor`: what is wrong with the connection, the brokers and the queues, and what to do about it.

mod brokers;
mod queues;
mod reach;

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    context::Context,
    failure::Failure,
    output::{self, Look, harmless},
    values,
};

/// The command line of `sluice doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The exit code is 1 if something is wrong; notes alone leave it at 0.")]
pub(crate) struct Args {
    /// How long to watch the queues, to see which of them grow
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = values::duration)]
    sample: Duration,
}

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// As it should be.
    Good,
    /// To know, and perhaps meant to be so.
    Note,
    /// Something has to be done.
    Wrong,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Wrong => "wrong",
        }
    }

    fn look(self) -> Look {
        match self {
            Self::Good => Look::Good,
            Self::Note => Look::Note,
            Self::Wrong => Look::Bad,
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    level: Level,
    /// A broker's address, a broker or a queue.
    subject: String,
    text: String,
    /// What to do; empty if nothing has to be done.
    advice: String,
}

impl Finding {
    fn new(
        level: Level,
        subject: &str,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { level, subject: subject.to_owned(), text: text.into(), advice: advice.into() }
    }

    fn good(subject: &str, text: impl Into<String>) -> Self {
        Self::new(Level::Good, subject, text, "")
    }

    fn note(subject: &str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(Level::Note, subject, text, advice)
    }

    fn wrong(subject: &str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(Level::Wrong, subject, text, advice)
    }

    fn json(&self) -> Value {
        let mut value =
            json!({ "level": self.level.name(), "subject": self.subject, "finding": self.text });
        if !self.advice.is_empty() {
            value["advice"] = self.advice.as_str().into();
        }
        value
    }

    /// One line, and below it what to do.
    fn line(&self, has_colours: bool) -> String {
        let level = format!("{:<5}", self.level.name());
        let level = if has_colours { self.level.look().paint(&level) } else { level };
        let subject = harmless(&self.subject, false);
        let text = harmless(&self.text, true);
        let advice = if self.advice.is_empty() {
            String::new()
        } else {
            format!("\n       {}", harmless(&self.advice, true))
        };
        format!("{level}  {subject}: {text}{advice}")
    }
}

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let mut show = |found: Vec<Finding>| -> Result<(), Failure> {
        for finding in &found {
            context.output.painted(&finding.json(), &finding.line(output::has_colours()))?;
        }
        findings.extend(found);
        Ok(())
    };
    let mut working = None;
    for url in context.connection()?.server {
        let reached = reach::examine(context, &url).await?;
        show(reached.findings)?;
        working = working.or(reached.client);
    }
    if let Some(client) = working {
        show(brokers::examine(&client).await?)?;
        show(queues::examine(&client, args.sample).await?)?;
    }
    if findings.iter().any(|finding| finding.level == Level::Wrong) {
        return Err(Failure::Unwell);
    }
    Ok(())
}
