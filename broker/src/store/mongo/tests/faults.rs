//! Answers that are lost, late or cut.

use super::{
    own_server::{Server, held_up, times, unsure},
    *,
};
use crate::domain::{DedupId, Limit, OrderingKey};

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_answer_is_lost_is_undone_with_no_attempt_counted() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push((0..30).map(|n| push_of(&queue, &n.to_string(), 0)).collect()).await.unwrap();

    // Each update is applied, and each is repeated, because the broker cannot know that it was undone.
    server.fail("update", "alwaysOn", unsure()).await;
    for _ in 0..2 {
        let refused = store.reserve(&queue, &[want(10, LEASE)]).await;
        assert!(matches!(refused, Err(crate::store::StoreError::Unavailable { .. })));
    }
    let items = server.items();
    let touched = items.count_documents(doc! { "settled": { "$exists": true } }).await;
    assert_eq!(touched.unwrap(), 10, "nothing more is claimed while the outcome is unknown");

    server.heal().await;
    let taken = take_all(&store, &queue, 30).await;
    assert_untouched(&taken);
    let payloads: Vec<String> =
        taken.iter().map(|d| String::from_utf8(d.item.payload.to_vec()).unwrap()).collect();
    assert_eq!(payloads, (0..30).map(|n| n.to_string()).collect::<Vec<_>>(), "in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_caller_has_gone_is_undone() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push((0..10).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();

    server.fail("update", times(1), held_up(Duration::from_millis(300))).await;
    let demands = [want(10, LEASE)];
    let given_up =
        tokio::time::timeout(Duration::from_millis(100), store.reserve(&queue, &demands));
    assert!(given_up.await.is_err());
    assert_untouched(&take_all(&store, &queue, 10).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn claimed_items_are_handed_out_though_expired_ones_could_not_be_removed() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    let mut expiring = push_of(&queue, "over", 0);
    expiring.item.ttl = Some(Duration::from_secs(1));
    store.push(vec![expiring, push_of(&queue, "good", 0)]).await.unwrap();
    clock.advance(Duration::from_secs(2));

    server.fail("delete", "alwaysOn", doc! { "errorCode": 50 }).await;
    let reserved = store.reserve(&queue, &[want(10, LEASE)]).await.unwrap();
    assert_eq!(reserved.deliveries.len(), 1);
    assert_eq!(reserved.deliveries[0].1.item.payload, "good");
    server.heal().await;
    let reserved = store.reserve(&queue, &[want(10, LEASE)]).await.unwrap();
    assert_eq!((reserved.deliveries.len(), reserved.expired), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_does_not_take_an_item_that_was_moved_since_it_was_read() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (ours, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let queue = make(&ours, queue_named("q")).await;
    ours.push(vec![push_of(&queue, "old", 0)]).await.unwrap();
    let taken = take(&other, &queue, 1).await;
    clock.advance(LEASE);
    // Returns the item to the ready ones, so that the next update is the claim.
    ours.list_items(&queue, None, None, 1).await.unwrap();

    let mut held_up = held_up(Duration::from_secs(1));
    held_up.insert("appName", "sluicegate a");
    server.fail("update", times(1), held_up).await;
    let claiming = async { ours.reserve(&queue, &[want(1, LEASE)]).await.unwrap() };
    let moving = async {
        server.until_failing().await;
        let moved = Move {
            held: held(&queue, &taken[0]),
            to: queue.clone(),
            payload: Some("new".into()),
            content_type: None,
            headers: [].into(),
            priority: None,
            eligible_time: other.now(),
        };
        assert_eq!(other.move_items(vec![moved]).await.unwrap(), [Outcome::Ok]);
    };
    let (claimed, ()) = tokio::join!(claiming, moving);
    assert!(claimed.deliveries.is_empty(), "{:?}", claimed.deliveries);
    assert_eq!(take_all(&ours, &queue, 1).await[0].item.payload, "new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_stalls_past_its_lease_does_not_get_the_outcome_of_the_next_lease() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    let first = take(&store, &queue, 1).await;

    server.fail("delete", times(1), held_up(Duration::from_secs(1))).await;
    let stalled = store.commit(vec![held(&queue, &first[0])]);
    let meanwhile = async {
        server.until_failing().await;
        clock.advance(LEASE);
        let second = take_all(&store, &queue, 1).await;
        store.commit(vec![held(&queue, &second[0])]).await.unwrap()
    };
    let (first, second) = tokio::join!(stalled, meanwhile);
    assert_eq!((first.unwrap(), second), (vec![Outcome::Gone], vec![Outcome::Ok]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settle_that_took_effect_is_ok_whatever_happened_to_the_item_since() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (ours, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let queue = make(&ours, queue_named("q")).await;
    let to = make(&ours, queue_named("to")).await;
    ours.push((0..4).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let taken = take(&ours, &queue, 4).await;
    let back = |delivery: &Delivery| Rollback {
        held: held(&queue, delivery),
        to: RollbackTo::Queue {
            eligible_time: delivery.previous_eligible_time,
            attempt: 2,
            ended: EndedDelivery::Counted,
        },
        reason: None,
    };
    let move_of = |delivery: &Delivery| Move {
        held: held(&queue, delivery),
        to: to.clone(),
        payload: None,
        content_type: None,
        headers: [].into(),
        priority: None,
        eligible_time: delivery.previous_eligible_time,
    };

    // Each attempt waits, is applied, and gets the answer that its durability is unknown, so that there is another
    // attempt. The waits are as long as they can be, because there are three attempts, and the items have to be settled
    // elsewhere before the last one.
    let mut lost = held_up(Duration::from_millis(2_500));
    lost.extend(unsure());
    lost.insert("appName", "sluicegate a");
    server.fail("update", "alwaysOn", lost).await;
    let rolling_back = ours.rollback(vec![back(&taken[0]), back(&taken[1])]);
    let moving = ours.move_items(vec![move_of(&taken[2]), move_of(&taken[3])]);
    let settled = async |queue: &Arc<Queue>| {
        let again = take_all(&other, queue, 2).await;
        let mut failed = back(&again[0]);
        failed.held.queue = queue.clone();
        assert_eq!(other.rollback(vec![failed]).await.unwrap(), [Outcome::Ok]);
        assert_eq!(other.commit(vec![held(queue, &again[1])]).await.unwrap(), [Outcome::Ok]);
    };
    let meanwhile = async {
        tokio::join!(settled(&queue), settled(&to));
        server.heal().await;
    };
    let (rolled_back, moved, ()) = tokio::join!(rolling_back, moving, meanwhile);
    assert_eq!(rolled_back.unwrap(), [Outcome::Ok; 2]);
    assert_eq!(moved.unwrap(), [Outcome::Ok; 2]);
}

/// The same holds for a commit into history from which the item is replayed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_took_effect_is_ok_although_the_item_was_replayed_since() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (ours, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let retention = Duration::from_mins(10);
    let queue = make(&ours, Queue { retention, ..queue_named("q") }).await;
    ours.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    let taken = take(&ours, &queue, 1).await;
    // Between two attempts there is time to replay the item.
    let mut lost = held_up(Duration::from_millis(2_500));
    lost.extend(unsure());
    lost.insert("appName", "sluicegate a");
    server.fail("update", "alwaysOn", lost).await;
    let committing = ours.commit(vec![held(&queue, &taken[0])]);
    let replaying = async {
        let ids = store::Selection::Ids(vec![taken[0].item.id]);
        until("the item is replayed", async || other.replay(&queue, &ids, 1).await.unwrap() == 1)
            .await;
        server.heal().await;
    };
    let (committed, ()) = tokio::join!(committing, replaying);
    assert_eq!(committed.unwrap(), [Outcome::Ok]);
}

/// What is counted is what a call has done, also if its first attempt took effect and the answer was lost.
#[tokio::test(flavor = "multi_thread")]
async fn counts_are_exact_although_the_answer_was_lost() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let dead = make(&store, queue_named("dead")).await;
    let retention = Duration::from_mins(10);
    let queue = Queue { max_attempts: Some(Limit::of(1)), retention, ..queue_named("q") };
    let mut queue = Queue::clone(&*make(&store, queue).await);
    queue.at_limit = crate::domain::AtLimit::DeadLetter(dead.name.clone());
    let queue = Arc::new(queue);
    let pushes = |count| (0..count).map(|_| push_of(&queue, "x", 0)).collect::<Vec<_>>();

    // Leases that lapse at a limit.
    store.push(pushes(20)).await.unwrap();
    assert_eq!(take(&store, &queue, 20).await.len(), 20);
    clock.advance(LEASE);
    store.list_items(&queue, None, None, 1).await.unwrap();
    assert!(store.reserve(&queue, &[]).await.unwrap().deliveries.is_empty());
    server.fail("update", times(1), unsure()).await;
    let mut at_limit = 0;
    while at_limit < 20 {
        let reserved = store.reserve(&queue, &[want(1, LEASE)]).await.unwrap();
        assert!(reserved.at_limit.total() > 0, "only {at_limit} of 20 are counted");
        at_limit += reserved.at_limit.total();
    }
    assert_eq!(at_limit, 20);

    // A redrive.
    server.fail("update", times(1), unsure()).await;
    let all = store::RedriveFilter::default();
    assert_eq!(store.redrive(&dead, &queue, &all, None, 99).await.unwrap().items, 20);

    // A replay.
    let taken = take(&store, &queue, 20).await;
    store.commit(taken.iter().map(|delivery| held(&queue, delivery)).collect()).await.unwrap();
    server.fail("update", times(1), unsure()).await;
    let ids = store::Selection::Ids(taken.iter().map(|delivery| delivery.item.id).collect());
    assert_eq!(store.replay(&queue, &ids, 99).await.unwrap(), 20);
    take_all(&store, &queue, 20).await;

    // Items that expire, of which some leave tombstones.
    let mortal = |count| {
        let mut pushes = pushes(count);
        for push in &mut pushes {
            push.item.ttl = Some(Duration::from_secs(1));
        }
        pushes
    };
    let mut some_remembered = mortal(20);
    for (n, push) in some_remembered.iter_mut().enumerate().skip(10) {
        push.item.dedup_id = DedupId::new(n.to_string());
        push.dedup_window = Some(Duration::from_mins(5));
    }
    store.push(some_remembered).await.unwrap();
    clock.advance(Duration::from_secs(2));
    for (command, count) in [("update", 20), ("delete", 10)] {
        server.fail(command, times(1), unsure()).await;
        let mut expired = 0;
        while expired < count {
            let reserved = store.reserve(&queue, &[want(1, LEASE)]).await.unwrap();
            assert!(reserved.expired > 0, "{command}: only {expired} of {count} are counted");
            expired += reserved.expired;
        }
        assert_eq!(expired, count, "{command}");
        store.push(mortal(10)).await.unwrap();
        clock.advance(Duration::from_secs(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scan_during_an_ordered_push_does_not_skip_its_items() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, Queue { sequenced: true, ..queue_named("q") }).await;
    store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    take_all(&store, &queue, 1).await;
    server.fail("commitTransaction", times(1), held_up(Duration::from_millis(600))).await;
    let pushing = store.push(vec![push_of(&queue, "y", 0)]);
    tokio::pin!(pushing);
    loop {
        tokio::select! {
            pushed = &mut pushing => { pushed.unwrap(); break }
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                // The item can be visible a moment before its push is answered.
                if !take(&store, &queue, 1).await.is_empty() {
                    pushing.await.unwrap();
                    return;
                }
            }
        }
    }
    assert_eq!(take(&store, &queue, 1).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_that_no_document_can_hold_fails_alone() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let store = scratch.open(&clock).await;
    let plain = make(&store, queue_named("plain")).await;
    let ordered = make(&store, Queue { sequenced: true, ..queue_named("ordered") }).await;
    let calls = (0..60).map(|n| {
        let mut push = push_of(if n % 2 == 0 { &plain } else { &ordered }, "x", 0);
        match n % 20 {
            10 | 11 => _ = push.item.headers.insert("a\0b".into(), "c".into()),
            12 | 13 => push.item.payload = vec![0; 16 << 20].into(),
            _ => {}
        }
        store.push(vec![push])
    });
    let answers = futures_util::future::join_all(calls).await;
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(answer.is_ok(), !(10..14).contains(&(n % 20)), "{n}: {answer:?}");
    }
}

/// A write that is not answered is sent twice, and not forever: each could still take effect at any time.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_is_not_answered_ends() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "slow").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    let stalls =
        doc! { "blockConnection": true, "blockTimeMS": 20_000, "appName": "sluicegate slow" };
    server.fail("update", "alwaysOn", stalls).await;
    let update = mongodb::bson::rawdoc! {
        "update": "items.default",
        "updates": [{ "q": { "q": "q" }, "u": { "$set": { "touched": true } } }],
    };
    let limits = [Duration::from_millis(100); 2];
    let written =
        server::connect::write_in_time(&store.inner.db, update, limits, server::error::written);
    let written = tokio::time::timeout(Duration::from_secs(15), written).await.expect("an end");
    assert!(matches!(written, Err(crate::store::StoreError::Unavailable { .. })));
    server.heal().await;
}

/// A claim of a lapsed item that reached nobody leaves the receipt of the item's last holder as good as it was.
#[tokio::test(flavor = "multi_thread")]
async fn an_undone_claim_gives_a_lapsed_item_back_its_receipt() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 0), push_of(&queue, "y", 0)]).await.unwrap();
    let taken = take(&store, &queue, 2).await;
    clock.advance(LEASE);
    // Returns the items to the ready ones, so that the next update is the claim.
    store.list_items(&queue, None, None, 1).await.unwrap();
    assert!(store.reserve(&queue, &[]).await.unwrap().deliveries.is_empty());

    server.fail("update", "alwaysOn", unsure()).await;
    let refused = store.reserve(&queue, &[want(2, LEASE)]).await;
    assert!(matches!(refused, Err(crate::store::StoreError::Unavailable { .. })));
    server.heal().await;
    let cursor = store.store().inner.cursor(&queue.name);
    until("the claim is undone", async || cursor.claims.resolved().await.is_ok()).await;
    assert_eq!(store.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::Ok]);
    // The lapse counts as one failed attempt, as without the claim.
    let again = take_all(&store, &queue, 1).await;
    assert_eq!((again[0].item.attempt, again[0].item.deliveries), (2, 2));
    assert_eq!(store.commit(vec![held(&queue, &taken[1])]).await.unwrap(), [Outcome::LeaseLost]);
}

/// Pushes that share a write with a repeated one do not fail because the first item of that one cannot be looked up.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_push_that_cannot_be_looked_up_fails_alone() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    let repeated = || {
        let mut push = push_of(&queue, "repeated", 0);
        push.item.dedup_id = DedupId::new("d");
        push.dedup_window = Some(Duration::from_mins(1));
        vec![push]
    };
    store.push(repeated()).await.unwrap();
    server.fail("find", "alwaysOn", doc! { "errorCode": 50 }).await;
    // The second and the third wait for the write of the first, and are written together.
    let (first, second, third) = tokio::join!(
        store.push(vec![push_of(&queue, "first", 0)]),
        store.push(repeated()),
        store.push(vec![push_of(&queue, "third", 0)]),
    );
    assert!(first.is_ok(), "{first:?}");
    assert!(matches!(second, Err(crate::store::StoreError::Unavailable { .. })), "{second:?}");
    assert!(third.is_ok(), "{third:?}");
    server.heal().await;
    assert!(store.push(repeated()).await.unwrap()[0].deduplicated);
    assert_eq!(take_all(&store, &queue, 3).await.len(), 3);
}

