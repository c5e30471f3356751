//! Several brokers on one MongoDB: each wakes the consumers of the others.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use sluicegate_proto::v1::{ConsumeRequest, Outcome};

use super::probes::{get, value};
use crate::harness::{Backend, RedisServer, payloads, redis_url, text, within};

/// The window in which equal signals are sent once.
const WINDOW: Duration = Duration::from_millis(50);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_push_reaches_an_idle_consumer_of_another_broker() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url()).without_poll();
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    let mut stream = remote.consume("idle", 1).await;
    let mut latencies = Vec::new();
    for number in 0..40 {
        let payload = number.to_string();
        let pushed = Instant::now();
        api.push("idle", &[&payload]).await;
        let delivery = stream.next().await;
        latencies.push(pushed.elapsed());
        assert_eq!(text(&delivery), payload);
        assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
        // The push is alone: the window of the last signal has closed.
        tokio::time::sleep(WINDOW * 2).await;
    }
    latencies.sort();
    // The fallback poll is off, so that the arrival itself shows that a signal caused it.
    println!(
        "push on one broker to delivery on another: median {:?}, 95 % {:?}, longest {:?}",
        latencies[latencies.len() / 2],
        latencies[latencies.len() * 95 / 100],
        latencies[latencies.len() - 1]
    );
}

/// The broker that stores an item tells the other its id, by which that one claims it without looking for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lone_pushes_are_claimed_by_their_ids_on_another_broker() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url()).without_poll();
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    let mut stream = remote.consume("idle", 10).await;
    let mut pushed = 0;
    // Some are looked for too early, and then found by a scan.
    within("three that are claimed by their ids", async {
        loop {
            let payload = pushed.to_string();
            pushed += 1;
            api.push("idle", &[&payload]).await;
            let delivery = stream.next().await;
            assert_eq!(text(&delivery), payload, "each once, in order");
            let item = delivery.item.as_ref().expect("an item");
            assert_eq!((item.attempt, item.deliveries), (1, 1));
            assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
            let (_, metrics) = get(&there, "/metrics").await;
            let claimed = value(&metrics, "dispatcher_wakes_total{cause=\"announcement\"}");
            if claimed >= Some(3.0) {
                return;
            }
        }
    })
    .await;
    println!("{pushed} pushes until three were claimed by their ids");
}

