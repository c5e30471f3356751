//! Tests of what finds cost: the plans of the server, and the index keys that it reads.

use super::*;
use crate::{
    domain::OrderingKey,
    store::mongo::{
        cursor::prefetch::Prefetch,
        reserve::scan::{behind, find_command, ready},
        schema::item::Stored,
        server::statement::Update,
    },
};

/// Collects all stages of a plan, the outermost first.
fn stages<'a>(plan: &'a Document, found: &mut Vec<&'a Document>) {
    found.push(plan);
    if let Ok(inner) = plan.get_document("inputStage") {
        stages(inner, found);
    }
    for inner in plan.get_array("inputStages").into_iter().flatten() {
        stages(inner.as_document().unwrap(), found);
    }
}

/// Returns the stages of the server's plan for a command, the number of index keys it examined, and whether it filtered
/// documents.
async fn explain(store: &MongoStore, find: Document) -> (Vec<String>, i64, bool) {
    let command = doc! { "explain": find, "verbosity": "executionStats" };
    let answer = store.inner.db.run_command(command).await.unwrap();
    let plan = answer.get_document("queryPlanner").unwrap().get_document("winningPlan").unwrap();
    let plan = plan.get_document("queryPlan").unwrap_or(plan);
    let mut found = Vec::new();
    stages(plan, &mut found);
    let names = found.iter().map(|stage| {
        let index = stage.get_str("indexName").unwrap_or_default();
        format!("{} {index}", stage.get_str("stage").unwrap()).trim().to_owned()
    });
    let keys = answer.get_document("executionStats").unwrap().get("totalKeysExamined").unwrap();
    let filtered = found
        .iter()
        .any(|stage| stage.get_str("stage").unwrap() == "FETCH" && stage.contains_key("filter"));
    (names.collect(), server::error::integer(keys).unwrap(), filtered)
}

