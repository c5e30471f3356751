//! Consumers and stations: settling, shutdown, and streams that break.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sluicegate_client::{
    CancellationToken, Client, Consumer, Delivery, Next, Renewal, Result, Retry, Station, Summary,
    proto::{
        CommitResponse, ConsumeStreamResponse, ExtendResponse, ExtendResult, Flow, MoveResponse,
        OnDisconnect, Outcome, RevokeReason, Revoked, RollbackResponse,
        consume_stream_request::Action, consume_stream_response::Event,
    },
    tonic::{Code, Status},
};
use tokio::{sync::Semaphore, task::JoinHandle};

use crate::broker::{Broker, Call, deliveries, expect_call, next, settled};

/// A consumer whose handlers each wait for one permit.
struct Gated {
    gate: Arc<Semaphore>,
    started: Arc<AtomicUsize>,
    stop: CancellationToken,
    running: JoinHandle<Result<Summary>>,
}

fn gated(consumer: Consumer) -> Gated {
    let (gate, started, stop) =
        (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)), CancellationToken::new());
    let (inner_gate, inner_started) = (gate.clone(), started.clone());
    let handler = move |_: Delivery| {
        inner_started.fetch_add(1, Ordering::SeqCst);
        let gate = inner_gate.clone();
        async move {
            gate.acquire().await.map_err(|_| "the gate is gone")?.forget();
            Ok::<(), &str>(())
        }
    };
    let running = tokio::spawn(consumer.shutdown(stop.clone()).run(handler));
    Gated { gate, started, stop, running }
}

impl Gated {
    async fn until_started(&self, n: usize) {
        while self.started.load(Ordering::SeqCst) < n {
            tokio::task::yield_now().await;
        }
    }
}

/// A consumer that commits everything.
fn plain(client: &Client, stop: &CancellationToken) -> JoinHandle<Result<Summary>> {
    let consumer = client.consumer("q").unary().shutdown(stop.clone());
    tokio::spawn(consumer.run(|_| async { Ok::<(), &str>(()) }))
}

#[tokio::test]
async fn errors_and_panics_roll_the_item_back_and_the_consumer_continues() {
    let mut broker = Broker::start().await;
    let consumer = broker.client().consumer("q").unary().concurrency(1).limit(4);
    let running = tokio::spawn(consumer.run(|delivery| async move {
        match delivery.text().unwrap() {
            "panics" => panic!("oh no"),
            "fails" => Err(Retry::new("no paper")),
            "retries" => Err(Retry::new("busy").after(Duration::from_secs(9)).keep_attempt()),
            _ => Ok(()),
        }
    }));
    let (_, stream) = expect_call!(broker, Consume);
    let mut rolled_back = Vec::new();
    for name in ["panics", "fails", "retries"] {
        stream.send(Ok(deliveries([name]))).await.unwrap();
        let (request, answer) = expect_call!(broker, Rollback);
        let results = settled(request.items.iter().map(|item| &item.receipt), Outcome::Ok);
        answer.send(Ok(RollbackResponse { results })).unwrap();
        rolled_back.extend(request.items);
    }
    stream.send(Ok(deliveries(["works"]))).await.unwrap();
    let (request, answer) = expect_call!(broker, Commit);
    assert_eq!(request.receipts, ["works"]);
    let results = settled(&request.receipts, Outcome::Ok);
    answer.send(Ok(CommitResponse { results })).unwrap();

    let summary = running.await.unwrap().unwrap();
    assert_eq!((summary.started, summary.committed, summary.rolled_back), (4, 1, 3));
    let reasons: Vec<_> = rolled_back.iter().map(|item| item.reason.as_str()).collect();
    assert_eq!(reasons, ["handler panicked: oh no", "no paper", "busy"]);
    assert_eq!(rolled_back[1].delay, None);
    assert_eq!(rolled_back[2].delay.map(|delay| delay.seconds), Some(9));
    assert_eq!(
        rolled_back.iter().map(|item| item.keep_attempt).collect::<Vec<_>>(),
        [false, false, true]
    );
}

