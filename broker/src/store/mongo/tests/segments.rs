//! Items that share documents: what brokers do to each other's segments, and writes whose answers are lost.

use super::{
    faults::{Server, assert_untouched, take_all, times, unsure},
    *,
};

const SIZE: SegmentSize = SegmentSize { max: 10, alone: true };

/// Two brokers on documents of up to ten items.
async fn two() -> (Scratch, Arc<Clock>, Vec<Arc<Broker<MongoStore>>>, Arc<Queue>) {
    let (scratch, clock) = (Scratch::with_segments(SIZE), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    (scratch, clock, stores, queue)
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| n.to_string()).collect()
}

async fn push(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) {
    let pushes = numbers(0..count).iter().map(|n| push_of(queue, n, 0)).collect();
    store.push(pushes).await.unwrap();
}

fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    let text = |d: &Delivery| String::from_utf8(d.item.payload.to_vec()).unwrap();
    deliveries.iter().map(text).collect()
}

async fn commit(
    store: &Broker<MongoStore>,
    queue: &Arc<Queue>,
    items: &[Delivery],
) -> Vec<Outcome> {
    store.commit(items.iter().map(|delivery| held(queue, delivery)).collect()).await.unwrap()
}

fn back(queue: &Arc<Queue>, delivery: &Delivery) -> Rollback {
    let to = RollbackTo::Queue {
        eligible_time: delivery.previous_eligible_time,
        attempt: 1,
        undelivered: true,
    };
    Rollback { held: held(queue, delivery), to, reason: None }
}

fn move_of(queue: &Arc<Queue>, to: &Arc<Queue>, delivery: &Delivery) -> Move {
    Move {
        held: held(queue, delivery),
        to: to.clone(),
        payload: None,
        content_type: None,
        headers: [].into(),
        priority: None,
        eligible_time: delivery.previous_eligible_time,
    }
}

fn items_of(store: &MongoStore) -> mongodb::Collection<Document> {
    store.inner.db.collection("items.default")
}

/// How many documents are segments, and how many are items.
async fn documents(store: &MongoStore) -> (u64, u64) {
    let items = items_of(store);
    let segments = items.count_documents(doc! { "left": { "$exists": true } });
    let own = doc! { "payload": { "$exists": true } };
    (segments.await.unwrap(), items.count_documents(own).await.unwrap())
}

