//! Settles: exact results per receipt, and stale receipts that change nothing.

use super::{Env, env::*};
use crate::{
    domain::{Delivery, ItemState, LeaseToken, Outcome, Receipt},
    store::{EndedDelivery, Extension, Reservation, Rollback, RollbackTo},
};

use Outcome::{Gone, LeaseLost, Ok};

pub async fn a_committed_item_is_gone_for_good(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push_one(&queue, item("x")).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.commit_one(&queue, &delivery).await, Ok);
    assert_eq!(env.commit_one(&queue, &delivery).await, Gone);
    assert_eq!(env.store.get_item(&queue, pushed.id).await.unwrap(), None);
    env.pass(LEASE * 3);
    assert!(env.drain(&queue).await.is_empty());
    assert_eq!(env.store.depth(&queue).await.unwrap(), crate::domain::Depth::default());
}

pub async fn another_broker_can_settle(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b"]).await;
    let taken = env.take(&queue, 2).await;
    assert_eq!(env.other.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Ok]);
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Gone);
    assert_eq!(env.store.holds(vec![held(&queue, &taken[1])]).await.unwrap(), [true]);
}

pub async fn a_lapsed_lease_still_settles(env: &Env) {
    let queue = env.queue("q").await;
    let to = env.queue("to").await;
    env.push_plain(&queue, &["a", "b", "c", "d"]).await;
    let taken = env.take(&queue, 4).await;
    env.pass(LEASE * 2);
    assert_eq!(env.store.holds(vec![held(&queue, &taken[0])]).await.unwrap(), [true]);
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Ok);
    assert_eq!(env.fail(&queue, &taken[1]).await, Ok);
    assert_eq!(env.move_one(&queue, &taken[2], &to).await, Ok);
    let until = env.now() + seconds(60);
    assert_eq!(env.extend(vec![held(&queue, &taken[3])], until).await, [Ok]);
    // An attempt that lapsed and was then rolled back counts once.
    let again = env.take(&queue, 4).await;
    assert_eq!(payloads(&again), ["b"]);
    assert_eq!((again[0].item.attempt, again[0].item.deliveries), (2, 2));
}

pub async fn a_stale_receipt_changes_nothing(env: &Env) {
    let queue = env.queue("q").await;
    let to = env.queue("to").await;
    let pushed = env.push_one(&queue, item("x")).await;
    let stale = env.take_one(&queue).await;
    env.pass(LEASE * 2);
    let fresh = env.take_one(&queue).await;
    let before = env.get(&queue, pushed.id).await;

    assert_eq!(env.store.holds(vec![held(&queue, &stale)]).await.unwrap(), [false]);
    assert_eq!(env.commit_one(&queue, &stale).await, LeaseLost);
    assert_eq!(env.fail(&queue, &stale).await, LeaseLost);
    assert_eq!(env.bury(&queue, &stale, Some("no")).await, LeaseLost);
    assert_eq!(env.move_one(&queue, &stale, &to).await, LeaseLost);
    let until = env.now() + seconds(500);
    assert_eq!(env.extend(vec![held(&queue, &stale)], until).await, [LeaseLost]);
    let pushes = vec![push_of(&to, item("y"))];
    let answer = env.store.commit_and_push(held(&queue, &stale), pushes).await.unwrap();
    assert_eq!(answer, (LeaseLost, Vec::new()));

    assert_eq!(env.get(&queue, pushed.id).await, before);
    assert!(env.list(&to, None).await.is_empty());
    assert_eq!(env.commit_one(&queue, &fresh).await, Ok);
}

pub async fn a_receipt_is_void_after_its_rollback(env: &Env) {
    let queue = env.queue("q").await;
    env.push_one(&queue, item("x")).await;
    let delivery = env.take_one(&queue).await;
    assert_eq!(env.fail(&queue, &delivery).await, Ok);
    assert_eq!(env.commit_one(&queue, &delivery).await, LeaseLost);
    assert_eq!(env.fail(&queue, &delivery).await, LeaseLost);
    assert_eq!(env.store.holds(vec![held(&queue, &delivery)]).await.unwrap(), [false]);
    assert_eq!(env.drain(&queue).await, ["x"]);
}

