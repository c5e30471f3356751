//! Deletions beside pushes of other brokers, and beside links to the queue that is deleted.

use super::{own_server::Server, *};
use crate::domain::{Delivery, OrderingKey};

/// Longer than the late items of a test need to reach their queue.
const LIMIT: Duration = Duration::from_mins(1);

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

/// Pushes that wait for their write while their queue is deleted and created in another group may be thousands. Their
/// consumers are woken.
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
        push.item.ordering_key = OrderingKey::new(if n.is_multiple_of(100) { "k" } else { "" });
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
    let told = async {
        tokio::select! { told = stores[0].unblocked() => told, told = stores[1].unblocked() => told }
    };
    let told = tokio::time::timeout(LIMIT, told).await.expect("a hint");
    assert_eq!(told, std::slice::from_ref(&new.name));
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

/// While the items of a queue are deleted, no other queue can make it its dead-letter queue: otherwise the deletion
/// would be refused after it has destroyed everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_with_force_that_is_refused_deletes_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (ours, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let dead = make(&ours, queue_named("dead")).await;
    ours.push((0..10).map(|_| push_of(&dead, "x", 0)).collect()).await.unwrap();
    let links = ours.links().await.unwrap();

    let blocked = doc! { "blockConnection": true, "blockTimeMS": 1_500 };
    server.fail("delete", doc! { "times": 1 }, blocked).await;
    let deleting = async { ours.delete_queue(&dead, true, links).await.unwrap() };
    let linking = async {
        server.until_failing().await;
        let source = Queue { dead_letter_queue: Some(dead.name.clone()), ..queue_named("a") };
        other.link_queue(&source, other.links().await.unwrap()).await.unwrap()
    };
    let (deleted, linked) = tokio::join!(deleting, linking);
    let items = server.items();
    let left = items.count_documents(doc! { "q": "dead", "payload": { "$exists": true } });
    let left = left.await.unwrap();
    let queue = ours.get_queue(&dead.name).await.unwrap();
    match deleted {
        Deleted::Done(count) => assert_eq!((count, left, queue, linked), (10, 0, None, None)),
        refused => assert_eq!((left, queue.is_some()), (10, true), "{refused:?}"),
    }
}

/// A broker that ends during the deletion of a queue leaves a queue that works, and that can be deleted again.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_was_cut_off_does_not_refuse_links_for_ever() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let dead = make(&store, queue_named("dead")).await;
    let links = store.links().await.unwrap();
    assert!(catalog::deletion::mark(&store.store().inner, &dead, links).await.unwrap());
    let source = Queue { dead_letter_queue: Some(dead.name.clone()), ..queue_named("a") };
    let link = async || store.link_queue(&source, store.links().await.unwrap()).await.unwrap();
    assert_eq!(link().await, None);
    clock.advance(Duration::from_hours(1));
    assert!(link().await.is_some());
    let mark = store.database().collection::<Document>("queues");
    let mark = mark.find_one(doc! { "_id": "dead", "deleting": { "$exists": true } });
    assert_eq!(mark.await.unwrap(), None, "the deletion cannot go on beside the link");
}