/// An ordered push that was stored, and a commit that took effect, are answered so, though the next item of their key
/// cannot be unblocked.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_push_is_answered_though_its_key_cannot_be_unblocked() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = make(&store, queue_named("q")).await;
    let keyed = || {
        let mut push = push_of(&queue, "x", 0);
        push.item.ordering_key = OrderingKey::new("k");
        vec![push]
    };
    store.push(keyed()).await.unwrap();
    server.fail("update", "alwaysOn", doc! { "errorCode": 50 }).await;
    let second = store.push(keyed()).await;
    assert!(second.is_ok(), "{second:?}");
    server.heal().await;
    let taken = take_all(&store, &queue, 1).await;
    server.fail("update", "alwaysOn", doc! { "errorCode": 50 }).await;
    assert_eq!(store.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::Ok]);
    server.heal().await;
    upkeep::round(&store.store().inner).await;
    let taken = take_all(&store, &queue, 1).await;
    assert_eq!(store.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::Ok]);
}

/// What is undone when the store is closed is undone to its end.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_closed_undoes_claims_that_reached_nobody() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (store, other) = (server.open(&clock, "a").await, server.open(&clock, "b").await);
    let queue = make(&store, queue_named("q")).await;
    store.push((0..5).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    server.fail("update", times(1), held_up(Duration::from_millis(500))).await;
    let demands = [want(5, LEASE)];
    let given_up =
        tokio::time::timeout(Duration::from_millis(100), store.reserve(&queue, &demands));
    assert!(given_up.await.is_err());
    // The claim takes effect. The first attempt to undo it fails.
    let refused = doc! { "errorCode": 91, "appName": "sluicegate a" };
    server.fail("update", times(3), refused).await;
    store.close().await;
    assert_untouched(&take_all(&other, &queue, 5).await);
}
