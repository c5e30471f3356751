//! PushStream: batches in flight together, answered one by one.

use std::collections::HashMap;

use sluicegate_proto::v1::{ItemState, NewItem, PushStreamRequest, PushStreamResponse, Queue};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use crate::harness::{Api, Backend, new_item, on_both_backends, payloads, within};

on_both_backends!(
    many_batches_are_pushed_concurrently_and_a_failure_stops_no_others,
    batches_in_flight_are_handed_out_in_the_order_sent,
    a_half_closed_push_stream_answers_all_and_ends,
);

fn batch(batch_id: i64, queue: &str, items: Vec<NewItem>) -> PushStreamRequest {
    PushStreamRequest { batch_id, queue: queue.to_owned(), items, producer: String::new() }
}

/// Opens a PushStream.
async fn push_stream(
    api: &Api,
) -> (mpsc::Sender<PushStreamRequest>, Streaming<PushStreamResponse>) {
    let (requests, outgoing) = mpsc::channel(1000);
    let answers = api.queue.clone().push_stream(ReceiverStream::new(outgoing)).await;
    (requests, answers.expect("a stream").into_inner())
}

async fn many_batches_are_pushed_concurrently_and_a_failure_stops_no_others(backend: Backend) {
    const BATCHES: i64 = 200;
    const BAD_ITEM: i64 = 20;
    const BAD_QUEUE: i64 = 60;
    const FULL: i64 = 100;
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.create(Queue { name: "full".to_owned(), max_depth: 1, ..Queue::default() }).await;
    let (requests, mut answers) = push_stream(&api).await;
    for id in 0..BATCHES {
        let mut items: Vec<NewItem> =
            (0..5).map(|number| new_item(&format!("{id:03} {number}"))).collect();
        let queue = match id {
            BAD_QUEUE => "no such name!",
            FULL => "full",
            id if id % 2 == 0 => "even",
            _ => "odd",
        };
        if id == BAD_ITEM {
            items[3].priority = 10;
        }
        requests.send(batch(id, queue, items)).await.expect("room");
    }
    let mut results = HashMap::new();
    let mut errors = HashMap::new();
    for _ in 0..BATCHES {
        let answer = within("an answer", answers.message()).await.expect("an open stream");
        let answer = answer.expect("an answer");
        match answer.error {
            None => assert!(results.insert(answer.batch_id, answer.results).is_none()),
            Some(error) => {
                assert!(answer.results.is_empty());
                assert!(errors.insert(answer.batch_id, error).is_none());
            }
        }
    }
    let mut failed: Vec<i64> = errors.keys().copied().collect();
    failed.sort_unstable();
    assert_eq!(failed, [BAD_ITEM, BAD_QUEUE, FULL]);
    let error = |id: i64, code: Code| {
        let status = &errors[&id];
        assert_eq!(Code::from_i32(status.code), code, "{status:?}");
        assert!(!status.message.is_empty() && !status.details.is_empty(), "{status:?}");
    };
    error(BAD_ITEM, Code::InvalidArgument);
    error(BAD_QUEUE, Code::InvalidArgument);
    error(FULL, Code::ResourceExhausted);
    assert!(results.values().all(|results| results.len() == 5));

    // Everything that was acknowledged is stored in the order sent, and nothing else is.
    for (queue, parity) in [("even", 0), ("odd", 1)] {
        let items = api.list(queue, ItemState::Ready).await;
        let stored: Vec<_> = items.iter().map(|item| item.id.as_str()).collect();
        let wanted: Vec<_> = (0..BATCHES)
            .filter(|id| id % 2 == parity && !failed.contains(id))
            .flat_map(|id| results[&id].iter().map(|result| result.id.as_str()))
            .collect();
        assert_eq!(stored, wanted, "{queue}");
    }
    assert!(api.list("full", ItemState::Unspecified).await.is_empty());
}

async fn batches_in_flight_are_handed_out_in_the_order_sent(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    handed_out_in_the_order_sent(&api, "plain", |_| false).await;
    // Those with keys are written otherwise.
    handed_out_in_the_order_sent(&api, "mixed", |id| id / 3 % 2 == 0).await;
}

/// Pushes batches, some of which have an ordering key of its own for each item, and asserts in which order their items are handed out.
async fn handed_out_in_the_order_sent(api: &Api, queue: &str, has_keys: impl Fn(i64) -> bool) {
    const BATCHES: i64 = 200;
    let (requests, mut answers) = push_stream(api).await;
    let lines = |id: i64| (0..20).map(move |number| format!("{id} {number}"));
    for id in 0..BATCHES {
        let item = |line: String| NewItem {
            ordering_key: if has_keys(id) { line.clone() } else { String::new() },
            ..new_item(&line)
        };
        requests.send(batch(id, queue, lines(id).map(item).collect())).await.expect("room");
    }
    drop(requests);
    while let Some(answer) = within("an answer", answers.message()).await.expect("a clean end") {
        assert!(answer.error.is_none(), "{answer:?}");
    }
    let mut consumer = api.consume(queue, 10_000).await;
    let handed_out = payloads(&consumer.take(usize::try_from(BATCHES * 20).expect("few")).await);
    let sent: Vec<String> = (0..BATCHES).flat_map(lines).collect();
    let first = handed_out.iter().zip(&sent).find(|(handed_out, sent)| handed_out != sent);
    assert_eq!(first, None, "handed out, but not sent at this place: {queue}");
}

async fn a_half_closed_push_stream_answers_all_and_ends(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let (requests, mut answers) = push_stream(&api).await;
    for id in 0..50 {
        let items = vec![NewItem { dedup_id: format!("{}", id % 10), ..new_item("x") }];
        requests.send(batch(id, "work", items)).await.expect("room");
    }
    drop(requests);
    let (mut seen, mut stored) = (0, 0);
    while let Some(answer) = within("an answer", answers.message()).await.expect("a clean end") {
        assert!(answer.error.is_none(), "{answer:?}");
        stored += answer.results.iter().filter(|result| !result.deduplicated).count();
        seen += 1;
    }
    assert_eq!((seen, stored), (50, 10));
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 10);
}
