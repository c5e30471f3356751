//! Consume streams: flow, release, renewal.

use std::{collections::HashSet, time::Duration};

use sluicegate_proto::v1::{ConsumeRequest, ItemState, OnDisconnect, Outcome};

use crate::harness::{Backend, duration, on_both_backends, payloads, text};

on_both_backends!(
    a_stream_never_exceeds_its_max_in_flight,
    the_items_of_a_dropped_stream_are_ready_immediately,
    items_that_a_dropped_stream_never_sent_count_no_failed_attempt,
    auto_commit_delivers_at_most_once,
    renewed_leases_outlive_their_length,
    many_large_items_arrive_in_messages_that_clients_accept,
    two_streams_share_items_and_neither_waits_for_the_other,
    bytes_in_flight_are_bounded_too,
);

async fn a_stream_never_exceeds_its_max_in_flight(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let mut stream = api.consume("flow", 3).await;
    api.push("flow", &["a", "b", "c", "d", "e"]).await;
    let first = stream.take(3).await;
    assert_eq!(payloads(&first), ["a", "b", "c"]);
    // A complete round through another queue. Any further item would have arrived by then.
    let round = async {
        let mut other = api.consume("round", 1).await;
        for _ in 0..20 {
            api.push("round", &["x"]).await;
            let delivery = other.next().await;
            api.commit(&[&delivery.receipt]).await;
        }
    };
    let (more, ()) = stream.during(round).await;
    assert!(more.is_empty(), "more than 3 in flight: {more:?}");
    assert_eq!(api.reserve_now("flow", 10).await.len(), 2, "the rest is for others");
}

async fn the_items_of_a_dropped_stream_are_ready_immediately(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("back", &["a", "b", "c"]).await;
    let mut stream = api.consume("back", 10).await;
    let held = stream.take(3).await;
    assert_eq!(api.commit(&[&held[0].receipt]).await, [Outcome::Ok]);
    drop(stream);
    // Their leases would last ten minutes.
    let mut again = Vec::new();
    for _ in 0..2 {
        let delivery = api.reserve_one("back", Duration::from_mins(10)).await;
        let item = delivery.item.as_ref().expect("an item");
        assert_eq!(item.attempt, 1, "the end of a stream is not a failed attempt");
        // One more delivery is possible if a reserve for the stream was running when it ended. That
        // one reached nobody.
        assert!(item.deliveries >= 2, "{} deliveries", item.deliveries);
        again.push(text(&delivery));
    }
    again.sort();
    assert_eq!(again, ["b", "c"]);
    assert_eq!(api.commit(&[&held[1].receipt]).await, [Outcome::LeaseLost]);
}

async fn items_that_a_dropped_stream_never_sent_count_no_failed_attempt(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    // The payloads far exceed what the transport accepts from a consumer that does not read.
    let large = "x".repeat(256 * 1024);
    let payloads = vec![large.as_str(); 12];
    for _ in 0..4 {
        api.push("unread", &payloads).await;
    }
    let stream = api
        .consume_with(ConsumeRequest {
            queue: "unread".to_owned(),
            max_in_flight: 100,
            lease: duration(Duration::from_mins(10)),
            on_disconnect: OnDisconnect::Count.into(),
            ..ConsumeRequest::default()
        })
        .await;
    api.until_stats("unread", |stats| stats.reserved > 0).await;
    drop(stream);
    // Items that were sent may be delayed by the retry policy.
    api.until_stats("unread", |stats| stats.ready + stats.delayed == 48).await;
    let items = api.list("unread", ItemState::Unspecified).await;
    let failed = items.iter().filter(|item| item.attempt > 1).count();
    assert!(items.iter().all(|item| item.attempt <= 2));
    assert!(failed < 48, "items that never left the broker count as failed attempts");
}

async fn many_large_items_arrive_in_messages_that_clients_accept(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    // Together the payloads far exceed the 4 MiB that a client accepts in one message by default.
    let large = "x".repeat(1 << 20);
    for _ in 0..6 {
        api.push("large", &[&large, &large]).await;
    }
    // A limit in bytes does not make the messages larger.
    let request = ConsumeRequest {
        queue: "large".to_owned(),
        max_in_flight: 6,
        max_in_flight_bytes: 64 << 20,
        ..ConsumeRequest::default()
    };
    let mut limited = api.consume_with(request).await;
    limited.take(6).await;
    let reserved = api.reserve_now("large", 4).await;
    assert!((1..=4).contains(&reserved.len()), "{}", reserved.len());
    let mut stream = api.consume("large", 100).await;
    stream.take(6 - reserved.len()).await;
}

async fn auto_commit_delivers_at_most_once(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("auto", &["a", "b"]).await;
    let request =
        ConsumeRequest { queue: "auto".to_owned(), auto_commit: true, ..ConsumeRequest::default() };
    let mut stream = api.consume_with(request).await;
    let deliveries = stream.take(2).await;
    assert_eq!(payloads(&deliveries), ["a", "b"]);
    assert!(deliveries.iter().all(|delivery| delivery.receipt.is_empty()));
    drop(stream);
    api.until_stats("auto", |stats| stats.consumers == 0).await;
    assert!(api.reserve_now("auto", 2).await.is_empty());
}

async fn renewed_leases_outlive_their_length(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("long", &["work"]).await;
    let lease = Duration::from_millis(600);
    let request = ConsumeRequest {
        queue: "long".to_owned(),
        lease: duration(lease),
        renew: true,
        ..ConsumeRequest::default()
    };
    let mut stream = api.consume_with(request).await;
    let delivery = stream.next().await;
    // Another consumer waits for three leases without receiving the item.
    let waited = api.reserve("long", 1, lease * 3, lease).await;
    assert!(waited.is_empty(), "a renewed lease does not lapse");
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
}

async fn two_streams_share_items_and_neither_waits_for_the_other(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    // This consumer takes a single item and never settles it.
    let mut stuck = api.consume("shared", 1).await;
    api.push("shared", &["0"]).await;
    stuck.next().await;
    let mut idle = api.consume("shared", 100).await;
    let lines: Vec<String> = (1..100).map(|line| line.to_string()).collect();
    api.push("shared", &lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let seen: HashSet<String> = payloads(&idle.take(99).await).into_iter().collect();
    assert_eq!(seen, lines.into_iter().collect());
}

async fn bytes_in_flight_are_bounded_too(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let large = "x".repeat(1000);
    api.push("bytes", &[&large, &large, &large, &large]).await;
    let request = ConsumeRequest {
        queue: "bytes".to_owned(),
        max_in_flight: 100,
        max_in_flight_bytes: 2500,
        lease: duration(Duration::from_mins(10)),
        ..ConsumeRequest::default()
    };
    let mut stream = api.consume_with(request).await;
    let held = stream.take(2).await;
    assert_eq!(api.reserve_now("bytes", 10).await.len(), 2, "the rest is for others");
    // An item larger than the limit is delivered too, alone.
    api.commit(&[&held[0].receipt, &held[1].receipt]).await;
    let larger = "y".repeat(10_000);
    api.push("bytes", &[&larger]).await;
    assert_eq!(text(&stream.next().await), larger);
}
