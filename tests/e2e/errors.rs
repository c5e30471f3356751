//! Bad requests: the code, the field, the stable reason.

use std::time::Duration;

use prost::Message;
use sluicegate_proto::v1::{
    CommitRequest, ConsumeRequest, CreateQueueRequest, ExtendRequest, GetQueueRequest,
    ListItemsRequest, NewItem, PopRequest, PushRequest, Queue, ReserveRequest, RollbackItem,
    RollbackRequest, new_item::Eligibility,
};
use tokio::net::TcpStream;
use tonic::{Code, Status, codegen::http};

use crate::harness::{Api, Backend, bad_fields, duration, error_reason, new_item, within};

fn push(items: Vec<NewItem>) -> PushRequest {
    PushRequest { queue: "work".to_owned(), items, producer: String::new() }
}

fn negative() -> prost_types::Duration {
    prost_types::Duration { seconds: -1, nanos: 0 }
}

async fn refused_push(api: &Api, request: PushRequest) -> Status {
    api.queue.clone().push(request).await.expect_err("a bad push")
}

#[track_caller]
fn names(status: &Status, field: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let fields = bad_fields(status);
    assert!(fields.iter().any(|named| named == field), "{field} is not among {fields:?}");
    let reason = error_reason(status);
    let well_formed = reason.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    assert!(well_formed && !reason.is_empty(), "{reason}");
    assert!(!status.message().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_push_names_its_field_and_stores_nothing() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let good = || new_item("good");
    for queue in ["", "-dash", "sp ace", "ümlaut", &"x".repeat(129), "a/b", "$cmd"] {
        let request = PushRequest { queue: queue.to_owned(), ..push(vec![good()]) };
        names(&refused_push(&api, request).await, "queue");
    }
    names(&refused_push(&api, push(Vec::new())).await, "items");
    names(&refused_push(&api, push(vec![good(); 1001])).await, "items");
    let request = PushRequest { producer: "not a name".to_owned(), ..push(vec![good()]) };
    names(&refused_push(&api, request).await, "producer");

    let delay = Some(Eligibility::Delay(negative()));
    let headers = || [(String::new(), "value".to_owned())].into();
    let cases = [
        ("items[1].priority", NewItem { priority: 10, ..good() }),
        ("items[1].priority", NewItem { priority: -1, ..good() }),
        ("items[1].delay", NewItem { eligibility: delay, ..good() }),
        ("items[1].ttl", NewItem { ttl: Some(negative()), ..good() }),
        ("items[1].ttl", NewItem { ttl: Some(prost_types::Duration::default()), ..good() }),
        ("items[1].content_type", NewItem { content_type: "x".repeat(256), ..good() }),
        ("items[1].headers", NewItem { headers: headers(), ..good() }),
        ("items[1].ordering_key", NewItem { ordering_key: "x".repeat(256), ..good() }),
        ("items[1].dedup_id", NewItem { dedup_id: "x".repeat(256), ..good() }),
    ];
    for (field, bad) in cases {
        names(&refused_push(&api, push(vec![good(), bad])).await, field);
    }
    assert!(api.reserve_now("work", 10).await.is_empty(), "one bad item refuses the whole call");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_request_names_its_field() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let queue = || "work".to_owned();

    for receipt in ["", "nonsense", "€", &"x".repeat(5000)] {
        let receipts = vec![receipt.to_owned()];
        let refused = api.queue.clone().commit(CommitRequest { receipts: receipts.clone() }).await;
        names(&refused.expect_err("a bad receipt"), "receipts[0]");
        let refused = api.queue.clone().extend(ExtendRequest { receipts, lease: None }).await;
        names(&refused.expect_err("a bad receipt"), "receipts[0]");
        let item = RollbackItem { receipt: receipt.to_owned(), ..RollbackItem::default() };
        let refused = api.queue.clone().rollback(RollbackRequest { items: vec![item] }).await;
        names(&refused.expect_err("a bad receipt"), "items[0].receipt");
    }
    let refused = api.queue.clone().commit(CommitRequest::default()).await;
    names(&refused.expect_err("no receipts"), "receipts");

    let requests = [
        ("max_items", ReserveRequest { queue: queue(), max_items: 1001, ..Default::default() }),
        ("max_items", ReserveRequest { queue: queue(), max_items: -1, ..Default::default() }),
        ("wait", ReserveRequest { queue: queue(), wait: Some(negative()), ..Default::default() }),
        ("lease", ReserveRequest { queue: queue(), lease: Some(negative()), ..Default::default() }),
        ("consumer", ReserveRequest { queue: queue(), consumer: "?".into(), ..Default::default() }),
        ("queue", ReserveRequest { queue: "?".to_owned(), ..Default::default() }),
    ];
    for (field, request) in requests {
        names(&api.queue.clone().reserve(request).await.expect_err("a bad reserve"), field);
    }
    let request = PopRequest { queue: queue(), max_items: 1001, wait: None };
    names(&api.queue.clone().pop(request).await.expect_err("a bad pop"), "max_items");
    let request = ConsumeRequest { queue: queue(), max_in_flight: 10_001, ..Default::default() };
    names(&api.queue.clone().consume(request).await.expect_err("a bad consume"), "max_in_flight");

    let made = |queue| CreateQueueRequest { queue: Some(queue) };
    let bad = [
        ("queue.name", Queue { name: "?".to_owned(), ..Default::default() }),
        ("queue.group", Queue { name: queue(), group: "?".to_owned(), ..Default::default() }),
        ("queue.lease", Queue { name: queue(), lease: Some(negative()), ..Default::default() }),
        (
            "queue.max_attempts",
            Queue { name: queue(), max_attempts: Some(-1), ..Default::default() },
        ),
    ];
    for (field, bad) in bad {
        names(&api.admin.clone().create_queue(made(bad)).await.expect_err("a bad queue"), field);
    }
    api.push("work", &["x"]).await;
    let request = ListItemsRequest { queue: queue(), page_size: -1, ..Default::default() };
    names(&api.admin.clone().list_items(request).await.expect_err("a bad page"), "page_size");
    let request = ListItemsRequest {
        queue: queue(),
        page_token: "nonsense".to_owned(),
        ..Default::default()
    };
    names(&api.admin.clone().list_items(request).await.expect_err("a bad token"), "page_token");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_queues_and_items_are_not_found() {
    let store = Backend::Sqlite.store();
    let broker = store.launch().flag("auto-create-queues", "false").start().await;
    let api = broker.api().await;
    let missing = api.try_push("work", vec![new_item("x")]).await.expect_err("no such queue");
    assert_eq!(missing.code(), Code::NotFound);
    error_reason(&missing);
    let request = ConsumeRequest { queue: "work".to_owned(), ..Default::default() };
    let waiting = api.queue.clone().consume(request).await.expect("a stream that waits");
    let request = GetQueueRequest { name: "work".to_owned() };
    let missing = api.admin.clone().get_queue(request).await.expect_err("no such queue");
    assert_eq!(missing.code(), Code::NotFound);
    api.create(Queue { name: "work".to_owned(), ..Default::default() }).await;
    api.push("work", &["x"]).await;
    let delivered = within("the item", waiting.into_inner().message()).await;
    assert_eq!(delivered.expect("an open stream").expect("a message").deliveries.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_large_payloads_are_refused_and_smaller_ones_accepted() {
    let store = Backend::Sqlite.store();
    let broker = store.launch().flag("max-payload-bytes", "64KiB").start().await;
    let api = broker.api().await;
    let at_limit = "x".repeat(64 * 1024);
    api.push("large", &[&at_limit]).await;
    let over = NewItem { payload: vec![0; 64 * 1024 + 1].into(), ..NewItem::default() };
    let refused = api.try_push("large", vec![over]).await.expect_err("too large");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    error_reason(&refused);
    let delivery = api.reserve_one("large", Duration::from_mins(1)).await;
    assert_eq!(crate::harness::text(&delivery), at_limit);
}

/// Calls without a client library, because each library also enforces deadlines itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_broker_itself_says_that_a_deadline_has_passed() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let address = broker.address.trim_start_matches("http://");
    let connection = TcpStream::connect(address).await.expect("a connection");
    let (mut client, connection) = h2::client::handshake(connection).await.expect("HTTP/2");
    tokio::spawn(connection);
    let request =
        http::Request::post(format!("http://{address}/sluicegate.v1.QueueService/Reserve"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", "300m")
            .body(())
            .expect("a request");
    let wait = duration(Duration::from_mins(5));
    let message = ReserveRequest { queue: "work".to_owned(), wait, ..Default::default() };
    let message = message.encode_to_vec();
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).expect("a short message").to_be_bytes());
    body.extend(message);
    let (answer, mut sending) = client.send_request(request, false).expect("a call");
    sending.send_data(body.into(), true).expect("its message");
    let answer = within("an answer", answer).await.expect("an answer");
    let status = Status::from_header_map(answer.headers()).expect("a status");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(error_reason(&status), "TRANSPORT");
    assert!(status.message().contains("outcome is unknown"), "{status:?}");
}
