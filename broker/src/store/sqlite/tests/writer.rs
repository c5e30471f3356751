//! Tests of the writer: what is synced, what shares a transaction, a full disk.

use super::*;

/// Writes something, and returns how many commits had been counted before.
fn write(tx: &Tx<'_>) -> rusqlite::Result<i64> {
    tx.conn.execute("UPDATE meta SET value = value + 1 WHERE key = 'pinged'", [])?;
    commits(tx.conn)
}

fn commits(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("SELECT value FROM meta WHERE key = 'commits'", [], |row| row.get(0))
}

/// Returns how many of the commits that count were synced.
fn synced(path: &Path) -> i64 {
    loop {
        // One that is being written is not whole.
        if let Some(noted) = mark::read(path).unwrap() {
            return noted.commits;
        }
    }
}

/// Returns how many times the log was synced since the store is measured.
fn syncs(metrics: &crate::metrics::Metrics) -> u64 {
    let page = metrics.encode().unwrap();
    let count = "sluicegate_sqlite_sync_duration_seconds_count ";
    page.lines().find_map(|line| line.strip_prefix(count)).unwrap().parse().unwrap()
}

/// A push of one item.
fn push_into(queue: &str) -> Kind {
    Kind::Push { queue: QueueName::parse("queue", queue).unwrap(), items: 1, bytes: 1 }
}

#[tokio::test]
async fn only_reserves_are_answered_before_they_are_synced() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    store.measure(&metrics);
    let kinds = [Kind::Reserve, push_into("q"), Kind::Reserve, Kind::Settle(1), Kind::Other];
    let mut more = Vec::new();
    for kind in kinds {
        let (commits, times) = (synced(&path), syncs(&metrics));
        store.inner.writer.call(kind.clone(), write).await.unwrap();
        more.push(synced(&path) - commits);
        assert!(kind == Kind::Reserve || syncs(&metrics) > times);
    }
    assert_eq!(more, [0, 1, 0, 1, 1]);

    // Together with a push, reserves are synced with it. The first call occupies the writer until all are queued.
    let before = synced(&path);
    let (hold, go) = hold_up(&store);
    let call = async |kind| {
        store.inner.writer.call(kind, write).await.unwrap();
        synced(&path)
    };
    let (reserve, push) = (call(Kind::Reserve), call(push_into("q")));
    let release = async { go.send(()).unwrap() };
    let (_, reserve, push, ()) = tokio::join!(hold, reserve, push, release);
    assert_eq!((reserve, push), (before + 1, before + 1));
}

