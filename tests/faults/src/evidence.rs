//! What can be seen of brokers and servers that stand still, for people to read: it is gone once they go on.

use std::{collections::BTreeMap, fmt::Write as _, fs, time::Duration};

use futures_util::StreamExt as _;
use mongodb::{
    Client,
    bson::{Document, doc},
    options::ClientOptions,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::world::World;

/// How long each answer may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// What is said of the whole machine: processors, disks, and who waits for them.
const MACHINE: [&str; 5] = [
    "/proc/loadavg",
    "/proc/diskstats",
    "/proc/pressure/cpu",
    "/proc/pressure/io",
    "/proc/pressure/memory",
];
/// The parts of `serverStatus` that are kept.
const PARTS: [&str; 6] =
    ["connections", "globalLock", "network", "opcounters", "transactions", "flowControl"];

/// Returns what can be seen now.
pub(crate) async fn gather(world: &World, since: Duration) -> String {
    let mut text = format!("==== nothing for {:.0} s\n", since.as_secs_f64());
    for path in MACHINE {
        // Not every kernel has all of them.
        let _ = write!(text, "---- {path}\n{}", fs::read_to_string(path).unwrap_or_default());
    }
    let _ = write!(text, "---- connections with bytes that nobody has read\n{}", unread());
    for (name, process, metrics) in world.brokers().await {
        let _ = writeln!(text, "---- {name}: {}", threads(process));
        let _ = writeln!(text, "{}", page(metrics.trim_start_matches("http://")).await);
    }
    for (process, address) in world.servers().await {
        let _ = writeln!(
            text,
            "---- mongod at {address}: {}",
            process.map(threads).unwrap_or_default()
        );
        let _ = writeln!(text, "{}", server(&address).await);
    }
    text
}

/// Returns how much processor time the process has used, in ticks, and how many of its threads are in which state and wait where.
fn threads(process: u32) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let stat = read("stat");
        let state = stat.rsplit_once(") ").map_or("?", |(_, rest)| &rest[..1]);
        *counts.entry(format!("{state} {}", read("wchan"))).or_default() += 1;
    }
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let used: Vec<&str> =
        stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2).collect();
    format!("process {process}, used {used:?}, threads {counts:?}")
}

/// Returns the lines of `/proc/net/tcp` about connections with bytes in a queue.
fn unread() -> String {
    let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let is_held_up = |line: &&str| {
        line.split_whitespace().nth(4).is_some_and(|queues| queues != "00000000:00000000")
    };
    table.lines().skip(1).filter(is_held_up).fold(String::new(), |text, line| text + line + "\n")
}

/// Returns the metrics of a broker, but for those of single queues.
async fn page(address: &str) -> String {
    let read = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: broker\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    match timeout(PATIENCE, read).await {
        Ok(Ok(text)) => {
            let is_kept = |line: &&str| {
                !line.starts_with('#') && !line.contains("queue=\"") && !line.contains("_bucket")
            };
            text.lines().filter(is_kept).collect::<Vec<_>>().join("\n")
        }
        Ok(Err(error)) => format!("no metrics: {error}"),
        Err(_) => "no metrics in time".to_owned(),
    }
}

/// Returns what a server does and has to say of itself.
async fn server(address: &str) -> String {
    let ask = async {
        let uri = format!("mongodb://{address}/?directConnection=true");
        let mut options = ClientOptions::parse(uri).await?;
        options.server_selection_timeout = Some(PATIENCE);
        let admin = Client::with_options(options)?.database("admin");
        let mut text = String::new();
        let status = admin.run_command(doc! { "serverStatus": 1 }).await?;
        for part in PARTS {
            let _ = writeln!(text, "{part}: {:?}", status.get(part));
        }
        let engine = status.get_document("wiredTiger").cloned().unwrap_or_default();
        for part in ["concurrentTransactions", "cache", "log"] {
            let _ = writeln!(text, "{part}: {:?}", engine.get(part));
        }
        let stages = [doc! { "$currentOp": { "allUsers": true, "idleSessions": true } }];
        let mut operations = admin.aggregate(stages).await?;
        while let Some(operation) = operations.next().await {
            let operation: Document = operation?;
            let _ = writeln!(text, "operation: {operation}");
        }
        mongodb::error::Result::Ok(text)
    };
    match timeout(PATIENCE, ask).await {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => format!("it does not say what it does: {error}"),
        Err(_) => "it does not say in time what it does".to_owned(),
    }
}
