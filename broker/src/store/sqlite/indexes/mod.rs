//! Checks whether each index leads to everything that its table holds, and rebuilds those that do not.
//!
//! An index holds nothing that its table does not hold. A damaged index hides items, or fails every call that meets the
//! damage. It is rebuilt from the table, and nothing is lost. The pages of the old index are not freed, because a
//! damaged index may name pages of others as its own. They stay unused until the file is rewritten, as `sluicegate
//! check --repair` does.

mod comparison;
mod upkeep;

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension};

pub(super) use self::upkeep::{MetBy, Upkeep};
use super::{checksum::is_corruption, schema};

/// Limit of rows that are named if an index does not lead to them.
const MAX_NAMED: usize = 10;

/// An index as this version creates it.
#[derive(Debug, Clone)]
pub(super) struct Index {
    pub(super) name: String,
    table: String,
    /// The columns of an entry: the indexed ones, and those that name the row.
    columns: Vec<String>,
    /// The condition under which a row has an entry.
    condition: String,
    sql: String,
}

impl Index {
    /// Returns an SQL condition that is true for a row `i` of the table that has no entry and should have one.
    fn is_missed(&self) -> String {
        let Self { name, table, condition, .. } = self;
        let entry: Vec<_> =
            self.columns.iter().map(|column| format!("x.{column} IS i.{column}")).collect();
        let entry = entry.join(" AND ");
        // The last column is read from the entry too (`+`), because the columns before it may find a damaged entry.
        let last = self.columns.last().map_or("id", String::as_str);
        format!(
            "({condition} AND NOT EXISTS (SELECT 1 FROM {table} x INDEXED BY {name} WHERE {condition} AND {entry} AND +x.{last} IS i.{last}))"
        )
    }

    /// Returns what is wrong with the definition of the index in the file, or `None` if it is the one of this version.
    fn definition_fault(&self, conn: &Connection) -> rusqlite::Result<Option<String>> {
        // As bytes, because what is damaged may be no text.
        let definition =
            "SELECT CAST(sql AS BLOB) FROM sqlite_schema WHERE type = 'index' AND name = ?1";
        let found: Option<Vec<u8>> =
            conn.query_row(definition, [&self.name], |row| row.get(0)).optional()?;
        Ok(match found.as_deref().map(String::from_utf8_lossy) {
            None => Some("it is missing".to_owned()),
            Some(found) if found != self.sql => Some(format!("it is defined as {found}")),
            Some(_) => None,
        })
    }

    /// Returns the fault of the index, or `None` if it fits its table.
    fn fault(&self, conn: &Connection) -> rusqlite::Result<Option<String>> {
        let Self { name, table, condition, .. } = self;
        if let Some(fault) = self.definition_fault(conn)? {
            return Ok(Some(fault));
        }
        let count = |from: &str| {
            let sql = format!("SELECT count(*) FROM {table} {from} WHERE {condition}");
            conn.query_row(&sql, [], |row| row.get::<_, i64>(0))
        };
        // Errors from here on are faults of the index, or of the table, in which case the index cannot be rebuilt
        // either.
        let rows = count("NOT INDEXED")?;
        let compared = count(&format!("INDEXED BY {name}")).and_then(|entries| {
            let missed = self.missed(conn)?;
            let fits = entries == rows && missed.is_empty();
            Ok((!fits).then(|| match missed[..] {
                [] => format!("{entries} entries for {rows} rows"),
                _ => format!("it does not lead to rows {}", missed.join(", ")),
            }))
        });
        match compared {
            Err(error) if is_corruption(&error) => Ok(Some(error.to_string())),
            compared => compared,
        }
    }

    /// Returns the first rows that the index does not lead to.
    fn missed(&self, conn: &Connection) -> rusqlite::Result<Vec<String>> {
        let row = if self.table == "items" { "printf('%016x', id)" } else { "id" };
        let (table, is_missed) = (&self.table, self.is_missed());
        conn.prepare(&format!(
            "SELECT CAST({row} AS TEXT) FROM {table} i NOT INDEXED WHERE {is_missed} LIMIT {MAX_NAMED}"
        ))?
        .query_map([], |row| row.get(0))?
        .collect()
    }
}

