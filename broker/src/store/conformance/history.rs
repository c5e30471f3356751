//! History: committed items that are kept for a while, and their replay.

use super::{Env, env::*};
use crate::{
    domain::{ItemState, Outcome, Timestamp},
    store::Selection,
};

pub async fn committed_items_are_kept_for_the_retention(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(100)).await;
    let pushed = env.push_one(&queue, mortal("x", seconds(10))).await;
    let delivery = env.take_one(&queue).await;
    let before = env.now();
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Ok);
    let item = env.get(&queue, pushed.id).await;
    assert_eq!(item.state, ItemState::Processed);
    assert_eq!(item.eligible_time, None);
    let time = item.process_time.unwrap();
    assert!(time >= before && time <= env.now());
    assert_eq!(item.expire_time, Some(time + seconds(100)));
    assert_eq!((item.attempt, item.deliveries), (1, 1));
    assert_eq!(payload(&item), "x");
    let depth = env.store.depth(&queue).await.unwrap();
    assert_eq!((depth.processed, depth.unsettled(), depth.next_eligible), (1, 0, None));

    // A used receipt changes nothing.
    assert_eq!(env.commit_one(&queue, &delivery).await, Outcome::Gone);
    assert_eq!(env.fail(&queue, &delivery).await, Outcome::Gone);
    assert_eq!(env.store.holds(vec![held(&queue, &delivery)]).await.unwrap(), [false]);
    assert_eq!(env.get(&queue, pushed.id).await, item);

    env.pass(seconds(50)); // past the lease and the time to live
    assert!(env.drain(&queue).await.is_empty());
    assert!(env.store.get_item(&queue, pushed.id).await.unwrap().is_some());
    env.pass(seconds(51));
    assert_eq!(env.store.get_item(&queue, pushed.id).await.unwrap(), None);
    assert!(env.list(&queue, None).await.is_empty());
    assert_eq!(env.store.depth(&queue).await.unwrap().processed, 0);
    let selection = Selection::Ids(vec![pushed.id]);
    assert_eq!(env.store.replay(&queue, &selection, 9).await.unwrap(), 0);
}

pub async fn replay_by_id_makes_items_ready_again(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    env.push_plain(&queue, &["a", "b", "c", "d"]).await;
    let first = env.take_one(&queue).await;
    env.fail(&queue, &first).await;
    let taken = env.take(&queue, 4).await;
    env.commit(&queue, &taken[..3]).await;
    let id =
        |name: &str| taken.iter().find(|delivery| payload(&delivery.item) == name).unwrap().item.id;
    let nobody = crate::domain::ItemId(*b"no such item");
    let committed: Vec<String> = payloads(&taken[..3]);
    let ids = vec![id(&committed[2]), nobody, id(&committed[0]), taken[3].item.id];
    // The reserved item and the unknown one are skipped.
    assert_eq!(env.store.replay(&queue, &Selection::Ids(ids), 99).await.unwrap(), 2);
    let again = env.take(&queue, 9).await;
    let mut names = payloads(&again);
    names.sort();
    let mut expected = vec![committed[0].clone(), committed[2].clone()];
    expected.sort();
    assert_eq!(names, expected);
    for delivery in &again {
        assert_eq!(delivery.item.attempt, 1);
        assert_eq!(delivery.item.process_time, None);
        assert!(delivery.item.deliveries >= 2);
    }
    // The replayed items no longer expire from history.
    env.pass(seconds(2_000));
    assert_eq!(env.take(&queue, 9).await.len(), 3);
    let stale = taken.iter().rfind(|delivery| payload(&delivery.item) == committed[0]);
    assert_eq!(env.commit_one(&queue, stale.unwrap()).await, Outcome::LeaseLost);
}

pub async fn replay_by_time_takes_the_oldest_first(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(100_000)).await;
    env.push(&queue, (0..9).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 9).await;
    for delivery in &taken {
        env.commit_one(&queue, delivery).await;
        env.pass(seconds(10));
    }
    let mut times = Vec::new();
    for delivery in &taken {
        times.push(env.get(&queue, delivery.item.id).await.process_time.unwrap());
    }
    let range = |start, end| Selection::Processed { start, end };
    // The start is inclusive, the end is exclusive.
    let some = range(times[2], times[6]);
    assert_eq!(env.store.replay(&queue, &some, 2).await.unwrap(), 2);
    assert_eq!(env.drain(&queue).await, ["2", "3"]);
    assert_eq!(env.store.replay(&queue, &some, 0).await.unwrap(), 0);
    assert_eq!(env.store.replay(&queue, &some, 99).await.unwrap(), 2);
    assert_eq!(env.drain(&queue).await, ["4", "5"]);
    assert_eq!(env.store.replay(&queue, &some, 99).await.unwrap(), 0);
    let all = range(Timestamp(0), env.now());
    assert_eq!(env.store.replay(&queue, &all, 99).await.unwrap(), 5);
    assert_eq!(env.store.depth(&queue).await.unwrap().processed, 0);
}

pub async fn a_long_history_is_replayed_in_full(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(100_000)).await;
    env.push(&queue, (0..2_300).map(|n| item(&n.to_string())).collect()).await;
    let taken = env.take(&queue, 2_300).await;
    env.commit(&queue, &taken).await;
    let all = Selection::Processed { start: Timestamp(0), end: env.now() + seconds(1) };
    assert_eq!(env.store.replay(&queue, &all, 2_100).await.unwrap(), 2_100);
    assert_eq!(env.store.replay(&queue, &all, u64::MAX).await.unwrap(), 200);
    assert_eq!(env.store.depth(&queue).await.unwrap().ready, 2_300);
}
