//! One client, several brokers: the client uses all of them, and returns to one that was
//! unreachable. Each broker has a store of its own, which shows which broker was called.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_client::{CancellationToken, Client, producer::StreamOptions};
use sluicegate_proto::v1::{GetQueueRequest, ItemState, PopRequest};
use tokio::sync::{Semaphore, mpsc};

use crate::harness::{Broker, Launch, Proxy, until, within};

fn launch() -> Launch {
    Launch::new().flag("store", "sqlite::memory:")
}

async fn client(brokers: [&Broker; 2]) -> Client {
    let [one, other] = brokers.map(|broker| broker.address.clone());
    Client::builder(one).endpoint(other).connect().await.expect("a client")
}

/// Returns true if anyone has pushed to the queue there, which creates it.
async fn was_pushed_to(broker: &Broker, queue: &str) -> bool {
    let request = GetQueueRequest { name: queue.to_owned() };
    broker.api().await.admin.clone().get_queue(request).await.is_ok()
}

/// Pushes by new producers until one of them has used the broker.
async fn until_used(client: &Client, broker: &Broker, queue: &str) {
    until("a producer at the broker", || async {
        client.producer(queue).push("x").await.expect("a push");
        was_pushed_to(broker, queue).await.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_uses_all_brokers_and_returns_to_one_that_recovered() {
    let (one, other) = (launch().start().await, launch().start().await);
    let client = client([&one, &other]).await;
    until_used(&client, &one, "before").await;
    until_used(&client, &other, "before").await;

    let address = one.address.trim_start_matches("http://").to_owned();
    one.kill();
    for _ in 0..10 {
        // The item has an id, so that the push is repeated elsewhere if it meets the stopped
        // broker.
        let producer = client.producer("meanwhile").with_auto_dedup();
        producer.push("x").await.expect("a push to the broker that is left");
    }
    let one = launch().flag("listen", &address).start().await;
    until_used(&client, &one, "after").await;
    one.stop().await;
    other.stop().await;
}

/// A stream has no natural end, but load has to spread after a roll-out nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_reconnects_when_its_connection_is_old() {
    let launch = launch().flag("max-connection-age", "1s");
    let brokers = [launch.start().await, launch.start().await];
    for (n, broker) in brokers.iter().enumerate() {
        broker.api().await.push("q", &[&format!("at {n}")]).await;
    }
    let client = client([&brokers[0], &brokers[1]]).await;
    let (seen, mut came) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let consumer = client.consumer("q").shutdown(stop.clone());
    let running = tokio::spawn(consumer.run(move |delivery| {
        let seen = seen.clone();
        async move {
            let text = delivery.text().unwrap_or("no text").to_owned();
            seen.send(text).map_err(|_| "nobody listens")
        }
    }));
    let mut texts = Vec::new();
    for _ in 0..2 {
        texts.push(within("an item of each broker", came.recv()).await.expect("a consumer"));
    }
    texts.sort();
    assert_eq!(texts, ["at 0", "at 1"]);
    stop.cancel();
    let summary = within("its end", running).await.expect("no panic").expect("no failure");
    assert_eq!((summary.committed, summary.lost, summary.unknown), (2, 0, 0));
    for broker in brokers {
        broker.stop().await;
    }
}

/// The same holds for a push stream. The items have no deduplication ids, so that a batch with an
/// unknown outcome would fail its ticket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_stream_reconnects_when_its_connection_is_old() {
    let launch = launch().flag("max-connection-age", "1s");
    let brokers = [launch.start().await, launch.start().await];
    let client = client([&brokers[0], &brokers[1]]).await;
    let stream = client.producer("q").stream(StreamOptions::default());
    let (mut tickets, mut sent) = (Vec::new(), Vec::new());
    within("the stream at each broker", async {
        while !(was_pushed_to(&brokers[0], "q").await && was_pushed_to(&brokers[1], "q").await) {
            for _ in 0..20 {
                let text = format!("{:06}", sent.len());
                tickets.push(stream.send([text.clone()]).await.expect("a batch on its way"));
                sent.push(text);
            }
        }
    })
    .await;
    for ticket in tickets {
        assert_eq!(ticket.await.expect("an answer").len(), 1);
    }
    stream.close().await.expect("all is answered");
    let mut stored = Vec::new();
    for broker in brokers {
        let items = broker.api().await.list("q", ItemState::Ready).await;
        let texts = items.iter().map(|item| String::from_utf8_lossy(&item.payload).into_owned());
        stored.extend(texts);
        broker.stop().await;
    }
    stored.sort();
    assert_eq!(stored, sent);
}

/// A call that comes too late for a connection that ends is made on the next one. The items have no deduplication ids, so that a
/// call with an unknown outcome would fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_fails_because_its_connection_is_old() {
    let broker = launch().flag("max-connection-age", "1s").start().await;
    let proxy = Proxy::to(&broker.address).await;
    let client = Client::connect(&proxy.address).await.expect("a client");
    let pushers = (0..16).map(|_| async {
        let (producer, mut pushed) = (client.producer("q"), 0);
        while proxy.accepted() < 6 {
            producer.push("x").await.expect("a push");
            pushed += 1;
        }
        pushed
    });
    let pushed: usize = within("the connections", join_all(pushers)).await.into_iter().sum();
    assert_eq!(broker.api().await.list("q", ItemState::Ready).await.len(), pushed);
    broker.stop().await;
}

