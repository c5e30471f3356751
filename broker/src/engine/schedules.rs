//! Recurring items. Every broker computes the ticks. The `dedup_id` of a tick's item consists of
//! the schedule and the tick, so that the store keeps one item of each tick.

use std::{collections::HashMap, time::Duration};

use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};
use jiff::{Zoned, tz::TimeZone};
use sluicegate_proto::backoff::Backoff;

use crate::{
    domain::{
        Clock, DedupId, Invalid, Pushed, Schedule, ScheduleChange, ScheduleName, Timestamp,
        limits::MAX_SCHEDULES,
    },
    store::{Created, StoreError},
};

use super::{Engine, EngineError, Result};

/// How long the store remembers a pushed tick beyond the next tick. This is longer than any broker
/// takes from reading a schedule to pushing its tick.
const TICK_MEMORY: Duration = Duration::from_mins(10);
/// Upper bound of the time for which a tick is remembered.
const MAX_TICK_MEMORY: Duration = Duration::from_hours(720);
/// Number of schedules read at a time, without the payloads of their items.
const PAGE: usize = 500;
/// Number of a schedule's next ticks that are shown.
const NEXT_TICKS: usize = 3;
/// Pauses after ticks that could not be pushed, for example because the queue is full.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1));

/// Checks a cron expression, which must have a next time, and a time zone. Errors name the field
/// `cron` or `time_zone`.
pub(crate) fn check_cron(cron: &str, time_zone: &str) -> Result<(), Invalid> {
    let ticks = Ticks::parse(cron, time_zone)?;
    match ticks.after(Clock::machine_time()) {
        Some(_) => Ok(()),
        None => Err(Invalid::new("cron", "it names a time that never comes")),
    }
}

struct Ticks {
    cron: Cron,
    zone: TimeZone,
}

impl Ticks {
    fn parse(cron: &str, time_zone: &str) -> Result<Self, Invalid> {
        let parser =
            CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
        let cron = parser.parse(cron).map_err(|error| {
            let help = "five fields (minute, hour, day, month, weekday), or six with seconds first";
            Invalid::new("cron", format!("{error}; {help}"))
        })?;
        let zone = TimeZone::get(time_zone).map_err(|_| {
            Invalid::new(
                "time_zone",
                format!("{time_zone:?} is not an IANA name such as Europe/Vienna"),
            )
        })?;
        Ok(Self { cron, zone })
    }

    fn at(&self, time: Timestamp) -> Option<Zoned> {
        let time = jiff::Timestamp::from_millisecond(time.millis()).ok()?;
        Some(time.to_zoned(self.zone.clone()))
    }

    /// Returns the first tick after `time`.
    fn after(&self, time: Timestamp) -> Option<Timestamp> {
        let tick = self.cron.find_next_occurrence(&self.at(time)?, false).ok()?;
        Some(Timestamp(tick.timestamp().as_millisecond()))
    }

    /// Returns the last tick at or before `time`.
    fn latest(&self, time: Timestamp) -> Option<Timestamp> {
        let tick = self.cron.find_previous_occurrence(&self.at(time)?, true).ok()?;
        Some(Timestamp(tick.timestamp().as_millisecond()))
    }
}

impl Engine {
    /// Creates a schedule, whose first tick is the next one from now. If a schedule with the same
    /// name and settings exists, that schedule is returned.
    pub(crate) async fn create_schedule(&self, schedule: Schedule) -> Result<Schedule> {
        self.check_open()?;
        check_cron(&schedule.cron, &schedule.time_zone)?;
        let now = self.now();
        let wanted = Schedule { create_time: now, done_until: now, last_time: None, ..schedule };
        let _turn = self.turn_to_add().await?;
        if self.store.get_schedule(&wanted.name).await?.is_none() {
            self.check_number_of_schedules().await?;
        }
        let made = match self.store.create_schedule(&wanted).await? {
            Created::New(schedule) => schedule,
            Created::Existing(there) => {
                let same = Schedule {
                    create_time: there.create_time,
                    done_until: there.done_until,
                    last_time: there.last_time,
                    paused: there.paused,
                    ..wanted
                };
                if same != there {
                    return Err(EngineError::ScheduleExists(there.name));
                }
                there
            }
        };
        self.schedules_changed.notify_one();
        Ok(made)
    }

    async fn check_number_of_schedules(&self) -> Result<()> {
        let (mut number, mut after) = (0, None);
        loop {
            let page = self.store.list_schedules(after.as_ref(), PAGE, false).await?;
            number += page.len();
            if number >= MAX_SCHEDULES {
                return Err(EngineError::TooManySchedules(MAX_SCHEDULES));
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after = Some(last.name.clone()),
                _ => return Ok(()),
            }
        }
    }

    /// Returns a schedule.
    pub(crate) async fn get_schedule(&self, name: &ScheduleName) -> Result<Schedule> {
        let schedule = self.store.get_schedule(name).await?;
        schedule.ok_or_else(|| EngineError::ScheduleNotFound(name.clone()))
    }

