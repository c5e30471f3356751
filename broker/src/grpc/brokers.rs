//! Brokers and their consumers, as operators see them.

use std::{fmt::Display, sync::Arc, time::Duration};

use sluicegate_proto::v1 as pb;
use tonic::Status;

use super::{
    Api, convert,
    parse::{self, PageRequest},
};
use crate::{
    access::Caller,
    domain::{
        Action::View,
        Invalid, QueueName, Timestamp,
        limits::{MAX_BATCH, MAX_PAGE},
    },
    engine::{Broker, Engine, Limits},
    store::{
        BrokerReport, Capabilities, ConsumerKind, ConsumerReport,
        reports::{broker_text, parse_broker},
    },
};

/// Page size of a list of consumers if the caller specifies none.
const CONSUMERS_PER_PAGE: usize = 100;
/// How long the store may take to answer until it is called unhealthy.
const PING_LIMIT: Duration = Duration::from_secs(2);

/// The place of a consumer in the list: queue, broker and number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place<Q>(Q, [u8; 4], u64);

impl Place<QueueName> {
    fn parse(token: &str) -> Result<Self, Invalid> {
        let read = || {
            let mut parts = token.split('/');
            let queue = QueueName::parse("page_token", parts.next()?).ok()?;
            let broker = parse_broker(parts.next()?)?;
            let number = parts.next()?.parse().ok()?;
            parts.next().is_none().then_some(Self(queue, broker, number))
        };
        read().ok_or_else(|| Invalid::new("page_token", "not a page token of this broker"))
    }

    fn borrowed(&self) -> Place<&QueueName> {
        Place(&self.0, self.1, self.2)
    }
}

impl<Q: Display> Place<Q> {
    /// Returns the place as a page token.
    fn token(&self) -> String {
        format!("{}/{}/{}", self.0, broker_text(self.1), self.2)
    }
}

/// Returns the place of a consumer.
fn place_of<'a>(broker: &BrokerReport, consumer: &'a ConsumerReport) -> Place<&'a QueueName> {
    Place(&consumer.queue, broker.broker, consumer.number)
}

impl Api {
    /// Returns the answering broker.
    pub(super) async fn this_broker(&self) -> pb::GetBrokerResponse {
        let asked = self.run(|engine| async move {
            let ping = tokio::time::timeout(PING_LIMIT, engine.store().ping());
            Ok(matches!(ping.await, Ok(Ok(()))))
        });
        let store_healthy = asked.await.unwrap_or(false);
        let report = self.engine.this_broker();
        let consumers = self.engine.all_consumers();
        let uptime = report.start_time.until(report.report_time);
        let shown = pb::Broker { consumers: convert::figure(consumers), ..of_report(&report) };
        pb::GetBrokerResponse {
            broker: Some(pb::Broker { store_healthy, ..shown }),
            uptime: Some(convert::duration(uptime)),
            limits: Some(limits(self.engine.limits())),
            features: Some(features(&self.engine)),
        }
    }

    /// Returns a page of the consumers that the caller may see.
    pub(super) async fn consumers_page(
        &self,
        caller: &Caller,
        request: pb::ListConsumersRequest,
    ) -> Result<pb::ListConsumersResponse, Status> {
        let pb::ListConsumersRequest { queue, broker, page_size, page_token, queue_prefix } =
            request;
        if !queue.is_empty() {
            caller.may(View, &queue)?;
        }
        let prefix = parse::prefix("queue_prefix", &queue_prefix)?;
        let queue = QueueName::parse_optional("queue", &queue)?;
        let broker = match broker.as_str() {
            "" => None,
            id => {
                Some(parse_broker(id).ok_or_else(|| Invalid::new("broker", "not a broker's id"))?)
            }
        };
        let page = PageRequest::parse(page_size, page_token, CONSUMERS_PER_PAGE)?;
        let after = page.token.as_deref().map(Place::parse).transpose()?;
        let brokers = self.run(|engine| async move { engine.brokers().await }).await?;
        let is_listed = |consumer: &ConsumerReport| {
            queue.as_ref().is_none_or(|queue| consumer.queue == *queue)
                && consumer.queue.as_str().starts_with(&prefix)
                && caller.allows(View, consumer.queue.as_str())
        };
        let mut found: Vec<(&BrokerReport, &ConsumerReport)> = brokers
            .iter()
            .map(|shown| &shown.report)
            .filter(|of| broker.is_none_or(|broker| of.broker == broker))
            .flat_map(|of| of.consumers.iter().map(move |consumer| (of, consumer)))
            .filter(|(_, consumer)| is_listed(consumer))
            .collect();
        found.sort_by(|(of_a, a), (of_b, b)| place_of(of_a, a).cmp(&place_of(of_b, b)));
        // A consumer may be in two parts of a report that was read while it was written.
        found.dedup_by(|(of_a, a), (of_b, b)| place_of(of_a, a) == place_of(of_b, b));
        let total_size = convert::figure(found.len() as u64);
        if let Some(after) = &after {
            let shown =
                found.partition_point(|(of, consumer)| place_of(of, consumer) <= after.borrowed());
            found.drain(..shown);
        }
        let more = found.len() > page.size;
        found.truncate(page.size);
        let last = found.last().filter(|_| more);
        let next_page_token =
            last.map(|(of, consumer)| place_of(of, consumer).token()).unwrap_or_default();
        let consumers = found.into_iter().map(|(of, consumer)| shown(of, consumer)).collect();
        Ok(pb::ListConsumersResponse { consumers, next_page_token, total_size })
    }
}

