//! Operations: each is run by one broker at a time, and its progress is kept.

use super::{Env, env::*};
use crate::{
    domain::{ItemFilter, ItemState, OperationId, Timestamp},
    store::{Advance, Claim, Created, Operation, OperationState, RedriveFilter, Selection, Work},
};

const CLAIM: std::time::Duration = seconds(10);

fn operation(env: &Env, number: u8, work: Work) -> Operation {
    let now = env.now();
    Operation {
        id: OperationId([number; 12]),
        work,
        dry_run: number % 2 == 1,
        started_by: "somebody".to_owned(),
        create_time: now,
        total: 7,
        state: OperationState::Running,
        processed: 0,
        error: String::new(),
        update_time: now,
        claim: None,
    }
}

fn purge(env: &Env, number: u8) -> Operation {
    operation(env, number, Work::Purge { queue: name("q") })
}

fn claim(number: u32) -> Claim {
    Claim { broker: [200, 1, 2, 3], number }
}

fn advance(processed: u64, state: OperationState) -> Advance {
    Advance { processed, state, error: String::new() }
}

async fn create(env: &Env, operation: &Operation) {
    let created = env.store.create_operation(operation).await.unwrap();
    assert_eq!(created, Created::New(operation.clone()));
}

async fn listed(env: &Env) -> Vec<u8> {
    let all = env.other.list_operations(None, 1_000).await.unwrap();
    all.iter().map(|operation| operation.id.0[0]).collect()
}

pub async fn operations_are_kept_as_they_were_started(env: &Env) {
    let works = [
        Work::Purge { queue: name("q") },
        Work::Redrive {
            queue: name("q.dead"),
            to: Some(name("q")),
            filter: RedriveFilter { reason_contains: "why".to_owned(), ..Default::default() },
            max_items: 5,
            rate: 3,
        },
        Work::Replay {
            queue: name("q"),
            selection: Selection::Processed { start: Timestamp(0), end: env.now() },
            max_items: 0,
        },
        Work::Delete {
            queue: name("q"),
            state: Some(ItemState::Delayed),
            filter: ItemFilter { payload_contains: "x".into(), ..Default::default() },
            max_items: 1,
            rate: 0,
        },
    ];
    for (number, work) in works.into_iter().enumerate() {
        let operation = operation(env, number as u8 + 1, work);
        create(env, &operation).await;
        let there = env.other.get_operation(operation.id).await.unwrap();
        assert_eq!(there.as_ref(), Some(&operation));
        let again = Operation { total: 9, ..operation.clone() };
        let existing = env.other.create_operation(&again).await.unwrap();
        assert_eq!(existing, Created::Existing(operation));
        env.pass(seconds(1));
    }
    assert_eq!(env.other.get_operation(OperationId([99; 12])).await.unwrap(), None);
    assert_eq!(listed(env).await, [4, 3, 2, 1], "the newest first");
    let page = env.other.list_operations(None, 2).await.unwrap();
    let next = env.other.list_operations(Some(page[1].place()), 2).await.unwrap();
    let last = env.other.list_operations(Some(next[1].place()), 2).await.unwrap();
    assert_eq!((next[0].id.0[0], next[1].id.0[0], last.len()), (2, 1, 0));
    assert_eq!(env.store.running_operations().await.unwrap(), 4);
}

pub async fn operations_of_the_same_moment_are_all_listed(env: &Env) {
    let one = purge(env, 1);
    for number in 1..=9 {
        create(env, &Operation { id: OperationId([number; 12]), ..one.clone() }).await;
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = env.store.list_operations(after, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.place());
        found.extend(page.iter().map(|operation| operation.id.0[0]));
    }
    assert_eq!(found, [9, 8, 7, 6, 5, 4, 3, 2, 1]);
}

pub async fn one_broker_runs_an_operation(env: &Env) {
    create(env, &purge(env, 1)).await;
    env.pass(seconds(1));
    create(env, &purge(env, 2)).await;
    let first = env.store.claim_operation(claim(1), CLAIM).await.unwrap().unwrap();
    assert_eq!((first.id.0[0], first.claim), (1, Some(claim(1))), "the oldest");
    let second = env.other.claim_operation(claim(2), CLAIM).await.unwrap().unwrap();
    assert_eq!((second.id.0[0], second.claim), (2, Some(claim(2))));
    assert_eq!(env.store.claim_operation(claim(3), CLAIM).await.unwrap(), None);
    // A claim that is prolonged lasts, the other one ends.
    env.pass(seconds(6));
    let now = env.now();
    let running = advance(3, OperationState::Running);
    let told = env.store.advance_operation(first.id, claim(1), &running, CLAIM).await.unwrap();
    let told = told.unwrap();
    assert_eq!((told.processed, told.state), (3, OperationState::Running));
    assert!(told.update_time >= now);
    env.pass(seconds(6));
    let taken = env.store.claim_operation(claim(4), CLAIM).await.unwrap().unwrap();
    assert_eq!((taken.id, taken.claim), (second.id, Some(claim(4))));
    assert_eq!(env.store.claim_operation(claim(5), CLAIM).await.unwrap(), None);
    // A claim that is given up is free at once.
    let zero = seconds(0);
    env.store.advance_operation(first.id, claim(1), &running, zero).await.unwrap().unwrap();
    let taken = env.other.claim_operation(claim(6), CLAIM).await.unwrap().unwrap();
    assert_eq!((taken.id, taken.processed), (first.id, 3), "the next broker goes on from there");
}

