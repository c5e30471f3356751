//! Items that another broker has announced by their ids.

use super::{
    half_open::Proxy,
    own_server::{Server, times, unsure},
    reserve::{announced::claim, scan::Place},
    *,
};
use crate::{
    domain::{ConsumerName, Eligibility, ItemId, ItemState, LeaseToken, OrderingKey, Pushed},
    store::{FirstLease, MAX_NAMED_BYTES, Reserved, StoreError},
};

/// Returns a push whose id is chosen, and the id.
fn chosen(store: &MongoStore, queue: &Arc<Queue>, payload: &str) -> (Push, ItemId) {
    let mut push = push_of(queue, payload, 0);
    push.id = store.choose_id();
    let id = push.id.unwrap();
    (push, id)
}

/// Pushes an item of a priority that no item had before, with a chosen id.
async fn push_urgent(store: &MongoStore, queue: &Arc<Queue>) -> (Pushed, ItemId) {
    let (mut push, id) = chosen(store, queue, "x");
    push.item.priority = Priority::parse("priority", 7).unwrap();
    (store.push(vec![push]).await.unwrap()[0], id)
}

/// Reserves one item from a queue of which the given one has been announced.
async fn reserve_named(
    store: &Broker<MongoStore>,
    queue: &Arc<Queue>,
    id: ItemId,
    want: Demand,
) -> crate::store::Result<Reserved> {
    let since = Timestamp(store.now().0 - 1_000);
    store.reserve_hearing(queue, &[want], Appeared::Item { id, since }).await
}

/// Returns two brokers, and a queue that the second knows to be empty.
async fn two_brokers(scratch: &Scratch) -> ([Arc<Broker<MongoStore>>; 2], Arc<Queue>) {
    let stores = brokers(scratch, &Arc::new(Clock::system()), 2).await;
    let queue = emptied(&stores[0], &stores[1]).await;
    (stores.try_into().unwrap_or_else(|_| panic!("two brokers")), queue)
}

/// Returns a queue into which one broker has pushed something, and which another has emptied.
async fn emptied(here: &Broker<MongoStore>, other: &Broker<MongoStore>) -> Arc<Queue> {
    let queue = make(here, queue_named("q")).await;
    here.push(vec![push_of(&queue, "first", 0)]).await.unwrap();
    let first = take(other, &queue, 2).await;
    assert_eq!(other.commit(vec![held(&queue, &first[0])]).await.unwrap(), [Outcome::Ok]);
    queue
}

