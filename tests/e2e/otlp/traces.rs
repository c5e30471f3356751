//! Spans that brokers send to a collector, and the traces that items carry.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use sluicegate_proto::v1::{
    CommitRequest, ConsumeRequest, NewItem, PopRequest, PushRequest, PushStreamRequest, Queue,
    ReserveRequest,
};
use tokio::{net::TcpListener, process::Command};
use tonic::Request;

use super::{
    collector::{Collector, attributes, hex},
    lines, sending,
};
use crate::harness::{
    Api, Backend, LIMIT, binary, duration, new_item, on_both_backends, until, within,
};

on_both_backends!(
    a_trace_leads_from_the_push_to_the_delivery_and_its_settle,
    a_stream_is_linked_to_the_traces_of_its_items,
);

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CONSUMERS_TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "00f067aa0ba902b7";
const CONSUMER: &str = "b7ad6b7169203331";

fn traceparent(trace: &str, span: &str) -> String {
    format!("00-{trace}-{span}-01")
}

/// A call that is part of a trace.
fn traced<T>(message: T, trace: &str, span: &str) -> Request<T> {
    let mut request = Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert("traceparent", traceparent(trace, span).parse().expect("metadata"));
    metadata.insert("tracestate", "shop=7".parse().expect("metadata"));
    request
}

fn push(items: Vec<NewItem>) -> PushRequest {
    PushRequest { queue: "orders".to_owned(), items, ..PushRequest::default() }
}

/// An item that carries a trace by itself.
fn traced_item(payload: &str, span: &str) -> NewItem {
    let headers = [("traceparent".to_owned(), traceparent(TRACE, span))].into();
    NewItem { headers, ..new_item(payload) }
}

