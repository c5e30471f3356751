use opentelemetry::trace::{SpanId, TraceId, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tonic_types::ErrorDetails;

use super::*;
use crate::domain::{GroupName, LeaseToken};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";
const OTHER_SPAN: &str = "00f067aa0ba902b7";

/// Traces whose spans are kept, and how to get at them.
fn kept() -> (Traces, InMemorySpanExporter) {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    (Traces::new(provider.tracer("test")), exporter)
}

fn only(exporter: &InMemorySpanExporter) -> SpanData {
    let mut spans = exporter.get_finished_spans().unwrap();
    assert_eq!(spans.len(), 1, "{spans:?}");
    spans.remove(0)
}

fn metadata(span: &str, flags: &str) -> MetadataMap {
    let mut metadata = MetadataMap::new();
    metadata.insert("traceparent", format!("00-{TRACE}-{span}-{flags}").parse().unwrap());
    metadata
}

fn headers(span: &str, flags: &str) -> Headers {
    [("traceparent".to_owned(), format!("00-{TRACE}-{span}-{flags}"))].into()
}

fn traced(span: &str) -> NewItem {
    NewItem { headers: headers(span, "01"), ..NewItem::default() }
}

fn queue(name: &str) -> QueueName {
    QueueName::parse("queue", name).unwrap()
}

fn id(number: u8) -> ItemId {
    ItemId([number; 12])
}

fn receipt(number: u8, from: &str) -> Receipt {
    Receipt {
        item: id(number),
        token: LeaseToken([0; 12]),
        deliveries: 1,
        earlier_deliveries: 0,
        attempt: 1,
        keyed: false,
        queue: queue(from),
        group: GroupName::default(),
    }
}

fn parent(span: &SpanData) -> (TraceId, SpanId) {
    (span.span_context.trace_id(), span.parent_span_id)
}

fn named(span: &str) -> (TraceId, SpanId) {
    (TraceId::from_hex(TRACE).unwrap(), SpanId::from_hex(span).unwrap())
}

fn linked(span: &SpanData) -> Vec<String> {
    span.links.iter().map(|link| link.span_context.span_id().to_string()).collect()
}

fn attributes(of: &[KeyValue]) -> Vec<String> {
    of.iter().map(|a| format!("{}={}", a.key, a.value)).collect()
}

#[test]
fn a_push_is_a_child_of_its_call() {
    let (traces, exporter) = kept();
    let call = traces.of_call(&metadata(SPAN, "01"));
    let mut items = [NewItem::default(), traced(OTHER_SPAN)];
    carry(call.as_ref(), &mut items);
    drop(traces.push(call.as_ref(), &queue("orders"), &items));
    let span = only(&exporter);
    assert_eq!((&*span.name, parent(&span)), ("push orders", named(SPAN)));
    assert!(span.parent_span_is_remote && span.span_kind == SpanKind::Server);
    assert_eq!(linked(&span), [OTHER_SPAN], "the item that has a trace of its own");
    assert_eq!(items.map(|item| item.headers), [headers(SPAN, "01"), headers(OTHER_SPAN, "01")]);
    assert_eq!(
        attributes(&span.attributes),
        [
            "messaging.system=sluicegate",
            "messaging.operation.name=push",
            "messaging.operation.type=send",
            "messaging.destination.name=orders",
            "messaging.batch.message_count=2",
        ]
    );
}

#[test]
fn a_push_whose_call_has_no_trace_is_part_of_that_of_its_items() {
    let (traces, exporter) = kept();
    let items = [NewItem::default(), traced(SPAN), traced(OTHER_SPAN), traced(SPAN)];
    drop(traces.push(None, &queue("orders"), &items));
    let span = only(&exporter);
    assert_eq!((parent(&span), linked(&span)), (named(SPAN), vec![OTHER_SPAN.to_owned()]));
}

#[test]
fn a_settle_is_a_child_of_its_call() {
    let (traces, exporter) = kept();
    let call = traces.of_call(&metadata(SPAN, "01"));
    drop(traces.settle(Operation::Commit, call.as_ref(), [&receipt(1, "orders")]));
    let span = only(&exporter);
    assert_eq!((&*span.name, parent(&span)), ("commit orders", named(SPAN)));
    let expected = [
        "messaging.system=sluicegate".to_owned(),
        "messaging.operation.name=commit".to_owned(),
        "messaging.operation.type=settle".to_owned(),
        "messaging.destination.name=orders".to_owned(),
        format!("messaging.message.id={}", id(1)),
    ];
    assert_eq!(attributes(&span.attributes), expected);
    exporter.reset();
    drop(traces.settle(
        Operation::Rollback,
        call.as_ref(),
        [&receipt(1, "orders"), &receipt(2, "mail")],
    ));
    let span = only(&exporter);
    assert_eq!(&*span.name, "rollback", "of several queues");
    let attributes = attributes(&span.attributes);
    assert!(attributes.contains(&"messaging.batch.message_count=2".to_owned()), "{attributes:?}");
    drop(traces.settle(Operation::Commit, None, [&receipt(1, "orders")]));
    assert_eq!(exporter.get_finished_spans().unwrap().len(), 1, "no trace, no span");
}

#[test]
fn a_delivery_is_linked_to_the_traces_of_its_items() {
    let (traces, exporter) = kept();
    let (none, mine, unwanted) = (Headers::new(), headers(SPAN, "01"), headers(SPAN, "00"));
    let now = SystemTime::now();
    let items = [(id(1), &none), (id(2), &mine), (id(3), &unwanted)];
    traces.delivered(Operation::Deliver, None, "orders", now, items);
    let span = only(&exporter);
    assert_eq!((&*span.name, span.start_time), ("deliver orders", now));
    assert_eq!(span.parent_span_id, SpanId::INVALID, "nobody called");
    assert_ne!(span.span_context.trace_id(), named(SPAN).0);
    let [link] = &span.links[..] else { panic!("{:?}", span.links) };
    assert_eq!((link.span_context.trace_id(), link.span_context.span_id()), named(SPAN));
    assert_eq!(attributes(&link.attributes), [format!("messaging.message.id={}", id(2))]);
    exporter.reset();
    let call = traces.of_call(&metadata(OTHER_SPAN, "01"));
    traces.delivered(Operation::Reserve, call.as_ref(), "orders", now, [(id(2), &mine)]);
    let span = only(&exporter);
    assert_eq!((parent(&span), linked(&span)), (named(OTHER_SPAN), vec![SPAN.to_owned()]));
}

#[test]
fn what_nobody_wants_has_no_span() {
    let (traces, exporter) = kept();
    let (orders, now) = (queue("orders"), SystemTime::now());
    let unwanted = traces.of_call(&metadata(SPAN, "00"));
    assert!(unwanted.is_some(), "it is passed on");
    let unwanted = unwanted.as_ref();
    let (none, off, on) = (Headers::new(), headers(SPAN, "00"), headers(SPAN, "01"));
    drop(traces.push(unwanted, &orders, &[traced(OTHER_SPAN)]));
    drop(traces.push(None, &orders, &[NewItem::default()]));
    drop(traces.settle(Operation::Commit, unwanted, [&receipt(1, "orders")]));
    traces.delivered(Operation::Reserve, unwanted, "orders", now, [(id(1), &on)]);
    traces.delivered(Operation::Deliver, None, "orders", now, [(id(1), &none), (id(2), &off)]);
    let call = traces.of_call(&metadata(SPAN, "01"));
    traces.delivered(Operation::Pop, call.as_ref(), "orders", now, []);
    assert_eq!(exporter.get_finished_spans().unwrap(), []);
}

#[test]
fn a_delivery_has_a_bounded_number_of_links() {
    let (traces, exporter) = kept();
    let all: Vec<Headers> = (1..=300).map(|n| headers(&format!("{n:016x}"), "01")).collect();
    let items = all.iter().map(|headers| (id(1), headers));
    traces.delivered(Operation::Deliver, None, "orders", SystemTime::now(), items);
    let span = only(&exporter);
    assert_eq!(span.links.len(), MAX_LINKS);
    assert_eq!(span.links.dropped_count, 0, "the library drops what is more than it keeps");
}

#[test]
fn a_failure_is_noted() {
    let (traces, exporter) = kept();
    let call = traces.of_call(&metadata(SPAN, "01"));
    let span = traces.push(call.as_ref(), &queue("orders"), &[NewItem::default()]);
    let details = ErrorDetails::with_error_info("QUEUE_FULL", "sluicegate", []);
    let full = Status::with_error_details(tonic::Code::ResourceExhausted, "it is full", details);
    assert!(span.of::<()>(Err(full)).is_err());
    let span = only(&exporter);
    assert_eq!(span.status, SpanStatus::error("it is full"));
    assert!(attributes(&span.attributes).contains(&"error.type=QUEUE_FULL".to_owned()));
}

#[test]
fn without_a_collector_no_trace_is_looked_at() {
    let traces = Traces::default();
    assert!(traces.of_call(&metadata(SPAN, "01")).is_none());
    let span = traces.push(None, &queue("orders"), &[traced(SPAN)]);
    assert!(span.0.is_none());
}
