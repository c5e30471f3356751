//! The requests of orchestrators: `/healthz`, `/readyz` and `/metrics` over HTTP.

use std::time::Duration;

use sluicegate_proto::v1::{NewItem, Outcome};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::{
    Backend, Broker, MongoServer, TestStore, new_item, on_both_backends, redis_url, until, within,
};

/// Returns the status and the complete answer of a GET.
pub(super) async fn get(broker: &Broker, path: &str) -> (u16, String) {
    let address = broker.http_address.trim_start_matches("http://");
    let exchange = async {
        let mut connection = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = within(path, exchange).await.expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status in {answer}")), answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_broker_is_alive_and_ready_and_counts() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["x", "y"]).await;
    assert_eq!(get(&broker, "/healthz").await.0, 200);
    assert_eq!(get(&broker, "/readyz").await.0, 200);
    let (status, metrics) = get(&broker, "/metrics").await;
    assert_eq!(status, 200);
    assert_eq!(value(&metrics, "items_pushed_total{queue=\"work\"}"), Some(2.0), "{metrics}");
}

/// Connections that stay silent, or never complete a request, are closed in favour of new ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_however_many_connections_are_idle() {
    let broker = Backend::Sqlite.store().broker().await;
    let address = broker.http_address.trim_start_matches("http://");
    let mut idle = Vec::new();
    for number in 0..200 {
        let mut connection = TcpStream::connect(address).await.expect("a connection");
        if number % 2 == 0 {
            connection.write_all(b"GET /heal").await.expect("a part of a request");
        }
        idle.push(connection);
    }
    // Sooner than any idle connection is closed for its silence alone.
    let answer = tokio::time::timeout(Duration::from_secs(5), get(&broker, "/healthz")).await;
    assert_eq!(answer.expect("an immediate answer").0, 200);
    drop(idle);
}

/// Returns the value of a line of `/metrics`, given without its prefix.
pub(super) fn value(metrics: &str, line: &str) -> Option<f64> {
    let line = format!("sluicegate_{line} ");
    metrics.lines().find_map(|l| l.strip_prefix(&line)).map(|value| value.parse().expect(value))
}

on_both_backends!(every_figure_of_an_item_is_counted);

async fn every_figure_of_an_item_is_counted(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let item = || NewItem { dedup_id: "once".to_owned(), ..new_item("x") };
    api.push_items("work", vec![item()]).await;
    api.push_items("work", vec![item()]).await;
    let held = api.reserve_one("work", Duration::from_mins(1)).await;
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok]);
    let (_, metrics) = get(&broker, "/metrics").await;
    for (line, expected) in [
        ("items_pushed_total{queue=\"work\"}", 1.0),
        ("items_deduplicated_total{queue=\"work\"}", 1.0),
        ("items_delivered_total{queue=\"work\"}", 1.0),
        ("items_committed_total{queue=\"work\"}", 1.0),
        ("delivery_delay_seconds_count{queue=\"work\"}", 1.0),
        ("store_call_duration_seconds_count{call=\"push\"}", 2.0),
        ("store_call_duration_seconds_count{call=\"commit\"}", 1.0),
        ("store_batch_items_count{call=\"push\"}", 2.0),
        ("store_batch_items_sum{call=\"settle\"}", 1.0),
    ] {
        assert_eq!(value(&metrics, line), Some(expected), "{line} in {metrics}");
    }
    assert!(value(&metrics, "dispatcher_wakes_total{cause=\"local\"}") >= Some(1.0), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn depths_add_up_over_brokers() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let mut brokers = vec![launch.start().await, launch.start().await];
    let api = brokers[1].api().await;
    api.push("work", &["x", "y", "z"]).await;
    let sum = async |brokers: &[Broker], line: &str| {
        let mut sum = None;
        for broker in brokers {
            let (_, metrics) = get(broker, "/metrics").await;
            sum = sum.into_iter().chain(value(&metrics, line)).reduce(|a: f64, b| a + b);
        }
        sum
    };
    let ready = "queue_items{queue=\"work\",state=\"ready\"}";
    // Nobody asks for stats.
    until("the depth is shown", || async {
        (sum(&brokers, ready).await == Some(3.0)).then_some(())
    })
    .await;
    assert_eq!(sum(&brokers, "counts_queues").await, Some(1.0));
    // The broker that counted stops, and the other one takes over.
    let (_, metrics) = get(&brokers[0], "/metrics").await;
    let counting = usize::from(value(&metrics, "counts_queues") != Some(1.0));
    brokers.remove(counting).stop().await;
    let api = brokers[0].api().await;
    api.push("work", &["w"]).await;
    until("the depth is shown again", || async {
        (sum(&brokers, ready).await == Some(4.0)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_whose_store_is_gone_is_alive_but_not_ready() {
    let mut server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").start().await;
    assert_eq!(get(&broker, "/readyz").await.0, 200);
    server.kill();
    until("/readyz returns 503", || async {
        (get(&broker, "/readyz").await.0 == 503).then_some(())
    })
    .await;
    assert_eq!(get(&broker, "/healthz").await.0, 200);
    server.restart().await;
    until("/readyz returns 200", || async {
        (get(&broker, "/readyz").await.0 == 200).then_some(())
    })
    .await;
}
