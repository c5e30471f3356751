//! The test suite for every implementation of signals: what brokers may expect of one another's
//! hints.

use std::collections::BTreeSet;

use mongodb::bson::doc;
use tokio::{
    sync::broadcast::Receiver,
    time::{Instant, timeout},
};

use crate::{
    domain::{QueueName, Signal, Timestamp, Topic},
    signals::{
        relay::STEP_TIMEOUT,
        test_servers::{PATIENCE, Proxy, RedisServer, mongo_uri, pause, until},
        *,
    },
};

/// A server, a connection to it that can be cut, and a database used by no other test.
struct Place {
    uri: Box<dyn Fn(&str) -> SignalsUri + Send + Sync>,
    server: String,
    proxy: Proxy,
    database: String,
    redis: Option<RedisServer>,
}

impl Place {
    async fn redis(server: RedisServer) -> Self {
        Self {
            uri: Box::new(|address| SignalsUri::Redis { uri: format!("redis://{address}/") }),
            server: server.address(),
            proxy: Proxy::to(server.address()).await,
            database: fresh_name(),
            redis: Some(server),
        }
    }

    async fn mongo() -> Self {
        // Only one member can be reached through a proxy, which has to be the primary.
        let client = mongodb::Client::with_uri_str(mongo_uri()).await.unwrap();
        let hello = client.database("admin").run_command(doc! { "hello": 1 }).await.unwrap();
        let server = if let Ok(primary) = hello.get_str("primary") {
            primary.to_owned()
        } else {
            let parsed = mongodb::options::ClientOptions::parse(mongo_uri()).await.unwrap();
            parsed.hosts[0].to_string()
        };
        Self {
            uri: Box::new(|address| SignalsUri::Mongo {
                uri: format!("mongodb://{address}/?directConnection=true"),
            }),
            proxy: Proxy::to(server.clone()).await,
            server,
            database: fresh_name(),
            redis: None,
        }
    }

    async fn broker_at(&self, address: &str, id: u8) -> Arc<dyn Signals> {
        let metrics = Arc::new(Metrics::new());
        open(&(self.uri)(address), [id; 4], &self.database, metrics).await.unwrap()
    }

    /// Returns a broker whose connection is never cut.
    async fn broker(&self, id: u8) -> Arc<dyn Signals> {
        let begun = Instant::now();
        let signals = self.broker_at(&self.server, id).await;
        let waited = begun.elapsed();
        assert!(
            signals.healthy() || waited >= STEP_TIMEOUT,
            "connecting was given up at {waited:?}"
        );
        until("the broker is connected", || signals.healthy()).await;
        signals
    }

    /// Returns a broker behind the proxy.
    async fn proxied(&self, id: u8) -> Arc<dyn Signals> {
        let signals = self.broker_at(&self.proxy.address(), id).await;
        until("the broker behind the proxy is connected", || signals.healthy()).await;
        signals
    }

    async fn database(&self) -> mongodb::Database {
        mongodb::Client::with_uri_str(mongo_uri()).await.unwrap().database(&self.database)
    }

    async fn end(self, brokers: &[&Arc<dyn Signals>]) {
        self.proxy.pass();
        for broker in brokers {
            broker.close().await;
        }
        if self.redis.is_none() {
            self.database().await.drop().await.unwrap();
        }
    }
}

fn fresh_name() -> String {
    format!("sluicegate_test_{:016x}", rand::random::<u64>())
}

fn signal(queue: &str, topic: Topic, since: Option<i64>) -> Signal {
    let queue = QueueName::parse("queue", queue).unwrap();
    Signal::new(queue, topic, since.map(Timestamp))
}

fn insert(queue: &str, since: Option<i64>) -> Signal {
    signal(queue, Topic::Insert, since)
}

async fn notice(ears: &mut Receiver<Notice>) -> Notice {
    let heard = timeout(PATIENCE, ears.recv()).await;
    heard.unwrap_or_else(|_| panic!("nothing heard for {PATIENCE:?}")).unwrap()
}

