//! Operator calls: lists, counts, deletion.

use std::sync::Arc;

use super::{Env, env::*};
use crate::{
    domain::{Depth, Eligibility, Item, ItemState, NewItem, Outcome, Queue},
    store::{ItemDeleted, StoreError},
};

/// Creates a queue with items in every state. Returns the queue and its items' payloads in list
/// order.
async fn mixed(env: &Env) -> (Arc<Queue>, Vec<(ItemState, String)>) {
    let queue = env.queue_with("mixed", |queue| queue.retention = seconds(10_000)).await;
    for n in 0..4 {
        env.push_one(&queue, item(&format!("processed {n}"))).await;
        let delivery = env.take_one(&queue).await;
        assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
        env.pass(seconds(1));
    }
    env.push(&queue, vec![item("reserved 0"), item("reserved 1")]).await;
    assert_eq!(env.take(&queue, 2).await.len(), 2);
    let mut items = vec![keyed("ready 1", "k")];
    items.extend((0..5).map(|n| keyed(&format!("blocked {n}"), "k")));
    items.extend([urgent("ready 0", 6), item("ready 2"), item("ready 3"), item("ready 4")]);
    items.extend((0..3).map(|n| delayed(&format!("delayed {n}"), seconds(100 + n))));
    items.push(NewItem {
        eligibility: Eligibility::After(seconds(500)),
        ..urgent("delayed urgent", 5)
    });
    env.push(&queue, items).await;
    let mut expected = vec![(ItemState::Ready, "ready 0".to_owned())];
    expected.push((ItemState::Delayed, "delayed urgent".to_owned()));
    let mut add = |state, word: &str, numbers: &mut dyn Iterator<Item = usize>| {
        expected.extend(numbers.map(|n| (state, format!("{word} {n}"))));
    };
    add(ItemState::Ready, "ready", &mut (1..5));
    add(ItemState::Reserved, "reserved", &mut (0..2));
    add(ItemState::Delayed, "delayed", &mut (0..3));
    add(ItemState::Blocked, "blocked", &mut (0..5));
    add(ItemState::Processed, "processed", &mut (0..4).rev());
    (queue, expected)
}

fn shown(items: &[Item]) -> Vec<(ItemState, String)> {
    items.iter().map(|item| (item.state, payload(item))).collect()
}

const STATES: [Option<ItemState>; 6] = [
    None,
    Some(ItemState::Ready),
    Some(ItemState::Delayed),
    Some(ItemState::Reserved),
    Some(ItemState::Blocked),
    Some(ItemState::Processed),
];

pub async fn lists_are_in_order_and_of_the_requested_state(env: &Env) {
    let (queue, all) = mixed(env).await;
    for state in STATES {
        let expected: Vec<_> =
            all.iter().filter(|(s, _)| state.is_none_or(|state| state == *s)).cloned().collect();
        assert!(!expected.is_empty());
        let listed = env.list(&queue, state).await;
        let (mut seen, mut expected) = (shown(&listed), expected);
        if state.is_none() {
            // Each store decides where the reserved items are among the delayed ones.
            let ready = seen.iter().rposition(|(state, _)| *state == ItemState::Ready);
            let reserved = seen.iter().position(|(state, _)| *state == ItemState::Reserved);
            assert!(ready < reserved, "{seen:?}");
            let by_state = |(state, _): &(ItemState, String)| *state == ItemState::Reserved;
            seen.sort_by_key(by_state);
            expected.sort_by_key(by_state);
        }
        assert_eq!(seen, expected, "{state:?}");
        for item in listed {
            assert_eq!(env.get(&queue, item.id).await, item);
        }
    }
}

pub async fn pages_add_up_to_the_list(env: &Env) {
    let (queue, all) = mixed(env).await;
    for state in STATES {
        let expected = shown(&env.list(&queue, state).await);
        let of_state = |(s, _): &&(ItemState, String)| state.is_none_or(|state| state == *s);
        assert_eq!(expected.len(), all.iter().filter(of_state).count());
        for size in [1, 2, 3, 5, expected.len(), expected.len() + 1] {
            let mut got = Vec::new();
            let mut cursor: Option<String> = None;
            loop {
                let page =
                    env.store.list_items(&queue, state, cursor.as_deref(), size).await.unwrap();
                assert!(!page.entries.is_empty() && page.entries.len() <= size);
                got.extend(shown(&page.entries));
                let Some(next) = page.next else { break };
                assert_eq!(page.entries.len(), size);
                let safe = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
                assert!(next.chars().all(safe), "{next:?} is not safe in a URL");
                cursor = Some(next);
            }
            assert_eq!(got, expected, "{state:?} in pages of {size}");
        }
    }
}

pub async fn a_cursor_survives_changes_in_between(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..6).map(|n| item(&n.to_string())).collect()).await;
    let page = env.store.list_items(&queue, None, None, 3).await.unwrap();
    // The item that the cursor points to is deleted, and a new one is pushed.
    for item in &page.entries {
        assert!(env.delete(&queue, item.id).await);
    }
    env.push_plain(&queue, &["6"]).await;
    let rest = env.store.list_items(&queue, None, page.next.as_deref(), 10).await.unwrap();
    assert_eq!(rest.entries.iter().map(payload).collect::<Vec<_>>(), ["3", "4", "5", "6"]);
}

