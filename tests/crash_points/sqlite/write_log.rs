//! What a broker did to its store's files, recorded by the library of tests/write_log.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{harness, wire::Command};

/// The number of steps before something happened.
pub(crate) type Position = u64;

/// What happened to a file of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    Create,
    Write(u64, Vec<u8>),
    Truncate(u64),
    Sync,
    Unlink,
    /// The directory was synced, with the names of all files.
    SyncDirectory,
}

/// A step, with what follows the store's name in the name of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) file: String,
    pub(super) act: Act,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = if self.file.is_empty() { "store" } else { &self.file[1..] };
        match &self.act {
            Act::Create => write!(f, "create {file}"),
            Act::Write(offset, bytes) => write!(f, "write {file} {offset}+{}", bytes.len()),
            Act::Truncate(length) => write!(f, "truncate {file} {length}"),
            Act::Sync => write!(f, "sync {file}"),
            Act::Unlink => write!(f, "unlink {file}"),
            Act::SyncDirectory => f.write_str("sync directory"),
        }
    }
}

/// An answer, and how many steps there were at most when it was given.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    pub(crate) position: Position,
    pub(crate) call: String,
}

/// All that was recorded in one lane.
pub(crate) struct Recording {
    pub(super) steps: Vec<Step>,
    pub(super) answers: Vec<Answered>,
    /// Positions at which the broker was started anew after it was killed.
    pub(super) restarts: Vec<Position>,
}

/// Syncs that fail, as the recording library numbers them.
#[derive(Debug, Clone, Copy)]
pub(super) enum FailingSyncs {
    None = 0,
    OfFile = 1,
    OfLog = 2,
}

/// A log in the making.
#[derive(Clone)]
pub(crate) struct WriteLog {
    store: PathBuf,
    /// The numbers that tests/write_log shares with this process.
    control: Arc<File>,
}

/// Where the number of steps stands in the control file, and where the step after which the broker is killed.
const STEPS: u64 = 0;
const KILL_AFTER: u64 = 8;
/// Where it says whether syncs of the store's file fail.
const FAIL_SYNCS: u64 = 16;

/// Returns the path of a file of the log, whose name must not begin with the store's.
fn beside(store: &Path, suffix: &str) -> PathBuf {
    store.with_file_name(format!("writes{suffix}"))
}

impl WriteLog {
    /// Begins a log of a store that does not exist yet, in the store's directory.
    pub(crate) fn begin(store: &Path) -> Self {
        let path = beside(store, "-control");
        fs::write(&path, [0; 24]).expect("a file to write");
        let control = File::options().read(true).write(true).open(path).expect("a file to open");
        Self { store: store.to_owned(), control: Arc::new(control) }
    }

    fn path(&self, suffix: &str) -> PathBuf {
        beside(&self.store, suffix)
    }

    /// Returns the variables of the environment of a process whose writes are recorded.
    pub(crate) fn variables(&self) -> [(&'static str, PathBuf); 4] {
        let library = harness::binary("libsluicegate_write_log.so");
        [
            ("LD_PRELOAD", library),
            ("WRITE_LOG_STORE", self.store.clone()),
            ("WRITE_LOG_FILE", self.path("-log")),
            ("WRITE_LOG_CONTROL", self.path("-control")),
        ]
    }

    fn number(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.control.read_exact_at(&mut bytes, at).expect("a number of the control file");
        u64::from_le_bytes(bytes)
    }

    pub(crate) fn position(&self) -> Position {
        self.number(STEPS)
    }

    /// Lets the broker be killed after so many more steps; 0: not at all.
    pub(crate) fn kill_after(&self, steps: usize) {
        let at = if steps == 0 { 0 } else { self.position() + steps as u64 };
        self.control.write_all_at(&at.to_le_bytes(), KILL_AFTER).expect("the control file");
    }

    /// Lets syncs fail from now on.
    pub(super) fn fail_syncs(&self, which: FailingSyncs) {
        let number = which as u64;
        self.control.write_all_at(&number.to_le_bytes(), FAIL_SYNCS).expect("the control file");
    }

    /// Takes an order to kill back. Returns after how many more steps the broker was to be killed, if it is alive.
    pub(super) fn spare(&self) -> Option<usize> {
        let steps =
            self.number(KILL_AFTER).checked_sub(self.position()).filter(|left| *left > 0)?;
        self.kill_after(0);
        Some(steps as usize)
    }

    /// Returns whether the broker was killed by the last order.
    pub(crate) fn has_killed(&self) -> bool {
        let at = self.number(KILL_AFTER);
        at != 0 && self.position() >= at
    }

    /// Returns the steps, which some process may still append to.
    pub(super) fn steps(&self) -> Vec<Step> {
        parse(&fs::read(self.path("-log")).expect("a log"))
    }

    /// Returns the length of the log in bytes.
    pub(crate) fn length(&self) -> u64 {
        fs::metadata(self.path("-log")).map_or(0, |log| log.len())
    }

    /// Returns the steps behind so many bytes of the log.
    pub(crate) fn commands_behind(&self, length: u64) -> Vec<Command> {
        let log = fs::read(self.path("-log")).expect("a log");
        let steps = parse(log.get(length as usize..).unwrap_or_default()).into_iter();
        let command = |step: Step| Command { name: step.to_string(), ..Command::default() };
        steps.map(command).collect()
    }

    pub(crate) fn finish(&self, answers: Vec<Answered>, restarts: Vec<Position>) -> Recording {
        Recording { steps: self.steps(), answers, restarts }
    }
}

fn parse(mut log: &[u8]) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some((head, rest)) = log.split_first_chunk::<14>() {
        let number = u64::from_le_bytes(head[2..10].try_into().expect("eight bytes"));
        let length = u32::from_le_bytes(head[10..14].try_into().expect("four bytes")) as usize;
        let Some((file, rest)) = rest.split_at_checked(head[1].into()) else { break };
        let Some((bytes, rest)) = rest.split_at_checked(length) else { break };
        log = rest;
        let act = match head[0] {
            0 => Act::Create,
            1 => Act::Write(number, bytes.to_vec()),
            2 => Act::Truncate(number),
            3 => Act::Sync,
            4 => Act::Unlink,
            _ => Act::SyncDirectory,
        };
        steps.push(Step { file: String::from_utf8_lossy(file).into_owned(), act });
    }
    steps
}
