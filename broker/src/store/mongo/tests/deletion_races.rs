//! Deletions beside pushes of other brokers, and beside links to the queue that is deleted.

use super::*;
use crate::domain::Delivery;

/// Longer than the late items of a test need to reach their queue.
const LIMIT: Duration = Duration::from_secs(60);

fn in_group(group: &str) -> Queue {
    Queue { group: GroupName::parse("group", group).unwrap(), ..queue_named("q") }
}

async fn delete(store: &MongoStore, queue: &Queue) {
    let links = store.links().await.unwrap();
    let deleted = store.delete_queue(queue, true, links).await.unwrap();
    assert!(matches!(deleted, Deleted::Done(_)), "{deleted:?}");
}

/// Takes and commits items of the queue until there were so many.
async fn drain(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
    let end = std::time::Instant::now() + LIMIT;
    let mut taken = Vec::new();
    while taken.len() < count {
        assert!(std::time::Instant::now() < end, "{} of {count} are found", taken.len());
        let demands = [want(500, LEASE)];
        let reserve = store.reserve_hearing(queue, &demands, Appeared::FromStart);
        let deliveries: Vec<Delivery> =
            reserve.await.unwrap().deliveries.into_iter().map(|(_, delivery)| delivery).collect();
        if deliveries.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        }
        let settled = deliveries.iter().map(|delivery| held(queue, delivery)).collect();
        store.commit(settled).await.unwrap();
        taken.extend(deliveries);
    }
    taken
}

/// Pushes that wait for their write while their queue is deleted and created in another group may be thousands.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_late_items_follow_their_queue_into_another_group() {
    const LATE: usize = 2_000;
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let old = make(&stores[0], in_group("old")).await;
    delete(&stores[0], &old).await;
    let new = make(&stores[0], in_group("new")).await;
    let push = |n: usize| {
        let mut push = push_of(&old, &n.to_string(), 0);
        push.item.ordering_key = if n % 100 == 0 { "k".to_owned() } else { String::new() };
        push
    };
    for first in (0..LATE).step_by(500) {
        stores[1].push((first..first + 500).map(push).collect()).await.unwrap();
    }
    let taken = drain(&stores[0], &new, LATE).await;
    let keyed: Vec<usize> = taken
        .iter()
        .filter(|delivery| delivery.receipt.keyed)
        .map(|delivery| String::from_utf8(delivery.item.payload.to_vec()).unwrap())
        .map(|payload| payload.parse().unwrap())
        .collect();
    assert_eq!(keyed, (0..LATE).step_by(100).collect::<Vec<_>>(), "in the order of their key");
}

/// An item that another consumer still holds does not keep the items behind it from their queue, and follows them when
/// its lease has ended.
#[tokio::test(flavor = "multi_thread")]
async fn late_items_that_are_reserved_follow_later() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let old = make(&stores[0], in_group("old")).await;
    delete(&stores[0], &old).await;
    let new = make(&stores[0], in_group("new")).await;
    let late = || (0..50).map(|_| push_of(&old, "x", 0)).collect::<Vec<Push>>();
    let (mut pushed, mut reserved) = (0, 0);
    // Reserved through a broker that remembers the old settings, unless it was moved before.
    while reserved < 150 {
        pushed += stores[1].push(late()).await.unwrap().len();
        reserved += take(&stores[1], &old, 50).await.len();
    }
    pushed += stores[1].push(late()).await.unwrap().len();
    let free = drain(&stores[0], &new, pushed - reserved).await;
    assert!(free.iter().all(|delivery| delivery.item.attempt == 1));
    clock.advance(LEASE);
    assert_eq!(drain(&stores[0], &new, reserved).await.len(), reserved);
}

/// A queue that is deleted in one group, created in a second and deleted there as well: what comes late for the first
/// is not forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn an_item_of_the_deletion_before_the_last_one_is_not_lost() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let first = make(&stores[0], in_group("first")).await;
    delete(&stores[0], &first).await;
    let second = make(&stores[0], in_group("second")).await;
    delete(&stores[0], &second).await;
    let late = stores[1].push(vec![push_of(&first, "late", 5)]).await.unwrap()[0].id;
    let end = std::time::Instant::now() + LIMIT;
    let again = loop {
        if let Some(again) = stores[0].get_queue(&first.name).await.unwrap() {
            break Arc::new(again);
        }
        assert!(std::time::Instant::now() < end, "the item's queue does not exist again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(again.group, second.group, "with its latest settings");
    assert_eq!(drain(&stores[0], &again, 1).await[0].item.id, late);
}
