//! Runs every transition of the MongoDB store with a fault at each of its commands: see README.md.

#![allow(clippy::large_futures)] // a case is polled from one place, which can hold it

mod campaign;
mod case;
mod clients;
mod faults;
#[path = "../harness/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
// shared with the end-to-end suite, which uses all of it
mod harness;
mod inspection;
mod lane;
mod proxy;
mod transitions;
mod wire;

use std::process::ExitCode;

use campaign::Choice;

const USAGE: &str = "usage: crash_points [--transition NAME] [--fault NAME] [--at K] [--racing] [--every] [--lanes N]
NAME may be several names, with commas between them. Without options: all transitions, all faults, at each command.";

fn choice() -> Result<Choice, String> {
    let mut choice = Choice::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is not a number"));
        match argument.as_str() {
            "--transition" => choice.transition = Some(value()?),
            "--fault" => choice.fault = Some(value()?),
            "--at" => choice.at = Some(number(value()?)?),
            "--lanes" => choice.lanes = number(value()?)?,
            "--racing" => choice.races = true,
            "--every" => choice.every = true,
            _ => return Err(format!("unknown option {argument}\n{USAGE}")),
        }
    }
    Ok(choice)
}

fn main() -> ExitCode {
    let choice = match choice() {
        Ok(choice) => choice,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    if runtime.block_on(campaign::run(choice)) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
