//! A disk that keeps what was synced, and of the rest what a test chooses.

use std::collections::BTreeMap;

use super::write_log::{Act, Position, Step};

/// The contents of files by their names.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// What may be lost: a change of a file's content, or of the directory.
#[derive(Debug, Clone)]
struct Pending {
    step: usize,
    change: Change,
}

#[derive(Debug, Clone)]
enum Change {
    Content(usize),
    Create(String, usize),
    Unlink(String),
}

/// What of the changes that are not synced is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kept {
    All,
    None,
    /// Those of the directory alone: files are there, and empty.
    Names,
    /// Those of one file, with all of the directory.
    File(usize),
    /// All, but those of one file.
    AllButFile(usize),
    /// All, but of the last one only the first half.
    FirstHalfOfLast,
    /// All, but of the last one only the second half.
    SecondHalfOfLast,
    /// All but one, by its place among them.
    AllBut(usize),
    /// One, by its place among them.
    Only(usize),
}

impl Kept {
    /// Returns whether a change is kept, by its place among those that are not synced.
    fn keeps(self, place: usize, change: &Change) -> bool {
        match (self, change) {
            (Kept::None, _) | (Kept::Names, Change::Content(_)) => false,
            (Kept::File(file), Change::Content(of)) => file == *of,
            (Kept::AllButFile(file), Change::Content(of)) => file != *of,
            (Kept::AllBut(other), _) => place != other,
            (Kept::Only(only), _) => place == only,
            (
                Kept::All
                | Kept::FirstHalfOfLast
                | Kept::SecondHalfOfLast
                | Kept::AllButFile(_)
                | Kept::Names
                | Kept::File(_),
                _,
            ) => true,
        }
    }
}

/// The files as all see them, and as they are on the disk.
#[derive(Debug, Default)]
pub(super) struct Disk {
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
    synced: Vec<Vec<u8>>,
    /// The contents of the files as all see them.
    seen: Vec<Vec<u8>>,
    pending: Vec<Pending>,
    /// Grows whenever something reaches the disk, or is lost.
    version: usize,
}

/// What is synced, and what of the rest is kept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    version: usize,
    steps: Vec<usize>,
    torn: Option<Kept>,
}

fn change(content: &mut Vec<u8>, act: &Act) {
    match act {
        Act::Write(offset, bytes) => {
            let from = *offset as usize;
            let to = from + bytes.len();
            if content.len() < to {
                content.resize(to, 0);
            }
            content[from..to].copy_from_slice(bytes);
        }
        Act::Truncate(length) => content.resize(*length as usize, 0),
        _ => {}
    }
}

fn half(act: &Act, first: bool) -> Act {
    match act {
        Act::Write(offset, bytes) => {
            let (one, two) = bytes.split_at(bytes.len() / 2);
            if first {
                Act::Write(*offset, one.to_vec())
            } else {
                Act::Write(*offset + one.len() as u64, two.to_vec())
            }
        }
        other => other.clone(),
    }
}

impl Disk {
    /// Does the next step.
    pub(super) fn apply(&mut self, number: usize, steps: &[Step]) {
        let step = &steps[number];
        let mut later = |change| self.pending.push(Pending { step: number, change });
        match &step.act {
            Act::Create => {
                self.synced.push(Vec::new());
                self.seen.push(Vec::new());
                self.names.insert(step.file.clone(), self.synced.len() - 1);
                later(Change::Create(step.file.clone(), self.synced.len() - 1));
            }
            Act::Unlink => {
                self.names.remove(&step.file);
                later(Change::Unlink(step.file.clone()));
            }
            act @ (Act::Write(..) | Act::Truncate(_)) => {
                let file = self.names[&step.file];
                later(Change::Content(file));
                change(&mut self.seen[file], act);
            }
            Act::Sync(begun) => {
                let done = self.take_content(&step.file, *begun);
                self.reach_disk(steps, done);
            }
            // The system takes it for written, and so no later sync writes it.
            Act::FailedSync(begun) => drop(self.take_content(&step.file, *begun)),
            Act::SyncDirectory => {
                let done = self.take(|one| !matches!(one.change, Change::Content(_)));
                self.reach_disk(steps, done);
            }
        }
    }