#[tokio::test]
async fn items_finished_during_a_commit_go_into_the_next_one() {
    let mut broker = Broker::start().await;
    let Gated { gate, running, .. } = gated(broker.client().consumer("q").unary().limit(20));
    let (_, stream) = expect_call!(broker, Consume);
    let names: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    stream.send(Ok(deliveries(names.iter().map(String::as_str)))).await.unwrap();
    gate.add_permits(1);
    let (first, held) = expect_call!(broker, Commit);
    assert_eq!(first.receipts.len(), 1);
    gate.add_permits(19);
    // On this single-threaded runtime everything that is ready runs before a yield returns: the permits
    // reach the handlers, the handlers the runner, and their decisions the settler's channel.
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    held.send(Ok(CommitResponse { results: settled(&first.receipts, Outcome::Ok) })).unwrap();
    let (second, answer) = expect_call!(broker, Commit);
    assert_eq!(second.receipts.len(), 19);
    answer.send(Ok(CommitResponse { results: settled(&second.receipts, Outcome::Ok) })).unwrap();
    assert_eq!(running.await.unwrap().unwrap().committed, 20);
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_repeated() {
    let mut broker = Broker::start().await;
    let stop = CancellationToken::new();
    let running = plain(&broker.client(), &stop);
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["a"]))).await.unwrap();
    let (first, answer) = expect_call!(broker, Commit);
    answer.send(Err(Status::unavailable("the answer is lost"))).unwrap();
    let (second, answer) = expect_call!(broker, Commit);
    assert_eq!(first, second);
    answer.send(Ok(CommitResponse { results: settled(&second.receipts, Outcome::Gone) })).unwrap();
    stop.cancel();
    let summary = running.await.unwrap().unwrap();
    assert_eq!((summary.committed, summary.lost, summary.unknown), (0, 0, 1));
}

#[tokio::test]
async fn a_broken_stream_is_opened_again_and_running_handlers_continue() {
    let mut broker = Broker::start().await;
    let gated = gated(broker.client().consumer("q").unary());
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["a"]))).await.unwrap();
    gated.until_started(1).await;
    stream.send(Err(Status::unavailable("shutting down"))).await.unwrap();
    drop(stream);
    // The consumer asks immediately whether it still holds its items; either request comes first.
    let (mut asked, mut opened) = (false, None);
    while !asked || opened.is_none() {
        match broker.call().await {
            Call::Extend(request, answer) => {
                assert_eq!(request.receipts, ["a"]);
                answer.send(Ok(extended("a", Outcome::Ok))).unwrap();
                asked = true;
            }
            Call::Consume(_, stream) => opened = Some(stream),
            other => panic!("{other:?}"),
        }
    }
    let stream = opened.unwrap();
    stream.send(Ok(deliveries(["b"]))).await.unwrap();
    gated.until_started(2).await;
    gated.gate.add_permits(2);
    let mut committed = 0;
    while committed < 2 {
        let (request, answer) = expect_call!(broker, Commit);
        committed += request.receipts.len();
        answer
            .send(Ok(CommitResponse { results: settled(&request.receipts, Outcome::Ok) }))
            .unwrap();
    }
    gated.stop.cancel();
    assert_eq!(gated.running.await.unwrap().unwrap().committed, 2);
}

#[tokio::test]
async fn a_refusal_ends_the_consumer_with_the_brokers_error() {
    let mut broker = Broker::start().await;
    let running = plain(&broker.client(), &CancellationToken::new());
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Err(Status::not_found("no such queue"))).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap_err().code(), Some(Code::NotFound));
}

#[tokio::test]
async fn shutdown_finishes_running_handlers_and_keeps_the_stream_until_all_is_settled() {
    let mut broker = Broker::start().await;
    let gated = gated(broker.client().consumer("q").unary().concurrency(1));
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["running", "waiting"]))).await.unwrap();
    gated.until_started(1).await;
    gated.stop.cancel();
    gated.gate.add_permits(1);
    let (request, answer) = expect_call!(broker, Commit);
    assert_eq!(request.receipts, ["running"]);
    assert!(!stream.is_closed(), "closing the stream would fail an attempt of unsettled items");
    answer.send(Ok(CommitResponse { results: settled(&request.receipts, Outcome::Ok) })).unwrap();
    let (request, answer) = expect_call!(broker, Rollback);
    assert_eq!(request.items[0].receipt, "waiting");
    assert!(request.items[0].keep_attempt);
    assert!(!stream.is_closed());
    let results = settled([&request.items[0].receipt], Outcome::Ok);
    answer.send(Ok(RollbackResponse { results })).unwrap();
    let summary = gated.running.await.unwrap().unwrap();
    assert_eq!((summary.started, summary.committed, summary.rolled_back), (1, 1, 1));
    stream.closed().await;
}

#[tokio::test]
async fn work_that_outlasts_the_grace_is_rolled_back_uncounted() {
    let mut broker = Broker::start().await;
    let gated =
        gated(broker.client().consumer("q").unary().shutdown_grace(Duration::from_millis(10)));
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["endless"]))).await.unwrap();
    gated.until_started(1).await;
    gated.stop.cancel();
    let (request, answer) = expect_call!(broker, Rollback);
    assert_eq!(request.items[0].receipt, "endless");
    assert!(request.items[0].keep_attempt);
    let results = settled([&request.items[0].receipt], Outcome::Ok);
    answer.send(Ok(RollbackResponse { results })).unwrap();
    assert_eq!(gated.running.await.unwrap().unwrap().rolled_back, 1);
}

