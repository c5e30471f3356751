//! Compares the definitions of a file's tables with those of this version.
//!
//! Definitions are text in the file, and SQLite takes whatever it can parse. With a bit flipped, a column may have another
//! name or default, or be part of the comment before it. Statements that name such a column fail, or even take its quoted
//! name for a text. So a file is refused unless its tables are as this version defines them.
//!
//! Comments, the order of columns and tables of others are not compared. Definitions of indexes are compared by `indexes`,
//! because an index can be built anew.

use std::collections::BTreeMap;

use rusqlite::Connection;

/// The default of columns that a step from an earlier version has added, and that have none in a new file.
const ADDED_DEFAULT: &str = "0";

/// The rows of `meta` that every file has had since version 1.
const NUMBERS: [&str; 4] = ["next_id", "settings", "tag", "pinged"];

/// A table as SQLite understands its definition.
#[derive(Debug, PartialEq, Eq)]
struct Table {
    without_rowid: bool,
    strict: bool,
    columns: BTreeMap<String, Column>,
}

#[derive(Debug, PartialEq, Eq)]
struct Column {
    type_name: String,
    not_null: bool,
    /// Position in the primary key, from 1. 0: not part of it.
    in_key: i64,
    /// Not 0 for columns that SQLite computes, of which this version has none.
    hidden: i64,
    default: Option<String>,
}

impl Column {
    /// Returns true if a column of a file is as this version defines it.
    fn fits(&self, found: &Self) -> bool {
        let added = found.default.as_deref() == Some(ADDED_DEFAULT);
        let has_default = found.default == self.default || added;
        has_default
            && (&self.type_name, self.not_null, self.in_key, self.hidden)
                == (&found.type_name, found.not_null, found.in_key, found.hidden)
    }
}

/// Returns what is wrong with the tables of a file, or `None` if they are defined as those of `new`, an empty store of this
/// version.
pub(super) fn fault(conn: &Connection, new: &Connection) -> rusqlite::Result<Option<String>> {
    let found = tables(conn)?;
    for (name, expected) in tables(new)? {
        let fault = match found.get(&name) {
            None => Some("is missing".to_owned()),
            Some(table) => table_fault(&expected, table),
        };
        if let Some(fault) = fault {
            return Ok(Some(format!("table {name} {fault}")));
        }
    }
    for name in NUMBERS {
        let count = "SELECT count(*) FROM meta WHERE key = ?1";
        if conn.query_row(count, [name], |row| row.get::<_, i64>(0))? != 1 {
            return Ok(Some(format!("table meta has no {name}")));
        }
    }
    Ok(None)
}

fn table_fault(expected: &Table, found: &Table) -> Option<String> {
    if (expected.without_rowid, expected.strict) != (found.without_rowid, found.strict) {
        return Some("is of another kind".to_owned());
    }
    let wrong = expected.columns.iter().find_map(|(name, column)| match found.columns.get(name) {
        None => Some(format!("has no column {name}")),
        Some(other) => {
            (!column.fits(other)).then(|| format!("defines its column {name} differently"))
        }
    });
    let is_unknown = |name: &&String| !expected.columns.contains_key(*name);
    let unknown = || found.columns.keys().find(is_unknown);
    wrong.or_else(|| unknown().map(|name| format!("has a column {name}, which it should not have")))
}

/// Returns the tables of a database by name.
fn tables(conn: &Connection) -> rusqlite::Result<BTreeMap<String, Table>> {
    let mut statement = conn.prepare(
        r#"SELECT t.name, t.wr, t.strict, c.name, c.type, c."notnull", c.pk, c.hidden, c.dflt_value
           FROM pragma_table_list t, pragma_table_xinfo(t.name) c
           WHERE t.schema = 'main' AND t.type = 'table' AND t.name NOT LIKE 'sqlite\_%' ESCAPE '\'"#,
    )?;
    let mut rows = statement.query([])?;
    let mut tables = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (without_rowid, strict) = (row.get(1)?, row.get(2)?);
        let table: &mut Table = tables.entry(row.get(0)?).or_insert_with(|| Table {
            without_rowid,
            strict,
            columns: BTreeMap::new(),
        });
        let column = Column {
            type_name: row.get(4)?,
            not_null: row.get(5)?,
            in_key: row.get(6)?,
            hidden: row.get(7)?,
            default: row.get(8)?,
        };
        table.columns.insert(row.get(3)?, column);
    }
    Ok(tables)
}