    /// Takes the changes of a file's content that are older than a step from those that are not synced.
    fn take_content(&mut self, name: &str, before: Position) -> Vec<Pending> {
        let file = self.names.get(name).copied();
        self.take(|one| {
            let is_older = (one.step as Position) < before;
            matches!(one.change, Change::Content(of) if Some(of) == file) && is_older
        })
    }

    fn take(&mut self, which: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        let (taken, pending) = std::mem::take(&mut self.pending).into_iter().partition(which);
        self.pending = pending;
        let taken: Vec<Pending> = taken;
        self.version += usize::from(!taken.is_empty());
        taken
    }

    fn reach_disk(&mut self, steps: &[Step], done: Vec<Pending>) {
        for one in done {
            match one.change {
                Change::Content(file) => change(&mut self.synced[file], &steps[one.step].act),
                Change::Create(name, file) => drop(self.synced_names.insert(name, file)),
                Change::Unlink(name) => drop(self.synced_names.remove(&name)),
            }
        }
    }

    /// Returns the files as all see them.
    pub(super) fn seen(&self) -> Files {
        let content = |(name, file): (&String, &usize)| (name.clone(), self.seen[*file].clone());
        self.names.iter().map(content).collect()
    }

    /// Returns the number of changes that are not synced.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns whether nothing is lost.
    pub(super) fn keeps_all(&self, kept: Kept) -> bool {
        self.pending.iter().enumerate().all(|(place, one)| kept.keeps(place, &one.change))
    }

    /// Returns the files with changes that are not synced, by their names.
    pub(super) fn pending_files(&self) -> Vec<(String, usize)> {
        let is_pending = |file: usize| {
            self.pending.iter().any(|one| matches!(one.change, Change::Content(of) if of == file))
        };
        let names = self.names.iter().filter(|(_, file)| is_pending(**file));
        names.map(|(name, file)| (name.clone(), *file)).collect()
    }

    /// Returns what tells the files after a loss of power from those after others.
    pub(super) fn state(&self, kept: Kept) -> State {
        let pending = self.pending.iter().enumerate();
        let kept_steps = pending.filter(|(place, one)| kept.keeps(*place, &one.change));
        State {
            version: self.version,
            steps: kept_steps.map(|(_, one)| one.step).collect(),
            torn: Some(kept)
                .filter(|kept| matches!(kept, Kept::FirstHalfOfLast | Kept::SecondHalfOfLast)),
        }
    }

    /// Returns the files after a loss of power.
    pub(super) fn files(&self, steps: &[Step], kept: Kept) -> Files {
        let mut names = self.synced_names.clone();
        let mut contents: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        let last = self.pending.len().saturating_sub(1);
        for (place, one) in self.pending.iter().enumerate() {
            if !kept.keeps(place, &one.change) {
                continue;
            }
            match &one.change {
                Change::Create(name, file) => drop(names.insert(name.clone(), *file)),
                Change::Unlink(name) => drop(names.remove(name)),
                Change::Content(file) => {
                    let content =
                        contents.entry(*file).or_insert_with(|| self.synced[*file].clone());
                    let act = &steps[one.step].act;
                    match kept {
                        Kept::FirstHalfOfLast if place == last => change(content, &half(act, true)),
                        Kept::SecondHalfOfLast if place == last => {
                            change(content, &half(act, false));
                        }
                        _ => change(content, act),
                    }
                }
            }
        }
        let mut content =
            |file: usize| contents.remove(&file).unwrap_or_else(|| self.synced[file].clone());
        names.into_iter().map(|(name, file)| (name, content(file))).collect()
    }
}
