//! Settings changed through one broker are in force on the others within a second, with and without
//! signals.

use std::time::{Duration, Instant};

use sluicegate_proto::v1::{
    ConsumeRequest, DeleteQueueRequest, GetQueueRequest, ItemState, Outcome, PauseQueueRequest,
    PurgeQueueRequest, Queue, ResumeQueueRequest, UpdateQueueRequest,
};
use tonic::{Code, Status};

use crate::harness::{
    Api, Backend, Broker, LIMIT, at, duration, error_reason, new_item, on_both_backends, payloads,
    redis_url, text, until, within,
};

/// Time after which every broker must have noticed. The promise is a second, and the rest is for a
/// busy machine.
const EVERYWHERE: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_mins(10);

/// Two brokers on one MongoDB. Each must notice the changes made through the other.
struct Pair {
    api: Api,
    remote: Api,
    _brokers: [Broker; 2],
    _store: crate::harness::TestStore,
}

impl Pair {
    /// Starts the brokers without a fallback poll, so that no result depends on it.
    async fn start(signals: &str) -> Self {
        let store = Backend::Mongo.store();
        let launch = store.launch().signals(signals).without_poll();
        let brokers = [launch.start().await, launch.start().await];
        let (api, remote) = (brokers[0].api().await, brokers[1].api().await);
        Self { api, remote, _brokers: brokers, _store: store }
    }
}

/// Makes two tests of each named `async fn(Pair)`: with signals over Redis, and without signals
/// between the brokers, where the settings are compared with those in the store.
macro_rules! with_and_without_signals {
    ($($name:ident),+ $(,)?) => {
        mod over_redis {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(super::Pair::start(&super::redis_url()).await).await;
                }
            )+
        }
        mod without_signals {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(super::Pair::start("local:").await).await;
                }
            )+
        }
    };
}

with_and_without_signals!(
    a_pause_stops_deliveries_everywhere_until_a_resume,
    a_new_lease_and_attempt_limit_apply_everywhere,
    a_new_depth_limit_applies_everywhere,
    consumers_of_a_deleted_queue_are_told_everywhere,
    a_queue_that_is_created_again_is_the_new_one_everywhere,
);

on_both_backends!(
    queues_are_created_side_by_side,
    a_queue_with_items_is_deleted_only_by_force,
    a_purge_deletes_all_but_reserved_items,
    a_full_queue_refuses_pushes_until_there_is_room,
    a_dropped_stream_counts_by_the_current_settings,
);

async fn pause(api: &Api, name: &str) {
    let request = PauseQueueRequest { name: name.to_owned() };
    let queue = api.admin.clone().pause_queue(request).await.expect("an answer").into_inner().queue;
    assert!(queue.expect("the queue").paused);
}

async fn resume(api: &Api, name: &str) {
    let request = ResumeQueueRequest { name: name.to_owned() };
    let queue =
        api.admin.clone().resume_queue(request).await.expect("an answer").into_inner().queue;
    assert!(!queue.expect("the queue").paused);
}

async fn update(api: &Api, queue: Queue, fields: &[&str]) -> Queue {
    let paths = fields.iter().map(|&field| field.to_owned()).collect();
    let request = UpdateQueueRequest {
        queue: Some(queue),
        update_mask: Some(prost_types::FieldMask { paths }),
    };
    let answer = api.admin.clone().update_queue(request).await.expect("an updated queue");
    answer.into_inner().queue.expect("the queue")
}

async fn delete(api: &Api, name: &str, force: bool) -> Result<i64, Status> {
    let request = DeleteQueueRequest { name: name.to_owned(), force };
    Ok(api.admin.clone().delete_queue(request).await?.into_inner().deleted_items)
}

async fn a_pause_stops_deliveries_everywhere_until_a_resume(pair: Pair) {
    let Pair { api, remote, .. } = &pair;
    let mut stream = remote.consume("work", 10).await;
    remote.push("work", &["before"]).await;
    let before = stream.next().await;
    assert_eq!(text(&before), "before");
    pause(api, "work").await;
    tokio::time::sleep(EVERYWHERE).await;
    remote.push("work", &["paused 1"]).await;
    api.push("work", &["paused 2"]).await;
    // Items that were handed out before can still be settled.
    assert_eq!(remote.commit(&[&before.receipt]).await, [Outcome::Ok]);
    // Calls that do not wait return nothing, and so does one that waits.
    let (seen, taken) = stream
        .during(async {
            let mut taken = remote.reserve_now("work", 10).await;
            taken.extend(api.reserve_now("work", 10).await);
            taken.extend(remote.reserve("work", 10, EVERYWHERE, LONG).await);
            taken
        })
        .await;
    assert!(seen.is_empty() && taken.is_empty(), "delivered while paused: {seen:?} {taken:?}");
    assert_eq!(remote.list("work", ItemState::Ready).await.len(), 2, "pushes continue");

    let resumed = Instant::now();
    resume(api, "work").await;
    assert_eq!(payloads(&stream.take(2).await), ["paused 1", "paused 2"]);
    // Far less than the fallback poll of ten minutes.
    assert!(resumed.elapsed() < LIMIT);
}

