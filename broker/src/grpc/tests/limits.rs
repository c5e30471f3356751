//! Message sizes, in both directions.

use std::sync::Weak;

use axum::extract::Request;
use futures_util::StreamExt;
use prost::Message;
use tonic::codec::CompressionEncoding;

use super::*;
use crate::{
    access::Peer,
    grpc::{
        intake::{Intake, batches},
        push_stream,
    },
};

/// The largest message that gRPC libraries accept by default.
const DEFAULT_LIMIT: usize = 4 << 20;

/// Returns items that consist mostly of headers: their payloads alone would fit in one message many
/// times.
fn with_large_headers(count: usize) -> Vec<pb::NewItem> {
    let headers = |_| (0..64).map(|n| (format!("{n:02}"), "h".repeat(250))).collect();
    (0..count).map(|n| pb::NewItem { headers: headers(n), ..Default::default() }).collect()
}

async fn push(broker: &Broker, queue: &str, items: &[pb::NewItem]) {
    for items in items.chunks(100) {
        let items = items.to_vec();
        let request = pb::PushRequest { queue: queue.into(), items, ..Default::default() };
        broker.queues().push(request).await.unwrap();
    }
}

/// No answer with several items, including their headers, is larger than every client accepts.
/// Items that do not fit are not reserved and stay in the queue.
#[tokio::test]
async fn answers_with_items_fit_the_default_limit_of_clients() {
    let broker = Broker::start().await;
    // tonic's own default: 4 MiB.
    let mut queues = QueueServiceClient::new(broker.channel.clone());
    let mut admin = AdminServiceClient::new(broker.channel.clone());
    push(&broker, "q", &with_large_headers(600)).await;

    let request =
        pb::ListItemsRequest { queue: "q".into(), page_size: 1_000, ..Default::default() };
    let page = admin.list_items(request).await.unwrap().into_inner();
    assert!(page.encoded_len() <= DEFAULT_LIMIT && page.encoded_len() > DEFAULT_LIMIT / 2);
    assert!(!page.next_page_token.is_empty());

    let request =
        || pb::ReserveRequest { queue: "q".into(), max_items: 1_000, ..Default::default() };
    let reserved = queues.reserve(request()).await.unwrap().into_inner();
    assert!(reserved.encoded_len() <= DEFAULT_LIMIT && reserved.encoded_len() > DEFAULT_LIMIT / 2);
    let first = reserved.deliveries.len();
    assert_eq!(
        broker.stats("q").await.reserved as usize,
        first,
        "no more items are reserved than sent"
    );

    let request = || pb::PopRequest { queue: "q".into(), max_items: 1_000, ..Default::default() };
    let popped = queues.pop(request()).await.unwrap().into_inner();
    assert!(popped.encoded_len() <= DEFAULT_LIMIT && popped.encoded_len() > DEFAULT_LIMIT / 2);
    let mut seen = first + popped.items.len();
    loop {
        let items = queues.pop(request()).await.unwrap().into_inner().items;
        if items.is_empty() {
            break;
        }
        assert!(items.iter().all(|item| item.deliveries == 1 && item.attempt == 1));
        seen += items.len();
    }
    assert_eq!(seen, 600, "nothing was lost");
}

/// The largest item that the broker accepts by default reaches a client with default limits.
#[tokio::test]
async fn the_largest_payload_reaches_every_client() {
    let broker = Broker::start().await;
    let largest = vec![7; Limits::default().max_payload_bytes];
    broker.push("q", vec![largest.clone(), largest]).await;
    let mut queues = QueueServiceClient::new(broker.channel.clone());
    for _ in 0..2 {
        let request = pb::PopRequest { queue: "q".into(), max_items: 2, ..Default::default() };
        assert_eq!(queues.pop(request).await.unwrap().into_inner().items.len(), 1);
    }
}