/// Asserts what the conventions for messaging say about a span.
fn assert_about_orders(span: &Span, operation: &str, kind: &str) {
    let attributes = attributes(&span.attributes);
    let expected: HashMap<String, String> = [
        ("messaging.system", "sluicegate"),
        ("messaging.destination.name", "orders"),
        ("messaging.operation.name", operation),
        ("messaging.operation.type", kind),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    for (key, value) in expected {
        assert_eq!(attributes.get(&key), Some(&value), "{attributes:?}");
    }
    assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
}

fn parent(span: &Span) -> (String, String) {
    (hex(&span.trace_id), hex(&span.parent_span_id))
}

fn links(span: &Span) -> Vec<(String, String)> {
    span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect()
}

fn named(trace: &str, span: &str) -> (String, String) {
    (trace.to_owned(), span.to_owned())
}

async fn a_trace_leads_from_the_push_to_the_delivery_and_its_settle(backend: Backend) {
    let (store, collector) = (backend.store(), Collector::grpc().await);
    let broker = sending(store.launch(), &collector).start().await;
    let api = broker.api().await;
    let request = traced(push(vec![new_item("a")]), TRACE, PRODUCER);
    api.queue.clone().push(request).await.expect("an answered push");
    let (sender, span) = collector.span("push orders").await;
    assert_eq!(sender["service.name"], "sluicegate");
    assert!(!sender["service.instance.id"].is_empty());
    assert_eq!((parent(&span), span.kind()), (named(TRACE, PRODUCER), SpanKind::Server));
    assert_about_orders(&span, "push", "send");

    let request = ReserveRequest {
        queue: "orders".to_owned(),
        wait: duration(LIMIT),
        ..ReserveRequest::default()
    };
    let request = traced(request, CONSUMERS_TRACE, CONSUMER);
    let reserved = api.queue.clone().reserve(request).await.expect("an answer").into_inner();
    let delivery = &reserved.deliveries[0];
    let item = delivery.item.as_ref().expect("an item");
    assert_eq!(item.headers["traceparent"], traceparent(TRACE, PRODUCER));
    assert_eq!(item.headers["tracestate"], "shop=7");
    let (_, span) = collector.span("reserve orders").await;
    assert_eq!(parent(&span), named(CONSUMERS_TRACE, CONSUMER));
    assert_eq!(links(&span), [named(TRACE, PRODUCER)], "linked to who pushed the item");
    assert_eq!(attributes(&span.links[0].attributes)["messaging.message.id"], item.id);
    assert_about_orders(&span, "reserve", "receive");

    let request = CommitRequest { receipts: vec![delivery.receipt.clone()] };
    let request = traced(request, CONSUMERS_TRACE, CONSUMER);
    api.queue.clone().commit(request).await.expect("an answered commit");
    let (_, span) = collector.span("commit orders").await;
    assert_eq!(parent(&span), named(CONSUMERS_TRACE, CONSUMER));
    assert_eq!(attributes(&span.attributes)["messaging.message.id"], item.id);
    assert_about_orders(&span, "commit", "settle");
    broker.stop().await;
}

async fn a_stream_is_linked_to_the_traces_of_its_items(backend: Backend) {
    let (store, collector) = (backend.store(), Collector::grpc().await);
    let broker = sending(store.launch(), &collector).start().await;
    let api = broker.api().await;
    let batch = PushStreamRequest {
        queue: "orders".to_owned(),
        items: vec![traced_item("a", PRODUCER), new_item("b")],
        ..PushStreamRequest::default()
    };
    let stream = api.queue.clone().push_stream(tokio_stream::iter([batch])).await;
    let mut answers = stream.expect("a stream").into_inner();
    within("an answer", answers.message()).await.expect("no error").expect("an answer");
    let (_, span) = collector.span("push orders").await;
    assert_eq!(parent(&span), named(TRACE, PRODUCER), "without a trace of the call");
    assert_eq!(attributes(&span.attributes)["messaging.batch.message_count"], "2");

    let request = ConsumeRequest { queue: "orders".to_owned(), ..ConsumeRequest::default() };
    let mut stream = api.queue.clone().consume(request).await.expect("a stream").into_inner();
    within("a delivery", stream.message()).await.expect("no error").expect("deliveries");
    let (_, span) = collector.span("deliver orders").await;
    assert_eq!(links(&span), [named(TRACE, PRODUCER)]);
    assert_eq!(hex(&span.parent_span_id), "", "the beginning of a trace");
    assert_ne!(hex(&span.trace_id), TRACE);
    assert_about_orders(&span, "deliver", "receive");
    drop(stream);
    broker.stop().await;
}

/// The example of the client library, with spans of its own: producer, broker and handler are in one trace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_goes_from_a_producer_through_the_broker_to_the_handler() {
    let (store, collector) = (Backend::Sqlite.store(), Collector::grpc().await);
    let broker = sending(store.launch(), &collector).start().await;
    let example = Command::new(binary("examples/traced"))
        .env("SLUICE_SERVER", &broker.address)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())
        .kill_on_drop(true)
        .output();
    let said = within("the example", example).await.expect("a program that starts");
    assert!(said.status.success(), "{said:?}");
    assert_eq!(String::from_utf8_lossy(&said.stdout), "two pounds of apples\n");
    let (sender, order) = collector.span("order").await;
    assert_eq!(sender["service.name"], "print-shop");
    let in_order = named(&hex(&order.trace_id), &hex(&order.span_id));
    let (sender, push) = collector.span("push orders").await;
    assert_eq!((sender["service.name"].as_str(), parent(&push)), ("sluicegate", in_order.clone()));
    let (_, deliver) = collector.span("deliver orders").await;
    assert_eq!(links(&deliver), std::slice::from_ref(&in_order));
    let (_, process) = collector.span("process orders").await;
    assert_eq!((parent(&process), links(&process)), (in_order.clone(), vec![in_order]));
    assert_about_orders(&process, "process", "process");
    let (_, print) = collector.span("print").await;
    assert_eq!(parent(&print), named(&hex(&order.trace_id), &hex(&process.span_id)));
    broker.stop().await;
}

