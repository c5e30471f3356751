//! Redrive: dead letters return to the queue they came from, or go elsewhere.

use std::sync::Arc;

use super::{Env, env::*};
use crate::{
    domain::{ItemState, NewItem, Queue},
    store::{RedriveFilter, StoreError},
};

struct Queues {
    dead: Arc<Queue>,
    a: Arc<Queue>,
    b: Arc<Queue>,
}

async fn queues(env: &Env) -> Queues {
    let dead = env.queue("dead").await;
    let set = |queue: &mut Queue| queue.dead_letter_queue = Some(dead.name.clone());
    let (a, b) = (env.queue_with("a", set).await, env.queue_with("b", set).await);
    Queues { dead, a, b }
}

async fn bury_all(env: &Env, queue: &Arc<Queue>, items: Vec<NewItem>, reason: &str) {
    for new in items {
        env.push_one(queue, new).await;
        for delivery in env.take(queue, 100).await {
            env.bury(queue, &delivery, Some(reason)).await;
        }
    }
}

async fn redrive(env: &Env, from: &Queue, to: &Arc<Queue>, filter: &RedriveFilter) -> u64 {
    env.store.redrive(from, to, filter, None, 1_000_000).await.unwrap().items
}

pub async fn dead_letters_return_to_their_origin(env: &Env) {
    let Queues { dead, a, b } = queues(env).await;
    assert!(env.store.origins(&dead).await.unwrap().is_empty());
    bury_all(env, &a, vec![item("1"), item("2")], "broken").await;
    bury_all(env, &b, vec![item("3")], "broken").await;
    assert_eq!(env.store.origins(&dead).await.unwrap(), [a.name.clone(), b.name.clone()]);
    let from_a = RedriveFilter { origin_queue: Some(a.name.clone()), ..RedriveFilter::default() };
    assert_eq!(redrive(env, &dead, &a, &from_a).await, 2);
    assert_eq!(env.store.origins(&dead).await.unwrap(), std::slice::from_ref(&b.name));
    let home = env.take(&a, 9).await;
    assert_eq!(payloads(&home), ["1", "2"]);
    for delivery in &home {
        assert_eq!((delivery.item.attempt, delivery.item.deliveries), (1, 2));
        assert_eq!(delivery.item.origin_queue, None);
    }
    assert_eq!(redrive(env, &dead, &a, &from_a).await, 0);
    assert_eq!(env.drain(&dead).await, ["3"]);
    assert!(env.store.origins(&dead).await.unwrap().is_empty()); // the item is reserved now
}

pub async fn all_conditions_of_a_filter_hold(env: &Env) {
    let Queues { dead, a, b } = queues(env).await;
    bury_all(env, &a, vec![item("1")], "timeout: 5 s (a+b)").await;
    env.pass(seconds(10));
    let middle = env.now();
    bury_all(env, &a, vec![item("2")], "timeout: 9 s (a+b)").await;
    bury_all(env, &b, vec![item("3")], "timeout: 9 s (a+b)").await;
    env.pass(seconds(10));
    let late = env.now();
    bury_all(env, &a, vec![item("4")], "out of luck").await;
    let to = env.queue("to").await;
    let ids: Vec<_> = env.list(&dead, None).await.iter().map(|item| item.id).collect();
    let all = RedriveFilter::default;

    let none = RedriveFilter { reason_contains: "(a.b)".to_owned(), ..all() };
    assert_eq!(redrive(env, &dead, &to, &none).await, 0);
    let exactly = |reason: &str| RedriveFilter {
        reason: Some(reason.to_owned()),
        ..RedriveFilter::default()
    };
    for reason in ["timeout: 9 s", "Timeout: 9 s (a+b)", ""] {
        assert_eq!(redrive(env, &dead, &to, &exactly(reason)).await, 0, "{reason:?}");
    }
    let none = RedriveFilter { created_before: Some(late), ids: vec![ids[3]], ..all() };
    assert_eq!(redrive(env, &dead, &to, &none).await, 0);
    let two = RedriveFilter {
        reason_contains: "(a+b)".to_owned(),
        reason: Some("timeout: 9 s (a+b)".to_owned()),
        created_from: Some(middle),
        ready_by: None,
        created_before: Some(late),
        origin_queue: Some(a.name.clone()),
        ids: ids.clone(),
    };
    assert_eq!(redrive(env, &dead, &to, &two).await, 1);
    assert_eq!(env.drain(&to).await, ["2"]);
    let last = RedriveFilter { created_from: Some(late), ..all() };
    assert_eq!(redrive(env, &dead, &to, &last).await, 1);
    assert_eq!(env.drain(&to).await, ["4"]);
    bury_all(env, &a, vec![item("5")], "").await;
    bury_all(env, &a, vec![item("6")], "out of luck").await;
    for (reason, expected) in [("", "5"), ("out of luck", "6")] {
        assert_eq!(redrive(env, &dead, &to, &exactly(reason)).await, 1, "{reason:?}");
        assert_eq!(env.drain(&to).await, [expected]);
    }
    let first = RedriveFilter { ids: vec![ids[0], ids[1]], ..all() };
    assert_eq!(redrive(env, &dead, &to, &first).await, 1);
    assert_eq!(env.drain(&to).await, ["1"]);
    assert_eq!(redrive(env, &dead, &to, &all()).await, 1);
    assert_eq!(env.drain(&to).await, ["3"]);
}

