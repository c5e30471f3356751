//! Runs simulations, each seed in a process of its own: `sim [--seeds N] [--from S] [--seed S] [--fair | --bursts | --large | --up-to] [--history]`.

use std::{
    process::{Command, ExitCode, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use sluicegate_sim::{Weather, simulate};

struct Options {
    seeds: u64,
    first: u64,
    weather: Weather,
    /// With all that happened.
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
            "--bursts" => options.weather = Weather::Bursts,
            "--large" => options.weather = Weather::LargeBursts,
            "--up-to" => options.weather = Weather::UpTo,
            "--history" => options.shows_history = true,
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!(
            "sim [--seeds N] [--from S] [--seed S] [--threads N] [--fair | --bursts | --large | --up-to] [--history]"
        );
        return ExitCode::FAILURE;
    };
    if options.seeds == 1 {
        return run_here(&options);
    }
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
                    let (text, is_clean) = run_apart(seed, &options);
                    let count = text.split(' ').next().and_then(|count| count.parse().ok());
                    steps.fetch_add(count.unwrap_or(0), Ordering::Relaxed);
                    let mut bad = bad.lock();
                    if !is_clean {
                        bad.push(seed);
                    }
                    if !is_clean || options.shows_history {
                        println!("{text}");
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

fn run_here(options: &Options) -> ExitCode {
    let outcome = simulate(options.first, options.weather);
    println!(
        "{} steps, {} events, {:.1} s of simulated time, trace {:016x}",
        outcome.steps,
        outcome.history.len(),
        outcome.simulated.as_secs_f64(),
        outcome.digest
    );
    if options.shows_history {
        for event in &outcome.history {
            println!("{event:?}");
        }
    }
    if outcome.report.is_clean() {
        return ExitCode::SUCCESS;
    }
    println!("seed {}:\n{}", outcome.seed, outcome.report);
    ExitCode::FAILURE
}

/// Runs a seed in a process of its own, and returns what it prints and whether no promise was broken. Within one process a seed is
/// another simulation after others: tokio takes the order in which it wakes the receivers of a `watch` from the number of its runtimes too.
fn run_apart(seed: u64, options: &Options) -> (String, bool) {
    let program = std::env::current_exe().expect("the path of this program");
    let mut child = Command::new(program);
    child.args(["--seed", &seed.to_string()]).stderr(Stdio::inherit());
    match options.weather {
        Weather::Fair => _ = child.arg("--fair"),
        Weather::Bursts => _ = child.arg("--bursts"),
        Weather::LargeBursts => _ = child.arg("--large"),
        Weather::UpTo => _ = child.arg("--up-to"),
        Weather::Seeded => {}
    }
    if options.shows_history {
        child.arg("--history");
    }
    let output = child.output().expect("a process");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}
