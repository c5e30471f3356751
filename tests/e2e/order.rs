//! Ordering keys and sequence numbers, through several brokers.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sluicegate_proto::v1::{ConsumeRequest, ItemState, NewItem, Outcome, Queue};
use tokio::task::JoinSet;

use crate::harness::{
    Api, Backend, Brokers, duration, new_item, on_both_backends, payloads, redis_url, text, until,
    within,
};

on_both_backends!(
    a_key_is_delivered_one_at_a_time_in_push_order_over_rollbacks,
    numbers_grow_in_the_order_of_the_acknowledgements,
    a_key_with_many_blocked_items_does_not_delay_others,
    a_dead_lettered_item_unblocks_its_key,
);

const LONG: Duration = Duration::from_mins(10);

fn keyed(key: &str, payload: &str) -> NewItem {
    NewItem { ordering_key: key.to_owned(), ..new_item(payload) }
}

/// The items of each key that consumers have seen: the one being handled, and the committed ones in
/// order.
#[derive(Default)]
struct Seen {
    under_way: HashMap<String, String>,
    done: HashMap<String, Vec<String>>,
}

impl Seen {
    fn begin(&mut self, key: &str, payload: &str) {
        let other = self.under_way.insert(key.to_owned(), payload.to_owned());
        assert_eq!(other, None, "{payload} of {key} is delivered while another is under way");
    }

    fn end(&mut self, key: &str, done: bool) {
        let payload = self.under_way.remove(key).expect("an item under way");
        if done {
            self.done.entry(key.to_owned()).or_default().push(payload);
        }
    }

    fn count(&self) -> usize {
        self.done.values().map(Vec::len).sum()
    }
}

/// Handles items of `queue`: rolls back every third item, on its first attempt only, and commits
/// the others.
async fn work(api: Api, queue: &str, salt: usize, seen: Arc<Mutex<Seen>>) {
    let mut stream = api.consume(queue, 4).await;
    let mut number = salt;
    while let Ok(delivery) = stream.try_next().await {
        let item = delivery.item.as_ref().expect("an item");
        let (key, payload) = (item.ordering_key.clone(), text(&delivery));
        seen.lock().expect("no panic inside").begin(&key, &payload);
        number += 1;
        let rolls_back = item.attempt == 1 && number.is_multiple_of(3);
        // Recorded before the broker is told, because another consumer may receive the next item
        // immediately afterwards.
        seen.lock().expect("no panic inside").end(&key, !rolls_back);
        let outcome = if rolls_back {
            api.rollback(&delivery.receipt, "on purpose").await
        } else {
            api.commit(&[&delivery.receipt]).await[0]
        };
        assert_eq!(outcome, Outcome::Ok);
    }
}

async fn a_key_is_delivered_one_at_a_time_in_push_order_over_rollbacks(backend: Backend) {
    const KEYS: usize = 6;
    const ITEMS: usize = 25;
    let brokers = Brokers::start(backend).await;
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mut consumers = JoinSet::new();
    for number in 0..4 {
        let (api, seen) = (brokers.api(number).clone(), Arc::clone(&seen));
        consumers.spawn(async move { work(api, "work", number, seen).await });
    }
    // The producer of a key alternates between the brokers, waiting for each answer.
    let mut producers = JoinSet::new();
    for key in 0..KEYS {
        let apis = [brokers.api(key).clone(), brokers.api(key + 1).clone()];
        producers.spawn(async move {
            for (number, api) in (0..ITEMS).zip(apis.iter().cycle()) {
                let item = keyed(&format!("key{key}"), &format!("{number:03}"));
                api.push_items("work", vec![item]).await;
            }
        });
    }
    producers.join_all().await;
    until("all items are committed", || async {
        (seen.lock().expect("no panic inside").count() == KEYS * ITEMS).then_some(())
    })
    .await;
    consumers.abort_all();
    while let Some(ended) = consumers.join_next().await {
        assert!(ended.is_err_and(|error| error.is_cancelled()), "a consumer saw a fault");
    }
    let wanted: Vec<String> = (0..ITEMS).map(|number| format!("{number:03}")).collect();
    let seen = seen.lock().expect("no panic inside");
    for key in 0..KEYS {
        assert_eq!(seen.done[&format!("key{key}")], wanted, "key{key}");
    }
}

