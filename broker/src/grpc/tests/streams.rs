//! ConsumeStream and PushStream.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use futures_util::{StreamExt, stream};
use prost::Message;
use sluicegate_proto::codec::CountingCodec;
use tonic::codec::Codec as _;

use super::*;
use crate::{access::Peer, grpc::consume_stream};

#[tokio::test]
async fn a_failed_batch_does_not_end_a_push_stream() {
    let broker = Broker::start().await;
    let batch = |batch_id: i64, queue: &str| pb::PushStreamRequest {
        batch_id,
        queue: queue.into(),
        items: items(vec![batch_id.to_be_bytes().to_vec()]),
        ..Default::default()
    };
    let batches: Vec<_> =
        (0..500).map(|id| batch(id, if id == 250 { "not a queue" } else { "q" })).collect();
    let stream = tokio_stream::iter(batches);
    let mut answers = broker.queues().push_stream(stream).await.unwrap().into_inner();
    let mut answered = Vec::new();
    while let Some(answer) = answers.message().await.unwrap() {
        if answer.batch_id == 250 {
            let error = answer.error.unwrap();
            assert_eq!((error.code, answer.results.len()), (Code::InvalidArgument as i32, 0));
            assert!(error.details.iter().any(|any| any.type_url.ends_with("BadRequest")));
        } else {
            assert_eq!((answer.error, answer.results.len()), (None, 1));
        }
        answered.push(answer.batch_id);
    }
    answered.sort_unstable();
    assert_eq!(answered, (0..500).collect::<Vec<_>>());
    // Stored in the order in which the batches were sent.
    let request = pb::PopRequest { queue: "q".into(), max_items: 1000, ..Default::default() };
    let popped = broker.queues().pop(request).await.unwrap().into_inner().items;
    let ids: Vec<_> = popped
        .iter()
        .map(|item| i64::from_be_bytes(item.payload[..].try_into().unwrap()))
        .collect();
    assert_eq!(ids, (0..500).filter(|id| *id != 250).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_stream_is_handed_items_and_settles_them_in_order() {
    let broker = Broker::start().await;
    let (requests, mut events) = broker.open("q").await;
    broker.push("q", small(32)).await;
    let handed = deliveries(&mut events, 32).await;
    // Many settles of all kinds are in progress at a time.
    let receipt = |n: usize| handed[n].receipt.clone();
    for n in 0..30 {
        let request = match n % 3 {
            0 => Action::Commit(pb::CommitRequest { receipts: vec![receipt(n)] }),
            1 => Action::Extend(pb::ExtendRequest { receipts: vec![receipt(n)], lease: None }),
            _ => Action::Flow(pb::Flow { max_in_flight: 32 }),
        };
        requests.send(act(request)).await.unwrap();
    }
    for n in 0..30 {
        match (n % 3, next(&mut events).await.unwrap()) {
            (0, Event::Settled(settled)) => {
                let [result] = &settled.results[..] else { panic!() };
                assert_eq!((&result.receipt, result.outcome()), (&receipt(n), pb::Outcome::Ok));
            }
            (1, Event::Extended(extended)) => {
                let [result] = &extended.results[..] else { panic!() };
                assert_eq!((&result.receipt, result.outcome()), (&receipt(n), pb::Outcome::Ok));
                assert!(result.lease_expire_time.is_some());
            }
            (2, Event::Flow(flow)) => assert_eq!(flow.max_in_flight, 32),
            (_, other) => panic!("answer {n} is {other:?}"),
        }
    }
    // The client closes its side. Its requests are answered, and then the stream ends.
    let item = pb::RollbackItem { receipt: receipt(31), keep_attempt: true, ..Default::default() };
    requests.send(act(Action::Rollback(pb::RollbackRequest { items: vec![item] }))).await.unwrap();
    drop(requests);
    let mut settled = false;
    while let Some(event) = next(&mut events).await {
        settled |= matches!(event, Event::Settled(_));
    }
    assert!(settled);
    broker.until("q", |stats| stats.ready == 22 && stats.reserved == 0).await;
}

#[tokio::test]
async fn flow_halts_and_resumes() {
    let broker = Broker::start().await;
    let (requests, mut events) = broker.open("q").await;
    for max_in_flight in [0, 2] {
        requests.send(act(Action::Flow(pb::Flow { max_in_flight }))).await.unwrap();
        assert_eq!(next(&mut events).await, Some(Event::Flow(pb::Flow { max_in_flight })));
        if max_in_flight == 0 {
            broker.push("q", small(3)).await;
        }
    }
    deliveries(&mut events, 2).await;
    broker.until("q", |stats| (stats.ready, stats.reserved) == (1, 2)).await;
}

/// The items are so large that most of them wait for the client to read.
#[tokio::test]
async fn nothing_is_delivered_after_the_answer_to_a_flow_of_zero() {
    let broker = Broker::start().await;
    let (requests, mut events) = broker.open("q").await;
    broker.push("q", (0..32).map(|n| vec![n; 390_000]).collect()).await;
    let mut taken = deliveries(&mut events, 1).await;
    let mut flow = async |max_in_flight, taken: &mut Vec<pb::Delivery>| {
        requests.send(act(Action::Flow(pb::Flow { max_in_flight }))).await.unwrap();
        while let Some(Event::Deliveries(more)) = next(&mut events).await {
            taken.extend(more.deliveries);
        }
    };
    flow(0, &mut taken).await;
    let halted = taken.len();
    assert!(halted < 32, "all are delivered");
    let held = halted as i64;
    broker.until("q", |stats| (stats.ready, stats.reserved) == (32 - held, held)).await;
    flow(0, &mut taken).await;
    assert_eq!(taken.len(), halted);
    flow(32, &mut taken).await;
    let left = 32 - taken.len();
    taken.extend(deliveries(&mut events, left).await);
    let numbers: Vec<u8> = taken
        .into_iter()
        .map(|delivery| {
            let item = delivery.item.unwrap();
            assert_eq!((item.attempt, item.deliveries), (1, 1));
            item.payload[0]
        })
        .collect();
    assert_eq!(numbers, (0..32).collect::<Vec<u8>>());
}

#[tokio::test]
async fn a_protocol_violation_ends_the_stream() {
    let broker = Broker::start().await;
    broker.ensure("q").await;
    let commit =
        |receipt: &str| Action::Commit(pb::CommitRequest { receipts: vec![receipt.into()] });
    let open = || Action::Open(pb::ConsumeRequest { queue: "q".into(), ..Default::default() });
    for (actions, named) in [
        (vec![commit("x")], "open"),
        (vec![Action::Open(pb::ConsumeRequest::default())], "open.queue"),
        (vec![open(), open()], "open"),
    ] {
        let stream = tokio_stream::iter(actions.into_iter().map(act).collect::<Vec<_>>());
        let mut events = broker.queues().consume_stream(stream).await.unwrap().into_inner();
        let ended = loop {
            match events.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{named}: ended with no error"),
                Err(status) => break status,
            }
        };
        assert_eq!(field(&ended), named);
    }
}

#[tokio::test]
async fn an_invalid_request_on_a_stream_is_answered_in_order() {
    let broker = Broker::start().await;
    let (requests, mut events) = broker.open("q").await;
    let commit = pb::CommitRequest { receipts: vec!["x".into()] };
    for (action, named) in [
        (Action::Commit(commit), "commit.receipts[0]"),
        (Action::Flow(pb::Flow { max_in_flight: -1 }), "flow.max_in_flight"),
        (Action::Rollback(pb::RollbackRequest::default()), "rollback.items"),
        (Action::Extend(pb::ExtendRequest::default()), "extend.receipts"),
    ] {
        requests.send(act(action)).await.unwrap();
        let Some(Event::Error(error)) = next(&mut events).await else { panic!("{named}") };
        assert_eq!(Code::from(error.code), Code::InvalidArgument);
        let details = format!("{:?}", error.details);
        assert!(!details.is_empty() && error.message.contains(named), "{error:?}");
    }
    requests.send(act(Action::Flow(pb::Flow { max_in_flight: 3 }))).await.unwrap();
    assert_eq!(next(&mut events).await, Some(Event::Flow(pb::Flow { max_in_flight: 3 })));
}

/// A stream ends when it is older than any connection becomes. Before that its consumer settles the
/// items it holds. The others return to the queue uncounted.
#[tokio::test]
async fn an_old_stream_ends_and_its_consumer_loses_nothing() {
    let max_connection_age = Duration::from_millis(500);
    let broker = broker_with(Options { max_connection_age, ..open() }).await;
    broker.push("q", small(1)).await;
    let (requests, mut events) = broker.open("q").await;
    let held = deliveries(&mut events, 1).await;
    let commit = pb::CommitRequest { receipts: vec![held[0].receipt.clone()] };
    requests.send(act(Action::Commit(commit))).await.unwrap();
    let Some(Event::Settled(settled)) = next(&mut events).await else { panic!() };
    assert_eq!(settled.results[0].outcome(), pb::Outcome::Ok);
    let end = events.message().await.unwrap_err();
    assert_eq!((end.code(), reason(&end)), (Code::Unavailable, "STREAM_TOO_OLD".into()));
    let retry = end.get_error_details().retry_info().unwrap().retry_delay;
    assert_eq!(retry, Some(Duration::ZERO));

    broker.push("q", small(1)).await;
    let lease = Some(prost_types::Duration { seconds: 0, nanos: 300_000_000 });
    let on_disconnect = pb::OnDisconnect::Count.into();
    let request = pb::ConsumeRequest {
        queue: "q".into(),
        renew: true,
        lease,
        on_disconnect,
        ..Default::default()
    };
    let mut stream = broker.queues().consume(request).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().deliveries.len(), 1);
    let end = stream.message().await.unwrap_err();
    assert_eq!(reason(&end), "STREAM_TOO_OLD");
    broker.until("q", |stats| stats.ready == 1).await;
    let request = pb::ReserveRequest { queue: "q".into(), ..Default::default() };
    let again = broker.queues().reserve(request).await.unwrap().into_inner().deliveries;
    assert_eq!(again[0].item.as_ref().unwrap().attempt, 1);
}

