//! Runs simulations, one seed after the other: `sim [--seeds N] [--from S] [--seed S] [--fair] [--history]`.

use std::{
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use sluicegate_sim::{Outcome, Weather, simulate};

struct Options {
    seeds: u64,
    first: u64,
    weather: Weather,
    /// One simulation at a time, with all that happened.
    shows_history: bool,
    threads: usize,
}

fn options() -> Option<Options> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let weather = Weather::Seeded;
    let mut options = Options { seeds: 200, first: 1, weather, shows_history: false, threads };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse::<u64>().ok());
        match argument.as_str() {
            "--seeds" => options.seeds = number()?,
            "--seed" => (options.first, options.seeds) = (number()?, 1),
            "--from" => options.first = number()?,
            "--threads" => options.threads = number()? as usize,
            "--fair" => options.weather = Weather::Fair,
            "--history" => options.shows_history = true,
            _ => return None,
        }
    }
    Some(options)
}

fn show(outcome: &Outcome, options: &Options) {
    if options.seeds == 1 {
        println!(
            "{} steps, {} events, {:.1} s of simulated time, trace {:016x}",
            outcome.steps,
            outcome.history.len(),
            outcome.simulated.as_secs_f64(),
            outcome.digest
        );
    }
    if options.shows_history {
        for event in &outcome.history {
            println!("{event:?}");
        }
    }
    if !outcome.report.is_clean() {
        println!("seed {}:\n{}", outcome.seed, outcome.report);
    }
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("sim [--seeds N] [--from S] [--seed S] [--threads N] [--fair] [--history]");
        return ExitCode::FAILURE;
    };
    let (began, next, steps) = (Instant::now(), AtomicU64::new(options.first), AtomicU64::new(0));
    let bad = parking_lot::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= options.first + options.seeds {
                        return;
                    }
                    let outcome = simulate(seed, options.weather);
                    steps.fetch_add(outcome.steps, Ordering::Relaxed);
                    let mut bad = bad.lock();
                    show(&outcome, &options);
                    if !outcome.report.is_clean() {
                        bad.push(seed);
                    }
                }
            });
        }
    });
    let (took, steps) = (began.elapsed().as_secs_f64(), steps.into_inner());
    let mut bad = bad.into_inner();
    bad.sort_unstable();
    println!(
        "{} seeds, {steps} steps in {took:.1} s ({:.0} a second), {} with violations: {bad:?}",
        options.seeds,
        steps as f64 / took,
        bad.len()
    );
    if bad.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
