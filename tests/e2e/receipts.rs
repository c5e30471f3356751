//! Receipts: the newest one settles its item. Every other one changes nothing, and the result says
//! so.

use std::time::Duration;

use sluicegate_proto::v1::{ExtendRequest, ItemState, Outcome, RollbackItem};

use crate::harness::{Api, Backend, at, duration, on_both_backends};

on_both_backends!(
    stale_receipt_changes_nothing,
    a_lapsed_lease_settles_until_the_item_is_reserved_again,
    repeated_commit_is_gone,
    results_are_exact_per_receipt,
    rollback_returns_the_item_and_counts_the_attempt,
    rollback_with_keep_attempt_does_not_count,
    extend_renews_the_lease_and_keeps_the_receipt,
);

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_mins(10);

async fn extend(
    api: &Api,
    receipt: &str,
    lease: Duration,
) -> (Outcome, Option<std::time::SystemTime>) {
    let request = ExtendRequest { receipts: vec![receipt.to_owned()], lease: duration(lease) };
    let answer = api.queue.clone().extend(request).await.expect("an answer").into_inner();
    let result = &answer.results[0];
    assert_eq!(result.receipt, receipt);
    (result.outcome(), result.lease_expire_time.as_ref().map(|time| at(Some(time))))
}

async fn stale_receipt_changes_nothing(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let id = api.push("work", &["once"]).await.remove(0).id;
    let first = api.reserve_one("work", SHORT).await;
    // The item is delivered only after the lease has lapsed.
    let second = api.reserve_one("work", LONG).await;
    let item = second.item.as_ref().expect("an item");
    assert_eq!((item.id.as_str(), item.attempt, item.deliveries), (id.as_str(), 2, 2));
    assert_ne!(first.receipt, second.receipt);

    let before = api.item("work", &id).await.expect("the item");
    assert_eq!(api.commit(&[&first.receipt]).await, [Outcome::LeaseLost]);
    assert_eq!(api.rollback(&first.receipt, "stale").await, Outcome::LeaseLost);
    assert_eq!(extend(&api, &first.receipt, LONG).await, (Outcome::LeaseLost, None));
    assert_eq!(api.item("work", &id).await.expect("the item"), before, "nothing was changed");

    assert_eq!(api.commit(&[&second.receipt]).await, [Outcome::Ok]);
    assert_eq!(api.commit(&[&first.receipt]).await, [Outcome::Gone]);
}

async fn a_lapsed_lease_settles_until_the_item_is_reserved_again(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let id = api.push("work", &["slow"]).await.remove(0).id;
    let delivery = api.reserve_one("work", SHORT).await;
    api.until_state("work", &id, ItemState::Ready).await;
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    assert!(
        api.reserve_now("work", 1).await.is_empty(),
        "a committed item is not handed out again"
    );
}

async fn repeated_commit_is_gone(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["once"]).await;
    let delivery = api.reserve_one("work", LONG).await;
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Ok]);
    assert_eq!(api.commit(&[&delivery.receipt]).await, [Outcome::Gone]);
    assert_eq!(api.rollback(&delivery.receipt, "too late").await, Outcome::Gone);
    assert_eq!(extend(&api, &delivery.receipt, LONG).await, (Outcome::Gone, None));
}

async fn results_are_exact_per_receipt(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c", "d"]).await;
    let deliveries = api.reserve_now("work", 4).await;
    let receipts: Vec<&str> = deliveries.iter().map(|d| d.receipt.as_str()).collect();
    assert_eq!(receipts.len(), 4);
    assert_eq!(api.commit(&[receipts[1]]).await, [Outcome::Ok]);
    assert_eq!(api.rollback(receipts[2], "later").await, Outcome::Ok);
    let results = api.try_commit(&receipts).await.expect("an answered commit");
    let named: Vec<&str> = results.iter().map(|result| result.receipt.as_str()).collect();
    assert_eq!(named, receipts, "one result per receipt, in order");
    assert_eq!(
        crate::harness::outcomes(&results),
        [Outcome::Ok, Outcome::Gone, Outcome::LeaseLost, Outcome::Ok]
    );
}

async fn rollback_returns_the_item_and_counts_the_attempt(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let id = api.push("work", &["again"]).await.remove(0).id;
    let first = api.reserve_one("work", LONG).await;
    assert_eq!(api.rollback(&first.receipt, "no luck").await, Outcome::Ok);
    let second = api.reserve_one("work", LONG).await;
    let item = second.item.as_ref().expect("an item");
    assert_eq!((item.id.as_str(), item.attempt, item.deliveries), (id.as_str(), 2, 2));
    assert_eq!(item.last_reason, "no luck");

    // After a rollback with a delay, the item is not ready but delayed until the delay has passed.
    let back = RollbackItem {
        receipt: second.receipt.clone(),
        delay: duration(Duration::from_hours(1)),
        ..RollbackItem::default()
    };
    assert_eq!(api.rollback_item(back).await, Outcome::Ok);
    assert_eq!(api.item("work", &id).await.expect("the item").state(), ItemState::Delayed);
    assert!(api.reserve_now("work", 1).await.is_empty());
}

async fn rollback_with_keep_attempt_does_not_count(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["spared"]).await;
    let first = api.reserve_one("work", LONG).await;
    let back = RollbackItem {
        receipt: first.receipt.clone(),
        delay: duration(Duration::ZERO),
        keep_attempt: true,
        ..RollbackItem::default()
    };
    assert_eq!(api.rollback_item(back).await, Outcome::Ok);
    let second = api.reserve_one("work", LONG).await;
    let item = second.item.as_ref().expect("an item");
    assert_eq!((item.attempt, item.deliveries), (1, 2));
}

async fn extend_renews_the_lease_and_keeps_the_receipt(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    // A second item shows that the first one's original lease has passed.
    api.push("work", &["extended", "witness"]).await;
    let extended = api.reserve_one("work", Duration::from_millis(1500)).await;
    let old_end = at(extended.lease_expire_time.as_ref());
    let (outcome, new_end) = extend(&api, &extended.receipt, LONG).await;
    assert_eq!(outcome, Outcome::Ok);
    assert!(new_end.expect("the new end") > old_end + LONG / 2);
    let witness = api.reserve_one("work", Duration::from_millis(1500)).await;
    let lapsed = api.reserve_one("work", LONG).await;
    assert_eq!(crate::harness::text(&lapsed), "witness", "the extended item stays leased");
    assert!(at(witness.lease_expire_time.as_ref()) > old_end);
    assert_eq!(api.commit(&[&extended.receipt]).await, [Outcome::Ok]);
}
