//! Trace contexts of W3C (`traceparent`, `tracestate`), as calls and items carry them.

use opentelemetry::{
    Context,
    propagation::{Extractor, TextMapPropagator},
    trace::{SpanContext, TraceContextExt},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::MetadataMap;

use crate::domain::{Headers, check_header_limits};

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// A longer `tracestate` is not passed on, as W3C allows.
const MAX_TRACESTATE_BYTES: usize = 512;

/// The trace that a call is part of.
#[derive(Debug, Clone)]
pub(crate) struct CallTrace {
    pub(super) context: SpanContext,
    /// As the call carries them.
    headers: Vec<(&'static str, String)>,
}

impl CallTrace {
    /// Returns the trace that the call's metadata name, if it is a valid one.
    pub(super) fn of(metadata: &MetadataMap) -> Option<Self> {
        let context = extract(&OfCall(metadata))?;
        let text = |name| Some((name, metadata.get(name)?.to_str().ok()?.trim().to_owned()));
        let fits = |(name, value): &(&str, String)| {
            *name != TRACESTATE || (1..=MAX_TRACESTATE_BYTES).contains(&value.len())
        };
        let headers = [TRACEPARENT, TRACESTATE].into_iter().filter_map(text).filter(fits).collect();
        Some(Self { context, headers })
    }

    /// Lets an item carry the trace, unless it carries one of its own or has no room for more headers.
    pub(super) fn put_into(&self, headers: &mut Headers) {
        if headers.contains_key(TRACEPARENT) {
            return;
        }
        let own_state = headers.remove(TRACESTATE); // that of no trace
        headers
            .extend(self.headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        if check_header_limits("headers", &*headers).is_err() {
            headers.retain(|name, _| name != TRACEPARENT && name != TRACESTATE);
            headers.extend(own_state.map(|state| (TRACESTATE.to_owned(), state)));
        }
    }
}

/// Returns the trace that an item carries, if whoever began it wants its spans.
pub(super) fn of_item(headers: &Headers) -> Option<SpanContext> {
    extract(&OfItem(headers)).filter(SpanContext::is_sampled)
}

fn extract(from: &dyn Extractor) -> Option<SpanContext> {
    from.get(TRACEPARENT)?;
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), from);
    let span = context.span().span_context().clone();
    span.is_valid().then_some(span)
}

struct OfCall<'a>(&'a MetadataMap);

impl Extractor for OfCall<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT, TRACESTATE]
    }
}

struct OfItem<'a>(&'a Headers);

impl Extractor for OfItem<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT, TRACESTATE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::limits::{MAX_HEADER_BYTES, MAX_HEADERS};

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    fn metadata(entries: &[(&'static str, &str)]) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        for (name, value) in entries {
            metadata.insert(*name, value.parse().unwrap());
        }
        metadata
    }

    fn headers(entries: &[(&str, &str)]) -> Headers {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn carried(call: &[(&'static str, &str)], item: &[(&str, &str)]) -> Headers {
        let mut headers = headers(item);
        CallTrace::of(&metadata(call)).unwrap().put_into(&mut headers);
        headers
    }

    #[test]
    fn what_is_no_trace_is_none() {
        let bad = ["", "1", "00-0-0-01", &PARENT.to_uppercase(), &PARENT.replace('b', "g")];
        for bad in bad {
            assert!(CallTrace::of(&metadata(&[(TRACEPARENT, bad)])).is_none(), "{bad:?}");
            assert!(of_item(&headers(&[(TRACEPARENT, bad)])).is_none(), "{bad:?}");
        }
        assert!(CallTrace::of(&metadata(&[(TRACESTATE, "a=b")])).is_none());
        assert!(of_item(&headers(&[(TRACEPARENT, UNSAMPLED)])).is_none());
        assert!(of_item(&headers(&[(TRACEPARENT, PARENT)])).is_some());
    }

    #[test]
    fn an_item_carries_the_trace_of_its_push() {
        let call = [(TRACEPARENT, PARENT), (TRACESTATE, "a=b")];
        assert_eq!(carried(&call, &[("k", "v")]), headers(&[("k", "v"), call[0], call[1]]));
        // Whether spans are wanted is passed on too.
        assert_eq!(carried(&[(TRACEPARENT, UNSAMPLED)], &[]), headers(&[(TRACEPARENT, UNSAMPLED)]));
        let long = "a=".to_owned() + &"b".repeat(MAX_TRACESTATE_BYTES);
        let call = [(TRACEPARENT, PARENT), (TRACESTATE, &*long)];
        assert_eq!(carried(&call, &[]), headers(&[call[0]]));
    }

    #[test]
    fn an_items_own_trace_stays() {
        let own = [(TRACEPARENT, UNSAMPLED), (TRACESTATE, "c=d")];
        let call = [(TRACEPARENT, PARENT), (TRACESTATE, "a=b")];
        assert_eq!(carried(&call, &own), headers(&own));
        assert_eq!(carried(&call[..1], &own[1..]), headers(&call[..1]), "a state of no trace");
    }

    #[test]
    fn an_item_without_room_is_left_as_it_is() {
        let many: Vec<String> = (0..MAX_HEADERS).map(|n| n.to_string()).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "")).collect();
        let large = "v".repeat(MAX_HEADER_BYTES - 50);
        for full in [&many[..], &[("k", &*large), (TRACESTATE, "c=d")]] {
            assert_eq!(carried(&[(TRACEPARENT, PARENT)], full), headers(full));
        }
        let room = &many[1..];
        assert_eq!(carried(&[(TRACEPARENT, PARENT)], room).len(), MAX_HEADERS);
    }
}