/// A push stream that reaches its maximum age is asked to end, and is ended if the client does not.
/// Everything that was read is answered first.
#[tokio::test]
async fn an_old_push_stream_is_asked_to_end() {
    let max_connection_age = Duration::from_millis(300);
    let broker = broker_with(Options { max_connection_age, ..open() }).await;
    for obliging in [true, false] {
        let (requests, outgoing) = tokio::sync::mpsc::channel(9);
        let batch = |batch_id| pb::PushStreamRequest {
            batch_id,
            queue: "q".into(),
            items: items(vec![vec![1]]),
            ..Default::default()
        };
        requests.send(batch(1)).await.unwrap();
        let outgoing = tokio_stream::wrappers::ReceiverStream::new(outgoing);
        let mut answers = broker.queues().push_stream(outgoing).await.unwrap().into_inner();
        assert_eq!(answers.message().await.unwrap().unwrap().batch_id, 1);
        assert!(answers.message().await.unwrap().unwrap().closing);
        requests.send(batch(2)).await.unwrap();
        if obliging {
            drop(requests);
            assert_eq!(answers.message().await.unwrap().unwrap().batch_id, 2);
            assert_eq!(answers.message().await.unwrap(), None);
        } else {
            assert_eq!(answers.message().await.unwrap().unwrap().batch_id, 2);
            let end = answers.message().await.unwrap_err();
            assert_eq!(reason(&end), "STREAM_TOO_OLD");
        }
    }
}

