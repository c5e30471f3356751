//! One load generator for Sluicegate and its peers. Each system is driven by a client library of its own, and by the same
//! code above the library: one connection for the producer and one for the consumer, the same batches, bounds and payloads.
//! Prints one line of JSON per measurement.
//!
//! # Layout
//! `load` makes the load, `systems` are the systems under it, `ledger` records which item arrived, `processes` reads the
//! processor time of the servers.

mod ledger;
mod load;
mod processes;
mod systems;

use clap::{Parser, ValueEnum};
use systems::{Address, Kind};

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "peers")]
struct Args {
    /// The system to measure
    #[arg(value_enum)]
    system: Kind,
    /// Its address: a URL, or HOST:PORT
    address: String,
    /// Another broker on the same store, for consumers (Sluicegate)
    #[arg(long, value_name = "URL")]
    consume_address: Option<String>,
    /// A process of the system; its processor time is reported
    #[arg(long, value_name = "PID")]
    server_pid: Vec<u32>,
    /// What to measure, in this order
    #[arg(long, value_delimiter = ',', required = true)]
    measure: Vec<Measurement>,
    /// How long each measurement takes
    #[arg(long, default_value = "4")]
    seconds: f64,
    /// Items of churn
    #[arg(long, default_value = "100000")]
    churn: u64,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Measurement {
    /// Items passed through before anything is measured, so that the system has a history
    Churn,
    /// Batches of 500, pushed as fast as possible
    Push,
    /// All of these, taken and settled
    Drain,
    /// Both at once, with at most 5,000 items pushed and not delivered
    Steady,
    /// The same with payloads of 64 KiB
    Large,
    /// 50 callers that each push one item, wait for the answer, and push the next
    Singles,
    /// 50 callers that each take one item, settle it, and take the next
    Workers,
    /// The same with a call for each item, and one that settles it and is answered (Sluicegate)
    Pollers,
    /// 200 single items a second to an idle consumer
    Latency,
    /// 200 single items a second until the system says that they are stored, without a consumer
    Confirm,
}

impl Measurement {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    // In a task of the runtime, as what uses a client mostly is: outside of it each wake-up crosses threads.
    tokio::spawn(measure(Args::parse())).await?
}

async fn measure(args: Args) -> anyhow::Result<()> {
    let address = Address { push: args.address, take: args.consume_address };
    let system = systems::connect(args.system, address).await?;
    let load = load::Load::new(system, args.server_pid, args.seconds, args.churn);
    for measurement in args.measure {
        let mut figures = load.run(measurement).await?;
        figures.insert("measurement".to_owned(), measurement.name().into());
        println!("{}", serde_json::Value::Object(figures));
    }
    Ok(())
}