/// Converts a broker.
pub(super) fn broker(broker: &Broker) -> pb::Broker {
    pb::Broker { store_healthy: broker.reports, ..of_report(&broker.report) }
}

fn of_report(report: &BrokerReport) -> pb::Broker {
    pb::Broker {
        id: broker_text(report.broker),
        version: report.version.clone(),
        host: report.host.clone(),
        address: report.address.clone(),
        start_time: Some(convert::timestamp(report.start_time)),
        report_time: Some(convert::timestamp(report.report_time)),
        store_healthy: false,
        signals_healthy: report.signals_healthy,
        draining: report.draining,
        consumers: convert::figure(report.consumers.len() as u64 + report.left_out),
        consumers_left_out: convert::figure(report.left_out),
    }
}

fn shown(of: &BrokerReport, consumer: &ConsumerReport) -> pb::Consumer {
    let broker = broker_text(of.broker);
    let time = |at: Option<Timestamp>| at.map(convert::timestamp);
    pb::Consumer {
        id: format!("{}/{broker}/{}", consumer.queue, consumer.number),
        queue: consumer.queue.to_string(),
        broker,
        kind: match consumer.kind {
            ConsumerKind::Stream => pb::ConsumerKind::Stream.into(),
            ConsumerKind::Call => pb::ConsumerKind::Call.into(),
        },
        name: consumer.name.as_ref().map(ToString::to_string).unwrap_or_default(),
        peer: consumer.peer.map(|peer| peer.to_string()).unwrap_or_default(),
        since: time(Some(consumer.since)),
        max_in_flight: convert::figure(consumer.max_in_flight),
        in_flight: convert::figure(consumer.in_flight),
        oldest_since: time(consumer.oldest_since),
        oldest_lease_end_time: time(consumer.oldest_lease_end),
        next_lease_end_time: time(consumer.next_lease_end),
        delivered: convert::figure(consumer.delivered),
        committed: convert::figure(consumer.committed),
        report_time: time(Some(of.report_time)),
    }
}

fn limits(limits: &Limits) -> pb::BrokerLimits {
    let ttl = limits.unused_queue_ttl;
    pb::BrokerLimits {
        max_payload_bytes: convert::figure(limits.max_payload_bytes as u64),
        max_batch: MAX_BATCH as i32,
        max_page_size: MAX_PAGE as i32,
        default_lease: Some(convert::duration(limits.default_lease)),
        max_lease: Some(convert::duration(limits.max_lease)),
        max_queues: i64::from(limits.max_queues),
        unused_queue_ttl: (!ttl.is_zero()).then(|| convert::duration(ttl)),
    }
}

fn features(engine: &Arc<Engine>) -> pb::BrokerFeatures {
    let Capabilities { shared, durable, .. } = engine.store().capabilities();
    pb::BrokerFeatures {
        shared_store: shared,
        durable_store: durable,
        auto_create_queues: engine.limits().auto_create_queues,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_its_token() {
        let queue = QueueName::parse("queue", "a.b").unwrap();
        let place = Place(queue, [0, 1, 255, 3], 7);
        assert_eq!(place.token(), "a.b/0001ff03/7");
        assert_eq!(Place::parse(&place.token()), Ok(place));
        for bad in
            ["", "a", "a/0001ff03", "a/1ff03/7", "a/+001ff03/7", "a/0001ff03/7/", "/0001ff03/7"]
        {
            assert_eq!(Place::parse(bad).unwrap_err().field, "page_token", "{bad:?}");
        }
    }
}
