//! Tests of damage to the file: damaged items are never served as good, and the rest is served.

use std::fs;

use super::*;
use crate::domain::OrderingKey;
use crate::store::sqlite::check;

/// Returns all payloads that a store hands out, and how many items it found damaged.
async fn drain(store: &SqliteStore, queue: &Arc<Queue>) -> Result<(BTreeSet<String>, u64)> {
    let (mut payloads, mut damaged) = (BTreeSet::new(), 0);
    loop {
        let reserved =
            store.reserver(&queue.name).reserve(queue, &[want()], Appeared::Nothing).await?;
        damaged += reserved.damaged;
        for (_, delivery) in &reserved.deliveries {
            payloads.insert(String::from_utf8_lossy(&delivery.item.payload).into_owned());
        }
        if !reserved.more {
            return Ok((payloads, damaged));
        }
    }
}

async fn change(store: &SqliteStore, sql: &'static str) {
    assert_eq!(store.inner.write_items(move |tx| tx.conn.execute(sql, [])).await.unwrap(), 1);
}

/// The store opens the file with one of many bytes flipped, each in turn.
#[tokio::test]
async fn no_flipped_byte_is_served_as_good() {
    let (folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let payload = |n: usize| format!("{n}-").repeat(1_500);
    for n in 10..40 {
        store.push(vec![push_of(&queue, &payload(n))]).await.unwrap();
    }
    let good: BTreeSet<String> = (10..40).map(payload).collect();
    assert_eq!(drain(&store, &queue).await.unwrap(), (good.clone(), 0));
    store
        .inner
        .write_items(|tx| tx.conn.execute(r#"UPDATE items SET lock = NULL, "when" = created"#, []))
        .await
        .unwrap();
    drop(store);
    assert!(checked(&path).is_whole());

    let bytes = fs::read(&path).unwrap();
    let other = folder.path().join("other.db");
    let mut noticed = 0;
    for part in 0..60 {
        let mut flipped = bytes.clone();
        // The bytes are mostly in payloads, which are most of the file.
        flipped[bytes.len() * part / 60 + 1_234] ^= 1;
        fs::write(&other, flipped).unwrap();
        fs::copy(mark::path_of(&path), mark::path_of(&other)).unwrap();
        noticed += usize::from(check::check(&other, |_| {}).is_ok_and(|report| !report.is_whole()));
        let Ok(store) = open(&other) else { continue };
        if let Ok((served, damaged)) = drain(&store, &queue).await {
            assert!(served.is_subset(&good), "byte {part} of 60");
            // An item whose index entry is damaged is hidden. SQLite's own check finds that.
            assert!(served.len() >= 29 && damaged <= 1, "byte {part} of 60");
        }
    }
    // The other bytes are in unused parts of pages.
    assert!(noticed > 20, "{noticed} of 60");
}

#[tokio::test]
async fn a_damaged_item_is_set_aside_and_the_rest_of_its_queue_and_key_is_served() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let mut pushes: Vec<Push> = ["a", "b", "c"].map(|payload| push_of(&queue, payload)).into();
    for push in &mut pushes {
        push.item.ordering_key = OrderingKey::new("k");
    }
    let ids = store.push(pushes).await.unwrap();
    change(&store, "UPDATE items SET payload = x'00' WHERE id = 1").await;
    assert!(matches!(store.get_item(&queue, ids[0].id).await, Err(StoreError::Damaged { .. })));
    let listed = store.list_items(&queue, None, None, 10).await.unwrap();
    assert_eq!((listed.entries.len(), listed.next), (2, None));

    let (served, damaged) = drain(&store, &queue).await.unwrap();
    assert_eq!((served, damaged), (BTreeSet::from(["b".to_owned()]), 1));
    let kept = store.inner.read(|view| {
        let sql = "SELECT id, queue, payload FROM damaged";
        view.conn.query_row(sql, [], |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?, row.get::<_, Vec<u8>>(2)?))
        })
    });
    assert_eq!(kept.await.unwrap(), (1, "q".to_owned(), vec![0]));
    // The broker's own file can be checked while it runs.
    let report = checked(&path);
    assert_eq!(report.faults.len(), 1, "{report}");
    assert!(report.faults[0].contains("was set aside"), "{report}");
    assert_eq!(report.items, 2);
}

/// A row that could not even be read as an item once stopped its queue for good.
#[tokio::test]
async fn an_item_that_cannot_be_read_does_not_stop_its_queue() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    store.push(["a", "b"].map(|payload| push_of(&queue, payload)).into()).await.unwrap();
    change(&store, "UPDATE items SET headers = 'no JSON', sum = NULL WHERE id = 1").await;
    let (served, damaged) = drain(&store, &queue).await.unwrap();
    assert_eq!((served, damaged), (BTreeSet::from(["b".to_owned()]), 1));
}