/// Waits until nothing is left, not even an empty segment.
async fn until_nothing_is_left(store: &MongoStore) {
    super::faults::until("nothing is left", async || documents(store).await == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn items_that_are_pushed_together_share_a_document_to_their_end() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 25).await;
    assert_eq!(documents(&stores[0]).await, (3, 0));
    let first = take(&stores[0], &queue, 13).await;
    let rest = take(&stores[1], &queue, 100).await;
    assert_eq!(payloads(&first), numbers(0..13));
    assert_eq!(payloads(&rest), numbers(13..25));
    let depth = stores[1].depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (0, 25));
    assert_eq!(commit(&stores[0], &queue, &first[5..]).await, [Outcome::Ok; 8]);
    assert_eq!(commit(&stores[1], &queue, &rest).await, [Outcome::Ok; 12]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().reserved, 5);
    assert_eq!(commit(&stores[0], &queue, &first[..5]).await, [Outcome::Ok; 5]);
    assert_eq!(documents(&stores[0]).await.1, 0, "nothing was detached");
    until_nothing_is_left(&stores[0]).await;
    assert_eq!(commit(&stores[0], &queue, &first).await, [Outcome::Gone; 13]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_run_that_lapses_comes_back_and_the_other_half_does_not() {
    let (_scratch, clock, stores, queue) = two().await;
    push(&stores[0], &queue, 10).await;
    let taken = take(&stores[0], &queue, 8).await;
    assert_eq!(commit(&stores[0], &queue, &taken[..4]).await, [Outcome::Ok; 4]);
    clock.advance(LEASE + Duration::from_secs(1));
    assert_eq!(stores[1].depth(&queue).await.unwrap().ready, 6);
    let again = take(&stores[1], &queue, 100).await;
    assert_eq!(payloads(&again), ["8", "9", "4", "5", "6", "7"]);
    let attempts: Vec<u32> = again.iter().map(|delivery| delivery.item.attempt).collect();
    assert_eq!(attempts, [1, 1, 2, 2, 2, 2]);
    let expected = [[Outcome::Gone; 4], [Outcome::LeaseLost; 4]].concat();
    assert_eq!(commit(&stores[0], &queue, &taken).await, expected);
    assert_eq!(commit(&stores[1], &queue, &again).await, [Outcome::Ok; 6]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_receipt_changes_nothing_whatever_is_asked() {
    let (_scratch, clock, stores, queue) = two().await;
    let to = make(&stores[0], queue_named("to")).await;
    push(&stores[0], &queue, 8).await;
    let stale = take(&stores[0], &queue, 8).await;
    clock.advance(LEASE + Duration::from_secs(1));
    let taken = take(&stores[1], &queue, 8).await;
    assert_eq!(payloads(&taken), numbers(0..8));
    for store in &stores {
        let receipts = || stale.iter().map(|delivery| held(&queue, delivery));
        assert_eq!(store.holds(receipts().collect()).await.unwrap(), [false; 8]);
        assert_eq!(commit(store, &queue, &stale).await, [Outcome::LeaseLost; 8]);
        let until = store.now() + LEASE * 2;
        let extended = store.extend(receipts().map(|held| (held, until)).collect());
        assert_eq!(extended.await.unwrap(), [Outcome::LeaseLost; 8]);
        let rollbacks = stale.iter().map(|delivery| back(&queue, delivery)).collect();
        assert_eq!(store.rollback(rollbacks).await.unwrap(), [Outcome::LeaseLost; 8]);
        let moves = stale.iter().map(|delivery| move_of(&queue, &to, delivery)).collect();
        assert_eq!(store.move_items(moves).await.unwrap(), [Outcome::LeaseLost; 8]);
        let pushed = store.commit_and_push(held(&queue, &stale[0]), vec![push_of(&to, "x", 0)]);
        assert_eq!(pushed.await.unwrap(), (Outcome::LeaseLost, vec![]));
    }
    assert_eq!(commit(&stores[1], &queue, &taken).await, [Outcome::Ok; 8]);
    assert_eq!(stores[1].depth(&to).await.unwrap().unsettled(), 0);
}

/// Receipts of a segment that nobody else touched, against each transition that takes items out of it.
#[tokio::test(flavor = "multi_thread")]
async fn every_fate_leaves_the_rest_of_a_segment_as_it_is() {
    let (_scratch, _clock, stores, queue) = two().await;
    let to = make(&stores[0], queue_named("to")).await;
    for store in &stores {
        push(&stores[0], &queue, 10).await;
        let taken = take(&stores[0], &queue, 8).await;
        let until = store.now() + LEASE * 2;
        let extended = store.extend(vec![(held(&queue, &taken[0]), until)]).await.unwrap();
        assert_eq!(extended, [Outcome::Ok]);
        let moved = store.move_items(vec![move_of(&queue, &to, &taken[1])]).await.unwrap();
        assert_eq!(moved, [Outcome::Ok]);
        let pushed = store.commit_and_push(held(&queue, &taken[2]), vec![push_of(&to, "x", 0)]);
        assert_eq!(pushed.await.unwrap().0, Outcome::Ok);
        let deleted = store.delete_item(&queue, taken[3].item.id, None).await.unwrap();
        assert_eq!(deleted, crate::store::ItemDeleted::Done);
        let listed = store.list_items(&queue, None, None, 100).await.unwrap();
        assert_eq!(listed.entries.len(), 7);
        let rolled_back = store.rollback(vec![back(&queue, &taken[4])]).await.unwrap();
        assert_eq!(rolled_back, [Outcome::Ok]);
        let depth = store.depth(&queue).await.unwrap();
        assert_eq!((depth.ready, depth.reserved), (3, 4));
        let rest: Vec<Delivery> = [&taken[..1], &taken[5..]].concat().into_iter().collect();
        assert_eq!(commit(store, &queue, &rest).await, [Outcome::Ok; 4]);
        let again = take(store, &queue, 10).await;
        assert_eq!(payloads(&again), ["4", "8", "9"]);
        assert_eq!(commit(store, &queue, &again).await, [Outcome::Ok; 3]);
        assert_eq!(store.depth(&queue).await.unwrap().unsettled(), 0);
        let moved = take(store, &to, 10).await;
        assert_eq!(commit(store, &to, &moved).await, [Outcome::Ok; 2]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_claims_take_a_segment_apart_and_miss_nothing() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    push(&stores[0], &queue, 100).await;
    let mut all = Vec::new();
    while all.len() < 100 {
        let taken = take_all(&stores[all.len() % 2], &queue, 1).await;
        assert_eq!(commit(&stores[all.len() % 2], &queue, &taken).await, [Outcome::Ok]);
        all.extend(payloads(&taken));
    }
    assert_eq!(all, numbers(0..100));
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_part_of_a_segment_is_undone_when_its_answer_is_lost() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open_with(&clock, "a", SIZE).await;
    let queue = make(&store, queue_named("q")).await;
    push(&store, &queue, 30).await;
    // Applied each time, and repeated each time.
    server.fail("update", "alwaysOn", unsure()).await;
    for _ in 0..2 {
        let refused = store.reserve(&queue, &[want(15, LEASE)]).await;
        assert!(matches!(refused, Err(crate::store::StoreError::Unavailable { .. })));
    }
    server.heal().await;
    let taken = take_all(&store, &queue, 30).await;
    assert_untouched(&taken);
    assert_eq!(payloads(&taken), numbers(0..30), "in order");
    assert_eq!(commit(&store, &queue, &taken).await, [Outcome::Ok; 30]);
}

/// Each write of each transition, refused once, applied and answered as not sure, or cut off.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_fail_lose_and_double_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open_with(&clock, "a", SIZE).await;
    let queue = make(&store, queue_named("q")).await;
    let to = make(&store, queue_named("to")).await;
    let faults = [
        ("update", doc! { "errorCode": 91 }),
        ("update", unsure()),
        ("update", doc! { "closeConnection": true }),
        ("delete", doc! { "errorCode": 91 }),
        ("delete", unsure()),
        ("delete", doc! { "closeConnection": true }),
        ("insert", doc! { "errorCode": 91 }),
        ("insert", doc! { "closeConnection": true }),
        ("find", doc! { "closeConnection": true }),
        (
            "commitTransaction",
            doc! { "errorCode": 91, "errorLabels": ["UnknownTransactionCommitResult"] },
        ),
        ("commitTransaction", doc! { "closeConnection": true }),
    ];
    for (command, data) in faults {
        let fail = || server.fail(command, times(1), data.clone());
        push(&store, &queue, 10).await;
        // The claim itself.
        fail().await;
        let claimed = store.reserve(&queue, &[want(7, LEASE)]).await;
        server.heal().await;
        let claimed = claimed.map(|reserved| reserved.deliveries).unwrap_or_default();
        let mut taken: Vec<Delivery> = claimed.into_iter().map(|(_, delivery)| delivery).collect();
        taken.extend(all_of(&store, &queue, 10 - taken.len()).await);
        assert_eq!(payloads(&taken), numbers(0..10), "{command} {data}");
        // Committing some: by bits, and with the rest by deleting the document.
        for part in [&taken[..2], &taken[2..4]] {
            fail().await;
            let outcomes = store.commit(part.iter().map(|d| held(&queue, d)).collect()).await;
            server.heal().await;
            if outcomes.is_err() {
                for outcome in commit(&store, &queue, part).await {
                    assert!(matches!(outcome, Outcome::Ok | Outcome::Gone), "{command} {data}");
                }
            }
        }
        // Detaching, for what has a fate of its own.
        fail().await;
        let rollbacks = vec![back(&queue, &taken[4]), back(&queue, &taken[5])];
        let _ = store.rollback(rollbacks).await;
        server.heal().await;
        fail().await;
        let moved = store.move_items(vec![move_of(&queue, &to, &taken[6])]).await;
        server.heal().await;
        if moved.is_err() {
            let _ = store.move_items(vec![move_of(&queue, &to, &taken[6])]).await.unwrap();
        }
        fail().await;
        let until = store.now() + LEASE;
        let _ = store.extend(vec![(held(&queue, &taken[7]), until)]).await;
        server.heal().await;
        let ends = commit(&store, &queue, &taken[7..]).await;
        assert_eq!(ends, [Outcome::Ok; 3], "{command} {data}");
        // A rollback that was refused: the lease ends.
        clock.advance(LEASE + Duration::from_secs(1));
        let again = all_of(&store, &queue, 2).await;
        assert_eq!(payloads(&again), ["4", "5"], "{command} {data}");
        assert_eq!(commit(&store, &queue, &again).await, [Outcome::Ok; 2]);
        let moved = all_of(&store, &to, 1).await;
        assert_eq!(payloads(&moved), ["6"], "{command} {data}");
        assert_eq!(commit(&store, &to, &moved).await, [Outcome::Ok]);
        for queue in [&queue, &to] {
            assert_eq!(store.depth(queue).await.unwrap().unsettled(), 0, "{command} {data}");
        }
    }
}

/// Takes all items, of which there are so many and no more; those of a claim that was not answered come back when it is undone.
async fn all_of(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
    let mut taken = take_all(store, queue, count).await;
    assert!(take(store, queue, 10).await.is_empty());
    taken.sort_by_key(|delivery| delivery.item.id);
    taken
}
