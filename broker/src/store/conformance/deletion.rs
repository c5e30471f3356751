//! The deletion of queues, and the links to dead-letter queues that it must respect.

use std::{
    collections::HashSet,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    env::{Env, demand, held, item, name, push_of, seconds},
    templates::template,
};
use crate::{
    domain::{ItemId, Outcome, Queue},
    store::{Appeared, Created, Deleted, Store, conformance::Broker},
};

async fn made(store: &dyn Store, queue: &Queue) -> Arc<Queue> {
    match store.create_queue(queue).await.unwrap() {
        Created::New(queue) | Created::Existing(queue) => Arc::new(queue),
    }
}

/// Pushes items one after another, creating the queue if necessary and caching it for a while, as a
/// broker does. Returns the ids of the pushed items.
async fn push_without_end(store: Arc<dyn Store>, stop: Arc<AtomicBool>) -> Vec<ItemId> {
    let mut ids = Vec::new();
    let wanted = Queue::with_defaults(name("q"), store.now());
    let mut pause = Duration::from_millis(20);
    while !stop.load(Ordering::Relaxed) {
        let queue = made(&*store, &wanted).await;
        let known = Instant::now();
        while known.elapsed() < Duration::from_millis(200) && !stop.load(Ordering::Relaxed) {
            let pushed = store.push(vec![push_of(&queue, item("x"))]).await.unwrap();
            ids.extend(pushed.iter().map(|pushed| pushed.id));
            // The queue has to be empty at times, on a slow machine too.
            tokio::time::sleep(pause).await;
            pause = (pause + Duration::from_millis(2)).min(Duration::from_millis(400));
        }
    }
    ids
}

/// Pops all items. Returns their ids.
async fn pop_all(broker: &Broker, queue: &Arc<Queue>) -> Vec<ItemId> {
    let mut ids = Vec::new();
    loop {
        let demands = [demand(1_000)];
        let reserve = broker.reserve_hearing(queue, &demands, Appeared::FromStart);
        let reserved = reserve.await.unwrap();
        if reserved.deliveries.is_empty() && !reserved.more {
            return ids;
        }
        let taken = reserved.deliveries.iter().map(|(_, delivery)| held(queue, delivery));
        for outcome in broker.commit(taken.collect()).await.unwrap() {
            assert_eq!(outcome, Outcome::Ok);
        }
        ids.extend(reserved.deliveries.iter().map(|(_, delivery)| delivery.item.id));
    }
}

