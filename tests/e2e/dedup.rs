//! Deduplication: a push that is repeated under its id stores nothing, through whichever broker it
//! is repeated and whatever happened to its item.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sluicegate_proto::v1::{
    CommitAndPushRequest, ItemState, MoveRequest, NewItem, Outcome, PushEntry, Queue,
};
use tokio::task::JoinSet;

use crate::harness::{
    Api, Backend, Brokers, duration, new_item, on_both_backends, redis_url, text, until,
};

on_both_backends!(
    racing_pushes_store_one_and_all_get_its_id,
    an_id_is_known_after_the_commit_until_its_window_ends,
    an_id_outlives_moves_to_other_queues,
    an_id_is_of_its_queue,
    an_id_is_known_to_commit_and_push,
    a_push_interrupted_by_a_kill_can_be_repeated,
);

const LONG: Duration = Duration::from_mins(10);

fn named(id: &str, payload: &str) -> NewItem {
    NewItem { dedup_id: id.to_owned(), ..new_item(payload) }
}

/// Pushes through `api` an item that was pushed before as `first`.
async fn is_known(api: &Api, queue: &str, id: &str, first: &str) {
    let again = api.push_items(queue, vec![named(id, "again")]).await.remove(0);
    assert!(again.deduplicated, "{id} is not known");
    assert_eq!(again.id, first, "the id of the first item is returned");
}

async fn racing_pushes_store_one_and_all_get_its_id(backend: Backend) {
    const IDS: usize = 40;
    let brokers = Brokers::start(backend).await;
    let mut producers = JoinSet::new();
    for producer in 0..8 {
        let api = brokers.api(producer).clone();
        producers.spawn(async move {
            let mut results = Vec::new();
            // All producers use the same order, so that they collide; some push in batches, some
            // single items.
            for batch in (0..IDS).collect::<Vec<_>>().chunks(1 + producer % 3) {
                let items = batch.iter().map(|id| named(&format!("id{id}"), "x")).collect();
                let answers = api.push_items("work", items).await;
                results.extend(batch.iter().copied().zip(answers));
            }
            results
        });
    }
    let mut stored: HashMap<usize, Vec<String>> = HashMap::new();
    let mut ids: HashMap<usize, HashSet<String>> = HashMap::new();
    for (number, result) in producers.join_all().await.into_iter().flatten() {
        ids.entry(number).or_default().insert(result.id.clone());
        if !result.deduplicated {
            stored.entry(number).or_default().push(result.id);
        }
    }
    for number in 0..IDS {
        assert_eq!(stored[&number].len(), 1, "id{number} was stored by several: {stored:?}");
        assert_eq!(ids[&number].len(), 1, "id{number} has several answers: {ids:?}");
    }
    let items = brokers.api(0).list("work", ItemState::Unspecified).await;
    let there: HashSet<&str> = items.iter().map(|item| item.id.as_str()).collect();
    let answered: HashSet<&str> = stored.values().flatten().map(String::as_str).collect();
    assert_eq!(there, answered);
    assert_eq!(items.len(), IDS);
}

async fn an_id_is_known_after_the_commit_until_its_window_ends(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let (api, remote) = (brokers.api(0), brokers.api(1));
    let window = Duration::from_secs(3);
    let queue =
        Queue { name: "work".to_owned(), dedup_window: duration(window), ..Queue::default() };
    api.create(queue).await;
    let pushed = std::time::Instant::now();
    let first = api.push_items("work", vec![named("once", "1")]).await.remove(0);
    assert!(!first.deduplicated);
    is_known(remote, "work", "once", &first.id).await;
    let delivery = remote.reserve_one("work", LONG).await;
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    is_known(remote, "work", "once", &first.id).await;
    assert!(remote.reserve_now("work", 10).await.is_empty(), "its tombstone is not an item");
    assert!(api.list("work", ItemState::Unspecified).await.is_empty());

    // The id is free again after its window.
    let second = until("the id is forgotten", || async {
        let again = remote.push_items("work", vec![named("once", "2")]).await.remove(0);
        (!again.deduplicated).then_some(again)
    })
    .await;
    assert!(pushed.elapsed() >= window, "forgotten after {:?}", pushed.elapsed());
    assert_ne!(second.id, first.id);
    assert_eq!(text(&api.reserve_one("work", LONG).await), "2");
    is_known(api, "work", "once", &second.id).await;
}

