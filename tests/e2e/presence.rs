//! Brokers and consumers as every broker shows them.

use std::time::{Duration, SystemTime};

use sluicegate_proto::v1::{
    Broker, ConsumeRequest, Consumer, ConsumerKind, GetBrokerRequest, GetBrokerResponse,
    ListBrokersRequest, ListConsumersRequest, Outcome, ReserveRequest,
};
use tonic::Code;

use crate::harness::{Api, Backend, at, bad_fields, duration, on_both_backends, redis_url, until};

on_both_backends!(
    a_broker_describes_itself,
    a_consumer_is_shown_with_what_it_holds,
    a_waiting_call_is_a_consumer,
);

async fn this(api: &Api) -> GetBrokerResponse {
    api.admin.clone().get_broker(GetBrokerRequest {}).await.expect("a broker").into_inner()
}

async fn brokers(api: &Api) -> Vec<Broker> {
    let answer = api.admin.clone().list_brokers(ListBrokersRequest {}).await.expect("a list");
    answer.into_inner().brokers
}

/// Returns all consumers that match, two at a time.
async fn consumers(api: &Api, queue: &str, broker: &str) -> Vec<Consumer> {
    let (mut found, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListConsumersRequest {
            queue: queue.to_owned(),
            broker: broker.to_owned(),
            page_size: 2,
            page_token,
            ..ListConsumersRequest::default()
        };
        let page = api.admin.clone().list_consumers(request).await.expect("a page").into_inner();
        assert!(page.consumers.len() <= 2);
        found.extend(page.consumers);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return found;
        }
    }
}

/// Waits until there is one consumer of the queue that is as `wanted`.
async fn until_shown(api: &Api, queue: &str, wanted: impl Fn(&Consumer) -> bool) -> Consumer {
    until(&format!("the consumer of {queue}"), || async {
        let shown = consumers(api, queue, "").await;
        assert!(shown.len() <= 1, "{shown:?}");
        shown.into_iter().find(|consumer| wanted(consumer))
    })
    .await
}

async fn a_broker_describes_itself(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().flag("max-payload-bytes", "1MiB").start().await;
    let api = broker.api().await;
    let answer = this(&api).await;
    let shown = answer.broker.expect("the broker in the answer");
    assert_eq!(shown.version, env!("CARGO_PKG_VERSION"));
    assert!(shown.store_healthy && shown.signals_healthy && !shown.draining, "{shown:?}");
    assert!(shown.address.starts_with("127.0.0.1:") && !shown.host.is_empty(), "{shown:?}");
    assert!(at(shown.start_time.as_ref()) <= at(shown.report_time.as_ref()));
    let limits = answer.limits.expect("limits");
    assert_eq!((limits.max_payload_bytes, limits.max_batch), (1 << 20, 1_000));
    let features = answer.features.expect("features");
    assert_eq!((features.shared_store, features.durable_store), (backend == Backend::Mongo, true));
    let listed = brokers(&api).await;
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].id, &listed[0].address), (&shown.id, &shown.address));
}

async fn a_consumer_is_shown_with_what_it_holds(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("held", &["a", "b", "c"]).await;
    let request = ConsumeRequest {
        queue: "held".to_owned(),
        max_in_flight: 5,
        consumer: "worker".to_owned(),
        lease: duration(Duration::from_mins(10)),
        ..ConsumeRequest::default()
    };
    let mut stream = api.consume_with(request).await;
    let deliveries = stream.take(3).await;
    let shown = until_shown(&api, "held", |consumer| consumer.in_flight == 3).await;
    assert_eq!((shown.name.as_str(), shown.kind()), ("worker", ConsumerKind::Stream));
    assert_eq!((shown.max_in_flight, shown.delivered, shown.committed), (5, 3, 0));
    assert!(shown.peer.starts_with("127.0.0.1:"), "{shown:?}");
    let (since, end) = (shown.oldest_since.as_ref(), shown.oldest_lease_end_time.as_ref());
    assert!(at(since) >= at(shown.since.as_ref()));
    assert!(at(end) > SystemTime::now() + Duration::from_mins(8));
    assert!(at(shown.next_lease_end_time.as_ref()) <= at(end), "{shown:?}");
    // What is settled in another way counts as settled, not as committed.
    let receipts: Vec<&str> = deliveries.iter().map(|item| item.receipt.as_str()).collect();
    assert_eq!(api.commit(&receipts[..2]).await, [Outcome::Ok; 2]);
    api.rollback(receipts[2], "").await;
    let again = stream.next().await;
    let shown = until_shown(&api, "held", |consumer| consumer.delivered == 4).await;
    assert_eq!((shown.in_flight, shown.committed), (1, 2));
    assert_eq!(api.commit(&[&again.receipt]).await, [Outcome::Ok]);
    let shown = until_shown(&api, "held", |consumer| consumer.in_flight == 0).await;
    assert_eq!((shown.committed, shown.oldest_since), (3, None));
    assert_eq!(shown.next_lease_end_time, None);
    drop(stream);
    until("an end", || async { consumers(&api, "held", "").await.is_empty().then_some(()) }).await;
}

