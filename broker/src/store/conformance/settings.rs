//! The settings of queues, and schedules.

use std::num::NonZeroU64;

use super::{Env, env::*};
use crate::{
    domain::{
        Eligibility, GroupName, Limit, OrderingKey, Queue, RetryPolicy, Schedule, ScheduleChange,
        ScheduleName, Timestamp, Totals,
    },
    store::{Created, SettingsChanges, StoredReceiptKey},
};

pub(super) fn everything_set(text: &str, now: Timestamp) -> Queue {
    Queue {
        group: GroupName::parse("group", "a-group").unwrap(),
        lease: Some(std::time::Duration::from_millis(1_234)),
        max_attempts: Some(Limit::of(7)),
        max_deliveries: Some(Limit::of(0)),
        discard_failed: true,
        dead_letter_queue: Some(name("dead")),
        retry_policy: Some(RetryPolicy {
            initial_delay: seconds(1),
            multiplier: 1.1,
            max_delay: seconds(1_000),
            jitter: 0.3,
        }),
        default_ttl: Some(seconds(86_400)),
        retention: seconds(3_600),
        dedup_window: seconds(61),
        max_depth: NonZeroU64::new(1_000_000),
        unused_since: Some(Timestamp(now.0 - 5_000)),
        sequenced: true,
        paused: true,
        labels: [("team".to_owned(), "ä.$b".to_owned())].into(),
        ..Queue::with_defaults(name(text), now)
    }
}

pub async fn a_queue_has_the_settings_of_its_creation(env: &Env) {
    assert_eq!(env.store.get_queue(&name("q")).await.unwrap(), None);
    let now = env.now();
    for queue in [everything_set("full", now), Queue::with_defaults(name("plain"), now)] {
        let expected = Queue { revision: 1, ..queue.clone() };
        let created = env.store.create_queue(&queue).await.unwrap();
        assert_eq!(created, Created::New(expected.clone()));
        let other = env.other.get_queue(&queue.name).await.unwrap();
        assert_eq!(other.as_ref(), Some(&expected));
        let changed = Queue { max_attempts: Some(Limit::of(99)), ..queue.clone() };
        let created = env.store.create_queue(&changed).await.unwrap();
        assert_eq!(created, Created::Existing(expected.clone()));
        assert_eq!(env.store.get_queue(&queue.name).await.unwrap(), Some(expected));
    }
}

pub async fn racing_creations_make_one_queue(env: &Env) {
    let racers: Vec<_> = (0..8)
        .map(|n| {
            let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
            let queue = Queue {
                max_attempts: Some(Limit::of(n)),
                ..Queue::with_defaults(name("q"), store.now())
            };
            tokio::spawn(async move { store.create_queue(&queue).await.unwrap() })
        })
        .collect();
    let mut new = Vec::new();
    let mut all = Vec::new();
    for racer in racers {
        match racer.await.unwrap() {
            Created::New(queue) => {
                new.push(queue.clone());
                all.push(queue);
            }
            Created::Existing(queue) => all.push(queue),
        }
    }
    assert_eq!(new.len(), 1);
    assert!(all.iter().all(|queue| *queue == new[0]));
}

pub async fn queues_are_listed_by_name(env: &Env) {
    let names = ["B", "a", "a-b", "a.b", "b", "b1", "b10", "b2"];
    for name in ["b10", "a.b", "B", "b", "a", "b2", "a-b", "b1"] {
        env.queue(name).await;
    }
    let listed =
        |queues: Vec<Queue>| queues.iter().map(|queue| queue.name.to_string()).collect::<Vec<_>>();
    assert_eq!(listed(env.store.list_queues("", None, 100).await.unwrap()), names);
    let mut got = Vec::new();
    let mut after = None;
    loop {
        let page = env.store.list_queues("", after.as_ref(), 3).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        after = Some(last.name.clone());
        got.extend(listed(page));
    }
    assert_eq!(got, names);
}

