//! Items that are stored as reserved: they are as after a reserve, and nobody ever sees them ready.

use std::{sync::Arc, time::Duration};

use super::{Env, env::*};
use crate::{
    domain::{
        ConsumerName, Delivery, ItemState, LeaseToken, NewItem, Outcome, Priority, Pushed, Queue,
        Receipt, Timestamp,
    },
    store::{EndedDelivery, FirstLease, Push, Rollback, RollbackTo},
};

/// Returns the push of an item under a lease of a new token.
fn leased(env: &Env, queue: &Arc<Queue>, item: NewItem, lasts: Duration) -> (Push, LeaseToken) {
    let token = LeaseToken::fresh(env.store.broker_id());
    let consumer = ConsumerName::parse("consumer", "tester").unwrap();
    let first_lease = Some(FirstLease::new(token, lasts, Some(consumer)));
    (Push { first_lease, ..push_of(queue, item) }, token)
}

/// Returns the delivery of an item that was stored as reserved.
async fn delivery_of(env: &Env, queue: &Arc<Queue>, pushed: Pushed, token: LeaseToken) -> Delivery {
    let item = env.get(queue, pushed.id).await;
    let receipt = Receipt {
        item: pushed.id,
        token,
        deliveries: item.deliveries,
        earlier_deliveries: 0,
        attempt: item.attempt,
        keyed: false,
        queue: queue.name.clone(),
        group: queue.group.clone(),
    };
    let created = item.create_time;
    Delivery {
        lease_expire_time: item.eligible_time.unwrap_or_default(),
        previous_eligible_time: created,
        former_lease: None,
        tag: 0,
        item: Box::new(item),
        receipt,
    }
}

/// Stores an item as reserved.
pub(super) async fn push_leased(
    env: &Env,
    queue: &Arc<Queue>,
    item: NewItem,
    lasts: Duration,
) -> Delivery {
    let (push, token) = leased(env, queue, item, lasts);
    let pushed = env.store.push(vec![push]).await.unwrap()[0];
    assert!(!pushed.deduplicated);
    delivery_of(env, queue, pushed, token).await
}

fn undelivered(queue: &Arc<Queue>, of: &Delivery) -> Rollback {
    let to = RollbackTo::Queue {
        eligible_time: of.previous_eligible_time,
        attempt: of.receipt.attempt,
        ended: EndedDelivery::Unsent { former_lease: None },
    };
    Rollback { held: held(queue, of), to, reason: None }
}

pub async fn an_item_stored_as_reserved_is_as_after_a_reserve(env: &Env) {
    let queue = env.queue("q").await;
    let before = env.now();
    let given = mortal("x", seconds(3_600));
    let (push, token) =
        leased(env, &queue, NewItem { priority: urgent("", 7).priority, ..given }, LEASE);
    let pushed = env.store.push(vec![push]).await.unwrap()[0];
    let created = pushed.eligible_time.expect("it was eligible when it was stored");
    assert!(created >= before && created <= env.now());
    let delivery = delivery_of(env, &queue, pushed, token).await;
    let item = &delivery.item;
    assert_eq!((item.state, item.attempt, item.deliveries), (ItemState::Reserved, 1, 1));
    assert_eq!((payload(item).as_str(), item.priority), ("x", Priority::parse("p", 7).unwrap()));
    assert_eq!((item.create_time, item.due_time), (created, Some(created)));
    assert_eq!(item.eligible_time, Some(created + LEASE));
    assert_eq!(item.expire_time, Some(created + seconds(3_600)));
    assert_eq!(item.consumer.as_ref().map(ConsumerName::as_str), Some("tester"));
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (0, 1));
    for broker in [&env.store, &env.other] {
        assert!(broker.reserve(&queue, &[demand(1)]).await.unwrap().deliveries.is_empty());
        assert_eq!(broker.holds(vec![held(&queue, &delivery)]).await.unwrap(), [true]);
    }
    assert_eq!(env.next_eligible(&queue).await, Some(created + LEASE));
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Gone);
    assert_eq!(env.list(&queue, None).await, []);
}