async fn a_waiting_call_is_a_consumer(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.ensure("waiting").await;
    let request = ReserveRequest {
        queue: "waiting".to_owned(),
        max_items: 7,
        wait: duration(Duration::from_mins(5)),
        consumer: "caller".to_owned(),
        ..ReserveRequest::default()
    };
    let caller = api.queue.clone();
    let call = tokio::spawn(async move { caller.clone().reserve(request).await });
    let shown = until_shown(&api, "waiting", |_| true).await;
    assert_eq!((shown.name.as_str(), shown.kind()), ("caller", ConsumerKind::Call));
    assert_eq!((shown.max_in_flight, shown.in_flight), (7, 0));
    call.abort();
    let gone = || async { consumers(&api, "waiting", "").await.is_empty().then_some(()) };
    until("an end of the call", gone).await;
    let request = ListConsumersRequest { page_token: "?".to_owned(), ..Default::default() };
    let refused = api.admin.clone().list_consumers(request).await.expect_err("no token");
    assert_eq!(
        (refused.code(), bad_fields(&refused)),
        (Code::InvalidArgument, vec!["page_token".to_owned()])
    );
}

/// Each broker shows the consumers of both, and a broker that has ended is gone with its consumers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_broker_shows_the_consumers_of_all() {
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    for queue in ["a", "b"] {
        api.ensure(queue).await;
    }
    let _streams = [api.consume("a", 1).await, api.consume("b", 1).await];
    let _others = [remote.consume("a", 2).await, remote.consume("a", 3).await];
    let own = this(&api).await.broker.expect("a broker").id;
    let other = this(&remote).await.broker.expect("a broker").id;
    for (asked, own_consumers) in [(&api, 1), (&remote, 2)] {
        let shown = until("four consumers", || async {
            let shown = consumers(asked, "", "").await;
            (shown.len() == 4).then_some(shown)
        })
        .await;
        let queues: Vec<&str> = shown.iter().map(|consumer| consumer.queue.as_str()).collect();
        assert_eq!(queues, ["a", "a", "a", "b"]);
        assert_eq!(consumers(asked, "a", &own).await.len(), 1);
        for (queue_prefix, size) in [("", 4), ("a", 3), ("b", 1), ("ab", 0)] {
            let request = ListConsumersRequest {
                queue_prefix: queue_prefix.to_owned(),
                page_size: 1,
                ..ListConsumersRequest::default()
            };
            let page = asked.admin.clone().list_consumers(request).await.expect("a page");
            assert_eq!(page.into_inner().total_size, size, "{queue_prefix:?}");
        }
        let elsewhere = consumers(asked, "", &other).await;
        let most: Vec<i64> = elsewhere.iter().map(|consumer| consumer.max_in_flight).collect();
        assert_eq!(most, [2, 3]);
        let mut listed = brokers(asked).await;
        listed.sort_by_key(|broker| broker.consumers_left_out);
        assert_eq!(listed.len(), 2);
        assert!(listed.iter().all(|broker| broker.store_healthy && broker.consumers == 2));
        // Figures of a queue count those of all brokers too.
        let stats = until("all consumers in the figures", || async {
            let stats = asked.stats("a").await;
            (stats.consumers_of_all_brokers == 3).then_some(stats)
        })
        .await;
        assert_eq!(stats.consumers, own_consumers);
    }
    there.stop().await;
    until("one broker", || async { (brokers(&api).await.len() == 1).then_some(()) }).await;
    assert_eq!(consumers(&api, "", "").await.len(), 2);
    until("the consumers that are left", || async {
        (api.stats("a").await.consumers_of_all_brokers == 1).then_some(())
    })
    .await;
}
