//! `sluicegate check --repair`: repairs what can be repaired without loss.

use std::{fs, path::Path};

use rusqlite::Connection;

use super::{
    check::{Report, check},
    indexes, order,
    schema::{StoreFile, identity},
    tx::View,
};
use crate::domain::Timestamp;

/// Rebuilds the damaged indexes of a store's file, rewrites the file if parts of it are unused, and returns the result
/// of another check. Damage in tables stays. `tell` is called with each step.
///
/// # Errors
/// Why the file could not be repaired, for example because a broker has it open.
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
        tell(format!("the tables are damaged, so that not everything could be repaired: {error}"));
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
            tell(format!("rebuilding index {}: {fault}", index.name));
        }
        indexes::rebuild(conn, damaged.iter().map(|(index, _)| *index))?;
        let (tag, _) = identity(conn)?;
        let time = "SELECT value FROM meta WHERE key = 'time'";
        let now = Timestamp(conn.query_row(time, [], |row| row.get(0))?);
        order::restore_turns(&View { conn, now, tag: tag.to_be_bytes() })?;
    }
    tell("rewriting the file without its unused parts".to_owned());
    conn.execute_batch("VACUUM")
}
