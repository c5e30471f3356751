//! Push: items are stored as given, durably, and are eligible at the right time.

use futures_util::future::{join_all, try_join_all};

use super::{Broker, Env, env::*};
use crate::{
    domain::{
        ConsumerName, DedupId, Eligibility, GroupName, ItemState, NewItem, OrderingKey, Outcome,
        Timestamp,
    },
    store::{Appeared, Push},
};

pub async fn a_pushed_item_is_stored_unchanged(env: &Env) {
    let queue = env.queue("q").await;
    let before = env.now();
    let given = NewItem {
        payload: vec![0, 159, 146, 150, b'x'].into(),
        content_type: "application/json; charset=\"utf-8\"".to_owned(),
        headers: [("a".to_owned(), "1".to_owned()), ("$b.c".to_owned(), "ü \" \\ \n".to_owned())]
            .into(),
        ordering_key: OrderingKey::new("customer $7"),
        dedup_id: DedupId::new("order.1'\""),
        ttl: Some(seconds(3_600)),
        ..urgent("", 7)
    };
    let producer = ConsumerName::parse("producer", "shop-1").unwrap();
    let push = Push { producer: Some(producer.clone()), ..push_of(&queue, given.clone()) };
    let pushed = env.store.push(vec![push]).await.unwrap()[0];
    assert!(!pushed.deduplicated);

    let stored = env.get(&queue, pushed.id).await;
    assert_eq!(stored.id, pushed.id);
    assert_eq!(stored.queue, queue.name);
    assert_eq!(stored.payload, given.payload);
    assert_eq!(stored.content_type, given.content_type);
    assert_eq!(stored.headers, given.headers);
    assert_eq!(stored.priority, given.priority);
    assert_eq!(stored.ordering_key, given.ordering_key);
    assert_eq!(stored.dedup_id, given.dedup_id);
    assert_eq!(stored.state, ItemState::Ready);
    assert_eq!((stored.attempt, stored.deliveries), (1, 0));
    assert_eq!(stored.sequence, pushed.sequence);
    assert_eq!(stored.producer, Some(producer));
    assert_eq!(stored.consumer, None);
    assert_eq!(stored.eligible_time, pushed.eligible_time);
    assert!(stored.create_time >= before && stored.create_time <= env.now());
    assert_eq!(stored.expire_time, Some(stored.create_time + seconds(3_600)));
    assert_eq!(stored.process_time, None);
    assert_eq!(stored.last_reason, "");
    assert_eq!(stored.origin_queue, None);

    let delivered = env.take_one(&queue).await.item;
    assert_eq!(delivered.payload, given.payload);
    assert_eq!(delivered.headers, given.headers);
    assert_eq!(delivered.content_type, given.content_type);
    assert_eq!(delivered.producer, stored.producer);
}

pub async fn an_empty_item_is_an_item(env: &Env) {
    let queue = env.queue("q").await;
    env.push_one(&queue, NewItem::default()).await;
    let delivery = env.take_one(&queue).await;
    assert!(delivery.item.payload.is_empty());
    assert!(delivery.item.headers.is_empty());
    assert_eq!(delivery.item.content_type, "");
}

pub async fn an_empty_call_is_no_error(env: &Env) {
    assert_eq!(env.store.push(Vec::new()).await.unwrap(), []);
    assert_eq!(env.store.commit(Vec::new()).await.unwrap(), []);
    assert_eq!(env.store.rollback(Vec::new()).await.unwrap(), []);
    assert_eq!(env.store.extend(Vec::new()).await.unwrap(), []);
    assert_eq!(env.store.move_items(Vec::new()).await.unwrap(), []);
    assert_eq!(env.store.holds(Vec::new()).await.unwrap(), [false; 0]);
    env.store.add_totals(Vec::new()).await.unwrap();
}

pub async fn concurrent_pushes_into_queues_of_several_groups(env: &Env) {
    let far = |queue: &mut crate::domain::Queue| {
        queue.group = GroupName::parse("group", "far").unwrap();
    };
    let queues = [env.queue("a").await, env.queue("b").await, env.queue_with("c", far).await];
    let pushes = (0..12).map(|n| {
        let queue = &queues[n % queues.len()];
        env.store.push(vec![push_of(queue, item("x")), push_of(queue, item("y"))])
    });
    let pushed = try_join_all(pushes).await.unwrap();
    for (n, queue) in queues.iter().enumerate() {
        let taken = env.take(queue, 100).await;
        let ids: Vec<_> = taken.iter().map(|delivery| delivery.item.id).collect();
        let calls = pushed.iter().skip(n).step_by(queues.len());
        assert_eq!(ids, calls.flatten().map(|pushed| pushed.id).collect::<Vec<_>>());
        assert!(taken.iter().all(|delivery| delivery.receipt.group == queue.group));
    }
}