/// Returns the next signal, whatever may have been missed before.
async fn hear(ears: &mut Receiver<Notice>) -> Signal {
    loop {
        if let Notice::Signal(signal) = notice(ears).await {
            return signal;
        }
    }
}

/// Waits for the notice that signals may have been missed.
async fn hear_missed(ears: &mut Receiver<Notice>) {
    while notice(ears).await != Notice::Missed {}
}

fn forget(ears: &mut Receiver<Notice>) {
    while ears.try_recv().is_ok() {}
}

async fn other_brokers_receive_a_signal_and_the_sender_does_not(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let (mut at_a, mut at_b) = (a.subscribe(), b.subscribe());
    let sent = insert("orders", Some(1_700_000_000_123));
    a.publish(sent.clone());
    assert_eq!(hear(&mut at_b).await, sent);
    // The signal of b comes after a's own signal, which a would have received first.
    b.publish(signal("invoices", Topic::Settle, None));
    assert_eq!(hear(&mut at_a).await, signal("invoices", Topic::Settle, None));
    place.end(&[&a, &b]).await;
}

async fn a_burst_is_received_once_per_window_and_its_last_signal_is_not_lost(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    let start = Instant::now();
    for n in 0..1_000 {
        a.publish(insert("orders", Some(5_000 - n)));
        if n % 10 == 0 {
            pause().await;
        }
    }
    let mut heard = 0;
    while hear(&mut at_b).await.since != Some(Timestamp(4_001)) {
        heard += 1;
    }
    a.publish(insert("end", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "end", "nothing came after the last");
    let windows = start.elapsed().as_millis() / 50;
    assert!(heard >= 1 && heard <= windows + 1, "{heard} signals in {windows} windows");
    place.end(&[&a, &b]).await;
}

/// A broker that asks after each signal hears of more inserts than there are windows.
async fn whoever_waits_is_told_of_each_insert(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let (mut at_a, mut at_b) = (a.subscribe(), b.subscribe());
    let (rounds, mut quick) = (200, 0);
    for n in 0..rounds {
        let start = Instant::now();
        a.publish(insert("orders", Some(n)));
        assert_eq!(hear(&mut at_b).await, insert("orders", Some(n)));
        b.publish(signal("orders", Topic::Wanted, None));
        assert_eq!(hear(&mut at_a).await, signal("orders", Topic::Wanted, None));
        quick += i64::from(start.elapsed().as_millis() < 40);
    }
    // One that waits for the end of a window takes 50 ms, on any machine.
    assert!(quick > rounds / 2, "{quick} of {rounds} signals did not wait for a window");
    place.end(&[&a, &b]).await;
}

async fn queues_and_topics_are_not_merged(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    let mut sent: BTreeSet<(String, Topic)> = BTreeSet::new();
    // Fewer than a subscriber may lag behind.
    for n in 0..250 {
        let queue = format!("q{n}");
        for topic in [Topic::Insert, Topic::Settings, Topic::Settle, Topic::Wanted] {
            a.publish(signal(&queue, topic, None));
            sent.insert((queue.clone(), topic));
        }
    }
    for _ in 0..sent.len() {
        let heard = hear(&mut at_b).await;
        assert!(sent.remove(&(heard.queue.to_string(), heard.topic)), "twice: {heard:?}");
    }
    place.end(&[&a, &b]).await;
}

async fn the_least_since_counts(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    // With no await between them, all but the first of a queue fall into one window.
    for since in [Some(100), Some(300), Some(200), Some(250)] {
        a.publish(insert("known", since));
    }
    for since in [Some(100), Some(50), None, Some(20)] {
        a.publish(insert("unknown", since));
    }
    let mut heard = Vec::new();
    for _ in 0..4 {
        heard.push(hear(&mut at_b).await);
    }
    for queue in ["known", "unknown"] {
        assert_eq!(heard.remove(0), insert(queue, Some(100)), "the first, immediately");
    }
    heard.sort_by(|a, b| a.queue.cmp(&b.queue));
    assert_eq!(heard, [insert("known", Some(200)), insert("unknown", None)]);
    place.end(&[&a, &b]).await;
}

async fn signals_stay_within_their_database(mut place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let elsewhere = std::mem::replace(&mut place.database, fresh_name());
    let other = place.broker(3).await;
    if place.redis.is_none() {
        place.database().await.drop().await.unwrap();
    }
    place.database = elsewhere;
    let mut at_b = b.subscribe();
    other.publish(insert("theirs", None));
    other.close().await; // everything is sent now
    a.publish(insert("ours", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "ours");
    place.end(&[&a, &b]).await;
}

async fn a_lost_connection_is_noticed_and_replaced(place: Place) {
    let (a, b) = (place.broker(1).await, place.proxied(2).await);
    let mut at_b = b.subscribe();
    forget(&mut at_b);
    place.proxy.cut();
    until("b notices", || !b.healthy()).await;
    a.publish(insert("unheard", None));
    place.proxy.pass();
    hear_missed(&mut at_b).await;
    until("b is healthy again", || b.healthy()).await;
    a.publish(insert("heard", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "heard");
    place.end(&[&a, &b]).await;
}

async fn a_half_open_connection_is_noticed(place: Place) {
    let b = place.proxied(2).await;
    let mut at_b = b.subscribe();
    forget(&mut at_b);
    place.proxy.freeze();
    until("b notices that it receives nothing", || !b.healthy()).await;
    place.proxy.pass();
    hear_missed(&mut at_b).await;
    until("b is healthy again", || b.healthy()).await;
    place.end(&[&b]).await;
}

async fn signals_published_during_an_outage_are_made_up_for(place: Place) {
    let (a, b) = (place.proxied(1).await, place.broker(2).await);
    place.proxy.cut();
    until("a notices", || !a.healthy()).await;
    let mut at_b = b.subscribe();
    forget(&mut at_b);
    let mut unheard = BTreeSet::new();
    for n in 0..10_000 {
        let queue = format!("q{}", n % 500);
        a.publish(insert(&queue, None));
        unheard.insert(queue);
    }
    place.proxy.pass();
    // The signals were dropped, or were kept because only receiving was known to be lost. In either
    // case b learns of them. Because b was connected all the time, b learns of them from a.
    while !unheard.is_empty() {
        match notice(&mut at_b).await {
            Notice::Signal(signal) => _ = unheard.remove(signal.queue.as_str()),
            Notice::Missed => unheard.clear(),
        }
    }
    until("a is healthy again", || a.healthy()).await;
    assert!(b.healthy());
    place.end(&[&a, &b]).await;
}

async fn a_server_that_starts_late_is_found(place: Place) {
    place.proxy.cut();
    let a = place.broker_at(&place.proxy.address(), 1).await;
    assert!(!a.healthy());
    a.publish(insert("early", None));
    let b = place.broker(2).await;
    let (mut at_a, mut at_b) = (a.subscribe(), b.subscribe());
    forget(&mut at_b);
    place.proxy.pass();
    hear_missed(&mut at_a).await;
    hear_missed(&mut at_b).await;
    until("a is healthy", || a.healthy()).await;
    place.end(&[&a, &b]).await;
}

async fn closing_sends_the_queued_signals(place: Place) {
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    a.publish(insert("orders", Some(2)));
    a.publish(insert("orders", Some(1)));
    a.close().await;
    assert_eq!(hear(&mut at_b).await, insert("orders", Some(2)));
    assert_eq!(hear(&mut at_b).await, insert("orders", Some(1)));
    a.publish(insert("late", None)); // does no harm
    place.end(&[&a, &b]).await;
}

macro_rules! on_redis_and_mongo {
    ($($test:ident,)*) => {
        mod on_redis {
            use super::*;
            $(#[tokio::test]
            async fn $test() {
                super::$test(Place::redis(RedisServer::started().await).await).await;
            })*
        }
        mod on_mongo {
            use super::*;
            $(#[tokio::test]
            async fn $test() {
                super::$test(Place::mongo().await).await;
            })*
        }
    };
}

on_redis_and_mongo! {
    other_brokers_receive_a_signal_and_the_sender_does_not,
    a_burst_is_received_once_per_window_and_its_last_signal_is_not_lost,
    whoever_waits_is_told_of_each_insert,
    queues_and_topics_are_not_merged,
    the_least_since_counts,
    signals_stay_within_their_database,
    a_lost_connection_is_noticed_and_replaced,
    a_half_open_connection_is_noticed,
    signals_published_during_an_outage_are_made_up_for,
    a_server_that_starts_late_is_found,
    closing_sends_the_queued_signals,
}

#[tokio::test]
async fn a_restarted_redis_is_found_again() {
    let mut place = Place::redis(RedisServer::started().await).await;
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    forget(&mut at_b);
    let server = place.redis.as_mut().unwrap();
    server.kill();
    until("both notice", || !a.healthy() && !b.healthy()).await;
    a.publish(insert("unheard", None));
    server.start().await;
    hear_missed(&mut at_b).await;
    until("both are healthy again", || a.healthy() && b.healthy()).await;
    a.publish(insert("heard", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "heard");
    place.end(&[&a, &b]).await;
}

#[tokio::test]
async fn opening_does_not_need_redis() {
    let mut place = Place::redis(RedisServer::stopped()).await;
    let a = place.broker_at(&place.server, 1).await;
    assert!(!a.healthy());
    place.redis.as_mut().unwrap().start().await;
    until("a is healthy", || a.healthy()).await;
    place.end(&[&a]).await;
}

async fn is_capped(place: &Place) -> bool {
    let mut found = place.database().await.list_collections().await.unwrap();
    let mut capped = Vec::new();
    while found.advance().await.unwrap() {
        let collection = found.deserialize_current().unwrap();
        capped.push((collection.name.clone(), collection.options.capped));
    }
    capped == [("signals".to_owned(), Some(true))]
}

#[tokio::test]
async fn brokers_that_start_together_create_one_capped_collection() {
    let place = Place::mongo().await;
    let brokers: Vec<_> = futures_util::future::join_all((1..=8).map(|id| place.broker(id))).await;
    assert!(is_capped(&place).await);
    place.end(&brokers.iter().collect::<Vec<_>>()).await;
}

#[tokio::test]
async fn a_plain_collection_becomes_a_capped_one() {
    let place = Place::mongo().await;
    let plain = place.database().await.collection("signals");
    plain
        .insert_one(doc! { "what": "insert", "queue": "old", "broker": "09090909" })
        .await
        .unwrap();
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    assert!(is_capped(&place).await);
    let mut at_b = b.subscribe();
    a.publish(insert("new", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "new", "earlier signals are not received");
    place.end(&[&a, &b]).await;
}

#[tokio::test]
async fn a_dropped_collection_is_created_again() {
    let place = Place::mongo().await;
    let (a, b) = (place.broker(1).await, place.broker(2).await);
    let mut at_b = b.subscribe();
    forget(&mut at_b);
    place.database().await.drop().await.unwrap();
    hear_missed(&mut at_b).await;
    until("both are healthy", || a.healthy() && b.healthy()).await;
    a.publish(insert("new", None));
    assert_eq!(hear(&mut at_b).await.queue.as_str(), "new");
    assert!(is_capped(&place).await);
    place.end(&[&a, &b]).await;
}

#[tokio::test]
async fn local_signals_are_silent_and_healthy() {
    let metrics = Arc::new(Metrics::new());
    let signals = open(&SignalsUri::Local, [1; 4], "any", metrics).await.unwrap();
    let mut ears = signals.subscribe();
    signals.publish(insert("orders", None));
    assert!(signals.healthy());
    signals.close().await;
    // The channel is silent but not closed, so that a receiver waits instead of spinning.
    assert_eq!(ears.try_recv(), Err(broadcast::error::TryRecvError::Empty));
}

#[tokio::test]
async fn an_invalid_address_is_refused_without_showing_its_password() {
    let metrics = Arc::new(Metrics::new());
    let uri = "redis://u:hunter2@host:port/".to_owned();
    let opened = open(&SignalsUri::Redis { uri }, [1; 4], "any", metrics).await;
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("redis://***@host:port/") && !error.contains("hunter2"), "{error}");
}