    /// Returns schedules in the order of their names.
    pub(crate) async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
    ) -> Result<Vec<Schedule>> {
        Ok(self.store.list_schedules(after, limit, true).await?)
    }

    /// Changes a schedule. If its times change, the next tick is the first one from now.
    pub(crate) async fn update_schedule(
        &self,
        name: &ScheduleName,
        mut change: ScheduleChange,
    ) -> Result<Schedule> {
        self.check_open()?;
        let before = self.get_schedule(name).await?;
        let mut wanted = before.clone();
        change.apply(&mut wanted);
        if wanted == before {
            return Ok(before);
        }
        if (&wanted.cron, &wanted.time_zone) != (&before.cron, &before.time_zone) {
            check_cron(&wanted.cron, &wanted.time_zone).map_err(|e| e.within("schedule"))?;
            change.done_until = Some(self.now());
        }
        let schedule = self.store.update_schedule(name, &change).await?;
        self.schedules_changed.notify_one();
        schedule.ok_or_else(|| EngineError::ScheduleNotFound(name.clone()))
    }

    /// Pushes the item of a schedule now. A repeated call with the same `request_id` pushes nothing and returns the first
    /// item.
    pub(crate) async fn trigger_schedule(
        &self,
        name: &ScheduleName,
        request_id: &str,
    ) -> Result<Pushed> {
        self.check_open()?;
        let Schedule { queue, mut item, .. } = self.get_schedule(name).await?;
        if !request_id.is_empty() {
            // No name of a schedule has this character, and no tick.
            item.dedup_id = DedupId::new(format!("{name}!{request_id}"));
        }
        let pushed = self.push_once(&queue, item, TICK_MEMORY).await?;
        let unanswered =
            || StoreError::Internal { reason: "a push without a result".into(), source: None };
        Ok(pushed.ok_or_else(unanswered)?)
    }

    /// Deletes a schedule.
    pub(crate) async fn delete_schedule(&self, name: &ScheduleName) -> Result<()> {
        if self.store.delete_schedule(name).await? {
            Ok(())
        } else {
            Err(EngineError::ScheduleNotFound(name.clone()))
        }
    }

    /// Pauses a schedule, or resumes it with its next tick.
    pub(crate) async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
    ) -> Result<Schedule> {
        let before = self.get_schedule(name).await?;
        if before.paused == paused {
            return Ok(before);
        }
        let schedule = self.store.pause_schedule(name, paused, self.now()).await?;
        self.schedules_changed.notify_one();
        schedule.ok_or_else(|| EngineError::ScheduleNotFound(name.clone()))
    }

    /// Returns the schedule's next ticks, [`NEXT_TICKS`] at most; none if the schedule is paused.
    pub(crate) fn next_ticks(&self, schedule: &Schedule) -> Vec<Timestamp> {
        if schedule.paused {
            return Vec::new();
        }
        let Ok(ticks) = Ticks::parse(&schedule.cron, &schedule.time_zone) else {
            return Vec::new();
        };
        let first = ticks.after(schedule.done_until.max(self.now()));
        std::iter::successors(first, |tick| ticks.after(*tick)).take(NEXT_TICKS).collect()
    }

    /// Returns why this broker could not push the schedule's due tick so far, if that is so.
    pub(crate) fn tick_error(&self, schedule: &Schedule) -> Option<String> {
        if schedule.paused {
            return None;
        }
        self.refused_ticks.lock().of.get(&schedule.name).map(|refusal| refusal.error.clone())
    }

    /// Pushes the items that are due, and returns the time of the next tick. Of several missed
    /// ticks only the latest is pushed.
    pub(crate) async fn tick(&self) -> Result<Option<Timestamp>> {
        let mut next: Option<Timestamp> = None;
        let mut after: Option<ScheduleName> = None;
        self.refused_ticks.lock().forget_old(self.now());
        loop {
            let page = self.store.list_schedules(after.as_ref(), PAGE, false).await?;
            for schedule in page.iter().filter(|schedule| !schedule.paused) {
                let waits = self.refused_ticks.lock().until(&schedule.name, self.now());
                let tick = match waits {
                    Some(later) => Some(later),
                    None => match self.tick_one(schedule).await {
                        Ok(tick) => {
                            self.refused_ticks.lock().of.remove(&schedule.name);
                            tick
                        }
                        Err(error) => {
                            let mut refused = self.refused_ticks.lock();
                            Some(refused.add(&schedule.name, &error, self.now()))
                        }
                    },
                };
                next = match (next, tick) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after = Some(last.name.clone()),
                _ => return Ok(next),
            }
        }
    }

    async fn tick_one(&self, schedule: &Schedule) -> Result<Option<Timestamp>> {
        let ticks = Ticks::parse(&schedule.cron, &schedule.time_zone)?;
        let now = self.now();
        let due = ticks.latest(now).filter(|tick| *tick > schedule.done_until);
        let Some(tick) = due else { return Ok(ticks.after(now)) };
        let is_same = |read: &Schedule| {
            (&read.cron, &read.time_zone, read.done_until, read.paused)
                == (&schedule.cron, &schedule.time_zone, schedule.done_until, false)
        };
        // If the schedule has changed since it was listed, the next round sees it as it is.
        if let Some(schedule) = self.store.get_schedule(&schedule.name).await?.filter(is_same) {
            let mut item = schedule.item;
            item.dedup_id = DedupId::new(format!("{}@{}", schedule.name, tick.millis()));
            self.push_once(&schedule.queue, item, memory(&ticks, now)).await?;
            self.store.tick_done(&schedule.name, tick).await?;
        }
        Ok(ticks.after(now))
    }

    /// Waits until a schedule is created or changed on this broker.
    pub(crate) async fn schedules_changed(&self) {
        self.schedules_changed.notified().await;
    }
}

