//! Schedules: what ticks may push, and must.

use sluicegate_checker::{
    Rule,
    history::{Answer, Delivery, Outcome, Request, Response, Tick, Times, What},
};

use crate::story::{MS, Story, delivery};

const EVERY: u64 = 5_000;

fn every(ms: u64, offset: u64) -> Times {
    Times { every: ms * MS, offset: offset * MS }
}

fn create_with(times: Times) -> Request {
    Request::CreateSchedule { schedule: "daily".to_owned(), times }
}

fn create() -> Request {
    create_with(every(EVERY, 0))
}

fn pause() -> Request {
    Request::PauseSchedule { schedule: "daily".to_owned() }
}

fn resume() -> Request {
    Request::ResumeSchedule { schedule: "daily".to_owned() }
}

fn delete() -> Request {
    Request::DeleteSchedule { schedule: "daily".to_owned() }
}

fn update() -> Request {
    Request::UpdateSchedule { schedule: "daily".to_owned(), times: every(2 * EVERY, 0) }
}

impl Story {
    /// Changes the schedule at a time.
    fn change(&mut self, ms: u64, request: Request) -> &mut Self {
        self.at(ms).call(request, Response::Done)
    }

    /// Receives and commits what the schedule has pushed for a tick, under this id.
    fn tick_as(&mut self, ms: u64, id: &str) -> &mut Self {
        let tick = Some(Tick { schedule: "daily".to_owned(), at: ms * MS });
        let name = format!("daily@{ms}");
        self.reserve(Delivery { name, tick, ..delivery(id, 1) });
        self.commit(&format!("{id}/1"), Outcome::Ok)
    }

    /// The same at the time of the tick.
    fn tick(&mut self, ms: u64) -> &mut Self {
        self.at(ms).tick_as(ms, &format!("item of {ms}"))
    }
}

#[test]
fn a_schedule_ticks_while_it_is_there_and_not_paused() {
    let mut story = Story::default();
    story.change(1_000, create()).tick(5_000).tick(10_000).change(12_000, pause());
    story.change(21_000, resume()).tick(25_000).change(26_000, update()).tick(30_000).tick(40_000);
    story.change(41_000, delete()).at(60_000).rest().is_clean();
}

#[test]
fn a_change_of_unknown_outcome_is_repeated() {
    let mut story = Story::default();
    let call = story.at(1_000).start(create());
    story.unknown(call).tick(5_000).change(9_000, create()).tick(10_000);
    let call = story.at(11_000).start(delete());
    story.unknown(call);
    let call = story.at(18_000).start(delete());
    story.end(call, Answer::Refused("NotFound".to_owned())).at(60_000).rest().is_clean();
    story.tick_as(20_000, "late").breaks(Rule::Ticks, "daily", 2);
}

fn fault(begins: bool) -> What {
    What::Disturbed { begins, fault: "the store is stopped".to_owned() }
}

#[test]
fn of_the_ticks_that_were_missed_in_a_fault_the_last_one_is_pushed() {
    for is_pushed in [true, false] {
        let mut story = Story::default();
        story.change(1_000, create()).tick(5_000).at(8_000).tell(fault(true));
        story.at(21_000).tell(fault(false));
        if is_pushed {
            story.tick_as(20_000, "late");
        }
        story.change(24_000, delete()).at(30_000).rest().is_clean();
    }
    let mut story = Story::default();
    story.change(1_000, create()).tick(5_000).at(8_000).tell(fault(true));
    story.at(21_000).tell(fault(false)).change(200_000, delete()).rest();
    assert!(story.report().rules().contains(&Rule::Ticks), "{}", story.report());
}

/// A schedule that ticks at 10 s and 130 s, the first time in a fault that ends at 21 s. The first tick is pushed at this time, if at all.
fn rare(pushed_at: Option<u64>) -> Story {
    let mut story = Story::default();
    story.change(1_000, create_with(every(120_000, 10_000))).at(8_000).tell(fault(true));
    story.at(21_000).tell(fault(false));
    if let Some(ms) = pushed_at {
        story.at(ms).tick_as(10_000, "late");
    }
    story.tick(130_000).change(150_000, delete()).rest();
    story
}

#[test]
fn a_tick_that_was_missed_in_a_fault_is_pushed_before_the_next_one() {
    for pushed_at in [11_000, 80_000] {
        rare(Some(pushed_at)).is_clean();
    }
    let report = rare(None).breaks(Rule::Ticks, "daily", 3).to_string();
    assert!(report.contains("its tick at 10.000 s is missing"), "{report}");
    // Another fault comes before it could be.
    let mut story = Story::default();
    story.change(1_000, create_with(every(120_000, 10_000)));
    for (from, to) in [(8_000, 21_000), (60_000, 70_000)] {
        story.at(from).tell(fault(true)).at(to).tell(fault(false));
    }
    story.tick(130_000).change(139_000, delete()).rest().is_clean();
}

#[test]
fn a_tick_pushes_two_items() {
    let mut story = Story::default();
    story.change(1_000, create()).tick(5_000).tick_as(5_000, "second");
    story.breaks(Rule::Ticks, "daily", 2);
}

#[test]
fn a_tick_is_missing() {
    let mut story = Story::default();
    story.change(1_000, create()).tick(5_000).tick(15_000).change(16_000, delete()).rest();
    let report = story.breaks(Rule::Ticks, "daily", 3).to_string();
    assert!(report.contains("its tick at 10.000 s is missing"), "{report}");
}

#[test]
fn a_tick_comes_early() {
    let mut story = Story::default();
    story.change(1_000, create()).at(4_000).tick_as(5_000, "early");
    story.breaks(Rule::Ticks, "daily", 1);
}

#[test]
fn a_schedule_ticks_that_is_paused_or_not_there() {
    let mut story = Story::default();
    story.change(1_000, create()).change(2_000, pause()).tick(5_000);
    story.breaks(Rule::Ticks, "daily", 2);
    let mut story = Story::default();
    story.change(1_000, create()).change(2_000, delete()).tick(5_000);
    story.breaks(Rule::Ticks, "daily", 2);
    // What passes during a pause is lost.
    let mut story = Story::default();
    story.change(1_000, create()).change(2_000, pause()).change(8_000, resume());
    story.tick_as(5_000, "late").breaks(Rule::Ticks, "daily", 2);
}

#[test]
fn a_schedule_ticks_at_the_times_that_it_had() {
    let mut story = Story::default();
    story.change(1_000, create()).tick(5_000).change(6_000, update()).tick(10_000).tick(15_000);
    story.breaks(Rule::Ticks, "daily", 2);
}
