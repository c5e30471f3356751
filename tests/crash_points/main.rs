//! Runs every transition of a store with a fault at each of its commands or writes: see README.md.

#![allow(clippy::large_futures)] // a case is polled from one place, which can hold it

mod campaign;
mod case;
mod clients;
mod database;
mod faults;
#[path = "../harness/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
// shared with the end-to-end suite, which uses all of it
mod harness;
mod inspection;
mod lane;
mod proxy;
mod sqlite;
mod transitions;
mod wire;

use std::process::ExitCode;

use campaign::Choice;

const USAGE: &str = "usage: crash_points [--sqlite] [--transition NAME] [--fault NAME] [--at K] [--racing] [--every] [--lanes N]
NAME may be several names, with commas between them. Without options: all transitions, all faults, at each command.
With --sqlite: kills at each write of that store, and what a power loss leaves; --every: of every kind, at every write.";

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
            "--sqlite" => choice.sqlite = true,
            _ => return Err(format!("unknown option {argument}\n{USAGE}")),
        }
    }
    Ok(choice)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [option, file, sql] = &arguments[..]
        && option == sqlite::RUN_SQL
    {
        sqlite::run_sql(file, sql);
        return ExitCode::SUCCESS;
    }
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
