//! Cuts the power at chosen places of a recording, and looks at what is left: it must be a state that the store had, not
//! older than what was answered, and the store must open it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::DefaultHasher},
    fs,
    hash::{Hash as _, Hasher as _},
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use rusqlite::{Connection, OpenFlags, types::ValueRef};
use sluicegate_broker::{domain::Clock, store::sqlite::SqliteStore};

use super::{
    disk::{Disk, Files, Kept, State},
    file::open,
    promises::{Promises, broken},
    write_log::{Act, Recording, Step},
};

/// Bytes of the header of SQLite's log, of the header of each frame, and of a page.
const LOG_HEADER: u64 = 32;
const FRAME_HEADER: usize = 24;
const PAGE: usize = 4_096;
/// The table that the broker writes by itself, now and then: no answer promises what is in it.
const OF_THE_BROKER: &str = "totals";
/// Limit of findings that are shown.
const SHOWN: usize = 8;
/// Limit of steps that are shown before a cut.
const STEPS_SHOWN: usize = 12;
/// Limit of characters of an answer that are shown.
const ANSWER_SHOWN: usize = 400;

/// What came of the cuts.
#[derive(Debug)]
pub(crate) struct Examination {
    steps: usize,
    cuts: usize,
    states: usize,
    found: Vec<String>,
    begun: Instant,
}

impl Examination {
    /// Prints what was examined, and returns whether nothing was found.
    pub(crate) fn print(&self) -> bool {
        for found in self.found.iter().take(SHOWN) {
            println!("FOUND after a power loss: {found}");
        }
        println!(
            "power cut at {} of {} steps: {} states in {} s, {} with something wrong",
            self.cuts,
            self.steps,
            self.states,
            self.begun.elapsed().as_secs(),
            self.found.len()
        );
        self.found.is_empty()
    }
}

/// What a store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Content {
    /// A hash of the rows of each table, without the figures that each commit changes.
    tables: Rc<BTreeMap<String, u64>>,
    /// The payloads of the items, in order.
    items: Rc<[String]>,
}

impl Content {
    /// Returns the tables that are not the same in both.
    fn differing<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let tables = self.tables.keys().chain(other.tables.keys()).map(String::as_str);
        let tables: BTreeSet<&str> = tables.collect();
        let differs = |table: &&str| self.tables.get(*table) != other.tables.get(*table);
        tables.into_iter().filter(differs).collect()
    }
}

/// Cuts the power at each sync and after each answer; if `every`, also at each other step, with torn and missing writes.
pub(crate) fn examine(recordings: &[Recording], every: bool) -> Examination {
    let begun = Instant::now();
    let (next, total) = (AtomicUsize::new(0), Mutex::new((0, 0, Vec::new())));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(recording) = recordings.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut examiner = Examiner::new(recording, every);
                    examiner.run();
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    total.0 += examiner.cuts;
                    total.1 += examiner.states;
                    total.2.append(&mut examiner.found);
                }
            });
        }
    });
    let (cuts, states, found) = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    let steps = recordings.iter().map(|recording| recording.steps.len()).sum();
    Examination { steps, cuts, states, found, begun }
}

struct Examiner<'a> {
    recording: &'a Recording,
    every: bool,
    disk: Disk,
    /// What the store held behind each commit, from the first.
    commits: Vec<Content>,
    /// The oldest of the commits that may be found, if calls came one after the other.
    oldest: usize,
    /// What was found in states that have been there before.
    known: HashMap<State, Result<Content, String>>,
    folder: tempfile::TempDir,
    cuts: usize,
    states: usize,
    found: Vec<String>,
}

/// Returns a directory in memory, if there is one: states are synced when they are opened.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a temporary directory")
}

impl<'a> Examiner<'a> {
    fn new(recording: &'a Recording, every: bool) -> Self {
        Self {
            recording,
            every,
            disk: Disk::default(),
            commits: Vec::new(),
            oldest: 0,
            known: HashMap::new(),
            folder: folder(),
            cuts: 0,
            states: 0,
            found: Vec::new(),
        }
    }