async fn an_id_outlives_moves_to_other_queues(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let (api, remote) = (brokers.api(0), brokers.api(1));
    let first = api.push_items("orders", vec![named("order 1", "x")]).await.remove(0);
    let mut from = "orders";
    for to in ["packing", "sent"] {
        let delivery = remote.reserve_one(from, LONG).await;
        let request = MoveRequest {
            receipt: delivery.receipt,
            to_queue: to.to_owned(),
            ..MoveRequest::default()
        };
        let moved = api.queue.clone().r#move(request).await.expect("an answer").into_inner();
        assert_eq!((moved.outcome(), moved.id.as_str()), (Outcome::Ok, first.id.as_str()));
        is_known(remote, "orders", "order 1", &first.id).await;
        from = to;
    }
    let delivery = remote.reserve_one("sent", LONG).await;
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    is_known(remote, "orders", "order 1", &first.id).await;
    assert!(api.list("orders", ItemState::Unspecified).await.is_empty());
}

async fn an_id_is_of_its_queue(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let api = brokers.api(0);
    let here = api.push_items("here", vec![named("same", "x")]).await.remove(0);
    let there = api.push_items("there", vec![named("same", "x")]).await.remove(0);
    assert!(!there.deduplicated);
    assert_ne!(here.id, there.id);
    let batch = vec![named("same", "x"), named("twice", "y"), named("twice", "z"), new_item("n")];
    let results = api.push_items("here", batch).await;
    let duplicates: Vec<bool> = results.iter().map(|result| result.deduplicated).collect();
    assert_eq!(duplicates, [true, false, true, false]);
    assert_eq!(results[0].id, here.id);
    assert_eq!(results[1].id, results[2].id);
}

async fn an_id_is_known_to_commit_and_push(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let (api, remote) = (brokers.api(0), brokers.api(1));
    let first = api.push_items("next", vec![named("bill", "1")]).await.remove(0);
    api.push("work", &["a"]).await;
    let delivery = remote.reserve_one("work", LONG).await;
    let entry = |item| PushEntry { queue: "next".to_owned(), item: Some(item) };
    let request = CommitAndPushRequest {
        receipt: delivery.receipt.clone(),
        pushes: vec![entry(named("bill", "2")), entry(named("parcel", "3"))],
    };
    let answer = remote.queue.clone().commit_and_push(request.clone()).await.expect("an answer");
    let answer = answer.into_inner();
    assert_eq!(answer.outcome(), Outcome::Ok);
    let duplicates: Vec<bool> = answer.results.iter().map(|r| r.deduplicated).collect();
    assert_eq!((duplicates, &answer.results[0].id), (vec![true, false], &first.id));
    is_known(api, "next", "parcel", &answer.results[1].id).await;
    // The call is repeated as after a lost answer: the receipt is used up, and nothing is pushed.
    let again = api.queue.clone().commit_and_push(request).await.expect("an answer").into_inner();
    assert_eq!((again.outcome(), again.results.len()), (Outcome::Gone, 0));
    assert_eq!(api.list("next", ItemState::Unspecified).await.len(), 2);
}

async fn a_push_interrupted_by_a_kill_can_be_repeated(backend: Backend) {
    const ITEMS: usize = 300;
    let store = backend.store();
    let launch = match backend {
        Backend::Mongo => store.launch().signals(&redis_url()),
        Backend::Sqlite => store.launch(),
    };
    let broker = launch.start().await;
    let address = broker.address.trim_start_matches("http://").to_owned();
    let client = sluicegate_client::Client::connect(&broker.address).await.expect("a client");
    let api = broker.api().await;
    api.create(Queue { name: "work".to_owned(), ..Queue::default() }).await;
    let mut producers = JoinSet::new();
    for number in 0..4 {
        let producer = client.producer("work").with_auto_dedup();
        producers.spawn(async move {
            let items: Vec<String> = (0..ITEMS / 4).map(|i| format!("{number}-{i}")).collect();
            for batch in items.chunks(3) {
                producer.push_all(batch.to_vec()).await.expect("an acknowledged push");
            }
        });
    }
    api.until_stats("work", |stats| stats.ready >= 30).await;
    broker.kill();
    let broker = launch.flag("listen", &address).start().await;
    producers.join_all().await;
    let items = broker.api().await.list("work", ItemState::Unspecified).await;
    let unique: HashSet<&[u8]> = items.iter().map(|item| item.payload.as_ref()).collect();
    assert_eq!((items.len(), unique.len()), (ITEMS, ITEMS), "each once");
}
