//! Traces of OpenTelemetry (feature `opentelemetry`): items carry the trace in which they are pushed, and their handlers
//! continue it. Spans are those of the crate `tracing`, which the layer of `tracing-opentelemetry` passes on.

use std::{collections::HashMap, future::Future};

use opentelemetry::{
    Context,
    propagation::{Injector, TextMapPropagator},
    trace::{Status, TraceContextExt},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::{Instrument, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::{consumer::Decision, item::Delivery};

/// Lets an item carry the trace of the present span, unless the item carries a trace already.
pub(crate) fn carry(headers: &mut HashMap<String, String>) {
    if !headers.contains_key("traceparent") {
        TraceContextPropagator::new().inject_context(&present(), &mut Headers(headers));
    }
}

/// Runs a handler in a span of its own: a child of the span in which the item was pushed, and linked to it. An item that is
/// rolled back makes the span one of an error.
pub(crate) fn run<H, F>(
    queue: &str,
    delivery: Delivery,
    handler: &H,
) -> impl Future<Output = Decision> + use<H, F>
where
    H: Fn(Delivery) -> F,
    F: Future<Output = Decision>,
{
    let span = span_of(queue, &delivery);
    let work = span.in_scope(|| handler(delivery)).instrument(span.clone());
    async move {
        let decision = work.await;
        if let Decision::Rollback(retry) = &decision {
            span.set_status(Status::error(retry.reason.clone()));
        }
        decision
    }
}

fn span_of(queue: &str, delivery: &Delivery) -> Span {
    let span = tracing::info_span!(
        target: "sluicegate_client",
        "process",
        otel.name = format!("process {queue}"),
        otel.kind = "consumer",
        messaging.system = "sluicegate",
        messaging.operation.name = "process",
        messaging.operation.r#type = "process",
        messaging.destination.name = queue,
        messaging.message.id = delivery.id(),
    );
    let propagator = TraceContextPropagator::new();
    let pushed = propagator.extract_with_context(&Context::new(), delivery.headers());
    let context = pushed.span().span_context().clone();
    if context.is_valid() {
        // Where there is no layer, there is no span to have a parent.
        let _ = span.set_parent(pushed);
        span.add_link(context);
    }
    span
}

/// Returns the context of the present span of `tracing`, or else what is present for OpenTelemetry itself.
fn present() -> Context {
    let context = Span::current().context();
    if context.span().span_context().is_valid() { context } else { Context::current() }
}

struct Headers<'a>(&'a mut HashMap<String, String>);

impl Injector for Headers<'_> {
    fn set(&mut self, key: &str, value: String) {
        if !value.is_empty() {
            self.0.insert(key.to_owned(), value);
        }
    }
}
