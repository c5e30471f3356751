//! Totals, and the calls about the store itself.

use futures_util::FutureExt;

use crate::{
    domain::Totals,
    store::conformance::{Env, env::*},
};

pub async fn totals_add_up_over_brokers(env: &Env) {
    let (a, b) = (name("a"), name("b"));
    assert_eq!(env.store.totals(&a).await.unwrap(), Totals::default());
    let one = Totals {
        pushed: 1,
        delivered: 2,
        committed: 3,
        rolled_back: 4,
        moved: 5,
        dead_lettered: 6,
        expired: 7,
        popped: 8,
        discarded: 9,
    };
    let changes = || vec![(a.clone(), one), (b.clone(), Totals { pushed: 100, ..one })];
    let tasks: Vec<_> = (0..10)
        .map(|n| {
            let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
            let changes = changes();
            tokio::spawn(async move { store.add_totals(changes).await.unwrap() })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let mut expected = Totals::default();
    for _ in 0..10 {
        expected.add(&one);
    }
    assert_eq!(env.store.totals(&a).await.unwrap(), expected);
    let expected = Totals { pushed: 1_000, ..expected };
    assert_eq!(env.other.totals(&b).await.unwrap(), expected);
}

pub async fn all_totals_are_read_at_once(env: &Env) {
    assert_eq!(env.store.all_totals().await.unwrap(), Vec::new());
    let one = Totals { pushed: 1, expired: 2, ..Totals::default() };
    let two = Totals { delivered: 3, ..Totals::default() };
    env.store.add_totals(vec![(name("a"), one), (name("b.c"), two)]).await.unwrap();
    env.other.add_totals(vec![(name("a"), two)]).await.unwrap();
    let mut all = env.store.all_totals().await.unwrap();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let both = Totals { delivered: 3, ..one };
    assert_eq!(all, [(name("a"), both), (name("b.c"), two)]);
}

pub async fn a_task_has_one_leader_at_a_time(env: &Env) {
    let minute = seconds(60);
    assert!(env.store.lead("task", minute).await.unwrap());
    assert!(env.store.lead("task", minute).await.unwrap(), "the task is kept");
    if env.store.broker_id() == env.other.broker_id() {
        return; // the store supports one broker
    }
    assert!(!env.other.lead("task", minute).await.unwrap(), "another broker has the task");
    assert!(env.other.lead("another", minute).await.unwrap());
    env.pass(seconds(61));
    assert!(env.other.lead("task", minute).await.unwrap(), "the time has ended");
    assert!(!env.store.lead("task", minute).await.unwrap());
    assert!(!env.other.lead("task", seconds(0)).await.unwrap());
    assert!(env.store.lead("task", minute).await.unwrap(), "the task was given up");
}

pub async fn a_queue_may_come_twice_in_a_change_of_totals(env: &Env) {
    let one = Totals { pushed: 1, ..Totals::default() };
    env.store.add_totals(vec![(name("a"), one), (name("a"), one)]).await.unwrap();
    assert_eq!(env.store.totals(&name("a")).await.unwrap().pushed, 2);
}

pub async fn the_store_responds_and_describes_itself(env: &Env) {
    env.store.ping().await.unwrap();
    assert!(!env.store.describe().is_empty());
    let before = env.now();
    env.pass(seconds(1_000));
    assert!(env.store.now() >= before + seconds(1_000));
    assert!(env.other.now() >= before + seconds(1_000));
}

pub async fn a_sound_queue_needs_no_upkeep(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..5).map(|n| keyed(&n.to_string(), "k")).collect()).await;
    let delivery = env.take_one(&queue).await;
    env.upkeep().await;
    env.commit_one(&queue, &delivery).await;
    env.upkeep().await;
    assert!(env.store.unblocked().now_or_never().is_none());
    assert_eq!(env.store.depth(&queue).await.unwrap().blocked, 3);
}

pub async fn an_abandoned_call_does_no_harm(env: &Env) {
    let queue = env.queue("q").await;
    for n in 0..30 {
        let push = env.store.push(vec![push_of(&queue, dedup(&n.to_string(), &n.to_string()))]);
        // The future is dropped as soon as it first has to wait.
        let _ = tokio::time::timeout(std::time::Duration::ZERO, push).await;
    }
    // When the pushes are repeated, each item exists once.
    for n in 0..30 {
        env.push_one(&queue, dedup(&n.to_string(), &n.to_string())).await;
    }
    let mut got: Vec<u32> = env.drain(&queue).await.iter().map(|n| n.parse().unwrap()).collect();
    got.sort_unstable();
    assert_eq!(got, (0..30).collect::<Vec<_>>());
}