#[tokio::test(flavor = "multi_thread")]
async fn an_announced_item_is_claimed_by_its_id() {
    let scratch = Scratch::new();
    let ([here, other], queue) = two_brokers(&scratch).await;
    let (pushed, id) = push_urgent(&here, &queue).await;
    assert_eq!(pushed.id, id);
    let before = other.now();
    let demand =
        Demand { consumer: ConsumerName::parse_optional("c", "me").unwrap(), ..want(1, LEASE) };
    let reserved = reserve_named(&other, &queue, id, demand).await.unwrap();
    assert!(reserved.is_named && !reserved.more);
    let [(0, delivery)] = &reserved.deliveries[..] else { panic!("{reserved:?}") };
    assert_untouched(std::slice::from_ref(delivery));
    assert_eq!((delivery.item.id, &delivery.item.payload[..]), (id, &b"x"[..]));
    assert_eq!(delivery.item.state, ItemState::Reserved);
    assert_eq!(delivery.item.consumer.as_ref().unwrap().as_str(), "me");
    assert_eq!(Some(delivery.previous_eligible_time), pushed.eligible_time);
    assert!(delivery.lease_expire_time >= before + LEASE);
    // Others see it as any other that is reserved.
    let seen = here.get_item(&queue, id).await.unwrap().unwrap();
    assert_eq!((seen.state, seen.deliveries), (ItemState::Reserved, 1));
    assert_eq!(seen.consumer, delivery.item.consumer);
    assert_eq!(seen.eligible_time, Some(delivery.lease_expire_time));
    assert!(take(&here, &queue, 1).await.is_empty());
    assert_eq!(other.commit(vec![held(&queue, delivery)]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(here.get_item(&queue, id).await.unwrap(), None);
}

/// The lease of a claim by id lapses as any other, in a priority that the broker did not know before.
#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_an_announced_item_lapses() {
    let scratch = Scratch::new();
    let ([here, other], queue) = two_brokers(&scratch).await;
    let (_, id) = push_urgent(&here, &queue).await;
    let short = Duration::from_millis(200);
    let reserved = reserve_named(&other, &queue, id, want(1, short)).await.unwrap();
    assert!(reserved.is_named);
    let again = take_all(&other, &queue, 1).await;
    assert_eq!((again[0].item.id, again[0].item.attempt, again[0].item.deliveries), (id, 2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_announced_item_that_is_not_stored_yet_is_left_to_the_reserve() {
    let scratch = Scratch::new();
    let ([here, other], queue) = two_brokers(&scratch).await;
    let (push, id) = chosen(&here, &queue, "x");
    let reserved = reserve_named(&other, &queue, id, want(1, LEASE)).await.unwrap();
    assert!(reserved.deliveries.is_empty() && !reserved.is_named);
    here.push(vec![push]).await.unwrap();
    let reserved = reserve_named(&other, &queue, id, want(1, LEASE)).await.unwrap();
    assert!(reserved.is_named);
    assert_untouched(&[reserved.deliveries.into_iter().next().unwrap().1]);
}

/// Whoever can write to the channel of the signals can announce any id. Nothing is handed out that a reserve would not find.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_of_anything_else_is_left_to_the_reserve() {
    let scratch = Scratch::new();
    let ([here, other], queue) = two_brokers(&scratch).await;
    let elsewhere = make(&here, queue_named("elsewhere")).await;
    let push = async |mut push: Push, change: fn(&mut Push)| {
        change(&mut push);
        here.push(vec![push]).await.unwrap()[0].id
    };
    let delayed = push(push_of(&queue, "x", 0), |push| {
        push.item.eligibility = Eligibility::After(Duration::from_hours(1));
    });
    let delayed = delayed.await;
    let waited = push(push_of(&queue, "x", 0), |push| {
        push.item.eligibility = Eligibility::After(Duration::from_millis(1));
    });
    let waited = waited.await;
    let keyed =
        push(push_of(&queue, "x", 0), |push| push.item.ordering_key = OrderingKey::new("k"));
    let keyed = keyed.await;
    let of_another_queue = push(push_of(&elsewhere, "x", 0), |_| {}).await;
    let lease: fn(&mut Push) = |push| {
        let token = LeaseToken([7; 12]);
        push.first_lease = Some(FirstLease::new(token, LEASE, None));
    };
    let reserved = push(push_of(&queue, "x", 0), lease).await;
    let rolled_back = push(push_of(&queue, "x", 0), |_| {}).await;
    let named = reserve_named(&other, &queue, rolled_back, want(1, LEASE)).await.unwrap();
    assert!(named.is_named, "which shows that the rest could be");
    let to = RollbackTo::Queue {
        eligible_time: other.now(),
        attempt: 1,
        ended: EndedDelivery::Unsent { former_lease: None },
    };
    let back = Rollback { held: held(&queue, &named.deliveries[0].1), to, reason: None };
    assert_eq!(other.rollback(vec![back]).await.unwrap(), [Outcome::Ok]);
    let several = here.push((0..3).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
    let (segment, number) = several[1].id.block();
    assert!(number > 0, "they share a document");
    let items = here.list_items(&queue, None, None, 100).await.unwrap().entries;
    let (inner, cursor) = (&other.inner, &other.inner.cursor(&queue.name));
    let group = &inner.group(&queue.group).await.unwrap();
    let place = Place { inner, group, cursor, queue: &queue };
    for (what, id) in [
        ("delayed", delayed),
        ("delayed until now", waited),
        ("keyed", keyed),
        ("of another queue", of_another_queue),
        ("reserved", reserved),
        ("rolled back", rolled_back),
        ("a segment", segment),
        ("in a segment", several[1].id),
        ("nothing", here.choose_id().unwrap()),
    ] {
        let claimed = claim(&place, &[want(1, LEASE)], id).await;
        assert!(claimed.unwrap().is_none(), "{what}");
    }
    let after = here.list_items(&queue, None, None, 100).await.unwrap().entries;
    assert_eq!(after, items, "nothing has changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_announced_item_that_may_not_be_handed_out_stays_as_it_is() {
    let scratch = Scratch::new();
    let ([here, other], queue) = two_brokers(&scratch).await;
    let (push, id) = chosen(&here, &queue, &"x".repeat(MAX_NAMED_BYTES + 1));
    here.push(vec![push]).await.unwrap();
    let reserved = reserve_named(&other, &queue, id, want(1, LEASE)).await.unwrap();
    assert!(!reserved.is_named, "nobody announces such an item");
    let [(_, delivery)] = &reserved.deliveries[..] else { panic!("{reserved:?}") };
    assert_untouched(std::slice::from_ref(delivery));

    // Where there may be too little room, nothing is claimed that would have to be put back.
    let (push, id) = chosen(&here, &queue, "small");
    here.push(vec![push]).await.unwrap();
    let room = Demand { max_bytes: 3, may_exceed: false, ..want(1, LEASE) };
    let reserved = reserve_named(&other, &queue, id, room).await.unwrap();
    assert!(reserved.deliveries.is_empty());
    let seen = here.get_item(&queue, id).await.unwrap().unwrap();
    assert_eq!((seen.state, seen.deliveries), (ItemState::Ready, 0));
    assert_untouched(&take_all(&other, &queue, 1).await);

    let (mut push, id) = chosen(&here, &queue, "over");
    push.item.ttl = Some(Duration::from_millis(1));
    here.push(vec![push]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let reserved = reserve_named(&other, &queue, id, want(1, LEASE)).await.unwrap();
    assert_eq!((reserved.deliveries.len(), reserved.expired), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_by_id_whose_answer_is_lost_is_undone_with_no_attempt_counted() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = emptied(&store, &store).await;
    let (push, id) = chosen(&store, &queue, "x");
    let pushed = store.push(vec![push]).await.unwrap()[0];
    server.fail("findAndModify", times(1), unsure()).await;
    let refused = reserve_named(&store, &queue, id, want(1, LEASE)).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    let taken = take_all(&store, &queue, 1).await;
    assert_untouched(&taken);
    assert_eq!(taken[0].item.id, id);
    assert_eq!(Some(taken[0].previous_eligible_time), pushed.eligible_time, "its place");
}

/// The claim comes before the item, its caller gives up, it is undone, and then both arrive: first the item.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_by_id_that_arrives_after_it_was_undone_takes_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let (near, far) = (Proxy::start(server.address()).await, Proxy::start(server.address()).await);
    let (here, other) = (near.open(&clock, "test").await, far.open(&clock, "test").await);
    let queue = emptied(&here, &other).await;
    let (push, id) = chosen(&here, &queue, "x");
    let mut insert = near.hold_on_items("insert");
    let pushing = tokio::spawn(async move { here.push(vec![push]).await });
    insert.caught().await;
    let mut claim = far.hold_on_items("findAndModify");
    let refused = reserve_named(&other, &queue, id, want(1, LEASE)).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    claim.caught().await;
    // The queue is reserved from again when it is undone.
    until("the claim is undone", async || other.reserve(&queue, &[want(1, LEASE)]).await.is_ok())
        .await;
    drop(insert);
    assert_eq!(pushing.await.unwrap().unwrap()[0].id, id);
    let before = server.executed("findAndModify").await;
    drop(claim);
    until("the claim arrives", async || server.executed("findAndModify").await > before).await;
    let item = other.get_item(&queue, id).await.unwrap().unwrap();
    assert_eq!((item.state, item.deliveries), (ItemState::Ready, 0));
    assert_untouched(&take_all(&other, &queue, 1).await);
}

/// The same where the claim is in time for the item, which comes after the claim was undone: it is undone once more.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_by_id_that_takes_its_item_after_it_was_undone_is_undone_again() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    clock.advance(Duration::from_mins(1)); // by the server's clock, the claim is in time for a minute
    let (near, far) = (Proxy::start(server.address()).await, Proxy::start(server.address()).await);
    let (here, other) = (near.open(&clock, "test").await, far.open(&clock, "test").await);
    let queue = emptied(&here, &other).await;
    let (push, id) = chosen(&here, &queue, "x");
    let mut insert = near.hold_on_items("insert");
    let pushing = tokio::spawn(async move { here.push(vec![push]).await });
    insert.caught().await;
    let mut claim = far.hold_on_items("findAndModify");
    let undone = async || server.executed("count").await;
    let before = undone().await;
    tokio::select! {
        reserved = reserve_named(&other, &queue, id, want(1, LEASE)) => panic!("{reserved:?}"),
        () = claim.caught() => {} // and its caller goes away
    }
    until("the claim is undone", async || undone().await > before).await;
    drop(insert);
    assert_eq!(pushing.await.unwrap().unwrap()[0].id, id);
    let before = server.executed("findAndModify").await;
    drop(claim);
    until("the claim arrives", async || server.executed("findAndModify").await > before).await;
    assert_untouched(&take_all(&other, &queue, 1).await);
}

/// A set whose members confirm slowly is slow, and not an outage.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_by_id_waits_for_a_slow_confirmation() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open(&clock, "a").await;
    let queue = emptied(&store, &store).await;
    let (push, id) = chosen(&store, &queue, "x");
    store.push(vec![push]).await.unwrap();
    let hang = async |mode: &str| {
        let point = "hangBeforeWaitingForWriteConcern";
        server.admin(doc! { "configureFailPoint": point, "mode": mode }).await.unwrap();
    };
    hang("alwaysOn").await;
    let confirmed = async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        hang("off").await;
    };
    let (reserved, ()) = tokio::join!(reserve_named(&store, &queue, id, want(1, LEASE)), confirmed);
    assert!(reserved.unwrap().is_named);
}