pub async fn results_are_exact_in_a_mixed_batch(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..60).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 60).await;
    for n in (0..60).step_by(4) {
        assert_eq!(env.commit_one(&queue, &taken[n]).await, Ok);
        assert_eq!(env.fail(&queue, &taken[n + 1]).await, Ok);
        assert!(env.delete(&queue, taken[n + 2].item.id).await);
    }
    let expected = [Gone, LeaseLost, Gone, Ok].repeat(15);
    let until = env.now() + seconds(77);
    let all = || taken.iter().map(|delivery| held(&queue, delivery)).collect::<Vec<_>>();
    assert_eq!(env.extend(all(), until).await, expected);
    let holding: Vec<bool> = expected.iter().map(|outcome| *outcome == Ok).collect();
    assert_eq!(env.store.holds(all()).await.unwrap(), holding);
    assert_eq!(env.commit(&queue, &taken).await, expected);
    let expected = [Gone, LeaseLost, Gone, Gone].repeat(15);
    assert_eq!(env.commit(&queue, &taken).await, expected);
    assert_eq!(env.take(&queue, 60).await.len(), 15);
}

pub async fn a_commit_leaves_the_items_between_those_that_it_names(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b", "c", "d", "e", "f"]).await;
    let taken = env.take(&queue, 6).await;
    let of = |at: &[usize]| at.iter().map(|at| taken[*at].clone()).collect::<Vec<_>>();
    assert_eq!(env.commit(&queue, &of(&[0, 2, 5])).await, [Ok; 3]);
    let left = of(&[1, 3, 4]);
    let held = left.iter().map(|delivery| held(&queue, delivery)).collect();
    assert_eq!(env.store.holds(held).await.unwrap(), [true; 3]);
    // In another order than they lie in.
    assert_eq!(env.commit(&queue, &of(&[4, 3, 1])).await, [Ok; 3]);
    assert_eq!(env.commit(&queue, &taken).await, [Gone; 6]);
}

pub async fn an_expired_and_a_keyed_item_are_settled_by_themselves_among_others(env: &Env) {
    let queue = env.queue("q").await;
    let new =
        vec![item("a"), mortal("b", seconds(10)), keyed("c", "k"), item("d"), keyed("e", "k")];
    env.push(&queue, new).await;
    let taken = env.take(&queue, 5).await;
    assert_eq!(payloads(&taken), ["a", "b", "c", "d"]);
    env.pass(seconds(11));
    assert_eq!(env.commit(&queue, &taken).await, [Ok, Gone, Ok, Ok]);
    assert_eq!(env.commit(&queue, &taken).await, [Gone; 4]);
    assert_eq!(payloads(&env.take(&queue, 5).await), ["e"]);
}

pub async fn rollback_results_are_exact_in_a_mixed_batch(env: &Env) {
    let dead = env.queue("dead").await;
    let queue =
        env.queue_with("q", |queue| queue.dead_letter_queue = Some(dead.name.clone())).await;
    env.push(&queue, (0..40).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 40).await;
    for n in (0..40).step_by(4) {
        assert_eq!(env.commit_one(&queue, &taken[n]).await, Ok);
        assert_eq!(env.fail(&queue, &taken[n + 1]).await, Ok);
    }
    let back =
        RollbackTo::Queue { eligible_time: env.now(), attempt: 7, ended: EndedDelivery::Counted };
    let rollbacks = taken.iter().enumerate().map(|(n, delivery)| Rollback {
        held: held(&queue, delivery),
        to: if n % 4 == 3 { last(&queue, delivery) } else { back.clone() },
        reason: Some(format!("because {n}")),
    });
    let outcomes = env.store.rollback(rollbacks.collect()).await.unwrap();
    assert_eq!(outcomes, [Gone, LeaseLost, Ok, Outcome::DeadLettered].repeat(10));
    for n in (0..40).step_by(4) {
        let (lost, back, dead_one) = (n + 1, n + 2, n + 3);
        assert_eq!(env.get(&queue, taken[lost].item.id).await.last_reason, "failed");
        let back_again = env.get(&queue, taken[back].item.id).await;
        assert_eq!((back_again.attempt, back_again.last_reason), (7, format!("because {back}")));
        let buried = env.get(&dead, taken[dead_one].item.id).await;
        assert_eq!(buried.last_reason, format!("because {dead_one}"));
    }
}

