//! Results larger than a database returns in one reply (MongoDB: 16 MiB) are complete.

use std::sync::Arc;

use super::{Env, env::*};
use crate::{
    domain::{Outcome, Queue, Schedule, ScheduleName},
    store::{EndedDelivery, RollbackTo},
};

/// Two payloads of this size do not fit in one reply of MongoDB.
const LARGE: usize = 9 << 20;

async fn push_large(env: &Env, queue: &Arc<Queue>, count: usize) {
    for n in 0..count {
        let mut new = item("");
        new.payload = vec![n as u8; LARGE].into();
        env.push_one(queue, new).await;
    }
}

pub async fn large_items_at_the_head_do_not_hide_those_behind_them(env: &Env) {
    let queue = env.queue("q").await;
    push_large(env, &queue, 3).await;
    let taken = env.take(&queue, 3).await;
    let first_bytes: Vec<u8> = taken.iter().map(|delivery| delivery.item.payload[0]).collect();
    assert_eq!(first_bytes, [0, 1, 2]);
}

pub async fn a_page_of_large_items_says_that_there_are_more(env: &Env) {
    let queue = env.queue("q").await;
    push_large(env, &queue, 3).await;
    let (mut first_bytes, mut cursor) = (Vec::new(), None);
    loop {
        let page = env.store.list_items(&queue, None, cursor.as_deref(), 10).await.unwrap();
        first_bytes.extend(page.entries.iter().map(|item| item.payload[0]));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(first_bytes, [0, 1, 2]);
}

pub async fn schedules_with_large_items_are_all_listed(env: &Env) {
    for name in ["a", "b", "c"] {
        let mut new = item("");
        new.payload = vec![1; LARGE].into();
        let schedule = Schedule {
            name: ScheduleName::parse("name", name).unwrap(),
            queue: super::env::name("q"),
            cron: "* * * * *".into(),
            time_zone: "UTC".into(),
            item: new,
            paused: false,
            create_time: env.now(),
            done_until: env.now(),
            last_time: None,
        };
        env.store.create_schedule(&schedule).await.unwrap();
    }
    let listed = env.store.list_schedules(None, 10, true).await.unwrap();
    let names: Vec<&str> = listed.iter().map(|schedule| schedule.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

/// The headers of the items alone exceed 16 MiB.
pub async fn outcomes_of_a_thousand_items_with_large_headers_are_exact(env: &Env) {
    const COUNT: usize = 1_100;
    let queue = env.queue("q").await;
    for _ in 0..COUNT / 100 {
        let with_headers = |n: usize| {
            let mut new = item(&n.to_string());
            new.headers.insert("h".into(), "v".repeat(16_000));
            new
        };
        env.push(&queue, (0..100).map(with_headers).collect()).await;
    }
    let first = env.take(&queue, COUNT).await;
    let all_held = || first.iter().map(|delivery| held(&queue, delivery)).collect::<Vec<_>>();
    assert_eq!(env.store.holds(all_held()).await.unwrap(), [true; COUNT]);

    // Another broker rolls all items back and reserves them, so that every item exists but its
    // first receipt is stale.
    let to =
        RollbackTo::Queue { eligible_time: env.now(), attempt: 1, ended: EndedDelivery::Counted };
    let back = first.iter().map(|delivery| crate::store::Rollback {
        held: held(&queue, delivery),
        to: to.clone(),
        reason: None,
    });
    assert_eq!(env.other.rollback(back.collect()).await.unwrap(), [Outcome::Ok; COUNT]);
    let mut again = 0;
    while again < COUNT {
        let reserved = env.other.reserve(&queue, &[demand(COUNT)]).await.unwrap();
        again += reserved.deliveries.len();
        assert!(reserved.more || again == COUNT, "{again} are found");
    }
    assert_eq!(env.store.commit(all_held()).await.unwrap(), [Outcome::LeaseLost; COUNT]);
    assert_eq!(env.store.holds(all_held()).await.unwrap(), [false; COUNT]);
}
