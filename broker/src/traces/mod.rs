//! Spans of pushes, deliveries and settles, for OpenTelemetry.
//!
//! [`context`] is about the traces that calls and items carry; [`crate::otlp`] sends the spans.
//!
//! The broker samples nothing by itself. A call has a span if its caller is part of a trace whose spans are wanted
//! (sampled), or if an item in it is. Calls on streams have no trace of their own: only their items count.
//! Unless `otlp_endpoint` is set there are no spans, and each call costs one check.

mod context;

use std::{sync::Arc, time::SystemTime};

use opentelemetry::{
    Context, KeyValue,
    trace::{
        Link, Span as _, SpanBuilder, SpanContext, SpanKind, Status as SpanStatus, TraceContextExt,
        Tracer,
    },
};
use opentelemetry_sdk::trace::{SdkTracer, Span as SdkSpan};
use tonic::{Status, metadata::MetadataMap};
use tonic_types::StatusExt;

use crate::domain::{Headers, ItemId, NewItem, QueueName, Receipt};

pub(crate) use context::CallTrace;

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Push, and a batch of a PushStream.
    Push,
    /// Pop.
    Pop,
    /// Reserve.
    Reserve,
    /// A message on a Consume or a ConsumeStream.
    Deliver,
    /// Commit.
    Commit,
    /// Rollback.
    Rollback,
    /// Move.
    Move,
    /// CommitAndPush.
    CommitAndPush,
}

impl Operation {
    /// Returns `messaging.operation.name`.
    fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Pop => "pop",
            Self::Reserve => "reserve",
            Self::Deliver => "deliver",
            Self::Commit => "commit",
            Self::Rollback => "rollback",
            Self::Move => "move",
            Self::CommitAndPush => "commit_and_push",
        }
    }

    /// Returns `messaging.operation.type`, one of those that the conventions know.
    fn kind(self) -> &'static str {
        match self {
            Self::Push => "send",
            Self::Pop | Self::Reserve | Self::Deliver => "receive",
            Self::Commit | Self::Rollback | Self::Move | Self::CommitAndPush => "settle",
        }
    }
}

/// Makes spans, if they are exported. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Traces(Option<Arc<SdkTracer>>);

impl Traces {
    /// Returns what makes spans with this tracer.
    #[cfg(any(feature = "otlp", test))]
    pub(crate) fn new(tracer: SdkTracer) -> Self {
        Self(Some(Arc::new(tracer)))
    }

    /// Returns the trace that a call is part of.
    pub(crate) fn of_call(&self, metadata: &MetadataMap) -> Option<CallTrace> {
        self.0.as_ref()?;
        CallTrace::of(metadata)
    }

    /// Begins the span of a push, whose items carry their traces by now. Without a trace of the call it is part of
    /// that of the first item.
    pub(crate) fn push(
        &self,
        call: Option<&CallTrace>,
        queue: &QueueName,
        items: &[NewItem],
    ) -> Span {
        let Some(tracer) = &self.0 else { return Span(None) };
        let mut contexts: Vec<SpanContext> = Vec::new();
        for context in items.iter().filter_map(|item| context::of_item(&item.headers)) {
            if contexts.len() > MAX_LINKS {
                break; // the parent and as many links as there may be
            }
            if !contexts.contains(&context) {
                contexts.push(context);
            }
        }
        let parent = call.map(|call| &call.context).or(contexts.first()).cloned();
        let Some(parent) = parent.filter(SpanContext::is_sampled) else { return Span(None) };
        contexts.retain(|context| *context != parent);
        let links = contexts.into_iter().map(Link::with_context).collect();
        let span = builder(Operation::Push, Some(queue.as_str()), items.len(), None)
            .with_kind(SpanKind::Server)
            .with_links(links);
        begin(tracer, span, Some(parent))
    }