pub async fn crossed_receipts_settle_nothing(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b"]).await;
    // Two reserves have two tokens.
    let (a, b) = (env.take_one(&queue).await, env.take_one(&queue).await);
    let crossed = |item: &Receipt, token: &Receipt| Reservation {
        queue: queue.clone(),
        receipt: Receipt { token: token.token, ..item.clone() },
    };
    let pair = || vec![crossed(&a.receipt, &b.receipt), crossed(&b.receipt, &a.receipt)];
    assert_eq!(env.store.holds(pair()).await.unwrap(), [false, false]);
    assert_eq!(env.store.commit(pair()).await.unwrap(), [LeaseLost, LeaseLost]);
    let until = env.now() + seconds(500);
    assert_eq!(env.extend(pair(), until).await, [LeaseLost, LeaseLost]);
    let back =
        RollbackTo::Queue { eligible_time: env.now(), attempt: 9, ended: EndedDelivery::Counted };
    let rollbacks = |to: &RollbackTo| {
        let held = pair().into_iter();
        held.map(|held| Rollback { held, to: to.clone(), reason: None }).collect()
    };
    assert_eq!(env.store.rollback(rollbacks(&back)).await.unwrap(), [LeaseLost, LeaseLost]);
    let dead = RollbackTo::DeadLetter {
        to: name("dead"),
        failed_attempts: 1,
        reason: crate::domain::LimitReason::Rejected,
    };
    assert_eq!(env.store.rollback(rollbacks(&dead)).await.unwrap(), [LeaseLost, LeaseLost]);
    // The same crossed receipts among valid ones.
    let mut batch = pair();
    batch.insert(1, held(&queue, &a));
    batch.push(held(&queue, &b));
    assert_eq!(env.store.commit(batch).await.unwrap(), [LeaseLost, Ok, LeaseLost, Ok]);
}

pub async fn a_stale_receipt_among_valid_ones_settles_nothing(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b", "c"]).await;
    let stale = env.take(&queue, 3).await;
    env.pass(LEASE * 2);
    // The three items probably share one lease token.
    let fresh = env.take(&queue, 3).await;
    let mixed = [fresh[0].clone(), stale[1].clone(), fresh[2].clone()];
    assert_eq!(env.commit(&queue, &mixed).await, [Ok, LeaseLost, Ok]);
    assert_eq!(env.commit(&queue, &fresh).await, [Gone, Ok, Gone]);
}

pub async fn an_invented_receipt_settles_nothing(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a"]).await;
    let delivery = env.take_one(&queue).await;
    let token = LeaseToken(*b"never given!");
    let invented = Reservation {
        queue: queue.clone(),
        receipt: Receipt { token, ..delivery.receipt.clone() },
    };
    let item = crate::domain::ItemId(*b"no such item");
    let nowhere =
        Reservation { queue: queue.clone(), receipt: Receipt { item, ..delivery.receipt.clone() } };
    assert_eq!(env.store.commit(vec![invented, nowhere]).await.unwrap(), [LeaseLost, Gone]);
    assert_eq!(env.commit_one(&queue, &delivery).await, Ok);
}

pub async fn a_receipt_named_twice_in_a_call_settles_once(env: &Env) {
    let queue = env.queue("q").await;
    let kept = env.queue_with("kept", |queue| queue.retention = seconds(100)).await;
    for queue in [&queue, &kept] {
        env.push_plain(queue, &["a", "b"]).await;
        let taken = env.take(queue, 2).await;
        let (a, b) = (held(queue, &taken[0]), held(queue, &taken[1]));
        let outcomes = env.store.commit(vec![a.clone(), b.clone(), a.clone(), a.clone()]).await;
        assert_eq!(outcomes.unwrap(), [Ok, Ok, Gone, Gone]);

        env.push_plain(queue, &["c"]).await;
        let c = env.take_one(queue).await;
        let back = |attempt| Rollback {
            held: held(queue, &c),
            to: RollbackTo::Queue {
                eligible_time: env.now(),
                attempt,
                ended: EndedDelivery::Counted,
            },
            reason: Some(format!("{attempt}")),
        };
        let outcomes = env.store.rollback(vec![back(2), back(3)]).await.unwrap();
        assert_eq!(outcomes, [Ok, LeaseLost]);
        let item = env.get(queue, c.item.id).await;
        assert_eq!((item.attempt, item.last_reason.as_str()), (2, "2"));
    }
}

