//! Breaks real brokers and servers under load, by seed, and checks every promise: see README.md.
//!
//! # Layout
//! `plan` is what a seed decides, `world` the servers and brokers and what befalls them, `clock` their clocks, `members` those of a
//! MongoDB set, `link` the proxies between them, `load` the clients, `crowd` what goes on beside them, `cycle` puts these together,
//! `evidence` is what is kept of brokers and servers that stand still, `table` counts.

#![allow(clippy::large_futures)] // a cycle is polled from one place, which can hold it

mod clock;
mod crowd;
mod cycle;
mod damage;
mod dice;
mod evidence;
#[path = "../../harness/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
// shared with the end-to-end suite, which uses all of it
mod harness;
mod link;
mod load;
mod members;
mod plan;
mod signals;
mod table;
mod world;

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Instant,
};

use clap::{CommandFactory as _, Parser, ValueEnum as _, error::ErrorKind};
use tokio_util::sync::CancellationToken;

use crate::{
    crowd::Crowd,
    cycle::Outcome,
    plan::{Fault, Plan, Store},
    table::Table,
    world::World,
};

/// Breaks real brokers and servers under load, and checks every promise
#[derive(Debug, Parser)]
#[command(name = "faults")]
struct Args {
    /// How many cycles, on each store
    #[arg(long, default_value = "10")]
    cycles: u64,
    /// The first cycle, to run one again
    #[arg(long, default_value = "0")]
    from: u64,
    /// Decides which faults happen, and when
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Where the brokers keep their items; all three in turn if none is named
    #[arg(long, value_enum)]
    store: Option<Store>,
    /// Only these faults
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Fault>,
    /// How many brokers share a MongoDB
    #[arg(long, default_value = "3")]
    brokers: usize,
    #[command(flatten)]
    crowd: crowd::Size,
    /// Where the histories of cycles with violations are kept
    #[arg(long, default_value = "target/faults")]
    histories: PathBuf,
    /// Only shows which faults would happen
    #[arg(long)]
    plan: bool,
}

impl Args {
    /// Returns the faults for a store.
    fn faults(&self, store: Store) -> Vec<Fault> {
        let all = Fault::value_variants().iter().copied();
        let is_wanted = |fault: &Fault| self.only.is_empty() || self.only.contains(fault);
        all.filter(|fault| fault.can_happen_on(store)).filter(is_wanted).collect()
    }

    /// Keeps the history of a cycle, what could be seen while brokers did not serve, and returns the name of the first.
    fn keep(&self, store: Store, cycle: u64, outcome: &Outcome) -> std::io::Result<PathBuf> {
        std::fs::create_dir_all(&self.histories)?;
        let path = self.histories.join(format!("{store}-{}-{cycle}.jsonl", self.seed));
        let mut file = BufWriter::new(File::create(&path)?);
        for event in &outcome.history {
            serde_json::to_writer(&mut file, event)?;
            file.write_all(b"\n")?;
        }
        file.flush()?;
        if !outcome.evidence.is_empty() {
            std::fs::write(path.with_extension("txt"), &outcome.evidence)?;
        }
        Ok(path)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(wrong) = args.crowd.wrong() {
        Args::command().error(ErrorKind::MissingRequiredArgument, wrong).exit();
    }
    let stores =
        args.store.map_or(vec![Store::Sqlite, Store::Mongodb, Store::Set], |one| vec![one]);
    let stop = CancellationToken::new();
    let asked = stop.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        asked.cancel();
    });
    let mut good = true;
    for store in stores {
        let asked_again = async {
            stop.cancelled().await;
            let _ = tokio::signal::ctrl_c().await;
        };
        tokio::select! {
            clean = campaign(&args, store, &stop) => good &= clean,
            // What was started ends with the values that hold it.
            () = asked_again => return ExitCode::FAILURE,
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the cycles on a store until it is to stop, and returns whether nothing was found.
async fn campaign(args: &Args, store: Store, stop: &CancellationToken) -> bool {
    let mut faults = args.faults(store);
    if faults.is_empty() || stop.is_cancelled() {
        return true;
    }
    let plans = |faults: &[Fault]| -> Vec<(u64, Plan)> {
        let cycles = args.from..args.from + args.cycles;
        cycles.map(|cycle| (cycle, Plan::of(args.seed, cycle, faults))).collect()
    };
    if args.plan {
        for (cycle, plan) in plans(&faults) {
            println!("{store} {cycle}: {plan}");
        }
        return true;
    }
    let world = Arc::new(World::start(store, args.brokers, &args.crowd).await);
    if world.disk.as_ref().is_some_and(|disk| !disk.is_small) {
        println!("disk-full is left out: this process may not mount a disk of its own");
        faults.retain(|fault| *fault != Fault::DiskFull);
    }
    let crowd = Crowd::start(Arc::clone(&world), args.crowd.clone()).await;
    let (mut table, begun) = (Table::default(), Instant::now());
    for (cycle, plan) in plans(&faults) {
        if stop.is_cancelled() {
            break;
        }
        print!("{store} {cycle}: {plan}: ");
        let _ = std::io::stdout().flush();
        let mut outcome = cycle::run(&world, &plan, args.seed, cycle).await;
        outcome.wrong.extend(crowd.try_out(args.seed, cycle).await);
        let recovered: Vec<String> = outcome
            .recovered
            .iter()
            .map(|(_, time)| format!("{:.1}", time.as_secs_f64()))
            .collect();
        println!(
            "recovered in {} s, {} items, {} wrong, {:.1} s ({:.0} s)",
            recovered.join(" and "),
            outcome.items,
            outcome.wrong.len(),
            outcome.took.as_secs_f64(),
            begun.elapsed().as_secs_f64()
        );
        table.add(&outcome, plan.faults());
        if !outcome.wrong.is_empty() {
            for wrong in &outcome.wrong {
                println!("FOUND: {wrong}");
            }
            for node in &world.nodes {
                for line in node.complaints().await.iter().rev().take(20).rev() {
                    println!("{}: {line}", node.name());
                }
            }
        }
        if !outcome.wrong.is_empty() || !outcome.evidence.is_empty() {
            let kept = match args.keep(store, cycle, &outcome) {
                Ok(path) => world.keep_logs(&path.with_extension("")).await.map(|()| path),
                Err(error) => Err(error),
            };
            match kept {
                Ok(path) => println!("the history is in {}, logs beside it", path.display()),
                Err(error) => println!("the history and the logs are not all kept: {error}"),
            }
        }
    }
    if let Some(wrong) = crowd.at_rest().await {
        println!("FOUND: {wrong}");
        table.wrong += 1;
    }
    table.resynced = world.resynced().await;
    println!("{store}, seed {}: {table}", args.seed);
    table.wrong == 0
}
