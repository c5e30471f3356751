//! A broker is killed: acknowledged changes survive, and leased items are delivered again after
//! their leases.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, SystemTime},
};

use sluicegate_proto::v1::{ConsumeRequest, Outcome};

use crate::harness::{Backend, LIMIT, TestStore, at, duration, on_both_backends, text};

on_both_backends!(a_killed_broker_loses_and_doubles_nothing, acknowledged_pushes_survive_a_kill);

const LINES: usize = 300;
const IN_FLIGHT: i32 = 20;

async fn a_killed_broker_loses_and_doubles_nothing(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let lines: Vec<String> = (0..LINES).map(|line| format!("line {line}")).collect();
    for batch in lines.chunks(100) {
        let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
        api.push("lines", &batch).await;
    }

    let request = ConsumeRequest {
        queue: "lines".to_owned(),
        max_in_flight: IN_FLIGHT,
        lease: duration(Duration::from_secs(4)),
        ..ConsumeRequest::default()
    };
    let mut deliveries = api.consume_with(request.clone()).await;
    let mut committed = HashSet::new();
    while committed.len() < LINES / 3 {
        let delivery = deliveries.next().await;
        assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
        assert!(committed.insert(text(&delivery)), "{} came twice", text(&delivery));
    }
    // These items are leased when the broker dies, and perhaps a few more that were being sent.
    let mut leased = HashMap::new();
    for delivery in deliveries.take(5).await {
        leased.insert(text(&delivery), at(delivery.lease_expire_time.as_ref()));
    }
    broker.kill();

    let broker = store.broker().await;
    let api = broker.api().await;
    let mut deliveries = api.consume_with(request).await;
    let mut again = HashSet::new();
    let mut arrived = HashSet::new();
    while arrived.len() < LINES - committed.len() {
        let delivery = deliveries.next().await;
        let now = SystemTime::now();
        let line = text(&delivery);
        let item = delivery.item.as_ref().expect("an item");
        assert!(
            !committed.contains(&line),
            "{line} was delivered after its commit was acknowledged"
        );
        if item.deliveries > 1 {
            again.insert(line.clone());
            assert_eq!(item.attempt, 2, "a lapsed lease is a failed attempt");
        }
        if let Some(lease_end) = leased.get(&line) {
            assert_eq!(item.deliveries, 2, "{line} was handed out before the kill");
            assert!(now >= *lease_end, "{line} was delivered before its lease ended");
        }
        assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
        assert!(arrived.insert(line.clone()), "{line} came twice");
    }
    let all: HashSet<String> = committed.union(&arrived).cloned().collect();
    assert_eq!(all, lines.into_iter().collect(), "no item is lost or invented");
    assert!(leased.keys().all(|line| again.contains(line)));
    assert!(again.len() <= IN_FLIGHT as usize, "only leased items are delivered again: {again:?}");
    drop(deliveries);
    assert!(api.reserve_now("lines", 1).await.is_empty(), "no item is left");
}

async fn acknowledged_pushes_survive_a_kill(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let (answered_tx, mut answered_rx) = tokio::sync::mpsc::channel(1000);
    let mut producers = tokio::task::JoinSet::new();
    for producer in 0..8 {
        let api = broker.api().await;
        let answered = answered_tx.clone();
        producers.spawn(async move {
            for number in 0.. {
                let line = format!("{producer}-{number}");
                let item = crate::harness::new_item(&line);
                if api.try_push("lines", vec![item]).await.is_err() {
                    return;
                }
                let _ = answered.send(line).await;
            }
        });
    }
    drop(answered_tx);
    let mut answered = HashSet::new();
    while answered.len() < 200 {
        answered.insert(answered_rx.recv().await.expect("producers that go on"));
    }
    broker.kill();
    while let Some(line) = answered_rx.recv().await {
        answered.insert(line);
    }
    producers.join_all().await;

    let broker = store.broker().await;
    let api = broker.api().await;
    let mut found = HashSet::new();
    loop {
        let wait = Duration::ZERO;
        let deliveries = api.reserve("lines", 1000, wait, LIMIT).await;
        if deliveries.is_empty() {
            break;
        }
        for delivery in &deliveries {
            assert!(found.insert(text(delivery)), "{} exists twice", text(delivery));
        }
    }
    let lost: Vec<_> = answered.difference(&found).collect();
    assert!(lost.is_empty(), "acknowledged but lost: {lost:?}");
    // In addition there is at most one push of each producer whose answer the kill cut off.
    assert!(found.len() <= answered.len() + 8, "{} of {}", found.len(), answered.len());
}

/// A broker that dies between the statements of a transaction leaves the transaction open on the
/// server. The server would keep it, and the item in it, for a minute, during which nobody could
/// take the items beside that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_left_open_is_ended() {
    let store = Backend::Mongo.store();
    let TestStore::Mongo { uri, database } = &store else { unreachable!("a MongoDB store") };
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["locked", "free"]).await;
    let mut options = ::mongodb::options::ClientOptions::parse(uri).await.expect("an address");
    options.app_name = Some("sluicegate".to_owned());
    let client = ::mongodb::Client::with_options(options).expect("a client");
    let items = client.database(database).collection::<::mongodb::bson::Document>("items.default");
    let mut session = client.start_session().await.expect("a session");
    session.start_transaction().await.expect("a transaction");
    let first = ::mongodb::bson::doc! { "q": "work" };
    let change = ::mongodb::bson::doc! { "$set": { "producer": "never" } };
    let changed = items.update_one(first, change).session(&mut session).await.expect("an update");
    assert_eq!(changed.modified_count, 1);

    // The limit is shorter than the minute after which the server would end the transaction.
    let mut stream = api.consume("work", 10).await;
    let mut seen: Vec<String> = stream.take(2).await.iter().map(text).collect();
    seen.sort();
    assert_eq!(seen, ["free", "locked"]);
    session.commit_transaction().await.expect_err("the transaction was ended");
}
