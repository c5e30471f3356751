//! Schedules: each tick pushes one item, however many brokers there are and whenever they are
//! stopped.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sluicegate_proto::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ItemState,
    PauseScheduleRequest, Queue, ResumeScheduleRequest, Schedule,
};
use tonic::Code;

use crate::harness::{Api, Backend, new_item, on_both_backends, redis_url, until};

on_both_backends!(
    of_the_missed_ticks_the_latest_fires_once,
    a_paused_schedule_skips_its_ticks_and_continues_when_resumed,
    a_deleted_schedule_is_gone,
);

async fn create(api: &Api, name: &str, cron: &str) -> Schedule {
    api.create(Queue { name: "ticks".to_owned(), ..Queue::default() }).await;
    let schedule = Schedule {
        name: name.to_owned(),
        queue: "ticks".to_owned(),
        cron: cron.to_owned(),
        item: Some(new_item("tick")),
        ..Schedule::default()
    };
    let request = CreateScheduleRequest { schedule: Some(schedule) };
    let answer = api.schedule.clone().create_schedule(request).await.expect("a schedule");
    answer.into_inner().schedule.expect("the schedule in the answer")
}

/// Returns the ticks, in seconds since 1970, whose items are in the queue, in the order of their
/// pushes.
async fn ticks(api: &Api, schedule: &str) -> Vec<u64> {
    let items = api.list("ticks", ItemState::Ready).await;
    let tick = |id: &str| {
        let (name, tick) = id.split_once('@').expect("schedule and tick");
        assert_eq!(name, schedule);
        let millis: u64 = tick.parse().expect("a tick in milliseconds");
        assert_eq!(millis % 1000, 0, "a tick is a whole second");
        millis / 1000
    };
    items.iter().map(|item| tick(&item.dedup_id)).collect()
}

/// Waits until there are this many ticks.
async fn until_ticks(api: &Api, schedule: &str, count: usize) -> Vec<u64> {
    until(&format!("{count} ticks"), || async {
        Some(ticks(api, schedule).await).filter(|ticks| ticks.len() >= count)
    })
    .await
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970")
}

