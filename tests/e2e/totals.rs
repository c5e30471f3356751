//! Totals over all brokers, and notifications of changes.

use std::{collections::HashMap, time::Duration};

use sluicegate_proto::v1::{
    MoveRequest, NewItem, Outcome, PopRequest, PushEntry, Queue, QueueStats, WatchQueuesRequest,
    WatchQueuesResponse,
};
use tonic::Streaming;

use crate::harness::{
    Api, Backend, Broker, TestStore, duration, new_item, on_both_backends, redis_url, within,
};

on_both_backends!(
    totals_add_up_over_brokers_and_survive_a_restart,
    a_watch_reports_all_queues_first_and_then_changes,
    a_watch_of_some_queues_reports_no_others,
);

const LONG: Duration = Duration::from_mins(10);

async fn brokers(backend: Backend, store: &TestStore) -> Vec<Broker> {
    match backend {
        Backend::Mongo => {
            let launch = store.launch().signals(&redis_url());
            vec![launch.start().await, launch.start().await]
        }
        Backend::Sqlite => vec![store.broker().await],
    }
}

/// Returns pushed, delivered, committed, rolled back, moved, dead-lettered, expired.
fn totals(stats: &QueueStats) -> [i64; 7] {
    [
        stats.pushed,
        stats.delivered,
        stats.committed,
        stats.rolled_back,
        stats.moved,
        stats.dead_lettered,
        stats.expired,
    ]
}

/// Causes one of each event through `api`.
async fn one_of_each(api: &Api) {
    let ttl = duration(Duration::from_millis(50));
    let twice = || NewItem { dedup_id: "twice".to_owned(), ..new_item("twice") };
    api.push_items("work", vec![NewItem { ttl, ..new_item("expires") }]).await;
    // The item has expired, and the reserve below finds it.
    tokio::time::sleep(Duration::from_millis(100)).await;
    api.push_items("work", vec![twice(), new_item("b"), new_item("c"), new_item("d")]).await;
    // `twice` is pushed by each call of this function, and counts once.
    let first = api.reserve_one("work", LONG).await;
    assert_eq!(api.commit(&[&first.receipt]).await, [Outcome::Ok]);
    let back = api.reserve_one("work", LONG).await;
    assert_eq!(api.rollback(&back.receipt, "again").await, Outcome::Ok);
    let moved = api.reserve_one("work", LONG).await;
    let request = MoveRequest {
        receipt: moved.receipt,
        to_queue: "next".to_owned(),
        ..MoveRequest::default()
    };
    api.queue.clone().r#move(request).await.expect("an answer");
    let forked = api.reserve_one("work", LONG).await;
    let pushes = vec![PushEntry { queue: "next".to_owned(), item: Some(new_item("forked")) }];
    let request = sluicegate_proto::v1::CommitAndPushRequest { receipt: forked.receipt, pushes };
    api.queue.clone().commit_and_push(request).await.expect("an answer");
    let request = PopRequest { queue: "work".to_owned(), max_items: 1, wait: None };
    let popped = api.queue.clone().pop(request).await.expect("an answer").into_inner().items;
    assert!(popped.len() <= 1);
    api.push("work", &["poison"]).await;
    for outcome in [Outcome::Ok, Outcome::DeadLettered] {
        let delivery = api.reserve_one("work", LONG).await;
        assert_eq!(api.rollback(&delivery.receipt, "poison").await, outcome);
    }
}

/// The totals of two calls of [`one_of_each`]. In the first call, `twice`, b, b, c, d, poison and
/// poison are delivered, of which `twice`, d and b are committed. The second call is the same
/// without `twice`, in whose place nothing was delivered. How many expired items are found, rather
/// than removed by the store before, depends on the store.
const WORK: [i64; 6] = [11, 13, 5, 4, 2, 2];