/// Returns the indexes of this version's tables.
pub(super) fn all() -> rusqlite::Result<Vec<Index>> {
    let model = schema::open_memory()?;
    let mut found = model.prepare(
        "SELECT name, tbl_name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL",
    )?;
    found
        .query_map([], |row| {
            let (name, sql): (String, String) = (row.get(0)?, row.get(2)?);
            let columns = model
                .prepare("SELECT coalesce('\"' || name || '\"', 'id') FROM pragma_index_xinfo(?1)")?
                .query_map([&name], |row| row.get(0))?
                .collect::<rusqlite::Result<_>>()?;
            let condition = sql.split_once("WHERE").map_or("true", |(_, condition)| condition);
            let condition = condition.trim().to_owned();
            Ok(Index { name, table: row.get(1)?, columns, condition, sql })
        })?
        .collect()
}

/// Returns true if the definitions of all indexes are those of this version.
pub(super) fn are_defined(conn: &Connection, indexes: &[Index]) -> rusqlite::Result<bool> {
    for index in indexes {
        if index.definition_fault(conn)?.is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the indexes that do not fit their tables, and the fault of each. An error if the tables themselves are
/// damaged.
///
/// Reads every row, which takes 3 to 5 seconds for a million items.
pub(super) fn damaged<'i>(
    conn: &Connection,
    indexes: &'i [Index],
) -> rusqlite::Result<Vec<(&'i Index, String)>> {
    let mut damaged = Vec::new();
    for index in indexes {
        damaged.extend(index.fault(conn)?.map(|fault| (index, fault)));
    }
    Ok(damaged)
}

/// Returns the indexes whose pages are damaged where they have no entry, which only writers meet, and the fault of
/// each.
///
/// Reads the whole tables, payloads too.
pub(super) fn damaged_inside<'i>(
    conn: &Connection,
    indexes: &'i [Index],
) -> rusqlite::Result<Vec<(&'i Index, String)>> {
    let mut check = conn.prepare(
        "SELECT integrity_check FROM pragma_integrity_check('items')
         UNION ALL SELECT integrity_check FROM pragma_integrity_check('dedup')",
    )?;
    let lines: Vec<String> =
        check.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    let faults: HashMap<i64, &str> =
        lines.iter().flat_map(|lines| lines.lines()).filter_map(faulty_page).collect();
    let mut pages = conn.prepare("SELECT pageno FROM dbstat WHERE name = ?1")?;
    let mut damaged = Vec::new();
    for index in indexes {
        let mut pages = pages.query([&index.name])?;
        while let Some(page) = pages.next()? {
            if let Some(fault) = faults.get(&page.get(0)?) {
                damaged.push((index, (*fault).to_owned()));
                break;
            }
        }
    }
    Ok(damaged)
}

/// Returns the page that a line of SQLite's check is about, and the line.
fn faulty_page(line: &str) -> Option<(i64, &str)> {
    let (_, rest) = line.split_once("page ")?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((digits.parse().ok()?, line))
}

/// Rebuilds indexes in a transaction of its own, which takes about a second for a million entries.
pub(super) fn rebuild<'i>(
    conn: &Connection,
    indexes: impl Iterator<Item = &'i Index>,
) -> rusqlite::Result<()> {
    let (forget, create): (Vec<_>, Vec<_>) = indexes
        .map(|Index { name, sql, .. }| {
            let forget = "DELETE FROM sqlite_schema WHERE type = 'index' AND name";
            (format!("{forget} = '{name}'; "), format!("{sql}; "))
        })
        .unzip();
    let (forget, create) = (forget.concat(), create.concat());
    let rebuilt = conn.execute_batch(&format!(
        "BEGIN IMMEDIATE; PRAGMA writable_schema = ON; {forget} PRAGMA writable_schema = RESET; {create} COMMIT;"
    ));
    if rebuilt.is_err() {
        conn.execute_batch("PRAGMA writable_schema = RESET")?;
        if !conn.is_autocommit() {
            conn.execute_batch("ROLLBACK")?;
        }
    }
    rebuilt
}
