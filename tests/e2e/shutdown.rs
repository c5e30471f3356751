//! A broker that is told to stop: nothing stays leased, and every client is told.

use std::time::{Duration, Instant};

use sluicegate_proto::v1::{ItemState, Queue, ReserveRequest};
use tonic::Code;

use crate::harness::{Backend, error_reason, on_both_backends, retry_after, text, until, within};

on_both_backends!(
    a_stop_ends_streams_and_leaves_nothing_leased,
    a_stop_frees_the_items_of_a_client_that_does_not_read,
    a_hang_up_ends_nothing,
);

async fn a_stop_ends_streams_and_leaves_nothing_leased(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().flag("shutdown-grace", "10s").start().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c", "d"]).await;
    let mut stream = api.consume("work", 2).await;
    stream.take(2).await;
    api.create(Queue { name: "empty".to_owned(), ..Queue::default() }).await;
    let waiting = tokio::spawn({
        let api = api.clone();
        async move {
            let request = ReserveRequest {
                queue: "empty".to_owned(),
                wait: crate::harness::duration(Duration::from_secs(500)),
                ..Default::default()
            };
            api.queue.clone().reserve(request).await
        }
    });
    api.until_stats("empty", |stats| stats.consumers == 1).await;

    let mut health = tonic_health::pb::health_client::HealthClient::new(api.channel.clone());
    let request = tonic_health::pb::HealthCheckRequest { service: String::new() };
    let mut health = health.watch(request).await.expect("health").into_inner();
    let status = health.message().await.expect("health").expect("a first message");
    assert_eq!(status.status(), tonic_health::ServingStatus::Serving.into());

    let stopped = Instant::now();
    broker.terminate();
    let ended = within("the end of the stream", stream.try_next()).await.expect_err("an end");
    assert_eq!(ended.code(), Code::Unavailable, "{ended:?}");
    assert!(retry_after(&ended).is_some(), "{ended:?}");
    error_reason(&ended);
    // A waiting call is answered, with nothing or with a retry, but is not cut off.
    match within("the answer to the waiting call", waiting).await.expect("no panic") {
        Ok(answer) => assert!(answer.into_inner().deliveries.is_empty()),
        Err(status) => {
            assert_eq!(status.code(), Code::Unavailable, "{status:?}");
            assert!(retry_after(&status).is_some(), "{status:?}");
        }
    }
    match within("the change of health", health.message()).await {
        Ok(Some(status)) => {
            assert_eq!(status.status(), tonic_health::ServingStatus::NotServing.into());
        }
        other => panic!("health did not say NOT_SERVING: {other:?}"),
    }
    let ended = broker.ended().await;
    assert!(ended.status.success(), "{ended:?}");
    assert!(stopped.elapsed() < Duration::from_secs(15), "it takes longer than its grace");

    let broker = store.broker().await;
    let api = broker.api().await;
    let mut ready: Vec<String> = api.reserve_now("work", 10).await.iter().map(text).collect();
    ready.sort();
    assert_eq!(
        ready,
        ["a", "b", "c", "d"],
        "all are ready immediately, though leased for ten minutes"
    );
    broker.stop().await;
}

/// The items held by the client are ready after the stop without a failed attempt, and the stop
/// succeeds.
async fn a_stop_frees_the_items_of_a_client_that_does_not_read(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().flag("shutdown-grace", "8s").start().await;
    let api = broker.api().await;
    // The payloads far exceed what the transport accepts from a consumer that does not read.
    let large = "x".repeat(256 * 1024);
    for _ in 0..4 {
        api.push("unread", &[large.as_str(); 6]).await;
    }
    let stream = api.consume("unread", 100).await;
    api.until_stats("unread", |stats| stats.reserved > 0).await;
    broker.stop().await;
    drop(stream);

    let broker = store.broker().await;
    let api = broker.api().await;
    let items = api.list("unread", ItemState::Ready).await;
    assert_eq!(items.len(), 24);
    assert!(items.iter().all(|item| item.attempt == 1), "attempts were counted");
    broker.stop().await;
}

async fn a_hang_up_ends_nothing(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    broker.signal("HUP");
    until("the log mentions it", || async { broker.log().contains("reload").then_some(()) }).await;
    api.push("work", &["a"]).await;
    assert_eq!(api.reserve_now("work", 1).await.len(), 1);
    broker.stop().await;
}