async fn totals_add_up_over_brokers_and_survive_a_restart(backend: Backend) {
    let store = backend.store();
    let running = brokers(backend, &store).await;
    let api = running[0].api().await;
    api.create(Queue {
        name: "work".to_owned(),
        max_attempts: Some(2),
        dead_letter_queue: "dead".to_owned(),
        ..Queue::default()
    })
    .await;
    one_of_each(&api).await;
    one_of_each(&running[running.len() - 1].api().await).await;
    let stats = async |api: &Api| totals(&api.stats("work").await);
    for broker in &running {
        // The last second of other brokers may be missing.
        let api = broker.api().await;
        api.until_stats("work", |stats| totals(stats)[..6] == WORK).await;
    }
    let work = stats(&api).await;
    assert!(work[6] <= 2, "{work:?}");
    for broker in &running {
        assert_eq!(stats(&broker.api().await).await, work, "each broker returns the same");
    }
    let next = totals(&api.stats("next").await);
    for broker in running {
        broker.stop().await;
    }

    let again = brokers(backend, &store).await;
    for broker in &again {
        let api = broker.api().await;
        assert_eq!(stats(&api).await, work, "after a restart");
        assert_eq!(totals(&api.stats("next").await), next, "after a restart");
    }
    // Events right before a graceful stop are not lost either.
    let api = again[0].api().await;
    api.push("work", &["x", "y", "z"]).await;
    for broker in again {
        broker.stop().await;
    }
    let again = brokers(backend, &store).await;
    let after = stats(&again[0].api().await).await;
    assert_eq!(after[0], work[0] + 3);
}

async fn watch(api: &Api, queues: &[&str]) -> Streaming<WatchQueuesResponse> {
    let queues = queues.iter().map(|&queue| queue.to_owned()).collect();
    let request = WatchQueuesRequest { queues };
    api.admin.clone().watch_queues(request).await.expect("a stream").into_inner()
}

/// Reads until the last reported stats of the queues satisfy `wanted`.
async fn until_told(
    stream: &mut Streaming<WatchQueuesResponse>,
    told: &mut HashMap<String, QueueStats>,
    wanted: impl Fn(&HashMap<String, QueueStats>) -> bool,
) {
    let mut messages = 0;
    while !wanted(told) {
        let message = within("a message of the watch", stream.message()).await;
        let message = message.expect("an open stream").expect("a message");
        assert!(!message.stats.is_empty() || messages == 0, "a message without stats");
        for stats in message.stats {
            let before = told.insert(stats.queue.clone(), stats.clone());
            assert_ne!(before, Some(stats), "reported though nothing has changed");
        }
        messages += 1;
    }
}

async fn a_watch_reports_all_queues_first_and_then_changes(backend: Backend) {
    let store = backend.store();
    let running = brokers(backend, &store).await;
    let api = running[0].api().await;
    let remote = running[running.len() - 1].api().await;
    for name in ["a", "b", "c"] {
        api.create(Queue { name: name.to_owned(), ..Queue::default() }).await;
    }
    let mut stream = watch(&api, &[]).await;
    let mut told = HashMap::new();
    until_told(&mut stream, &mut told, |told| told.len() == 3).await;
    assert!(told.values().all(|stats| stats.ready == 0), "{told:?}");

    remote.push("b", &["x", "y"]).await;
    until_told(&mut stream, &mut told, |told| told["b"].ready == 2 && told["b"].pushed == 2).await;
    let held = remote.reserve_one("b", LONG).await;
    until_told(&mut stream, &mut told, |told| (told["b"].ready, told["b"].reserved) == (1, 1))
        .await;
    assert_eq!(remote.commit(&[&held.receipt]).await, [Outcome::Ok]);
    until_told(&mut stream, &mut told, |told| (told["b"].reserved, told["b"].committed) == (0, 1))
        .await;
    assert_eq!((told["a"].pushed, told["c"].pushed), (0, 0));
    // A new queue is reported too.
    remote.push("d", &["z"]).await;
    until_told(&mut stream, &mut told, |told| told.get("d").is_some_and(|d| d.ready == 1)).await;
    assert_eq!(told.len(), 4);
}

async fn a_watch_of_some_queues_reports_no_others(backend: Backend) {
    let store = backend.store();
    let running = brokers(backend, &store).await;
    let api = running[0].api().await;
    for name in ["a", "b", "c"] {
        api.create(Queue { name: name.to_owned(), ..Queue::default() }).await;
    }
    let mut stream = watch(&api, &["a", "c"]).await;
    let mut told = HashMap::new();
    until_told(&mut stream, &mut told, |told| told.len() == 2).await;
    api.push("b", &["x"]).await;
    api.push("c", &["x"]).await;
    until_told(&mut stream, &mut told, |told| told["c"].ready == 1).await;
    let mut names: Vec<&String> = told.keys().collect();
    names.sort();
    assert_eq!(names, ["a", "c"]);
    let request = WatchQueuesRequest { queues: vec!["nowhere".to_owned()] };
    let refused = match api.admin.clone().watch_queues(request).await {
        Err(refused) => refused,
        Ok(stream) => stream.into_inner().message().await.expect_err("no such queue"),
    };
    assert_eq!(refused.code(), tonic::Code::NotFound);
}
