//! Somebody else writes to the channel of the signals.

use std::time::Duration;

use sluicegate_proto::v1::{ListQueuesRequest, Outcome};

use crate::harness::{Backend, RedisServer, TestStore, text, until, within};

/// Messages that are garbage, too large, forged, or of times beyond all bounds wake consumers for nothing and have no
/// other effect: nothing is created, delivered, settled or lost, and no memory is taken for good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_and_oversized_signals_have_no_effect() {
    let redis = RedisServer::start().await;
    let store = Backend::Mongo.store();
    let TestStore::Mongo { database, .. } = &store else { panic!("a database") };
    let channel = format!("sluicegate:{database}");
    let broker = store.launch().signals(&redis.url()).without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["held"]).await;
    let held = api.reserve_one("work", Duration::from_mins(10)).await;
    let mut waiting = api.consume("work", 10).await;
    let client = redis::Client::open(redis.url()).expect("an address");
    let mut forger = client.get_multiplexed_async_connection().await.expect("a server");
    let before = broker.memory();
    let mut messages: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"\x00\xff\xfe garbage".to_vec(),
        b"insert".to_vec(),
        b"insert work 9223372036854775807 deadbeef".to_vec(),
        b"insert work -9223372036854775808 deadbeef".to_vec(),
        b"insert work 95617497600000 deadbeef".to_vec(),
        b"insert work -95617497600000 deadbeef".to_vec(),
        b"insert not/a/queue - deadbeef".to_vec(),
        b"delete work - deadbeef".to_vec(),
        format!("insert work 1700000000000 deadbeef {}", held.item.as_ref().expect("an item").id)
            .into_bytes(),
        b"insert work 1700000000000 deadbeef 7477656c7665206279746573".to_vec(),
        vec![b'x'; 8 << 20],
        [b"insert ".to_vec(), vec![b'q'; 8 << 20], b" - deadbeef".to_vec()].concat(),
    ];
    for topic in ["insert", "settings", "settle", "wanted", "missed"] {
        for _ in 0..50 {
            messages.push(format!("{topic} work - deadbeef").into_bytes());
        }
        for queue in 0..2_000 {
            messages.push(format!("{topic} ghost-{queue} - {queue:08x}").into_bytes());
        }
    }
    for message in messages {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(&channel).arg(message);
        let receivers: i64 = publish.query_async(&mut forger).await.expect("a sent message");
        assert_eq!(receivers, 1, "the broker listens");
    }
    // The broker has read all of it when a delivery that only a signal of its own can cause comes, from another broker.
    let other = store.launch().signals(&redis.url()).without_poll().start().await;
    let other_api = other.api().await;
    other_api.push("work", &["real"]).await;
    let delivery = within("the pushed item", waiting.next()).await;
    assert_eq!(text(&delivery), "real", "the held item was not delivered twice");
    let listed = api.admin.clone().list_queues(ListQueuesRequest::default()).await;
    let queues = listed.expect("the queues").into_inner().queues;
    assert_eq!(queues.len(), 1, "nothing was created: {queues:?}");
    assert_eq!(api.commit(&[&held.receipt]).await, [Outcome::Ok]);
    until("memory is given back", || async {
        (broker.memory() <= before + before / 10 + (48 << 20)).then_some(())
    })
    .await;
    other.stop().await;
    broker.stop().await;
}
