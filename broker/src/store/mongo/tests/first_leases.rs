//! Items that are stored as reserved, when the answer to their insert is lost or late.

use super::{
    own_server::{Server, held_up, times, unsure},
    *,
};
use crate::{
    domain::{DedupId, ItemState, LeaseToken},
    store::{FirstLease, StoreError},
};

/// Returns the push of an item under a lease, with a deduplication id.
fn leased(store: &Broker<MongoStore>, queue: &Arc<Queue>, payload: &str) -> Push {
    let token = LeaseToken::fresh(store.broker_id());
    let mut push = push_of(queue, payload, 0);
    push.item.dedup_id = DedupId::new(payload);
    push.first_lease = Some(FirstLease::new(token, LEASE, None));
    push
}

/// Returns the push of items under one lease, with deduplication ids.
fn leased_together(store: &Broker<MongoStore>, queue: &Arc<Queue>, payloads: &[&str]) -> Vec<Push> {
    let mut pushes: Vec<Push> =
        payloads.iter().map(|payload| leased(store, queue, payload)).collect();
    let lease = pushes[0].first_lease.clone();
    for push in &mut pushes {
        push.first_lease.clone_from(&lease);
    }
    pushes
}

/// Waits until a tombstone has the id of the document whose insert is held up.
async fn until_fenced(server: &Server) {
    let fenced = async || {
        let tombstones =
            doc! { "when": { "$gte": schema::layout::millis(schema::layout::TOMBSTONE) } };
        server.items().count_documents(tombstones).await.unwrap() == 1
    };
    until("the id is taken", fenced).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn items_whose_insert_was_not_acknowledged_are_ready_with_no_attempt_counted() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open_with(&clock, "a", SegmentSize::SHARED).await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "first", 0)]).await.unwrap(); // makes indexes and sentinels

    server.fail("insert", "alwaysOn", unsure()).await;
    let names = ["x", "y", "z"];
    let refused = store.push(leased_together(&store, &queue, &names)).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    server.heal().await;
    let taken = take_all(&store, &queue, 4).await;
    assert_untouched(&taken);
    let payloads: Vec<&[u8]> = taken.iter().map(|taken| &taken.item.payload[..]).collect();
    assert_eq!(payloads, [&b"first"[..], b"x", b"y", b"z"]);
    // The producer repeats its push.
    let again = store.push(leased_together(&store, &queue, &names)).await.unwrap();
    assert!(again.iter().all(|pushed| pushed.deduplicated));
    let receipts = taken.iter().map(|delivery| held(&queue, delivery)).collect();
    assert_eq!(store.commit(receipts).await.unwrap(), [Outcome::Ok; 4]);
}

/// The command lies in the server's socket while its caller gives up, and is executed later.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_of_several_items_that_comes_late_stores_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (store, other) = (
        server.open_with(&clock, "a", SegmentSize::SHARED).await,
        server.open_with(&clock, "b", SegmentSize::SHARED).await,
    );
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "first", 0)]).await.unwrap();
    let mut late = held_up(Duration::from_secs(2));
    late.insert("appName", "sluicegate a");
    server.fail("insert", times(1), late).await;
    let pushing = store.push(leased_together(&store, &queue, &["x", "y"]));
    let given_up = tokio::time::timeout(Duration::from_millis(300), pushing);
    assert!(given_up.await.is_err());
    until_fenced(&server).await;
    let again = [push_of(&queue, "x", 0), push_of(&queue, "y", 0)];
    other.push(again.to_vec()).await.unwrap();
    store.close().await; // all writes have ended
    let listed = other.list_items(&queue, None, None, 10).await.unwrap().entries;
    let payloads: Vec<&[u8]> = listed.iter().map(|item| &item.payload[..]).collect();
    assert_eq!(payloads, [&b"first"[..], b"x", b"y"], "the late insert stored nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_whose_insert_was_not_acknowledged_is_ready_with_no_attempt_counted() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "first", 0)]).await.unwrap(); // makes indexes and sentinels

    // Each insert is applied, and so is the one that undoes the lease, as far as it can be.
    server.fail("insert", "alwaysOn", unsure()).await;
    let refused = store.push(vec![leased(&store, &queue, "x")]).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    let reserved = store.reserve(&queue, &[want(2, LEASE)]).await;
    assert!(reserved.is_err(), "nothing is claimed while the outcome is unknown: {reserved:?}");

    server.heal().await;
    let taken = take_all(&store, &queue, 2).await;
    assert_untouched(&taken);
    assert_eq!(taken[1].item.payload, "x");
    // The producer repeats its push.
    let again = store.push(vec![leased(&store, &queue, "x")]).await.unwrap()[0];
    assert_eq!((again.deduplicated, again.id), (true, taken[1].item.id));
    let receipts = taken.iter().map(|delivery| held(&queue, delivery)).collect();
    assert_eq!(store.commit(receipts).await.unwrap(), [Outcome::Ok; 2]);
}

/// The command lies in the server's socket while its caller gives up, and is executed later.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_comes_late_stores_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (store, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "first", 0)]).await.unwrap();

    let mut late = held_up(Duration::from_secs(2));
    late.insert("appName", "sluicegate a");
    server.fail("insert", times(1), late).await;
    let pushing = store.push(vec![leased(&store, &queue, "x")]);
    let given_up = tokio::time::timeout(Duration::from_millis(300), pushing);
    assert!(given_up.await.is_err());
    until_fenced(&server).await;
    // The producer repeats its push by way of another broker.
    let again = other.push(vec![push_of(&queue, "x", 0)]).await.unwrap()[0];
    store.close().await; // all writes have ended
    let listed = other.list_items(&queue, None, None, 10).await.unwrap().entries;
    let payloads: Vec<&[u8]> = listed.iter().map(|item| &item.payload[..]).collect();
    assert_eq!(payloads, [&b"first"[..], b"x"], "the late insert stored nothing");
    assert_eq!(listed[1].id, again.id);
}

/// The caller goes away after the insert, and is not told of the lease.
#[tokio::test(flavor = "multi_thread")]
async fn an_item_whose_pusher_has_gone_is_ready() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "first", 0)]).await.unwrap();
    let mut answered = Vec::new();
    for n in 0..20_u32 {
        let payload = n.to_string();
        let pushing = store.push(vec![leased(&store, &queue, &payload)]);
        // Some give up before their insert, some during it, and some not at all.
        if tokio::time::timeout(Duration::from_micros(300) * n, pushing).await.is_ok() {
            answered.push(payload);
        }
    }
    store.close().await; // what is undone has been undone
    let mut reserved = Vec::new();
    for item in store.list_items(&queue, None, None, 100).await.unwrap().entries {
        assert_eq!(item.attempt, 1);
        if item.state == ItemState::Reserved {
            reserved.push(String::from_utf8(item.payload.to_vec()).unwrap());
        }
    }
    assert_eq!(reserved, answered, "leases of pushes that were answered, and no others");
}
