//! Simulations: the promises hold, and a seed says all.

use std::sync::atomic::{AtomicU64, Ordering};

use sluicegate_sim::{Weather, simulate};

/// Number of seeds that are run with faults if `SIM_SEEDS` does not name another one. What a
/// development build manages in half a minute.
const SEEDS: u64 = 40;

/// Without faults the promises hold.
#[test]
fn one_broker_without_faults_keeps_the_promises() {
    for seed in 1..=8 {
        let outcome = simulate(seed, Weather::Fair);
        assert!(outcome.report.is_clean(), "seed {seed}:\n{}", outcome.report);
    }
}

/// With brokers that are killed, calls that are lost and all the rest they hold as well.
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
            let outcome = simulate(seed, Weather::Seeded);
            assert!(outcome.report.is_clean(), "seed {seed}:\n{}", outcome.report);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run))));
}

/// Two runs of a seed are the same, step by step.
#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 1..=4 {
        let (first, second) = (simulate(seed, Weather::Seeded), simulate(seed, Weather::Seeded));
        let differs = first.history.iter().zip(&second.history).position(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}: the histories differ at this event");
        assert_eq!((first.steps, first.digest), (second.steps, second.digest), "seed {seed}");
    }
}
