//! Looks into the store's file beside the broker.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use rusqlite::{Connection, OpenFlags, config::DbConfig};

use super::write_log::WriteLog;

/// The option by which this program runs statements on a file.
pub(crate) const RUN_SQL: &str = "--run-sql";

/// The file of a store, and the record of what is done to it.
#[derive(Clone)]
pub(crate) struct StoreFile {
    pub(crate) path: PathBuf,
    pub(crate) log: WriteLog,
}

/// Opens a file so that nothing is changed when it is closed.
pub(super) fn open(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.busy_timeout(std::time::Duration::from_secs(5))?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    Ok(conn)
}

impl StoreFile {
    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> T {
        let conn = open(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY);
        conn.and_then(|conn| read(&conn)).expect("a file to read")
    }

    /// Returns what SQLite's own check finds, and the items that the broker found to be damaged.
    pub(crate) fn contradictions(&self) -> Vec<String> {
        self.read(|conn| {
            let mut found: Vec<String> = conn
                .prepare("PRAGMA integrity_check")?
                .query_map([], |row| row.get(0))?
                .collect::<rusqlite::Result<_>>()?;
            found.retain(|line| line != "ok");
            let damaged: i64 =
                conn.query_row("SELECT count(*) FROM damaged", [], |row| row.get(0))?;
            found.extend((damaged > 0).then(|| format!("{damaged} items are damaged")));
            Ok(found)
        })
    }

    /// Returns the queues that hold items which are not settled.
    pub(crate) fn unsettled(&self, queues: &[String]) -> BTreeSet<String> {
        let of_all: BTreeSet<String> = self.read(|conn| {
            conn.prepare("SELECT DISTINCT queue FROM items WHERE processed IS NULL")?
                .query_map([], |row| row.get(0))?
                .collect()
        });
        queues.iter().filter(|queue| of_all.contains(*queue)).cloned().collect()
    }

    /// Runs statements beside the broker, in a process whose writes are recorded.
    fn run(&self, sql: &str) {
        let program = std::env::current_exe().expect("the path of this program");
        // The broker is to be killed, not this process.
        let steps = self.log.spare();
        let done = Command::new(program)
            .arg(RUN_SQL)
            .args([self.path.as_os_str(), sql.as_ref()])
            .envs(self.log.variables())
            .status();
        if let Some(steps) = steps {
            self.log.kill_after(steps);
        }
        assert!(done.is_ok_and(|status| status.success()), "{sql}");
    }

    /// Makes the last tick of a schedule one that was missed.
    pub(crate) fn miss_tick(&self, schedule: &str) {
        self.run(&format!("UPDATE schedules SET done_until = 0 WHERE name = '{schedule}'"));
    }

    /// Writes the log into the file, so that the broker begins the log anew.
    pub(crate) fn checkpoint(&self) {
        self.run("PRAGMA wal_checkpoint");
    }

    pub(crate) fn has_ticked(&self, schedule: &str) -> bool {
        self.read(|conn| {
            let sql = "SELECT count(*) FROM schedules WHERE name = ?1 AND last IS NOT NULL";
            conn.query_row(sql, [schedule], |row| row.get::<_, i64>(0))
        }) > 0
    }
}

/// Runs statements on a file.
pub(crate) fn run_sql(file: &str, sql: &str) {
    let done = open(Path::new(file), OpenFlags::SQLITE_OPEN_READ_WRITE)
        .and_then(|conn| conn.execute_batch(sql));
    assert_eq!(done, Ok(()), "{sql}");
}
