//! Flipped bytes in the files of an SQLite store: the broker must refuse the file or name the damage, and nothing wrong
//! may be delivered.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use sluicegate_proto::v1::NewItem;
use tonic::Code;

use crate::{
    dice::Dice,
    harness::{Api, Launch, duration},
    plan::{Blow, Fault},
};

/// Pushes, and items in each.
const PUSHES: usize = 40;
const BATCH: usize = 10;
/// How many items are committed before the damage.
const COMMITTED: i32 = 100;
const QUEUE: &str = "work";
/// How long a damaged store may refuse calls that are to be repeated.
const LIMIT: Duration = Duration::from_secs(20);
/// What messages about damage say.
const NAMES: [&str; 6] =
    ["damage", "corrupt", "malformed", "checksum", "has lost", "not a database"];

fn names_damage(text: &str) -> bool {
    NAMES.iter().any(|name| text.contains(name))
}

/// Damages a store of its own, and returns what is wrong with how it is served afterwards.
pub(crate) async fn flip(blow: Blow) -> Option<String> {
    let dice = Dice::new(blow.seed, 0, 0);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("items.db");
    let launch = Launch::new().flag("store", &format!("sqlite:{}", file.display()));
    let broker = launch.start().await;
    let api = broker.api().await;
    let payload = |number: usize| format!("item {number} {}", "x".repeat(number % 400));
    let mut stored = HashMap::new();
    for push in 0..PUSHES {
        let items: Vec<NewItem> = (push * BATCH..(push + 1) * BATCH)
            .map(|number| NewItem { payload: payload(number).into(), ..NewItem::default() })
            .collect();
        let payloads: Vec<_> = items.iter().map(|item| item.payload.clone()).collect();
        let results = api.push_items(QUEUE, items).await;
        stored.extend(results.into_iter().map(|result| result.id).zip(payloads));
    }
    let committed = api.reserve_now(QUEUE, COMMITTED).await;
    let receipts: Vec<&str> = committed.iter().map(|one| one.receipt.as_str()).collect();
    api.commit(&receipts).await;
    for delivery in &committed {
        stored.remove(&delivery.item.as_ref().expect("an item").id);
    }
    let target = if blow.fault == Fault::FlipFile {
        broker.stop().await; // which empties the log
        file
    } else {
        broker.kill();
        folder.path().join("items.db-wal")
    };
    let flipped = flip_bytes(&target, &dice);
    let wrong = serve(&launch, &stored).await;
    wrong.map(|wrong| format!("{} {flipped}: {wrong}", blow.fault.name()))
}

/// Flips bits, and says which.
fn flip_bytes(file: &Path, dice: &Dice) -> String {
    let mut bytes = fs::read(file).expect("the file");
    let last = bytes.len() as u64 - 1;
    let count = dice.number(1, 8);
    let mut flipped = Vec::new();
    for _ in 0..count {
        let (at, bit) = (dice.number(0, last) as usize, dice.number(0, 7));
        bytes[at] ^= 1 << bit;
        flipped.push(format!("bit {bit} of byte {at}"));
    }
    fs::write(file, bytes).expect("the file");
    format!("({} of {})", flipped.join(", "), last + 1)
}

/// Serves what is left, and returns what is wrong with it.
async fn serve(launch: &Launch, stored: &HashMap<String, bytes::Bytes>) -> Option<String> {
    let broker = match launch.try_start().await {
        Ok(broker) => broker,
        Err(why) if why.contains("exit status") && names_damage(&why) => return None,
        Err(why) => return Some(format!("it does not start, and does not say why: {why}")),
    };
    let api = broker.api().await;
    let (mut seen, mut refusals, begun) = (HashSet::new(), Vec::new(), Instant::now());
    let mut is_named = false;
    while begun.elapsed() < LIMIT {
        match take(&api).await {
            Ok(items) if items.is_empty() => break,
            Ok(items) => {
                for (id, payload) in items {
                    if stored.get(&id) != Some(&payload) {
                        return Some(format!("{id} is delivered and was not stored: {payload:?}"));
                    }
                    if !seen.insert(id.clone()) {
                        return Some(format!("{id} is delivered after its commit was answered"));
                    }
                }
            }
            Err(status) => {
                is_named |= status.code() == Code::DataLoss;
                refusals.push(status.to_string());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    let missing = stored.keys().filter(|id| !seen.contains(*id)).count();
    let log = broker.log();
    is_named |= log
        .lines()
        .any(|line| (line.contains(" WARN ") || line.contains(" ERROR ")) && names_damage(line));
    if log.contains("panicked at") {
        return Some(format!("the broker panicked: {log}"));
    }
    if missing > 0 && !is_named {
        refusals.dedup();
        return Some(format!(
            "{missing} of {} items are missing, and nobody says why; refusals: {refusals:?}; log: {log}",
            stored.len()
        ));
    }
    None
}

/// Takes some items, and commits them.
async fn take(api: &Api) -> Result<Vec<(String, bytes::Bytes)>, tonic::Status> {
    let request = sluicegate_proto::v1::ReserveRequest {
        queue: QUEUE.to_owned(),
        max_items: 100,
        wait: duration(Duration::from_millis(200)),
        lease: duration(Duration::from_mins(1)),
        consumer: String::new(),
    };
    let deliveries = api.queue.clone().reserve(request).await?.into_inner().deliveries;
    let receipts: Vec<&str> = deliveries.iter().map(|one| one.receipt.as_str()).collect();
    let items = deliveries
        .iter()
        .filter_map(|one| one.item.as_ref())
        .map(|item| (item.id.clone(), item.payload.clone()));
    let items: Vec<_> = items.collect();
    if !receipts.is_empty() {
        api.try_commit(&receipts).await?;
    }
    Ok(items)
}