/// Schedules whose ticks could not be pushed.
#[derive(Default)]
pub(super) struct RefusedTicks {
    of: HashMap<ScheduleName, Refusal>,
}

/// Why and how often in a row a tick could not be pushed.
struct Refusal {
    failures: u32,
    /// When the tick is tried again.
    again: Timestamp,
    error: String,
}

impl RefusedTicks {
    /// Forgets the schedules that were not tried again when their time came, because they are gone.
    fn forget_old(&mut self, now: Timestamp) {
        self.of.retain(|_, refusal| refusal.again + TICK_MEMORY > now);
    }

    /// Returns when to try the schedule again, if that is later.
    fn until(&self, name: &ScheduleName, now: Timestamp) -> Option<Timestamp> {
        self.of.get(name).map(|refusal| refusal.again).filter(|again| *again > now)
    }

    /// Adds a failure, and returns when to try again.
    fn add(&mut self, name: &ScheduleName, error: &EngineError, now: Timestamp) -> Timestamp {
        let failures = self.of.get(name).map_or(0, |refusal| refusal.failures);
        if failures == 0 {
            tracing::warn!(schedule = %name, %error, "could not push; trying again");
        } else {
            tracing::debug!(schedule = %name, %error, "could not push; trying again");
        }
        let again = now + BACKOFF.delay(failures);
        let refusal =
            Refusal { failures: failures.saturating_add(1), again, error: error.in_words() };
        self.of.insert(name.clone(), refusal);
        again
    }
}

/// Returns how long to remember a tick that is pushed now. Nobody pushes this tick after the next
/// one, because of several missed ticks only the latest is pushed. Until then the tick may be
/// pushed again, if the broker dies before the schedule records the push.
fn memory(ticks: &Ticks, now: Timestamp) -> Duration {
    let next = ticks.after(now).map_or(MAX_TICK_MEMORY, |next| now.until(next));
    (next + TICK_MEMORY).min(MAX_TICK_MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        Timestamp(text.parse::<jiff::Timestamp>().unwrap().as_millisecond())
    }

    #[test]
    fn ticks_follow_the_time_zone_across_daylight_saving_changes() {
        let ticks = Ticks::parse("30 8 * * *", "Europe/Vienna").unwrap();
        assert_eq!(ticks.after(at("2026-03-28T12:00:00Z")), Some(at("2026-03-29T06:30:00Z")));
        assert_eq!(ticks.after(at("2026-03-27T12:00:00Z")), Some(at("2026-03-28T07:30:00Z")));
        assert_eq!(ticks.latest(at("2026-03-29T06:30:00Z")), Some(at("2026-03-29T06:30:00Z")));
    }

    /// A schedule that ticks every second leaves minutes of ticks in the store, not thirty days.
    #[test]
    fn a_tick_is_remembered_until_after_the_next_one() {
        let now = at("2026-01-01T00:00:00Z");
        let memory = |cron| super::memory(&Ticks::parse(cron, "UTC").unwrap(), now);
        assert_eq!(memory("* * * * * *"), Duration::from_secs(601));
        assert_eq!(memory("0 0 * * *"), Duration::from_hours(24) + Duration::from_mins(10));
        assert_eq!(memory("0 0 1 1 *"), Duration::from_hours(720));
    }

    #[test]
    fn seconds_may_come_first() {
        let ticks = Ticks::parse("*/2 * * * * *", "UTC").unwrap();
        assert_eq!(ticks.after(at("2026-01-01T00:00:00Z")), Some(at("2026-01-01T00:00:02Z")));
    }

    #[test]
    fn an_error_names_its_field() {
        for cron in ["", "* * *", "61 * * * *", "* * * * * * 2030", "hello"] {
            assert_eq!(check_cron(cron, "UTC").unwrap_err().field, "cron", "{cron:?}");
        }
        // An expression that never matches is refused as well. One that rarely matches is accepted.
        for cron in ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 0 31 11 *"] {
            assert_eq!(check_cron(cron, "UTC").unwrap_err().field, "cron", "{cron:?}");
        }
        assert_eq!(check_cron("0 0 29 2 *", "UTC"), Ok(()));
        assert_eq!(check_cron("* * * * *", "Mars").unwrap_err().field, "time_zone");
    }
}
