//! Tests of large pages of items, beside which others are served.

use futures_util::future::join_all;

use super::*;

/// How many pages are asked for at a time.
const PAGES: usize = 8;
const LIMIT: Duration = Duration::from_mins(1);

/// Puts ten large items into a queue.
async fn fill(store: &SqliteStore) -> Arc<Queue> {
    let queue = queue(store);
    let large = "x".repeat(100_000);
    store.push((0..10).map(|_| push_of(&queue, &large)).collect()).await.unwrap();
    queue
}

#[tokio::test]
async fn a_page_of_large_items_is_short() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = fill(&store).await;
    let (mut sizes, mut cursor) = (Vec::new(), None);
    loop {
        let page = store.list_items(&queue, None, cursor.as_deref(), 100).await.unwrap();
        sizes.push(page.entries.len());
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(sizes, [3, 3, 3, 1]);
}

/// In memory the writer reads pages too, between other calls.
#[tokio::test]
async fn a_push_waits_for_one_page_at_most() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = fill(&store).await;
    let pages = (0..PAGES).map(|_| store.list_items(&queue, None, None, 10));
    let mut pages = Box::pin(join_all(pages));
    assert!(pages.as_mut().now_or_never().is_none(), "all are asked for");
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    assert!(pages.as_mut().now_or_never().is_none(), "the push did not wait for all of them");
    assert!(pages.await.iter().all(Result::is_ok));
}

/// In a file, pages are read beside the writer, by some of the connections that read.
#[tokio::test]
async fn pages_leave_connections_to_other_readers() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = fill(&store).await;
    let pages = (0..PAGES).map(|_| store.list_items(&queue, None, None, 10));
    let mut pages = Box::pin(join_all(pages));
    assert!(pages.as_mut().now_or_never().is_none(), "all are asked for");
    // Nobody goes on with the pages meanwhile.
    let depth = tokio::time::timeout(LIMIT, store.depth(&queue)).await;
    assert_eq!(depth.expect("an answer").unwrap().ready, 10);
    assert!(pages.await.iter().all(Result::is_ok));
}