/// A thread syncs while the writer goes on, so that later calls and readers read what is not on disk yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_answer_comes_before_what_was_written_or_read_is_synced() {
    let (_folder, path) = file();
    let store = Arc::new(open(&path).unwrap());
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..8 {
        let (store, path) = (Arc::clone(&store), path.clone());
        callers.spawn(async move {
            for call in 0..200 {
                let kind = match (caller + call) % 4 {
                    0 => Some(Kind::Reserve),
                    1 => Some(push_into("q")),
                    2 => Some(Kind::Settle(1)),
                    _ => None,
                };
                let writes = kind.as_ref().is_some_and(|kind| *kind != Kind::Reserve);
                let read = match kind {
                    Some(kind) => store.inner.writer.call(kind, write).await.unwrap(),
                    None => store.inner.read(|view| commits(view.conn)).await.unwrap(),
                };
                assert!(synced(&path) >= read + i64::from(writes), "{read} {writes}");
            }
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test]
async fn a_reserve_is_synced_soon_even_if_nothing_follows() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    store.measure(&metrics);
    let want = Demand {
        max_items: 1,
        max_bytes: 10,
        may_exceed: true,
        lease: Duration::from_secs(9),
        consumer: None,
        spare: false,
    };
    assert_eq!(
        store
            .reserver(&queue.name)
            .reserve(&queue, &[want], Appeared::Nothing)
            .await
            .unwrap()
            .deliveries
            .len(),
        1
    );
    while syncs(&metrics) == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn reserves_are_synced_soon_while_others_follow_without_a_pause() {
    const CALLS: usize = 200;
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    store.measure(&metrics);
    store.inner.writer.call(push_into("q"), write).await.unwrap();
    let before = syncs(&metrics);
    // Before the writer has done a call, the next one waits.
    let queued = || {
        let ((go, gone), (begin, begun)) = (channel::<()>(), channel::<()>());
        let mut call = Box::pin(store.inner.writer.call(Kind::Reserve, move |tx| {
            let _ = (begin.send(()), gone.recv()); // nobody hears the last one
            std::thread::sleep(Duration::from_millis(1));
            write(tx)
        }));
        assert!(call.as_mut().now_or_never().is_none(), "the call is under way now");
        (call, go, begun)
    };
    let mut last = queued();
    for _ in 0..CALLS {
        last.2.recv().expect("a writer at work");
        let (call, go, _) = std::mem::replace(&mut last, queued());
        go.send(()).unwrap();
        call.await.unwrap();
        if syncs(&metrics) > before {
            return;
        }
    }
    panic!("nothing was synced");
}

/// Many items are one, and many bytes.
#[tokio::test]
async fn a_flood_of_pushes_leaves_room_for_other_calls() {
    for (batch, payload) in [(1_000, 1), (20, 512 << 10)] {
        let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
        let (queue, payload) = (queue(&store), "x".repeat(payload));
        let (hold, go) = hold_up(&store);
        let pushes = (0..4).map(|_| store.push(vec![push_of(&queue, &payload); batch]));
        let pushes = futures_util::future::join_all(pushes);
        // Queued after all pushes, done after the first.
        let count = |tx: &Tx<'_>| {
            tx.conn.query_row("SELECT count(*) FROM items", [], |row| row.get::<_, i64>(0))
        };
        let reserve = store.inner.writer.call(Kind::Reserve, count);
        let elsewhere = store.inner.writer.call(push_into("elsewhere"), count);
        let release = async { go.send(()).unwrap() };
        let (_, pushed, reserve, elsewhere, ()) =
            tokio::join!(hold, pushes, reserve, elsewhere, release);
        assert_eq!((reserve.unwrap(), elsewhere.unwrap()), (batch as i64, batch as i64));
        assert!(pushed.iter().all(|answer| answer.as_ref().unwrap().len() == batch));
        assert_eq!(store.depth(&queue).await.unwrap().ready, 4 * batch as u64);
    }
}

/// SQLite itself syncs where a log begins and where it is written into the file.
#[tokio::test]
async fn sqlite_syncs_all_but_commits() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let pragmas = store.inner.write(|tx| {
        let synchronous: i64 = tx.conn.pragma_query_value(None, "synchronous", |row| row.get(0))?;
        let journal: String = tx.conn.pragma_query_value(None, "journal_mode", |row| row.get(0))?;
        Ok((synchronous, journal))
    });
    assert_eq!(pragmas.await.unwrap(), (1, "wal".to_owned()));
}