pub async fn an_item_stored_as_reserved_settles_in_every_way(env: &Env) {
    let queue = env.queue("q").await;
    let other = env.queue("other").await;
    let to_commit = push_leased(env, &queue, item("commit"), LEASE).await;
    let to_fail = push_leased(env, &queue, item("fail"), LEASE).await;
    let to_move = push_leased(env, &queue, item("move"), LEASE).await;
    let to_keep = push_leased(env, &queue, item("keep"), LEASE).await;
    let elsewhere = env.other.commit(vec![held(&queue, &to_commit)]).await.unwrap();
    assert_eq!(elsewhere, [Outcome::Ok]);
    assert_eq!(env.fail(&queue, &to_fail).await, Outcome::Ok);
    assert_eq!(env.move_one(&queue, &to_move, &other).await, Outcome::Ok);
    assert_eq!(env.drain(&other).await, ["move"]);
    let failed = env.take_one(&queue).await;
    assert_eq!((payload(&failed.item).as_str(), failed.item.attempt), ("fail", 2));
    let until = env.now() + LEASE * 3;
    assert_eq!(env.extend(vec![held(&queue, &to_keep)], until).await, [Outcome::Ok]);
    env.pass(LEASE * 2);
    assert_eq!(env.drain(&queue).await, ["fail"], "the other lease was extended");
    assert_eq!(env.commit_one(&queue, &to_keep).await, Outcome::Ok);
}

pub async fn a_first_lease_lapses_like_any_other(env: &Env) {
    let queue = env.queue("q").await;
    push_leased(env, &queue, item("x"), LEASE).await;
    env.pass(LEASE);
    let again = env.take_one(&queue).await;
    assert_eq!((again.item.attempt, again.item.deliveries), (2, 2));
}

/// The lease lapses on a broker that has seen nothing else of the priority.
pub async fn a_first_lease_lapses_on_another_broker_too(env: &Env) {
    let queue = env.queue("q").await;
    assert!(env.other.reserve(&queue, &[demand(1)]).await.unwrap().deliveries.is_empty());
    push_leased(env, &queue, urgent("x", 5), LEASE).await;
    env.pass(LEASE);
    let taken = env.other.take(&queue, 1, crate::store::Appeared::FromStart).await;
    assert_eq!(taken[0].item.attempt, 2);
}

pub async fn an_item_stored_as_reserved_returns_to_its_place(env: &Env) {
    let queue = env.queue("q").await;
    let first = push_leased(env, &queue, item("1"), LEASE).await;
    env.pass(seconds(1));
    env.push_plain(&queue, &["2", "3"]).await;
    let outcomes = env.store.rollback(vec![undelivered(&queue, &first)]).await.unwrap();
    assert_eq!(outcomes, [Outcome::Ok]);
    let taken = env.take(&queue, 5).await;
    assert_eq!(payloads(&taken), ["1", "2", "3"]);
    assert_eq!((taken[0].item.attempt, taken[0].receipt.deliveries_here()), (1, 1));
}

pub async fn reserved_and_ready_items_share_a_call(env: &Env) {
    let queue = env.queue("q").await;
    let (push, token) = leased(env, &queue, item("2"), LEASE);
    let pushes = vec![push_of(&queue, item("1")), push, push_of(&queue, item("3"))];
    let pushed = env.store.push(pushes).await.unwrap();
    let delivery = delivery_of(env, &queue, pushed[1], token).await;
    let taken = env.take(&queue, 5).await;
    assert_eq!(payloads(&taken), ["1", "3"]);
    assert_eq!((taken[0].item.id, taken[1].item.id), (pushed[0].id, pushed[2].id));
    assert_eq!(payload(&delivery.item), "2");
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
}

