//! The past figures of queues, in memory: every 5 s for a quarter of an hour, every minute for three hours, every eight
//! minutes for a day. The latter two are kept where they survive the broker, see [`super::keeper`].

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;
use sluicegate_proto::v1::QueueStats;

/// How often figures are recorded.
pub(crate) const STEP: Duration = Duration::from_secs(5);
/// Seconds between the points of each level, the finest first.
pub(super) const STEPS: [u32; 3] = [5, 60, 480];
/// The most points of each level.
pub(super) const POINTS: usize = 180;
/// Times are counted from so many seconds before the start, so that restored figures have a time too. A multiple of all
/// steps: what was kept before the start shares no step with what comes after it, which would replace it.
const ORIGIN: u32 = 91_200;
/// The most queues that have a history, which takes up to 22 KB. The one that did not change for the longest time makes room.
const MAX_HISTORIES: usize = 1_000;
/// Figures that are this many steps apart belong to times between which nobody looked.
const GAP: u32 = 3;
/// What a sparkline shows.
const SPARK_SECONDS: u32 = 900;

/// The figures of a queue at some time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastFigures {
    /// The queue.
    pub queue: String,
    /// Numbers of items by state.
    pub ready: i64,
    /// The same.
    pub delayed: i64,
    /// The same.
    pub reserved: i64,
    /// The same.
    pub blocked: i64,
    /// How many items had ever been pushed.
    pub pushed: i64,
    /// How many items had ever left the queue, in whatever way.
    pub left: i64,
}

/// The figures of a queue at one time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Seconds since [`ORIGIN`].
    at: u32,
    ready: i64,
    delayed: i64,
    reserved: i64,
    blocked: i64,
    pushed: i64,
    left: i64,
}

/// Returns how many items have left the queue in whatever way.
pub(crate) fn left(stats: &QueueStats) -> i64 {
    stats.committed + stats.moved + stats.dead_lettered + stats.expired + stats.discarded
}

#[derive(Default)]
struct History {
    levels: [VecDeque<Point>; 3],
    changed_at: u32,
}

impl History {
    fn record(&mut self, point: Point) {
        let last = self.levels[0].back();
        if last.is_none_or(|last| Point { at: point.at, ..*last } != point) {
            self.changed_at = point.at;
        }
        for (level, step) in self.levels.iter_mut().zip(STEPS) {
            match level.back_mut() {
                Some(last) if last.at / step == point.at / step => *last = point,
                _ => level.push_back(point),
            }
            if level.len() > POINTS {
                level.pop_front();
            }
        }
    }

    /// Adds a point to a level, unless the level knows one of its time.
    fn restore(&mut self, level: usize, point: Point) {
        let slot = |point: &Point| point.at / STEPS[level];
        let points = &mut self.levels[level];
        let Err(place) = points.binary_search_by_key(&slot(&point), slot) else { return };
        let before = place.checked_sub(1).map(|before| points[before]);
        if before.is_none_or(|before| Point { at: point.at, ..before } != point) {
            self.changed_at = self.changed_at.max(point.at);
        }
        points.insert(place, point);
        if points.len() > POINTS {
            points.pop_front();
        }
    }

    /// Returns the points from `start` on, each time by the finest level that reaches back to it. Each point comes with the
    /// step of its level.
    fn points(&self, start: u32) -> Vec<(Point, u32)> {
        let mut points = Vec::new();
        for (at, level) in self.levels.iter().enumerate().rev() {
            let finer = at.checked_sub(1).and_then(|finer| self.levels[finer].front());
            let end = finer.map_or(u32::MAX, |first| first.at);
            let of_level = level.iter().filter(|point| point.at >= start && point.at < end);
            points.extend(of_level.map(|point| (*point, STEPS[at])));
        }
        points
    }
}

/// The columns of a chart. `null` where nothing is known.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Series {
    /// Seconds since 1970.
    time: Vec<u64>,
    ready: Vec<Option<i64>>,
    delayed: Vec<Option<i64>>,
    reserved: Vec<Option<i64>>,
    blocked: Vec<Option<i64>>,
    /// Items per second.
    pushed: Vec<Option<f64>>,
    left: Vec<Option<f64>>,
}

impl Series {
    fn push(&mut self, time: u64, point: Option<&Point>, rates: Option<(f64, f64)>) {
        self.time.push(time);
        self.ready.push(point.map(|point| point.ready));
        self.delayed.push(point.map(|point| point.delayed));
        self.reserved.push(point.map(|point| point.reserved));
        self.blocked.push(point.map(|point| point.blocked));
        self.pushed.push(rates.map(|rates| rates.0));
        self.left.push(rates.map(|rates| rates.1));
    }
}

/// The histories of queues, the same for all visitors.
pub(crate) struct Histories {
    start: Instant,
    queues: Mutex<HashMap<String, History>>,
}

impl Default for Histories {
    fn default() -> Self {
        Self { start: Instant::now(), queues: Mutex::default() }
    }
}