/// An item that can neither be read nor removed stays, and the others of its queue are served.
#[tokio::test]
async fn an_item_in_a_damaged_part_of_the_file_does_not_stop_its_queue() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let payload = |n: u8| char::from(b'a' + n).to_string().repeat(20_000);
    store.push((0..5).map(|n| push_of(&queue, &payload(n))).collect()).await.unwrap();
    drop(store);
    // The first page that continues the third payload. Its first four bytes name the next such page.
    let mut bytes = fs::read(&path).unwrap();
    let page = (0..bytes.len() / 4_096)
        .find(|page| bytes[page * 4_096 + 4..][..4_092].iter().all(|byte| *byte == b'c'))
        .unwrap();
    bytes[page * 4_096..][..4].copy_from_slice(&[0x7f; 4]);
    fs::write(&path, bytes).unwrap();

    let store = open(&path).unwrap();
    // The call that meets the damage fails and logs it, and the next call goes on.
    assert!(matches!(drain(&store, &queue).await, Err(StoreError::Damaged { .. })));
    let (served, _) = drain(&store, &queue).await.unwrap();
    assert_eq!(served, [0, 1, 3, 4].map(payload).into());
    assert!(!checked(&path).is_whole());
    // Later calls pass the item over without another failure.
    store.push(vec![push_of(&queue, "later")]).await.unwrap();
    assert_eq!(drain(&store, &queue).await.unwrap(), (BTreeSet::from(["later".to_owned()]), 0));
}

/// A page of a list with damaged items on it is not taken for the last one.
#[tokio::test]
async fn a_list_continues_behind_damaged_items() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    store.push(["a", "b", "c", "d"].map(|payload| push_of(&queue, payload)).into()).await.unwrap();
    change(&store, "UPDATE items SET payload = x'00' WHERE id = 2").await;
    let page = store.list_items(&queue, None, None, 2).await.unwrap();
    let payloads: Vec<_> = page.entries.iter().map(|item| item.payload.clone()).collect();
    assert_eq!(payloads, ["a", "c"]);
    let page = store.list_items(&queue, None, page.next.as_deref(), 2).await.unwrap();
    assert_eq!((page.entries[0].payload.as_ref(), page.entries.len()), (b"d".as_ref(), 1));
}

/// A move that replaces the headers computes a new checksum, and must not make a damaged item look good.
#[tokio::test]
async fn a_move_keeps_an_item_as_good_or_damaged_as_it_is() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    store.push(["a", "b"].map(|payload| push_of(&queue, payload)).into()).await.unwrap();
    let reserved =
        store.reserver(&queue.name).reserve(&queue, &[want()], Appeared::Nothing).await.unwrap();
    change(&store, "UPDATE items SET payload = x'00' WHERE id = 1").await;
    let moves = reserved.deliveries.into_iter().map(|(_, delivery)| Move {
        held: Reservation { queue: queue.clone(), receipt: delivery.receipt },
        to: queue.clone(),
        payload: None,
        content_type: None,
        headers: [("step".to_owned(), "2".to_owned())].into(),
        priority: None,
        eligible_time: store.now(),
    });
    assert_eq!(store.move_items(moves.collect()).await.unwrap(), [Outcome::Ok; 2]);
    let (served, damaged) = drain(&store, &queue).await.unwrap();
    assert_eq!((served, damaged), (BTreeSet::from(["b".to_owned()]), 1));
}

#[tokio::test]
async fn items_of_earlier_versions_are_served_without_a_checksum() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "a")]).await.unwrap();
    drop(store);
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("UPDATE items SET sum = NULL").unwrap(); // as a migration leaves it
    drop(conn);
    let store = open(&path).unwrap();
    assert_eq!(checked(&path).without_checksum, 1);
    assert!(checked(&path).is_whole());
    assert_eq!(drain(&store, &queue).await.unwrap().0.len(), 1);
}

#[tokio::test]
async fn a_check_finds_lost_commits_and_counters_that_are_behind_and_changes_nothing() {
    let (folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    for _ in 0..3 {
        store.push(vec![push_of(&queue, "a")]).await.unwrap();
    }
    let other = folder.path().join("other.db");
    for ending in ["", "-wal", "-mark"] {
        fs::copy(beside(&path, ending), beside(&other, ending)).unwrap();
    }
    let log = beside(&other, "-wal");
    let length = fs::metadata(&log).unwrap().len();
    fs::File::options().write(true).open(&log).unwrap().set_len(length - 1).unwrap();
    let report = checked(&other);
    assert!(report.faults[0].contains("the last 1 of"), "{report}");
    assert_eq!(fs::metadata(&log).unwrap().len(), length - 1);

    drop(store);
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE meta SET value = 2 WHERE key = 'next_id'", []).unwrap();
    drop(conn);
    let report = checked(&path);
    assert!(report.faults.iter().any(|fault| fault.contains("number 2")), "{report}");
    assert!(check::check(&folder.path().join("missing.db"), |_| {}).is_err());
}