pub async fn racing_brokers_claim_an_operation_once(env: &Env) {
    create(env, &purge(env, 1)).await;
    let claims = (0..16).map(|number| {
        let store = if number % 2 == 0 { &env.store } else { &env.other };
        store.claim_operation(claim(number), CLAIM)
    });
    let claimed = futures_util::future::join_all(claims).await;
    assert_eq!(
        claimed.into_iter().filter(|claimed| claimed.as_ref().unwrap().is_some()).count(),
        1
    );
}

pub async fn a_broker_that_lost_its_claim_changes_nothing(env: &Env) {
    let of = purge(env, 1);
    create(env, &of).await;
    assert!(env.store.claim_operation(claim(1), CLAIM).await.unwrap().is_some());
    env.pass(seconds(11));
    let taken = env.other.claim_operation(claim(2), CLAIM).await.unwrap().unwrap();
    for state in [OperationState::Running, OperationState::Failed, OperationState::Succeeded] {
        let late = Advance { processed: 99, state, error: "late".to_owned() };
        let told = env.store.advance_operation(of.id, claim(1), &late, CLAIM).await.unwrap();
        assert_eq!(told, None, "{state:?}");
    }
    assert_eq!(env.store.get_operation(of.id).await.unwrap(), Some(taken));
    let nobody = OperationId([9; 12]);
    let done = advance(1, OperationState::Succeeded);
    assert_eq!(env.store.advance_operation(nobody, claim(1), &done, CLAIM).await.unwrap(), None);
}

pub async fn an_operation_that_has_ended_is_not_run_again(env: &Env) {
    let of = purge(env, 1);
    create(env, &of).await;
    env.store.claim_operation(claim(1), CLAIM).await.unwrap().unwrap();
    let failed =
        Advance { processed: 5, state: OperationState::Failed, error: "\"why\" $x".to_owned() };
    // An answer may be lost, and what was said is said again, or late.
    for (told, processed) in [(&failed, 5), (&failed, 5), (&advance(2, OperationState::Running), 5)]
    {
        let now = env.store.advance_operation(of.id, claim(1), told, seconds(0)).await.unwrap();
        let now = now.unwrap();
        let is = (now.state, now.error.as_str(), now.processed);
        assert_eq!(is, (OperationState::Failed, "\"why\" $x", processed));
    }
    assert_eq!(env.store.claim_operation(claim(2), CLAIM).await.unwrap(), None);
    assert_eq!(env.store.running_operations().await.unwrap(), 0);
    let cancelled = env.store.cancel_operation(of.id).await.unwrap().unwrap();
    assert_eq!(cancelled.state, OperationState::Failed, "it stays as it ended");
}

pub async fn a_cancelled_operation_keeps_what_its_broker_did_before_it_knew(env: &Env) {
    let of = purge(env, 1);
    create(env, &of).await;
    env.store.claim_operation(claim(1), CLAIM).await.unwrap().unwrap();
    let cancelled = env.other.cancel_operation(of.id).await.unwrap().unwrap();
    assert_eq!((cancelled.state, cancelled.processed), (OperationState::Cancelled, 0));
    let done = advance(4, OperationState::Succeeded);
    let told = env.store.advance_operation(of.id, claim(1), &done, CLAIM).await.unwrap().unwrap();
    assert_eq!((told.state, told.processed), (OperationState::Cancelled, 4));
    env.pass(seconds(11));
    assert_eq!(env.store.claim_operation(claim(2), CLAIM).await.unwrap(), None);
    assert_eq!(env.store.cancel_operation(OperationId([9; 12])).await.unwrap(), None);
}

pub async fn operations_that_ended_long_ago_are_deleted(env: &Env) {
    for number in 1..=6 {
        create(env, &purge(env, number)).await;
        if number < 6 {
            env.store.cancel_operation(OperationId([number; 12])).await.unwrap();
        }
        env.pass(seconds(1));
    }
    let third = env.store.get_operation(OperationId([3; 12])).await.unwrap().unwrap();
    env.store.delete_operations(third.update_time, 100).await.unwrap();
    assert_eq!(listed(env).await, [6, 5, 4, 3], "of that time or later");
    env.store.delete_operations(Timestamp(0), 1).await.unwrap();
    assert_eq!(listed(env).await, [6, 5], "the one that ended last, and the one that runs");
    env.store.delete_operations(env.now(), 0).await.unwrap();
    assert_eq!(listed(env).await, [6]);
}
