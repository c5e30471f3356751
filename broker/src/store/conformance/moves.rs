//! Move, and commit-and-push: from one queue to another in one step.

use super::{Env, env::*};
use crate::{
    domain::{GroupName, ItemState, Limit, Outcome, Priority},
    store::Move,
};

pub async fn a_moved_item_keeps_its_content(env: &Env) {
    let (from, to) = (env.queue("from").await, env.queue("to").await);
    let new = crate::domain::NewItem {
        headers: [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())].into(),
        content_type: "text/plain".to_owned(),
        ttl: Some(seconds(1_000)),
        ..urgent("x", 3)
    };
    let pushed = env.push_one(&from, new).await;
    let first = env.take_one(&from).await;
    env.fail(&from, &first).await;
    let second = env.take_one(&from).await;
    let before = env.get(&from, pushed.id).await;
    assert_eq!((before.attempt, before.deliveries), (2, 2));

    assert_eq!(env.move_one(&from, &second, &to).await, Outcome::Ok);
    assert_eq!(env.store.get_item(&from, pushed.id).await.unwrap(), None);
    let moved = env.get(&to, pushed.id).await;
    assert_eq!(moved.state, ItemState::Ready);
    assert_eq!((moved.attempt, moved.deliveries), (1, 2));
    assert_eq!((&moved.payload, &moved.headers), (&before.payload, &before.headers));
    assert_eq!((&moved.content_type, moved.priority), (&before.content_type, before.priority));
    assert_eq!((moved.create_time, moved.expire_time), (before.create_time, before.expire_time));
    assert_eq!((moved.queue.clone(), moved.origin_queue.clone()), (to.name.clone(), None));

    // The receipt is used up in both queues.
    assert_eq!(env.move_one(&from, &second, &to).await, Outcome::LeaseLost);
    assert_eq!(env.commit_one(&from, &second).await, Outcome::LeaseLost);
    let third = env.take_one(&to).await;
    assert_eq!((third.item.attempt, third.item.deliveries), (1, 3));
    assert_eq!(env.commit_one(&to, &third).await, Outcome::Ok);
    assert_eq!(env.move_one(&from, &second, &to).await, Outcome::Gone);
}

pub async fn a_move_may_change_the_content(env: &Env) {
    let (from, to) = (env.queue("from").await, env.queue("to").await);
    let new = crate::domain::NewItem {
        headers: [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())].into(),
        content_type: "text/plain".to_owned(),
        ..item("x")
    };
    env.push_one(&from, new).await;
    let delivery = env.take_one(&from).await;
    let change = Move {
        payload: Some("[1, 2, 3]".into()),
        content_type: Some("application/json".to_owned()),
        headers: [("b".to_owned(), "changed".to_owned()), ("c".to_owned(), "3".to_owned())].into(),
        priority: Some(Priority::parse("priority", 8).unwrap()),
        eligible_time: env.now() + seconds(60),
        ..move_of(&from, &delivery, &to)
    };
    assert_eq!(env.store.move_items(vec![change]).await.unwrap(), [Outcome::Ok]);
    let moved = env.get(&to, delivery.item.id).await;
    assert_eq!(moved.state, ItemState::Delayed);
    assert_eq!(moved.priority.level(), 8);
    assert!(env.drain(&to).await.is_empty());
    env.pass(seconds(61));
    let item = env.take_one(&to).await.item;
    assert_eq!(payload(&item), "[1, 2, 3]");
    assert_eq!(item.content_type, "application/json");
    let headers: Vec<_> = item.headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(headers, [("a", "1"), ("b", "changed"), ("c", "3")]);
}

