//! How much a reserve reads: no more than the demands can take and one, and bounded numbers of what is removed.

use super::*;
use crate::store::sqlite::reserve::read_head;

const BYTES: usize = 1_000;

/// Returns the numbers of live and of expired items that a reserve reads, and whether it leaves some.
async fn head(
    store: &SqliteStore,
    queue: &Arc<Queue>,
    demands: Vec<Demand>,
) -> (usize, usize, bool) {
    let queue = queue.clone();
    let read = store.inner.write(move |tx| {
        read_head(tx, &queue, &demands).map(|head| (head.live.len(), head.expired.len(), head.cut))
    });
    read.await.unwrap()
}

/// Returns a store with ten items of [`BYTES`] bytes.
async fn ten() -> (SqliteStore, Arc<Queue>) {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    let payload = "x".repeat(BYTES);
    store.push((0..10).map(|_| push_of(&queue, &payload)).collect()).await.unwrap();
    (store, queue)
}

#[tokio::test]
async fn one_item_more_than_is_asked_for_tells_that_there_are_more() {
    let (store, queue) = ten().await;
    let most = |max_items| vec![Demand { max_items, ..want() }];
    for (max_items, read, cut) in [(1, 2, true), (9, 10, true), (10, 10, false), (11, 10, false)] {
        assert_eq!(head(&store, &queue, most(max_items)).await, (read, 0, cut), "{max_items}");
    }
    let two = vec![Demand { max_items: 3, ..want() }, Demand { max_items: 2, ..want() }];
    assert_eq!(head(&store, &queue, two).await, (6, 0, true));
}

#[tokio::test]
async fn payloads_that_no_demand_has_room_for_are_not_read() {
    let (store, queue) = ten().await;
    let room = |max_bytes| Demand { max_bytes, ..want() };
    for (max_bytes, read) in [(3 * BYTES - 1, 3), (3 * BYTES, 4), (10 * BYTES - 1, 10)] {
        assert_eq!(head(&store, &queue, vec![room(max_bytes)]).await, (read, 0, true));
    }
    assert_eq!(head(&store, &queue, vec![room(10 * BYTES)]).await, (10, 0, false));
    // Each demand may take one item that is larger than its room.
    for (demands, read) in [(1, 2), (2, 3), (4, 5)] {
        assert_eq!(head(&store, &queue, vec![room(0); demands]).await, (read, 0, true));
    }
}

#[tokio::test]
async fn two_thousand_expired_items_are_read_at_once() {
    let clock = Arc::new(Clock::system());
    let store = SqliteStore::open_with("sqlite::memory:", clock.clone(), NO_SWEEP).unwrap();
    let queue = queue(&store);
    let item = NewItem { ttl: Some(Duration::from_secs(1)), ..NewItem::default() };
    let pushes = (0..2_001).map(|_| Push::new(queue.clone(), item.clone()));
    store.push(pushes.collect()).await.unwrap();
    clock.advance(Duration::from_secs(2));
    assert_eq!(head(&store, &queue, vec![want()]).await, (0, 2_000, true));
}