    fn run(&mut self) {
        let steps = &self.recording.steps;
        let mut promised = self.recording.promises.positions().into_iter().peekable();
        let empty = self.content(&Files::new()).expect("an empty database");
        self.commits.push(empty);
        let mut ends_commit = Ends::default();
        for number in 0..=steps.len() {
            // Promises that were given before this step.
            let mut is_promise = false;
            while promised.next_if(|position| *position <= number).is_some() {
                is_promise = true;
            }
            if is_promise && matches!(self.recording.promises, Promises::Answers(_)) {
                self.oldest = self.oldest_as_good_as_last();
            }
            let Some(step) = steps.get(number) else {
                self.cut(number);
                return;
            };
            if is_promise || self.every || is_sync(step) {
                self.cut(number);
            }
            self.disk.apply(number, steps);
            if ends_commit.after(step) {
                match self.content(&self.disk.seen()) {
                    Ok(content) => self.commits.push(content),
                    Err(error) => {
                        self.found.push(format!("after step {number}, without a loss: {error}"));
                    }
                }
            }
        }
    }

    /// Returns the oldest of the last commits that differ in nothing that was promised. What the broker writes by itself may not be on
    /// disk yet when a client notes an answer.
    fn oldest_as_good_as_last(&self) -> usize {
        let last = self.commits.len() - 1;
        let is_as_good = |at: &usize| {
            let differing = self.commits[*at].differing(&self.commits[last]);
            differing.iter().all(|table| *table == OF_THE_BROKER)
        };
        (0..=last).rev().take_while(is_as_good).last().unwrap_or(last)
    }

    /// Cuts the power when so many steps were done.
    fn cut(&mut self, number: usize) {
        self.cuts += 1;
        let steps = &self.recording.steps;
        let at_sync = steps.get(number).is_none_or(is_sync);
        let mut kinds = vec![Kept::None];
        if self.disk.pending() > 0 {
            kinds.push(Kept::Names);
            for (_, file) in self.disk.pending_files() {
                kinds.extend([Kept::File(file), Kept::AllButFile(file)]);
            }
        }
        if self.every && self.disk.pending() > 0 {
            kinds.extend([Kept::All, Kept::FirstHalfOfLast, Kept::SecondHalfOfLast]);
            if at_sync {
                let places = 0..self.disk.pending();
                kinds.extend(places.flat_map(|place| [Kept::AllBut(place), Kept::Only(place)]));
            }
        }
        for kept in kinds {
            // What nothing is lost of is what a kill leaves, and those are tried with real brokers.
            if !self.every && self.disk.keeps_all(kept) && self.disk.pending() > 0 {
                continue;
            }
            self.judge(number, kept);
        }
    }

    fn judge(&mut self, number: usize, kept: Kept) {
        let why = match self.open(kept) {
            Ok(content) => self.broken(number, &content),
            Err(error) => Some(error),
        };
        let Some(why) = why else { return };
        let steps = &self.recording.steps;
        let last: Vec<String> =
            steps[number.saturating_sub(STEPS_SHOWN)..number].iter().map(Step::to_string).collect();
        let restart = self.recording.restarts.iter().rfind(|at| **at as usize <= number);
        self.found.push(format!(
            "cut before step {number}, kept {kept:?}: {why}\n  last restart: {restart:?}\n  steps: {}",
            last.join(", ")
        ));
    }

    /// Returns what is wrong with the content of a store after a cut.
    fn broken(&self, number: usize, content: &Content) -> Option<String> {
        let Some(found) = self.commits.iter().rposition(|one| one == content) else {
            return Some("the store never held what it holds now".to_owned());
        };
        match &self.recording.promises {
            Promises::Answers(_) if found >= self.oldest => None,
            Promises::Answers(answers) => {
                let lost = self.oldest - found;
                let given = answers.iter().rfind(|answer| answer.position as usize <= number);
                let call: String =
                    given.map_or("", |answer| &answer.call).chars().take(ANSWER_SHOWN).collect();
                let tables = content.differing(&self.commits[self.oldest]).join(", ");
                Some(format!(
                    "the last {lost} commits are lost, which changed {tables}; the last answer: {call}"
                ))
            }
            Promises::Items(items) => broken(items, &content.items, number),
        }
    }