pub async fn queues_are_listed_by_prefix_and_read_by_name(env: &Env) {
    for name in ["b10", "a.b", "B", "b", "a", "b2", "a-b", "b1", "_b", "b_"] {
        env.queue(name).await;
    }
    let listed = async |prefix: &str, after: Option<&str>, limit| {
        let queues = env.store.list_queues(prefix, after.map(name).as_ref(), limit).await.unwrap();
        queues.iter().map(|queue| queue.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(listed("b", None, 100).await, ["b", "b1", "b10", "b2", "b_"]);
    assert_eq!(listed("b1", None, 100).await, ["b1", "b10"]);
    assert_eq!(listed("b1", Some("b1"), 100).await, ["b10"]);
    assert_eq!(listed("b1", Some("a"), 1).await, ["b1"], "a token of another list");
    assert_eq!(listed("b1", Some("c"), 100).await, Vec::<String>::new());
    assert_eq!(listed("a.", None, 100).await, ["a.b"]);
    assert_eq!(listed("x", None, 100).await, Vec::<String>::new());
    let names = ["b_", "none", "B", "b_"].map(name);
    let mut read = env.other.get_queues(&names).await.unwrap();
    read.sort_by(|a, b| a.name.cmp(&b.name));
    read.dedup_by(|a, b| a.name == b.name);
    assert_eq!(read.iter().map(|queue| queue.name.as_str()).collect::<Vec<_>>(), ["B", "b_"]);
    assert_eq!(env.store.get_queues(&[]).await.unwrap(), []);
}

pub async fn updates_are_fenced_by_the_revision(env: &Env) {
    let queue = env.queue("q").await;
    let first = Queue { paused: true, ..(*queue).clone() };
    let updated = env.store.update_queue(&first).await.unwrap().unwrap();
    assert_eq!(updated, Queue { revision: queue.revision + 1, ..first.clone() });
    // Another writer that read before the update has to read again.
    let late = Queue { max_attempts: Some(Limit::of(5)), ..(*queue).clone() };
    assert_eq!(env.other.update_queue(&late).await.unwrap(), None);
    assert_eq!(env.store.get_queue(&queue.name).await.unwrap(), Some(updated.clone()));
    let again = everything_set("q", queue.create_time);
    let again = Queue { revision: updated.revision, group: queue.group.clone(), ..again };
    let updated = env.other.update_queue(&again).await.unwrap().unwrap();
    assert_eq!(env.store.get_queue(&queue.name).await.unwrap(), Some(updated));
    let missing = Queue::with_defaults(name("missing"), env.now());
    assert_eq!(env.store.update_queue(&missing).await.unwrap(), None);
}

/// A cache of settings learns which ones have changed, and about no others.
pub async fn changed_settings_are_reported_once(env: &Env) {
    let bystander = env.queue("bystander").await;
    let mut watch = env.other.watch_settings();
    assert_eq!(watch.changes().await.unwrap(), SettingsChanges::Unknown, "nothing is known yet");
    let mut changed = async || match watch.changes().await.unwrap() {
        SettingsChanges::Of(queues) => queues,
        // If one broker makes all changes, its store need not distinguish them.
        SettingsChanges::Unknown => vec![name("a")],
    };
    assert_eq!(changed().await, []);
    let queue = env.queue("a").await;
    assert_eq!(changed().await, [name("a")]);
    assert_eq!(changed().await, []);
    let paused = Queue { paused: true, ..(*queue).clone() };
    let paused = env.store.update_queue(&paused).await.unwrap().unwrap();
    assert_eq!(changed().await, [name("a")]);
    let resumed = Queue { paused: false, ..paused };
    let resumed = env.store.update_queue(&resumed).await.unwrap().unwrap();
    assert_eq!(changed().await, [name("a")]);
    env.delete_queue(&resumed).await;
    assert_eq!(changed().await, [name("a")]);
    let again = env.queue("a").await;
    assert_eq!(changed().await, [name("a")]);
    env.delete_queue(&again).await;
    env.queue("a").await;
    assert_eq!(changed().await, [name("a")], "deleted and created between two calls");
    // Pushes and reserves do not change settings.
    env.push_plain(&bystander, &["x"]).await;
    env.drain(&bystander).await;
    assert_eq!(changed().await, []);
}

pub async fn a_deleted_queue_leaves_nothing_behind(env: &Env) {
    let set = |queue: &mut Queue| {
        queue.retention = seconds(1_000);
        queue.sequenced = true;
    };
    let queue = env.queue_with("q", set).await;
    let bystander = env.queue("bystander").await;
    env.push_plain(&bystander, &["x"]).await;
    env.push(&queue, vec![dedup("committed", "c"), dedup("reserved", "d")]).await;
    let taken = env.take(&queue, 2).await;
    env.commit_one(&queue, &taken[0]).await;
    let items = vec![
        item("ready"),
        delayed("delayed", seconds(60)),
        keyed("first", "k"),
        keyed("blocked", "k"),
    ];
    env.push(&queue, items).await;
    let totals = Totals { pushed: 6, ..Totals::default() };
    env.store.add_totals(vec![(queue.name.clone(), totals)]).await.unwrap();

    assert_eq!(env.delete_queue(&queue).await, 6);
    assert_eq!(env.store.get_queue(&queue.name).await.unwrap(), None);
    assert_eq!(env.commit_one(&queue, &taken[1]).await, crate::domain::Outcome::Gone);
    let again = env.queue_with("q", set).await;
    assert!(env.list(&again, None).await.is_empty());
    assert_eq!(env.store.totals(&again.name).await.unwrap(), Totals::default());
    assert!(!env.push_one(&again, dedup("x", "c")).await.deduplicated);
    assert!(!env.push_one(&again, dedup("y", "d")).await.deduplicated);
    env.push_one(&again, keyed("z", "k")).await;
    assert_eq!(env.drain(&again).await, ["x", "y", "z"]);
    assert_eq!(env.drain(&bystander).await, ["x"]);
}

fn schedule(text: &str, now: Timestamp) -> Schedule {
    Schedule {
        name: ScheduleName::parse("name", text).unwrap(),
        queue: name("reports"),
        cron: "0 7 * * MON-FRI".to_owned(),
        time_zone: "Europe/Zurich".to_owned(),
        item: crate::domain::NewItem {
            payload: vec![0, 255, 7].into(),
            content_type: "application/json".to_owned(),
            headers: [("a.b".to_owned(), "$c".to_owned())].into(),
            ttl: Some(seconds(60)),
            ordering_key: OrderingKey::new("k"),
            eligibility: Eligibility::After(seconds(5)),
            ..urgent("", 4)
        },
        paused: false,
        create_time: now,
        done_until: now,
        last_time: None,
    }
}

pub async fn schedules_are_kept(env: &Env) {
    let now = env.now();
    let given = schedule("daily", now);
    assert_eq!(env.store.get_schedule(&given.name).await.unwrap(), None);
    let created = env.store.create_schedule(&given).await.unwrap();
    assert_eq!(created, Created::New(given.clone()));
    assert_eq!(env.other.get_schedule(&given.name).await.unwrap().as_ref(), Some(&given));
    let changed = Schedule { cron: "* * * * *".to_owned(), ..given.clone() };
    let created = env.store.create_schedule(&changed).await.unwrap();
    assert_eq!(created, Created::Existing(given.clone()));

    for text in ["c", "B", "a"] {
        env.store.create_schedule(&schedule(text, now)).await.unwrap();
    }
    let page = env.store.list_schedules(None, 3, true).await.unwrap();
    let names: Vec<_> = page.iter().map(|schedule| schedule.name.as_str()).collect();
    assert_eq!(names, ["B", "a", "c"]);
    let without_payloads = env.store.list_schedules(None, 3, false).await.unwrap();
    for (listed, mut whole) in without_payloads.into_iter().zip(page.clone()) {
        whole.item.payload.clear();
        assert_eq!(listed, whole);
    }
    let rest = env.store.list_schedules(Some(&page[2].name), 3, true).await.unwrap();
    assert_eq!(rest, std::slice::from_ref(&given));

    assert!(env.store.delete_schedule(&given.name).await.unwrap());
    assert!(!env.store.delete_schedule(&given.name).await.unwrap());
    assert_eq!(env.store.get_schedule(&given.name).await.unwrap(), None);
}

pub async fn ticks_are_recorded_once_and_in_order(env: &Env) {
    let now = env.now();
    let given = schedule("daily", now);
    let name = &given.name;
    env.store.create_schedule(&given).await.unwrap();
    let tick = |n: u64| now + seconds(n);
    let read = async || env.store.get_schedule(name).await.unwrap().unwrap();
    env.store.tick_done(name, tick(10)).await.unwrap();
    assert_eq!((read().await.done_until, read().await.last_time), (tick(10), Some(tick(10))));
    env.other.tick_done(name, tick(5)).await.unwrap(); // a later tick is recorded already
    assert_eq!((read().await.done_until, read().await.last_time), (tick(10), Some(tick(10))));
    env.other.tick_done(name, tick(20)).await.unwrap();
    assert_eq!((read().await.done_until, read().await.last_time), (tick(20), Some(tick(20))));

    let paused = env.store.pause_schedule(name, true, tick(25)).await.unwrap().unwrap();
    assert!(paused.paused);
    assert_eq!((paused.done_until, paused.last_time), (tick(25), Some(tick(20))));
    assert_eq!(read().await, paused);
    let resumed = env.store.pause_schedule(name, false, tick(40)).await.unwrap().unwrap();
    assert!(!resumed.paused);
    assert_eq!((resumed.done_until, resumed.last_time), (tick(40), Some(tick(20))));
    let missing = ScheduleName::parse("name", "missing").unwrap();
    assert_eq!(env.store.pause_schedule(&missing, true, now).await.unwrap(), None);
    env.store.tick_done(&missing, now).await.unwrap();
}

pub async fn a_schedule_changes_by_setting(env: &Env) {
    let now = env.now();
    let given = schedule("daily", now);
    env.store.create_schedule(&given).await.unwrap();
    env.store.create_schedule(&schedule("other", now)).await.unwrap();
    let item = crate::domain::NewItem {
        payload: vec![255, 0].into(),
        eligibility: Eligibility::At(now + seconds(9)),
        ..urgent("", 7)
    };
    let mut expected = given.clone();
    for change in [
        ScheduleChange { queue: Some(name("elsewhere")), ..ScheduleChange::default() },
        ScheduleChange {
            cron: Some("* * * * *".to_owned()),
            done_until: Some(now + seconds(5)),
            ..ScheduleChange::default()
        },
        ScheduleChange {
            time_zone: Some("UTC".to_owned()),
            done_until: Some(now + seconds(2)), // earlier than what is done
            ..ScheduleChange::default()
        },
        ScheduleChange { item: Some(item), ..ScheduleChange::default() },
    ] {
        change.apply(&mut expected);
        let changed = env.store.update_schedule(&given.name, &change).await.unwrap();
        assert_eq!(changed.as_ref(), Some(&expected));
        assert_eq!(env.other.get_schedule(&given.name).await.unwrap().as_ref(), Some(&expected));
    }
    assert_eq!(expected.done_until, now + seconds(5));
    let other = ScheduleName::parse("name", "other").unwrap();
    assert_eq!(env.store.get_schedule(&other).await.unwrap(), Some(schedule("other", now)));
    let missing = ScheduleName::parse("name", "missing").unwrap();
    let change = ScheduleChange { queue: Some(name("q")), ..ScheduleChange::default() };
    assert_eq!(env.store.update_schedule(&missing, &change).await.unwrap(), None);
    assert_eq!(env.store.get_schedule(&missing).await.unwrap(), None);
}

/// The first key of a number stays, all brokers have the same keys, and the newest few are kept.
pub async fn receipt_keys_are_shared_and_the_newest_are_kept(env: &Env) {
    let key = |number: u32, byte: u8| StoredReceiptKey {
        number,
        secret: [byte; 32],
        created: Timestamp(1_700_000_000_000 + i64::from(number)),
    };
    assert_eq!(env.store.receipt_keys().await.unwrap(), []);
    env.store.add_receipt_key(&key(1, 1)).await.unwrap();
    env.other.add_receipt_key(&key(1, 99)).await.unwrap();
    assert_eq!(env.store.receipt_keys().await.unwrap(), [key(1, 1)]);
    assert_eq!(env.other.receipt_keys().await.unwrap(), [key(1, 1)]);
    for number in 2..=5 {
        env.other.add_receipt_key(&key(number, number as u8)).await.unwrap();
    }
    assert_eq!(env.store.receipt_keys().await.unwrap(), [key(5, 5), key(4, 4), key(3, 3)]);
}