pub async fn successful_pushes_are_visible_to_the_other_broker(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push_one(&queue, item("x")).await;
    assert!(env.other.get_item(&queue, pushed.id).await.unwrap().is_some());
    let appeared = Appeared::of(pushed.eligible_time);
    let reserved = env.other.reserve_hearing(&queue, &[demand(1)], appeared).await.unwrap();
    assert_eq!(reserved.deliveries[0].1.item.id, pushed.id);
    // The lease is valid for both brokers.
    assert!(env.reserve(&queue, &[demand(1)]).await.deliveries.is_empty());
}

pub async fn concurrent_pushes_each_get_their_own_result(env: &Env) {
    let queue = env.queue("q").await;
    let tasks: Vec<_> = (0..40)
        .map(|n| {
            let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
            let queue = queue.clone();
            tokio::spawn(async move {
                let items = vec![
                    push_of(&queue, item(&format!("{n}a"))),
                    push_of(&queue, item(&format!("{n}b"))),
                ];
                let pushed = store.push(items).await.unwrap();
                for (pushed, letter) in pushed.iter().zip(["a", "b"]) {
                    let stored = store.get_item(&queue, pushed.id).await.unwrap().unwrap();
                    assert_eq!(payload(&stored), format!("{n}{letter}"));
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(env.store.depth(&queue).await.unwrap().ready, 80);
}

pub async fn calls_that_one_task_starts_are_stored_in_that_order(env: &Env) {
    // These are enough calls for several writes, which may run concurrently.
    for (name, sequenced, calls, of_a_call) in
        [("plain", false, 200, 25), ("numbered", true, 50, 4)]
    {
        let queue = env.queue_with(name, |queue| queue.sequenced = sequenced).await;
        let batch = |call: usize| -> Vec<String> {
            (0..of_a_call).map(|number| format!("{call}.{number}")).collect()
        };
        let push = |call: usize| {
            let items = batch(call).iter().map(|text| push_of(&queue, item(text))).collect();
            env.store.push(items)
        };
        // No call returns before the next one is polled. There are more calls than a task may poll
        // in one go.
        let pushed = tokio::task::unconstrained(join_all((0..calls).map(push))).await;
        let pushed: Vec<_> = pushed.into_iter().flat_map(Result::unwrap).collect();
        if sequenced {
            assert!(pushed.is_sorted_by(|a, b| a.sequence < b.sequence), "{pushed:?}");
        }
        let expected: Vec<String> = (0..calls).flat_map(batch).collect();
        assert!(env.drain(&queue).await == expected, "{name} items are out of order");
    }
}

pub async fn nothing_is_delivered_before_its_time(env: &Env) {
    let queue = env.queue("q").await;
    let now = env.now();
    let pushed = env.push_one(&queue, delayed("delay", seconds(20))).await;
    assert!(pushed.eligible_time.unwrap() >= now + seconds(20));
    let timed = NewItem { eligibility: Eligibility::At(now + seconds(40)), ..item("time") };
    assert_eq!(env.push_one(&queue, timed).await.eligible_time, Some(now + seconds(40)));
    assert_eq!(env.get(&queue, pushed.id).await.state, ItemState::Delayed);

    assert!(env.drain(&queue).await.is_empty());
    assert_eq!(env.next_eligible(&queue).await, pushed.eligible_time);
    env.pass(seconds(10));
    assert!(env.drain(&queue).await.is_empty());
    env.pass(seconds(11));
    assert_eq!(env.get(&queue, pushed.id).await.state, ItemState::Ready);
    assert_eq!(env.drain(&queue).await, ["delay"]);
    env.pass(seconds(20));
    assert_eq!(env.drain(&queue).await, ["time"]);
}

pub async fn a_past_eligible_time_means_now(env: &Env) {
    let queue = env.queue("q").await;
    let past = NewItem { eligibility: Eligibility::At(Timestamp(5)), ..item("x") };
    env.push_one(&queue, past).await;
    assert_eq!(env.drain(&queue).await, ["x"]);
}

pub async fn nothing_is_delivered_after_its_expiry(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.default_ttl = Some(seconds(100))).await;
    let short = env.push_one(&queue, mortal("short", seconds(10))).await;
    let usual = env.push_one(&queue, item("usual")).await;
    let long = env.push_one(&queue, mortal("long", seconds(1_000))).await;
    let end = |item: crate::domain::Item| item.create_time.until(item.expire_time.unwrap());
    assert_eq!(end(env.get(&queue, short.id).await), seconds(10));
    assert_eq!(end(env.get(&queue, usual.id).await), seconds(100));
    assert_eq!(end(env.get(&queue, long.id).await), seconds(1_000));

    env.pass(seconds(11));
    assert_eq!(env.store.get_item(&queue, short.id).await.unwrap(), None);
    assert_eq!(env.list(&queue, None).await.len(), 2);
    assert_eq!(env.store.depth(&queue).await.unwrap().ready, 2);
    let (mut expired, mut taken) = (0, Vec::new());
    // A reserve that has removed many expired items leaves the items behind them to the next
    // reserve.
    while taken.is_empty() {
        let reserved = env.reserve(&queue, &[demand(1)]).await;
        expired += reserved.expired;
        taken.extend(reserved.deliveries);
        assert!(reserved.more, "\"long\" is still to be found");
    }
    assert_eq!((expired, payload(&taken[0].1.item).as_str()), (1, "usual"));
    // A lease that lapses after the item's expiry does not make the item ready again.
    env.pass(seconds(100));
    assert_eq!(env.drain(&queue).await, ["long"]);
    assert!(!env.delete(&queue, usual.id).await);
}

pub async fn a_receipt_of_an_expired_item_is_gone(env: &Env) {
    let queue = env.queue("q").await;
    let other = env.queue("other").await;
    for n in 0..5 {
        env.push_one(&queue, mortal(&n.to_string(), seconds(10))).await;
    }
    let taken = env.take(&queue, 5).await;
    let until = env.now() + seconds(99);
    assert_eq!(env.extend(vec![held(&queue, &taken[0])], until).await, [Outcome::Ok]);
    env.pass(seconds(11));
    assert_eq!(env.store.holds(vec![held(&queue, &taken[0])]).await.unwrap(), [false]);
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Outcome::Gone);
    assert_eq!(env.fail(&queue, &taken[1]).await, Outcome::Gone);
    assert_eq!(env.bury(&queue, &taken[2], None).await, Outcome::Gone);
    assert_eq!(env.move_one(&queue, &taken[3], &other).await, Outcome::Gone);
    let until = env.now() + seconds(50);
    assert_eq!(env.extend(vec![held(&queue, &taken[4])], until).await, [Outcome::Gone]);
    assert_eq!(env.store.depth(&other).await.unwrap().unsettled(), 0);
}

/// At no time is a later item visible and an earlier one not.
pub async fn calls_that_one_task_starts_become_visible_in_that_order(env: &Env) {
    const CALLS: usize = 60;
    const EACH: usize = 50;
    let queue = env.queue("q").await;
    let calls = (0..CALLS).map(|call| {
        let items = (0..EACH).map(|n| push_of(&queue, item(&(call * EACH + n).to_string())));
        env.store.push(items.collect())
    });
    let pushing = async {
        for answer in join_all(calls).await {
            answer.unwrap();
        }
    };
    let taking = async {
        let mut taken = Vec::new();
        while taken.len() < CALLS * EACH {
            let reserved = env.store.reserve(&queue, &[demand(500)]).await.unwrap();
            taken.extend(reserved.deliveries.into_iter().map(|(_, delivery)| delivery));
        }
        taken
    };
    let ((), taken) = tokio::join!(pushing, taking);
    for (n, payload) in payloads(&taken).into_iter().enumerate() {
        assert_eq!(payload, n.to_string(), "at this position");
    }
}

pub async fn sequence_numbers_grow_in_the_order_of_results(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.sequenced = true).await;
    let plain = env.queue("plain").await;
    let mut last = None;
    for n in 0..10 {
        let items = vec![push_of(&queue, item("a")), push_of(&queue, item("b"))];
        let store = if n % 2 == 0 { &env.store } else { &env.other };
        for pushed in store.push(items).await.unwrap() {
            assert!(pushed.sequence > last);
            last = pushed.sequence;
            assert_eq!(env.get(&queue, pushed.id).await.sequence, last);
        }
    }
    assert_eq!(env.push_one(&plain, item("x")).await.sequence, None);
    assert!(env.push_one(&plain, keyed("x", "k")).await.sequence > None);
}

pub async fn a_mark_stands_between_what_was_pushed_here_and_what_will_be(env: &Env) {
    let queue = env.queue("q").await;
    let several = || (0..5).map(|n| push_of(&queue, item(&n.to_string())));
    let push = async |through: &Broker| {
        let mut batch: Vec<Push> = several().collect();
        batch.push(push_of(&queue, keyed("in order", "key")));
        batch.push(push_of(&queue, urgent("urgent", 9)));
        let mut pushed = through.push(batch).await.unwrap();
        let alone = Push { id: through.choose_id(), ..push_of(&queue, item("alone")) };
        pushed.append(&mut through.push(vec![alone]).await.unwrap());
        pushed
    };
    let elsewhere = push(&env.other).await;
    let before = push(&env.store).await;
    let mark = env.store.mark();
    let after = push(&env.store).await;
    assert!(!before.iter().any(|pushed| mark.is_before(pushed.id)), "{mark:?} {before:?}");
    assert!(after.iter().all(|pushed| mark.is_before(pushed.id)), "{mark:?} {after:?}");
    let others = elsewhere.into_iter().chain(push(&env.other).await);
    let is_here = env.store.broker_id() == env.other.broker_id();
    assert!(is_here || !others.into_iter().any(|pushed| mark.is_before(pushed.id)), "{mark:?}");
}
