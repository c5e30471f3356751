//! Tests of damage to the text by which tables and indexes are defined in the file.

use std::fs;

use super::*;

/// Creates a store with an item.
async fn fill(path: &Path) {
    let store = open(path).unwrap();
    let queue = queue(&store);
    store.create_queue(&queue).await.unwrap();
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
}

/// Replaces a part of a definition in the file by another text of the same length.
fn redefine(path: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let conn = Connection::open(path).unwrap();
    conn.execute_batch("PRAGMA writable_schema = ON").unwrap();
    let change = "UPDATE sqlite_schema SET sql = replace(sql, ?1, ?2) WHERE instr(sql, ?1)";
    assert_eq!(conn.execute(change, [from, to]).unwrap(), 1, "{from}");
}

async fn reserve(store: &SqliteStore) -> Result<usize> {
    let queue = queue(store);
    let reserved =
        store.reserver(&queue.name).reserve(&queue, &[want()], Appeared::Nothing).await?;
    Ok(reserved.deliveries.len())
}

fn definition(path: &Path, index: &str) -> String {
    let conn = Connection::open(path).unwrap();
    let sql = "SELECT sql FROM sqlite_schema WHERE name = ?1";
    conn.query_row(sql, [index], |row| row.get(0)).unwrap()
}

/// Each damage is one bit. SQLite accepts some of these definitions, and says of others that they are malformed.
#[tokio::test]
async fn a_file_whose_tables_are_defined_differently_is_refused_in_plain_words() {
    let (_folder, path) = file();
    fill(&path).await;
    let bytes = fs::read(&path).unwrap();
    for (from, to, fault) in [
        (
            "attempt INTEGER NOT NULL,\n  deliveries",
            "attempu INTEGER NOT NULL,\n  deliveries",
            "table items has no column attempt",
        ),
        // SQLite would take the quoted name of the column for a text.
        (
            "name TEXT PRIMARY KEY,\n  \"group\" TEXT",
            "name TEXT PRIMARY KEY,\n  \"gro5p\" TEXT",
            "table queues has no column group",
        ),
        // The next line becomes part of the comment.
        (
            "NULL: created\n  attempt",
            "NULL: createdJ  attempt",
            "table items has no column attempt",
        ),
        ("-- JSON\n  priority", "-- JSONJ  priority", "table schedules has no column priority"),
        ("PRIMARY KEY,\n  queue,", "PRIMARY KEY,\n  qumue,", "table damaged has no column queue"),
        (
            "id INTEGER PRIMARY KEY,\n",
            "id INTEGEZ PRIMARY KEY,\n",
            "table damaged defines its column id differently",
        ),
        (
            "until INTEGER NOT NULL,\n  PRIMARY",
            "untin INTEGER NOT NULL,\n  PRIMARY",
            "malformed database schema",
        ),
        ("  failed_attempts INTEGER,", "  failed_attempts INTEGEZ,", "malformed database schema"),
        ("CREATE TABLE totals (", "CREATE TABLE totalr (", "malformed database schema"),
    ] {
        redefine(&path, from, to);
        let message = refused(&path);
        assert!(message.contains(fault), "{from}: {message}");
        assert!(message.contains("is damaged") && message.contains("from a backup"), "{message}");
        let report = checked(&path);
        assert!(report.faults[0].contains(fault), "{from}: {report}");
        fs::write(&path, &bytes).unwrap();
    }
    assert!(checked(&path).is_whole());
    drop(open(&path).unwrap());

    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE meta SET key = 'pingee' WHERE key = 'pinged'", []).unwrap();
    drop(conn);
    assert!(refused(&path).contains("table meta has no pinged"), "{}", refused(&path));
}

/// A comment that nothing reads is no reason to refuse a file.
#[tokio::test]
async fn a_damaged_comment_does_no_harm() {
    let (_folder, path) = file();
    fill(&path).await;
    redefine(&path, "-- ordering key\n", "-- ordering kex\n");
    assert_eq!(reserve(&open(&path).unwrap()).await.unwrap(), 1);
}

#[tokio::test]
async fn an_index_that_is_defined_differently_is_built_anew() {
    let (_folder, path) = file();
    fill(&path).await;
    let (bytes, whole) = (fs::read(&path).unwrap(), definition(&path, "handout"));
    for (from, to) in [
        // SQLite takes these for texts.
        ("DESC, \"when\")", "DESC, \"whef\")"),
        ("WHERE \"when\" IS NOT NULL", "WHERE \"whef\" IS NOT NULL"),
    ] {
        redefine(&path, from, to);
        assert_ne!(definition(&path, "handout"), whole);
        assert_eq!(reserve(&open(&path).unwrap()).await.unwrap(), 1, "{from}");
        assert_eq!(definition(&path, "handout"), whole);
        // The pages of the old index are not freed.
        assert!(checked(&path).faults.iter().all(|fault| fault.contains("never used")));
        fs::write(&path, &bytes).unwrap();
        fs::remove_file(mark::path_of(&path)).unwrap();
    }
}

#[tokio::test]
async fn a_table_that_no_longer_fits_is_answered_as_damage() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    assert_eq!(reserve(&store).await.unwrap(), 0);
    for (change, back) in [
        (
            "ALTER TABLE items RENAME COLUMN attempt TO other",
            "ALTER TABLE items RENAME COLUMN other TO attempt",
        ),
        ("ALTER TABLE items RENAME TO other", "ALTER TABLE other RENAME TO items"),
    ] {
        store.inner.write(move |tx| tx.conn.execute_batch(change)).await.unwrap();
        let refused = reserve(&store).await;
        assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{change}: {refused:?}");
        let refused = store.push(vec![push_of(&queue(&store), "x")]).await;
        assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{change}: {refused:?}");
        store.inner.write(move |tx| tx.conn.execute_batch(back)).await.unwrap();
    }
    assert_eq!(reserve(&store).await.unwrap(), 0);
}

#[tokio::test]
async fn an_index_that_goes_missing_is_built_anew() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    store.push(vec![push_of(&queue(&store), "x")]).await.unwrap();
    store.inner.write(|tx| tx.conn.execute_batch("DROP INDEX handout")).await.unwrap();
    let refused = reserve(&store).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    assert_eq!(reserve(&store).await.unwrap(), 1);
}