pub async fn a_limited_redrive_takes_the_head(env: &Env) {
    let Queues { dead, a, .. } = queues(env).await;
    let items = vec![item("1"), urgent("2", 5), item("3"), item("4")];
    bury_all(env, &a, items, "broken").await;
    let filter = RedriveFilter::default();
    assert_eq!(env.store.redrive(&dead, &a, &filter, None, 0).await.unwrap().items, 0);
    assert_eq!(env.store.redrive(&dead, &a, &filter, None, 2).await.unwrap().items, 2);
    assert_eq!(env.drain(&a).await, ["2", "1"]);
    assert_eq!(env.store.redrive(&dead, &a, &filter, None, 2).await.unwrap().items, 2);
    assert_eq!(env.drain(&a).await, ["3", "4"]);
}

pub async fn only_ready_items_are_redriven(env: &Env) {
    let Queues { dead, a, .. } = queues(env).await;
    bury_all(env, &a, vec![item("held"), item("later"), item("free")], "broken").await;
    let taken = env.take(&dead, 2).await;
    env.roll_back(&dead, &taken[1], seconds(60), 2, None).await;
    assert_eq!(redrive(env, &dead, &a, &RedriveFilter::default()).await, 1);
    assert_eq!(env.drain(&a).await, ["free"]);
    assert_eq!(env.commit_one(&dead, &taken[0]).await, crate::domain::Outcome::Ok);
    assert_eq!(env.list(&dead, Some(ItemState::Delayed)).await.len(), 1);
}

pub async fn thousands_are_redriven_in_order(env: &Env) {
    let Queues { dead, a, .. } = queues(env).await;
    let names: Vec<String> = (0..2_500).map(|n| n.to_string()).collect();
    env.push(&a, names.iter().map(|name| item(name)).collect()).await;
    let taken = env.take(&a, 2_500).await;
    let rollbacks = taken.iter().map(|delivery| crate::store::Rollback {
        held: held(&a, delivery),
        to: last(&a, delivery),
        reason: Some(if delivery.item.payload.len() == 4 { "long" } else { "short" }.to_owned()),
    });
    env.store.rollback(rollbacks.collect()).await.unwrap();
    let long = RedriveFilter { reason_contains: "long".to_owned(), ..RedriveFilter::default() };
    assert_eq!(env.store.redrive(&dead, &a, &long, None, 1_200).await.unwrap().items, 1_200);
    assert_eq!(redrive(env, &dead, &a, &long).await, 300);
    assert_eq!(env.drain(&a).await, names[1_000..]);
    assert_eq!(env.store.depth(&dead).await.unwrap().ready, 1_000);
}

pub async fn an_ordering_key_applies_again(env: &Env) {
    let Queues { dead, a, b } = queues(env).await;
    let pushed = env.push(&a, ["1", "2", "3", "4"].map(|name| keyed(name, "k")).to_vec()).await;
    for _ in 0..2 {
        let delivery = env.take_one(&a).await;
        env.bury(&a, &delivery, None).await;
    }
    // Item 3 is ready. Items 1 and 2 return behind it and before item 4.
    let third = env.take_one(&a).await;
    let first_two =
        RedriveFilter { ids: vec![pushed[0].id, pushed[1].id], ..RedriveFilter::default() };
    assert_eq!(redrive(env, &dead, &a, &first_two).await, 2);
    let back = env.get(&a, pushed[0].id).await;
    assert_eq!((back.state, back.sequence), (ItemState::Blocked, pushed[0].sequence));
    assert!(env.drain(&a).await.is_empty());
    env.commit_one(&a, &third).await;
    for expected in ["1", "2", "4"] {
        let taken = env.take(&a, 9).await;
        assert_eq!(payloads(&taken), [expected]);
        if expected == "4" {
            env.bury(&a, &taken[0], None).await;
        } else {
            env.commit(&a, &taken).await;
        }
    }
    // In another queue, the item gets a number of that queue, after those of the existing items.
    let names = ["u", "v", "w", "x", "y", "z"]; // more items than its old number
    let there = env.push(&b, names.map(|name| keyed(name, "k")).to_vec()).await;
    assert_eq!(redrive(env, &dead, &b, &RedriveFilter::default()).await, 1);
    assert!(env.get(&b, pushed[3].id).await.sequence > there[5].sequence);
    for expected in names.into_iter().chain(["4"]) {
        let taken = env.take(&b, 9).await;
        assert_eq!(payloads(&taken), [expected]);
        env.commit(&b, &taken).await;
    }
}