pub async fn an_invented_cursor_is_refused(env: &Env) {
    let (queue, _) = mixed(env).await;
    let long = "x".repeat(5_000);
    for bad in ["", "a", "nonsense", "..", "0", "-1", "ü", "a1.2", "%00", long.as_str()] {
        let answer = env.store.list_items(&queue, None, Some(bad), 10).await;
        assert!(matches!(answer, Err(StoreError::BadCursor)), "{bad:?}: {answer:?}");
    }
    let page = env.store.list_items(&queue, None, None, 3).await.unwrap();
    let cut = page.next.unwrap();
    let answer = env.store.list_items(&queue, None, Some(&cut[..cut.len() / 2]), 10).await;
    assert!(matches!(answer, Err(StoreError::BadCursor)), "{answer:?}");
}

pub async fn depth_counts_every_state(env: &Env) {
    let (queue, _) = mixed(env).await;
    let depth = env.store.depth(&queue).await.unwrap();
    let expected = Depth {
        ready: 5,
        delayed: 4,
        reserved: 2,
        blocked: 5,
        processed: 4,
        oldest_ready: env.list(&queue, None).await[0].eligible_time,
        next_eligible: env.list(&queue, Some(ItemState::Reserved)).await[0].eligible_time,
    };
    assert_eq!(depth, expected);
    assert_eq!(depth.unsettled(), 16);
    env.pass(LEASE + seconds(1));
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (7, 0));
    env.pass(seconds(1_000));
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.delayed, depth.next_eligible), (11, 0, None));
}

pub async fn the_oldest_ready_item_is_the_first_in_hand_out_order(env: &Env) {
    let queue = env.queue("q").await;
    assert_eq!(env.store.depth(&queue).await.unwrap().oldest_ready, None);
    let first = env.push_one(&queue, item("first")).await;
    env.pass(seconds(5));
    assert_eq!(env.store.depth(&queue).await.unwrap().oldest_ready, first.eligible_time);
    let urgent = env.push_one(&queue, urgent("urgent", 9)).await;
    assert_eq!(env.store.depth(&queue).await.unwrap().oldest_ready, urgent.eligible_time);
}

pub async fn items_are_of_their_queue(env: &Env) {
    let (a, b) = (env.queue("a").await, env.queue("b").await);
    let pushed = env.push_one(&a, item("x")).await;
    assert_eq!(env.store.get_item(&b, pushed.id).await.unwrap(), None);
    assert!(!env.delete(&b, pushed.id).await);
    assert!(env.list(&b, None).await.is_empty());
    assert!(env.drain(&b).await.is_empty());
    let nobody = crate::domain::ItemId(*b"no such item");
    assert_eq!(env.store.get_item(&a, nobody).await.unwrap(), None);
    assert!(env.delete(&a, pushed.id).await);
    assert!(!env.delete(&a, pushed.id).await);
}

pub async fn items_of_every_state_can_be_deleted(env: &Env) {
    let (queue, all) = mixed(env).await;
    let taken = env.list(&queue, Some(ItemState::Reserved)).await;
    let items = env.list(&queue, None).await;
    assert_eq!(items.len(), all.len());
    for (n, item) in items.iter().rev().enumerate() {
        assert!(env.delete(&queue, item.id).await);
        assert_eq!(env.list(&queue, None).await.len(), all.len() - n - 1);
    }
    assert_eq!(taken.len(), 2);
    assert_eq!(env.store.depth(&queue).await.unwrap(), Depth::default());
}

pub async fn a_purge_spares_reserved_items(env: &Env) {
    let (queue, all) = mixed(env).await;
    let bystander = env.queue("bystander").await;
    env.push_plain(&bystander, &["x"]).await;
    let purged = env.store.purge(&queue).await.unwrap();
    assert_eq!(purged as usize, all.len() - 2);
    let left = env.list(&queue, None).await;
    assert!(left.len() == 2 && left.iter().all(|item| item.state == ItemState::Reserved));
    assert_eq!(env.store.purge(&queue).await.unwrap(), 0);
    env.push(&queue, vec![keyed("new", "k")]).await; // no item of the key is left before it
    assert_eq!(env.drain(&queue).await, ["new"]);
    assert_eq!(env.drain(&bystander).await, ["x"]);
}

pub async fn a_purge_of_thousands_is_complete(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..2_500).map(|n| item(&n.to_string())).collect()).await;
    env.push(&queue, (0..30).map(|n| keyed(&n.to_string(), "k")).collect()).await;
    assert_eq!(env.store.purge(&queue).await.unwrap(), 2_530);
    assert_eq!(env.store.depth(&queue).await.unwrap(), Depth::default());
    assert!(!env.reserve(&queue, &[demand(5)]).await.more);
}

