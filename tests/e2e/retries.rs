//! Failed attempts: counted equally whatever the failure, delayed by the retry policy,
//! dead-lettered at exactly the limit, and redriven.

use std::time::{Duration, Instant};

use sluicegate_client::{Client, Retry};
use sluicegate_proto::v1::{
    DeleteItemRequest, Delivery, GetQueueRequest, Item, ItemState, NewItem, Outcome, Queue,
    RedriveFilter, RedriveItemsRequest, RetryPolicy, RollbackItem,
};

use crate::harness::{
    Api, Backend, LIMIT, at, duration, new_item, on_both_backends, payloads, redis_url, text, until,
};

on_both_backends!(
    rollbacks_lapses_and_dropped_streams_count_alike,
    a_kept_attempt_never_leads_to_the_dead_letter_queue,
    the_retry_policy_delays_each_attempt_more,
    jitter_shortens_delays_by_at_most_its_share,
    an_item_at_its_limit_goes_to_a_queue_created_for_it,
    a_queue_that_discards_drops_its_items_at_the_limit,
    a_queue_with_default_settings_delays_retries,
    a_rejected_item_is_dead_lettered_immediately_and_can_be_redriven,
    a_reserved_item_is_not_deleted_by_accident,
    a_consumer_that_is_killed_each_time_dead_letters_its_item,
    a_redrive_returns_the_items_of_its_filter,
    a_redrive_respects_its_rate,
    failing_handlers_dead_letter_with_their_error_as_reason,
);

const LONG: Duration = Duration::from_mins(10);
const SHORT: Duration = Duration::from_millis(200);

async fn create(api: &Api, max_attempts: i32) {
    api.create(Queue {
        name: "work".to_owned(),
        max_attempts: Some(max_attempts),
        dead_letter_queue: "dead".to_owned(),
        retry_policy: Some(RetryPolicy::default()), // without a delay
        ..Queue::default()
    })
    .await;
}

fn item(delivery: &Delivery) -> &Item {
    delivery.item.as_ref().expect("an item")
}

/// The ways in which an attempt can fail.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Failure {
    Rollback,
    Lapse,
    Drop,
}

/// Takes the only item, checks its attempt, and fails it.
async fn fail(api: &Api, attempt: i32, failure: Failure) {
    match failure {
        Failure::Rollback => {
            let delivery = api.reserve_one("work", LONG).await;
            assert_eq!(item(&delivery).attempt, attempt);
            let outcome = api.rollback(&delivery.receipt, "given back").await;
            assert!(matches!(outcome, Outcome::Ok | Outcome::DeadLettered), "{outcome:?}");
        }
        Failure::Lapse => {
            let delivery = api.reserve_one("work", SHORT).await;
            assert_eq!(item(&delivery).attempt, attempt);
            until("the lease lapses", || async {
                let now = api.item("work", &item(&delivery).id).await;
                now.map_or(Some(()), |now| (now.state() == ItemState::Ready).then_some(()))
            })
            .await;
        }
        Failure::Drop => {
            let mut stream = api.consume_counting("work", 1).await;
            let delivery = stream.next().await;
            assert_eq!(item(&delivery).attempt, attempt);
        }
    }
}

async fn rollbacks_lapses_and_dropped_streams_count_alike(backend: Backend) {
    use Failure::{Drop, Lapse, Rollback};
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, 3).await;
    // Each way to fail is used once as the first, the second and the last one.
    for (round, failures) in
        [[Rollback, Lapse, Drop], [Lapse, Drop, Rollback], [Drop, Rollback, Lapse]]
            .into_iter()
            .enumerate()
    {
        let payload = format!("round {round}");
        let id = api.push("work", &[&payload]).await.remove(0).id;
        for (attempt, failure) in (1..).zip(failures) {
            let early = api.list("dead", ItemState::Unspecified).await;
            assert_eq!(
                early.len(),
                round,
                "dead-lettered before attempt {attempt} of {failures:?}"
            );
            fail(&api, attempt, failure).await;
        }
        // The next reserve notices the lapsed lease, and must not return the item.
        assert!(api.reserve_now("work", 10).await.is_empty(), "a fourth attempt: {failures:?}");
        let dead = api.until_state("dead", &id, ItemState::Ready).await;
        assert_eq!((dead.deliveries, dead.origin_queue.as_str()), (3, "work"), "{failures:?}");
        assert_eq!(dead.payload, payload.as_bytes());
        match failures[2] {
            Rollback => assert_eq!(dead.last_reason, "given back"),
            Lapse | Drop => assert!(!dead.last_reason.is_empty(), "{failures:?} has no reason"),
        }
        api.until_stats("work", |stats| stats.dead_lettered == round as i64 + 1).await;
    }
}