async fn explain_find(store: &MongoStore, queue: &Queue, limit: usize) -> (Vec<String>, i64, bool) {
    let scan = store.inner.cursor(&queue.name).look();
    let now = store.now();
    let filter = ready(&queue.name, &scan, now);
    let find = find_command("items.default", filter, limit, false);
    explain(store, Document::try_from(&*find).unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_is_found_by_the_index_alone() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let pushes =
        |priority: i32| (0..50).map(|_| push_of(&queue, "x", priority)).collect::<Vec<_>>();
    store.push(pushes(0)).await.unwrap();
    assert_eq!(take(&store, &queue, 1).await.len(), 1);
    let (plan, keys, filtered) = explain_find(&store, &queue, 10).await;
    assert_eq!(plan, ["LIMIT", "PROJECTION_DEFAULT", "FETCH", "IXSCAN handout"]);
    assert!(keys <= 11 && !filtered, "{keys} keys");

    store.push(pushes(5)).await.unwrap();
    store.push(pushes(9)).await.unwrap();
    let (plan, keys, filtered) = explain_find(&store, &queue, 10).await;
    assert!(plan.contains(&"SORT_MERGE".to_owned()), "{plan:?}");
    assert!(!plan.contains(&"SORT".to_owned()), "{plan:?}");
    assert!(keys <= 16 && !filtered, "{keys} keys, {plan:?}");
}

/// Reading on costs as little as the first read, however many items have one time.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_behind_an_item_is_found_by_the_index_alone() {
    let (scratch, clock) = (Scratch::with_segments(SegmentSize::NONE), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    store.push((0..50).map(|_| push_of(&queue, "x", 0)).collect::<Vec<_>>()).await.unwrap();
    let taken = take(&store, &queue, 30).await;
    let mut last = Stored::new(taken[29].item.id);
    last.when = taken[29].item.create_time.0;
    let mut prefetch = Prefetch::default();
    prefetch.found(&[], true);
    let end = prefetch.end(10, 0, &last).unwrap();
    let find = find_command("items.default", behind(&queue.name, end, store.now()), 10, true);
    let (plan, keys, filtered) = explain(&store, Document::try_from(&*find).unwrap()).await;
    assert!(plan.contains(&"SORT_MERGE".to_owned()), "{plan:?}");
    assert!(!plan.contains(&"SORT".to_owned()), "{plan:?}");
    assert!(keys <= 12 && !filtered, "{keys} keys, {plan:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_do_not_read_documents() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    store.push((0..20).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let count = doc! {
        "count": "items.default", "hint": crate::store::mongo::schema::layout::HANDOUT,
        "query": { "q": "q", "priority": 0, "when": { "$lte": crate::store::mongo::schema::layout::date(store.now()) } },
    };
    let (plan, ..) = explain(&store, count).await;
    assert_eq!(plan, ["COUNT", "COUNT_SCAN handout"]);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn lapsed_leases_are_found_by_one_seek_and_reserved_items_are_apart_from_ready_ones() {
    let (scratch, clock) = (Scratch::with_segments(SegmentSize::NONE), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    stores[0].push((0..50).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let taken = take(&stores[0], &queue, 40).await;
    let range = doc! { "$gte": schema::layout::millis(0), "$lt": schema::layout::millis(schema::layout::BLOCKED) };
    let find = |limit: i64| {
        doc! {
            "find": "items.default", "filter": { "q": "q", "priority": 0, "when": range.clone() },
            "hint": schema::layout::HANDOUT, "sort": { "when": 1 }, "limit": limit,
        }
    };
    // The reserved items are behind the ready ones and their sentinel.
    let (plan, keys, filtered) = explain(&stores[0], find(11)).await;
    assert_eq!((plan.last().unwrap().as_str(), keys, filtered), ("IXSCAN handout", 11, false));
    let (_, keys, _) = explain_find(&stores[0], &queue, 100).await;
    assert!(keys <= 11, "a scan of the head reads {keys} keys for 10 ready items");

    // The other broker finds the leases by itself, and hands out the rest.
    assert_eq!(take(&stores[1], &queue, 100).await.len(), 10);
    let settled: Vec<Reservation> =
        taken[5..].iter().map(|delivery| held(&queue, delivery)).collect();
    stores[0].commit(settled).await.unwrap();
    clock.advance(LEASE);
    let again = take(&stores[1], &queue, 100).await;
    assert_eq!(again.len(), 15);
    assert!(again.iter().all(|delivery| delivery.item.attempt == 2));
    let first = Timestamp(taken[0].lease_expire_time.0);
    assert_eq!(again[0].previous_eligible_time, first);
}

/// The first blocked item of a key is that with the lowest number, however many are blocked: the first in the index,
/// where it is found by one seek.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_item_of_a_key_is_found_by_one_seek() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let items = (0..50).map(|_| {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = OrderingKey::new("k");
        push
    });
    store.push(items.collect()).await.unwrap();
    let change = Update::pipeline(&ordering::unblocking(store.now())).unwrap();
    let statement = ordering::first_waiting(&queue.name, "k", &change);
    let statement = Document::try_from(&*statement).unwrap();
    let update = doc! { "update": "items.default", "updates": [statement] };
    let (plan, keys, _) = explain(&store, update).await;
    assert_eq!(plan, ["UPDATE", "FETCH", "IXSCAN waiting"]);
    assert_eq!(keys, 1);
}

/// A repair costs the same however many items are blocked, and finds every key in the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_repair_reads_a_limited_number_of_items_at_a_time() {
    const KEYS: usize = 2_500;
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let items = (0..2 * KEYS).map(|number| {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = OrderingKey::new(format!("{:05}", number % KEYS));
        push
    });
    store.push(items.collect()).await.unwrap();
    let items = store.database().collection::<Document>("items.default");
    let last = doc! { "q": "q", "turn": format!("{:05}", KEYS - 1) };
    assert_eq!(items.delete_one(last).await.unwrap().deleted_count, 1);
    let repair = || upkeep::repair(&store.inner, &queue.name, &queue.group);
    assert_eq!(repair().await.unwrap(), 0);
    assert_eq!(repair().await.unwrap(), 1);
    assert_eq!(repair().await.unwrap(), 0, "from the start again");
}
