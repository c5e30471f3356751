//! Which queues a page shows: searched, filtered, sorted, cut into pages.

use std::cmp::Reverse;

use serde::Deserialize;
use tonic::Status;

use super::{Board, Row};

/// Queues on a page.
const PAGE: usize = 50;

/// What the address of the page asks for.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Query {
    /// A part of the name.
    pub(crate) search: String,
    pub(crate) show: Show,
    pub(crate) sort: Sort,
    /// From 1.
    pub(crate) page: usize,
}

/// Which queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Show {
    #[default]
    All,
    Busy,
    Stuck,
    Paused,
    Dead,
}

impl Show {
    /// All of them, with their words in addresses and on the page.
    pub(crate) const ALL: [(Self, &str, &str); 5] = [
        (Self::All, "all", "All"),
        (Self::Busy, "busy", "Busy"),
        (Self::Stuck, "stuck", "Stuck"),
        (Self::Paused, "paused", "Paused"),
        (Self::Dead, "dead", "Dead letters"),
    ];

    fn includes(self, row: &Row) -> bool {
        match self {
            Self::All => true,
            Self::Busy => row.rates.0 > 0.0 || row.rates.1 > 0.0 || row.stats.reserved > 0,
            Self::Stuck => row.is_stuck(),
            Self::Paused => row.settings.paused,
            Self::Dead => row.has_dead_letters(),
        }
    }
}

/// The order: names upwards, figures downwards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Sort {
    #[default]
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
    /// The word in addresses.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Ready => "ready",
            Self::Delayed => "delayed",
            Self::Reserved => "reserved",
            Self::Blocked => "blocked",
            Self::Oldest => "oldest",
            Self::In => "in",
            Self::Out => "out",
            Self::Consumers => "consumers",
        }
    }

    fn key(self, row: &Row) -> i64 {
        match self {
            Self::Name => 0,
            Self::Ready => row.stats.ready,
            Self::Delayed => row.stats.delayed,
            Self::Reserved => row.stats.reserved,
            Self::Blocked => row.stats.blocked,
            Self::Oldest => row.oldest().map_or(-1, |age| age.as_secs() as i64),
            Self::In => (row.rates.0 * 1_000.0) as i64,
            Self::Out => (row.rates.1 * 1_000.0) as i64,
            Self::Consumers => i64::from(row.stats.consumers_of_all_brokers),
        }
    }
}

/// One page of queues, and sums over all of them.
#[derive(Default)]
pub(crate) struct Selection {
    pub(crate) rows: Vec<Row>,
    /// How many queues match.
    pub(crate) matching: usize,
    /// The number of this page, from 1, and of the last one.
    pub(crate) page: usize,
    pub(crate) pages: usize,
    pub(crate) queues: usize,
    pub(crate) ready: i64,
    pub(crate) rates: (f64, f64),
    pub(crate) stuck: usize,
    pub(crate) paused: usize,
    pub(crate) dead_letters: i64,
    /// Why the figures are not up to date.
    pub(crate) problem: Option<Status>,
}

impl Board {
    /// Returns the page of queues that `query` asks for.
    pub(crate) fn select(&self, query: &Query) -> Selection {
        let state = self.state.lock();
        let mut selection = Selection { problem: state.problem.clone(), ..Selection::default() };
        let search = query.search.trim().to_lowercase();
        let mut found = Vec::new();
        for (name, row) in &state.rows {
            selection.add(row);
            let is_found = search.is_empty() || name.to_lowercase().contains(&search);
            if is_found && query.show.includes(row) {
                found.push((name, row));
            }
        }
        if query.sort != Sort::Name {
            // Stable: queues with the same figure stay sorted by name.
            found.sort_by_cached_key(|(_, row)| Reverse(query.sort.key(row)));
        }
        selection.matching = found.len();
        selection.pages = found.len().div_ceil(PAGE).max(1);
        selection.page = query.page.clamp(1, selection.pages);
        let page = found.into_iter().skip((selection.page - 1) * PAGE).take(PAGE);
        selection.rows = page.map(|(_, row)| row.clone()).collect();
        selection
    }
}

impl Selection {
    fn add(&mut self, row: &Row) {
        self.queues += 1;
        self.rates.0 += row.rates.0;
        self.rates.1 += row.rates.1;
        self.paused += usize::from(row.settings.paused);
        self.stuck += usize::from(row.is_stuck());
        if row.is_dead_letter_queue {
            self.dead_letters += row.held();
        } else {
            self.ready += row.stats.ready;
        }
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_proto::v1::{Queue, QueueStats};
    use tokio_util::sync::CancellationToken;

    use super::*;

    fn board(queues: usize) -> Board {
        let board = Board::new(CancellationToken::new());
        let name = |n: usize| format!("orders-{n:05}");
        let queue = |n| Queue { name: name(n), paused: n == 3, ..Queue::default() };
        board.settings_read((0..queues).map(queue).collect());
        let stats = |n| QueueStats { queue: name(n), ready: n as i64, ..QueueStats::default() };
        board.counted((0..queues).map(stats).collect());
        board
    }

    fn names(selection: &Selection) -> Vec<&str> {
        selection.rows.iter().map(|row| row.settings.name.as_str()).collect()
    }

    #[test]
    fn pages_are_sorted_and_searched() {
        let board = board(120);
        let query = Query { search: "ERS-0001".to_owned(), sort: Sort::Ready, ..Query::default() };
        let selection = board.select(&query);
        assert_eq!((selection.matching, selection.queues, selection.pages), (10, 120, 1));
        assert_eq!(names(&selection)[..2], ["orders-00019", "orders-00018"]);
        let last = board.select(&Query { page: 99, ..Query::default() });
        assert_eq!((last.page, last.pages, last.rows.len()), (3, 3, 20));
        let paused = board.select(&Query { show: Show::Paused, ..Query::default() });
        assert_eq!(names(&paused), ["orders-00003"]);
    }

    /// A page of ten thousand queues is made anew each second for each browser.
    #[test]
    fn ten_thousand_queues_are_one_page_at_a_time() {
        let selection = board(10_000).select(&Query { sort: Sort::Ready, ..Query::default() });
        assert_eq!((selection.rows.len(), selection.pages, selection.paused), (PAGE, 200, 1));
        assert_eq!(names(&selection)[0], "orders-09999");
    }
}
