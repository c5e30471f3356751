//! Push, pop and reserve: order, delay, expiry, waiting.

use std::time::{Duration, SystemTime};

use sluicegate_proto::v1::{ItemState, NewItem, PopRequest, Queue, new_item::Eligibility};

use crate::harness::{
    Api, Backend, LIMIT, at, duration, new_item, on_both_backends, payloads, text,
};

on_both_backends!(
    items_are_delivered_in_the_order_of_their_pushes,
    higher_priority_comes_first,
    nothing_is_handed_out_before_its_time,
    nothing_is_handed_out_after_it_expired,
    a_waiting_reserve_is_woken_by_a_push,
    a_waiting_reserve_ends_empty_when_its_time_is_up,
    pop_takes_for_good,
    a_delivered_item_has_everything_it_was_pushed_with,
    create_returns_an_equal_queue_and_refuses_a_different_one,
    stats_count_by_state,
    lists_are_paged,
);

const LEASE: Duration = Duration::from_mins(10);

async fn pop(api: &Api, queue: &str, max_items: i32) -> Vec<String> {
    let request = PopRequest { queue: queue.to_owned(), max_items, wait: None };
    let items = api.queue.clone().pop(request).await.expect("an answer").into_inner().items;
    items.iter().map(|item| String::from_utf8(item.payload.to_vec()).expect("text")).collect()
}

async fn items_are_delivered_in_the_order_of_their_pushes(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let lines: Vec<String> = (0..50).map(|line| line.to_string()).collect();
    for batch in lines.chunks(7) {
        let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
        api.push("order", &batch).await;
    }
    let mut seen = Vec::new();
    while seen.len() < lines.len() {
        let deliveries = api.reserve_now("order", 8).await;
        assert!(!deliveries.is_empty(), "{} of {} items", seen.len(), lines.len());
        seen.extend(payloads(&deliveries));
    }
    assert_eq!(seen, lines);
}

async fn higher_priority_comes_first(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let prioritised = |payload: &str, priority| NewItem { priority, ..new_item(payload) };
    api.push_items("order", vec![prioritised("low", 0), prioritised("mid", 4)]).await;
    api.push_items("order", vec![prioritised("high", 9), prioritised("high too", 9)]).await;
    let deliveries = api.reserve_now("order", 10).await;
    assert_eq!(payloads(&deliveries), ["high", "high too", "mid", "low"]);
}

async fn nothing_is_handed_out_before_its_time(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let later = Some(Eligibility::Delay(duration(Duration::from_millis(700)).expect("set")));
    let never = SystemTime::now() + Duration::from_hours(1);
    let result = api
        .push_items(
            "later",
            vec![
                NewItem {
                    eligibility: Some(Eligibility::EligibleTime(never.into())),
                    ..new_item("hour")
                },
                NewItem { eligibility: later, ..new_item("soon") },
                new_item("now"),
            ],
        )
        .await;
    let soon = api.item("later", &result[1].id).await.expect("the item");
    assert_eq!(soon.state(), ItemState::Delayed);
    assert_eq!(payloads(&api.reserve_now("later", 10).await), ["now"]);
    // Without a fallback poll, only the timer for the next eligible item can deliver this one.
    let delivery = api.reserve_one("later", LEASE).await;
    assert_eq!(text(&delivery), "soon");
    assert!(
        SystemTime::now() >= at(soon.eligible_time.as_ref()),
        "it was delivered before its time"
    );
}

async fn nothing_is_handed_out_after_it_expired(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let ttl = duration(Duration::from_millis(400));
    api.push_items("fresh", vec![NewItem { ttl, ..new_item("perishable") }]).await;
    // This item becomes eligible only after the other one has expired. Its delivery ends the wait.
    let delay = Some(Eligibility::Delay(duration(Duration::from_millis(800)).expect("set")));
    api.push_items("clock", vec![NewItem { eligibility: delay, ..new_item("tick") }]).await;
    api.reserve_one("clock", LEASE).await;
    assert!(api.reserve_now("fresh", 10).await.is_empty());
    assert!(pop(&api, "fresh", 10).await.is_empty());
}

async fn a_waiting_reserve_is_woken_by_a_push(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.create(Queue { name: "quiet".to_owned(), ..Queue::default() }).await;
    let waiting = tokio::spawn({
        let api = api.clone();
        async move { api.reserve_one("quiet", LEASE).await }
    });
    api.until_stats("quiet", |stats| stats.consumers == 1).await;
    api.push("quiet", &["wake up"]).await;
    assert_eq!(text(&waiting.await.expect("no panic")), "wake up");
}

