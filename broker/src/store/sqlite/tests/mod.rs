//! The conformance suite on both kinds of this store, and tests of what only this store promises.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::mpsc::{Sender, channel},
};

use futures_util::FutureExt;
use tempfile::TempDir;

use super::{beside::beside, mark, writer::Kind, *};
use crate::{
    domain::{
        DedupId, Demand, LeaseToken, NewItem, OrderingKey, Outcome, QueueName, Receipt, Timestamp,
    },
    store::{
        Appeared, Created, Deleted, ItemAdmin, ItemDeleted, ItemStore, Move, Push, QueueStore,
        Reservation, StatsStore, Store,
        conformance::{Env, conformance},
    },
};

/// Tests that expect an item to expire under a reserve must not lose it to a sweep.
const NO_SWEEP: Duration = Duration::from_hours(1);

/// Returns one broker twice on the store at `uri`, which is empty.
pub(crate) fn env(uri: &str, guard: impl std::any::Any + Send + Sync) -> Env {
    let clock = Arc::new(Clock::system());
    let store = Arc::new(SqliteStore::open_with(uri, clock.clone(), NO_SWEEP).unwrap());
    let inner = store.inner.clone();
    let upkeep = move || {
        let inner = inner.clone();
        async move { while inner.write_items(sweep::chunk).await.unwrap() {} }
    };
    Env::new(store.clone(), store, clock, upkeep, guard)
}

fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    (folder, path)
}

fn open(path: &Path) -> Result<SqliteStore> {
    SqliteStore::open(&format!("sqlite:{}", path.display()), Arc::new(Clock::system()))
}

/// Returns the message with which the store refuses a file.
fn refused(path: &Path) -> String {
    match open(path) {
        Err(StoreError::Unsupported(message)) => message,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("opened {}", path.display()),
    }
}

fn queue(store: &SqliteStore) -> Arc<Queue> {
    let name = QueueName::parse("queue", "q").unwrap();
    Arc::new(Queue::with_defaults(name, store.now()))
}

fn push_of(queue: &Arc<Queue>, payload: &str) -> Push {
    let item = NewItem { payload: payload.to_owned().into(), ..NewItem::default() };
    Push::new(queue.clone(), item)
}

fn want() -> Demand {
    Demand {
        max_items: 100,
        max_bytes: 1 << 20,
        may_exceed: true,
        lease: Duration::from_mins(1),
        consumer: None,
        spare: false,
    }
}

fn checked(path: &Path) -> check::Report {
    check::check(path, |_| {}).unwrap()
}

/// Starts a call that occupies the writer, alone in its transaction, until it is told to go on.
fn hold_up(store: &SqliteStore) -> (impl Future<Output = bool> + '_, Sender<()>) {
    let ((go, gone), (begin, begun)) = (channel::<()>(), channel::<()>());
    let hold = store.inner.write(move |_| Ok(begin.send(()).is_ok() && gone.recv().is_ok()));
    let mut hold = Box::pin(hold);
    assert!(hold.as_mut().now_or_never().is_none(), "the call is under way now");
    begun.recv().expect("a writer at work");
    (async move { hold.await.unwrap() }, go)
}

mod clocks;
mod damage;
mod definitions;
mod files;
mod fuzz;
mod head;
mod indexes;
mod pages;
mod payloads;
mod runs;
mod steps;
mod writer;

mod in_memory {
    async fn open() -> super::Env {
        super::env("sqlite::memory:", ())
    }
    super::conformance!(super::open);
}

mod in_a_file {
    async fn open() -> super::Env {
        let (folder, path) = super::file();
        super::env(&format!("sqlite:{}", path.display()), folder)
    }
    super::conformance!(super::open);
}

#[tokio::test]
async fn a_second_broker_is_refused_and_the_next_one_finds_everything() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.create_queue(&queue).await.unwrap();
    let pushed = store.push(vec![push_of(&queue, "x")]).await.unwrap();
    assert!(refused(&path).contains("is in use by another broker"), "{}", refused(&path));
    drop(store);

    let store = open(&path).unwrap();
    assert_eq!(store.list_queues("", None, 9).await.unwrap().len(), 1);
    let item = store.get_item(&queue, pushed[0].id).await.unwrap().unwrap();
    assert_eq!(item.payload, "x");
    // New ids continue after the last one.
    assert!(store.push(vec![push_of(&queue, "y")]).await.unwrap()[0].id > pushed[0].id);
}

#[tokio::test]
async fn ids_are_not_used_again_after_a_restart() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let pushed = store.push(vec![push_of(&queue, "x")]).await.unwrap();
    let deleted = store.delete_item(&queue, pushed[0].id, None).await.unwrap();
    assert_eq!(deleted, ItemDeleted::Done);
    drop(store);
    let store = open(&path).unwrap();
    assert!(store.push(vec![push_of(&queue, "y")]).await.unwrap()[0].id > pushed[0].id);
}