async fn a_kept_attempt_never_leads_to_the_dead_letter_queue(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, 1).await;
    api.push("work", &["x"]).await;
    for deliveries in 1..=5 {
        let delivery = api.reserve_one("work", LONG).await;
        assert_eq!((item(&delivery).attempt, item(&delivery).deliveries), (1, deliveries));
        let kept = RollbackItem {
            receipt: delivery.receipt.clone(),
            keep_attempt: true,
            ..RollbackItem::default()
        };
        assert_eq!(api.rollback_item(kept).await, Outcome::Ok);
    }
    let delivery = api.reserve_one("work", LONG).await;
    assert_eq!(api.rollback(&delivery.receipt, "at last").await, Outcome::DeadLettered);
    let dead = api.list("dead", ItemState::Ready).await;
    assert_eq!(dead[0].last_reason, "at last");
}

/// Fails an item by the queue's policy. Returns the resulting delay.
async fn delay_after_failure(api: &Api) -> Duration {
    let delivery = api.reserve_one("work", LONG).await;
    let before = std::time::SystemTime::now();
    let back = RollbackItem { receipt: delivery.receipt.clone(), ..RollbackItem::default() };
    assert_eq!(api.rollback_item(back).await, Outcome::Ok);
    let delayed = api.item("work", &item(&delivery).id).await.expect("the item");
    at(delayed.eligible_time.as_ref()).duration_since(before).expect("a delay")
}

/// Policies of minutes would make the tests wait. The requested delays are far greater than what a
/// slow machine adds to them.
async fn the_retry_policy_delays_each_attempt_more(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let policy = RetryPolicy {
        initial_delay: duration(Duration::from_millis(400)),
        multiplier: 3.0,
        max_delay: duration(Duration::from_millis(2500)),
        jitter: 0.0,
    };
    api.create(Queue { name: "work".to_owned(), retry_policy: Some(policy), ..Queue::default() })
        .await;
    api.push("work", &["x"]).await;
    let slack = Duration::from_millis(300);
    for wanted in [400, 1200, 2500, 2500] {
        let wanted = Duration::from_millis(wanted);
        let failed = Instant::now();
        let delay = delay_after_failure(&api).await;
        // The clocks of store and test agree to within a millisecond.
        assert!(delay + Duration::from_millis(2) >= wanted, "{delay:?}, not {wanted:?}");
        assert!(delay < wanted + slack + failed.elapsed(), "{delay:?}, not {wanted:?}");
        assert!(api.reserve_now("work", 1).await.is_empty() || failed.elapsed() >= wanted);
    }
    // A delay requested by the consumer overrides the policy.
    let delivery = api.reserve_one("work", LONG).await;
    assert_eq!(api.rollback(&delivery.receipt, "at once").await, Outcome::Ok);
    assert_eq!(api.reserve_now("work", 1).await.len(), 1);
}

