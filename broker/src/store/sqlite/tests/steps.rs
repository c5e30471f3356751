//! Tests that large jobs run in steps, so that no call waits long behind one.

use super::*;
use crate::domain::{DedupId, Eligibility, OrderingKey};
use crate::store::sqlite::{admin, sweep};

/// Pushes `count` items with deduplication ids, and removes the items again.
async fn remember(store: &SqliteStore, queue: &Arc<Queue>, count: usize) {
    let pushes = (0..count).map(|n| {
        let mut push = push_of(queue, "x");
        push.item.dedup_id = DedupId::new(n.to_string());
        push
    });
    store.push(pushes.collect()).await.unwrap();
    store.inner.write_items(|tx| tx.conn.execute("DELETE FROM items", [])).await.unwrap();
}

async fn count(store: &SqliteStore, table: &'static str) -> i64 {
    let count = store.inner.read(move |view| {
        view.conn.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))
    });
    count.await.unwrap()
}

/// Returns the largest number of rows that the writer changed in one transaction of the job.
async fn largest_step(store: &SqliteStore, job: impl Future<Output = ()>) -> u64 {
    let changes = || store.inner.write(|tx| Ok(tx.conn.total_changes()));
    let mut last = changes().await.unwrap();
    let mut largest = 0;
    let mut job = std::pin::pin!(job);
    loop {
        // One poll of the job, then the changes that it caused.
        let done = futures_util::poll!(job.as_mut()).is_ready();
        let now = changes().await.unwrap();
        largest = largest.max(now - last);
        last = now;
        if done {
            return largest;
        }
        tokio::task::yield_now().await;
    }
}

/// 20,000 deduplication ids were once deleted by one statement, during which nobody else could write.
#[tokio::test]
async fn deleting_a_queue_holds_up_other_calls_for_one_step_at_a_time() {
    let store =
        SqliteStore::open_with("sqlite::memory:", Arc::new(Clock::system()), NO_SWEEP).unwrap();
    let queue = queue(&store);
    store.create_queue(&queue).await.unwrap();
    remember(&store, &queue, 20_000).await;
    assert_eq!(count(&store, "dedup").await, 20_000);
    let step = largest_step(&store, async {
        assert_eq!(delete(&store, &queue).await, Deleted::Done(0));
    });
    let step = step.await;
    assert!(step <= 3 * CHUNK as u64, "{step} rows in one step");
    assert_eq!(count(&store, "dedup").await, 0);
    assert_eq!(store.get_queue(&queue.name).await.unwrap(), None);
}

/// A step that deletes also ends after a number of bytes, because 1,000 large payloads are many pages.
#[tokio::test]
async fn a_step_of_a_purge_is_small_in_bytes_too() {
    let store =
        SqliteStore::open_with("sqlite::memory:", Arc::new(Clock::system()), NO_SWEEP).unwrap();
    let queue = queue(&store);
    let large = "x".repeat(3 << 20);
    for _ in 0..3 {
        store.push((0..4).map(|_| push_of(&queue, &large)).collect()).await.unwrap();
    }
    let name = queue.clone();
    let first =
        move |tx: &Tx<'_>| admin::purge_chunk(tx, &name, admin::Before::ANY, Purge::Everything);
    assert_eq!(store.inner.write_items(first).await.unwrap().0, 6);
    assert_eq!(store.purge(&queue).await.unwrap(), 6);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 0);
}

/// A broker that is killed between two steps leaves a queue that works, with fewer items and no inconsistency.
#[tokio::test]
async fn a_deletion_that_was_cut_short_leaves_a_queue_that_works() {
    let store =
        SqliteStore::open_with("sqlite::memory:", Arc::new(Clock::system()), NO_SWEEP).unwrap();
    let queue = queue(&store);
    store.create_queue(&queue).await.unwrap();
    let pushes = (0..2_500).map(|n| {
        let mut push = push_of(&queue, "x");
        push.item.dedup_id = DedupId::new(n.to_string());
        push.item.ordering_key = OrderingKey::new((n % 10).to_string());
        push
    });
    store.push(pushes.collect()).await.unwrap();
    let name = queue.clone();
    store
        .inner
        .write(move |tx| admin::purge_chunk(tx, &name, admin::Before::ANY, Purge::Everything))
        .await
        .unwrap();

    let depth = store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.blocked), (10, 1_490));
    assert_eq!(count(&store, "dedup").await, 1_500, "each id belongs to an item that exists");
    assert_eq!(delete(&store, &queue).await, Deleted::Done(1_500));
    assert_eq!((count(&store, "dedup").await, count(&store, "items").await), (0, 0));
}

/// The engine learns that the next item of a key is ready when the one before it has expired.
#[tokio::test]
async fn a_sweep_reports_the_queues_it_unblocked() {
    let clock = Arc::new(Clock::system());
    let store = SqliteStore::open_with("sqlite::memory:", clock.clone(), NO_SWEEP).unwrap();
    let queue = queue(&store);
    let keyed = |payload: &str, ttl| {
        let mut push = push_of(&queue, payload);
        (push.item.ordering_key, push.item.ttl) = (OrderingKey::new("k"), ttl);
        push.item.eligibility = Eligibility::After(Duration::from_mins(1));
        push
    };
    let first = keyed("first", Some(Duration::from_secs(10)));
    store.push(vec![first, keyed("second", None)]).await.unwrap();
    assert!(store.unblocked().now_or_never().is_none());
    clock.advance(Duration::from_secs(11));
    let unblocked = store.unblocked();
    assert!(!store.inner.write_items(sweep::chunk).await.unwrap());
    assert_eq!(unblocked.await, std::slice::from_ref(&queue.name));
}

async fn delete(store: &SqliteStore, queue: &Queue) -> Deleted {
    let stored = store.get_queue(&queue.name).await.unwrap().unwrap();
    let links = store.links().await.unwrap();
    store.delete_queue(&stored, true, links).await.unwrap()
}

/// A deletion with force takes many steps. Once it has deleted items it is not refused any more: no
/// queue can be linked to this one, and other changes of settings do not concern it.
#[tokio::test]
async fn a_forced_deletion_that_has_begun_is_not_refused() {
    const ITEMS: usize = 12_000;
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let dead = match store.create_queue(&queue(&store)).await.unwrap() {
        Created::New(queue) | Created::Existing(queue) => Arc::new(queue),
    };
    store.push((0..ITEMS).map(|_| push_of(&dead, "x")).collect()).await.unwrap();
    let links = store.links().await.unwrap();
    let deletion = store.delete_queue(&dead, true, links);
    let meanwhile = async {
        while store.depth(&dead).await.unwrap().ready == ITEMS as u64 {
            tokio::task::yield_now().await;
        }
        let name = |name| QueueName::parse("queue", name).unwrap();
        let other = Queue::with_defaults(name("other"), store.now());
        store.create_queue(&other).await.unwrap();
        let source = Queue::with_defaults(name("source"), store.now());
        let source = Queue { dead_letter_queue: Some(dead.name.clone()), ..source };
        let links = store.links().await.unwrap();
        store.link_queue(&source, links).await.unwrap()
    };
    let (deleted, linked) = tokio::join!(deletion, meanwhile);
    assert_eq!((deleted.unwrap(), linked), (Deleted::Done(ITEMS as u64), None));
    // The name is free again.
    let links = store.links().await.unwrap();
    let source = Queue::with_defaults(QueueName::parse("queue", "source").unwrap(), store.now());
    let source = Queue { dead_letter_queue: Some(dead.name.clone()), ..source };
    assert!(store.link_queue(&source, links).await.unwrap().is_some());
}
