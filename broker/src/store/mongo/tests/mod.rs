//! The suite on a real MongoDB, and what only this store promises.

use mongodb::bson::{Document, doc};

use super::*;
use crate::{
    domain::{Delivery, Demand, NewItem, Priority},
    store::{
        self, Appeared, RollbackTo,
        conformance::{Broker, Env, conformance},
    },
};

mod faults;
mod half_open;

/// Names the server the tests run on.
const VARIABLE: &str = "SLUICEGATE_TEST_MONGODB_URI";

fn uri() -> String {
    std::env::var(VARIABLE).unwrap_or_else(|_| {
        panic!(
            "{VARIABLE} is not set: these tests need a MongoDB replica set, for example \
             mongodb://127.0.0.1:27017/?replicaSet=rs0"
        )
    })
}

/// A database of its own, dropped at the end.
pub(super) struct Scratch {
    pub(super) uri: String,
    pub(super) name: String,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { uri: uri(), name: format!("sluicegate_test_{:016x}", rand::random::<u64>()) }
    }

    async fn open(&self, clock: &Arc<Clock>) -> Broker<MongoStore> {
        let options = MongoOptions { clock: clock.clone(), discipline: false, pool_size: 16 };
        connected(&self.uri, &self.name, options).await
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let (uri, name) = (self.uri.clone(), self.name.clone());
        // The test's runtime may be gone by now.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let client = Client::with_uri_str(&uri).await?;
                client.database(&name).drop().await
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("the test's database stays: {error}");
        }
    }
}

async fn connected(uri: &str, database: &str, options: MongoOptions) -> Broker<MongoStore> {
    Broker::new(Arc::new(MongoStore::connect(uri, database, options).await.expect("a store")))
}

async fn open() -> Env {
    let scratch = Scratch::new();
    let clock = Arc::new(Clock::system());
    let store = Arc::clone(scratch.open(&clock).await.store());
    let other = Arc::clone(scratch.open(&clock).await.store());
    let inner = Arc::clone(&store.inner);
    let upkeep = move || {
        let inner = Arc::clone(&inner);
        async move { upkeep::round(&inner).await }
    };
    Env::new(store, other, clock, upkeep, scratch)
}

conformance!(super::open);

/// Several brokers on one database, each with a clock of its own or all with one.
async fn brokers(
    scratch: &Scratch,
    clock: &Arc<Clock>,
    count: usize,
) -> Vec<Arc<Broker<MongoStore>>> {
    let mut stores = Vec::new();
    for _ in 0..count {
        stores.push(Arc::new(scratch.open(clock).await));
    }
    stores
}

fn queue_named(name: &str) -> Queue {
    let name = QueueName::parse("queue", name).unwrap();
    Queue::with_defaults(name, Timestamp(1_700_000_000_000))
}

async fn make(store: &MongoStore, queue: Queue) -> Arc<Queue> {
    match store.create_queue(&queue).await.unwrap() {
        Created::New(queue) | Created::Existing(queue) => Arc::new(queue),
    }
}

fn push_of(queue: &Arc<Queue>, payload: &str, level: i32) -> Push {
    let item = NewItem {
        payload: payload.to_owned().into(),
        priority: Priority::parse("priority", level).unwrap(),
        ..NewItem::default()
    };
    Push { queue: queue.clone(), item, producer: None, dedup_window: None }
}

fn want(max_items: usize, lease: Duration) -> Demand {
    Demand { max_items, max_bytes: usize::MAX, may_exceed: true, lease, consumer: None }
}

const LEASE: Duration = Duration::from_secs(30);

pub(super) async fn take(
    store: &Broker<MongoStore>,
    queue: &Arc<Queue>,
    count: usize,
) -> Vec<Delivery> {
    let reserved = store.reserve(queue, &[want(count, LEASE)]).await.unwrap();
    reserved.deliveries.into_iter().map(|(_, delivery)| delivery).collect()
}

