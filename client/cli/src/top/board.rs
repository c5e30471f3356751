//! What is known about all queues: figures, rates, and which of them are shown in which order.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use sluicegate_client::proto::{Queue, QueueStats};

use crate::{queue::is_called_dead, values};

/// Rates are those of this many seconds, with one sample a second.
const SAMPLES: usize = 10;
/// A queue with items that have been ready for this time, and from which nobody takes any, is stuck.
const STUCK_AFTER: Duration = Duration::from_mins(1);

/// What the rows are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Name,
    Ready,
    Delayed,
    Reserved,
    Blocked,
    Oldest,
    In,
    Out,
    Consumers,
}

impl Sort {
    /// All of them, in the order of the columns, each with its key.
    pub(super) const ALL: [(Self, char); 9] = [
        (Self::Name, 'n'),
        (Self::Ready, 'r'),
        (Self::Delayed, 'd'),
        (Self::Reserved, 'v'),
        (Self::Blocked, 'b'),
        (Self::Oldest, 'a'),
        (Self::In, 'i'),
        (Self::Out, 'o'),
        (Self::Consumers, 'c'),
    ];

    /// Returns true if the largest value comes first, unless the order is reversed.
    pub(super) fn is_descending(self) -> bool {
        self != Self::Name
    }
}

/// Why a queue stands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Nothing is handed out because somebody wants it so.
    Paused,
    /// Items have been ready for long, and nobody takes them.
    Stuck,
    /// Dead letters are in it.
    DeadLetters,
}

/// One queue.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub(super) stats: QueueStats,
    pub(super) paused: bool,
    is_dead_letter_queue: bool,
    /// When the figures came.
    at: Option<Instant>,
    /// When, and how many items had come and left by then.
    samples: VecDeque<(Instant, i64, i64)>,
}

impl Row {
    /// Returns how many items a second came and left, lately.
    pub(super) fn rates(&self) -> (f64, f64) {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return (0.0, 0.0);
        };
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        if seconds <= 0.0 {
            return (0.0, 0.0);
        }
        // Totals begin anew if a queue is deleted and created again.
        let rate = |from: i64, to: i64| (to - from).max(0) as f64 / seconds;
        (rate(first.1, last.1), rate(first.2, last.2))
    }

    /// Returns how long the oldest ready item has been ready, at `now`.
    pub(super) fn oldest(&self, now: Instant) -> Option<Duration> {
        let age = self.stats.oldest_ready_age.as_ref().map(values::from_proto)?;
        Some(age + self.at.map_or(Duration::ZERO, |at| now.duration_since(at)))
    }

    /// Returns why the queue stands out, if it does.
    pub(super) fn mark(&self, now: Instant) -> Option<Mark> {
        let held = self.stats.ready + self.stats.delayed + self.stats.reserved + self.stats.blocked;
        if self.paused {
            Some(Mark::Paused)
        } else if self.is_dead_letter_queue {
            (held > 0).then_some(Mark::DeadLetters)
        } else {
            let waits = self.oldest(now).is_some_and(|age| age >= STUCK_AFTER);
            let is_taken = self.stats.consumers_of_all_brokers > 0 || self.rates().1 > 0.0;
            (waits && !is_taken).then_some(Mark::Stuck)
        }
    }

    /// Takes a sample, unless the figures are not known yet: what was before would count as having come just now.
    fn take_sample(&mut self, now: Instant) {
        if self.at.is_none() {
            return;
        }
        let stats = &self.stats;
        let left =
            stats.committed + stats.moved + stats.dead_lettered + stats.expired + stats.discarded;
        self.samples.push_back((now, stats.pushed, left));
        if self.samples.len() > SAMPLES + 1 {
            self.samples.pop_front();
        }
    }
}

/// All queues, by name.
#[derive(Debug, Default)]
pub(super) struct Board {
    rows: BTreeMap<String, Row>,
}

impl Board {
    /// Takes over figures that the broker has sent.
    pub(super) fn counted(&mut self, stats: Vec<QueueStats>, now: Instant) {
        for stats in stats {
            let row = self.rows.entry(stats.queue.clone()).or_default();
            row.is_dead_letter_queue |= is_called_dead(&stats.queue);
            (row.stats, row.at) = (stats, Some(now));
            if row.samples.is_empty() {
                row.take_sample(now);
            }
        }
    }

    /// Takes over the list of all queues: those that are not in it are gone.
    pub(super) fn listed(&mut self, queues: &[Queue]) {
        let names: BTreeSet<&str> = queues.iter().map(|queue| queue.name.as_str()).collect();
        self.rows.retain(|name, _| names.contains(name.as_str()));
        let named: BTreeSet<&str> =
            queues.iter().map(|queue| queue.dead_letter_queue.as_str()).collect();
        for queue in queues {
            let row = self.rows.entry(queue.name.clone()).or_default();
            row.stats.queue.clone_from(&queue.name);
            row.paused = queue.paused;
            row.is_dead_letter_queue =
                named.contains(queue.name.as_str()) || is_called_dead(&queue.name);
        }
    }

