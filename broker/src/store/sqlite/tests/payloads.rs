//! Large payloads, which have a table of their own.

use super::*;
use crate::{
    domain::Delivery,
    store::conformance::env::{held, move_of, payload as payload_of},
};

/// Payloads of one byte repeated, around the length from which on they are stored apart.
fn payload(byte: char, bytes: usize) -> String {
    byte.to_string().repeat(bytes)
}

const SMALL: usize = (8 << 10) - 1;
const LARGE: usize = 8 << 10;
const LARGER: usize = 64 << 10;

async fn reserve(store: &SqliteStore, queue: &Arc<Queue>) -> Vec<Delivery> {
    let mut reserver = store.reserver(&queue.name);
    let reserved = reserver.reserve(queue, &[want()], Appeared::Nothing).await.unwrap();
    reserved.deliveries.into_iter().map(|(_, delivery)| delivery).collect()
}

/// Returns the number of items, and of payloads that are stored apart.
async fn counts(store: &SqliteStore) -> (i64, i64) {
    let counted = store.inner.read(|view| {
        let sql = "SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM payloads)";
        view.conn.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))
    });
    counted.await.unwrap()
}

#[tokio::test]
async fn a_large_payload_goes_with_its_item() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let payloads = [String::new(), payload('s', SMALL), payload('l', LARGE), payload('m', LARGER)];
    store.push(payloads.iter().map(|payload| push_of(&queue, payload)).collect()).await.unwrap();
    assert_eq!(counts(&store).await, (4, 2));
    let listed = store.list_items(&queue, None, None, 10).await.unwrap().entries;
    assert_eq!(listed.iter().map(payload_of).collect::<Vec<_>>(), payloads);
    let taken = reserve(&store, &queue).await;
    assert_eq!(taken.iter().map(|one| payload_of(&one.item)).collect::<Vec<_>>(), payloads);
    let [empty, small, large, larger] = &taken[..] else { panic!("{}", taken.len()) };
    assert_eq!(store.commit(vec![held(&queue, larger)]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(counts(&store).await, (3, 1));
    // A receipt that is stale deletes nothing of another item.
    assert_eq!(store.commit(vec![held(&queue, larger)]).await.unwrap(), [Outcome::Gone]);
    assert_eq!(counts(&store).await, (3, 1));
    assert!(checked(&path).is_whole());
    let rest = [empty, small, large].map(|one| held(&queue, one)).into();
    assert_eq!(store.commit(rest).await.unwrap(), [Outcome::Ok; 3]);
    assert_eq!(counts(&store).await, (0, 0));
}

#[tokio::test]
async fn deletions_of_every_kind_take_large_payloads_along() {
    let (clock, uri) = (Arc::new(Clock::system()), "sqlite::memory:");
    let store = SqliteStore::open_with(uri, clock.clone(), NO_SWEEP).unwrap();
    let queue = queue(&store);
    let push = async |ttl| {
        let mut push = push_of(&queue, &payload('x', LARGER));
        push.item.ttl = ttl;
        store.push(vec![push]).await.unwrap()[0].id
    };
    let id = push(None).await;
    assert_eq!(counts(&store).await, (1, 1));
    assert_eq!(store.delete_item(&queue, id, None).await.unwrap(), ItemDeleted::Done);
    assert_eq!(counts(&store).await, (0, 0), "deleted by an operator");
    push(None).await;
    assert_eq!(store.purge(&queue).await.unwrap(), 1);
    assert_eq!(counts(&store).await, (0, 0), "purged");
    push(Some(Duration::from_secs(1))).await;
    clock.advance(Duration::from_secs(2));
    assert!(!store.inner.write_items(sweep::chunk).await.unwrap());
    assert_eq!(counts(&store).await, (0, 0), "expired");
}

/// A move replaces a payload in place, whether one of the two is large or not.
#[tokio::test]
async fn a_payload_that_is_replaced_is_stored_where_it_belongs() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    for (before, after, apart) in
        [(LARGER, 3, 0), (3, LARGER, 1), (LARGER, LARGE, 1), (LARGER, 0, 0), (3, SMALL, 0)]
    {
        store.push(vec![push_of(&queue, &payload('b', before))]).await.unwrap();
        let taken = reserve(&store, &queue).await;
        let new = payload('a', after);
        let change =
            Move { payload: Some(new.clone().into()), ..move_of(&queue, &taken[0], &queue) };
        assert_eq!(store.move_items(vec![change]).await.unwrap(), [Outcome::Ok]);
        assert_eq!(counts(&store).await, (1, apart), "{before} to {after}");
        assert!(checked(&path).is_whole(), "{before} to {after}");
        let taken = reserve(&store, &queue).await;
        assert_eq!(taken[0].item.payload, new.as_bytes());
        assert_eq!(store.commit(vec![held(&queue, &taken[0])]).await.unwrap(), [Outcome::Ok]);
        assert_eq!(counts(&store).await, (0, 0));
    }
}

/// An item whose large payload is lost or changed is set aside like any other that is damaged.
#[tokio::test]
async fn a_large_payload_that_is_lost_or_changed_is_noticed() {
    for damage in ["DELETE FROM payloads", "UPDATE payloads SET payload = x'00'"] {
        let (_folder, path) = file();
        let store = open(&path).unwrap();
        let queue = queue(&store);
        let items = [payload('a', LARGER), "b".to_owned()];
        store.push(items.iter().map(|item| push_of(&queue, item)).collect()).await.unwrap();
        store.inner.write(move |tx| tx.conn.execute(damage, [])).await.unwrap();
        assert!(!checked(&path).is_whole(), "{damage}");
        let taken = reserve(&store, &queue).await;
        assert_eq!(taken.len(), 1);
        assert_eq!(taken[0].item.payload, "b".as_bytes());
        assert_eq!(counts(&store).await, (1, 0), "{damage}");
    }
}

#[tokio::test]
async fn a_payload_without_an_item_is_a_fault_of_the_file() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let stray = "INSERT INTO payloads VALUES (7, x'00')";
    store.inner.write(move |tx| tx.conn.execute(stray, [])).await.unwrap();
    assert_eq!(checked(&path).faults, ["1 payloads belong to no item"]);
}

/// A reserve and a rollback of a large item write a few pages, and not its payload.
#[tokio::test]
async fn what_happens_to_a_large_item_does_not_write_its_payload_anew() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let log = beside(&path, "-wal");
    let written = || std::fs::metadata(&log).unwrap().len();
    store.push(vec![push_of(&queue, &payload('x', 1 << 20))]).await.unwrap();
    let before = written();
    assert!(before > 1 << 20, "the push has written it: {before}");
    let taken = reserve(&store, &queue).await;
    assert_eq!(taken.len(), 1);
    let after = written() - before;
    assert!(after > 0 && after < 64 << 10, "{after} bytes");
}
