//! Pushes over connections that break.

use std::{net::TcpListener, time::Duration};

use sluicegate_client::{
    Backoff, Client, Error, NewItem,
    producer::StreamOptions,
    proto::{PushResponse, PushStreamResponse},
    tonic::{Code, Status},
};

use crate::broker::{Broker, expect_call, next, pushed};

#[tokio::test]
async fn a_push_with_dedup_ids_is_repeated_with_the_same_ids() {
    let mut broker = Broker::start().await;
    let producer = broker.client().producer("q").with_auto_dedup();
    let pushing = tokio::spawn(async move { producer.push("a").await });
    let (first, answer) = expect_call!(broker, Push);
    answer.send(Err(Status::unavailable("the answer is lost"))).unwrap();
    let (second, answer) = expect_call!(broker, Push);
    assert_eq!(first, second);
    answer.send(Ok(PushResponse { results: pushed(&second.items) })).unwrap();
    assert_eq!(pushing.await.unwrap().unwrap().id, "a");
}

#[tokio::test]
async fn a_push_that_could_be_done_twice_is_not_repeated() {
    let mut broker = Broker::start().await;
    let producer = broker.client().producer("q");
    let pushing = tokio::spawn(async move { producer.push("once").await });
    let (_, answer) = expect_call!(broker, Push);
    answer.send(Err(Status::unavailable("the store is lost"))).unwrap();
    let error = pushing.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
}

#[tokio::test]
async fn a_push_that_reached_nobody_is_repeated_until_it_does() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap(); // closed again
    let backoff = Backoff {
        initial: Duration::from_millis(1),
        max: Duration::from_millis(1),
        ..Backoff::default()
    };
    let builder = Client::builder(format!("http://{nobody}"));
    let producer = builder.clone().connect_lazy().unwrap().producer("q").backoff(backoff.clone());
    let impatient = producer.clone().backoff(Backoff { give_up_after: Duration::ZERO, ..backoff });
    let error = impatient.push("once").await.unwrap_err();
    assert!(matches!(error, Error::Status(_)) && error.is_unavailable(), "{error:?}");

    let pushing = tokio::spawn(async move { producer.push("once").await });
    let mut broker = Broker::start_at(nobody).await;
    let (request, answer) = expect_call!(broker, Push);
    answer.send(Ok(PushResponse { results: pushed(&request.items) })).unwrap();
    assert_eq!(pushing.await.unwrap().unwrap().id, "once");
}

/// The first try may have stored the item: a refusal of the second one does not say that nothing was stored.
#[tokio::test]
async fn a_refusal_of_a_repeated_push_leaves_its_outcome_unknown() {
    let mut broker = Broker::start().await;
    let producer = broker.client().producer("q").with_auto_dedup();
    let pushing = tokio::spawn(async move { producer.push("a").await });
    let (_, answer) = expect_call!(broker, Push);
    answer.send(Err(Status::unavailable("the answer is lost"))).unwrap();
    let (_, answer) = expect_call!(broker, Push);
    answer.send(Err(Status::resource_exhausted("queue is full"))).unwrap();
    let error = pushing.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
    assert_eq!(error.code(), Some(Code::ResourceExhausted));

    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let ticket = stream.send([NewItem::new("a").dedup_id("d")]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    next(&mut requests).await;
    answers.send(Err(Status::unavailable("going down"))).await.unwrap();
    drop((requests, answers));
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let batch_id = next(&mut requests).await.batch_id;
    let code = Code::ResourceExhausted as i32;
    let refusal = tonic_types::Status { code, message: "full".into(), details: Vec::new() };
    let answer = PushStreamResponse { batch_id, error: Some(refusal), ..Default::default() };
    answers.send(Ok(answer)).await.unwrap();
    let error = ticket.await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
}

#[tokio::test]
async fn a_refusal_returns_the_results_before_it() {
    let mut broker = Broker::start().await;
    let producer = broker.client().producer("q");
    let items = (0..1_500).map(|n| NewItem::new(n.to_string()));
    let pushing = tokio::spawn(async move { producer.push_all(items).await });
    let (first, answer) = expect_call!(broker, Push);
    answer.send(Ok(PushResponse { results: pushed(&first.items) })).unwrap();
    let (_, answer) = expect_call!(broker, Push);
    answer.send(Err(Status::resource_exhausted("queue is full"))).unwrap();
    let error = pushing.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Some(Code::ResourceExhausted));
    let Error::PartlyPushed { results, .. } = error else { panic!("{error:?}") };
    assert_eq!(results.len(), 1_000);
}

