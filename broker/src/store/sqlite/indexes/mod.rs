//! Indexes: whether each one leads to all that its table holds, and building anew those that do not.
//!
//! An index holds nothing that its table does not hold. A damaged one hides items, or ends every call that meets
//! the damage; it is built anew from the table, and nothing is lost. The pages of the old one are not freed: a damaged index may
//! name pages of others as its own. They stay unused until the file is written anew, as `sluicegate check --repair` does.

mod comparison;
mod upkeep;

use std::collections::HashMap;

use rusqlite::Connection;

pub(super) use self::upkeep::{MetBy, Upkeep};
use super::{checksum::is_corruption, schema};

/// Most rows that an index does not lead to that are named.
const MAX_NAMED: usize = 10;

/// An index as this version makes it.
#[derive(Debug, Clone)]
pub(super) struct Index {
    pub(super) name: String,
    table: String,
    /// What makes an entry: the indexed columns, and those that name the row.
    columns: Vec<String>,
    /// Which rows have an entry.
    condition: String,
    sql: String,
}

impl Index {
    /// SQL that is true of a row `i` of the table that has no entry and ought to have one.
    fn is_missed(&self) -> String {
        let Self { name, table, condition, .. } = self;
        let entry: Vec<_> =
            self.columns.iter().map(|column| format!("x.{column} IS i.{column}")).collect();
        let entry = entry.join(" AND ");
        // The last one is read from the entry as well (`+`): a damaged one may be found by what comes before.
        let last = self.columns.last().map_or("id", String::as_str);
        format!(
            "({condition} AND NOT EXISTS (SELECT 1 FROM {table} x INDEXED BY {name} WHERE {condition} AND {entry} AND +x.{last} IS i.{last}))"
        )
    }

    /// What is wrong with the index; `None` if it fits its table.
    fn fault(&self, conn: &Connection) -> rusqlite::Result<Option<String>> {
        let Self { name, table, condition, .. } = self;
        let is_there = "SELECT count(*) FROM sqlite_schema WHERE type = 'index' AND name = ?1";
        if conn.query_row(is_there, [name], |row| row.get::<_, i64>(0))? == 0 {
            return Ok(Some("it is not there".to_owned()));
        }
        let count = |from: &str| {
            let sql = format!("SELECT count(*) FROM {table} {from} WHERE {condition}");
            conn.query_row(&sql, [], |row| row.get::<_, i64>(0))
        };
        // What fails from here on is the index, or else it cannot be built anew either.
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

    /// The first rows that the index does not lead to.
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

/// The indexes of this version's tables.
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

/// Those of the indexes that do not fit their tables, and what is wrong with each. An error if the tables themselves are
/// damaged.
///
/// Reads every row: 3 to 5 seconds for a million items.
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

/// Those of the indexes whose pages are damaged where no entry is, which is only met by who writes, and what is wrong.
///
/// Reads the whole table, payloads too.
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

/// The page that a line of SQLite's check is about.
fn faulty_page(line: &str) -> Option<(i64, &str)> {
    let (_, rest) = line.split_once("page ")?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((digits.parse().ok()?, line))
}

/// Builds indexes anew, in a transaction of its own: about a second for a million entries.
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