#[tokio::test]
async fn a_full_disk_fails_all_calls_and_leaves_the_store_whole() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "kept")]).await.unwrap();
    let limit = |pages: i64| {
        move |tx: &Tx<'_>| {
            let pages = if pages == 0 {
                tx.conn.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0))? + 8
            } else {
                pages
            };
            tx.conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))
        }
    };
    store.inner.write(limit(0)).await.unwrap();
    let large = "x".repeat(100_000);
    let calls = (0..8).map(|_| store.push(vec![push_of(&queue, &large)]));
    for answer in futures_util::future::join_all(calls).await {
        assert!(matches!(answer, Err(StoreError::Full { .. })), "{answer:?}");
    }
    assert_eq!(store.depth(&queue).await.unwrap().ready, 1);
    // Stored items are reserved and settled. A settle that stores an item too is refused like a push.
    let want = Demand {
        max_items: 1,
        max_bytes: 10,
        may_exceed: true,
        lease: Duration::from_secs(9),
        consumer: None,
        spare: false,
    };
    let reserved =
        store.reserver(&queue.name).reserve(&queue, &[want], Appeared::Nothing).await.unwrap();
    let held =
        Reservation { queue: queue.clone(), receipt: reserved.deliveries[0].1.receipt.clone() };
    let both = store.commit_and_push(held.clone(), vec![push_of(&queue, "y")]).await;
    assert!(matches!(both, Err(StoreError::Full { .. })), "{both:?}");
    assert_eq!(store.commit(vec![held]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(store.depth(&queue).await.unwrap().reserved, 0);
    store.inner.write(limit(1_000_000)).await.unwrap();
    // Pushes are accepted again after the next check of the disk.
    let mut answer = store.push(vec![push_of(&queue, &large)]).await;
    while matches!(answer, Err(StoreError::Full { .. })) {
        tokio::task::yield_now().await;
        answer = store.push(vec![push_of(&queue, &large)]).await;
    }
    answer.unwrap();
    assert_eq!(store.depth(&queue).await.unwrap().ready, 1);
}

#[tokio::test]
async fn a_call_that_fails_does_not_affect_others_of_its_group() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    // All of these are queued while the first call occupies the writer.
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let hold = store.inner.write(move |_| Ok(gone.recv().is_ok()));
    let before = store.push(vec![push_of(&queue, "before")]);
    let failing = store.inner.write(|tx| {
        tx.conn.execute("INSERT INTO counters VALUES ('spoilt', 1)", [])?;
        tx.conn.execute("INSERT INTO counters VALUES (no_such_function(), 1)", [])
    });
    let after = store.push(vec![push_of(&queue, "after")]);
    let release = async { go.send(()).unwrap() };
    let (hold, before, failing, after, ()) = tokio::join!(hold, before, failing, after, release);
    assert!(hold.unwrap() && before.is_ok() && after.is_ok());
    assert!(matches!(failing, Err(StoreError::Internal { .. })), "{failing:?}");
    assert_eq!(store.depth(&queue).await.unwrap().ready, 2);
    let spoilt = store.inner.read(|view| {
        view.conn.query_row("SELECT count(*) FROM counters", [], |row| row.get::<_, i64>(0))
    });
    assert_eq!(spoilt.await.unwrap(), 0);
}

#[tokio::test]
async fn sweeps_and_shared_transactions_are_measured() {
    let clock = Arc::new(Clock::system());
    let store = SqliteStore::open_with("sqlite::memory:", clock, Duration::from_millis(1)).unwrap();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    store.measure(&metrics);
    let queue = queue(&store);
    store.push((0..3).map(|_| push_of(&queue, "x")).collect()).await.unwrap();
    let (hold, go) = hold_up(&store);
    let call = async |kind| store.inner.writer.call(kind, write).await.unwrap();
    let release = async { go.send(()).unwrap() };
    let (two, three) = (call(Kind::Settle(2)), call(Kind::Settle(3)));
    let one = call(Kind::SettleAndPush { bytes: 1 });
    tokio::join!(hold, two, three, one, call(Kind::Reserve), release);
    let page = || metrics.encode().unwrap();
    for (call, sum) in [("push", 3), ("settle", 6)] {
        for (kind, figure) in [("sum", format!("{sum}.0")), ("count", "1".to_owned())] {
            let line = format!("sluicegate_store_batch_items_{kind}{{call=\"{call}\"}} {figure}\n");
            assert!(page().contains(&line), "{line}{}", page());
        }
    }
    while page().contains("sluicegate_sweep_duration_seconds_count 0\n") {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn the_length_of_the_log_is_measured() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    store.measure(&metrics);
    let queue = queue(&store);
    store.push(vec![push_of(&queue, &"x".repeat(40_000))]).await.unwrap();
    let length = || {
        let page = metrics.encode().unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("sluicegate_sqlite_log_bytes "));
        line.unwrap().parse::<u64>().unwrap()
    };
    while length() < 40_000 {
        tokio::time::sleep(Duration::from_millis(1)).await; // it is read after the answer
    }
}

/// After 128 of them, Tokio makes the task yield.
#[tokio::test]
async fn many_pushes_that_one_task_starts_are_stored_in_that_order() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    let (hold, go) = hold_up(&store);
    let mut calls: Vec<_> =
        (0..300).map(|_| Box::pin(store.push(vec![push_of(&queue, "x")]))).collect();
    for call in &mut calls {
        assert!(call.as_mut().now_or_never().is_none(), "the writer is busy");
    }
    go.send(()).unwrap();
    hold.await;
    let mut ids = Vec::new();
    for call in calls.into_iter().rev() {
        ids.push(call.await.unwrap()[0].id);
    }
    assert!(ids.is_sorted_by(|later, earlier| later > earlier));
}

