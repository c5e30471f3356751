//! The writer's upkeep of the indexes: compares them with the items after the start, and rebuilds damaged ones.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    super::{order, runs, tx::View},
    Index, all, are_defined,
    comparison::{Comparison, Step},
    damaged, damaged_inside, rebuild,
};

/// Time for which items are compared with their indexes before any call is served: enough for about 40,000.
const AT_START: Duration = Duration::from_millis(200);
/// Time of one later step, for which calls wait.
const STEP: Duration = Duration::from_millis(1);
/// Pause between two steps: the comparison takes one twentieth of the writer's time until it is done.
const BETWEEN_STEPS: Duration = Duration::from_millis(20);
/// Pause between two searches for damaged indexes. The pause is at least [`SEARCH_SHARE`] times as long as the first
/// search took, because the tables may be damaged instead, and every call may meet that.
const BETWEEN_SEARCHES: Duration = Duration::from_secs(10);
const SEARCH_SHARE: u32 = 20;

/// Who has met damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum MetBy {
    /// A reader: an item may be damaged instead.
    Reader,
    /// A transaction, in which no item was found damaged.
    Writer,
}

/// Keeps the indexes consistent with the tables.
#[derive(Debug)]
pub(in super::super) struct Upkeep {
    indexes: Vec<Index>,
    /// `None` once it is done.
    comparison: Option<Comparison>,
    next_step: Instant,
    next_search: Instant,
    /// Set by readers that met damage.
    suspected: Arc<AtomicBool>,
}

impl Upkeep {
    /// Starts the comparison and compares as many items with their indexes as there is time for. Indexes that are
    /// missing or found damaged are rebuilt.
    pub(in super::super) fn start(
        view: &View<'_>,
        suspected: Arc<AtomicBool>,
    ) -> rusqlite::Result<Self> {
        let indexes = all()?;
        let now = Instant::now();
        let comparison = Some(Comparison::new(&indexes));
        let mut upkeep = Self { indexes, comparison, next_step: now, next_search: now, suspected };
        if !are_defined(view.conn, &upkeep.indexes)? {
            upkeep.mend(view, MetBy::Reader);
        }
        upkeep.compare(view, AT_START);
        Ok(upkeep)
    }

    /// Returns when the next step is due, as far as known.
    pub(in super::super) fn due(&self) -> Option<Instant> {
        self.comparison.is_some().then_some(self.next_step)
    }

    /// Does what is due. Returns the queues in which items have become ready.
    pub(in super::super) fn go_on(&mut self, view: &View<'_>) -> BTreeSet<String> {
        if self.suspected.swap(false, Ordering::Relaxed) {
            return self.mend(view, MetBy::Reader).unwrap_or_default();
        }
        if self.due().is_some_and(|due| Instant::now() >= due) {
            return self.compare(view, STEP);
        }
        BTreeSet::new()
    }

    fn compare(&mut self, view: &View<'_>, time: Duration) -> BTreeSet<String> {
        let Some(comparison) = &mut self.comparison else { return BTreeSet::new() };
        match comparison.step(view.conn, time) {
            Ok(Step::More) => self.next_step = Instant::now() + BETWEEN_STEPS,
            Ok(Step::Done) => {
                self.comparison = None;
                tracing::debug!("the indexes of the store's file lead to all its items");
            }
            found => {
                if let Err(error) = found {
                    tracing::error!(%error, "could not compare the indexes of the store's file with its items");
                }
                // A search reads all rows.
                if Instant::now() >= self.next_search {
                    self.comparison = None;
                    return self.mend(view, MetBy::Reader).unwrap_or_default();
                }
                self.next_step = self.next_search;
            }
        }
        BTreeSet::new()
    }

    /// Searches for damaged indexes and rebuilds them. Must be called when damage was met that may be in an index.
    /// Returns `None` if nothing was done, otherwise the queues in which items have become ready.
    ///
    /// Nothing else is written meanwhile. This takes 3 to 5 seconds for a million items. If nothing is found but a
    /// writer met the damage, it takes as long as reading the whole file.
    pub(in super::super) fn mend(
        &mut self,
        view: &View<'_>,
        met_by: MetBy,
    ) -> Option<BTreeSet<String>> {
        let start = Instant::now();
        if start < self.next_search {
            return None;
        }
        let mended = self.rebuild_damaged(view, met_by);
        // The next reserve would begin behind items that were found again.
        if let Err(error) = runs::write_out_or_end(view.conn) {
            tracing::error!(%error, "could not write leases into their items");
        }
        let pause = start.elapsed().saturating_mul(SEARCH_SHARE).max(BETWEEN_SEARCHES);
        self.next_search = Instant::now() + pause;
        mended.unwrap_or_else(|error| {
            tracing::error!(
                %error,
                "the tables of the store's file are damaged, or its indexes cannot be rebuilt: see `sluicegate check`"
            );
            None
        })
    }

    fn rebuild_damaged(
        &self,
        view: &View<'_>,
        met_by: MetBy,
    ) -> rusqlite::Result<Option<BTreeSet<String>>> {
        let mut damaged = damaged(view.conn, &self.indexes)?;
        if damaged.is_empty() && met_by == MetBy::Writer {
            damaged = damaged_inside(view.conn, &self.indexes)?;
        }
        if damaged.is_empty() {
            return Ok(None);
        }
        for (Index { name, .. }, fault) in &damaged {
            tracing::error!(index = %name, %fault, "an index of the store's file is damaged: rebuilding it");
        }
        rebuild(view.conn, damaged.iter().map(|(index, _)| *index))?;
        let unblocked = order::restore_turns(view)?;
        tracing::warn!(
            "the damaged indexes were rebuilt; `sluicegate check FILE --repair` frees the pages of the old ones \
             when no broker runs. Damage to a file has a cause: look at the disk"
        );
        Ok(Some(unblocked))
    }
}
