//! `sluicegate check --repair`: mends what can be mended with nothing lost.

use std::{fs, path::Path};

use rusqlite::Connection;

use super::{
    check::{Report, check},
    indexes, order,
    schema::{StoreFile, identity},
    tx::View,
};
use crate::domain::Timestamp;

/// Builds the damaged indexes of a store's file anew, and writes the file anew if parts of it are used by nothing; says how
/// it is then. What is damaged in tables stays as it is. `tell` is called with what is done.
///
/// Refused while a broker has the file open. An error says why the file could not be repaired.
pub fn repair(path: &Path, mut tell: impl FnMut(String)) -> Result<Report, String> {
    let shown = path.display();
    fs::metadata(path).map_err(|e| format!("cannot open {shown}: {e}"))?;
    let file = StoreFile::lock(path).map_err(|e| e.to_string())?;
    let found = check(&file.path, &mut tell)?;
    if found.is_whole() {
        return Ok(found);
    }
    let mended = Connection::open(&file.path).and_then(|conn| mend(&conn, &mut tell));
    if let Err(error) = mended {
        tell(format!("the tables are damaged, so that not all could be mended: {error}"));
    }
    check(&file.path, tell)
}

fn mend(conn: &Connection, tell: &mut impl FnMut(String)) -> rusqlite::Result<()> {
    let indexes = indexes::all()?;
    let mut damaged = indexes::damaged(conn, &indexes)?;
    if damaged.is_empty() {
        damaged = indexes::damaged_inside(conn, &indexes)?;
    }
    if !damaged.is_empty() {
        for (index, fault) in &damaged {
            tell(format!("building index {} anew: {fault}", index.name));
        }
        indexes::rebuild(conn, damaged.iter().map(|(index, _)| *index))?;
        let (tag, _) = identity(conn)?;
        let time = "SELECT value FROM meta WHERE key = 'time'";
        let now = Timestamp(conn.query_row(time, [], |row| row.get(0))?);
        order::restore_turns(&View { conn, now, tag: tag.to_be_bytes() })?;
    }
    tell("writing the file anew, without what nothing uses".to_owned());
    conn.execute_batch("VACUUM")
}