async fn a_new_lease_and_attempt_limit_apply_everywhere(pair: Pair) {
    let Pair { api, remote, .. } = &pair;
    api.push("work", &["a", "b", "c"]).await;
    // The other broker has cached the old settings.
    let reserve = async || remote.reserve("work", 1, LIMIT, LONG).await.remove(0);
    let first = reserve().await;
    assert_eq!(remote.rollback(&first.receipt, "for ever").await, Outcome::Ok);
    let wanted = Queue {
        name: "work".to_owned(),
        lease: duration(Duration::from_mins(7)),
        max_attempts: Some(1),
        dead_letter_queue: "dead".to_owned(),
        labels: [("not".to_owned(), "in the mask".to_owned())].into(),
        ..Queue::default()
    };
    let updated = update(api, wanted, &["lease", "max_attempts", "dead_letter_queue"]).await;
    assert_eq!((updated.max_attempts, updated.dead_letter_queue.as_str()), (Some(1), "dead"));
    assert!(updated.labels.is_empty(), "only fields in the mask are changed");
    tokio::time::sleep(EVERYWHERE).await;

    let request = GetQueueRequest { name: "work".to_owned() };
    let there = remote.admin.clone().get_queue(request).await.expect("an answer").into_inner();
    assert_eq!(there.queue, Some(updated));
    let mut stream = remote
        .consume_with(ConsumeRequest {
            queue: "work".to_owned(),
            max_in_flight: 3,
            ..ConsumeRequest::default()
        })
        .await;
    for delivery in stream.take(3).await {
        let lease_end = at(delivery.lease_expire_time.as_ref());
        let left = lease_end.duration_since(std::time::SystemTime::now()).expect("a lease");
        assert!(left > Duration::from_mins(5) && left <= Duration::from_mins(7), "{left:?}");
        // The first of the items is on its second attempt already.
        assert_eq!(remote.rollback(&delivery.receipt, "once").await, Outcome::DeadLettered);
    }
    assert_eq!(api.list("dead", ItemState::Ready).await.len(), 3);
}

async fn a_new_depth_limit_applies_everywhere(pair: Pair) {
    let Pair { api, remote, .. } = &pair;
    remote.push("work", &["1", "2", "3"]).await;
    let limited = Queue { name: "work".to_owned(), max_depth: 4, ..Queue::default() };
    update(api, limited.clone(), &["max_depth"]).await;
    tokio::time::sleep(EVERYWHERE).await;
    remote.push("work", &["4"]).await;
    let full = remote.try_push("work", vec![new_item("5")]).await.expect_err("a full queue");
    assert_eq!(
        (full.code(), error_reason(&full).as_str()),
        (Code::ResourceExhausted, "QUEUE_FULL")
    );
    update(api, Queue { max_depth: 0, ..limited }, &["max_depth"]).await;
    tokio::time::sleep(EVERYWHERE).await;
    remote.push("work", &["5"]).await;
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 5);
}

async fn consumers_of_a_deleted_queue_are_told_everywhere(pair: Pair) {
    let Pair { api, remote, .. } = &pair;
    api.push("work", &["a", "b"]).await;
    let mut here = api.consume("work", 1).await;
    let mut there = remote.consume("work", 1).await;
    let held = [here.next().await, there.next().await];
    let waiting = tokio::spawn({
        let remote = remote.clone();
        async move {
            let request = sluicegate_proto::v1::ReserveRequest {
                queue: "work".to_owned(),
                wait: duration(Duration::from_mins(9)),
                ..Default::default()
            };
            remote.queue.clone().reserve(request).await
        }
    });
    remote.until_stats("work", |stats| stats.consumers == 2).await;

    assert_eq!(delete(api, "work", true).await.expect("a deleted queue"), 2);
    let deleted = Instant::now();
    for stream in [&mut here, &mut there] {
        let ended = within("the end of the stream", stream.try_next()).await.expect_err("an end");
        assert_eq!(ended.code(), Code::NotFound, "{ended:?}");
        assert_eq!(error_reason(&ended), "QUEUE_DELETED");
    }
    let ended = within("the waiting call's answer", waiting).await.expect("no panic");
    assert_eq!(ended.expect_err("no such queue").code(), Code::NotFound);
    assert!(deleted.elapsed() < LIMIT, "the fallback poll did not cause it");
    for delivery in &held {
        assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Gone]);
    }
    for api in [api, remote] {
        let request = GetQueueRequest { name: "work".to_owned() };
        let gone = api.admin.clone().get_queue(request).await.expect_err("no such queue");
        assert_eq!(gone.code(), Code::NotFound);
    }
}