/// A purge in steps ends although items keep coming, and leaves what came after it began and what is reserved.
pub async fn a_purge_in_steps_takes_what_was_there_when_it_began(env: &Env) {
    let (queue, all) = mixed(env).await;
    for _ in 0..6 {
        env.push(&queue, (0..1_000).map(|n| item(&n.to_string())).collect()).await;
    }
    env.push(&queue, (0..30).map(|n| keyed(&n.to_string(), "many")).collect()).await;
    let once = env.push_one(&queue, dedup("once", "once")).await;
    let bystander = env.queue("bystander").await;
    env.push_plain(&bystander, &["x"]).await;
    let begun = env.now();
    env.pass(seconds(1));
    env.push_plain(&queue, &["new"]).await;
    let (mut purged, mut steps) = (0, 0);
    loop {
        let step = env.store.purge_step(&queue, begun).await.unwrap();
        purged += step.items;
        steps += 1;
        assert!(steps < 1_000, "{purged} items in {steps} steps");
        if !step.more {
            break;
        }
        env.push_plain(&queue, &["new"]).await;
    }
    assert_eq!(purged as usize, all.len() - 2 + 6_031);
    assert!(steps > 1, "all at once");
    let left = env.list(&queue, Some(ItemState::Ready)).await;
    assert!(left.len() == steps && left.iter().all(|item| payload(item) == "new"));
    assert_eq!(env.list(&queue, Some(ItemState::Reserved)).await.len(), 2);
    assert_eq!(env.list(&queue, None).await.len(), steps + 2);
    // Deduplication ids and ordering keys are free.
    let again = env.push_one(&queue, dedup("once", "once")).await;
    assert!(!again.deduplicated && again.id != once.id);
    env.push(&queue, vec![keyed("next", "many")]).await;
    let drained = env.drain(&queue).await;
    assert_eq!(drained.last().map(String::as_str), Some("next"), "{drained:?}");
    assert_eq!(env.drain(&bystander).await, ["x"]);
}

/// A queue too deep to be counted in one step, with items in every state and of every priority.
pub async fn depth_counts_deep_queues_too(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    for _ in 0..6 {
        env.push(&queue, (0..100).map(|n| item(&n.to_string())).collect()).await;
    }
    let of = |count: u32, make: &dyn Fn(&str) -> NewItem| {
        (0..count).map(|n| make(&n.to_string())).collect::<Vec<_>>()
    };
    env.push(&queue, of(5, &|n| urgent(n, 7))).await;
    env.push(&queue, of(3, &|n| delayed(n, seconds(500)))).await;
    env.push(&queue, of(4, &|n| keyed(n, "k"))).await;
    env.push(&queue, of(2, &|n| mortal(n, seconds(1)))).await;
    let committed = env.take_one(&queue).await;
    env.commit_one(&queue, &committed).await;
    let _held = env.take_one(&queue).await;
    env.pass(seconds(2));
    let depth = env.store.depth(&queue).await.unwrap();
    let counted = (depth.ready, depth.delayed, depth.reserved, depth.blocked, depth.processed);
    assert_eq!(counted, (600 + 3 + 1, 3, 1, 3, 1));
    assert!(depth.oldest_ready.is_some() && depth.next_eligible.is_some());
    // The leases lapse.
    env.pass(LEASE);
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (600 + 4 + 1, 0));
}

/// A reserved item is not deleted by accident.
pub async fn an_item_in_another_state_than_requested_is_not_deleted(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    let states = [
        ItemState::Ready,
        ItemState::Delayed,
        ItemState::Reserved,
        ItemState::Blocked,
        ItemState::Processed,
    ];
    env.push_plain(&queue, &["processed", "reserved"]).await;
    let taken = env.take(&queue, 2).await;
    env.commit_one(&queue, &taken[0]).await;
    let delayed = NewItem { eligibility: Eligibility::After(seconds(1_000)), ..item("delayed") };
    env.push(&queue, vec![delayed, keyed("ready", "k"), keyed("blocked", "k")]).await;
    for item in env.list(&queue, None).await {
        for asked in states.into_iter().filter(|state| *state != item.state) {
            let deleted = env.store.delete_item(&queue, item.id, Some(asked)).await.unwrap();
            assert_eq!(deleted, ItemDeleted::OtherState(item.state), "asked for {asked}");
        }
    }
    assert_eq!(env.list(&queue, None).await.len(), 5);
    // An item is ready once its lease has ended, whether the store has noticed that or not.
    env.pass(LEASE + seconds(1));
    let lapsed = taken[1].item.id;
    let deleted = env.store.delete_item(&queue, lapsed, Some(ItemState::Reserved)).await.unwrap();
    assert_eq!(deleted, ItemDeleted::OtherState(ItemState::Ready));
    let mut items = env.list(&queue, None).await;
    // The blocked item is deleted first, because it becomes ready when the item before it is gone.
    items.sort_by_key(|item| item.state != ItemState::Blocked);
    for item in items {
        let deleted = env.store.delete_item(&queue, item.id, Some(item.state)).await.unwrap();
        assert_eq!(deleted, ItemDeleted::Done, "{}", item.state);
        let again = env.store.delete_item(&queue, item.id, Some(item.state)).await.unwrap();
        assert_eq!(again, ItemDeleted::NotFound);
    }
}