fn extended(receipt: &str, outcome: Outcome) -> ExtendResponse {
    let result =
        ExtendResult { receipt: receipt.into(), outcome: outcome.into(), lease_expire_time: None };
    ExtendResponse { results: vec![result] }
}

#[tokio::test]
async fn leases_are_renewed_and_a_handler_learns_of_a_lost_one() {
    let mut broker = Broker::start().await;
    let consumer = broker
        .client()
        .consumer("q")
        .unary()
        .lease(Duration::from_millis(300))
        .renewal(Renewal::Client)
        .limit(1);
    let running = tokio::spawn(consumer.run(|delivery| async move {
        delivery.lease_lost().await;
        Err::<(), &str>("the lease was lost")
    }));
    let (request, stream) = expect_call!(broker, Consume);
    assert!(!request.renew);
    stream.send(Ok(deliveries(["a"]))).await.unwrap();
    for outcome in [Outcome::Ok, Outcome::LeaseLost] {
        let (request, answer) = expect_call!(broker, Extend);
        assert_eq!(request.receipts, ["a"]);
        answer.send(Ok(extended("a", outcome))).unwrap();
    }
    let (request, answer) = expect_call!(broker, Rollback);
    let results = settled([&request.items[0].receipt], Outcome::LeaseLost);
    answer.send(Ok(RollbackResponse { results })).unwrap();
    assert_eq!(running.await.unwrap().unwrap().lost, 1);
}

/// Wraps an event as the server's stream requires.
#[expect(clippy::unnecessary_wraps, reason = "the stream takes results")]
fn event(event: Event) -> std::result::Result<ConsumeStreamResponse, Status> {
    Ok(ConsumeStreamResponse { event: Some(event) })
}