/// One signal per window, and one for each time that the broker of a waiting consumer asked for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_sends_few_signals_and_its_last_item_still_arrives() {
    const ITEMS: usize = 1000;
    let redis = RedisServer::start().await;
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis.url()).without_poll();
    let (here, there) = (launch.start().await, launch.start().await);
    let client = redis::Client::open(redis.url()).expect("an address");
    let mut observer = client.get_async_pubsub().await.expect("an observer");
    observer.psubscribe("*").await.expect("a subscription");

    let api = here.api().await;
    let remote = there.api().await;
    let request = ConsumeRequest {
        queue: "burst".to_owned(),
        max_in_flight: 1000,
        auto_commit: true,
        ..ConsumeRequest::default()
    };
    let mut stream = remote.consume_with(request).await;
    let started = Instant::now();
    let mut producers = tokio::task::JoinSet::new();
    for producer in 0..20 {
        let api = api.clone();
        producers.spawn(async move {
            for number in 0..ITEMS / 20 {
                api.push("burst", &[&format!("{producer}-{number}")]).await;
                api.push("unwatched", &["x"]).await;
            }
        });
    }
    producers.join_all().await;
    let took = started.elapsed();
    let mut seen = payloads(&stream.take(ITEMS).await);
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), ITEMS, "each once");

    // A push of another queue marks the end of what the observer has to count.
    tokio::time::sleep(WINDOW * 2).await;
    api.push("end", &["x"]).await;
    let mut inserts: HashMap<String, usize> = HashMap::new();
    let mut wanted = 0;
    let mut messages = observer.on_message();
    loop {
        let message = within("a signal", messages.next()).await.expect("a message");
        let text: String = message.get_payload().expect("text");
        let words: Vec<&str> = text.split(' ').collect();
        match words[..] {
            ["wanted", "burst", ..] => wanted += 1,
            ["wanted", queue, ..] => panic!("nobody consumes {queue}"),
            ["insert", "end", ..] => break,
            ["insert", queue, ..] => *inserts.entry(queue.to_owned()).or_default() += 1,
            _ => {}
        }
    }
    println!("{ITEMS} pushes in {took:?}: insert signals {inserts:?}, asked for {wanted} times");
    let windows = took.as_millis() as usize / WINDOW.as_millis() as usize + 2;
    // Whoever asks ends a window, and one push is announced to it.
    for (queue, most) in [("burst", windows + 2 * wanted), ("unwatched", windows)] {
        let count = inserts.remove(queue).expect("the other broker must be notified");
        assert!(
            count <= most,
            "{queue}: {count} signals, {windows} windows, asked for {wanted} times"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_continue_without_redis_and_signals_return_with_it() {
    let mut redis = RedisServer::start().await;
    let store = Backend::Mongo.store();
    let launch =
        store.launch().signals(&redis.url()).flag("poll-min", "100ms").flag("poll-max", "1s");
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    let mut stream = remote.consume("work", 10).await;
    api.push("work", &["with"]).await;
    assert_eq!(text(&stream.next().await), "with");

    redis.stop();
    api.push("work", &["without"]).await;
    assert_eq!(text(&stream.next().await), "without");
    remote.push("work", &["same broker"]).await;
    assert_eq!(text(&stream.next().await), "same broker");

    redis.restart().await;
    let client = redis::Client::open(redis.url()).expect("an address");
    let mut observer = client.get_async_pubsub().await.expect("an observer");
    observer.psubscribe("*").await.expect("a subscription");
    let mut messages = observer.on_message();
    within("a signal after Redis is reachable again", async {
        loop {
            api.push("work", &["again"]).await;
            if tokio::time::timeout(WINDOW * 4, messages.next()).await.is_ok() {
                return;
            }
        }
    })
    .await;
    assert_eq!(text(&stream.next().await), "again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_starts_and_delivers_while_redis_is_down() {
    let mut redis = RedisServer::start().await;
    let store = Backend::Mongo.store();
    redis.stop();
    let broker = store.launch().signals(&redis.url()).start().await;
    let api = broker.api().await;
    let mut stream = api.consume("work", 1).await;
    api.push("work", &["x"]).await;
    assert_eq!(text(&stream.next().await), "x");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settle_on_another_broker_frees_the_slot() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url()).without_poll();
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    let mut stream = api.consume("slots", 2).await;
    api.push("slots", &["a", "b", "c", "d"]).await;
    let mut held = stream.take(2).await;
    for expected in ["c", "d"] {
        let first = held.remove(0);
        assert_eq!(remote.commit(&[&first.receipt]).await, [Outcome::Ok]);
        let next = stream.next().await;
        assert_eq!(text(&next), expected);
        held.push(next);
    }
    // A rollback through the other broker frees the place too, and the item is delivered again.
    let back = held.remove(0);
    assert_eq!(remote.rollback(&back.receipt, "elsewhere").await, Outcome::Ok);
    assert_eq!(text(&stream.next().await), text(&back));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_broker_delays_the_others_only_by_its_leases() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let (dying, living) = (launch.start().await, launch.start().await);
    let (api, remote) = (dying.api().await, living.api().await);
    api.push("work", &["held", "free"]).await;
    let mut held = api
        .consume_with(ConsumeRequest {
            queue: "work".to_owned(),
            max_in_flight: 1,
            lease: crate::harness::duration(Duration::from_secs(2)),
            ..ConsumeRequest::default()
        })
        .await;
    assert_eq!(text(&held.next().await), "held");
    dying.kill();
    let mut stream = remote.consume("work", 10).await;
    assert_eq!(text(&stream.next().await), "free");
    assert_eq!(text(&stream.next().await), "held", "delivered after its lease");
}

/// A broker is frozen while it holds items that it has not sent yet. Their leases end, and another
/// consumer commits them. When the broker continues, it sends none of them: only what was in the
/// buffers of the connection still arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_was_frozen_delivers_nothing_whose_lease_has_passed() {
    const ITEMS: usize = 60;
    /// How many items the broker holds at least when it is frozen: what one reserve brings. Three quarters
    /// of these may be in the buffers of the connection: its window is 2 MiB, and a message 1 MiB.
    const HELD: u64 = 12;
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let (frozen, living) = (launch.start().await, launch.start().await);
    let (api, remote) = (frozen.api().await, living.api().await);
    let payload = "x".repeat(256 << 10);
    for _ in 0..ITEMS / 10 {
        remote.push("work", &[payload.as_str(); 10]).await;
    }
    let consume = |lease: u64| ConsumeRequest {
        queue: "work".to_owned(),
        max_in_flight: 1000,
        lease: crate::harness::duration(Duration::from_secs(lease)),
        ..ConsumeRequest::default()
    };
    // The client does not read, so the broker keeps what does not fit into the window.
    let mut unread = api.consume_with(consume(3)).await;
    remote.until_stats("work", |stats| stats.reserved as u64 >= HELD).await;
    frozen.signal("STOP");
    let held = remote.stats("work").await.reserved as usize;
    let mut stream = remote.consume_with(consume(60)).await;
    let mut committed = 0;
    while committed < ITEMS {
        let delivery = stream.next().await;
        assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
        committed += 1;
    }
    drop(stream);
    frozen.signal("CONT");
    remote.push("work", &["marker"]).await;
    let mut late = 0;
    while text(&unread.next().await) != "marker" {
        late += 1;
    }
    println!("{late} of {held} items were on their way when the broker was frozen");
    assert!(late < held, "{late} items arrived that others had committed");
}