/// A client that sends settles and reads no answers is read no further than its answers may take in memory.
#[tokio::test]
async fn requests_of_a_stream_whose_answers_nobody_reads_are_bounded_in_bytes() {
    let broker = Broker::start().await;
    broker.push("q", small(1)).await;
    let (_requests, mut events) = broker.open("q").await;
    let receipt = deliveries(&mut events, 1).await.remove(0).receipt;

    let open = Action::Open(pb::ConsumeRequest { queue: "q".into(), ..Default::default() });
    let extend = move |_| {
        let receipts = vec![receipt.clone(); 1_000];
        act(Action::Extend(pb::ExtendRequest { receipts, lease: None }))
    };
    let requests = std::iter::once(act(open)).chain((0..60).map(extend));
    let bytes = Arc::new(AtomicUsize::new(0));
    let read = Arc::clone(&bytes);
    let frames = requests.map(move |request| {
        let message = request.encode_to_vec();
        read.fetch_add(message.len(), Ordering::Relaxed);
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        Ok::<_, Status>([&[0][..], &length, &message].concat())
    });
    let body = Body::from_stream(stream::iter(frames).chain(stream::pending()));
    let decoder = CountingCodec::<(), pb::ConsumeStreamRequest>::default().decoder();
    let requests = Streaming::new_request(decoder, body, None, None);
    let caller = Access::new(None, 0, Arc::new(Metrics::new()))
        .admit("/sluicegate.v1.QueueService/ConsumeStream", None, &Peer::default())
        .unwrap();
    let mut answers = Box::pin(consume_stream::serve(broker.api.clone(), caller, requests));
    let opened = answers.next().await.unwrap().unwrap();
    assert!(matches!(opened.event, Some(Event::Opened(_))));
    for _ in 0..10_000 {
        tokio::task::yield_now().await; // all requests are there: nothing is waited for
    }
    let held = bytes.load(Ordering::Relaxed);
    assert!((1 << 20..2 << 20).contains(&held), "{held} bytes of requests are read");
    // Whoever reads the answers goes on.
    for _ in 0..60 {
        let answer = answers.next().await.unwrap().unwrap();
        assert!(matches!(answer.event, Some(Event::Extended(_))));
    }
}