#[tokio::test]
async fn receipts_of_another_file_settle_nothing() {
    let stores =
        [(); 2].map(|()| SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap());
    let queue = queue(&stores[0]);
    let mut ids = Vec::new();
    for store in &stores {
        ids.push(store.push(vec![push_of(&queue, "x")]).await.unwrap()[0].id);
    }
    let receipt = Receipt {
        item: ids[0],
        token: LeaseToken([0; 12]),
        deliveries: 1,
        earlier_deliveries: 0,
        attempt: 1,
        keyed: false,
        queue: queue.name.clone(),
        group: queue.group.clone(),
    };
    let held = vec![Reservation { queue: queue.clone(), receipt }];
    assert_eq!(stores[0].commit(held.clone()).await.unwrap(), [Outcome::LeaseLost]);
    assert_eq!(stores[1].commit(held).await.unwrap(), [Outcome::Gone]);
}

#[tokio::test]
async fn the_file_reads_plainly_beside_the_broker() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.create_queue(&queue).await.unwrap();
    store.push(vec![push_of(&queue, "hello")]).await.unwrap();
    let conn = Connection::open_with_flags(&path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY);
    let row = conn.unwrap().query_row(
        r#"SELECT i.queue, i.priority, i.attempt, CAST(i.payload AS TEXT), i."when" = i.created
           FROM items i JOIN queues q ON q.name = i.queue"#,
        [],
        |row| {
            let (queue, payload): (String, String) = (row.get(0)?, row.get(3)?);
            Ok((queue, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?, payload, row.get(4)?))
        },
    );
    assert_eq!(row.unwrap(), ("q".to_owned(), 0, 1, "hello".to_owned(), true));
}

#[tokio::test]
async fn files_that_are_not_ours_are_refused_plainly() {
    let (folder, path) = file();
    let missing = folder.path().join("no/such/folder/store.db");
    assert!(refused(&missing).contains("cannot open the directory"), "{}", refused(&missing));
    assert!(refused(folder.path()).contains("is a directory"), "{}", refused(folder.path()));

    std::fs::write(&path, "this is a text of some length, and no database at all").unwrap();
    assert!(refused(&path).contains("is not an SQLite database"), "{}", refused(&path));

    let foreign = folder.path().join("foreign.db");
    Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE t (a)").unwrap();
    assert!(refused(&foreign).contains("another program"), "{}", refused(&foreign));

    let newer = folder.path().join("newer.db");
    drop(open(&newer).unwrap());
    Connection::open(&newer).unwrap().pragma_update(None, "user_version", 99).unwrap();
    assert!(refused(&newer).contains("newer version"), "{}", refused(&newer));

    assert!(matches!(
        SqliteStore::open("sqlite:", Arc::new(Clock::system())),
        Err(StoreError::Unsupported(_))
    ));
}

#[tokio::test]
async fn two_names_of_one_file_lead_to_one_lock() {
    let (folder, path) = file();
    let _store = open(&path).unwrap();
    let link = folder.path().join("link.db");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(refused(&link).contains("in use"), "{}", refused(&link));
}

#[tokio::test]
async fn the_sweep_removes_expired_items_and_unblocks_the_next_ones() {
    let clock = Arc::new(Clock::system());
    let store = SqliteStore::open_with("sqlite::memory:", clock.clone(), NO_SWEEP).unwrap();
    let mut settings = (*queue(&store)).clone();
    settings.dedup_window = Duration::from_secs(10);
    let queue = Arc::new(settings);
    let push = |payload: &str, ttl, key: &str, dedup: &str| {
        let mut push = push_of(&queue, payload);
        push.item.ttl = ttl;
        push.item.ordering_key = OrderingKey::new(key);
        push.item.dedup_id = DedupId::new(dedup);
        push
    };
    let short = Some(Duration::from_secs(10));
    let mut pushes: Vec<Push> =
        (0..1_200).map(|n| push(&n.to_string(), short, "", &n.to_string())).collect();
    pushes.push(push("first", short, "k", ""));
    pushes.push(push("second", None, "k", ""));
    store.push(pushes).await.unwrap();
    clock.advance(Duration::from_secs(11));
    while store.inner.write_items(sweep::chunk).await.unwrap() {}
    let counts = store.inner.read(|view| {
        let count = |table| {
            let sql = format!("SELECT count(*) FROM {table}");
            view.conn.query_row(&sql, [], |row| row.get::<_, i64>(0))
        };
        Ok((count("items")?, count("dedup")?))
    });
    assert_eq!(counts.await.unwrap(), (1, 0));
    assert_eq!(store.totals(&queue.name).await.unwrap().expired, 1_201);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 1);
}

#[tokio::test]
async fn a_reserve_reads_no_more_than_it_takes() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let plan = store.inner.read(|view| {
        let mut plan = view.conn.prepare(&format!("EXPLAIN QUERY PLAN {}", reserve::LEVEL))?;
        let steps = plan.query_map(("q", 0, 5, 0, 0), |row| row.get::<_, String>(3))?;
        steps.collect::<rusqlite::Result<Vec<_>>>()
    });
    // One seek in the index, behind the last run, and one in the table for each item. No sorting.
    let plan = plan.await.unwrap();
    let index =
        "SEARCH items USING COVERING INDEX handout (queue=? AND priority=? AND when>? AND when<?)";
    let table = "SEARCH items USING INTEGER PRIMARY KEY (rowid=?) LEFT-JOIN";
    assert_eq!(plan[..2], [index, table]);
    assert!(!plan.iter().any(|step| step.contains("TEMP B-TREE")), "{plan:?}");
}
