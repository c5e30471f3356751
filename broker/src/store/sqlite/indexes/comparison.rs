//! Compares the items with their indexes, a few at a time.

use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::Index;

/// The progress of a comparison of the items with their indexes.
#[derive(Debug)]
pub(super) struct Comparison {
    sql: String,
    /// The last row that was compared.
    after: i64,
}

/// The result of a step of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// There are more rows to compare.
    More,
    /// All rows fit.
    Done,
    /// An index does not lead to one of its rows.
    Missed,
}

impl Comparison {
    /// Starts a comparison at the first item.
    pub(super) fn new(indexes: &[Index]) -> Self {
        let missed: Vec<_> =
            indexes.iter().filter(|index| index.table == "items").map(Index::is_missed).collect();
        let missed = missed.join(" OR ");
        Self {
            sql: format!("SELECT id, {missed} FROM items i NOT INDEXED WHERE id > ?1 ORDER BY id"),
            after: i64::MIN,
        }
    }

    /// Compares the next items, for about `time`.
    pub(super) fn step(&mut self, conn: &Connection, time: Duration) -> rusqlite::Result<Step> {
        let start = Instant::now();
        let mut statement = conn.prepare_cached(&self.sql)?;
        let mut rows = statement.query([self.after])?;
        while let Some(row) = rows.next()? {
            if row.get(1)? {
                return Ok(Step::Missed);
            }
            self.after = row.get(0)?;
            if start.elapsed() >= time {
                return Ok(Step::More);
            }
        }
        Ok(Step::Done)
    }
}