    /// Takes a sample of each queue, from which rates come. The broker sends figures only if they have changed.
    pub(super) fn sample(&mut self, now: Instant) {
        for row in self.rows.values_mut() {
            row.take_sample(now);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn row(&self, queue: &str) -> Option<&Row> {
        self.rows.get(queue)
    }

    /// Returns the queues whose names contain `filter`, in order; those that are equal by name.
    pub(super) fn shown(&self, filter: &str, sort: Sort, reverse: bool, now: Instant) -> Vec<&Row> {
        let filter = filter.to_lowercase();
        let is_shown = |row: &&Row| row.stats.queue.to_lowercase().contains(&filter);
        let mut rows: Vec<&Row> = self.rows.values().filter(is_shown).collect();
        rows.sort_by(|a, b| {
            let order = compare(sort, a, b, now);
            if sort.is_descending() == reverse { order } else { order.reverse() }
        });
        rows
    }
}

fn compare(sort: Sort, a: &Row, b: &Row, now: Instant) -> Ordering {
    let by = |of: fn(&QueueStats) -> i64| of(&a.stats).cmp(&of(&b.stats));
    match sort {
        Sort::Name => a.stats.queue.cmp(&b.stats.queue),
        Sort::Ready => by(|stats| stats.ready),
        Sort::Delayed => by(|stats| stats.delayed),
        Sort::Reserved => by(|stats| stats.reserved),
        Sort::Blocked => by(|stats| stats.blocked),
        Sort::Oldest => a.oldest(now).cmp(&b.oldest(now)),
        Sort::In => a.rates().0.total_cmp(&b.rates().0),
        Sort::Out => a.rates().1.total_cmp(&b.rates().1),
        Sort::Consumers => by(|stats| i64::from(stats.consumers_of_all_brokers)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(queue: &str, ready: i64) -> QueueStats {
        QueueStats { queue: queue.to_owned(), ready, ..QueueStats::default() }
    }

    fn names(rows: &[&Row]) -> Vec<String> {
        rows.iter().map(|row| row.stats.queue.clone()).collect()
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let (mut board, start) = (Board::default(), Instant::now());
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            let (pushed, committed) = (10 * second as i64, if second < 5 { 0 } else { 40 });
            board.counted(vec![QueueStats { pushed, committed, ..stats("q", 0) }], now);
            board.sample(now);
        }
        assert_eq!(board.row("q").unwrap().rates(), (10.0, 0.0));
        // Nothing is sent of a queue in which nothing happens.
        for second in 20..40 {
            board.sample(start + Duration::from_secs(second));
        }
        assert_eq!(board.row("q").unwrap().rates(), (0.0, 0.0));
    }

    #[test]
    fn what_was_there_before_the_first_figures_is_no_rate() {
        let (mut board, start) = (Board::default(), Instant::now());
        board.listed(&[Queue { name: "q".to_owned(), ..Queue::default() }]);
        board.sample(start);
        let later = start + Duration::from_secs(1);
        board.counted(vec![QueueStats { pushed: 1_000, ..stats("q", 1_000) }], later);
        board.sample(later + Duration::from_secs(1));
        assert_eq!(board.row("q").unwrap().rates(), (0.0, 0.0));
    }

    #[test]
    fn rows_are_filtered_and_sorted_and_equal_ones_stay_by_name() {
        let (mut board, now) = (Board::default(), Instant::now());
        board.counted(vec![stats("mail", 2), stats("Orders", 7), stats("orders.x", 2)], now);
        let shown = |filter: &str, sort, reverse| names(&board.shown(filter, sort, reverse, now));
        assert_eq!(shown("", Sort::Ready, false), ["Orders", "mail", "orders.x"]);
        assert_eq!(shown("", Sort::Ready, true), ["mail", "orders.x", "Orders"]);
        assert_eq!(shown("ORD", Sort::Name, false), ["Orders", "orders.x"]);
        assert_eq!(shown("", Sort::Name, true), ["orders.x", "mail", "Orders"]);
    }

    #[test]
    fn the_list_of_queues_says_which_are_gone_paused_or_for_dead_letters() {
        let (mut board, now) = (Board::default(), Instant::now());
        board.counted(vec![stats("a", 1), stats("gone", 1), stats("graves", 1)], now);
        let queue = |name: &str| Queue { name: name.to_owned(), ..Queue::default() };
        let dead_letter_queue = "graves".to_owned();
        let paused = Queue { paused: true, dead_letter_queue, ..queue("a") };
        board.listed(&[paused, queue("new"), queue("graves")]);
        assert!(board.row("gone").is_none() && board.row("new").is_some());
        assert_eq!(board.row("a").unwrap().mark(now), Some(Mark::Paused));
        assert_eq!(board.row("graves").unwrap().mark(now), Some(Mark::DeadLetters));
        assert_eq!(board.row("graves").unwrap().stats.ready, 1, "figures stay");
    }

    #[test]
    fn stuck_is_what_waits_while_nobody_takes_it() {
        let (mut board, now) = (Board::default(), Instant::now());
        let age = Some(prost_types::Duration { seconds: 30, nanos: 0 });
        let waiting = QueueStats { oldest_ready_age: age, ..stats("q", 1) };
        board.counted(vec![waiting.clone()], now);
        assert_eq!(board.row("q").unwrap().mark(now), None);
        let later = now + Duration::from_secs(30);
        assert_eq!(board.row("q").unwrap().mark(later), Some(Mark::Stuck), "it goes on aging");
        board.counted(vec![QueueStats { consumers_of_all_brokers: 1, ..waiting }], now);
        assert_eq!(board.row("q").unwrap().mark(later), None, "somebody is at work");
    }
}