/// Lists of items and of queues with labels are cut by their size as well.
#[tokio::test]
async fn lists_of_queues_and_schedules_fit_the_default_limit_of_clients() {
    let broker = Broker::start().await;
    let mut schedules = ScheduleServiceClient::new(broker.channel.clone());
    for name in ["a", "b", "c"] {
        let schedule = pb::Schedule {
            name: name.into(),
            queue: "q".into(),
            cron: "0 0 1 1 *".into(),
            item: items(vec![vec![0; 2 << 20]]).pop(),
            ..Default::default()
        };
        let request = pb::CreateScheduleRequest { schedule: Some(schedule) };
        schedules.create_schedule(request).await.unwrap();
    }
    let (mut names, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = pb::ListSchedulesRequest { page_token, ..Default::default() };
        let page = schedules.list_schedules(request).await.unwrap().into_inner();
        names.extend(page.schedules.into_iter().map(|schedule| schedule.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["a", "b", "c"]);

    let labels = || (0..64).map(|n| (format!("{n:063}"), "x".repeat(255))).collect();
    for n in 0..250 {
        let queue = pb::Queue { name: format!("q{n}"), labels: labels(), ..Default::default() };
        broker.admin().create_queue(pb::CreateQueueRequest { queue: Some(queue) }).await.unwrap();
    }
    let mut admin = AdminServiceClient::new(broker.channel.clone());
    let request = pb::ListQueuesRequest { page_size: 1_000, ..Default::default() };
    let page = admin.list_queues(request).await.unwrap().into_inner();
    assert!(!page.next_page_token.is_empty() && page.encoded_len() <= DEFAULT_LIMIT);
}

/// Every call refuses a request of few bytes that would take gigabytes when decoded: the entries are counted while they
/// are still encoded.
#[tokio::test]
async fn a_small_request_of_millions_of_entries_is_refused_before_it_is_decoded() {
    let broker = Broker::start().await;

    let mut queues = broker.queues().send_compressed(CompressionEncoding::Gzip);
    let mut admin = broker.admin().send_compressed(CompressionEncoding::Gzip);
    // Each of these is a few kilobytes on the wire.
    let many = |bytes: usize| vec![pb::NewItem::default(); bytes / 2 - 100];
    let push = pb::PushRequest { queue: "q".into(), items: many(1 << 17), ..Default::default() };
    let refused = queues.push(push).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let violations = refused.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "items");
    let receipts = vec![String::new(); 1 << 17];
    let refused = queues.commit(pb::CommitRequest { receipts }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let queue_names = vec![String::new(); 1 << 17];
    let refused =
        admin.watch_queues(pb::WatchQueuesRequest { queues: queue_names }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let labels = (0..50_000).map(|n| (n.to_string(), String::new())).collect();
    let queue = Some(pb::Queue { name: "q".into(), labels, ..Default::default() });
    let refused = admin.create_queue(pb::CreateQueueRequest { queue }).await.unwrap_err();
    assert!(
        [Code::InvalidArgument, Code::ResourceExhausted].contains(&refused.code()),
        "{refused}"
    );
    // On a stream, which the broker can only end.
    let batch =
        pb::PushStreamRequest { queue: "q".into(), items: many(1 << 17), ..Default::default() };
    let mut answers = queues.push_stream(tokio_stream::once(batch)).await.unwrap().into_inner();
    assert_eq!(answers.message().await.unwrap_err().code(), Code::InvalidArgument);
}

/// A move adds headers to those of the item. The result has the same limits as the headers of a push.
#[tokio::test]
async fn a_move_cannot_take_headers_past_their_limits() {
    let broker = Broker::start().await;
    let mut queues = broker.queues();
    let headers = |from: usize, count: usize, bytes: usize| {
        (from..from + count).map(|n| (format!("{n:03}"), "h".repeat(bytes))).collect()
    };
    for (had, given, fits) in [
        (headers(0, 64, 1), headers(64, 1, 1), false),
        (headers(0, 64, 1), headers(0, 64, 200), true),
        (headers(0, 10, 1_000), headers(10, 10, 1_000), false),
        (headers(0, 10, 1_000), headers(0, 10, 1_000), true),
    ] {
        push(&broker, "from", &[pb::NewItem { headers: had, ..Default::default() }]).await;
        let reserve = pb::ReserveRequest { queue: "from".into(), ..Default::default() };
        let delivery = queues.reserve(reserve).await.unwrap().into_inner().deliveries.remove(0);
        let receipt = delivery.receipt;
        let request = pb::MoveRequest {
            receipt: receipt.clone(),
            to_queue: "to".into(),
            headers: given,
            ..Default::default()
        };
        match queues.r#move(request).await {
            Ok(moved) => assert!(fits && moved.into_inner().outcome() == pb::Outcome::Ok),
            Err(refused) => {
                assert!(!fits && refused.code() == Code::InvalidArgument, "{refused}");
                let violations = refused.get_details_bad_request().unwrap().field_violations;
                assert_eq!(violations[0].field, "headers");
                // The consumer still holds the item.
                let commit = pb::CommitRequest { receipts: vec![receipt] };
                let results = queues.commit(commit).await.unwrap().into_inner().results;
                assert_eq!(results[0].outcome(), pb::Outcome::Ok);
            }
        }
    }
}

/// A push stream is read no further than its answers are. A client that leaves its answers loses them, and is told so.
#[tokio::test]
async fn answers_that_nobody_reads_are_not_kept() {
    let broker = Broker::start().await;
    broker.push("q", small(1)).await;
    let intake = Intake::new(64 << 20, 1 << 20);
    let mut frames = Vec::new();
    for batch_id in 0..100 {
        let batch = pb::PushStreamRequest {
            batch_id,
            queue: "q".into(),
            items: vec![pb::NewItem::default()],
            ..Default::default()
        };
        let message = batch.encode_to_vec();
        frames.push(0);
        frames.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
        frames.extend_from_slice(&message);
    }
    let request = Request::builder().uri("/sluicegate.v1.QueueService/PushStream");
    let request = intake.meter(request.body(frames.into()).unwrap(), Weak::new());
    let caller = Access::new(None, 0, Arc::new(Metrics::new()))
        .admit("/sluicegate.v1.QueueService/PushStream", None, &Peer::default())
        .unwrap();
    let batches = batches(request.extensions());
    let mut answers = Box::pin(push_stream::serve(&broker.api, caller, batches));
    broker.until("q", |stats| stats.ready == 1 + 64).await;
    tokio::time::pause();
    tokio::time::sleep(Duration::from_mins(2)).await;
    tokio::time::resume();
    let end = answers.next().await.unwrap().unwrap_err();
    assert_eq!((end.code(), reason(&end)), (Code::DeadlineExceeded, "ANSWERS_NOT_READ".into()));
    assert!(answers.next().await.is_none());
    assert_eq!(broker.stats("q").await.ready, 1 + 64);
}
