//! What schedules cost: reads of their payloads, and ticks that are refused.

use std::num::NonZeroU64;

use futures_util::future::join_all;

use super::*;
use crate::{
    domain::{Schedule, ScheduleName, Timestamp, limits::MAX_SCHEDULES},
    engine::EngineError,
};

fn schedule(text: &str, cron: &str) -> Schedule {
    Schedule {
        name: ScheduleName::parse("name", text).unwrap(),
        queue: name("q"),
        cron: cron.to_owned(),
        time_zone: "UTC".to_owned(),
        item: NewItem { payload: text.to_owned().into(), ..NewItem::default() },
        paused: false,
        create_time: Timestamp(0),
        done_until: Timestamp(0),
        last_time: None,
    }
}

impl Bench {
    async fn schedule(&self, text: &str, cron: &str) {
        self.engine.create_schedule(schedule(text, cron)).await.unwrap();
    }
}

/// A schedule that ticks often does not make brokers read the payloads of all the others.
#[tokio::test]
async fn only_schedules_that_are_due_are_read_with_their_payloads() {
    let bench = bench().await;
    for n in 0..20 {
        bench.schedule(&format!("rare{n}"), "0 0 29 2 *").await;
    }
    bench.schedule("often", "* * * * * *").await;
    let before = bench.faults.begun("get_schedule");
    for _ in 0..3 {
        bench.clock.advance(Duration::from_secs(1));
        bench.engine.tick().await.unwrap();
    }
    let items = bench.items().await;
    assert!(items.len() >= 3 && payloads(&items).iter().all(|payload| payload == "often"));
    assert_eq!(bench.faults.begun("get_schedule") - before, items.len());
}

/// A tick that is refused is tried again, less and less often, and pushed when that is possible.
#[tokio::test]
async fn a_schedule_that_is_refused_backs_off() {
    let bench = bench().await;
    bench.push(1).await;
    let change = |max_depth| {
        move |queue: &mut Queue| {
            queue.max_depth = NonZeroU64::new(max_depth);
            Ok(())
        }
    };
    bench.engine.update_queue(&name("q"), &change(1)).await.unwrap();
    bench.schedule("refused", "* * * * * *").await;
    let before = bench.faults.begun("get_schedule");
    for _ in 0..120 {
        bench.clock.advance(Duration::from_secs(1));
        bench.engine.tick().await.unwrap();
    }
    let tries = bench.faults.begun("get_schedule") - before;
    assert!((2..20).contains(&tries), "{tries} tries in 120 seconds");
    let schedule = ScheduleName::parse("name", "refused").unwrap();
    let schedule = bench.engine.get_schedule(&schedule).await.unwrap();
    let error = bench.engine.tick_error(&schedule).expect("why the tick is not pushed");
    assert!(error.contains("full"), "{error}");
    assert_eq!(bench.engine.tick_error(&Schedule { paused: true, ..schedule.clone() }), None);
    bench.engine.update_queue(&name("q"), &change(0)).await.unwrap();
    bench.clock.advance(Duration::from_mins(1));
    bench.engine.tick().await.unwrap();
    assert_eq!(payloads(&bench.items().await), ["0", "refused"]);
    assert_eq!(bench.engine.tick_error(&schedule), None, "the tick is pushed");
    // What a store says may name hosts.
    bench.faults.set("push", Fault::Fails);
    bench.clock.advance(Duration::from_secs(2));
    bench.engine.tick().await.unwrap();
    let error = bench.engine.tick_error(&schedule).expect("why the tick is not pushed");
    assert_eq!(error, "the store failed: the broker's log says more");
}

/// The number of schedules is bounded, also for calls that come together, and a call that is repeated is no schedule more.
#[tokio::test]
async fn schedules_are_bounded() {
    let bench = bench().await;
    let schedule = |n: usize| schedule(&format!("s{n}"), "0 0 1 1 *");
    for n in 0..MAX_SCHEDULES - 1 {
        bench.store.create_schedule(&schedule(n)).await.unwrap();
    }
    let create = |n: usize| bench.engine.create_schedule(schedule(n));
    let both = join_all([create(MAX_SCHEDULES), create(MAX_SCHEDULES + 1)]).await;
    assert_eq!(both.iter().filter(|made| made.is_ok()).count(), 1, "{both:?}");
    assert!(both.iter().any(|made| matches!(made, Err(EngineError::TooManySchedules(_)))));
    create(7).await.expect("it is there");
    bench.engine.delete_schedule(&schedule(7).name).await.unwrap();
    create(7).await.expect("there is room again");
}
