//! Schedules: each tick pushes one item, however many brokers there are and whenever they are
//! stopped.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sluicegate_proto::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ItemState,
    PauseScheduleRequest, PushResult, Queue, ResumeScheduleRequest, Schedule,
    TriggerScheduleRequest, UpdateScheduleRequest,
};
use tonic::{Code, Status};

use crate::harness::{Api, Backend, bad_fields, new_item, on_both_backends, redis_url, until};

on_both_backends!(
    of_the_missed_ticks_the_latest_fires_once,
    a_paused_schedule_skips_its_ticks_and_continues_when_resumed,
    a_deleted_schedule_is_gone,
    a_changed_schedule_ticks_by_its_new_settings,
    a_schedule_is_triggered_beside_its_ticks,
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

async fn update(api: &Api, schedule: Schedule, paths: &[&str]) -> Result<Schedule, Status> {
    let paths = paths.iter().map(|&path| path.to_owned()).collect();
    let update_mask = Some(prost_types::FieldMask { paths });
    let request = UpdateScheduleRequest { schedule: Some(schedule), update_mask };
    let answer = api.schedule.clone().update_schedule(request).await?;
    Ok(answer.into_inner().schedule.expect("the schedule in the answer"))
}

async fn a_changed_schedule_ticks_by_its_new_settings(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let made = create(&api, "changed", "0 0 1 1 *").await;
    api.ensure("elsewhere").await;
    let named = || Schedule { name: "changed".to_owned(), ..Schedule::default() };
    // Only the fields in the mask change.
    let junk = Schedule { cron: "junk".to_owned(), queue: "elsewhere".to_owned(), ..named() };
    let moved = update(&api, junk, &["queue"]).await.expect("a change");
    assert_eq!(moved, Schedule { queue: "elsewhere".to_owned(), ..made });
    let refused = [
        (named(), &[][..], "update_mask"),
        (named(), &["paused"], "update_mask"),
        (named(), &["name"], "update_mask"),
        (named(), &["queue"], "schedule.queue"),
        (named(), &["item"], "schedule.item"),
        (Schedule { cron: "0 0 30 2 *".to_owned(), ..named() }, &["cron"], "schedule.cron"),
        (
            Schedule { time_zone: "Mars".to_owned(), ..named() },
            &["time_zone"],
            "schedule.time_zone",
        ),
    ];
    for (schedule, paths, field) in refused {
        let status = update(&api, schedule, paths).await.expect_err(field);
        assert_eq!(
            (status.code(), bad_fields(&status)),
            (Code::InvalidArgument, vec![field.to_owned()])
        );
    }
    let missing = Schedule { name: "none".to_owned(), ..named() };
    let status = update(&api, missing, &["cron"]).await.expect_err("no schedule");
    assert_eq!(status.code(), Code::NotFound);

    let (cron, item) = ("* * * * * *".to_owned(), Some(new_item("new")));
    let often = Schedule { cron, item, ..named() };
    let changed = update(&api, often, &["cron", "item"]).await.expect("a change");
    assert!(changed.next_time.is_some());
    let pushed = until("an item of the new settings", || async {
        api.list("elsewhere", ItemState::Ready).await.into_iter().next()
    })
    .await;
    assert_eq!(&pushed.payload[..], b"new");
    assert!(api.list("ticks", ItemState::Ready).await.is_empty());
}

async fn a_schedule_is_triggered_beside_its_ticks(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let before = create(&api, "rare", "0 0 1 1 *").await;
    let request = PauseScheduleRequest { name: "rare".to_owned() };
    api.schedule.clone().pause_schedule(request).await.expect("a pause");
    let trigger = async |request_id: &str| -> PushResult {
        let (name, request_id) = ("rare".to_owned(), request_id.to_owned());
        let request = TriggerScheduleRequest { name, request_id };
        let answer = api.schedule.clone().trigger_schedule(request).await.expect("a push");
        answer.into_inner().result.expect("the item in the answer")
    };
    let first = trigger("a").await;
    let again = trigger("a").await;
    assert_eq!((&again.id, first.deduplicated, again.deduplicated), (&first.id, false, true));
    let others = [trigger("b").await, trigger("").await, trigger("").await];
    let items = api.list("ticks", ItemState::Ready).await;
    assert_eq!(items.len(), 4);
    for id in others.iter().chain([&first]).map(|pushed| &pushed.id) {
        assert!(items.iter().any(|item| item.id == *id && &item.payload[..] == b"tick"));
    }
    let request = ResumeScheduleRequest { name: "rare".to_owned() };
    let resumed = api.schedule.clone().resume_schedule(request).await.expect("a schedule");
    let resumed = resumed.into_inner().schedule.expect("the schedule in the answer");
    assert_eq!((resumed.next_time, resumed.last_time), (before.next_time, None));
    let request = TriggerScheduleRequest { name: "rare".to_owned(), request_id: "x".repeat(65) };
    let refused = api.schedule.clone().trigger_schedule(request).await.expect_err("too long");
    assert_eq!(bad_fields(&refused), ["request_id"]);
}