    /// Begins the span of a settle, if its call is part of a trace.
    pub(crate) fn settle<'a>(
        &self,
        operation: Operation,
        call: Option<&CallTrace>,
        receipts: impl IntoIterator<Item = &'a Receipt>,
    ) -> Span {
        let sampled = call.filter(|call| call.context.is_sampled());
        let (Some(tracer), Some(call)) = (&self.0, sampled) else { return Span(None) };
        let receipts: Vec<&Receipt> = receipts.into_iter().collect();
        let first = receipts.first().map(|receipt| receipt.queue.as_str());
        let queue =
            first.filter(|queue| receipts.iter().all(|other| other.queue.as_str() == *queue));
        let only = receipts.first().filter(|_| receipts.len() == 1).map(|receipt| receipt.item);
        let span = builder(operation, queue, receipts.len(), only).with_kind(SpanKind::Server);
        begin(tracer, span, Some(call.context.clone()))
    }

    /// Makes the span of a delivery that began at `started` and is on its way to the consumer. The span is part of the
    /// trace of the call, or else of a new one, and linked to the trace that each item carries.
    pub(crate) fn delivered<'a>(
        &self,
        operation: Operation,
        call: Option<&CallTrace>,
        queue: &str,
        started: SystemTime,
        items: impl IntoIterator<Item = (ItemId, &'a Headers)>,
    ) {
        let Some(tracer) = &self.0 else { return };
        if call.is_some_and(|call| !call.context.is_sampled()) {
            return;
        }
        let (mut count, mut links, mut only) = (0, Vec::new(), None);
        for (id, headers) in items {
            count += 1;
            only = (count == 1).then_some(id);
            if links.len() < MAX_LINKS
                && let Some(context) = context::of_item(headers)
            {
                links.push(Link::new(context, vec![message_id(id)], 0));
            }
        }
        if count == 0 || (links.is_empty() && call.is_none()) {
            return;
        }
        let kind = match operation {
            Operation::Deliver => SpanKind::Producer, // nobody called
            _ => SpanKind::Server,
        };
        let span = builder(operation, Some(queue), count, only)
            .with_kind(kind)
            .with_start_time(started)
            .with_links(links);
        drop(begin(tracer, span, call.map(|call| call.context.clone())));
    }
}

/// Lets items that are pushed carry the trace of their call, unless they carry one of their own.
pub(crate) fn carry<'a>(
    call: Option<&CallTrace>,
    items: impl IntoIterator<Item = &'a mut NewItem>,
) {
    let Some(call) = call else { return };
    for item in items {
        call.put_into(&mut item.headers);
    }
}

/// Most links of one span: as many as the library keeps.
const MAX_LINKS: usize = 128;

fn message_id(id: ItemId) -> KeyValue {
    KeyValue::new("messaging.message.id", id.to_string())
}

/// Returns a span by the conventions for messaging, about one item or a number of them.
fn builder(
    operation: Operation,
    queue: Option<&str>,
    items: usize,
    only: Option<ItemId>,
) -> SpanBuilder {
    let name = match queue {
        Some(queue) => format!("{} {queue}", operation.name()),
        None => operation.name().to_owned(),
    };
    let mut attributes = vec![
        KeyValue::new("messaging.system", "sluicegate"),
        KeyValue::new("messaging.operation.name", operation.name()),
        KeyValue::new("messaging.operation.type", operation.kind()),
    ];
    attributes
        .extend(queue.map(|queue| KeyValue::new("messaging.destination.name", queue.to_string())));
    if items > 1 {
        attributes.push(KeyValue::new("messaging.batch.message_count", items as i64));
    }
    attributes.extend(only.map(message_id));
    SpanBuilder::from_name(name).with_attributes(attributes)
}

fn begin(tracer: &SdkTracer, span: SpanBuilder, parent: Option<SpanContext>) -> Span {
    // Not the context of this thread, which knows nothing of the call.
    let context = match parent {
        Some(parent) => Context::new().with_remote_span_context(parent),
        None => Context::new(),
    };
    Span(Some(tracer.build_with_context(span, &context)))
}

/// A span of a call, or none. It ends when it is dropped.
#[must_use = "the span ends at once"]
pub(crate) struct Span(Option<SdkSpan>);

impl Span {
    /// Ends the span with the outcome of its call, which is returned.
    pub(crate) fn of<T>(self, outcome: Result<T, Status>) -> Result<T, Status> {
        outcome.map_err(|status| self.failed(status))
    }

    /// Ends the span of a call that failed with this status, which is returned.
    pub(crate) fn failed(mut self, status: Status) -> Status {
        if let Some(span) = &mut self.0 {
            span.set_status(SpanStatus::error(status.message().to_owned()));
            let reason = status.get_details_error_info().map(|info| info.reason);
            span.set_attribute(KeyValue::new("error.type", reason.unwrap_or_default()));
        }
        status
    }
}

#[cfg(test)]
mod tests;
