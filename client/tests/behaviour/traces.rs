//! Traces of OpenTelemetry: what items carry, and the spans of handlers.

use std::collections::HashMap;

use opentelemetry::trace::{SpanKind, Status, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use sluicegate_client::{
    NewItem, Next, Retry, Station,
    producer::StreamOptions,
    proto::{
        CommitAndPushResponse, CommitResponse, ConsumeResponse, Outcome, PushResponse,
        RollbackResponse,
    },
};
use tracing::{Instrument, info_span, subscriber::DefaultGuard};
use tracing_subscriber::layer::SubscriberExt;

use crate::broker::{Broker, deliveries, delivery, expect_call, next, pushed, settled};

/// Keeps the spans of this thread, on which all of a test runs.
fn kept() -> (InMemorySpanExporter, DefaultGuard) {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
    (exporter, guard)
}

fn span(exporter: &InMemorySpanExporter, name: &str) -> SpanData {
    let mut spans = exporter.get_finished_spans().unwrap();
    spans.retain(|span| span.name == name);
    assert_eq!(spans.len(), 1, "{name}: {spans:?}");
    spans.remove(0)
}

/// Returns the header by which an item names this span.
fn traceparent(span: &SpanData) -> String {
    format!("00-{}-{}-01", span.span_context.trace_id(), span.span_context.span_id())
}

fn assert_child(child: &SpanData, parent: &SpanData) {
    assert_eq!(child.span_context.trace_id(), parent.span_context.trace_id());
    assert_eq!(child.parent_span_id, parent.span_context.span_id());
}

#[tokio::test]
async fn items_carry_the_trace_in_which_they_are_pushed() {
    let (exporter, _guard) = kept();
    let mut broker = Broker::start().await;
    let producer = broker.client().producer("q");
    let own = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    let items = [NewItem::new("a"), NewItem::new("b").header(own.0, own.1)];
    let push = async move { producer.push_all(items).await };
    let pushing = tokio::spawn(push.instrument(info_span!("order")));
    let (request, answer) = expect_call!(broker, Push);
    answer.send(Ok(PushResponse { results: pushed(&request.items) })).unwrap();
    pushing.await.unwrap().unwrap();
    let carried: Vec<&String> =
        request.items.iter().map(|item| &item.headers["traceparent"]).collect();
    assert_eq!(carried, [&traceparent(&span(&exporter, "order")), own.1]);

    let stream = broker.client().producer("q").stream(StreamOptions::default());
    let ticket = stream.send(["c"]).instrument(info_span!("later")).await.unwrap();
    let (mut batches, _answers) = expect_call!(broker, PushStream);
    let batch = next(&mut batches).await;
    let later = traceparent(&span(&exporter, "later"));
    assert_eq!(batch.items[0].headers, HashMap::from([("traceparent".to_owned(), later)]));
    drop(ticket);

    let producer = broker.client().producer("q");
    let pushing = tokio::spawn(async move { producer.push("outside of any span").await });
    let (request, answer) = expect_call!(broker, Push);
    assert_eq!(request.items[0].headers, HashMap::new());
    answer.send(Ok(PushResponse { results: pushed(&request.items) })).unwrap();
    pushing.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_handler_continues_the_trace_of_its_item() {
    let (exporter, _guard) = kept();
    let mut broker = Broker::start().await;
    info_span!("order").in_scope(|| ());
    let order = span(&exporter, "order");
    let traced = |name: &str| {
        let mut delivery = delivery(name);
        let headers = [("traceparent".to_owned(), traceparent(&order))].into();
        delivery.item.as_mut().unwrap().headers = headers;
        delivery
    };
    let consumer = broker.client().consumer("q").unary().concurrency(1).limit(3);
    let running = tokio::spawn(consumer.run(|delivery| async move {
        let text = delivery.text()?.to_owned();
        info_span!("print", text).in_scope(|| ());
        if text == "fails" { Err(Retry::new("no paper")) } else { Ok(()) }
    }));
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(ConsumeResponse { deliveries: vec![traced("works")] })).await.unwrap();
    let (request, answer) = expect_call!(broker, Commit);
    let results = settled(&request.receipts, Outcome::Ok);
    answer.send(Ok(CommitResponse { results })).unwrap();
    let process = span(&exporter, "process q");
    assert_child(&process, &order);
    assert_eq!(process.span_kind, SpanKind::Consumer);
    assert!(process.parent_span_is_remote && process.status == Status::Unset);
    let links: Vec<_> = process.links.iter().map(|link| link.span_context.span_id()).collect();
    assert_eq!(links, [order.span_context.span_id()]);
    let attributes: HashMap<String, String> =
        process.attributes.iter().map(|a| (a.key.to_string(), a.value.to_string())).collect();
    for (key, value) in [
        ("messaging.system", "sluicegate"),
        ("messaging.operation.name", "process"),
        ("messaging.operation.type", "process"),
        ("messaging.destination.name", "q"),
        ("messaging.message.id", "works"),
    ] {
        assert_eq!(attributes.get(key).map(String::as_str), Some(value), "{attributes:?}");
    }
    assert_child(&span(&exporter, "print"), &process);

    exporter.reset();
    stream.send(Ok(ConsumeResponse { deliveries: vec![traced("fails")] })).await.unwrap();
    let (request, answer) = expect_call!(broker, Rollback);
    let results = settled(request.items.iter().map(|item| &item.receipt), Outcome::Ok);
    answer.send(Ok(RollbackResponse { results })).unwrap();
    assert_eq!(span(&exporter, "process q").status, Status::error("no paper"));

    exporter.reset();
    stream.send(Ok(ConsumeResponse { deliveries: vec![delivery("untraced")] })).await.unwrap();
    let (request, answer) = expect_call!(broker, Commit);
    let results = settled(&request.receipts, Outcome::Ok);
    answer.send(Ok(CommitResponse { results })).unwrap();
    running.await.unwrap().unwrap();
    let process = span(&exporter, "process q");
    assert_ne!(process.span_context.trace_id(), order.span_context.trace_id());
    assert!(process.links.is_empty(), "a trace of its own");
}

#[tokio::test]
async fn what_a_station_pushes_carries_its_trace_on() {
    let (exporter, _guard) = kept();
    let mut broker = Broker::start().await;
    let station = Station::from_consumer(broker.client().consumer("q").unary().limit(1));
    let running = tokio::spawn(station.run(|_| async move {
        Ok::<_, Retry>(Next::fork([("next", NewItem::new("made of it"))]))
    }));
    let (_, stream) = expect_call!(broker, Consume);
    stream.send(Ok(deliveries(["a"]))).await.unwrap();
    let (request, answer) = expect_call!(broker, CommitAndPush);
    let item = request.pushes[0].item.clone().unwrap();
    let done = CommitAndPushResponse { outcome: Outcome::Ok.into(), ..Default::default() };
    answer.send(Ok(done)).unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(item.headers["traceparent"], traceparent(&span(&exporter, "process q")));
}