pub async fn a_move_changes_nothing_but_what_it_names(env: &Env) {
    let (from, to) = (env.queue("from").await, env.queue("to").await);
    let new = |payload: &str| crate::domain::NewItem {
        headers: [("a".to_owned(), "1".to_owned())].into(),
        content_type: "text/plain".to_owned(),
        ..item(payload)
    };
    env.push(&from, vec![new("payload"), new("type"), new("headers")]).await;
    let taken = env.take(&from, 3).await;
    let plain = |at: usize| move_of(&from, &taken[at], &to);
    let changes = vec![
        Move { payload: Some("new".into()), ..plain(0) },
        Move { content_type: Some("new".to_owned()), ..plain(1) },
        Move { headers: [("a".to_owned(), "new".to_owned())].into(), ..plain(2) },
    ];
    assert_eq!(env.store.move_items(changes).await.unwrap(), [Outcome::Ok; 3]);
    for (at, expected) in
        [("new", "text/plain", "1"), ("type", "new", "1"), ("headers", "text/plain", "new")]
            .into_iter()
            .enumerate()
    {
        let item = env.get(&to, taken[at].item.id).await;
        assert_eq!((&*payload(&item), &*item.content_type, &*item.headers["a"]), expected);
    }
}

pub async fn an_empty_payload_is_a_new_payload(env: &Env) {
    let (from, to) = (env.queue("from").await, env.queue("to").await);
    env.push_plain(&from, &["x"]).await;
    let delivery = env.take_one(&from).await;
    let change = Move { payload: Some([].as_slice().into()), ..move_of(&from, &delivery, &to) };
    assert_eq!(env.store.move_items(vec![change]).await.unwrap(), [Outcome::Ok]);
    assert!(env.take_one(&to).await.item.payload.is_empty());
}

pub async fn move_results_are_exact_in_a_mixed_batch(env: &Env) {
    let (from, a, b) = (env.queue("from").await, env.queue("a").await, env.queue("b").await);
    env.push(&from, (0..20).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&from, 20).await;
    for n in (0..20).step_by(4) {
        assert_eq!(env.commit_one(&from, &taken[n]).await, Outcome::Ok);
        assert_eq!(env.fail(&from, &taken[n + 1]).await, Outcome::Ok);
    }
    let moves = taken.iter().enumerate().map(|(n, delivery)| Move {
        payload: Some(format!("{n} moved").into()),
        ..move_of(&from, delivery, if n % 4 == 2 { &a } else { &b })
    });
    let outcomes = env.store.move_items(moves.collect()).await.unwrap();
    let expected = [Outcome::Gone, Outcome::LeaseLost, Outcome::Ok, Outcome::Ok];
    assert_eq!(outcomes, expected.repeat(5));
    let mut moved = env.drain(&a).await;
    moved.sort();
    assert_eq!(moved, ["10 moved", "14 moved", "18 moved", "2 moved", "6 moved"]);
    assert_eq!(env.drain(&b).await.len(), 5);
    let mut left = env.drain(&from).await;
    left.sort();
    assert_eq!(left, ["1", "13", "17", "5", "9"]);
}

pub async fn racing_moves_win_once(env: &Env) {
    let (queue, to) = (env.queue("q").await, env.queue("to").await);
    env.push(&queue, (0..50).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 50).await;
    let racers: Vec<_> = [&env.store, &env.other, &env.store, &env.other]
        .map(|store| {
            let moves = taken.iter().map(|delivery| move_of(&queue, delivery, &to)).collect();
            let store = store.clone();
            tokio::spawn(async move { store.move_items(moves).await.unwrap() })
        })
        .into();
    let mut wins = vec![0; 50];
    for racer in racers {
        for (wins, outcome) in wins.iter_mut().zip(racer.await.unwrap()) {
            assert!(matches!(outcome, Outcome::Ok | Outcome::LeaseLost), "{outcome:?}");
            *wins += usize::from(outcome == Outcome::Ok);
        }
    }
    assert_eq!(wins, vec![1; 50]);
    assert_eq!(env.take(&to, 100).await.len(), 50);
}

pub async fn a_move_to_its_own_queue_takes_a_new_sequence_number(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push(&queue, vec![keyed("1", "k"), keyed("2", "k")]).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.move_one(&queue, &delivery, &queue).await, Outcome::Ok);
    let moved = env.get(&queue, pushed[0].id).await;
    assert!(moved.sequence > pushed[1].sequence);
    for expected in ["2", "1"] {
        let taken = env.take(&queue, 5).await;
        assert_eq!(payloads(&taken), [expected]);
        env.commit(&queue, &taken).await;
    }
}

