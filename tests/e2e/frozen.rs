//! A broker that stands still for a while, as in a paused virtual machine, and wakes.

use std::{collections::HashSet, time::Duration};

use sluicegate_proto::v1::{ConsumeRequest, ItemState, Outcome};

use crate::harness::{Backend, duration, on_both_backends, redis_url, text};

on_both_backends!(what_lapsed_while_the_broker_stood_still_is_not_sent);

const LEASE: Duration = Duration::from_secs(2);

/// It had items for a consumer that did not read. Their leases passed, and on MongoDB another broker has
/// handed them out meanwhile.
async fn what_lapsed_while_the_broker_stood_still_is_not_sent(backend: Backend) {
    let store = backend.store();
    let launch = match backend {
        Backend::Mongo => store.launch().signals(&redis_url()),
        Backend::Sqlite => store.launch(),
    };
    let frozen = launch.start().await;
    let api = frozen.api().await;
    // Far more than the transport takes from a consumer that does not read.
    let payload = |n: usize| format!("{n:02}{}", "x".repeat(600_000));
    let payloads: Vec<String> = (0..12).map(payload).collect();
    for payload in &payloads {
        api.push("work", &[payload.as_str()]).await;
    }
    let mut stream = api
        .consume_with(ConsumeRequest {
            queue: "work".to_owned(),
            max_in_flight: 12,
            lease: duration(LEASE),
            ..ConsumeRequest::default()
        })
        .await;
    api.until_stats("work", |stats| stats.reserved > 2).await;
    frozen.signal("STOP");
    // What the system has taken before arrives all the same.
    let (sent, ()) = stream.during(tokio::time::sleep(LEASE / 4)).await;
    let mut done = Vec::new();
    if backend == Backend::Mongo {
        let other = launch.start().await;
        let api = other.api().await;
        while done.len() < 12 {
            let taken = api.reserve_one("work", Duration::from_mins(1)).await;
            assert_eq!(api.commit(&[&taken.receipt]).await, [Outcome::Ok]);
            done.push(text(&taken));
        }
    } else {
        tokio::time::sleep(LEASE + Duration::from_millis(500)).await;
    }
    frozen.signal("CONT");
    let items = api.list("work", ItemState::Unspecified).await.len();
    assert_eq!(items, 12 - done.len());
    api.push("work", &["last"]).await;
    // One message may have been on its way when the broker was stopped; nothing that it held back is sent after that.
    let (mut late, mut ended) = (0, false);
    let mut committed: HashSet<String> = done.iter().cloned().collect();
    for delivery in sent {
        if api.commit(&[&delivery.receipt]).await == [Outcome::Ok] {
            committed.insert(text(&delivery));
        }
    }
    while !ended || committed.len() < 12 {
        let delivery = stream.next().await;
        let payload = text(&delivery);
        ended |= payload == "last";
        late += usize::from(done.contains(&payload));
        if api.commit(&[&delivery.receipt]).await == [Outcome::Ok] && payload != "last" {
            committed.insert(payload);
        }
    }
    assert!(late <= 1, "{late} items were sent that somebody else had committed");
}