#[tokio::test]
async fn a_streaming_consumer_halts_deliveries_before_it_rolls_back_and_ends() {
    let mut broker = Broker::start().await;
    let gated = gated(broker.client().consumer("q").concurrency(1));
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    assert!(matches!(next(&mut requests).await.action, Some(Action::Open(_))));
    answers.send(event(Event::Deliveries(deliveries(["running", "waiting"])))).await.unwrap();
    gated.until_started(1).await;
    gated.stop.cancel();

    // The halt and the rollback are sent in either order; items that were being delivered are rolled back as well.
    let mut given_back = Vec::new();
    let mut halted = false;
    answers.send(event(Event::Deliveries(deliveries(["late"])))).await.unwrap();
    while !halted || given_back.len() < 2 {
        match next(&mut requests).await.action {
            Some(Action::Flow(Flow { max_in_flight: 0 })) => halted = true,
            Some(Action::Rollback(request)) => {
                let results = settled(request.items.iter().map(|item| &item.receipt), Outcome::Ok);
                answers.send(event(Event::Settled(CommitResponse { results }))).await.unwrap();
                assert!(request.items.iter().all(|item| item.keep_attempt));
                given_back.extend(request.items.into_iter().map(|item| item.receipt));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(given_back, ["waiting", "late"]);
    answers.send(event(Event::Flow(Flow { max_in_flight: 0 }))).await.unwrap();
    gated.gate.add_permits(1);
    let Some(Action::Commit(request)) = next(&mut requests).await.action else { panic!() };
    assert_eq!(request.receipts, ["running"]);
    let results = settled(&request.receipts, Outcome::Ok);
    answers.send(event(Event::Settled(CommitResponse { results }))).await.unwrap();
    let summary = gated.running.await.unwrap().unwrap();
    assert_eq!((summary.committed, summary.rolled_back), (1, 2));
}

/// The broker would roll the item of a running handler back. A stream that cannot be halted is sent
/// items until it ends, and the consumer does not see them all.
#[tokio::test]
async fn a_consumer_keeps_its_leases_when_its_stream_breaks_if_the_stream_can_be_halted() {
    let mut broker = Broker::start().await;
    let gated = gated(broker.client().consumer("q"));
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    let Some(Action::Open(open)) = next(&mut requests).await.action else { panic!() };
    assert_eq!(open.on_disconnect(), OnDisconnect::KeepLease);
    answers.send(event(Event::Deliveries(deliveries(["a"])))).await.unwrap();
    gated.until_started(1).await;
    drop((requests, answers));
    gated.gate.add_permits(1);
    let mut committed = false;
    while !committed {
        match broker.call().await {
            Call::Extend(request, answer) => {
                assert_eq!(request.receipts, ["a"]);
                answer.send(Ok(extended("a", Outcome::Ok))).unwrap();
            }
            Call::Commit(request, answer) => {
                let results = settled(&request.receipts, Outcome::Ok);
                answer.send(Ok(CommitResponse { results })).unwrap();
                committed = true;
            }
            Call::ConsumeStream(_, answers) => {
                answers.send(Err(Status::unavailable("not yet"))).await.unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    gated.running.abort();

    let mut broker = Broker::start().await;
    let unary = plain(&broker.client(), &CancellationToken::new());
    let (request, _) = expect_call!(broker, Consume);
    assert_eq!(request.on_disconnect(), OnDisconnect::Unspecified);
    unary.abort();
}

#[tokio::test]
async fn settles_unanswered_when_a_stream_breaks_are_repeated_by_unary_calls() {
    let mut broker = Broker::start().await;
    let stop = CancellationToken::new();
    let consumer = broker.client().consumer("q").shutdown(stop.clone());
    let running = tokio::spawn(consumer.run(|_| async { Ok::<(), &str>(()) }));
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    next(&mut requests).await;
    answers.send(event(Event::Deliveries(deliveries(["a"])))).await.unwrap();
    let Some(Action::Commit(lost)) = next(&mut requests).await.action else { panic!() };
    answers.send(Err(Status::unavailable("going down"))).await.unwrap();
    drop((requests, answers));

    let (request, answer) = expect_call!(broker, Commit);
    assert_eq!(request, lost);
    answer.send(Ok(CommitResponse { results: settled(&request.receipts, Outcome::Ok) })).unwrap();
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    next(&mut requests).await;
    stop.cancel();
    assert!(matches!(next(&mut requests).await.action, Some(Action::Flow(_))));
    answers.send(event(Event::Flow(Flow { max_in_flight: 0 }))).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap().committed, 1);
}

#[tokio::test]
async fn a_refused_destination_rolls_the_item_back() {
    let mut broker = Broker::start().await;
    let stop = CancellationToken::new();
    let station =
        Station::from_consumer(broker.client().consumer("q").unary()).shutdown(stop.clone());
    let running = tokio::spawn(station.run(|delivery| async move {
        let to = delivery.text().unwrap().to_owned();
        Ok::<_, &str>(Next::move_to(to).payload("new").into())
    }));
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["elsewhere"]))).await.unwrap();
    let (request, answer) = expect_call!(broker, Move);
    assert_eq!((request.receipt.as_str(), request.to_queue.as_str()), ("elsewhere", "elsewhere"));
    assert_eq!(request.payload.as_deref(), Some(&b"new"[..]));
    answer.send(Err(Status::failed_precondition("another group"))).unwrap();
    let (request, answer) = expect_call!(broker, Rollback);
    assert_eq!(request.items[0].reason, "move was refused: another group");
    let results = settled([&request.items[0].receipt], Outcome::Ok);
    answer.send(Ok(RollbackResponse { results })).unwrap();

    stream.send(Ok(deliveries(["next"]))).await.unwrap();
    let (_, answer) = expect_call!(broker, Move);
    answer.send(Ok(MoveResponse { outcome: Outcome::Ok.into(), id: "next".into() })).unwrap();
    stop.cancel();
    let summary = running.await.unwrap().unwrap();
    assert_eq!((summary.forwarded, summary.rolled_back), (1, 1));
}

/// A handler learns that its item is no longer held: by the broker's event, and by the end of a lease that no one renews.
#[tokio::test]
async fn handlers_are_told_that_their_leases_are_lost() {
    let mut broker = Broker::start().await;
    let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |delivery: Delivery| {
        let told = told.clone();
        async move {
            delivery.lease_lost().await;
            told.send(delivery.receipt().to_owned()).map_err(|_| "no one listens")
        }
    };
    let stop = CancellationToken::new();
    let consumer = broker.client().consumer("q").shutdown(stop.clone());
    let running = tokio::spawn(consumer.run(handler.clone()));
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    next(&mut requests).await;
    answers.send(event(Event::Deliveries(deliveries(["a", "b"])))).await.unwrap();
    let revoked = Revoked { receipt: "b".into(), reason: RevokeReason::Deleted.into() };
    answers.send(event(Event::Revoked(revoked))).await.unwrap();
    assert_eq!(heard.recv().await.unwrap(), "b");
    assert!(heard.try_recv().is_err(), "the other one is still held");
    running.abort();
    drop((requests, answers));

    let lease = Duration::from_millis(100);
    let consumer = broker.client().consumer("q").renewal(Renewal::Off).lease(lease);
    let running = tokio::spawn(consumer.run(handler));
    let (mut requests, answers) = expect_call!(broker, ConsumeStream);
    next(&mut requests).await;
    answers.send(event(Event::Deliveries(deliveries(["c"])))).await.unwrap();
    assert_eq!(heard.recv().await.unwrap(), "c");
    running.abort();
}