pub async fn a_rollback_sets_the_time_and_the_reason(env: &Env) {
    let queue = env.queue("q").await;
    let pushed = env.push_one(&queue, item("x")).await;
    let first = env.take_one(&queue).await;
    assert_eq!(env.roll_back(&queue, &first, seconds(60), 2, Some("no luck")).await, Ok);
    let item = env.get(&queue, pushed.id).await;
    assert_eq!(item.state, ItemState::Delayed);
    assert_eq!((item.attempt, item.deliveries, item.last_reason.as_str()), (2, 1, "no luck"));
    assert!(env.drain(&queue).await.is_empty());
    env.pass(seconds(61));
    let second = env.take_one(&queue).await;
    assert_eq!((second.item.attempt, second.item.deliveries), (2, 2));
    // Without a reason the old one is kept. The caller determines the attempt (`keep_attempt`).
    assert_eq!(env.roll_back(&queue, &second, seconds(0), 2, None).await, Ok);
    let item = env.get(&queue, pushed.id).await;
    assert_eq!((item.attempt, item.deliveries, item.last_reason.as_str()), (2, 2, "no luck"));
}

pub async fn an_undelivered_item_returns_to_its_place(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b", "c"]).await;
    let taken = env.take(&queue, 2).await;
    let rollbacks = taken.iter().map(|delivery| Rollback {
        held: held(&queue, delivery),
        to: RollbackTo::Queue {
            eligible_time: delivery.previous_eligible_time,
            attempt: delivery.item.attempt,
            ended: EndedDelivery::Unsent { former_lease: None },
        },
        reason: None,
    });
    env.store.rollback(rollbacks.collect()).await.unwrap();
    let again = env.take(&queue, 3).await;
    assert_eq!(payloads(&again), ["a", "b", "c"]);
    // The delivery that reached nobody does not count.
    let counted: Vec<_> = again
        .iter()
        .map(|delivery| (delivery.item.deliveries, delivery.receipt.deliveries_here()))
        .collect();
    assert_eq!(counted, [(1, 1), (1, 1), (1, 1)]);
}

/// A lapsed item that was reserved and never sent returns to its last holder, who may have finished.
pub async fn an_undelivered_item_returns_to_its_lapsed_lease(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["a", "b"]).await;
    let lapsed = env.take(&queue, 2).await;
    env.pass(seconds(31));
    let again = env.take(&queue, 2).await;
    let rollbacks = again.iter().map(|delivery| Rollback {
        held: held(&queue, delivery),
        to: RollbackTo::Queue {
            eligible_time: delivery.previous_eligible_time,
            attempt: delivery.item.attempt - 1,
            ended: EndedDelivery::Unsent { former_lease: delivery.former_lease },
        },
        reason: None,
    });
    assert_eq!(env.store.rollback(rollbacks.collect()).await.unwrap(), [Ok, Ok]);
    assert_eq!(env.commit_one(&queue, &again[0]).await, LeaseLost);
    assert_eq!(env.commit_one(&queue, &lapsed[0]).await, Ok);
    // The lapse counts once, and the delivery that reached nobody does not.
    let third = env.take_one(&queue).await;
    assert_eq!((third.item.attempt, third.item.deliveries), (2, 2));
    assert_eq!(env.commit_one(&queue, &lapsed[1]).await, LeaseLost);
    assert_eq!(env.commit_one(&queue, &third).await, Ok);
}