#[tokio::test]
async fn many_batches_are_in_flight_and_answers_find_theirs() {
    let mut broker = Broker::start().await;
    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let first = stream.send(["a"]).await.unwrap();
    let second = stream.send(["b"]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let batches = [next(&mut requests).await, next(&mut requests).await];
    for batch in batches.iter().rev() {
        let results = pushed(&batch.items);
        answers
            .send(Ok(PushStreamResponse {
                batch_id: batch.batch_id,
                results,
                ..Default::default()
            }))
            .await
            .unwrap();
    }
    assert_eq!(first.await.unwrap()[0].id, "a");
    assert_eq!(second.await.unwrap()[0].id, "b");
    stream.close().await.unwrap();
}

#[tokio::test]
async fn a_failed_batch_leaves_the_others_alone() {
    let mut broker = Broker::start().await;
    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let bad = stream.send(["bad"]).await.unwrap();
    let good = stream.send(["good"]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let id = next(&mut requests).await.batch_id;
    let code = Code::InvalidArgument as i32;
    let status = tonic_types::Status { code, message: "too large".into(), details: Vec::new() };
    answers
        .send(Ok(PushStreamResponse { batch_id: id, error: Some(status), ..Default::default() }))
        .await
        .unwrap();
    let batch = next(&mut requests).await;
    let results = pushed(&batch.items);
    answers
        .send(Ok(PushStreamResponse { batch_id: batch.batch_id, results, ..Default::default() }))
        .await
        .unwrap();
    assert_eq!(bad.await.unwrap_err().code(), Some(Code::InvalidArgument));
    assert_eq!(good.await.unwrap()[0].id, "good");
}

#[tokio::test]
async fn after_a_break_only_repeatable_batches_are_sent_again() {
    let mut broker = Broker::start().await;
    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let unsafe_ticket = stream.send([NewItem::new("once")]).await.unwrap();
    let safe_ticket = stream.send([NewItem::new("twice").dedup_id("d")]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    next(&mut requests).await;
    let lost = next(&mut requests).await;
    answers.send(Err(Status::unavailable("going down"))).await.unwrap();
    drop((requests, answers));

    let error = unsafe_ticket.await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let again = next(&mut requests).await;
    assert_eq!(again, lost);
    let results = pushed(&again.items);
    answers
        .send(Ok(PushStreamResponse { batch_id: again.batch_id, results, ..Default::default() }))
        .await
        .unwrap();
    assert_eq!(safe_ticket.await.unwrap()[0].id, "twice");
    stream.close().await.unwrap();
}

/// Whatever ends a stream once it is open, the broker may have stored what was sent on it; what it refuses to open has stored nothing.
#[tokio::test]
async fn a_batch_is_refused_only_if_no_broker_has_seen_it() {
    let mut broker = Broker::start().await;
    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let ticket = stream.send([NewItem::new("a").dedup_id("d")]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    next(&mut requests).await;
    answers.send(Err(Status::unauthenticated("the token has ended"))).await.unwrap();
    let error = ticket.await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
    assert_eq!(error.code(), Some(Code::Unauthenticated));

    let stream = broker.client().producer("q").stream(StreamOptions::default());
    broker.refuse_stream(Status::unauthenticated("the token has ended"));
    let error = stream.send(["a"]).await.unwrap().await.unwrap_err();
    assert!(matches!(error, Error::Status(_)), "{error:?}");
    assert_eq!(error.code(), Some(Code::Unauthenticated));
}

#[tokio::test]
async fn a_batch_that_is_larger_than_may_be_sent_fails_alone() {
    let mut broker = Broker::start().await;
    let client = broker.builder().max_send_bytes(1_000).connect_lazy().unwrap();
    let stream = client.producer("q").stream(StreamOptions::default());
    let before = stream.send(["before"]).await.unwrap();
    let large = stream.send([NewItem::new(vec![0_u8; 2_000])]).await.unwrap();
    let after = stream.send(["after"]).await.unwrap();
    let error = large.await.unwrap_err();
    assert!(matches!(error, Error::Status(_)), "{error:?}");
    assert_eq!(error.code(), Some(Code::OutOfRange));
    let (mut requests, answers) = expect_call!(broker, PushStream);
    for ticket in [before, after] {
        let batch = next(&mut requests).await;
        let results = pushed(&batch.items);
        let answer = PushStreamResponse { batch_id: batch.batch_id, results, ..Default::default() };
        answers.send(Ok(answer)).await.unwrap();
        assert_eq!(ticket.await.unwrap()[0].id, batch.items[0].payload);
    }
}

#[tokio::test]
async fn sending_waits_while_the_window_is_full() {
    let mut broker = Broker::start().await;
    let options = StreamOptions { max_in_flight: 1, ..StreamOptions::default() };
    let stream = broker.client().producer("q").stream(options);
    let first = stream.send(["a"]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let batch = next(&mut requests).await;
    {
        let sending = stream.send(["b"]);
        tokio::pin!(sending);
        assert!(futures_util::poll!(&mut sending).is_pending());
        let results = pushed(&batch.items);
        answers
            .send(Ok(PushStreamResponse {
                batch_id: batch.batch_id,
                results,
                ..Default::default()
            }))
            .await
            .unwrap();
        first.await.unwrap();
        let _second = sending.await.unwrap();
    }
    assert_eq!(next(&mut requests).await.items[0].payload, "b");
}

/// Batches in flight are answered on the old stream, and later ones use the next: no outcome is unknown, even without
/// deduplication ids.
#[tokio::test]
async fn a_stream_that_the_broker_finds_too_old_is_replaced() {
    let mut broker = Broker::start().await;
    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let first = stream.send(["a"]).await.unwrap();
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let batch = next(&mut requests).await;
    answers.send(Ok(PushStreamResponse { closing: true, ..Default::default() })).await.unwrap();
    assert!(requests.message().await.unwrap().is_none(), "no more is sent on it");
    let second = stream.send(["b"]).await.unwrap();
    let results = pushed(&batch.items);
    let answer = PushStreamResponse { batch_id: batch.batch_id, results, ..Default::default() };
    answers.send(Ok(answer)).await.unwrap();
    drop(answers);
    assert_eq!(first.await.unwrap()[0].id, "a");
    let (mut requests, answers) = expect_call!(broker, PushStream);
    let batch = next(&mut requests).await;
    let results = pushed(&batch.items);
    let answer = PushStreamResponse { batch_id: batch.batch_id, results, ..Default::default() };
    answers.send(Ok(answer)).await.unwrap();
    assert_eq!(second.await.unwrap()[0].id, "b");
    stream.close().await.unwrap();
}
