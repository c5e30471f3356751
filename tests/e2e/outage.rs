//! An unreachable store: a clear message at the start, UNAVAILABLE while running.

use std::time::Duration;

use sluicegate_proto::v1::{
    GetQueueStatsRequest, ItemState, ListItemsRequest, MoveRequest, NewItem, Outcome, PushRequest,
};
use tonic::{Code, Status};

use crate::harness::{
    Backend, Launch, MongoServer, TestStore, error_reason, new_item, payloads, retry_after, text,
    until, within,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_cannot_start_fails_with_the_reason() {
    let cases = [
        (
            "an unreachable MongoDB",
            "store",
            "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=500",
            "127.0.0.1:1",
        ),
        (
            "a folder that does not exist",
            "store",
            "sqlite:/nonexistent/folder/items.db",
            "/nonexistent",
        ),
        ("an unknown store", "store", "oracle://x", "store"),
        ("a bad value", "default-lease", "soon", "default_lease"),
        ("an unknown flag", "no-such-flag", "1", "no-such-flag"),
    ];
    for (what, flag, value, named) in cases {
        let ended = within(what, Launch::new().flag(flag, value).run_to_end()).await;
        assert!(!ended.status.success(), "{what}: {ended:?}");
        assert!(ended.status.code().is_some(), "{what}: ended by a signal: {ended:?}");
        assert!(ended.log.contains(named), "{what}: {named} is not named in:\n{}", ended.log);
        assert!(!ended.log.contains("panicked"), "{what}:\n{}", ended.log);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_in_an_address_is_never_printed() {
    let store = "mongodb://ann:opensesame@127.0.0.1:1/?serverSelectionTimeoutMS=500";
    let ended = Launch::new().flag("store", store).run_to_end().await;
    assert!(!ended.status.success());
    assert!(!ended.log.contains("opensesame"), "{}", ended.log);
}

/// Without a replica set, acknowledged writes can be lost, and nothing is atomic.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standalone_mongodb_is_refused_with_a_remedy() {
    let (_server, uri) = MongoServer::standalone().await;
    let ended = within("an end", Launch::new().flag("store", &uri).run_to_end()).await;
    assert!(!ended.status.success(), "{ended:?}");
    for named in ["standalone", "--replSet rs0", "rs.initiate()", "replicaSet=rs0"] {
        assert!(ended.log.contains(named), "{named} is not named in:\n{}", ended.log);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_serves_one_broker() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let taken = broker.address.trim_start_matches("http://");
    let ended = Backend::Sqlite.store().launch().flag("listen", taken).run_to_end().await;
    assert!(!ended.status.success());
    assert!(ended.log.contains(taken), "{}", ended.log);
}

fn unavailable(status: &Status) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(retry_after(status).is_some(), "{status:?}");
    error_reason(status);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_store_is_unavailable_and_loses_nothing() {
    let mut server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").start().await;
    let api = broker.api().await;
    api.push("work", &["before"]).await;
    let held = api.reserve_one("work", Duration::from_mins(10)).await;
    assert_eq!(text(&held), "before");
    server.kill();
    let refused = within("an answer during the outage", api.try_push("work", vec![new_item("x")]));
    unavailable(&refused.await.expect_err("no store"));
    let receipts = [held.receipt.as_str()];
    let refused = within("an answer during the outage", api.try_commit(&receipts));
    unavailable(&refused.await.expect_err("no store"));

    server.restart().await;
    until("a push after the outage", || async {
        api.try_push("work", vec![new_item("after")]).await.ok()
    })
    .await;
    // A receipt from before the outage still settles its item.
    let results = api.try_commit(&[&held.receipt]).await.expect("an answered commit");
    assert_eq!(results[0].outcome(), Outcome::Ok);
    let mut left = Vec::new();
    while let Some(delivery) = api.reserve_now("work", 1).await.first() {
        left.push(text(delivery));
    }
    assert!(left.contains(&"after".to_owned()) && !left.contains(&"before".to_owned()), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_store_delays_and_loses_nothing() {
    let server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").start().await;
    let api = broker.api().await;
    let mut stream = api.consume("work", 10).await;
    api.push("work", &["before"]).await;
    let held = stream.next().await;
    assert_eq!(text(&held), "before");

    server.freeze();
    // A call with a deadline ends at the deadline, although the broker still waits for the store.
    let named = || NewItem { dedup_id: "during".to_owned(), ..new_item("during") };
    let mut request = tonic::Request::new(PushRequest {
        queue: "work".to_owned(),
        items: vec![named()],
        producer: String::new(),
    });
    request.set_timeout(Duration::from_secs(1));
    let late = within("the deadline", api.queue.clone().push(request)).await.expect_err("no store");
    assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late:?}");
    // A call without a deadline is refused when the broker has waited long enough, and so is a
    // settle.
    let receipts = [held.receipt.as_str()];
    let (push, commit) = tokio::join!(
        within("an answer to the push", api.try_push("work", vec![named()])),
        within("an answer to the commit", api.try_commit(&receipts)),
    );
    unavailable(&push.expect_err("no store"));
    unavailable(&commit.expect_err("no store"));
    server.thaw();

    // Whatever happened to the calls: when they are repeated, each has taken effect once, and the
    // consumer continues.
    until("a push after the thaw", || async { api.try_push("work", vec![named()]).await.ok() })
        .await;
    let settled = api.commit(&receipts).await;
    assert!(matches!(settled[..], [Outcome::Ok | Outcome::Gone]), "{settled:?}");
    api.push("work", &["after"]).await;
    assert_eq!(payloads(&stream.take(2).await), ["during", "after"]);
    let left = api.list("work", ItemState::Unspecified).await;
    assert_eq!(left.len(), 2, "no items but these: {left:?}");
}

/// Calls that wait for a frozen store, which keeps its connections open, end with an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_ends_while_the_store_is_frozen() {
    let server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").start().await;
    let api = broker.api().await;
    let pushed = api.push("work", &["a", "b"]).await;
    let held = api.reserve_one("work", Duration::from_mins(10)).await;
    server.freeze();
    let (queue, admin) = (&api.queue, &api.admin);
    let id = pushed[1].id.clone();
    let name = || "work".to_owned();
    let (item, list, stats, moved) = tokio::join!(
        within("GetItem", api.item("work", &id)),
        within("ListItems", async {
            let request = ListItemsRequest { queue: name(), ..Default::default() };
            admin.clone().list_items(request).await
        }),
        within("QueueStats", async {
            let request = GetQueueStatsRequest { queue: name() };
            admin.clone().get_queue_stats(request).await
        }),
        within("Move", async {
            let request = MoveRequest {
                receipt: held.receipt.clone(),
                to_queue: name(),
                ..Default::default()
            };
            queue.clone().r#move(request).await
        }),
    );
    unavailable(&item.expect_err("no store"));
    unavailable(&list.expect_err("no store"));
    unavailable(&stats.expect_err("no store"));
    unavailable(&moved.expect_err("no store"));
    server.thaw();
    until("the store is reachable again", || async { api.item("work", &id).await.ok() }).await;
}