/// Waits until this second has passed. Ticks depend on nothing but time.
async fn until_past(second: u64) {
    let end = Duration::from_millis(second * 1000 + 300);
    tokio::time::sleep(end.saturating_sub(now())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_brokers_push_each_tick_once_and_miss_none() {
    const PERIOD: u64 = 2;
    let store = Backend::Mongo.store();
    let launch = store.launch().signals(&redis_url());
    let (here, there) = (launch.start().await, launch.start().await);
    let (api, remote) = (here.api().await, there.api().await);
    // Both brokers know of the schedule, and push its items from the first tick on.
    let made = create(&api, "every", &format!("*/{PERIOD} * * * * *")).await;
    let there_too = create(&remote, "every", &format!("*/{PERIOD} * * * * *")).await;
    // A tick may lie between the two calls.
    assert_eq!((&there_too.cron, there_too.create_time), (&made.cron, made.create_time));
    until_ticks(&api, "every", 5).await;
    // When one broker is gone, the other continues.
    here.kill();
    let seen = until_ticks(&remote, "every", 8).await;
    for (earlier, later) in seen.iter().zip(&seen[1..]) {
        assert_eq!(later - earlier, PERIOD, "a tick is missing or doubled: {seen:?}");
    }
    // No tick was pushed again after its item was gone: reserving the items does not bring any
    // back.
    let taken = remote.reserve_now("ticks", 1000).await;
    let receipts: Vec<&str> = taken.iter().map(|delivery| delivery.receipt.as_str()).collect();
    remote.commit(&receipts).await;
    let there = [there, launch.start().await];
    let again = until_ticks(&there[1].api().await, "every", 1).await;
    let last = taken.last().and_then(|delivery| delivery.item.as_ref()).expect("an item");
    let last: u64 = last.dedup_id["every@".len()..].parse().expect("a tick");
    assert!(again[0] > last / 1000, "tick {} was pushed again after it was settled", again[0]);
}

async fn of_the_missed_ticks_the_latest_fires_once(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    // Four ticks a minute: one that is pushed on time, and three that find no broker.
    let first = now().as_secs() + 3;
    let missed = [first + 5, first + 6, first + 7];
    let seconds: Vec<String> =
        [first, missed[0], missed[1], missed[2]].map(|tick| (tick % 60).to_string()).into();
    let api = broker.api().await;
    create(&api, "some", &format!("{} * * * * *", seconds.join(","))).await;
    assert_eq!(until_ticks(&api, "some", 1).await, [first]);
    broker.kill();
    assert!(now().as_secs() < missed[0], "the broker was killed too late for this test");
    until_past(missed[2]).await;

    let launch = store.launch();
    let broker = launch.start().await;
    let api = broker.api().await;
    assert_eq!(until_ticks(&api, "some", 2).await, [first, missed[2]]);
    // Another start finds the tick done. A schedule created on the broker shows that it has
    // checked.
    broker.stop().await;
    let broker = launch.start().await;
    let api = broker.api().await;
    let marker = Schedule {
        name: "marker".to_owned(),
        queue: "marks".to_owned(),
        cron: "* * * * * *".to_owned(),
        item: Some(new_item("mark")),
        ..Schedule::default()
    };
    let request = CreateScheduleRequest { schedule: Some(marker) };
    api.schedule.clone().create_schedule(request).await.expect("a schedule");
    api.reserve_one("marks", Duration::from_mins(1)).await;
    assert_eq!(ticks(&api, "some").await, [first, missed[2]]);
}

async fn a_paused_schedule_skips_its_ticks_and_continues_when_resumed(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, "every", "* * * * * *").await;
    until_ticks(&api, "every", 2).await;
    let request = PauseScheduleRequest { name: "every".to_owned() };
    let paused = api.schedule.clone().pause_schedule(request).await.expect("an answer");
    let paused = paused.into_inner().schedule.expect("the schedule");
    assert!(paused.paused && paused.next_time.is_none(), "{paused:?}");
    // A tick that was being pushed when the pause was acknowledged may still be pushed. It is the
    // last one.
    let pause = now().as_secs();
    until_past(pause + 2).await;
    let before = ticks(&api, "every").await;
    assert!(before.iter().all(|tick| *tick <= pause), "{before:?} after a pause at {pause}");

    let resume = now().as_secs();
    let request = ResumeScheduleRequest { name: "every".to_owned() };
    let resumed = api.schedule.clone().resume_schedule(request).await.expect("an answer");
    let resumed = resumed.into_inner().schedule.expect("the schedule");
    assert!(!resumed.paused && resumed.next_time.is_some(), "{resumed:?}");
    let after = until_ticks(&api, "every", before.len() + 1).await;
    assert!(after[before.len()] > pause + 1, "a tick of the pause was pushed later: {after:?}");
    assert!(after[before.len()] >= resume, "{after:?}, resumed at {resume}");
}

async fn a_deleted_schedule_is_gone(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    create(&api, "every", "* * * * * *").await;
    until_ticks(&api, "every", 1).await;
    let request = DeleteScheduleRequest { name: "every".to_owned() };
    api.schedule.clone().delete_schedule(request).await.expect("an answer");
    let deleted = now().as_secs();
    let request = GetScheduleRequest { name: "every".to_owned() };
    let gone = api.schedule.clone().get_schedule(request).await.expect_err("no such schedule");
    assert_eq!(gone.code(), Code::NotFound);
    until_past(deleted + 2).await;
    let seen = ticks(&api, "every").await;
    assert!(!seen.is_empty(), "the items it pushed stay");
    assert!(seen.iter().all(|tick| *tick <= deleted), "{seen:?}, deleted at {deleted}");
}