pub async fn a_moved_item_gets_a_sequence_number_of_its_new_queue(env: &Env) {
    let numbered = env.queue_with("numbered", |queue| queue.sequenced = true).await;
    let plain = env.queue("plain").await;
    let last = env.push_plain(&numbered, &["a", "b", "c"]).await[2].sequence;
    let pushed = env.push_one(&plain, item("x")).await;
    let delivery = env.take_one(&plain).await;
    env.move_one(&plain, &delivery, &numbered).await;
    assert!(env.get(&numbered, pushed.id).await.sequence > last);
    let taken = env.take(&numbered, 9).await;
    let delivery = taken.iter().find(|delivery| delivery.item.id == pushed.id).unwrap();
    env.move_one(&numbered, delivery, &plain).await;
    assert_eq!(env.get(&plain, pushed.id).await.sequence, None);
}

pub async fn a_lease_that_lapses_after_a_move_fails_in_the_new_queue(env: &Env) {
    let dead = env.queue("dead").await;
    let set = |queue: &mut crate::domain::Queue| {
        queue.max_attempts = Some(Limit::of(1));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    let from = env.queue("from").await;
    let to = env.queue_with("to", set).await;
    env.push_plain(&from, &["x"]).await;
    let delivery = env.take_one(&from).await;
    env.move_one(&from, &delivery, &to).await;
    let delivery = env.take_one(&to).await;
    env.pass(LEASE + seconds(1));
    assert!(env.drain(&to).await.is_empty());
    let item = env.get(&dead, delivery.item.id).await;
    assert_eq!(item.origin_queue.as_ref(), Some(&to.name));
    // When a consumer of the dead letters moves an item, that item is like any other.
    let delivery = env.take_one(&dead).await;
    env.move_one(&dead, &delivery, &from).await;
    assert_eq!(env.get(&from, delivery.item.id).await.origin_queue, None);
}

pub async fn a_commit_and_its_pushes_are_one_step(env: &Env) {
    let from = env.queue("from").await;
    let near = env.queue("near").await;
    let far = env
        .queue_with("far", |queue| queue.group = GroupName::parse("group", "far").unwrap())
        .await;
    env.push_plain(&from, &["x"]).await;
    let delivery = env.take_one(&from).await;
    let pushes = || {
        vec![
            push_of(&near, item("1")),
            push_of(&far, dedup("2", "d")),
            push_of(&near, keyed("3", "k")),
            push_of(&near, keyed("4", "k")),
            push_of(&far, dedup("5", "d")),
        ]
    };
    let (outcome, pushed) =
        env.store.commit_and_push(held(&from, &delivery), pushes()).await.unwrap();
    assert_eq!(outcome, Outcome::Ok);
    let flags: Vec<bool> = pushed.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(flags, [false, false, false, false, true]);
    assert_eq!(pushed[4].id, pushed[1].id);
    assert!(env.list(&from, None).await.is_empty());
    assert_eq!(env.drain(&near).await, ["1", "3"]);
    assert_eq!(env.drain(&far).await, ["2"]);
    assert_eq!(env.store.depth(&near).await.unwrap().blocked, 1);

    // A repetition after an unknown outcome changes nothing.
    let again = env.store.commit_and_push(held(&from, &delivery), pushes()).await.unwrap();
    assert_eq!(again, (Outcome::Gone, Vec::new()));
    assert_eq!(env.store.depth(&near).await.unwrap().unsettled(), 3);
}

pub async fn a_commit_and_push_keeps_history_and_unblocks_the_next_item(env: &Env) {
    let from = env.queue_with("from", |queue| queue.retention = seconds(100)).await;
    env.push(&from, vec![keyed("1", "k"), keyed("2", "k")]).await;
    let delivery = env.take_one(&from).await;
    let pushes = vec![push_of(&from, keyed("3", "k"))];
    let (outcome, _) = env.store.commit_and_push(held(&from, &delivery), pushes).await.unwrap();
    assert_eq!(outcome, Outcome::Ok);
    assert_eq!(env.get(&from, delivery.item.id).await.state, ItemState::Processed);
    let taken = env.take(&from, 5).await;
    assert_eq!(payloads(&taken), ["2"]);
    env.commit(&from, &taken).await;
    assert_eq!(env.drain(&from).await, ["3"]);
}