impl Histories {
    fn now(&self) -> u32 {
        ORIGIN + self.start.elapsed().as_secs() as u32
    }

    /// Returns the figures of all queues that were recorded just now.
    pub(super) fn latest(&self) -> Vec<PastFigures> {
        let since = self.now() - GAP * STEPS[0];
        let queues = self.queues.lock();
        let latest = queues.iter().filter_map(|(queue, history)| {
            let point = history.levels[0].back().filter(|point| point.at >= since)?;
            Some(PastFigures {
                queue: queue.clone(),
                ready: point.ready,
                delayed: point.delayed,
                reserved: point.reserved,
                blocked: point.blocked,
                pushed: point.pushed,
                left: point.left,
            })
        });
        latest.collect()
    }

    /// Adds figures that were kept, of the level with this step.
    pub(super) fn restore(&self, age: Duration, step: u32, figures: Vec<PastFigures>) {
        // Rounded up, so that what was kept before the start stays before it.
        let age = u32::try_from(age.as_millis().div_ceil(1_000)).unwrap_or(u32::MAX);
        let level = STEPS.iter().position(|of_level| *of_level == step);
        let (Some(level), Some(at)) = (level, self.now().checked_sub(age)) else { return };
        let mut queues = self.queues.lock();
        for PastFigures { queue, ready, delayed, reserved, blocked, pushed, left } in figures {
            let point = Point { at, ready, delayed, reserved, blocked, pushed, left };
            queues.entry(queue).or_default().restore(level, point);
        }
        make_room(&mut queues);
    }

    /// Returns the points of a queue.
    #[cfg(test)]
    pub(super) fn points_of(&self, queue: &str) -> Vec<(Point, u32)> {
        self.queues.lock()[queue].points(0)
    }

    /// Records the figures of many queues as of now, each with whether they have changed lately. While there are as many
    /// histories as may be, only a queue that changes begins another one.
    pub(crate) fn record<'a>(&self, stats: impl Iterator<Item = (&'a QueueStats, bool)>) {
        let at = self.now();
        let mut queues = self.queues.lock();
        for (stats, has_changed) in stats {
            let point = Point {
                at,
                ready: stats.ready,
                delayed: stats.delayed,
                reserved: stats.reserved,
                blocked: stats.blocked,
                pushed: stats.pushed,
                left: left(stats),
            };
            if let Some(history) = queues.get_mut(&stats.queue) {
                history.record(point);
            } else if has_changed || queues.len() < MAX_HISTORIES {
                let mut history = History { changed_at: at, ..History::default() };
                history.record(point);
                queues.insert(stats.queue.clone(), history);
            }
        }
        make_room(&mut queues);
    }

    /// Returns what a chart shows of the last `span`. `now` is the time of day.
    pub(crate) fn series(&self, queue: &str, span: Duration, now: u64) -> Series {
        let queues = self.queues.lock();
        let Some(history) = queues.get(queue) else { return Series::default() };
        let until = self.now();
        let start = until.saturating_sub(span.as_secs() as u32);
        let mut series = Series::default();
        let mut last: Option<Point> = None;
        for (point, step) in history.points(start) {
            let time = now - u64::from(until - point.at);
            let before = last.filter(|last| point.at - last.at <= step * GAP);
            if last.is_some() && before.is_none() {
                series.push(time - u64::from(step), None, None);
            }
            series.push(time, Some(&point), before.and_then(|before| rates(&before, &point)));
            last = Some(point);
        }
        series
    }

    /// Returns the numbers of waiting items of the last 15 minutes, each with its place between 0 (then) and 1 (now).
    pub(crate) fn spark(&self, queue: &str) -> Vec<(f64, i64)> {
        let queues = self.queues.lock();
        let Some(history) = queues.get(queue) else { return Vec::new() };
        let now = self.now();
        let points = history.levels[0].iter().filter(|point| now - point.at <= SPARK_SECONDS);
        let place = |at: u32| 1.0 - f64::from(now - at) / f64::from(SPARK_SECONDS);
        // Every third point: a sparkline is sixty pixels wide.
        points.rev().step_by(3).map(|point| (place(point.at), point.ready)).collect()
    }
}

/// Forgets the histories that did not change for the longest time, if there are more than may be.
fn make_room(queues: &mut HashMap<String, History>) {
    if queues.len() <= MAX_HISTORIES {
        return;
    }
    let mut ages: Vec<u32> = queues.values().map(|history| history.changed_at).collect();
    ages.sort_unstable_by(|a, b| b.cmp(a));
    let oldest = ages[MAX_HISTORIES - 1];
    queues.retain(|_, history| history.changed_at >= oldest);
    let mut surplus = queues.len() - MAX_HISTORIES;
    queues.retain(|_, history| {
        let goes = surplus > 0 && history.changed_at == oldest;
        surplus -= usize::from(goes);
        !goes
    });
}