async fn a_waiting_reserve_ends_empty_when_its_time_is_up(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let wait = Duration::from_millis(300);
    let started = std::time::Instant::now();
    let deliveries =
        crate::harness::within("the answer", api.reserve("empty", 1, wait, LEASE)).await;
    assert!(deliveries.is_empty());
    assert!(started.elapsed() >= wait, "it waited");
}

async fn pop_takes_for_good(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let results = api.push("pops", &["a", "b", "c"]).await;
    assert_eq!(pop(&api, "pops", 2).await, ["a", "b"]);
    assert_eq!(pop(&api, "pops", 0).await, ["c"], "0 means 1");
    assert!(pop(&api, "pops", 1).await.is_empty());
    let gone = api.item("pops", &results[0].id).await.expect_err("no such item");
    assert_eq!(gone.code(), tonic::Code::NotFound);
}

async fn a_delivered_item_has_everything_it_was_pushed_with(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let payload: Vec<u8> = (0..=255).collect();
    let item = NewItem {
        payload: payload.clone().into(),
        content_type: "application/octet-stream".to_owned(),
        headers: [("Trace.Id", "a1"), ("$strange", "käse")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        priority: 3,
        ttl: duration(Duration::from_hours(1)),
        ..NewItem::default()
    };
    let pushed = api.push_items("full", vec![item.clone()]).await.remove(0);
    let kept = api.item("full", &pushed.id).await.expect("the item");
    assert_eq!((kept.payload.as_ref(), &kept.content_type), (&payload[..], &item.content_type));
    assert_eq!((&kept.headers, kept.priority), (&item.headers, 3));
    assert_eq!((kept.state(), kept.attempt, kept.deliveries), (ItemState::Ready, 1, 0));
    assert_eq!((kept.id.as_str(), kept.queue.as_str()), (pushed.id.as_str(), "full"));
    let life = at(kept.expire_time.as_ref()).duration_since(at(kept.create_time.as_ref()));
    assert_eq!(life.expect("it expires after its creation").as_secs(), 3600);
    let delivery = api.reserve_one("full", LEASE).await;
    let delivered = delivery.item.expect("an item");
    assert_eq!((delivered.payload.as_ref(), &delivered.headers), (&payload[..], &item.headers));
    assert_eq!((delivered.state(), delivered.deliveries), (ItemState::Reserved, 1));
}

async fn create_returns_an_equal_queue_and_refuses_a_different_one(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let wanted = Queue {
        name: "made".to_owned(),
        max_attempts: Some(5),
        lease: duration(LEASE),
        ..Queue::default()
    };
    let made = api.create(wanted.clone()).await;
    assert_eq!((made.max_attempts, made.group.as_str()), (Some(5), "default"));
    assert_eq!(api.create(wanted.clone()).await, made, "the same settings are returned");
    let other = Queue { max_attempts: Some(6), ..wanted };
    let request = sluicegate_proto::v1::CreateQueueRequest { queue: Some(other) };
    let refused = api.admin.clone().create_queue(request).await.expect_err("other settings");
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    // A queue is also created by its first push.
    api.push("other", &["x"]).await;
    let request = sluicegate_proto::v1::ListQueuesRequest::default();
    let listed = api.admin.clone().list_queues(request).await.expect("a list").into_inner().queues;
    let names: Vec<_> = listed.iter().map(|queue| queue.name.as_str()).collect();
    assert_eq!(names, ["made", "other"]);
}

async fn stats_count_by_state(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let delay = Some(Eligibility::Delay(duration(LIMIT * 10).expect("set")));
    let mut items: Vec<NewItem> = (0..5).map(|number| new_item(&number.to_string())).collect();
    items.push(NewItem { eligibility: delay, ..new_item("later") });
    api.push_items("counted", items).await;
    let deliveries = api.reserve_now("counted", 2).await;
    api.commit(&[&deliveries[0].receipt]).await;
    api.until_stats("counted", |stats| {
        (stats.ready, stats.delayed, stats.reserved) == (3, 1, 1)
            && (stats.pushed, stats.delivered, stats.committed) == (6, 2, 1)
    })
    .await;
}

async fn lists_are_paged(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let lines: Vec<String> = (0..250).map(|line| line.to_string()).collect();
    let pushed: Vec<&str> = lines.iter().map(String::as_str).collect();
    api.push("listed", &pushed).await;
    api.reserve_now("listed", 10).await;
    let ready = api.list("listed", ItemState::Ready).await;
    let seen: Vec<_> = ready.iter().map(|item| String::from_utf8_lossy(&item.payload)).collect();
    assert_eq!(seen, lines[10..], "in hand-out order, each once");
    assert_eq!(api.list("listed", ItemState::Reserved).await.len(), 10);
    assert_eq!(api.list("listed", ItemState::Unspecified).await.len(), 250);
}
