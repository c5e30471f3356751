//! Simulations: the promises hold, and a seed says all.

use std::{
    collections::HashSet,
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
};

use sluicegate_checker::history::{Answer, Event, Request, What};
use sluicegate_sim::{Weather, simulate};

/// Number of seeds that are run with faults if `SIM_SEEDS` does not name another one. What a
/// development build manages in a minute or two.
const SEEDS: u64 = 200;

/// Without faults the promises hold.
#[test]
fn one_broker_without_faults_keeps_the_promises() {
    for seed in 1..=8 {
        let outcome = simulate(seed, Weather::Fair);
        assert!(outcome.report.is_clean(), "seed {seed}:\n{}", outcome.report);
    }
}

/// With brokers that are killed, calls that are lost and all the rest they hold as well. Each seed has a process of its own, in
/// which it is the same simulation each time.
#[test]
fn brokers_with_faults_keep_the_promises() {
    let seeds = std::env::var("SIM_SEEDS").ok().and_then(|text| text.parse().ok());
    let (last, next) = (seeds.unwrap_or(SEEDS), AtomicU64::new(1));
    let run = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed > last {
                return;
            }
            keeps_the_promises(seed);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run))));
}

/// Batches that are pushed several at a time are delivered directly, and in their order. These are the seeds, of the first 200, that notice a broker that hands
/// out first what is stored first.
#[test]
fn bursts_of_batches_keep_the_promises() {
    for seed in [59, 81, 89, 117, 139, 144, 192] {
        keeps_the_promises_in(&["--bursts"], seed);
    }
}

/// Large pushes wait until they can go directly, and those that come meanwhile wait behind them. Of the first 15 seeds 7 notices a broker in which these do not.
#[test]
fn bursts_of_large_batches_keep_the_promises() {
    for seed in [2, 7] {
        keeps_the_promises_in(&["--large"], seed);
    }
}

/// Of the first 45 seeds 35 and 39 notice a broker that commits what its consumer has rolled back, if the rollback fails; of the first 12 ten notice one that commits an
/// item more than it is asked to.
#[test]
fn commits_of_all_up_to_one_keep_the_promises() {
    for seed in [3, 35, 39] {
        keeps_the_promises_in(&["--up-to"], seed);
    }
}

/// A simulation in which they failed would break no promise either.
#[test]
fn batches_on_push_streams_are_stored() {
    let history = simulate(1, Weather::Bursts).history;
    let pushed_on_a_stream = |event: &Event| match &event.what {
        What::Start { call, request: Request::Push { stream: Some(_), .. }, .. } => Some(*call),
        _ => None,
    };
    let sent: HashSet<_> = history.iter().filter_map(pushed_on_a_stream).collect();
    let is_stored = |event: &&Event| match &event.what {
        What::End { call, answer: Answer::Ok(_) } => sent.contains(call),
        _ => false,
    };
    let stored = history.iter().filter(is_stored).count();
    assert!(stored > 100, "{stored} of {}", sent.len());
}

#[test]
fn seeds_that_found_a_fault_keep_the_promises() {
    // A stream was handed more bytes than it may hold, by a reserve that was under way while others came.
    keeps_the_promises(309);
    // An item that expired while its pop was being committed counted as popped.
    keeps_the_promises(1_029_812);
    // A push that was answered after the lease of its item took the item from the stream that held it by then.
    keeps_the_promises(2_000_336);
}

fn keeps_the_promises(seed: u64) {
    keeps_the_promises_in(&[], seed);
}

fn keeps_the_promises_in(weather: &[&str], seed: u64) {
    let mut sim = Command::new(env!("CARGO_BIN_EXE_sim"));
    let output = sim.args(weather).args(["--seed", &seed.to_string()]);
    let output = output.output().expect("the program");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "seed {seed}:\n{text}");
}

/// Two runs of a seed are the same, step by step, each in a process of its own.
#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 1..=4 {
        let run = || {
            let mut sim = Command::new(env!("CARGO_BIN_EXE_sim"));
            let output = sim.args(["--seed", &format!("{seed}")]).output().expect("the program");
            let text = String::from_utf8(output.stdout).expect("text");
            text.lines().next().expect("the trace").to_owned()
        };
        let (first, second) = (run(), run());
        assert!(first.contains("trace"), "{first}");
        assert_eq!(first, second, "seed {seed}");
    }
}