    /// Opens what is left as the store does, and returns its content.
    fn open(&mut self, kept: Kept) -> Result<Content, String> {
        let key = self.disk.state(kept);
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        self.states += 1;
        let files = self.disk.files(&self.recording.steps, kept);
        let result = self.content(&files).and_then(|content| {
            let uri = format!("sqlite:{}", self.path().display());
            let opened = SqliteStore::open(&uri, Arc::new(Clock::system()));
            opened.map(|_| content).map_err(|error| format!("the store does not open: {error}"))
        });
        self.known.insert(key, result.clone());
        result
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("items.db")
    }

    /// Puts files onto a disk, and returns the content of the database.
    fn content(&self, files: &Files) -> Result<Content, String> {
        for entry in fs::read_dir(self.folder.path()).expect("a directory") {
            let path = entry.expect("a file").path();
            // Setting room aside takes long in memory, and the room says nothing.
            if !path.to_string_lossy().ends_with("-reserve") {
                fs::remove_file(path).expect("a file to remove");
            }
        }
        for (suffix, bytes) in files {
            let mut path = self.path().into_os_string();
            path.push(suffix);
            fs::write(path, bytes).expect("a file to write");
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let conn = open(&self.path(), flags);
        let content = conn.and_then(|conn| read_all(&conn));
        content.map_err(|error| format!("the file cannot be read: {error}"))
    }
}

/// Writes leases that are one row into their items. The store does so at any time, and no answer says when.
const WRITE_OUT: &str = r#"
UPDATE items SET due = "when", "when" = run.until, lock = run.lock, deliveries = run.delivered + 1,
  attempt = run.attempt, consumer = run.consumer
FROM runs run WHERE items.id BETWEEN run.first AND run.last;
DELETE FROM runs;
"#;

fn read_all(conn: &Connection) -> rusqlite::Result<Content> {
    let mut hashes = BTreeMap::new();
    let tables: BTreeSet<String> = conn
        .prepare("SELECT name FROM sqlite_schema WHERE type = 'table'")?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let of_this_read = conn.unchecked_transaction()?;
    if tables.contains("runs") {
        of_this_read.execute_batch(WRITE_OUT)?;
    }
    for table in &tables {
        let filter =
            if table == "meta" { "WHERE key NOT IN ('time', 'pinged', 'commits')" } else { "" };
        let mut hasher = DefaultHasher::new();
        let mut all = conn.prepare(&format!("SELECT * FROM \"{table}\" {filter}"))?;
        let columns = all.column_count();
        let mut rows = all.query([])?;
        while let Some(row) = rows.next()? {
            for column in 0..columns {
                match row.get_ref(column)? {
                    ValueRef::Null => 0.hash(&mut hasher),
                    ValueRef::Integer(value) => value.hash(&mut hasher),
                    ValueRef::Real(value) => value.to_bits().hash(&mut hasher),
                    ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.hash(&mut hasher),
                }
            }
        }
        hashes.insert(table.clone(), hasher.finish());
    }
    let mut items: Vec<String> = Vec::new();
    if tables.contains("items") {
        let mut all = conn.prepare("SELECT CAST(payload AS TEXT) FROM items ORDER BY 1")?;
        items = all.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    }
    of_this_read.rollback()?;
    Ok(Content { tables: hashes.into(), items: items.into() })
}

fn is_sync(step: &Step) -> bool {
    matches!(step.act, Act::Sync(_) | Act::FailedSync(_) | Act::SyncDirectory)
}

/// Tells the steps that end a commit: the last frame of one in SQLite's log, and the end of a rollback journal.
#[derive(Debug, Default)]
struct Ends {
    /// True if the frame whose header was written last ends a commit.
    frame_ends: bool,
}

impl Ends {
    fn after(&mut self, step: &Step) -> bool {
        match &step.act {
            Act::Write(offset, bytes) if step.file == "-wal" => {
                let is_header = bytes.len() == FRAME_HEADER && *offset >= LOG_HEADER;
                if is_header {
                    self.frame_ends = bytes[4..8] != [0; 4];
                }
                bytes.len() == PAGE && std::mem::take(&mut self.frame_ends)
            }
            Act::Unlink | Act::Truncate(_) => step.file == "-journal",
            _ => false,
        }
    }
}