fn held(queue: &Arc<Queue>, delivery: &Delivery) -> Reservation {
    Reservation { queue: queue.clone(), receipt: delivery.receipt.clone() }
}

/// All stages of a plan, outermost first.
fn stages<'a>(plan: &'a Document, found: &mut Vec<&'a Document>) {
    found.push(plan);
    if let Ok(inner) = plan.get_document("inputStage") {
        stages(inner, found);
    }
    for inner in plan.get_array("inputStages").into_iter().flatten() {
        stages(inner.as_document().unwrap(), found);
    }
}

/// How the server goes about a find; also how many keys it looked at.
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
    let look = store.inner.cursor(&queue.name).look();
    let now = store.now();
    let find = crate::store::mongo::reserve::scan::find_command(
        "items.default",
        &queue.name,
        &look,
        now,
        limit,
    );
    explain(store, Document::try_from(&*find).unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_is_found_by_the_index_alone() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let pushes = |level: i32| (0..50).map(|_| push_of(&queue, "x", level)).collect::<Vec<_>>();
    store.push(pushes(0)).await.unwrap();
    assert_eq!(take(&store, &queue, 1).await.len(), 1);
    let (plan, keys, filtered) = explain_find(&store, &queue, 10).await;
    assert_eq!(plan, ["LIMIT", "FETCH", "IXSCAN handout"]);
    assert!(keys <= 11 && !filtered, "{keys} keys");

    store.push(pushes(5)).await.unwrap();
    store.push(pushes(9)).await.unwrap();
    let (plan, keys, filtered) = explain_find(&store, &queue, 10).await;
    assert!(plan.contains(&"SORT_MERGE".to_owned()), "{plan:?}");
    assert!(!plan.contains(&"SORT".to_owned()), "{plan:?}");
    assert!(keys <= 16 && !filtered, "{keys} keys, {plan:?}");
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
async fn the_watermark_passes_what_is_gone_and_nothing_else() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    for n in 0..5 {
        stores[0].push((0..20).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
        clock.advance(Duration::from_secs(n));
    }
    let first = take(&stores[0], &queue, 50).await;
    let cursor = stores[0].inner.cursor(&queue.name);
    assert_eq!(cursor.look().marks[0], first[49].previous_eligible_time.0);

    // What goes back below the mark is found at once.
    let to = RollbackTo::Queue {
        eligible_time: first[3].previous_eligible_time,
        attempt: 1,
        undelivered: false,
    };
    let back = Rollback { held: held(&queue, &first[3]), to, reason: None };
    assert_eq!(stores[0].rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(take(&stores[0], &queue, 1).await[0].item.id, first[3].item.id);

    // If another broker did it, a hint leads there.
    let since = first[5].previous_eligible_time;
    let to = RollbackTo::Queue { eligible_time: since, attempt: 1, undelivered: false };
    let back = Rollback { held: held(&queue, &first[5]), to, reason: None };
    assert_eq!(stores[1].rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    let demands = [want(1, LEASE)];
    let reserve = stores[0].reserve_hearing(&queue, &demands, Appeared::Since(since));
    assert_eq!(reserve.await.unwrap().deliveries[0].1.item.id, first[5].item.id);
    assert_eq!(take(&stores[0], &queue, 100).await.len(), 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_share_a_queue_without_doubling() {
    const ITEMS: usize = 1_000;
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 4).await;
    let queue = make(&stores[0], queue_named("q")).await;
    let pushes = (0..ITEMS).map(|n| push_of(&queue, "x", n as i32 % 3)).collect();
    stores[0].push(pushes).await.unwrap();
    let tasks: Vec<_> = stores
        .iter()
        .map(|store| {
            let (store, queue) = (store.clone(), queue.clone());
            tokio::spawn(async move {
                let mut taken = Vec::new();
                loop {
                    let reserved = store.reserve(&queue, &[want(37, LEASE)]).await.unwrap();
                    let items: Vec<_> =
                        reserved.deliveries.into_iter().map(|(_, delivery)| delivery).collect();
                    let settles = items.iter().map(|delivery| held(&queue, delivery)).collect();
                    let outcomes = store.commit(settles).await.unwrap();
                    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Ok));
                    taken.extend(items.iter().map(|delivery| delivery.item.id));
                    if !reserved.more {
                        return taken;
                    }
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    all.sort_unstable();
    let count = all.len();
    all.dedup();
    assert_eq!((count, all.len()), (ITEMS, ITEMS));
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_settled_is_answered_exactly() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let (ours, others) = (&stores[0], &stores[1]);
    let queue = make(ours, queue_named("q")).await;
    ours.push((0..3).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let taken = take(ours, &queue, 3).await;
    let commit = |delivery: &Delivery| vec![held(&queue, delivery)];
    // Committed there: gone, though this broker thinks it is its own.
    assert_eq!(others.commit(commit(&taken[0])).await.unwrap(), [Outcome::Ok]);
    // Given back, taken and committed there: gone as well.
    let to = RollbackTo::Queue { eligible_time: others.now(), attempt: 2, undelivered: false };
    let back = Rollback { held: held(&queue, &taken[1]), to, reason: None };
    assert_eq!(others.rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    let anew = take(others, &queue, 1).await;
    assert_eq!(anew[0].item.id, taken[1].item.id);
    assert_eq!(others.commit(commit(&anew[0])).await.unwrap(), [Outcome::Ok]);
    let all = taken.iter().map(|delivery| held(&queue, delivery)).collect();
    let expected = [Outcome::Gone, Outcome::Gone, Outcome::Ok];
    assert_eq!(ours.commit(all).await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_whose_clocks_differ_by_ten_minutes_agree() {
    let scratch = Scratch::new();
    let mut stores = Vec::new();
    for prefetch in [0, 600] {
        let clock = Arc::new(Clock::system());
        clock.advance(Duration::from_secs(prefetch));
        let options = MongoOptions { clock, ..MongoOptions::default() };
        stores.push(connected(&scratch.uri, &scratch.name, options).await);
    }
    let apart = (stores[0].now().0 - stores[1].now().0).abs();
    assert!(apart < 1_000, "{apart} ms apart");
    let queue = make(&stores[0], queue_named("q")).await;
    stores[1].push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    // Neither is it kept back by one, nor its lease taken for lapsed by the other.
    while take(&stores[0], &queue, 1).await.is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(take(&stores[1], &queue, 1).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_dies_leaves_its_items_to_the_next() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let dying = scratch.open(&clock).await;
    let queue = make(&dying, queue_named("q")).await;
    let keyed = |n: usize| {
        let mut push = push_of(&queue, &n.to_string(), 0);
        push.item.ordering_key = "k".into();
        push
    };
    dying.push((0..3).map(keyed).collect()).await.unwrap();
    let taken = take(&dying, &queue, 3).await;
    assert_eq!(taken.len(), 1);
    // Killed between the settle and the waking of the next.
    dying
        .inner
        .db
        .collection::<Document>("items.default")
        .delete_one(doc! { "_id": schema::item::oid(taken[0].item.id) })
        .await
        .unwrap();
    drop(dying);
    let next = scratch.open(&clock).await;
    assert!(take(&next, &queue, 3).await.is_empty());
    upkeep::round(&next.inner).await;
    assert_eq!(next.unblocked().await, std::slice::from_ref(&queue.name));
    let taken = take(&next, &queue, 3).await;
    assert_eq!(taken[0].item.payload, "1");
    drop(next);
    let last = scratch.open(&clock).await;
    assert!(take(&last, &queue, 3).await.is_empty());
    clock.advance(LEASE);
    let again = take(&last, &queue, 3).await;
    assert_eq!((again[0].item.id, again[0].item.attempt), (taken[0].item.id, 2));
    // Receipts outlive the broker that gave them, but not the next reservation.
    assert_eq!(last.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::LeaseLost]);
    assert_eq!(last.commit(vec![held(&queue, &again[0])]).await.unwrap(), [Outcome::Ok]);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_follow_the_answers_across_brokers() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 3).await;
    let queue = make(&stores[0], Queue { sequenced: true, ..queue_named("q") }).await;
    let tasks: Vec<_> = stores
        .iter()
        .map(|store| {
            let (store, queue) = (store.clone(), queue.clone());
            tokio::spawn(async move {
                let mut answers = Vec::new();
                for _ in 0..20 {
                    let begun = std::time::Instant::now();
                    let pushed = store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
                    answers.push((begun, std::time::Instant::now(), pushed[0].sequence));
                }
                answers
            })
        })
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.extend(task.await.unwrap());
    }
    answers.sort_by_key(|(_, _, number)| *number);
    let numbers: Vec<i64> = answers.iter().map(|(.., number)| *number).collect();
    assert_eq!(numbers, (1..=60).collect::<Vec<_>>());
    for pair in answers.windows(2) {
        assert!(pair[0].0 <= pair[1].1, "number {} was given too late", pair[0].2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_named_within_seconds() {
    let uri = "mongodb://127.0.0.1:24999/?serverSelectionTimeoutMS=300";
    match MongoStore::connect(uri, "none", MongoOptions::default()).await {
        Err(crate::store::StoreError::Unavailable { reason, .. }) => {
            assert!(reason.starts_with("MongoDB at 127.0.0.1:24999 cannot be reached"), "{reason}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("something answers"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_end_are_found_by_one_seek_and_leave_no_trace_among_the_ready() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
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
    // Behind the ready ones and their barrier.
    let (plan, keys, filtered) = explain(&stores[0], find(11)).await;
    assert_eq!((plan.last().unwrap().as_str(), keys, filtered), ("IXSCAN handout", 11, false));
    let (_, keys, _) = explain_find(&stores[0], &queue, 100).await;
    assert!(keys <= 11, "a look at the head reads {keys} keys of 10 ready items");

    // The other broker learns of the leases by itself, and hands out what they leave.
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

#[tokio::test(flavor = "multi_thread")]
async fn every_priority_in_use_ends_in_a_sentinel() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 9), push_of(&queue, "x", 3)]).await.unwrap();
    let sentinels = async || {
        let items = store.database().collection::<Document>("items.default");
        items
            .count_documents(doc! { "_id": { "$in": priorities::sentinel_ids(&queue.name) } })
            .await
    };
    assert_eq!(sentinels().await.unwrap(), 4);

    // Nobody sees them, and what empties the queue leaves them.
    assert_eq!(take(&store, &queue, 10).await.len(), 2);
    assert_eq!(store.list_items(&queue, None, None, 10).await.unwrap().entries.len(), 2);
    assert_eq!(store.depth(&queue).await.unwrap().unsettled(), 2);
    clock.advance(LEASE);
    assert_eq!(store.purge(&queue).await.unwrap(), 2);
    assert_eq!(sentinels().await.unwrap(), 4);
    store.push(vec![push_of(&queue, "x", 9), push_of(&queue, "x", 3)]).await.unwrap();

    let links = store.links().await.unwrap();
    let deleted = store.delete_queue(&queue, true, links).await.unwrap();
    assert_eq!(deleted, Deleted::Done(2), "barriers are no items");
    assert_eq!(sentinels().await.unwrap(), 0);
    let queue = make(&store, Queue { create_time: Timestamp(1), ..queue_named("q") }).await;
    store.push(vec![push_of(&queue, "x", 3)]).await.unwrap();
    assert_eq!(sentinels().await.unwrap(), 2, "a queue made anew gets its own");
}

/// An item lands in the group of a queue that was deleted and made anew in another group: it is
/// brought there, behind what has the turn of its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_item_follows_its_queue_into_another_group() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let old = make(
        &stores[0],
        Queue { group: GroupName::parse("g", "old").unwrap(), ..queue_named("q") },
    );
    let old = old.await;
    let links = stores[0].links().await.unwrap();
    stores[0].delete_queue(&old, true, links).await.unwrap();
    let new = make(&stores[0], queue_named("q")).await;
    let mut late = push_of(&old, "late", 0);
    late.item.ordering_key = "k".to_owned();
    let late = stores[1].push(vec![late, push_of(&old, "plain", 3)]).await.unwrap();
    let mut taken = Vec::new();
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while taken.len() < 2 {
        assert!(std::time::Instant::now() < end, "found only {taken:?}");
        let demands = [want(10, LEASE)];
        let reserve = stores[0].reserve_hearing(&new, &demands, Appeared::FromStart);
        taken.extend(reserve.await.unwrap().deliveries.into_iter().map(|(_, delivery)| delivery));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut ids: Vec<ItemId> = taken.iter().map(|delivery| delivery.item.id).collect();
    ids.sort();
    let mut wanted: Vec<ItemId> = late.iter().map(|pushed| pushed.id).collect();
    wanted.sort();
    assert_eq!(ids, wanted);
    let settled = taken.iter().map(|delivery| held(&new, delivery)).collect();
    assert_eq!(stores[1].commit(settled).await.unwrap(), [Outcome::Ok; 2]);
}

/// A tombstone left for another broker's sake stays for minutes, whatever the lease; and that broker is told
/// the truth after that too.
#[tokio::test(flavor = "multi_thread")]
async fn tombstones_stay_for_minutes_not_for_the_lease() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    stores[0].push((0..3).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let half_a_day = want(3, Duration::from_hours(12));
    let reserved = stores[0].reserve(&queue, &[half_a_day]).await.unwrap();
    let taken: Vec<Delivery> = reserved.deliveries.into_iter().map(|(_, d)| d).collect();
    stores[1].commit(vec![held(&queue, &taken[0])]).await.unwrap();
    stores[1].commit_and_push(held(&queue, &taken[1]), vec![]).await.unwrap();
    let to =
        store::RollbackTo::Queue { eligible_time: clock.now(), attempt: 2, undelivered: false };
    let back = store::Rollback { held: held(&queue, &taken[2]), to, reason: None };
    stores[1].rollback(vec![back]).await.unwrap();
    let again = take(&stores[1], &queue, 1).await;
    stores[1].commit(vec![held(&queue, &again[0])]).await.unwrap();

    let items = stores[0].database().collection::<Document>("items.default");
    let tombstones = doc! { "when": schema::layout::millis(schema::layout::TOMBSTONE), "settled": { "$exists": true } };
    assert_eq!(items.count_documents(tombstones.clone()).await.unwrap(), 3);
    let soon = schema::layout::date(clock.now() + Duration::from_mins(5));
    let mut late = tombstones.clone();
    late.insert("expires", doc! { "$gt": soon });
    assert_eq!(items.count_documents(late).await.unwrap(), 0);

    // As if the server had removed them.
    clock.advance(Duration::from_mins(5));
    items.delete_many(tombstones).await.unwrap();
    let receipts = taken.iter().map(|delivery| held(&queue, delivery)).collect();
    assert_eq!(stores[0].commit(receipts).await.unwrap(), [Outcome::Gone; 3]);
}

/// The time of a shard, which all brokers share, is the server's like any other.
#[tokio::test(flavor = "multi_thread")]
async fn the_shards_time_is_the_servers() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let [by_hello, by_shard] =
        [false, true].map(|sharded| server::clock::Source { db: store.database(), sharded });
    for source in [by_hello, by_shard] {
        let clock = Clock::system();
        clock.advance(Duration::from_hours(1));
        server::clock::set(&source, &clock).await.unwrap();
        let off = clock.now().0 - Clock::machine_time().0;
        assert!(off.abs() < 10_000, "{off} ms off");
    }
}

/// Looking for lost turns costs the same however many items are blocked, and finds each in the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_repair_looks_at_so_many_items_at_a_time() {
    const KEYS: usize = 2_500;
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let items = (0..2 * KEYS).map(|number| {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = format!("{:05}", number % KEYS);
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
