//! The file: its tables, how it is opened, and who may open it.

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use rusqlite::{Connection, MAIN_DB, OpenFlags};

use super::super::{Result, StoreError};

/// `SLCG`: tells our files from those of other programs.
const APPLICATION_ID: i32 = 0x534c_4347;
/// Grows with every change of the tables.
const VERSION: i32 = 1;

/// Comments stay in the file: `.schema` in the `sqlite3` shell shows them.
/// `payload` comes last so that the other columns are read without it.
const TABLES: &str = r#"
CREATE TABLE meta (
  key TEXT PRIMARY KEY,         -- next_id, settings (changes of any queue's settings), tag (first 8 digits of all ids), pinged (written to see whether that is possible)
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE queues (
  name TEXT PRIMARY KEY,
  "group" TEXT NOT NULL,
  lease_ns INTEGER,
  max_attempts INTEGER NOT NULL,
  dead_letter_queue TEXT,
  retry_initial_ns INTEGER,     -- these four are NULL without a retry policy
  retry_multiplier REAL,
  retry_max_ns INTEGER,
  retry_jitter REAL,
  default_ttl_ns INTEGER,
  retention_ns INTEGER NOT NULL,
  dedup_window_ns INTEGER NOT NULL,
  max_depth INTEGER NOT NULL,
  sequenced INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  labels TEXT NOT NULL,         -- JSON
  created INTEGER NOT NULL,     -- this and all times below: milliseconds since 1970, UTC
  revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE items (
  id INTEGER PRIMARY KEY,       -- in order of arrival; printf('%016x', id) ends the id that users see
  queue TEXT NOT NULL,
  priority INTEGER NOT NULL,
  "when" INTEGER,               -- may be handed out from then on; end of the lease; NULL: blocked or processed
  attempt INTEGER NOT NULL,
  deliveries INTEGER NOT NULL,
  lock TEXT,                    -- lease token
  producer TEXT,
  consumer TEXT,
  key TEXT,                     -- ordering key
  seq INTEGER,                  -- sequence number
  dedup TEXT,
  content_type TEXT,
  headers TEXT,                 -- JSON
  created INTEGER NOT NULL,
  blocked INTEGER,              -- waits for its key's turn; its own eligible time
  processed INTEGER,
  expires INTEGER,              -- end of its life, or of its time as history
  reason TEXT,                  -- why the last attempt failed
  origin TEXT,                  -- dead-lettered from
  payload BLOB NOT NULL
) STRICT;
CREATE INDEX handout ON items (queue, priority DESC, "when") WHERE "when" IS NOT NULL;
CREATE INDEX key_order ON items (queue, key, seq)
  WHERE key IS NOT NULL AND processed IS NULL AND origin IS NULL;
CREATE INDEX waiting ON items (queue, seq) WHERE blocked IS NOT NULL;
CREATE INDEX history ON items (queue, processed) WHERE processed IS NOT NULL;
CREATE INDEX expiry ON items (expires) WHERE expires IS NOT NULL;
CREATE INDEX origins ON items (queue, origin) WHERE origin IS NOT NULL;

CREATE TABLE dedup (
  queue TEXT NOT NULL,          -- the queue it was pushed to
  dedup TEXT NOT NULL,
  id INTEGER NOT NULL,          -- the first item, which may be gone
  seq INTEGER,
  until INTEGER NOT NULL,
  PRIMARY KEY (queue, dedup)
) STRICT, WITHOUT ROWID;
CREATE INDEX dedup_id ON dedup (id);
CREATE INDEX dedup_until ON dedup (until);

CREATE TABLE counters (
  queue TEXT PRIMARY KEY,
  value INTEGER NOT NULL        -- the last sequence number given
) STRICT, WITHOUT ROWID;

CREATE TABLE totals (
  queue TEXT PRIMARY KEY,
  pushed INTEGER NOT NULL,
  delivered INTEGER NOT NULL,
  committed INTEGER NOT NULL,
  rolled_back INTEGER NOT NULL,
  moved INTEGER NOT NULL,
  dead_lettered INTEGER NOT NULL,
  expired INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE schedules (
  name TEXT PRIMARY KEY,
  queue TEXT NOT NULL,
  cron TEXT NOT NULL,
  time_zone TEXT NOT NULL,
  paused INTEGER NOT NULL,
  created INTEGER NOT NULL,
  done_until INTEGER NOT NULL,
  last INTEGER,
  content_type TEXT NOT NULL,
  headers TEXT NOT NULL,        -- JSON
  priority INTEGER NOT NULL,
  delay_ns INTEGER NOT NULL,
  eligible INTEGER,
  ttl_ns INTEGER,
  key TEXT NOT NULL,
  payload BLOB NOT NULL
) STRICT, WITHOUT ROWID;
"#;

/// A store's file, locked against a second broker for as long as this lives.
#[derive(Debug)]
pub(super) struct StoreFile {
    /// Where it is, with symbolic links resolved.
    pub(super) path: PathBuf,
    _lock: File,
}

impl StoreFile {
    /// Takes the file for this process; the `sqlite3` shell can still read it.
    pub(super) fn lock(path: &Path) -> Result<Self> {
        let shown = path.display();
        let path = resolve(path)?;
        if path.is_dir() {
            return refuse(format!("{shown} is a directory: name a file for the store"));
        }
        let mut lock_path = path.clone().into_os_string();
        lock_path.push(".lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .or_else(|e| refuse(format!("can not write beside {shown}: {e}")))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path, _lock: lock }),
            Err(TryLockError::WouldBlock) => refuse(format!(
                "{shown} is in use by another broker: one at a time can open it (several brokers need MongoDB)"
            )),
            Err(TryLockError::Error(e)) => refuse(format!("can not lock {shown}: {e}")),
        }
    }

    /// The connection that writes; creates the tables in a new file.
    pub(super) fn open_writer(&self) -> Result<Connection> {
        let shown = self.path.display();
        let conn = Connection::open(&self.path)
            .or_else(|e| refuse(format!("can not open {shown}: {e}")))?;
        let checked = check_ours(&conn).or_else(|e| match e.sqlite_error_code() {
            Some(rusqlite::ErrorCode::NotADatabase) => {
                refuse(format!("{shown} is not an SQLite database"))
            }
            _ => refuse(format!("can not read {shown}: {e}")),
        })?;
        if conn.is_readonly(MAIN_DB).unwrap_or(true) {
            return refuse(format!("{shown} is not writable"));
        }
        match checked {
            Whose::Ours => {}
            Whose::New => {
                create(&conn).or_else(|e| refuse(format!("can not set up {shown}: {e}")))?;
            }
            Whose::Newer(version) => {
                return refuse(format!(
                    "{shown} was written by a newer version of this program (format {version}, here {VERSION})"
                ));
            }
            Whose::Other => return refuse(format!("{shown} is a database of another program")),
        }
        set_up_writer(&conn).or_else(|e| refuse(format!("can not set up {shown}: {e}")))?;
        Ok(conn)
    }

    /// A connection that only reads.
    pub(super) fn open_reader(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags)?;
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        conn.set_prepared_statement_cache_capacity(64);
        Ok(conn)
    }
}

/// A store that lives in memory only.
pub(super) fn open_memory() -> rusqlite::Result<Connection> {
    let conn = Connection::open_in_memory()?;
    create(&conn)?;
    set_up_writer(&conn)?;
    Ok(conn)
}

fn refuse<T>(message: String) -> Result<T> {
    Err(StoreError::Unsupported(message))
}

/// Two names of one file must meet at one lock.
fn resolve(path: &Path) -> Result<PathBuf> {
    if let Ok(path) = path.canonicalize() {
        return Ok(path);
    }
    let Some(name) = path.file_name() else {
        return refuse(format!("{:?} does not name a file", path.display().to_string()));
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match folder.canonicalize() {
        Ok(folder) => Ok(folder.join(name)),
        Err(e) => refuse(format!("can not open the directory {}: {e}", folder.display())),
    }
}

enum Whose {
    New,
    Ours,
    Newer(i32),
    Other,
}

fn check_ours(conn: &Connection) -> rusqlite::Result<Whose> {
    let pragma = |name| conn.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let tables: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    let (application, version) = (pragma("application_id")?, pragma("user_version")?);
    Ok(match (application, version) {
        (0, 0) if tables == 0 => Whose::New,
        (APPLICATION_ID, VERSION) => Whose::Ours,
        (APPLICATION_ID, version) if version > VERSION => Whose::Newer(version),
        _ => Whose::Other,
    })
}

fn create(conn: &Connection) -> rusqlite::Result<()> {
    // The ids of one file mean nothing in another: a receipt that strays is answered GONE.
    let tag: u32 = rand::random();
    conn.execute_batch(&format!(
        "BEGIN IMMEDIATE; {TABLES}
         INSERT INTO meta VALUES ('next_id', 1), ('settings', 0), ('tag', {tag}), ('pinged', 0);
         PRAGMA application_id = {APPLICATION_ID};
         PRAGMA user_version = {VERSION};
         COMMIT;"
    ))
}

fn set_up_writer(conn: &Connection) -> rusqlite::Result<()> {
    conn.busy_timeout(std::time::Duration::from_secs(5))?;
    conn.set_prepared_statement_cache_capacity(128);
    // An answer to the pragma is a row, which `execute_batch` passes over.
    conn.execute_batch(
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = FULL;
         PRAGMA temp_store = MEMORY;
         PRAGMA cache_size = -65536;
         PRAGMA wal_autocheckpoint = 4000;
         PRAGMA journal_size_limit = 67108864;",
    )
}