/// Returns the pushes of items under one lease, and its token.
fn leased_together(env: &Env, queue: &Arc<Queue>, items: Vec<NewItem>) -> (Vec<Push>, LeaseToken) {
    let token = LeaseToken::fresh(env.store.broker_id());
    let lease = FirstLease::new(token, LEASE, None);
    let push = |item| Push { first_lease: Some(lease.clone()), ..push_of(queue, item) };
    (items.into_iter().map(push).collect(), token)
}

/// Stores items under one lease.
async fn push_together(env: &Env, queue: &Arc<Queue>, items: Vec<NewItem>) -> Vec<Delivery> {
    let (pushes, token) = leased_together(env, queue, items);
    let mut deliveries = Vec::new();
    for pushed in env.store.push(pushes).await.unwrap() {
        deliveries.push(delivery_of(env, queue, pushed, token).await);
    }
    deliveries
}

/// As when several pushes that go directly are written together.
pub async fn items_under_different_leases_share_a_call(env: &Env) {
    let queue = env.queue("q").await;
    let (mut pushes, first) = leased_together(env, &queue, ["1", "2"].map(item).to_vec());
    let (more, second) = leased_together(env, &queue, ["3", "4"].map(item).to_vec());
    pushes.extend(more);
    let pushed = env.store.push(pushes).await.unwrap();
    assert!(pushed.is_sorted_by_key(|pushed| pushed.id), "their order is that of the call");
    let mut all = Vec::new();
    for (pushed, token) in pushed.into_iter().zip([first, first, second, second]) {
        all.push(delivery_of(env, &queue, pushed, token).await);
    }
    assert_eq!(payloads(&all), ["1", "2", "3", "4"]);
    assert_eq!(env.commit_one(&queue, &all[0]).await, Outcome::Ok);
    let back = vec![undelivered(&queue, &all[2]), undelivered(&queue, &all[1])];
    assert_eq!(env.store.rollback(back).await.unwrap(), [Outcome::Ok; 2]);
    assert_eq!(env.drain(&queue).await, ["2", "3"], "those that return are in their places");
    assert_eq!(env.commit_one(&queue, &all[3]).await, Outcome::Ok);
}

pub async fn items_stored_as_reserved_together_settle_one_by_one(env: &Env) {
    let queue = env.queue("q").await;
    let names = ["commit", "fail", "keep", "return", "elsewhere", "lapse"];
    let all = push_together(env, &queue, names.map(item).to_vec()).await;
    let [commit, fail, keep, back, elsewhere, _lapse] = &all[..] else { panic!("{all:?}") };
    assert!(all.iter().all(|delivery| delivery.item.state == ItemState::Reserved));
    assert_eq!(env.take(&queue, 9).await.len(), 0, "nothing is ready");
    env.pass(seconds(1));
    assert_eq!(env.commit_one(&queue, commit).await, Outcome::Ok);
    assert_eq!(env.fail(&queue, fail).await, Outcome::Ok);
    assert_eq!(env.store.rollback(vec![undelivered(&queue, back)]).await.unwrap(), [Outcome::Ok]);
    let outcomes = env.other.commit(vec![held(&queue, elsewhere)]).await.unwrap();
    assert_eq!(outcomes, [Outcome::Ok]);
    let taken = env.take(&queue, 9).await;
    assert_eq!(payloads(&taken), ["return", "fail"], "one is as it was, one has failed");
    assert_eq!((taken[0].item.attempt, taken[1].item.attempt), (1, 2));
    let until = env.now() + LEASE * 3;
    assert_eq!(env.extend(vec![held(&queue, keep)], until).await, [Outcome::Ok]);
    for delivery in &taken {
        assert_eq!(env.commit_one(&queue, delivery).await, Outcome::Ok);
    }
    env.pass(LEASE);
    let again = env.take(&queue, 9).await;
    assert_eq!((payloads(&again), again[0].item.attempt), (vec!["lapse".to_owned()], 2));
    for delivery in [keep, &again[0]] {
        assert_eq!(env.commit_one(&queue, delivery).await, Outcome::Ok);
    }
    assert_eq!(env.list(&queue, None).await, []);
}

