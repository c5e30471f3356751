//! One cycle: load, faults, recovery, rest, and what the checker says.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use sluicegate_checker::{
    Options, Recorder, check,
    history::{Event, What},
};
use sluicegate_proto::v1 as pb;

use crate::{
    evidence,
    load::Load,
    plan::{Blow, Fault, Plan},
    world::{Node, World},
};

/// How long brokers may take to serve again.
const LIMIT: Duration = Duration::from_secs(90);
/// After so long, and again after as long, it is noted what brokers and servers do instead.
const STANDSTILL: Duration = Duration::from_secs(15);
/// How long a probe waits for its item.
const WAIT: Duration = Duration::from_secs(5);
/// The pause before a probe is tried again.
const PAUSE: Duration = Duration::from_millis(20);
/// The calm after the last fault.
const CALM: Duration = Duration::from_millis(300);

/// What came of a cycle.
pub(crate) struct Outcome {
    /// How long each storm took to recover from.
    pub(crate) recovered: Vec<(Vec<Fault>, Duration)>,
    /// What is wrong, for people.
    pub(crate) wrong: Vec<String>,
    /// What could be seen while brokers did not serve.
    pub(crate) evidence: String,
    pub(crate) history: Vec<Event>,
    pub(crate) items: u64,
    pub(crate) took: Duration,
}

/// Runs a cycle.
pub(crate) async fn run(world: &Arc<World>, plan: &Plan, seed: u64, cycle: u64) -> Outcome {
    let begun = Instant::now();
    let mut wrong = Vec::new();
    let load = Load::start(Arc::clone(world), seed, cycle).await;
    let (mut recovered, mut evidence) = (Vec::new(), String::new());
    for storm in &plan.storms {
        let mark = |begins| What::Disturbed { begins, fault: plan.to_string() };
        load.recorder.mark(mark(true));
        let faults = storm.iter().map(|blow| blow.fault).collect();
        match strike(world, storm, &load.recorder, &mut evidence).await {
            Ok(time) => recovered.push((faults, time)),
            Err(node) => wrong.push(format!("{node} does not serve {LIMIT:?} after the faults")),
        }
        load.recorder.mark(mark(false));
    }
    tokio::time::sleep(CALM).await;
    if !load.stop().await {
        wrong.push("a client does not end".to_owned());
    }
    wrong.extend(load.rest().await);
    load.delete().await;
    wrong.extend(world.oddities().await);
    let history = load.recorder.take();
    let report = check(&history, &Options::default());
    if !report.is_clean() {
        wrong.push(report.to_string());
    }
    let (items, took) = (load.items(), begun.elapsed());
    Outcome { recovered, wrong, evidence, history, items, took }
}

/// Lets faults happen side by side, and returns how long the brokers then take to serve again.
async fn strike(
    world: &Arc<World>,
    storm: &[Blow],
    recorder: &Recorder,
    evidence: &mut String,
) -> Result<Duration, String> {
    let blows = storm.iter().map(|blow| async move {
        tokio::time::sleep(blow.after).await;
        world.strike(*blow, recorder).await
    });
    let over = join_all(blows).await.into_iter().max().expect("a storm has a fault");
    tokio::time::sleep_until(over.into()).await;
    let probes = world.nodes.iter().enumerate().map(|(number, node)| async move {
        let other = &world.nodes[(number + 1) % world.nodes.len()];
        let served = tokio::time::timeout(LIMIT, serves(node, other)).await;
        served.map_err(|_| node.name()).map(|at| at.saturating_duration_since(over))
    });
    let served = tokio::select! {
        served = join_all(probes) => served,
        () = watch(world, evidence) => unreachable!("watching has no end"),
    };
    // What is away still, and was not needed, comes back.
    world.clean_up().await;
    let served = served.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(served.into_iter().max().unwrap_or_default())
}

/// Notes for ever what brokers and servers do.
async fn watch(world: &World, evidence: &mut String) {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(STANDSTILL).await;
        let seen = evidence::gather(world, begun.elapsed()).await;
        evidence.push_str(&seen);
    }
}

/// Pushes at one broker and takes at another until both work, and returns when they did.
async fn serves(node: &Node, other: &Node) -> Instant {
    let queue = format!("probe-{}", node.number);
    tokio::join!(push(other, &queue), take(node, &queue));
    Instant::now()
}

async fn push(node: &Node, queue: &str) {
    loop {
        let item = pb::NewItem { payload: "probe".into(), ..pb::NewItem::default() };
        let push =
            pb::PushRequest { queue: queue.to_owned(), items: vec![item], producer: String::new() };
        if node.client.queue_service().push(node.client.request(push)).await.is_ok() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn take(node: &Node, queue: &str) {
    loop {
        let reserve = pb::ReserveRequest {
            queue: queue.to_owned(),
            max_items: 100,
            wait: prost_types::Duration::try_from(WAIT).ok(),
            ..pb::ReserveRequest::default()
        };
        let reserve = node.client.waiting_request(reserve, WAIT);
        if let Ok(taken) = node.client.queue_service().reserve(reserve).await {
            let deliveries = taken.into_inner().deliveries;
            let receipts: Vec<String> = deliveries.into_iter().map(|one| one.receipt).collect();
            let is_taken = !receipts.is_empty();
            let commit = node.client.request(pb::CommitRequest { receipts });
            if is_taken && node.client.queue_service().commit(commit).await.is_ok() {
                return;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
