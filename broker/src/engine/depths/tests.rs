//! The age of depths, their correction, and the number of counts in the store.

use std::{
    num::NonZeroU64,
    sync::atomic::{AtomicU64, Ordering},
};

use futures_util::future::join_all;

use super::*;
use crate::domain::Timestamp;
use crate::tasks::Tasks;

/// Returns a depth that the test sets, after the time that a count of that many items takes.
#[derive(Clone, Default)]
struct Items {
    depth: Arc<Mutex<Depth>>,
    counts: Arc<AtomicU64>,
}

#[async_trait]
impl Counter for Items {
    async fn count(&self, _queue: &Queue) -> store::Result<Depth> {
        self.counts.fetch_add(1, Ordering::Relaxed);
        let items = self.depth.lock().unsettled();
        tokio::time::sleep(Duration::from_nanos(400 * items)).await;
        Ok(*self.depth.lock())
    }
}

impl Items {
    fn ready(items: u64) -> Self {
        let depth = Depth { ready: items, ..Depth::default() };
        Self { depth: Arc::new(Mutex::new(depth)), counts: Arc::default() }
    }

    fn push(&self, items: u64) {
        self.depth.lock().ready += items;
    }

    fn counts(&self) -> u64 {
        self.counts.load(Ordering::Relaxed)
    }

    fn depths(&self) -> Arc<Depths> {
        Depths::new(self.clone(), Tasks::default())
    }
}

fn queue(max_depth: u64) -> Arc<Queue> {
    let name = QueueName::parse("queue", "q").unwrap();
    let max_depth = NonZeroU64::new(max_depth);
    Arc::new(Queue { max_depth, ..Queue::with_defaults(name, Timestamp(0)) })
}

const DEEP: u64 = 1_000_000;

fn totals(change: impl FnOnce(&mut Totals)) -> Change {
    let mut totals = Totals::default();
    change(&mut totals);
    Change::of(&totals, false)
}

/// Every end of a reservation takes its item out of the reserved ones. Committed and discarded
/// items may become history.
#[test]
fn items_that_leave_the_queue_are_no_longer_reserved() {
    let gone = Change { reserved: -2, ..Change::default() };
    let ends = [
        (Totals { committed: 2, ..Totals::default() }, 2),
        (Totals { discarded: 2, ..Totals::default() }, 2),
        (Totals { moved: 2, ..Totals::default() }, 0),
        (Totals { dead_lettered: 2, ..Totals::default() }, 0),
    ];
    for (end, processed) in ends {
        assert_eq!(Change::of(&end, false), gone);
        assert_eq!(Change::of(&end, true), Change { processed, ..gone });
    }
}

/// A caller sees the changes it made before it asked, although a million items are not counted for
/// each call.
#[tokio::test(start_paused = true)]
async fn a_caller_always_sees_its_own_last_change() {
    let items = Items::ready(DEEP);
    let (depths, queue) = (items.depths(), queue(0));
    let now = async || {
        let depth = depths.depth(&queue).await.unwrap();
        (depth.ready, depth.delayed, depth.reserved)
    };
    assert_eq!(now().await, (DEEP, 0, 0));
    depths.changed(&queue.name, || totals(|t| t.pushed = 5));
    assert_eq!(now().await, (DEEP + 5, 0, 0));
    depths.changed(&queue.name, || totals(|t| t.delivered = 3));
    assert_eq!(now().await, (DEEP + 2, 0, 3));
    depths.changed(&queue.name, || totals(|t| t.committed = 2));
    assert_eq!(now().await, (DEEP + 2, 0, 1));
    depths.changed(&queue.name, || totals(|t| t.rolled_back = 1));
    depths.changed(&queue.name, || Change { ready: -1, delayed: 1, ..Change::default() });
    assert_eq!(now().await, (DEEP + 2, 1, 0));
    assert_eq!(items.counts(), 1);
}

/// Changes made by other brokers are seen after a second, however long a count takes.
#[tokio::test(start_paused = true)]
async fn a_depth_is_at_most_a_second_old() {
    let items = Items::ready(DEEP);
    let (depths, queue) = (items.depths(), queue(0));
    assert_eq!(depths.depth(&queue).await.unwrap().ready, DEEP);
    items.push(7);
    tokio::time::advance(MAX_AGE).await;
    assert_eq!(depths.depth(&queue).await.unwrap().ready, DEEP + 7);
    assert_eq!(items.counts(), 2);
}