/// The room that is set aside serves the very call that finds the disk full, not only the next one.
#[tokio::test]
async fn a_settle_that_finds_the_disk_full_is_repeated_in_the_room_set_aside() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let full = || {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
        rusqlite::Error::SqliteFailure(code, None)
    };
    for kind in [Kind::Settle(1), Kind::Reserve] {
        let (hold, go) = hold_up(&store);
        let mut runs = 0;
        let alone = store.inner.writer.call(kind.clone(), move |tx| {
            runs += 1;
            if runs == 1 {
                tx.conn.execute("INSERT INTO counters VALUES ('undone', 1)", [])?;
                return Err(full());
            }
            Ok(runs)
        });
        let beside = store.inner.writer.call(kind, |_| Ok(()));
        let release = async { go.send(()).unwrap() };
        let (_, runs, beside, ()) = tokio::join!(hold, alone, beside, release);
        assert_eq!(runs.unwrap(), 2);
        beside.unwrap();
    }
    let undone = store.inner.read(|view| {
        view.conn.query_row("SELECT count(*) FROM counters", [], |row| row.get::<_, i64>(0))
    });
    assert_eq!(undone.await.unwrap(), 0);
    // Without any room the call fails, after one repetition.
    let failing = store.inner.writer.call(Kind::Settle(1), move |_| Err::<(), _>(full()));
    assert!(matches!(failing.await, Err(StoreError::Unavailable { .. })));
}

/// Commits that are larger than a round come without a pause, and the log begins anew nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_begins_anew_while_the_writer_never_rests() {
    const MOST: i64 = 4_000;
    let (_folder, path) = file();
    let store = Arc::new(open(&path).unwrap());
    let queue = queue(&store);
    let mut pushers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (store, queue) = (Arc::clone(&store), Arc::clone(&queue));
        pushers.spawn(async move {
            loop {
                let items = (0..20).map(|_| push_of(&queue, &"x".repeat(2_000))).collect();
                store.push(items).await.unwrap();
            }
        });
    }
    let watcher = Connection::open(&path).unwrap();
    let (mut before, mut begun) = (0, 0);
    while begun < 5 {
        let pages = pages_in_log(&watcher);
        begun += u32::from(pages < before);
        assert!(pages < MOST, "the log does not begin anew");
        before = pages;
        tokio::task::yield_now().await;
    }
    pushers.shutdown().await;
}

/// Returns the number of pages in the log.
fn pages_in_log(conn: &Connection) -> i64 {
    conn.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get(1)).unwrap()
}

/// The log begins anew again and again, although the writer never rests. While somebody reads an old state, it cannot.
#[tokio::test]
async fn the_log_begins_anew_unless_somebody_reads() {
    const MOST: i64 = 4_000;
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let watcher = Connection::open(&path).unwrap();
    let push = async || {
        let items = (0..20).map(|_| push_of(&queue, "x")).collect();
        store.push(items).await.unwrap();
        pages_in_log(&watcher)
    };
    let begins_anew = async || {
        let mut before = 0;
        loop {
            let pages = push().await;
            if pages < before {
                return;
            }
            assert!(pages < MOST, "the log does not begin anew");
            before = pages;
        }
    };
    for _ in 0..5 {
        begins_anew().await;
    }
    let reader = Connection::open(&path).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    let count =
        || reader.query_row("SELECT count(*) FROM items", [], |row| row.get::<_, i64>(0)).unwrap();
    let read = count();
    while push().await < 400 {}
    assert_eq!(count(), read, "a reader sees one state");
    reader.execute_batch("COMMIT").unwrap();
    begins_anew().await;
    drop((reader, watcher));
    let pushed = i64::try_from(store.depth(&queue).await.unwrap().ready).unwrap();
    drop(store);
    let log = beside(&path, "-wal");
    assert!(!log.exists(), "whoever closes the file last writes the log into it");
    let found = Connection::open(&path).unwrap();
    let found: i64 = found.query_row("SELECT count(*) FROM items", [], |row| row.get(0)).unwrap();
    assert_eq!(found, pushed);
}