/// Commits take as long as on a replica set.
struct SlowCommits(Duration);

impl crate::store::decorator::Around for SlowCommits {
    async fn around<T: Send>(
        &self,
        call: &'static str,
        answer: impl Future<Output = crate::store::Result<T>> + Send,
    ) -> crate::store::Result<T> {
        let answer = answer.await;
        if call == "commit" {
            tokio::time::sleep(self.0).await;
        }
        answer
    }
}

async fn broker_with_slow_commits(lasts: Duration) -> Broker {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let around = Arc::new(SlowCommits(lasts));
    let store = crate::store::decorator::Decorated { store: Arc::new(store), around };
    broker_over(Arc::new(store), open(), Limits::default()).await
}

/// A worker that takes one item, commits it, and says that it sends no more. Nothing is handed to it after that.
#[tokio::test]
async fn a_stream_whose_client_has_closed_its_side_is_handed_nothing() {
    let broker = broker_with_slow_commits(Duration::from_millis(30)).await;
    broker.push("q", small(6)).await;
    let mut history = Vec::new();
    for _ in 0..3 {
        let (requests, receiver) = mpsc::channel(100);
        let open = pb::ConsumeRequest {
            queue: "q".into(),
            max_in_flight: 1,
            on_disconnect: pb::OnDisconnect::Count.into(),
            ..Default::default()
        };
        requests.send(act(Action::Open(open))).await.unwrap();
        let stream = ReceiverStream::new(receiver);
        let mut events = broker.queues().consume_stream(stream).await.unwrap().into_inner();
        let mut requests = Some(requests);
        while let Some(event) = next(&mut events).await {
            if let Event::Deliveries(deliveries) = event {
                let Some(requests) = requests.take() else { continue };
                let item = deliveries.deliveries[0].item.clone().unwrap();
                history.push((item.payload[0], item.attempt, item.deliveries));
                let receipts = vec![deliveries.deliveries[0].receipt.clone()];
                let commit = Action::Commit(pb::CommitRequest { receipts });
                requests.send(act(commit)).await.unwrap();
            }
        }
    }
    assert_eq!(history, [(0, 1, 1), (1, 1, 1), (2, 1, 1)]);
}
