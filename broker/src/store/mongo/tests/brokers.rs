//! Tests with several brokers on one database.

use super::*;
use crate::domain::{Eligibility, OrderingKey};

#[tokio::test(flavor = "multi_thread")]
async fn the_watermark_passes_settled_items_and_nothing_else() {
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

    // A rollback below the watermark is found at once.
    let to = RollbackTo::Queue {
        eligible_time: first[3].previous_eligible_time,
        attempt: 1,
        ended: EndedDelivery::Counted,
    };
    let back = Rollback { held: held(&queue, &first[3]), to, reason: None };
    assert_eq!(stores[0].rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(take(&stores[0], &queue, 1).await[0].item.id, first[3].item.id);

    // A hint leads to a rollback by another broker.
    let since = first[5].previous_eligible_time;
    let to = RollbackTo::Queue { eligible_time: since, attempt: 1, ended: EndedDelivery::Counted };
    let back = Rollback { held: held(&queue, &first[5]), to, reason: None };
    assert_eq!(stores[1].rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    let demands = [want(1, LEASE)];
    let reserve = stores[0].reserve_hearing(&queue, &demands, Appeared::Since(since));
    assert_eq!(reserve.await.unwrap().deliveries[0].1.item.id, first[5].item.id);
    assert_eq!(take(&stores[0], &queue, 100).await.len(), 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_share_a_queue_and_deliver_each_item_once() {
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
async fn outcomes_are_exact_for_items_that_other_brokers_settled() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let (ours, others) = (&stores[0], &stores[1]);
    let queue = make(ours, queue_named("q")).await;
    ours.push((0..3).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let taken = take(ours, &queue, 3).await;
    let commit = |delivery: &Delivery| vec![held(&queue, delivery)];
    // Committed by the other broker: gone, though this broker takes the item for its own.
    assert_eq!(others.commit(commit(&taken[0])).await.unwrap(), [Outcome::Ok]);
    // Rolled back, reserved and committed by the other broker: gone as well.
    let to = RollbackTo::Queue {
        eligible_time: others.now(),
        attempt: 2,
        ended: EndedDelivery::Counted,
    };
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
    for ahead in [0, 600] {
        let clock = Arc::new(Clock::system());
        clock.advance(Duration::from_secs(ahead));
        let options = MongoOptions { clock, ..MongoOptions::default() };
        stores.push(connected(&scratch.uri, &scratch.name, options).await);
    }
    let apart = (stores[0].now().0 - stores[1].now().0).abs();
    assert!(apart < 1_000, "{apart} ms apart");
    let queue = make(&stores[0], queue_named("q")).await;
    stores[1].push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    // The item is not late for one broker, and the other does not take its lease for lapsed.
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
        push.item.ordering_key = OrderingKey::new("k");
        push
    };
    dying.push((0..3).map(keyed).collect()).await.unwrap();
    let taken = take(&dying, &queue, 3).await;
    assert_eq!(taken.len(), 1);
    // As if the broker was killed between the settle and the unblocking of the next item.
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
    // Receipts outlive the broker that issued them, but not the next reservation.
    assert_eq!(last.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::LeaseLost]);
    assert_eq!(last.commit(vec![held(&queue, &again[0])]).await.unwrap(), [Outcome::Ok]);
}

#[tokio::test(flavor = "multi_thread")]
async fn sequence_numbers_follow_the_order_of_answers_across_brokers() {
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
    let numbers: Vec<Option<i64>> = answers.iter().map(|(.., number)| *number).collect();
    assert_eq!(numbers, (1..=60).map(Some).collect::<Vec<_>>());
    for pair in answers.windows(2) {
        assert!(pair[0].0 <= pair[1].1, "number {:?} was taken too late", pair[0].2);
    }
}

/// A tombstone for another broker stays for minutes, however long the lease is. That broker gets the right outcome
/// after that too.
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
    let to = store::RollbackTo::Queue {
        eligible_time: clock.now(),
        attempt: 2,
        ended: EndedDelivery::Counted,
    };
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

    // As if the server had removed the tombstones.
    clock.advance(Duration::from_mins(5));
    items.delete_many(tombstones).await.unwrap();
    let receipts = taken.iter().map(|delivery| held(&queue, delivery)).collect();
    assert_eq!(stores[0].commit(receipts).await.unwrap(), [Outcome::Gone; 3]);
}

/// When the item at the head of a key expires, the next item is ready and its consumers are woken.
#[tokio::test(flavor = "multi_thread")]
async fn consumers_are_woken_when_the_head_of_a_key_expires() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let queue = make(&store, queue_named("q")).await;
    let keyed = |delay: u64, ttl: Option<u64>| {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = OrderingKey::new("k");
        push.item.eligibility = Eligibility::After(Duration::from_secs(delay));
        push.item.ttl = ttl.map(Duration::from_secs);
        push
    };
    store.push(vec![keyed(600, Some(5))]).await.unwrap();
    store.push(vec![keyed(0, None)]).await.unwrap();
    assert!(take(&store, &queue, 1).await.is_empty());
    clock.advance(Duration::from_secs(6));
    upkeep::round(&store.inner).await;
    let told = tokio::time::timeout(Duration::from_secs(30), store.unblocked()).await;
    assert_eq!(told.expect("a hint"), std::slice::from_ref(&queue.name));
    assert_eq!(take(&store, &queue, 1).await.len(), 1);
}

/// Of many keys that are settled at once, each has its next item unblocked, in order, and no key two.
#[tokio::test(flavor = "multi_thread")]
async fn settled_keys_are_unblocked_together() {
    const KEYS: usize = 40;
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    let items = (0..3 * KEYS).map(|number| {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = OrderingKey::new(format!("{:02}", number % KEYS));
        push
    });
    stores[0].push(items.collect()).await.unwrap();
    for turn in 0..3 {
        let taken = take(&stores[0], &queue, 3 * KEYS).await;
        let numbers: Vec<i64> =
            taken.iter().filter_map(|delivery| delivery.item.sequence).collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        let first = (turn * KEYS) as i64 + 1;
        assert_eq!(sorted, (first..first + KEYS as i64).collect::<Vec<_>>());
        // Both brokers settle half of them, at the same time.
        let held: Vec<Reservation> = taken.iter().map(|delivery| held(&queue, delivery)).collect();
        let (here, there) = held.split_at(KEYS / 2);
        let (here, there) =
            tokio::join!(stores[0].commit(here.to_vec()), stores[1].commit(there.to_vec()));
        assert!(here.unwrap().iter().chain(&there.unwrap()).all(|outcome| *outcome == Outcome::Ok));
    }
    assert!(take(&stores[0], &queue, 1).await.is_empty());
}
