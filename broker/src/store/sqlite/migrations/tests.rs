use std::{num::NonZeroU64, path::PathBuf, sync::Arc};

use tempfile::TempDir;

use super::*;
use crate::{
    domain::{
        Clock, DedupId, GroupName, ItemId, ItemState, Limit, NewItem, Queue, QueueName,
        RetryPolicy, ScheduleName, Timestamp, Totals,
    },
    store::{
        ItemAdmin, ItemStore, Push, QueueStore, ScheduleStore, StatsStore, StoreError,
        sqlite::{SqliteStore, schema},
    },
};

/// Returns an empty store of this version.
fn new() -> Connection {
    schema::open_memory().unwrap()
}

/// A file as the first release left it. It never changes, whatever today's tables look like.
const VERSION_1: &str = include_str!("version_1.sql");

fn old_file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch(VERSION_1).unwrap();
    (folder, path)
}

fn open(path: &std::path::Path) -> Result<SqliteStore, StoreError> {
    SqliteStore::open(&format!("sqlite:{}", path.display()), Arc::new(Clock::system()))
}

fn name(text: &str) -> QueueName {
    QueueName::parse("queue", text).unwrap()
}

async fn queue(store: &SqliteStore, text: &str) -> Arc<Queue> {
    Arc::new(store.get_queue(&name(text)).await.unwrap().expect("the queue is there"))
}

/// Returns the columns of every table, ordered by name.
fn columns(conn: &Connection) -> Vec<(String, String, String, bool)> {
    let mut statement = conn
        .prepare(
            r#"SELECT t.name, c.name, c.type, c."notnull" FROM sqlite_schema t, pragma_table_info(t.name) c
               WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' ORDER BY t.name, c.name"#,
        )
        .unwrap();
    let rows = statement
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
        .unwrap();
    rows.collect::<rusqlite::Result<_>>().unwrap()
}

/// A file of the first release opens with everything in it, and a limit that was not set is the broker's default.
#[tokio::test]
async fn a_file_of_version_1_keeps_everything_in_it() {
    let (_folder, path) = old_file();
    let store = open(&path).unwrap();
    let plain = queue(&store, "plain").await;
    let created = Timestamp(1_700_000_000_000);
    assert_eq!(*plain, Queue { revision: 1, ..Queue::with_defaults(name("plain"), created) });
    let work = queue(&store, "work").await;
    let policy = RetryPolicy {
        initial_delay: std::time::Duration::from_secs(1),
        multiplier: 3.0,
        max_delay: std::time::Duration::from_mins(1),
        jitter: 0.5,
    };
    assert_eq!((work.max_attempts, work.max_deliveries), (Some(Limit::of(3)), None));
    assert_eq!((work.dead_letter_queue.clone(), work.discard_failed), (Some(name("dead")), false));
    assert_eq!((&work.retry_policy, work.max_depth), (&Some(policy), NonZeroU64::new(9)));
    assert_eq!(work.group, GroupName::parse("group", "eu").unwrap());
    assert!(work.sequenced && !work.paused && queue(&store, "kept").await.paused);

    let states = [
        ("plain", "ready", ItemState::Ready, Some(1_700_000_001_000)),
        ("plain", "lapsed", ItemState::Ready, Some(1_700_000_009_000)),
        ("plain", "delayed", ItemState::Delayed, Some(32_503_680_000_000)),
        ("work", "reserved", ItemState::Reserved, Some(1_700_000_003_000)),
        ("work", "first", ItemState::Ready, Some(1_700_000_004_000)),
        ("work", "blocked", ItemState::Blocked, None),
        ("dead", "dead", ItemState::Ready, Some(1_700_000_006_000)),
        ("kept", "processed", ItemState::Processed, None),
    ];
    let mut ids = Vec::new();
    for (in_queue, payload, state, due) in states {
        let queue = queue(&store, in_queue).await;
        let page = store.list_items(&queue, None, None, 100).await.unwrap();
        let item = page.entries.iter().find(|item| item.payload == payload).expect(payload);
        assert_eq!((item.state, item.due_time), (state, due.map(Timestamp)), "{payload}");
        assert_eq!((item.dead_letter_time, item.dead_letter_attempts), (None, 0));
        ids.push(item.id);
    }
    assert_eq!(ids[0], "112233440000000000000001".parse::<ItemId>().unwrap());
    assert_eq!(store.depth(&work).await.unwrap().reserved, 1);

    let totals = store.totals(&work.name).await.unwrap();
    let expected = Totals {
        pushed: 10,
        delivered: 9,
        committed: 8,
        rolled_back: 7,
        moved: 6,
        dead_lettered: 5,
        expired: 4,
        popped: 0,
        discarded: 0,
    };
    assert_eq!(totals, expected);
    let schedule = ScheduleName::parse("schedule", "nightly").unwrap();
    assert_eq!(store.get_schedule(&schedule).await.unwrap().unwrap().cron, "0 3 * * *");

    // The file works like a new one.
    let item =
        NewItem { payload: "new".into(), dedup_id: DedupId::new("once"), ..NewItem::default() };
    let push = Push::new(Arc::clone(&work), item);
    let again = store.push(vec![push.clone()]).await.unwrap()[0];
    assert_eq!((again.deduplicated, again.id), (true, ids[3]));
    let new = NewItem { payload: "new".into(), ..NewItem::default() };
    let pushed = store.push(vec![Push { item: new, ..push }]).await.unwrap()[0];
    assert_eq!(pushed.sequence, Some(4));
}