fn rates(before: &Point, after: &Point) -> Option<(f64, f64)> {
    let seconds = f64::from(after.at.checked_sub(before.at).filter(|seconds| *seconds > 0)?);
    let rate = |before: i64, after: i64| (after - before).max(0) as f64 / seconds;
    Some((rate(before.pushed, after.pushed), rate(before.left, after.left)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at: u32, ready: i64) -> Point {
        Point { at, ready, delayed: 0, reserved: 0, blocked: 0, pushed: i64::from(at), left: 0 }
    }

    #[test]
    fn a_day_is_kept_at_falling_resolution() {
        let mut history = History::default();
        for at in (0..86_400).step_by(5) {
            history.record(point(at, 1));
        }
        assert!(history.levels.iter().all(|level| level.len() <= POINTS));
        let points = history.points(0);
        assert!(points.len() <= 3 * POINTS && points.is_sorted_by_key(|(point, _)| point.at));
        assert!(points[0].0.at < 1_000, "a day is reached: {:?}", points[0]);
        assert_eq!(points.last().map(|(point, step)| (point.at, *step)), Some((86_395, 5)));
        assert!(points.windows(2).all(|pair| pair[1].0.at - pair[0].0.at <= pair[0].1 * GAP));
    }

    #[test]
    fn rates_are_those_between_points_and_gaps_stay_empty() {
        let histories = Histories::default();
        let mut history = History::default();
        for at in [0, 5, 10, 300] {
            history.record(point(ORIGIN + at, 7));
        }
        let mut histories = histories;
        histories.start = Instant::now().checked_sub(Duration::from_mins(5)).unwrap();
        histories.queues.lock().insert("q".to_owned(), history);
        let series = histories.series("q", Duration::from_hours(1), 1_000);
        assert_eq!(series.ready, [Some(7), Some(7), Some(7), None, Some(7)]);
        assert_eq!(series.pushed, [None, Some(1.0), Some(1.0), None, None]);
        assert_eq!(histories.series("none", Duration::from_hours(1), 1_000), Series::default());
    }

    #[test]
    fn restored_figures_come_before_those_since_the_start() {
        let histories = Histories::default();
        let stats = QueueStats { queue: "a".to_owned(), ready: 9, ..QueueStats::default() };
        histories.record([(&stats, true)].into_iter());
        let past = |ready| PastFigures {
            queue: "a".to_owned(),
            ready,
            delayed: 0,
            reserved: 0,
            blocked: 0,
            pushed: 0,
            left: 0,
        };
        // Those of two brokers come in any order, and tell of the same minutes.
        for (minutes, ready) in [(3, 3), (1, 1), (2, 2), (2, 2), (1, 1)] {
            histories.restore(Duration::from_mins(minutes), 60, vec![past(ready)]);
        }
        histories.restore(Duration::from_hours(5), 480, vec![past(5)]);
        histories.restore(Duration::from_hours(26), 480, vec![past(6)]);
        histories.restore(Duration::from_mins(4), 7, vec![past(7)]);
        let series = histories.series("a", Duration::from_hours(24), 100_000);
        let ready: Vec<i64> = series.ready.iter().flatten().copied().collect();
        assert_eq!(ready, [5, 3, 2, 1, 9]);
        assert!(series.time.is_sorted() && (81_990..=82_000).contains(&series.time[0]));
    }

    #[test]
    fn restored_histories_are_bounded_too() {
        let histories = Histories::default();
        let past = |n: usize| PastFigures {
            queue: n.to_string(),
            ready: 1,
            delayed: 0,
            reserved: 0,
            blocked: 0,
            pushed: 1,
            left: 0,
        };
        for hours in [2, 1] {
            let many = (hours * MAX_HISTORIES..(hours + 1) * MAX_HISTORIES).map(past).collect();
            histories.restore(Duration::from_hours(hours as u64), 480, many);
        }
        let queues = histories.queues.lock();
        assert_eq!(queues.len(), MAX_HISTORIES);
        assert!(queues.contains_key(&MAX_HISTORIES.to_string()), "the later ones stay");
    }

    #[test]
    fn histories_are_bounded_and_busy_queues_keep_theirs() {
        let mut histories = Histories::default();
        let queue =
            |n: usize, pushed| QueueStats { queue: n.to_string(), pushed, ..Default::default() };
        histories.record([(&queue(0, 1), false)].into_iter());
        histories.start = Instant::now().checked_sub(STEP).unwrap();
        let many: Vec<_> = (0..3 * MAX_HISTORIES).map(|n| queue(n, 2)).collect();
        histories.record(many.iter().map(|queue| (queue, true)));
        assert_eq!(histories.queues.lock().len(), MAX_HISTORIES);
        histories.start = Instant::now().checked_sub(2 * STEP).unwrap();
        histories.record([(&queue(5_000, 3), true), (&queue(6_000, 3), false)].into_iter());
        assert!(histories.queues.lock().contains_key("5000"));
        assert!(!histories.queues.lock().contains_key("6000"), "idle, and there is no room");
        assert_eq!(histories.queues.lock().len(), MAX_HISTORIES);
    }
}
