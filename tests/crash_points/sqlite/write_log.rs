//! What a broker did to its store's files, recorded by the library of tests/write_log.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::promises::Promises;
use crate::{
    harness::{self, Launch, TestStore},
    wire::Command,
};

/// The number of steps before something happened.
pub(crate) type Position = u64;

/// What happened to a file of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    Create,
    Write(u64, Vec<u8>),
    Truncate(u64),
    /// What was written before this many steps is on the disk.
    Sync(Position),
    /// What was written before this many steps may not be on the disk, and no later sync writes it.
    FailedSync(Position),
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
            Act::Sync(begun) => write!(f, "sync {file} of {begun}"),
            Act::FailedSync(begun) => write!(f, "failed sync {file} of {begun}"),
            Act::Unlink => write!(f, "unlink {file}"),
            Act::SyncDirectory => f.write_str("sync directory"),
        }
    }
}

/// All that was recorded of one store.
pub(crate) struct Recording {
    pub(super) steps: Vec<Step>,
    pub(super) promises: Promises,
    /// Positions at which the broker was started anew after it was killed.
    pub(super) restarts: Vec<Position>,
}

/// Syncs that fail, as the recording library numbers them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FailingSyncs {
    None = 0,
    OfFile = 1,
    OfLog = 2,
}

/// A store whose brokers' writes are recorded.
pub(crate) struct Recorded {
    pub(crate) store: TestStore,
    /// The store's file.
    pub(crate) path: PathBuf,
    pub(crate) log: WriteLog,
    /// How its brokers are started.
    pub(crate) launch: Launch,
}

impl Recorded {
    /// Returns a store that does not exist yet.
    pub(crate) fn begin() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().canonicalize().expect("its path").join("items.db");
        let store = TestStore::Sqlite(directory);
        let log = WriteLog::begin(&path);
        let variables = log.variables().into_iter();
        let launch =
            variables.fold(store.launch(), |launch, (name, value)| launch.variable(name, value));
        Self { store, path, log, launch }
    }
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
/// Where it says which syncs fail, and how long they take.
const FAIL_SYNCS: u64 = 16;
const SYNC_MICROS: u64 = 24;

/// Returns the path of a file of the log, whose name must not begin with the store's.
fn beside(store: &Path, suffix: &str) -> PathBuf {
    store.with_file_name(format!("writes{suffix}"))
}

impl WriteLog {
    /// Begins a log in the store's directory.
    fn begin(store: &Path) -> Self {
        let path = beside(store, "-control");
        fs::write(&path, [0; 32]).expect("a file to write");
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

    fn set(&self, at: u64, number: u64) {
        self.control.write_all_at(&number.to_le_bytes(), at).expect("the control file");
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
        self.set(KILL_AFTER, if steps == 0 { 0 } else { self.position() + steps as u64 });
    }

    /// Lets syncs fail from now on.
    pub(super) fn fail_syncs(&self, which: FailingSyncs) {
        self.set(FAIL_SYNCS, which as u64);
    }

    /// Lets syncs take so long from now on.
    pub(super) fn slow_syncs(&self, by: Duration) {
        self.set(SYNC_MICROS, by.as_micros() as u64);
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

    pub(crate) fn finish(&self, promises: Promises, restarts: Vec<Position>) -> Recording {
        Recording { steps: parse(&fs::read(self.path("-log")).expect("a log")), promises, restarts }
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
            3 => Act::Sync(number),
            4 => Act::Unlink,
            5 => Act::SyncDirectory,
            _ => Act::FailedSync(number),
        };
        steps.push(Step { file: String::from_utf8_lossy(file).into_owned(), act });
    }
    steps
}