/// Spans that nobody has taken when the broker is told to stop are sent before it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_go_over_http_and_none_is_left_at_the_end() {
    let (store, collector) = (Backend::Sqlite.store(), Collector::http().await);
    let launch = sending(store.launch(), &collector).flag("otlp-protocol", "http");
    let broker = launch.start().await;
    let api = broker.api().await;
    for _ in 0..3 {
        let request = traced(push(vec![new_item("a")]), TRACE, PRODUCER);
        api.queue.clone().push(request).await.expect("an answered push");
    }
    drop(api);
    broker.stop().await;
    let spans = collector.all();
    assert_eq!(spans.len(), 3, "{spans:?}");
    assert!(spans.iter().all(|(_, span)| parent(span) == named(TRACE, PRODUCER)), "{spans:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_sampled_has_no_span_and_what_fails_says_why() {
    let (store, collector) = (Backend::Sqlite.store(), Collector::grpc().await);
    let broker = sending(store.launch(), &collector).start().await;
    let api = broker.api().await;
    let unwanted = format!("00-{TRACE}-{PRODUCER}-00");
    let mut request = Request::new(push(vec![new_item("a")]));
    request.metadata_mut().insert("traceparent", unwanted.parse().expect("metadata"));
    api.queue.clone().push(request).await.expect("an answered push");
    let request = PopRequest { queue: "orders".to_owned(), max_items: 1, wait: duration(LIMIT) };
    let popped = api.queue.clone().pop(request).await.expect("an answer").into_inner().items;
    assert_eq!(popped[0].headers["traceparent"], unwanted, "it is passed on all the same");

    let small = Queue { name: "small".to_owned(), max_depth: 1, ..Queue::default() };
    api.create(small).await;
    let request = PushRequest { queue: "small".to_owned(), ..push(vec![new_item("a"); 2]) };
    let refused = api.queue.clone().push(traced(request, TRACE, PRODUCER)).await;
    refused.expect_err("more than fits");
    let (_, span) = collector.span("push small").await;
    assert_eq!(span.status.as_ref().expect("a status").code(), StatusCode::Error);
    assert_eq!(attributes(&span.attributes)["error.type"], "QUEUE_FULL");
    broker.stop().await;
    let names: Vec<String> = collector.all().into_iter().map(|(_, span)| span.name).collect();
    assert_eq!(names, ["push small"], "spans are sent in order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_collector_items_stay_as_they_were_pushed() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let request = traced(push(vec![new_item("a")]), TRACE, PRODUCER);
    api.queue.clone().push(request).await.expect("an answered push");
    let reserved = api.reserve_one("orders", LIMIT).await;
    assert_eq!(reserved.item.expect("an item").headers, HashMap::new());
    broker.stop().await;
}

async fn push_a_hundred(api: &Api) {
    for _ in 0..100 {
        let request = traced(push(vec![new_item("a")]), TRACE, PRODUCER);
        within("a push", api.queue.clone().push(request)).await.expect("an answered push");
    }
}

const NOT_SENT: &str = "spans cannot be sent";
const METRICS_NOT_SENT: &str = "metrics cannot be sent";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_holds_nothing_up() {
    let store = Backend::Sqlite.store();
    let launch = store.launch().flag("otlp-endpoint", "http://127.0.0.1:9");
    let broker = launch.start().await;
    push_a_hundred(&broker.api().await).await;
    for said in [NOT_SENT, METRICS_NOT_SENT] {
        until(said, || async { (lines(&broker.log(), said) > 0).then_some(()) }).await;
    }
    push_a_hundred(&broker.api().await).await;
    broker.terminate();
    let ended = broker.ended().await;
    assert!(ended.status.success(), "{}", ended.log);
    assert_eq!(lines(&ended.log, NOT_SENT), 1, "at most one line a minute: {}", ended.log);
    assert_eq!(lines(&ended.log, METRICS_NOT_SENT), 1, "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_does_not_answer_holds_nothing_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", silent.local_addr().expect("its address"));
    for protocol in ["grpc", "http"] {
        let store = Backend::Sqlite.store();
        let launch = store.launch().flag("otlp-endpoint", &endpoint);
        let broker = launch.flag("otlp-protocol", protocol).start().await;
        push_a_hundred(&broker.api().await).await;
        let stopped = Instant::now();
        broker.terminate();
        let ended = broker.ended().await;
        assert!(ended.status.success(), "{}", ended.log);
        // shutdown_grace is 10 s, of which spans and metrics get two.
        assert_eq!(
            lines(&ended.log, "the last metrics may not have been sent"),
            1,
            "{}",
            ended.log
        );
        assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
    }
}