/// Runs beside a loop that pops all items and deletes the queue without force, with brokers that
/// cache the queue. Every item whose push succeeded was popped or still exists.
pub async fn a_successful_push_is_never_lost_to_a_concurrent_deletion(env: &Env) {
    const DELETIONS: usize = 5;
    let stop = Arc::new(AtomicBool::new(false));
    let pushers: Vec<_> = [&env.store, &env.other, &env.other]
        .map(|store| tokio::spawn(push_without_end(Arc::clone(store.store()), Arc::clone(&stop))))
        .into();
    let mut popped = HashSet::new();
    let (mut deletions, started) = (0, Instant::now());
    while deletions < DELETIONS && started.elapsed() < seconds(30) {
        let links = env.store.links().await.unwrap();
        let Some(queue) = env.store.get_queue(&name("q")).await.unwrap() else {
            tokio::task::yield_now().await;
            continue;
        };
        let queue = Arc::new(queue);
        popped.extend(pop_all(&env.store, &queue).await);
        let deleted = env.store.delete_queue(&queue, false, links).await.unwrap();
        deletions += usize::from(matches!(deleted, Deleted::Done(_)));
    }
    stop.store(true, Ordering::Relaxed);
    let mut missing = HashSet::new();
    for pusher in pushers {
        missing.extend(pusher.await.unwrap());
    }
    let answered = missing.len();
    missing.retain(|id| !popped.contains(id));
    let end = Instant::now() + seconds(10);
    while !missing.is_empty() && Instant::now() < end {
        if let Some(queue) = env.store.get_queue(&name("q")).await.unwrap() {
            for id in pop_all(&env.store, &Arc::new(queue)).await {
                missing.remove(&id);
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(deletions > 0, "the queue was never empty");
    assert!(missing.is_empty(), "{} of {answered} pushed items are lost", missing.len());
}

/// Without force, an unsettled item in any state prevents the deletion of its queue. History does
/// not.
pub async fn a_queue_that_holds_items_is_deleted_only_by_force(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    let delete = async |force| {
        let links = env.other.links().await.unwrap();
        env.other.delete_queue(&queue, force, links).await.unwrap()
    };
    env.push(&queue, vec![super::env::keyed("first", "k"), super::env::keyed("blocked", "k")])
        .await;
    assert_eq!(delete(false).await, Deleted::NotEmpty);
    let first = env.take_one(&queue).await;
    assert_eq!(delete(false).await, Deleted::NotEmpty);
    assert_eq!(env.commit_one(&queue, &first).await, Outcome::Ok, "nothing was changed");
    let second = env.take_one(&queue).await;
    assert_eq!(delete(false).await, Deleted::NotEmpty, "a reserved item counts too");
    env.commit_one(&queue, &second).await;
    env.push_one(&queue, super::env::delayed("later", seconds(60))).await;
    assert_eq!(delete(false).await, Deleted::NotEmpty);
    assert_eq!(env.list(&queue, None).await.len(), 3, "history is unchanged");
    assert_eq!(delete(true).await, Deleted::Done(3));
    assert_eq!(env.store.get_queue(&queue.name).await.unwrap(), None);
    let queue = env.queue_with("q", |queue| queue.retention = seconds(1_000)).await;
    env.push_plain(&queue, &["x"]).await;
    let only = env.take_one(&queue).await;
    env.commit_one(&queue, &only).await;
    let links = env.store.links().await.unwrap();
    assert_eq!(env.store.delete_queue(&queue, false, links).await.unwrap(), Deleted::Done(1));
}

/// A broker decided to delete the queue, and another one noted a use of it before the deletion.
pub async fn a_queue_whose_use_is_noted_meanwhile_is_not_deleted(env: &Env) {
    let set = |queue: &mut Queue| queue.unused_since = Some(env.now());
    let queue = env.queue_with("q", set).await;
    env.pass(seconds(1_000));
    let used = Queue { unused_since: Some(env.now()), ..(*queue).clone() };
    let used = env.other.update_queue(&used).await.unwrap().expect("a noted use");
    let links = env.store.links().await.unwrap();
    let deleted = env.store.delete_queue(&queue, false, links).await.unwrap();
    assert_eq!(deleted, Deleted::Overtaken);
    assert_eq!(env.store.get_queue(&queue.name).await.unwrap().as_ref(), Some(&used));
    let deleted = env.store.delete_queue(&used, false, links).await.unwrap();
    assert_eq!(deleted, Deleted::Done(0));
}

/// Of two changes that were decided on the same state of all links, one is made.
pub async fn links_change_one_at_a_time(env: &Env) {
    let (a, b) = (env.queue("a").await, env.queue("b").await);
    let links = env.store.links().await.unwrap();
    assert_eq!(env.store.dead_letter_sources(&b.name).await.unwrap(), []);
    let linked = Queue { dead_letter_queue: Some(b.name.clone()), ..(*a).clone() };
    let linked = env.store.link_queue(&linked, links).await.unwrap().expect("a linked queue");
    assert_eq!(linked.revision, a.revision + 1);
    let sources = env.other.dead_letter_sources(&b.name).await.unwrap();
    assert_eq!(sources, std::slice::from_ref(&linked));
    // A writer that read the links before would delete a queue in use, or close a ring.
    assert_eq!(env.other.delete_queue(&b, true, links).await.unwrap(), Deleted::Overtaken);
    let ring = Queue { dead_letter_queue: Some(a.name.clone()), ..(*b).clone() };
    assert_eq!(env.other.link_queue(&ring, links).await.unwrap(), None);
    let new = Queue { dead_letter_queue: Some(b.name.clone()), name: name("c"), ..(*b).clone() };
    let new = Queue { revision: 0, ..new };
    assert_eq!(env.other.link_queue(&new, links).await.unwrap(), None);
    let links = env.other.links().await.unwrap();
    let made = env.other.link_queue(&new, links).await.unwrap().expect("a new queue");
    assert_eq!(env.store.get_queue(&new.name).await.unwrap(), Some(made));
    // The queue exists now.
    let links = env.other.links().await.unwrap();
    assert_eq!(env.other.link_queue(&new, links).await.unwrap(), None);
    // A deletion changes the links too, and requires the queue to be as it was read.
    assert_eq!(env.store.delete_queue(&a, true, links).await.unwrap(), Deleted::Overtaken);
    assert_eq!(env.store.delete_queue(&linked, true, links).await.unwrap(), Deleted::Done(0));
    assert_eq!(env.store.delete_queue(&b, true, links).await.unwrap(), Deleted::Overtaken);
}

/// A push takes effect after the deletion, through a broker that caches the queue. Because the push
/// succeeded, the queue exists again, with its former settings.
pub async fn a_push_that_takes_effect_after_the_deletion_restores_its_queue(env: &Env) {
    let queue = env.queue_with("q", |queue| queue.sequenced = true).await;
    env.delete_queue(&queue).await;
    let late = env.other.push(vec![push_of(&queue, item("late"))]).await.unwrap()[0].id;
    let end = Instant::now() + seconds(20);
    let again = loop {
        if let Some(again) = env.store.get_queue(&queue.name).await.unwrap() {
            break Arc::new(again);
        }
        assert!(Instant::now() < end, "the item's queue does not exist again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(again.sequenced, "{again:?}");
    let demands = [demand(1)];
    let reserve = env.store.reserve_hearing(&again, &demands, Appeared::FromStart);
    assert_eq!(reserve.await.unwrap().deliveries[0].1.item.id, late);
}

/// A rollback that was planned before its dead-letter queue was deleted is carried out afterwards.
/// The dead letter is in a queue that exists, with the settings that use gives it.
pub async fn a_dead_letter_restores_its_deleted_queue(env: &Env) {
    let max_depth = NonZeroU64::new(9);
    let mut template = template("dea*", env.store.now());
    template.settings.max_depth = max_depth;
    env.store.create_template(&template).await.unwrap();
    let dead = env.queue_with("dead", |queue| queue.max_depth = max_depth).await;
    let queue = env.queue_with("q", |queue| queue.dead_letter_queue = Some(name("dead"))).await;
    env.push_plain(&queue, &["x"]).await;
    let taken = env.take(&queue, 1).await;
    env.delete_queue(&dead).await;
    env.bury(&queue, &taken[0], None).await;
    let end = Instant::now() + seconds(20);
    let again = loop {
        if let Some(again) = env.store.get_queue(&dead.name).await.unwrap() {
            break Arc::new(again);
        }
        assert!(Instant::now() < end, "the dead letter's queue does not exist again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(again.group, queue.group);
    assert_eq!(again.max_depth, max_depth, "{again:?}");
    let demands = [demand(1)];
    let reserve = env.store.reserve_hearing(&again, &demands, Appeared::FromStart);
    assert_eq!(reserve.await.unwrap().deliveries[0].1.item.id, taken[0].item.id);
}