/// A long redrive does not move items that fail again meanwhile.
pub async fn items_that_fail_again_are_not_redriven_twice(env: &Env) {
    let dead = env.queue("dead").await;
    let queue = env.queue_with("q", |q| q.dead_letter_queue = Some(name("dead"))).await;
    env.push_plain(&queue, &["x", "y"]).await;
    for delivery in env.take(&queue, 2).await {
        env.bury(&queue, &delivery, None).await;
    }
    let filter = RedriveFilter { ready_by: Some(env.now()), ..RedriveFilter::default() };
    env.pass(seconds(1));
    assert_eq!(env.store.redrive(&dead, &queue, &filter, None, 1).await.unwrap().items, 1);
    let again = env.take_one(&queue).await;
    env.bury(&queue, &again, None).await;
    assert_eq!(env.other.redrive(&dead, &queue, &filter, None, 100).await.unwrap().items, 1);
    assert_eq!(env.other.redrive(&dead, &queue, &filter, None, 100).await.unwrap().items, 0);
    assert_eq!(env.list(&dead, None).await.len(), 1);
}

/// A redrive in steps reads nothing twice: a step continues where the one before it ended.
pub async fn a_redrive_in_steps_continues_behind_its_cursor(env: &Env) {
    let Queues { dead, a, b } = queues(env).await;
    for n in 0..4 {
        bury_all(env, &b, vec![item("other")], "broken").await;
        bury_all(env, &a, vec![item(&n.to_string())], "broken").await;
    }
    let to = env.queue("to").await;
    let filter = RedriveFilter { origin_queue: Some(a.name.clone()), ..RedriveFilter::default() };
    let step = async |cursor: Option<&str>, limit| {
        env.store.redrive(&dead, &to, &filter, cursor, limit).await.unwrap()
    };
    let first = step(None, 1).await;
    assert_eq!(first.items, 1);
    // Its place is before that of the first one.
    bury_all(env, &b, vec![urgent("before", 9)], "broken").await;
    bury_all(env, &a, vec![urgent("before", 9)], "broken").await;
    let second = step(first.next.as_deref(), 2).await;
    assert_eq!(second.items, 2);
    let last = step(second.next.as_deref(), 9).await;
    assert_eq!((last.items, last.next), (1, None));
    assert_eq!(env.drain(&to).await, ["0", "1", "2", "3"]);
    assert_eq!(step(None, 9).await.items, 1);
    assert_eq!(env.drain(&to).await, ["before"]);
    let invented = env.store.redrive(&dead, &to, &filter, Some("x"), 1).await;
    assert!(matches!(invented, Err(StoreError::BadCursor)), "{invented:?}");
}

/// Items that are given by their ids are moved in hand-out order, also in steps.
pub async fn a_redrive_by_ids_takes_these_in_hand_out_order(env: &Env) {
    let Queues { dead, a, .. } = queues(env).await;
    let items = ["1", "2", "3", "4"].map(item);
    bury_all(env, &a, items.into_iter().chain([urgent("5", 5)]).collect(), "broken").await;
    let listed = env.list(&dead, None).await;
    let ids = [3, 0, 2, 1].map(|place: usize| listed[place].id).to_vec();
    let filter = RedriveFilter { ids, ..RedriveFilter::default() };
    let (mut moved, mut cursor) = (0, None);
    loop {
        let step = env.store.redrive(&dead, &a, &filter, cursor.as_deref(), 3).await.unwrap();
        moved += step.items;
        cursor = step.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(moved, 4);
    assert_eq!(env.drain(&a).await, ["5", "1", "2", "3"]);
    assert_eq!(env.drain(&dead).await, ["4"]);
}