/// Returns a client, and the other one of two brokers: the one at which the client is was killed.
async fn client_of_a_killed_broker() -> (Client, Broker) {
    let brokers = [launch().start().await, launch().start().await];
    for (n, broker) in brokers.iter().enumerate() {
        broker.api().await.push("where", &[&n.to_string()]).await;
        broker.api().await.push("q", &["x"]).await;
    }
    let client = client([&brokers[0], &brokers[1]]).await;
    let items = client.pop("where", 1, Duration::ZERO).await.expect("an item");
    let [first, second] = brokers;
    let (used, other) = if items[0].payload == "0" { (first, second) } else { (second, first) };
    used.kill();
    (client, other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pops_go_to_another_broker_when_theirs_is_gone() {
    let (client, other) = client_of_a_killed_broker().await;
    let items = until("an item of the other broker", || async {
        client.pop("q", 1, Duration::ZERO).await.ok()
    });
    assert_eq!(items.await[0].payload, "x");
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_a_stub_go_to_another_broker_when_theirs_is_gone() {
    let (client, other) = client_of_a_killed_broker().await;
    let stub = client.queue_service();
    let answer = until("an item of the other broker", || async {
        let request = PopRequest { queue: "q".to_owned(), max_items: 1, wait: None };
        stub.clone().pop(client.request(request)).await.ok()
    });
    assert_eq!(answer.await.into_inner().items[0].payload, "x");
    other.stop().await;
}

/// A running handler keeps its item while its consumer connects again: nobody else gets the item,
/// and the commit is valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_handler_keeps_its_item_when_the_connection_breaks() {
    let broker = launch().start().await;
    let api = broker.api().await;
    let proxy = Proxy::to(&broker.address).await;
    let client = Client::connect(proxy.address.clone()).await.expect("a client");
    let (gate, (told, mut started)) = (Arc::new(Semaphore::new(0)), mpsc::unbounded_channel());
    let (finish, stop) = (Arc::clone(&gate), CancellationToken::new());
    let consumer = client.consumer("q").shutdown(stop.clone());
    let running = tokio::spawn(consumer.run(move |delivery| {
        told.send(delivery.text().unwrap_or("no text").to_owned()).expect("a test that listens");
        let gate = Arc::clone(&gate);
        async move { gate.acquire().await.map(tokio::sync::SemaphorePermit::forget) }
    }));
    api.push("q", &["long"]).await;
    assert_eq!(within("the handler", started.recv()).await.as_deref(), Some("long"));
    proxy.cut();
    api.push("q", &["next"]).await;
    let mut texts = Vec::new();
    while texts.last().is_none_or(|text| text != "next") {
        texts.extend(within("the next item", started.recv()).await);
    }
    assert_eq!(texts, ["next"], "an item was delivered again");
    finish.add_permits(2);
    stop.cancel();
    let summary = within("its end", running).await.expect("no panic").expect("no failure");
    assert_eq!((summary.started, summary.committed, summary.lost), (2, 2, 0));
    broker.stop().await;
}
