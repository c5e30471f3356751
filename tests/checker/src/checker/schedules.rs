//! Schedules: each of their ticks is pushed once, and none that is not theirs. Of those that were missed in a fault the last one is pushed soon
//! after it.

use std::collections::BTreeSet;

use super::{
    Checker,
    key::{Key, Map},
    state::Mark,
};
use crate::{
    history::{Answer, Delivery, Request, Span, Tick, Time, Times},
    rules::Rule,
};

/// A tick that could not be pushed is tried again within so many microseconds, and a broker that has started knows its schedules by then.
const TRIED_AGAIN: Span = 70_000_000;

/// A time in which a schedule had the same settings for certain.
struct Steady {
    from: Mark,
    to: Option<Mark>,
    /// When it ticked, or nothing if it did not: the schedule was paused, or not there.
    times: Option<Times>,
}

/// What is known of a schedule.
pub(super) struct Schedule {
    exists: Option<bool>,
    paused: Option<bool>,
    times: Option<Times>,
    /// Changes under way.
    open: u32,
    steady: Vec<Steady>,
    seen: BTreeSet<Time>,
}

impl Schedule {
    /// Returns a schedule of which nobody has heard.
    fn unheard_of() -> Self {
        let none = Steady { from: Mark::default(), to: None, times: None };
        Self {
            exists: Some(false),
            paused: Some(false),
            times: None,
            open: 0,
            steady: vec![none],
            seen: BTreeSet::new(),
        }
    }

    fn begin_change(&mut self, now: Mark) {
        self.open += 1;
        if let Some(last) = self.steady.last_mut() {
            last.to.get_or_insert(now);
        }
    }

    fn end_change(&mut self, request: &Request, answer: &Answer, now: Mark) {
        self.open = self.open.saturating_sub(1);
        let not_found = matches!(answer, Answer::Refused(code) if code == "NotFound");
        let done = matches!(answer, Answer::Ok(_));
        // Who asks again after an unknown outcome finds what the first call has done.
        let or_not = |value: bool| done.then_some(value);
        match request {
            Request::DeleteSchedule { .. } if not_found => self.exists = Some(false),
            _ if matches!(answer, Answer::Refused(_)) => {}
            Request::CreateSchedule { times, .. } => {
                if self.exists == Some(false) {
                    (self.paused, self.times) = (Some(false), Some(*times));
                }
                self.exists = or_not(true);
                self.times = self.times.filter(|known| known == times);
            }
            Request::UpdateSchedule { times, .. } => self.times = done.then_some(*times),
            Request::PauseSchedule { .. } => self.paused = or_not(true),
            Request::ResumeSchedule { .. } => self.paused = or_not(false),
            Request::DeleteSchedule { .. } => self.exists = or_not(false),
            _ => {}
        }
        let times = match (self.exists, self.paused, self.times) {
            (Some(false), ..) | (_, Some(true), _) => None,
            (Some(true), Some(false), Some(times)) => Some(times),
            _ => return,
        };
        if self.open == 0 {
            self.steady.push(Steady { from: now, to: None, times });
        }
    }

    /// Returns what is wrong with a tick at this time, and the event that says so.
    fn objection(&self, at: Time, clock: Span) -> Option<(&'static str, u64)> {
        let holds = |span: &&Steady| {
            at > span.from.at + clock && span.to.is_none_or(|to| at + clock < to.at)
        };
        let span = self.steady.iter().rev().find(holds)?;
        let what = match span.times {
            None => "it was paused, or not there",
            Some(times) if !times.hold(at) => "it had other times",
            Some(_) => return None,
        };
        Some((what, span.from.event))
    }
}

/// Returns the name of the schedule that a request changes.
pub(super) fn schedule_of(request: &Request) -> Option<&str> {
    match request {
        Request::CreateSchedule { schedule, .. }
        | Request::UpdateSchedule { schedule, .. }
        | Request::PauseSchedule { schedule }
        | Request::ResumeSchedule { schedule }
        | Request::DeleteSchedule { schedule } => Some(schedule),
        _ => None,
    }
}

impl Checker {
    pub(super) fn start_schedule_change(&mut self, schedule: &str) {
        let now = self.now;
        let schedule = self.schedules.entry(schedule.to_owned());
        schedule.or_insert_with(Schedule::unheard_of).begin_change(now);
    }

    pub(super) fn end_schedule_change(&mut self, request: &Request, answer: &Answer) {
        let now = self.now;
        let schedule = schedule_of(request).and_then(|name| self.schedules.get_mut(name));
        if let Some(schedule) = schedule {
            schedule.end_change(request, answer, now);
        }
    }

    /// An item that a tick has pushed was seen for the first time.
    pub(super) fn tick_seen(&mut self, tick: &Tick, delivery: &Delivery, queue: Key) {
        let now = self.now;
        self.adopt_stray(&delivery.id, &delivery.name, queue);
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.totals.unsure = true; // ticks that nobody has seen count too
        }
        let schedule = self.schedules.entry(tick.schedule.clone());
        let schedule = schedule.or_insert_with(Schedule::unheard_of);
        schedule.seen.insert(tick.at);
        let objection = schedule.objection(tick.at, self.options.clock);
        if let Some(before) = self.ticks.insert(Key::of(&delivery.name), now.event) {
            let explanation =
                format!("one tick has pushed two items, the second is {}", delivery.id);
            return self.violate(Rule::Ticks, None, &tick.schedule, explanation, &[before]);
        }
        if self.clock_stepped > 0 {
            return;
        }
        if tick.at > now.at + self.options.clock {
            let explanation = format!("{} ms before its time", (tick.at - now.at) / 1_000);
            self.violate(Rule::Ticks, None, &tick.schedule, explanation, &[]);
        } else if let Some((what, event)) = objection {
            let explanation = format!("{} was pushed, when {what}", delivery.name);
            self.violate(Rule::Ticks, None, &tick.schedule, explanation, &[event]);
        }
    }

    /// At rest: no tick is missing, but those of which a later one was pushed after a fault.
    pub(super) fn check_missed_ticks(&mut self) {
        if self.clock_stepped > 0 {
            return;
        }
        let mut missing = Vec::new();
        for (name, schedule) in &self.schedules {
            for span in &schedule.steady {
                let Some(times) = span.times else { continue };
                let to = span.to.unwrap_or(self.now);
                if let Some(at) = self.missed_tick(schedule, span.from.at, to.at, times) {
                    missing.push((name.clone(), at, [span.from.event, to.event]));
                }
            }
        }
        for (name, at, events) in missing {
            let explanation = format!("its tick at {:.3} s is missing", at as f64 / 1e6);
            self.violate(Rule::Ticks, None, &name, explanation, &events);
        }
    }

    fn missed_tick(&self, schedule: &Schedule, from: Time, to: Time, times: Times) -> Option<Time> {
        let mut due = times.after(from + self.options.clock).take_while(|at| *at < to);
        due.find(|at| {
            let by = self.pushed_by(*at).filter(|by| *by <= to);
            by.is_some_and(|by| schedule.seen.range(at..=&by).next().is_none())
        })
    }

    /// Returns by when a tick is pushed, or the last of those that were missed with it; `None` if there was always a fault.
    fn pushed_by(&self, tick: Time) -> Option<Time> {
        let mut by = tick + 2 * self.options.transit; // some calls of the store are needed
        for (begin, end) in &self.fault_spans {
            if *begin < by {
                by = by.max((*end)? + TRIED_AGAIN);
            }
        }
        Some(by)
    }
}

/// Events of the first item of each tick that was seen, by the item's name.
pub(super) type Ticks = Map<Key, u64>;