async fn jitter_shortens_delays_by_at_most_its_share(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let full = Duration::from_hours(1);
    let policy = RetryPolicy {
        initial_delay: duration(full),
        multiplier: 1.0,
        max_delay: duration(full),
        jitter: 0.5,
    };
    api.create(Queue { name: "work".to_owned(), retry_policy: Some(policy), ..Queue::default() })
        .await;
    let lines: Vec<String> = (0..20).map(|line| line.to_string()).collect();
    api.push("work", &lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut delays = Vec::new();
    for _ in 0..lines.len() {
        delays.push(delay_after_failure(&api).await.as_secs());
    }
    let (least, most) =
        (delays.iter().min().expect("delays"), delays.iter().max().expect("delays"));
    assert!(*least >= 1799 && *most <= 3660, "{delays:?}");
    assert!(most - least > 300, "twenty delays this close together are not random: {delays:?}");
}

/// No default discards items. A dead-letter queue that is not named is created when it is needed,
/// in the group of its source, whether the last attempt fails by a rollback or by a lapsed lease.
/// Its own items stay in it.
async fn an_item_at_its_limit_goes_to_a_queue_created_for_it(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let queue = Queue {
        name: "work".to_owned(),
        group: "eu".to_owned(),
        max_attempts: Some(2),
        ..Queue::default()
    };
    api.create(queue).await;
    for (round, failure) in (1..).zip([Failure::Lapse, Failure::Rollback]) {
        let id = api.push("work", &["x"]).await.remove(0).id;
        fail(&api, 1, failure).await;
        fail(&api, 2, failure).await;
        assert!(api.reserve_now("work", 1).await.is_empty());
        let dead = api.until_state("work.dead", &id, ItemState::Ready).await;
        assert_eq!((dead.origin_queue.as_str(), dead.dead_letter_attempts), ("work", 2));
        assert!(dead.dead_letter_time.is_some());
        api.until_stats("work", |stats| (stats.dead_lettered, stats.discarded) == (round, 0)).await;
    }
    let request = GetQueueRequest { name: "work.dead".to_owned() };
    let made = api.admin.clone().get_queue(request).await.expect("the queue").into_inner();
    assert_eq!(made.queue.expect("a queue").group, "eu");
    // Failures in the dead-letter queue have no further consequence.
    for _ in 0..30 {
        let delivery = api.reserve_now("work.dead", 1).await.remove(0);
        assert_eq!(api.rollback(&delivery.receipt, "still").await, Outcome::Ok);
    }
    until("the log mentions it", || async {
        broker.log().contains("items were dead-lettered").then_some(())
    })
    .await;
}

/// An item that fails in a queue with default settings is not retried a thousand times a second.
async fn a_queue_with_default_settings_delays_retries(backend: Backend) {
    let store = backend.store();
    let broker = store
        .launch()
        .flag("default-retry-initial-delay", "4m")
        .flag("default-retry-jitter", "0")
        .start()
        .await;
    let api = broker.api().await;
    api.push("work", &["x"]).await;
    let delivery = api.reserve_one("work", LONG).await;
    // A released item is ready immediately,
    let kept =
        RollbackItem { receipt: delivery.receipt, keep_attempt: true, ..RollbackItem::default() };
    assert_eq!(api.rollback_item(kept).await, Outcome::Ok);
    // a failed one after the broker's delay,
    let delay = delay_after_failure(&api).await;
    assert!((239..=240).contains(&delay.as_secs()), "{delay:?}");
    assert!(api.reserve_now("work", 1).await.is_empty());
    // and one whose rollback requests it immediately.
    api.push("work", &["y"]).await;
    let delivery = api.reserve_one("work", LONG).await;
    assert_eq!(api.rollback(&delivery.receipt, "at once").await, Outcome::Ok);
    assert_eq!(api.reserve_now("work", 1).await.len(), 1);
}

async fn a_rejected_item_is_dead_lettered_immediately_and_can_be_redriven(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["x"]).await;
    let delivery = api.reserve_one("work", LONG).await;
    let id = item(&delivery).id.clone();
    let rejected = RollbackItem {
        receipt: delivery.receipt,
        reason: "not an order".to_owned(),
        dead_letter: true,
        ..RollbackItem::default()
    };
    assert_eq!(api.rollback_item(rejected).await, Outcome::DeadLettered);
    let dead = api.item("work.dead", &id).await.expect("the item");
    assert_eq!((dead.origin_queue.as_str(), dead.last_reason.as_str()), ("work", "not an order"));
    assert_eq!((dead.attempt, dead.dead_letter_attempts), (1, 1));
    let request = RedriveItemsRequest { queue: "work.dead".to_owned(), ..Default::default() };
    let redriven = api.admin.clone().redrive_items(request).await.expect("a redrive").into_inner();
    assert_eq!(redriven.redriven_items, 1);
    let again = api.reserve_one("work", LONG).await;
    assert_eq!((item(&again).dead_letter_time, item(&again).attempt), (None, 1));
}