/// A shallow queue is counted for every caller, so that its figures are exact.
#[tokio::test(start_paused = true)]
async fn a_shallow_queue_is_counted_for_every_caller() {
    let items = Items::ready(10);
    let (depths, queue) = (items.depths(), queue(0));
    for n in 0..20 {
        assert_eq!(depths.depth(&queue).await.unwrap().ready, 10 + n);
        items.push(1);
    }
}

/// All callers that ask while the queue is being counted share the next count.
#[tokio::test(start_paused = true)]
async fn one_count_serves_all_concurrent_callers() {
    for (ready, counts) in [(DEEP, 1), (1_000, 2)] {
        let items = Items::ready(ready);
        let (depths, queue) = (items.depths(), queue(0));
        let early = depths.depth(&queue);
        let late = async {
            tokio::time::sleep(Duration::from_micros(10)).await;
            join_all((0..100).map(|_| depths.depth(&queue))).await
        };
        let (early, late) = tokio::join!(early, late);
        assert_eq!(early.unwrap().ready, ready);
        assert!(late.into_iter().all(|depth| depth.unwrap().ready == ready));
        assert_eq!(items.counts(), counts, "{ready}");
    }
}

/// A count that began before a purge is not used after it.
#[tokio::test(start_paused = true)]
async fn a_purge_voids_the_count_under_way() {
    let items = Items::ready(DEEP);
    let (depths, queue) = (items.depths(), queue(0));
    let before = depths.depth(&queue);
    let purge = async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        depths.forget_count(&queue.name);
    };
    let _ = tokio::join!(before, purge);
    *items.depth.lock() = Depth::default();
    assert_eq!(depths.depth(&queue).await.unwrap().unsettled(), 0);
}

/// Pushes into a deep queue with a limit do not wait for counts: during 5,000 pushes in 2.5 s the
/// queue is counted a few times, and the limit still holds.
#[tokio::test(start_paused = true)]
async fn a_depth_limit_does_not_slow_pushes_down() {
    let (before, limit) = (300_000, 304_000);
    let items = Items::ready(before);
    let (depths, queue) = (items.depths(), queue(limit));
    let mut stored = 0;
    for _ in 0..5_000 {
        let asked = Instant::now();
        if depths.has_room(&queue, 1).await.unwrap() {
            stored += 1;
            items.push(1);
            depths.changed(&queue.name, || totals(|t| t.pushed = 1));
        }
        if stored > 1 && stored < 3_000 {
            assert_eq!(asked.elapsed(), Duration::ZERO, "a push waited for a count");
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    assert!(items.counts() <= 5, "{} counts", items.counts());
    assert!(stored <= limit - before && stored >= limit - before - 1_000, "{stored} stored");
}

/// A full queue accepts items again once an item was settled on another broker.
#[tokio::test(start_paused = true)]
async fn a_full_queue_is_counted_again_before_it_refuses() {
    let items = Items::ready(10);
    let (depths, queue) = (items.depths(), queue(10));
    assert!(!depths.has_room(&queue, 1).await.unwrap());
    *items.depth.lock() = Depth { ready: 9, ..Depth::default() };
    tokio::time::advance(Duration::from_millis(100)).await;
    assert!(depths.has_room(&queue, 1).await.unwrap());
    assert!(!depths.has_room(&queue, 2).await.unwrap());
}

/// The sum of unsettled items is correct, whatever states the items were counted in.
#[test]
fn corrections_keep_the_sum() {
    let depth = Depth { ready: 1, delayed: 2, reserved: 3, blocked: 4, ..Depth::default() };
    // Two delayed items became ready and were handed out, and three leases lapsed. All ten items
    // end.
    let change = Change { reserved: -10, ..Change::default() };
    assert_eq!(change.applied_to(&depth).unsettled(), 0);
    let change = Change { ready: -3, reserved: 3, ..Change::default() };
    let after = change.applied_to(&depth);
    assert_eq!((after.ready, after.delayed, after.reserved), (0, 0, 6));
    let change = Change { reserved: -5, ..Change::default() };
    assert_eq!(change.applied_to(&depth).unsettled(), 5);
    // More changed than was counted, because the count includes a part of the change.
    let change = Change { ready: -20, ..Change::default() };
    assert_eq!(change.applied_to(&depth).unsettled(), 0);
}
