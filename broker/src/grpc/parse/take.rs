//! Requests of consumers for items.

use std::time::Duration;

use sluicegate_proto::v1 as pb;

use super::{Rules, count, duration, duration_or_zero, not_negative};
use crate::{
    domain::{
        ConsumerName, Invalid, QueueName,
        limits::{MAX_BATCH, MAX_IN_FLIGHT, MAX_WAIT, MIN_LEASE},
    },
    engine::{ConsumeOptions, OnDisconnect},
};

/// The `max_in_flight` if none is given.
const DEFAULT_IN_FLIGHT: usize = 32;

/// The fields that Pop and Reserve share.
#[derive(Debug, PartialEq)]
pub(in crate::grpc) struct Take {
    pub(in crate::grpc) queue: QueueName,
    pub(in crate::grpc) max_items: usize,
    pub(in crate::grpc) wait: Duration,
}

/// Parses the queue, the number of items, and how long to wait.
pub(in crate::grpc) fn take(
    queue: &str,
    max_items: i32,
    wait: Option<prost_types::Duration>,
) -> Result<Take, Invalid> {
    Ok(Take {
        queue: QueueName::parse("queue", queue)?,
        max_items: count("max_items", max_items, 1, MAX_BATCH)?,
        wait: duration_or_zero("wait", wait, MAX_WAIT)?,
    })
}

/// Parses a lease that may be left out.
pub(in crate::grpc) fn lease(
    field: &str,
    value: Option<prost_types::Duration>,
    rules: &Rules,
) -> Result<Option<Duration>, Invalid> {
    let lease = value.map(|value| duration(field, value, rules.max_lease)).transpose()?;
    if lease.is_some_and(|lease| lease < MIN_LEASE) {
        return Err(Invalid::new(field, format!("must be at least {MIN_LEASE:?}")));
    }
    Ok(lease)
}

/// Parses the name that a consumer may give itself.
pub(in crate::grpc) fn consumer(name: &str) -> Result<Option<ConsumerName>, Invalid> {
    ConsumerName::parse_optional("consumer", name)
}

/// Parses a Consume, and the `open` of a ConsumeStream.
pub(in crate::grpc) fn consume(
    request: &pb::ConsumeRequest,
    rules: &Rules,
) -> Result<ConsumeOptions, Invalid> {
    let max_in_flight_bytes: usize =
        not_negative("max_in_flight_bytes", request.max_in_flight_bytes)?;
    Ok(ConsumeOptions {
        queue: QueueName::parse("queue", &request.queue)?,
        max_in_flight: count(
            "max_in_flight",
            request.max_in_flight,
            DEFAULT_IN_FLIGHT,
            MAX_IN_FLIGHT,
        )?,
        max_in_flight_bytes: (max_in_flight_bytes > 0).then_some(max_in_flight_bytes),
        lease: lease("lease", request.lease, rules)?,
        consumer: consumer(&request.consumer)?,
        peer: None,
        auto_commit: request.auto_commit,
        renew: request.renew,
        on_disconnect: on_disconnect(request.on_disconnect)?,
        tells_revoked: false,
    })
}

fn on_disconnect(value: i32) -> Result<OnDisconnect, Invalid> {
    match pb::OnDisconnect::try_from(value) {
        Ok(pb::OnDisconnect::Unspecified | pb::OnDisconnect::Release) => Ok(OnDisconnect::Release),
        Ok(pb::OnDisconnect::Count) => Ok(OnDisconnect::Count),
        Ok(pb::OnDisconnect::KeepLease) => Ok(OnDisconnect::KeepLease),
        Err(_) => Err(Invalid::new("on_disconnect", format!("{value} is not one of its values"))),
    }
}

/// Parses a change of flow; 0 halts the stream.
pub(in crate::grpc) fn flow(flow: pb::Flow) -> Result<usize, Invalid> {
    count("flow.max_in_flight", flow.max_in_flight, 0, MAX_IN_FLIGHT)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{RULES, span};
    use super::*;

    #[test]
    fn a_take_has_documented_defaults_and_limits() {
        let queue = QueueName::parse("queue", "q").unwrap();
        let expected = Take { queue, max_items: 1, wait: Duration::ZERO };
        assert_eq!(take("q", 0, None), Ok(expected));
        assert_eq!(take("q", 1000, Some(span(600, 0))).unwrap().wait, MAX_WAIT);
        let refused = |queue, max_items, wait| take(queue, max_items, wait).unwrap_err().field;
        assert_eq!(refused("", 0, None), "queue");
        assert_eq!(refused("q", -1, None), "max_items");
        assert_eq!(refused("q", 1001, None), "max_items");
        assert_eq!(refused("q", 1, Some(span(600, 1))), "wait");
        assert_eq!(refused("q", 1, Some(span(-1, 0))), "wait");
    }

    #[test]
    fn a_consumer_has_documented_defaults_and_limits() {
        let request = || pb::ConsumeRequest { queue: "q".into(), ..Default::default() };
        let taken = consume(&request(), &RULES).unwrap();
        assert_eq!((taken.max_in_flight, taken.max_in_flight_bytes), (32, None));
        assert_eq!((taken.lease, taken.consumer), (None, None));
        assert_eq!(taken.on_disconnect, OnDisconnect::Release);
        let count = pb::OnDisconnect::Count.into();
        let counted = pb::ConsumeRequest { on_disconnect: count, ..request() };
        assert_eq!(consume(&counted, &RULES).unwrap().on_disconnect, OnDisconnect::Count);
        let refused = |request| consume(&request, &RULES).err().unwrap().field;
        for max_in_flight in [-1, 10_001] {
            let request = pb::ConsumeRequest { max_in_flight, ..request() };
            assert_eq!(refused(request), "max_in_flight");
        }
        let with_bytes = pb::ConsumeRequest { max_in_flight_bytes: -1, ..request() };
        assert_eq!(refused(with_bytes), "max_in_flight_bytes");
        let unknown = pb::ConsumeRequest { on_disconnect: 9, ..request() };
        assert_eq!(refused(unknown), "on_disconnect");
        let consumer = "a b".to_owned();
        assert_eq!(refused(pb::ConsumeRequest { consumer, ..request() }), "consumer");
        for lease in [span(0, 99_999_999), span(60, 1), span(-1, 0)] {
            let request = pb::ConsumeRequest { lease: Some(lease), ..request() };
            assert_eq!(refused(request), "lease");
        }
        let shortest = pb::ConsumeRequest { lease: Some(span(0, 100_000_000)), ..request() };
        assert_eq!(consume(&shortest, &RULES).unwrap().lease, Some(MIN_LEASE));
    }

    #[test]
    fn flow_may_be_halted() {
        let flow = |max_in_flight| super::flow(pb::Flow { max_in_flight });
        assert_eq!(flow(0), Ok(0));
        assert_eq!(flow(10_000), Ok(10_000));
        assert_eq!(flow(10_001).unwrap_err().field, "flow.max_in_flight");
        assert_eq!(flow(-1).unwrap_err().field, "flow.max_in_flight");
    }
}