async fn a_reserved_item_is_not_deleted_by_accident(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let id = api.push("work", &["x"]).await.remove(0).id;
    let held = api.reserve_one("work", LONG).await;
    let delete = |only_if: ItemState| DeleteItemRequest {
        queue: "work".to_owned(),
        id: id.clone(),
        only_if: only_if.into(),
    };
    let refused =
        api.admin.clone().delete_item(delete(ItemState::Ready)).await.expect_err("reserved");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("is reserved"), "{}", refused.message());
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok]);
}

async fn a_queue_that_discards_drops_its_items_at_the_limit(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let queue = Queue {
        name: "work".to_owned(),
        max_attempts: Some(2),
        discard_failed: true,
        ..Queue::default()
    };
    api.create(queue).await;
    let id = api.push("work", &["x"]).await.remove(0).id;
    fail(&api, 1, Failure::Rollback).await;
    fail(&api, 2, Failure::Rollback).await;
    assert!(api.reserve_now("work", 1).await.is_empty());
    let gone = api.item("work", &id).await.expect_err("no such item");
    assert_eq!(gone.code(), tonic::Code::NotFound);
    api.until_stats("work", |stats| (stats.dead_lettered, stats.discarded) == (0, 1)).await;
}

/// The connection is cut each time without a farewell, as if the process had been killed.
async fn a_consumer_that_is_killed_each_time_dead_letters_its_item(backend: Backend) {
    let store = backend.store();
    let launch = store.launch().without_poll();
    let brokers = match backend {
        Backend::Mongo => {
            let launch = launch.signals(&redis_url());
            vec![launch.start().await, launch.start().await]
        }
        Backend::Sqlite => vec![launch.start().await],
    };
    let api = brokers[0].api().await;
    api.create(Queue {
        name: "work".to_owned(),
        max_deliveries: Some(4),
        dead_letter_queue: "dead".to_owned(),
        ..Queue::default()
    })
    .await;
    api.push("work", &["poison"]).await;
    let mut dead = api.consume("dead", 1).await;
    for times in 1..=4 {
        // A runtime of its own ends the connection when it is dropped.
        let address = brokers[times % brokers.len()].address.clone();
        let seen = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime");
            let seen = runtime.block_on(async {
                let api = Api::connect(&address).await;
                let mut stream = api.consume("work", 10).await;
                let delivery = stream.next().await;
                std::mem::forget(stream); // not dropped: the socket is closed without a farewell
                (item(&delivery).attempt, item(&delivery).deliveries)
            });
            runtime.shutdown_background();
            seen
        });
        let times = i32::try_from(times).expect("a small number");
        assert_eq!(seen.await.expect("no panic"), (1, times), "no attempt is counted");
    }
    let delivery = dead.next().await;
    assert_eq!(text(&delivery), "poison");
    let item = item(&delivery);
    assert_eq!((item.deliveries, item.origin_queue.as_str()), (5, "work"));
    assert_eq!(item.last_reason, "handed out 4 times and never settled");
    assert!(api.list("work", ItemState::Unspecified).await.is_empty());
}

async fn redrive(api: &Api, request: RedriveItemsRequest) -> i64 {
    let request = RedriveItemsRequest { queue: "dead".to_owned(), ..request };
    api.admin.clone().redrive_items(request).await.expect("an answer").into_inner().redriven_items
}

/// Dead-letters one item per payload, with the payload as the reason. Returns the items' ids.
async fn bury(api: &Api, payloads: &[&str]) -> Vec<String> {
    let ids = api.push("work", payloads).await.into_iter().map(|result| result.id).collect();
    for payload in payloads {
        let delivery = api.reserve_one("work", LONG).await;
        assert_eq!(text(&delivery), *payload);
        assert_eq!(api.rollback(&delivery.receipt, payload).await, Outcome::DeadLettered);
    }
    ids
}