pub async fn items_stored_as_reserved_together_are_committed_together(env: &Env) {
    let queue = env.queue("q").await;
    let names: Vec<NewItem> = (0..20).map(|n| item(&n.to_string())).collect();
    let all = push_together(env, &queue, names).await;
    let receipts = || all.iter().map(|delivery| held(&queue, delivery)).collect::<Vec<_>>();
    let (first, rest) = (receipts()[..7].to_vec(), receipts()[7..].to_vec());
    assert_eq!(env.store.commit(first).await.unwrap(), [Outcome::Ok; 7]);
    assert_eq!(env.store.commit(rest).await.unwrap(), [Outcome::Ok; 13]);
    assert_eq!(env.store.commit(receipts()).await.unwrap(), [Outcome::Gone; 20]);
    assert_eq!(env.list(&queue, None).await, []);
}

pub async fn duplicates_among_items_stored_as_reserved_get_no_lease(env: &Env) {
    let queue = env.queue("q").await;
    env.push_one(&queue, dedup("old", "a")).await;
    let items = vec![dedup("1", "b"), dedup("2", "a"), dedup("3", "b"), item("4"), dedup("5", "c")];
    let (pushes, token) = leased_together(env, &queue, items);
    let pushed = env.store.push(pushes).await.unwrap();
    let duplicates: Vec<bool> = pushed.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(duplicates, [false, true, true, false, false]);
    assert_eq!(pushed[2].id, pushed[0].id);
    let old = env.take_one(&queue).await;
    assert_eq!(payload(&old.item), "old");
    assert_eq!(env.commit_one(&queue, &old).await, Outcome::Ok);
    for at in [0, 3, 4] {
        let delivery = delivery_of(env, &queue, pushed[at], token).await;
        assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    }
    assert_eq!(env.list(&queue, None).await, []);
    let (again, _) = leased_together(env, &queue, vec![dedup("6", "c"), dedup("7", "b")]);
    let again = env.store.push(again).await.unwrap();
    assert!(again.iter().all(|pushed| pushed.deduplicated), "the ids outlive their items");
}

pub async fn a_duplicate_gets_no_lease(env: &Env) {
    let queue = env.queue("q").await;
    let delivery = push_leased(env, &queue, dedup("1", "once"), LEASE).await;
    let (push, token) = leased(env, &queue, dedup("2", "once"), LEASE);
    let again = env.store.push(vec![push]).await.unwrap()[0];
    assert_eq!((again.deduplicated, again.id), (true, delivery.item.id));
    let stale = delivery_of(env, &queue, again, token).await;
    assert_eq!(env.commit_one(&queue, &stale).await, Outcome::LeaseLost);
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    // The id outlives its item.
    let (push, token) = leased(env, &queue, dedup("3", "once"), LEASE);
    let again = env.store.push(vec![push]).await.unwrap()[0];
    assert_eq!((again.deduplicated, again.id), (true, delivery.item.id));
    let receipt = Receipt { token, ..delivery.receipt.clone() };
    let stale = Delivery { receipt, ..delivery };
    assert_eq!(env.commit_one(&queue, &stale).await, Outcome::Gone);
    assert_eq!(env.list(&queue, None).await, []);
}

pub async fn history_takes_items_that_were_stored_as_reserved(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(3_600)).await;
    let delivery = push_leased(env, &queue, item("x"), LEASE).await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    let kept = env.list(&queue, Some(ItemState::Processed)).await;
    assert_eq!((kept.len(), kept[0].deliveries), (1, 1));
    assert!(kept[0].process_time > Some(Timestamp(0)));
}