pub async fn an_extended_lease_ends_at_its_new_end(env: &Env) {
    let queue = env.queue("q").await;
    env.push_plain(&queue, &["longer", "shorter"]).await;
    let taken = env.take(&queue, 2).await;
    let until = [env.now() + seconds(90), env.now() + seconds(5)];
    let both = taken.iter().zip(until).map(|(delivery, until)| Extension {
        held: held(&queue, delivery),
        until,
        is_renewal: false,
    });
    assert_eq!(env.store.extend(both.collect()).await.unwrap(), [Ok, Ok]);
    let item = env.get(&queue, taken[0].item.id).await;
    assert_eq!(item.eligible_time, Some(until[0]));
    assert_eq!((item.attempt, item.deliveries), (1, 1));
    assert_eq!(env.store.depth(&queue).await.unwrap().next_eligible, Some(until[1]));
    env.pass(seconds(10));
    assert_eq!(env.drain(&queue).await, ["shorter"]);
    env.pass(seconds(30)); // past the first lease of `longer`, but no new end
    assert!(env.take(&queue, 9).await.iter().all(|delivery| payload(&delivery.item) != "longer"));
    assert_eq!(env.commit_one(&queue, &taken[0]).await, Ok);
}

/// The consumer may have extended the lease further than the broker renews it by itself.
pub async fn a_renewal_shortens_no_lease(env: &Env) {
    let queue = env.queue("q").await;
    let now = env.now();
    let ends = async |of: &[Delivery]| {
        let mut ends = Vec::new();
        for delivery in of {
            let end = env.get(&queue, delivery.item.id).await.eligible_time.unwrap();
            ends.push(now.until(end).as_secs());
        }
        ends
    };
    // All that was reserved at once, then one by itself, also through another broker.
    env.push_plain(&queue, &["a", "b", "c"]).await;
    let taken = env.take(&queue, 3).await;
    let all = || taken.iter().map(|delivery| held(&queue, delivery)).collect::<Vec<_>>();
    for (until, expected) in [(90, 90), (40, 90), (95, 95)] {
        assert_eq!(env.renew(&env.store, all(), now + seconds(until)).await, [Ok, Ok, Ok]);
        assert_eq!(ends(&taken).await, [expected; 3]);
    }
    for (store, one) in [(&env.store, 0), (&env.other, 1)] {
        for (until, expected) in [(40, 95), (200, 200)] {
            let one = vec![held(&queue, &taken[one])];
            assert_eq!(env.renew(store, one, now + seconds(until)).await, [Ok]);
            assert_eq!(ends(&taken).await.iter().max(), Some(&expected));
        }
        let extension = vec![held(&queue, &taken[one])];
        assert_eq!(
            env.extend(extension, now + seconds(70)).await,
            [Ok],
            "a consumer may shorten it"
        );
    }
    assert_eq!(ends(&taken).await, [70, 70, 95]);
    // What was renewed is not taken by others before its end, and a receipt that holds nothing renews nothing.
    env.pass(seconds(80));
    let lapsed = env.take(&queue, 3).await;
    assert_eq!(payloads(&lapsed), ["a", "b"]);
    let until = now + seconds(200);
    assert_eq!(env.renew(&env.store, all(), until).await, [LeaseLost, LeaseLost, Ok]);
    assert_eq!(env.commit(&queue, &taken[2..]).await, [Ok]);
}

pub async fn racing_commits_win_once(env: &Env) {
    let queue = env.queue("q").await;
    env.push(&queue, (0..50).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 50).await;
    let racers: Vec<_> = [&env.store, &env.other, &env.store, &env.other]
        .map(|store| {
            let (store, queue) = (store.clone(), queue.clone());
            let all: Vec<Reservation> =
                taken.iter().map(|delivery| held(&queue, delivery)).collect();
            tokio::spawn(async move { store.commit(all).await.unwrap() })
        })
        .into();
    let mut wins = vec![0; 50];
    for racer in racers {
        for (wins, outcome) in wins.iter_mut().zip(racer.await.unwrap()) {
            assert!(matches!(outcome, Ok | Gone), "{outcome:?}");
            *wins += usize::from(outcome == Ok);
        }
    }
    assert_eq!(wins, vec![1; 50]);
}