async fn a_queue_that_is_created_again_is_the_new_one_everywhere(pair: Pair) {
    let Pair { api, remote, .. } = &pair;
    // The queue is first in a group of its own, and then in the default group. A broker with old
    // settings would push to the wrong collection.
    let old = Queue { name: "work".to_owned(), group: "old".to_owned(), ..Queue::default() };
    api.create(old).await;
    remote.push("work", &["old"]).await;
    assert_eq!(delete(api, "work", true).await.expect("a deleted queue"), 1);
    api.create(Queue { name: "work".to_owned(), ..Queue::default() }).await;
    tokio::time::sleep(EVERYWHERE).await;
    remote.push("work", &["new"]).await;
    assert_eq!(text(&api.reserve_one("work", LONG).await), "new");
    assert!(remote.reserve_now("work", 1).await.is_empty());
}

async fn a_queue_with_items_is_deleted_only_by_force(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["a", "b"]).await;
    let held = api.reserve_one("work", LONG).await;
    for _ in 0..2 {
        let refused = delete(&api, "work", false).await.expect_err("it holds items");
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
        assert_eq!(error_reason(&refused), "QUEUE_NOT_EMPTY");
    }
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok], "nothing was changed");
    // A reserved item counts too.
    let held = api.reserve_one("work", LONG).await;
    delete(&api, "work", false).await.expect_err("it holds a reserved item");
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok]);
    assert_eq!(delete(&api, "work", false).await.expect("an empty queue"), 0);
    let gone = delete(&api, "work", true).await.expect_err("no such queue");
    assert_eq!(gone.code(), Code::NotFound);
}

async fn a_purge_deletes_all_but_reserved_items(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let queue = Queue { name: "work".to_owned(), retention: duration(LONG), ..Queue::default() };
    api.create(queue).await;
    api.push("work", &["done", "held", "a", "b"]).await;
    api.push("other", &["kept"]).await;
    let taken = api.reserve_now("work", 2).await;
    assert_eq!(api.commit(&[&taken[0].receipt]).await, [Outcome::Ok]);
    let request = PurgeQueueRequest { name: "work".to_owned() };
    let purged = api.admin.clone().purge_queue(request).await.expect("an answer").into_inner();
    assert_eq!(purged.purged_items, 3, "two ready items and one in history");
    let left = api.list("work", ItemState::Unspecified).await;
    assert_eq!(left.len(), 1);
    assert_eq!((&left[0].payload[..], left[0].state()), (&b"held"[..], ItemState::Reserved));
    assert_eq!(api.commit(&[&taken[1].receipt]).await, [Outcome::Ok]);
    assert_eq!(api.list("other", ItemState::Ready).await.len(), 1);
}

async fn a_full_queue_refuses_pushes_until_there_is_room(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.create(Queue { name: "work".to_owned(), max_depth: 3, ..Queue::default() }).await;
    api.push("work", &["a", "b"]).await;
    let batch = vec![new_item("c"), new_item("d")];
    let full = api.try_push("work", batch).await.expect_err("more than fits");
    assert_eq!(
        (full.code(), error_reason(&full).as_str()),
        (Code::ResourceExhausted, "QUEUE_FULL")
    );
    api.push("work", &["c"]).await;
    api.try_push("work", vec![new_item("d")]).await.expect_err("a full queue");
    // Reserved items are in the queue until they are settled.
    let held = api.reserve_one("work", LONG).await;
    api.try_push("work", vec![new_item("d")]).await.expect_err("a full queue");
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok]);
    // The count may be a second old.
    until("there is room", || async { api.try_push("work", vec![new_item("d")]).await.ok() }).await;
    let items = api.list("work", ItemState::Unspecified).await;
    let items: Vec<&[u8]> = items.iter().map(|item| item.payload.as_ref()).collect();
    assert_eq!(items, [b"b", b"c", b"d"]);
}

async fn a_dropped_stream_counts_by_the_current_settings(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let id = api.push("work", &["x"]).await.remove(0).id;
    let mut stream = api.consume_counting("work", 1).await;
    stream.next().await;
    let limited = Queue {
        name: "work".to_owned(),
        max_attempts: Some(1),
        dead_letter_queue: "dead".to_owned(),
        ..Queue::default()
    };
    update(&api, limited, &["max_attempts", "dead_letter_queue"]).await;
    drop(stream);
    let dead = api.until_state("dead", &id, ItemState::Ready).await;
    assert_eq!(dead.origin_queue, "work");
}

/// Creates queues of different names at the same time, as a provisioning script does.
async fn queues_are_created_side_by_side(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let create = |n: usize| api.create(Queue { name: format!("q{n}"), ..Queue::default() });
    let made = futures_util::future::join_all((0..32).map(create)).await;
    assert_eq!(made.len(), 32);
}
