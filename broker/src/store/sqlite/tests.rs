//! What only this store promises.

use super::*;
use crate::domain::NewItem;

#[tokio::test]
async fn an_item_goes_through() {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("sqlite:{}", folder.path().join("a.db").display());
    let clock = Arc::new(Clock::system());
    for uri in [uri.as_str(), "sqlite::memory:"] {
        let store = SqliteStore::open(uri, clock.clone()).unwrap();
        let name = QueueName::parse("queue", "q").unwrap();
        let queue = Arc::new(Queue::with_defaults(name, store.now()));
        store.create_queue(&queue).await.unwrap();
        assert_eq!(store.list_queues(None, 9).await.unwrap().len(), 1);
        let item = NewItem { payload: "hello".into(), ..NewItem::default() };
        let push = Push { queue: queue.clone(), item, producer: None, dedup_window: None };
        store.push(vec![push.clone(), push]).await.unwrap();
        let want = Want {
            max_items: 1,
            max_bytes: 100,
            may_exceed: true,
            lease: Duration::from_secs(10),
            consumer: None,
        };
        let reserved = store.reserve(&queue, &[want]).await.unwrap();
        assert!(reserved.more);
        let (_, delivery) = &reserved.deliveries[0];
        assert_eq!(delivery.item.payload, "hello");
        let depth = store.depth(&queue).await.unwrap();
        assert_eq!((depth.ready, depth.reserved), (1, 1));
        let held = Held { queue: queue.clone(), receipt: delivery.receipt.clone() };
        assert_eq!(store.holds(vec![held.clone()]).await.unwrap(), [true]);
        assert_eq!(store.commit(vec![held.clone()]).await.unwrap(), [Outcome::Ok]);
        assert_eq!(store.commit(vec![held]).await.unwrap(), [Outcome::Gone]);
        let page = store.list_items(&queue, None, None, 10).await.unwrap();
        assert_eq!(page.entries.len(), 1);
        assert_eq!(store.purge(&queue).await.unwrap(), 1);
        assert_eq!(store.delete_queue(&queue).await.unwrap(), 0);
        store.ping().await.unwrap();
    }
}