async fn numbers_grow_in_the_order_of_the_acknowledgements(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let queue = Queue { name: "log".to_owned(), sequenced: true, ..Queue::default() };
    brokers.api(0).create(queue).await;
    // The greatest number acknowledged before a push began must be smaller than the number of that
    // push.
    let answered = Arc::new(AtomicI64::new(0));
    let mut producers = JoinSet::new();
    for producer in 0..8 {
        let (api, answered) = (brokers.api(producer).clone(), Arc::clone(&answered));
        producers.spawn(async move {
            let mut numbers = Vec::new();
            for push in 0..25 {
                let before = answered.load(Ordering::SeqCst);
                let batch = (0..=push % 3).map(|_| new_item(&format!("{producer}"))).collect();
                let results = api.push_items("log", batch).await;
                for result in &results {
                    assert!(result.sequence > before, "{} after {before}", result.sequence);
                }
                assert!(results.is_sorted_by(|a, b| a.sequence < b.sequence), "{results:?}");
                let last = results.last().expect("a result").sequence;
                answered.fetch_max(last, Ordering::SeqCst);
                numbers.extend(results.into_iter().map(|result| result.sequence));
            }
            numbers
        });
    }
    let numbers: Vec<i64> = producers.join_all().await.into_iter().flatten().collect();
    let unique: HashSet<i64> = numbers.iter().copied().collect();
    assert_eq!(unique.len(), numbers.len(), "a number was assigned twice");
    // The stored items have the acknowledged numbers.
    let stored = brokers.api(1).list("log", ItemState::Ready).await;
    let stored: HashSet<i64> = stored.iter().map(|item| item.sequence).collect();
    assert_eq!(stored, unique);
}

/// Counts, not speed: although one key has this many blocked items and never advances, every item
/// of the other keys is delivered.
async fn a_key_with_many_blocked_items_does_not_delay_others(backend: Backend) {
    const WAITING: usize = 20_000;
    let brokers = Brokers::start(backend).await;
    let api = brokers.api(0);
    let mut pushes = JoinSet::new();
    for batch in 0..WAITING / 1000 {
        let api = brokers.api(batch).clone();
        pushes.spawn(async move {
            let items = (0..1000).map(|number| keyed("long", &format!("{number}"))).collect();
            api.push_items("work", items).await;
        });
    }
    within("the pushes", pushes.join_all()).await;
    let head = brokers.api(1).reserve_now("work", 1000).await;
    assert_eq!(head.len(), 1, "one item of the key at a time");
    api.until_stats("work", |stats| {
        (stats.reserved, stats.blocked, stats.ready) == (1, WAITING as i64 - 1, 0)
    })
    .await;

    let mut stream = brokers.api(1).consume("work", 100).await;
    for round in 0..10 {
        let payload = round.to_string();
        let items = (0..20).map(|key| keyed(&format!("short{key}"), &payload)).collect();
        api.push_items("work", items).await;
        api.push_items("work", vec![new_item(&payload)]).await;
        let deliveries = stream.take(21).await;
        assert!(payloads(&deliveries).iter().all(|seen| *seen == payload), "{deliveries:?}");
        let receipts: Vec<&str> = deliveries.iter().map(|d| d.receipt.as_str()).collect();
        let outcomes = brokers.api(1).commit(&receipts).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Ok));
    }
    // The long key advances too, item by item.
    assert_eq!(api.commit(&[&head[0].receipt]).await, [Outcome::Ok]);
    let mut last = head[0].item.as_ref().expect("an item").sequence;
    for _ in 0..20 {
        let delivery = stream.next().await;
        let sequence = delivery.item.as_ref().expect("an item").sequence;
        assert!(sequence > last, "{sequence} after {last}");
        last = sequence;
        assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    }
}

async fn a_dead_lettered_item_unblocks_its_key(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let (api, remote) = (brokers.api(0), brokers.api(1));
    let queue = Queue {
        name: "work".to_owned(),
        max_attempts: Some(2),
        dead_letter_queue: "dead".to_owned(),
        ..Queue::default()
    };
    api.create(queue).await;
    let items = ["a", "b", "c", "d"].map(|payload| keyed("k", payload)).into();
    api.push_items("work", items).await;
    // By a rollback, by a stream that ends and counts this as a failure, and by lapsed leases.
    for outcome in [Outcome::Ok, Outcome::DeadLettered] {
        let delivery = remote.reserve_one("work", LONG).await;
        assert_eq!(text(&delivery), "a");
        assert_eq!(api.rollback(&delivery.receipt, "a").await, outcome);
    }
    for _ in 0..2 {
        let mut stream = remote.consume_counting("work", 10).await;
        assert_eq!(text(&stream.next().await), "b");
    }
    for _ in 0..2 {
        let delivery = api.reserve_one("work", Duration::from_millis(200)).await;
        assert_eq!(text(&delivery), "c");
    }
    let delivery = remote.reserve_one("work", LONG).await;
    assert_eq!(text(&delivery), "d");
    assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    let mut dead = api.consume("dead", 10).await;
    let mut seen = Vec::new();
    // The items keep their key, so that in the dead-letter queue too they are delivered one at a
    // time.
    for _ in 0..3 {
        let delivery = dead.next().await;
        seen.push(text(&delivery));
        api.commit(&[&delivery.receipt]).await;
    }
    assert_eq!(seen, ["a", "b", "c"]);
}

