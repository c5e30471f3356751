//! The file: its tables, how it is opened, and who may open it.

use std::{
    fs::{self, File, Permissions, TryLockError},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rusqlite::{Connection, MAIN_DB, OpenFlags, config::DbConfig};

use crate::folder::{sync_name, write_again};

use super::{
    super::{Result, StoreError},
    beside::beside,
    checksum::is_damage,
    definitions, mark,
    migrations::{self, VERSION},
    space,
};

/// `SLCG`, which tells our files from those of other programs.
const APPLICATION_ID: i32 = 0x534c_4347;

/// The tables of [`VERSION`] in a new file. Whoever changes them adds a step to [`migrations`] too.
///
/// The comments stay in the file, and `.schema` in the `sqlite3` shell shows them. `payload` comes last so that the
/// other columns are read without it.
const TABLES: &str = r#"
CREATE TABLE meta (
  key TEXT PRIMARY KEY,         -- next_id, settings (changes of any queue's settings), tag (first 8 digits of all ids), pinged (written to test whether writes are possible), time (of the last synced commit), commits (number of synced commits)
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE queues (
  name TEXT PRIMARY KEY,
  "group" TEXT NOT NULL,
  lease_ns INTEGER,
  max_attempts INTEGER,         -- NULL: the broker's default; 0: no limit
  max_deliveries INTEGER,       -- the same
  dead_letter_queue TEXT,
  discard_failed INTEGER NOT NULL,
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
  revision INTEGER NOT NULL,
  unused_since INTEGER          -- of a queue that the broker created by itself: its last known use
) STRICT, WITHOUT ROWID;

CREATE TABLE items (
  id INTEGER PRIMARY KEY,       -- in order of arrival; printf('%016x', id) ends the id that users see
  queue TEXT NOT NULL,
  priority INTEGER NOT NULL,
  "when" INTEGER,               -- may be handed out from then on; end of the lease; NULL: blocked or processed
  due INTEGER,                  -- since when a reserved item was eligible; NULL: created
  attempt INTEGER NOT NULL,
  deliveries INTEGER NOT NULL,
  earlier INTEGER NOT NULL,     -- number of deliveries before the item came into its queue
  lock TEXT,                    -- lease token
  producer TEXT,
  consumer TEXT,
  key TEXT,                     -- ordering key
  seq INTEGER,                  -- sequence number
  dedup TEXT,
  content_type TEXT,
  headers TEXT,                 -- JSON
  created INTEGER NOT NULL,
  blocked INTEGER,              -- own eligible time of an item that an earlier one of its key blocks
  processed INTEGER,
  expires INTEGER,              -- when the item expires, or the end of its time as history
  reason TEXT,                  -- why the last attempt failed
  origin TEXT,                  -- dead-lettered from
  dead_lettered INTEGER,        -- when
  failed_attempts INTEGER,      -- at that time
  sum INTEGER,                  -- checksum of what the producer sent, CRC-32; NULL: stored before there were checksums
  payload BLOB NOT NULL         -- empty: look into payloads
) STRICT;
CREATE INDEX handout ON items (queue, priority DESC, "when") WHERE "when" IS NOT NULL;
CREATE INDEX key_order ON items (queue, key, seq)
  WHERE key IS NOT NULL AND processed IS NULL AND origin IS NULL;
CREATE INDEX waiting ON items (queue, seq) WHERE blocked IS NOT NULL;
CREATE INDEX history ON items (queue, processed) WHERE processed IS NOT NULL;
CREATE INDEX expiry ON items (expires) WHERE expires IS NOT NULL;
CREATE INDEX origins ON items (queue, origin) WHERE origin IS NOT NULL;

CREATE TABLE payloads (         -- the large ones, so that a change of an item does not write its payload anew
  id INTEGER PRIMARY KEY,       -- of the item
  payload BLOB NOT NULL
) STRICT;

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

CREATE TABLE receipt_keys (     -- with which receipts are signed; the newest few
  number INTEGER PRIMARY KEY,
  secret BLOB NOT NULL,
  created INTEGER NOT NULL
) STRICT;

CREATE TABLE figures (          -- of queues at past times, for charts
  time INTEGER NOT NULL,
  step INTEGER NOT NULL,        -- seconds between these figures and the next ones
  broker TEXT NOT NULL,         -- who kept them
  expires INTEGER NOT NULL,     -- when they may go
  queues TEXT NOT NULL,         -- JSON
  PRIMARY KEY (time, step, broker)
) STRICT, WITHOUT ROWID;

CREATE TABLE counters (
  queue TEXT PRIMARY KEY,
  value INTEGER NOT NULL        -- the last sequence number taken
) STRICT, WITHOUT ROWID;

CREATE TABLE totals (
  queue TEXT PRIMARY KEY,
  pushed INTEGER NOT NULL,
  delivered INTEGER NOT NULL,
  committed INTEGER NOT NULL,
  rolled_back INTEGER NOT NULL,
  moved INTEGER NOT NULL,
  dead_lettered INTEGER NOT NULL,
  expired INTEGER NOT NULL,
  popped INTEGER NOT NULL,      -- counted in committed too
  discarded INTEGER NOT NULL
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

CREATE TABLE templates (        -- settings of queues that come into being by use
  pattern TEXT PRIMARY KEY,     -- which queues
  "group" TEXT NOT NULL,        -- this and what follows: as in queues
  lease_ns INTEGER,
  max_attempts INTEGER,
  max_deliveries INTEGER,
  dead_letter_queue TEXT,
  discard_failed INTEGER NOT NULL,
  retry_initial_ns INTEGER,
  retry_multiplier REAL,
  retry_max_ns INTEGER,
  retry_jitter REAL,
  default_ttl_ns INTEGER,
  retention_ns INTEGER NOT NULL,
  dedup_window_ns INTEGER NOT NULL,
  max_depth INTEGER NOT NULL,
  sequenced INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  labels TEXT NOT NULL,
  created INTEGER NOT NULL,
  updated INTEGER NOT NULL,
  revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE operations (       -- long work of operators
  id TEXT PRIMARY KEY,
  format INTEGER NOT NULL,      -- of work
  work TEXT NOT NULL,           -- JSON
  dry_run INTEGER NOT NULL,
  started_by TEXT NOT NULL,     -- name of the token
  created INTEGER NOT NULL,
  total INTEGER NOT NULL,       -- number of items at the start
  state TEXT NOT NULL,          -- running, succeeded, cancelled or failed
  processed INTEGER NOT NULL,   -- number of items done
  error TEXT NOT NULL,
  updated INTEGER NOT NULL,
  claim INTEGER,                -- of the broker that runs it
  claim_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"#;

/// Items that cannot be served any more, for people to read.
const DAMAGED: &str = r"
CREATE TABLE damaged (          -- items that were found to be no longer what was stored, for people to read; they may contain anything
  id INTEGER PRIMARY KEY,
  queue,
  found,                        -- when
  why,
  key,
  content_type,
  headers,
  created,
  payload
);
";

/// Leases of many items side by side. See [`runs`](super::runs).
const RUNS: &str = r#"
CREATE TABLE runs (             -- leases of many items that lie side by side, until something but their commit needs to see them in the items
  first INTEGER PRIMARY KEY,    -- id of the first item
  last INTEGER NOT NULL,        -- id of the last item
  queue TEXT NOT NULL,
  priority INTEGER NOT NULL,
  up_to INTEGER NOT NULL,       -- "when" of the last item
  until INTEGER NOT NULL,       -- end of the lease
  lock TEXT NOT NULL,           -- lease token
  delivered INTEGER NOT NULL,   -- number of deliveries of each item before this one
  attempt INTEGER NOT NULL,
  consumer TEXT,
  expires INTEGER               -- when the first of them expires
) STRICT;
"#;

/// A store's file, locked against a second broker while this value lives.
#[derive(Debug)]
pub(super) struct StoreFile {
    /// The path of the file, with symbolic links resolved.
    pub(super) path: PathBuf,
    /// True if the file existed before.
    existed: bool,
    /// Refuses the second of two brokers that name the file alike, before it touches the file.
    _lock_beside: File,
    /// Held open until all connections are closed, because closing any handle of a file releases all locks that SQLite
    /// has on it.
    lock: File,
}

impl StoreFile {
    /// Locks the file for this process. The `sqlite3` shell can still read it.
    pub(super) fn lock(path: &Path) -> Result<Self> {
        let shown = path.display();
        let path = resolve(path)?;
        if path.is_dir() {
            return refuse(format!("{shown} is a directory: name a file for the store"));
        }
        let lock_beside = open_private(&beside(&path, ".lock"))
            .or_else(|e| refuse(format!("cannot write beside {shown}: {e}")))?;
        take_lock(&lock_beside, &path)?;

        let existed = match fs::metadata(&path) {
            // Each name has a log of its own. A broker that uses the other name would miss what is in this log.
            Ok(found) if found.nlink() > 1 => {
                return refuse(format!(
                    "{shown} has {} names (hard links): remove all but one, for a store has one log, named like its file",
                    found.nlink()
                ));
            }
            Ok(_) => true,
            Err(_) => false,
        };
        if !existed {
            refuse_if_gone(&path)?;
        }
        let lock = open_private(&path).or_else(|e| refuse(format!("cannot write {shown}: {e}")))?;
        // On systems other than Linux this lock is of the same kind as those that SQLite takes.
        if cfg!(target_os = "linux") {
            take_lock(&lock, &path)?;
        }
        Ok(Self { path, existed, _lock_beside: lock_beside, lock })
    }

    /// Opens the connection that writes, and creates the tables in a new file.
    pub(super) fn open_writer(&self) -> Result<Connection> {
        let shown = self.path.display();
        let conn = Connection::open(&self.path)
            .or_else(|e| refuse(format!("cannot open {shown}: {e}")))?;
        // If the file is refused below, its log stays as it is, for people to examine.
        keep_log(&conn, true).or_else(|e| refuse(format!("cannot open {shown}: {e}")))?;
        let checked = check_ours(&conn).or_else(|e| match e.sqlite_error_code() {
            Some(rusqlite::ErrorCode::NotADatabase) => {
                refuse(format!("{shown} is not an SQLite database"))
            }
            Some(rusqlite::ErrorCode::DatabaseCorrupt) => self.refuse_as_damaged(&e.to_string()),
            _ => refuse(format!("cannot read {shown}: {e}")),
        })?;
        if conn.is_readonly(MAIN_DB).unwrap_or(true) {
            return refuse(format!("{shown} is not writable"));
        }
        self.check_mark(&conn, matches!(checked, Whose::New))?;
        if self.existed && matches!(checked, Whose::New | Whose::Ours(_)) {
            self.sync_found(&conn).or_else(|e| refuse(format!("cannot sync {shown}: {e}")))?;
            self.close_to_others();
        }
        self.prepare_tables(&conn, checked)?;
        set_up_writer(&conn)
            .and_then(|()| space::enable(&conn))
            .and_then(|()| keep_log(&conn, false))
            .or_else(|e| refuse(format!("cannot set up {shown}: {e}")))?;
        Ok(conn)
    }

    /// Creates the tables in a new file, brings those of an earlier version up to date, and refuses a file that is not
    /// ours or whose tables are not as they should be.
    fn prepare_tables(&self, conn: &Connection, found: Whose) -> Result<()> {
        let shown = self.path.display();
        let fault = match found {
            Whose::New => {
                return create(conn).or_else(|e| refuse(format!("cannot set up {shown}: {e}")));
            }
            Whose::Newer(version) => {
                return refuse(format!(
                    "{shown} was written by a newer version of this program (format {version}, here {VERSION}): start that version or a later one here, or name another file"
                ));
            }
            Whose::Other => return refuse(format!("{shown} is a database of another program")),
            Whose::Ours(VERSION) => open_memory().and_then(|new| definitions::fault(conn, &new)),
            Whose::Ours(version) => {
                open_memory().and_then(|new| migrations::migrate(conn, version, &new))
            }
        };
        match fault {
            Ok(None) => Ok(()),
            Ok(Some(fault)) => self.refuse_as_damaged(&fault),
            Err(error) if is_damage(&error) => self.refuse_as_damaged(&error.to_string()),
            Err(error) => refuse(format!("cannot bring {shown} up to date: {error}")),
        }
    }

    fn refuse_as_damaged<T>(&self, why: &str) -> Result<T> {
        refuse(format!(
            "{} is damaged: {why}. Restore it from a backup, and look at its disk, for damage has a cause \
             (`sluicegate check` says what else is damaged)",
            self.path.display()
        ))
    }

    /// Writes what was found in the log again, and syncs it and the names of the files.
    ///
    /// A broker that was killed may have written a commit and not synced it, or have created the log and not synced its
    /// name. SQLite reads such a commit as any other and never syncs it by itself, while answers rest on it from now on:
    /// that an item is a duplicate, that a receipt was settled. The mark counts it too. A broker that ended because the log
    /// could not be synced leaves a log that has to be written again. That is all of it, at every start after a kill.
    fn sync_found(&self, conn: &Connection) -> Result<(), Box<dyn std::error::Error>> {
        match File::options().read(true).write(true).open(beside(&self.path, "-wal")) {
            Ok(log) => {
                // Nobody else writes to the log meanwhile, or begins it anew.
                conn.execute_batch("BEGIN IMMEDIATE")?;
                let written = write_again(&log);
                conn.execute_batch("ROLLBACK")?;
                written?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        Ok(sync_name(&self.path)?)
    }

    /// Removes permissions of all other users, which files of earlier versions have. Permissions of the group stay.
    fn close_to_others(&self) {
        const OTHERS: u32 = 0o007;
        for ending in ["", "-wal", "-shm", ".lock"] {
            let path = beside(&self.path, ending);
            let Ok(found) = fs::metadata(&path) else { continue };
            let mode = found.permissions().mode();
            if mode & OTHERS != 0
                && let Err(error) =
                    fs::set_permissions(&path, Permissions::from_mode(mode & !OTHERS))
            {
                tracing::warn!(%error, "everyone on this machine can read {}", path.display());
            }
        }
    }

    /// Refuses a file that has lost commits which were answered as durable.
    fn check_mark(&self, conn: &Connection, is_new: bool) -> Result<()> {
        let shown = self.path.display();
        let unreadable = |e: String| {
            StoreError::Unsupported(format!("cannot compare {shown} with the mark beside it: {e}"))
        };
        let noted = mark::read(&self.path).map_err(|e| unreadable(e.to_string()))?;
        let Some(noted) = noted else { return Ok(()) };
        let mark_path = mark::path_of(&self.path);
        let mark_shown = mark_path.display();
        if is_new {
            return refuse_as_lost(&self.path, "empty", noted.commits);
        }
        let (tag, commits) = match identity(conn) {
            Err(error) if is_damage(&error) => {
                return self.refuse_as_damaged(&error.to_string());
            }
            read => read.map_err(|e| unreadable(e.to_string()))?,
        };
        if tag != noted.tag {
            tracing::warn!("{mark_shown} belongs to another store than {shown}: ignoring it");
        } else if commits < noted.commits {
            return refuse(format!(
                "{shown} has lost the last {} of {} commits, all of which were on disk: its log {shown}-wal or the \
                 file itself was cut, damaged or replaced by an older one. Put it back, or remove {mark_shown} to go on \
                 with what is left (`sluicegate check` says what that is)",
                noted.commits - commits,
                noted.commits
            ));
        }
        Ok(())
    }

    /// Syncs the file, without its log.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.lock.sync_data()
    }

    /// Has what is in the log count as not written into the file, also for other processes that have it open.
    ///
    /// That number is in the index of the log, at a place that SQLite documents as part of its format. Locks of this
    /// process on the index end.
    pub(super) fn forget_checkpoints(&self) -> io::Result<()> {
        const WRITTEN: u64 = 96;
        let index = beside(&self.path, "-shm");
        File::options().write(true).open(index)?.write_all_at(&[0; 4], WRITTEN)
    }

    /// Opens a connection that writes the log into the file, and nothing else.
    pub(super) fn open_checkpointer(&self) -> rusqlite::Result<Connection> {
        let conn = Connection::open(&self.path)?;
        conn.execute_batch("PRAGMA synchronous = FULL; PRAGMA checkpoint_fullfsync = ON;")?;
        Ok(conn)
    }

    /// Opens a connection that only reads.
    pub(super) fn open_reader(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags)?;
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        conn.set_prepared_statement_cache_capacity(64);
        Ok(conn)
    }
}

/// Opens a store in memory.
pub(super) fn open_memory() -> rusqlite::Result<Connection> {
    let conn = Connection::open_in_memory()?;
    create(&conn)?;
    set_up_writer(&conn)?;
    Ok(conn)
}

/// Refuses to create a file where one with content was: a disk that is not mounted, a misspelt path, and a file that
/// was deleted look alike.
fn refuse_if_gone(path: &Path) -> Result<()> {
    let noted = mark::read(path)
        .or_else(|e| refuse(format!("cannot read the mark beside {}: {e}", path.display())))?;
    noted.map_or(Ok(()), |noted| refuse_as_lost(path, "gone", noted.commits))
}

/// Refuses a file that is in this state although its mark says that it had content.
fn refuse_as_lost(path: &Path, state: &str, commits: i64) -> Result<()> {
    if commits == 0 {
        return Ok(());
    }
    refuse(format!(
        "{} is {state}, but {} says that {commits} commits were stored in it. Restore the file from a backup, \
         or remove that mark to begin with an empty store",
        path.display(),
        mark::path_of(path).display()
    ))
}

fn refuse<T>(message: String) -> Result<T> {
    Err(StoreError::Unsupported(message))
}

/// Opens a file for reading and writing, and creates it if necessary so that nobody else can read it. SQLite gives its
/// log the same permissions.
fn open_private(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)
}

fn take_lock(file: &File, shown: &Path) -> Result<()> {
    let shown = shown.display();
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => refuse(format!(
            "{shown} is in use by another broker: one at a time can open it (several brokers need MongoDB)"
        )),
        Err(TryLockError::Error(e)) => refuse(format!("cannot lock {shown}: {e}")),
    }
}

/// Sets whether closing the connection leaves the log behind instead of writing it into the file.
fn keep_log(conn: &Connection, keep: bool) -> rusqlite::Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, keep).map(drop)
}

/// Returns true if the file is a store's, of the version of this program.
pub(super) fn is_store(conn: &Connection) -> rusqlite::Result<bool> {
    Ok(matches!(check_ours(conn)?, Whose::Ours(VERSION)))
}

/// Returns the tag of a store's ids and the number of its synced commits.
pub(super) fn identity(conn: &Connection) -> rusqlite::Result<(u32, i64)> {
    conn.query_row(
        "SELECT (SELECT value FROM meta WHERE key = 'tag'),
           coalesce((SELECT value FROM meta WHERE key = 'commits'), 0)",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )
}

/// Resolves symbolic links, because two names of one file must lead to one lock.
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
        Err(e) => refuse(format!("cannot open the directory {}: {e}", folder.display())),
    }
}

#[derive(Clone, Copy)]
enum Whose {
    New,
    Ours(i32),
    Newer(i32),
    Other,
}

fn check_ours(conn: &Connection) -> rusqlite::Result<Whose> {
    let pragma = |name| conn.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let tables: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    let (application, version) = (pragma("application_id")?, pragma("user_version")?);
    Ok(match (application, version) {
        (0, 0) if tables == 0 => Whose::New,
        (APPLICATION_ID, version) if version > VERSION => Whose::Newer(version),
        (APPLICATION_ID, version) if version > 0 => Whose::Ours(version),
        _ => Whose::Other,
    })
}

fn create(conn: &Connection) -> rusqlite::Result<()> {
    // The ids of one file mean nothing in another: a receipt of another file is GONE.
    let tag: u32 = rand::random();
    conn.execute_batch(&format!(
        "PRAGMA auto_vacuum = INCREMENTAL;
         BEGIN IMMEDIATE; {TABLES} {DAMAGED} {RUNS}
         INSERT INTO meta VALUES ('next_id', 1), ('settings', 0), ('tag', {tag}), ('pinged', 0);
         PRAGMA application_id = {APPLICATION_ID};
         PRAGMA user_version = {VERSION};
         COMMIT;"
    ))
}

fn set_up_writer(conn: &Connection) -> rusqlite::Result<()> {
    conn.busy_timeout(std::time::Duration::from_secs(5))?;
    conn.set_prepared_statement_cache_capacity(128);
    // Otherwise a statement with a partial index may be prepared anew each time that a parameter has another value.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    // A commit may go through all of the page cache, as docs/decisions/0011 tells, so a larger cache makes commits slower. The result
    // of the pragma is a row, which `execute_batch` skips. `writer/checkpointer.rs` writes the log into the file.
    conn.execute_batch(
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = NORMAL;
         PRAGMA fullfsync = ON;
         PRAGMA checkpoint_fullfsync = ON;
         PRAGMA temp_store = MEMORY;
         PRAGMA cache_size = -16384;
         PRAGMA wal_autocheckpoint = 0;
         PRAGMA journal_size_limit = 67108864;
         INSERT OR IGNORE INTO meta VALUES ('time', 0), ('commits', 0);",
    )
}