/// A migrated file and a new one have the same columns, so statements need not distinguish them.
#[test]
fn an_old_file_gets_the_tables_of_a_new_one() {
    let (_folder, path) = old_file();
    drop(open(&path).unwrap());
    let old = Connection::open(&path).unwrap();
    let new = schema::open_memory().unwrap();
    assert_eq!(columns(&old), columns(&new));
    let version: i32 = old.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, VERSION);
    drop(old);
    drop(open(&path).unwrap()); // it opens as one of ours again
}

/// Each step leads from its version to the tables of this one, whichever version a file has.
#[test]
fn a_file_of_the_version_before_gets_what_it_lacks() {
    let conn = new();
    let expected = columns(&conn);
    for (version, lacks) in [(7, "DROP TABLE payloads; DROP TABLE runs"), (8, "DROP TABLE runs")] {
        conn.execute_batch(lacks).unwrap();
        assert_ne!(columns(&conn), expected);
        assert_eq!(migrate(&conn, version, &new()).unwrap(), None);
        assert_eq!(columns(&conn), expected);
    }
    assert_eq!(VERSION, 9);
}

/// Otherwise each start of a migrated file would build its indexes anew.
#[test]
fn an_old_file_has_the_indexes_of_a_new_one() {
    let indexes = |conn: &Connection| -> Vec<(String, String)> {
        let mut statement = conn
            .prepare("SELECT name, sql FROM sqlite_schema WHERE type = 'index' ORDER BY name")
            .unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<rusqlite::Result<_>>().unwrap()
    };
    let (_folder, path) = old_file();
    let conn = Connection::open(&path).unwrap();
    assert_eq!(migrate(&conn, 1, &new()).unwrap(), None);
    assert_eq!(indexes(&conn), indexes(&schema::open_memory().unwrap()));
}

/// The file stays as it was, for people to examine.
#[test]
fn an_old_file_with_damaged_tables_is_refused_and_stays_as_it_is() {
    for (damage, fault) in [
        ("ALTER TABLE items RENAME COLUMN reason TO reasom", "table items has no column reason"),
        ("ALTER TABLE queues RENAME COLUMN max_attempts TO mix_attempts", "no such column"),
        ("DROP TABLE counters", "table counters is missing"),
    ] {
        let (_folder, path) = old_file();
        let conn = Connection::open(&path).unwrap();
        conn.execute_batch(damage).unwrap();
        let before = columns(&conn);
        let Err(StoreError::Unsupported(message)) = open(&path) else { panic!("not refused") };
        assert!(message.contains("is damaged") && message.contains(fault), "{message}");
        assert_eq!(columns(&conn), before);
    }
}

/// A step that fails half way leaves the file as it was.
#[test]
fn a_migration_is_all_or_nothing() {
    let (_folder, path) = old_file();
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("ALTER TABLE totals ADD COLUMN discarded INTEGER").unwrap();
    let before = columns(&conn);
    assert!(migrate(&conn, 1, &new()).is_err(), "the column is there already");
    assert_eq!(columns(&conn), before);
    let version: i32 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 1);
}

#[test]
fn a_file_of_a_newer_version_is_refused_in_plain_words() {
    let (_folder, path) = old_file();
    let conn = Connection::open(&path).unwrap();
    conn.pragma_update(None, "user_version", VERSION + 1).unwrap();
    drop(conn);
    let Err(StoreError::Unsupported(message)) = open(&path) else { panic!("it was not refused") };
    assert!(message.contains("written by a newer version of this program"), "{message}");
}