/// Pushes items of one key through a broker that is killed, then a few through another one. Returns the payloads of the
/// pushes that were answered.
async fn push_until_killed(
    key: usize,
    api: Api,
    remote: Api,
    pushed: Arc<AtomicI64>,
) -> Vec<String> {
    let mut answered = Vec::new();
    let mut after = 0;
    for number in 0.. {
        let payload = format!("{number:05}");
        let item = keyed(&format!("key{key}"), &payload);
        if after == 0 && api.try_push("work", vec![item.clone()]).await.is_ok() {
            pushed.fetch_add(1, Ordering::SeqCst);
            answered.push(payload);
            continue;
        }
        if after == 0 {
            after = 1; // the outcome of this push is unknown
            continue;
        }
        remote.push_items("work", vec![item]).await;
        answered.push(payload);
        after += 1;
        if after > 5 {
            break;
        }
    }
    answered
}

/// Commits what a broker delivers until the broker is killed. Adds the payloads of each key to `committed`.
async fn commit_until_killed(api: Api, committed: Arc<Mutex<HashMap<String, Vec<String>>>>) {
    let request = ConsumeRequest {
        queue: "work".to_owned(),
        max_in_flight: 4,
        lease: duration(Duration::from_secs(3)),
        ..ConsumeRequest::default()
    };
    let mut stream = api.consume_with(request).await;
    while let Ok(delivery) = stream.try_next().await {
        let key = delivery.item.as_ref().expect("an item").ordering_key.clone();
        let payload = text(&delivery);
        // Recorded before the broker is told, because another consumer may receive the next item
        // immediately afterwards.
        let note = |change: &dyn Fn(&mut Vec<String>)| {
            let mut committed = committed.lock().expect("no panic inside");
            change(committed.entry(key.clone()).or_default());
        };
        note(&|payloads| payloads.push(payload.clone()));
        let answer = api.try_commit(&[&delivery.receipt]).await;
        if !answer.is_ok_and(|results| results[0].outcome() == Outcome::Ok) {
            // The kill made the outcome unknown. If the commit did not take effect, the item is
            // delivered again.
            note(&|payloads| payloads.retain(|seen| *seen != payload));
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_advance_when_a_broker_is_killed_during_pushes_and_settles() {
    const KEYS: usize = 8;
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let (dying, living) = (launch.start().await, launch.start().await);
    let remote = living.api().await;
    remote.create(Queue { name: "work".to_owned(), ..Queue::default() }).await;

    // Producers of all keys push through the broker that is killed, and then through the other one.
    // A push whose answer the kill cut off may be stored. In any case the next push has the next
    // payload.
    let mut answered: Vec<Vec<String>> = Vec::new();
    let mut producers = JoinSet::new();
    let pushed = Arc::new(AtomicI64::new(0));
    for key in 0..KEYS {
        let (api, remote) = (dying.api().await, remote.clone());
        let pushed = Arc::clone(&pushed);
        producers.spawn(async move { (key, push_until_killed(key, api, remote, pushed).await) });
    }
    // Consumers at the broker settle at full speed.
    let mut consumers = JoinSet::new();
    let committed = Arc::new(Mutex::new(HashMap::<String, Vec<String>>::new()));
    for _ in 0..3 {
        let (api, committed) = (dying.api().await, Arc::clone(&committed));
        consumers.spawn(commit_until_killed(api, committed));
    }
    until("work is well under way", || async {
        let done: usize = committed.lock().expect("no panic inside").values().map(Vec::len).sum();
        (pushed.load(Ordering::SeqCst) >= 120 && done >= 60).then_some(())
    })
    .await;
    dying.kill();
    consumers.join_all().await;
    answered.resize(KEYS, Vec::new());
    for (key, payloads) in producers.join_all().await {
        answered[key] = payloads;
    }

    // The other broker delivers all remaining items in order: leases lapse, and blocked keys are
    // repaired.
    let mut stream = remote.consume("work", 100).await;
    let mut left: usize = remote.list("work", ItemState::Unspecified).await.len();
    let mut committed = committed.lock().expect("no panic inside").clone();
    while left > 0 {
        let delivery = stream.next().await;
        assert_eq!(remote.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
        let key = delivery.item.as_ref().expect("an item").ordering_key.clone();
        committed.entry(key).or_default().push(text(&delivery));
        left -= 1;
    }
    for (key, answered) in answered.iter().enumerate() {
        let seen = &committed[&format!("key{key}")];
        assert!(seen.is_sorted_by(|a, b| a < b), "key{key} out of order: {seen:?}");
        // A commit whose answer was cut off may have taken effect. Then its item is in neither
        // list.
        let missing = answered.iter().filter(|payload| !seen.contains(payload)).count();
        assert!(missing <= 1, "key{key} lost {missing} items");
    }
    assert!(remote.list("work", ItemState::Unspecified).await.is_empty());
}
