//! What clients were told, to be found after a loss of power.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use super::write_log::{Position, WriteLog};

/// An answer, and how many steps there were at most when it was given.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    pub(crate) position: Position,
    pub(crate) call: String,
}

/// What clients know of an item, by numbers of steps.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Known {
    /// At most so many steps there were when a client was told first that the item is there.
    told: Option<Position>,
    /// At least so many there were when it was to be committed.
    leaves: Option<Position>,
    /// At most so many there were when a client was told that it is gone.
    gone: Option<Position>,
}

/// What was promised.
pub(crate) enum Promises {
    /// Calls came one after the other: all commits were synced before an answer, but for the last one.
    Answers(Vec<Answered>),
    /// Calls came at once: items are there, or gone.
    Items(BTreeMap<String, Known>),
}

impl Promises {
    /// Returns the numbers of steps at which a promise was given, in their order.
    pub(super) fn positions(&self) -> Vec<usize> {
        let mut positions: Vec<usize> = match self {
            Self::Answers(answers) => answers.iter().map(|one| one.position as usize).collect(),
            Self::Items(items) => {
                let given = items.values().flat_map(|known| [known.told, known.gone]);
                given.flatten().map(|position| position as usize).collect()
            }
        };
        positions.sort_unstable();
        positions.dedup();
        positions
    }
}

/// Returns what is wrong with the items that are there after so many steps.
pub(super) fn broken(
    promised: &BTreeMap<String, Known>,
    there: &[String],
    steps: usize,
) -> Option<String> {
    let steps = steps as Position;
    let is_past = |position: Option<Position>| position.is_some_and(|at| at <= steps);
    if let Some([item, ..]) = there.windows(2).find(|two| two[0] == two[1]) {
        return Some(format!("{item} is there twice"));
    }
    promised.iter().find_map(|(item, known)| {
        let is_there = there.binary_search(item).is_ok();
        if is_there && is_past(known.gone) {
            Some(format!("{item} is there again: {known:?}"))
        } else if !is_there && is_past(known.told) && !is_past(known.leaves) {
            Some(format!("{item} is lost: {known:?}"))
        } else {
            None
        }
    })
}

/// Collects what clients are told at the same time.
pub(super) struct Notes {
    log: WriteLog,
    items: Mutex<BTreeMap<String, Known>>,
}

impl Notes {
    pub(super) fn new(log: WriteLog) -> Self {
        Self { log, items: Mutex::default() }
    }

    /// Notes that an item was there when a call was answered just now.
    pub(super) fn is_there(&self, item: &str) {
        self.note(item, |known| &mut known.told);
    }

    /// Notes that an item is about to be committed.
    pub(super) fn leaves(&self, item: &str) {
        self.note(item, |known| &mut known.leaves);
    }

    /// Notes that a commit was answered just now.
    pub(super) fn is_gone(&self, item: &str) {
        self.note(item, |known| &mut known.gone);
    }

    fn note(&self, item: &str, which: impl Fn(&mut Known) -> &mut Option<Position>) {
        let position = self.log.position();
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        which(items.entry(item.to_owned()).or_default()).get_or_insert(position);
    }

    pub(super) fn into_promises(self) -> Promises {
        Promises::Items(self.items.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}