async fn a_redrive_returns_the_items_of_its_filter(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    create(&api, 1).await;
    let ids = bury(&api, &["disk full 1", "timeout 1", "disk full 2", "timeout 2", "odd"]).await;
    // An item that was pushed to the dead-letter queue itself has no origin.
    api.push("dead", &["stray"]).await;
    let mut stream = api.consume("work", 10).await;

    let by_reason =
        RedriveFilter { reason_contains: "disk".to_owned(), ..RedriveFilter::default() };
    let request = RedriveItemsRequest { filter: Some(by_reason), ..Default::default() };
    assert_eq!(redrive(&api, request).await, 2);
    let back = stream.take(2).await;
    assert_eq!(payloads(&back), ["disk full 1", "disk full 2"]);
    assert!(
        back.iter().all(|delivery| item(delivery).attempt == 1),
        "their attempts start again at 1"
    );

    let by_id = RedriveFilter { ids: vec![ids[4].clone()], ..RedriveFilter::default() };
    let request = RedriveItemsRequest {
        filter: Some(by_id),
        to_queue: "other".to_owned(),
        ..Default::default()
    };
    assert_eq!(redrive(&api, request).await, 1);
    assert_eq!(text(&api.reserve_one("other", LONG).await), "odd");

    let elsewhere =
        RedriveFilter { origin_queue: "elsewhere".to_owned(), ..RedriveFilter::default() };
    let request = RedriveItemsRequest { filter: Some(elsewhere), ..Default::default() };
    assert_eq!(redrive(&api, request).await, 0, "none came from there");
    let request = GetQueueRequest { name: "elsewhere".to_owned() };
    let missing = api.admin.clone().get_queue(request).await.expect_err("no such queue");
    assert_eq!(missing.code(), tonic::Code::NotFound, "a redrive creates no origin");

    let one = RedriveItemsRequest { max_items: 1, ..Default::default() };
    assert_eq!(redrive(&api, one).await, 1);
    assert_eq!(redrive(&api, RedriveItemsRequest::default()).await, 1);
    assert_eq!(payloads(&stream.take(2).await), ["timeout 1", "timeout 2"]);
    let left = api.list("dead", ItemState::Unspecified).await;
    assert_eq!(left.len(), 1);
    assert_eq!(&left[0].payload[..], b"stray");
}

async fn a_redrive_respects_its_rate(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, 1).await;
    let lines: Vec<String> = (0..30).map(|line| line.to_string()).collect();
    bury(&api, &lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let started = Instant::now();
    let request = RedriveItemsRequest { rate: 10, ..Default::default() };
    assert_eq!(redrive(&api, request).await, 30);
    // The first item is redriven immediately, the thirtieth after 29 tenths of a second.
    assert!(started.elapsed() >= Duration::from_millis(2800), "{:?}", started.elapsed());
    assert_eq!(api.reserve_now("work", 100).await.len(), 30);
}

/// Through the client library: an error counts as a failed attempt, and so does a panic.
async fn failing_handlers_dead_letter_with_their_error_as_reason(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, 3).await;
    let items: Vec<NewItem> = ["error", "panic", "busy"].map(new_item).into();
    api.push_items("work", items).await;
    let client = Client::connect(&broker.address).await.expect("a client");
    let stop = sluicegate_client::CancellationToken::new();
    let consumer = client.consumer("work").shutdown(stop.clone());
    let running = tokio::spawn(consumer.run(|delivery| async move {
        let busy = delivery.item().deliveries <= 5;
        match delivery.text().expect("text") {
            "panic" => panic!("on purpose"),
            "busy" if busy => Err(Retry::new("busy").after(Duration::ZERO).keep_attempt()),
            other => Err(Retry::new(format!("no {other}"))),
        }
    }));
    let mut dead = api.consume("dead", 10).await;
    let mut reasons = Vec::new();
    for delivery in dead.take(3).await {
        let deliveries = item(&delivery).deliveries - 1;
        reasons.push((text(&delivery), deliveries, item(&delivery).last_reason.clone()));
    }
    reasons.sort();
    let wanted = [
        ("busy", 8, "no busy"),
        ("error", 3, "no error"),
        ("panic", 3, "handler panicked: on purpose"),
    ];
    let wanted = wanted.map(|(text, count, reason)| (text.to_owned(), count, reason.to_owned()));
    assert_eq!(reasons, wanted);
    stop.cancel();
    let summary = tokio::time::timeout(LIMIT, running).await.expect("an end").expect("no panic");
    assert_eq!(summary.expect("a summary").dead_lettered, 3);
}
