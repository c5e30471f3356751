//! What brokers report about themselves: a few documents per broker, which end by themselves.

use std::{collections::HashMap, time::Duration};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    domain::{ConsumerName, QueueName, Timestamp},
    store::{
        BrokerReport, ConsumerKind, ConsumerReport, Result,
        mongo::{
            Inner,
            schema::layout::date,
            server::{
                connect::read_documents,
                error::{failed, written},
                time_limit::in_time,
            },
        },
        reports::{broker_text, parse_broker},
    },
};

const BROKERS: &str = "brokers";
/// Consumers per document. One takes up to about 600 bytes.
const PART: usize = 2_000;
/// How long a document that no longer counts stays.
const STAYS: Duration = Duration::from_mins(1);

/// Replaces the documents of a broker. Those of a longer report before are no longer read.
pub(crate) async fn replace(inner: &Inner, report: &BrokerReport, lasting: Duration) -> Result<()> {
    let broker = broker_text(report.broker);
    if lasting.is_zero() {
        let all = doc! { "_id": { "$gte": format!("{broker}/"), "$lt": format!("{broker}0") } };
        let delete = doc! { "delete": BROKERS, "deletes": [{ "q": all, "limit": 0 }] };
        return run(inner, delete).await;
    }
    inner.reports_indexed.get_or_try_init(|| create_index(inner, BROKERS)).await?;
    let until = inner.now() + lasting;
    let mut parts: Vec<&[ConsumerReport]> = report.consumers.chunks(PART).collect();
    if parts.is_empty() {
        parts.push(&[]);
    }
    // One command for each part, which keeps messages small.
    for (number, consumers) in parts.iter().enumerate() {
        let id = format!("{broker}/{number}");
        let consumers: Vec<Document> = consumers.iter().map(write_consumer).collect();
        let mut document = doc! {
            "_id": &id, "broker": &broker, "part": number as i32, "until": date(until),
            "expires": date(until + STAYS), "consumers": consumers,
        };
        if number == 0 {
            document.extend(head(report, parts.len()));
        }
        let replace = doc! { "q": { "_id": id }, "u": document, "upsert": true };
        run(inner, doc! { "update": BROKERS, "updates": [replace] }).await?;
    }
    Ok(())
}

/// Runs a write that need not be durable, so that it waits for no journal and no other member.
async fn run(inner: &Inner, mut command: Document) -> Result<()> {
    command.insert("writeConcern", doc! { "w": 1 });
    let reply = in_time(&inner.db, inner.db.run_command(command)).await.map_err(failed)?;
    written(&reply).map(drop)
}

/// Creates the index by which the server deletes documents whose time is over.
pub(super) async fn create_index(inner: &Inner, collection: &str) -> Result<()> {
    let command = doc! { "createIndexes": collection, "indexes": [
        { "name": "expires", "key": { "expires": 1 }, "expireAfterSeconds": 0 },
    ] };
    let reply = in_time(&inner.db, inner.db.run_command(command)).await.map_err(failed)?;
    written(&reply).map(drop)
}

/// Returns what the first document of a report has beside the others.
fn head(report: &BrokerReport, parts: usize) -> Document {
    doc! {
        "parts": parts as i32, "version": &report.version, "host": &report.host,
        "address": &report.address, "started": date(report.start_time),
        "reported": date(report.report_time), "signalsHealthy": report.signals_healthy,
        "draining": report.draining, "leftOut": report.left_out.cast_signed(),
    }
}

fn write_consumer(consumer: &ConsumerReport) -> Document {
    let mut document = doc! {
        "q": consumer.queue.as_str(), "n": consumer.number.cast_signed(),
        "kind": match consumer.kind {
            ConsumerKind::Stream => "stream",
            ConsumerKind::Call => "call",
        },
        "since": date(consumer.since),
        "maxInFlight": consumer.max_in_flight.cast_signed(),
        "inFlight": consumer.in_flight.cast_signed(),
        "delivered": consumer.delivered.cast_signed(),
        "committed": consumer.committed.cast_signed(),
    };
    let mut put = |name: &str, value: Option<Bson>| {
        if let Some(value) = value {
            document.insert(name, value);
        }
    };
    put("name", consumer.name.as_ref().map(|name| name.as_str().into()));
    put("peer", consumer.peer.map(|peer| peer.to_string().into()));
    put("oldestSince", consumer.oldest_since.map(|at| date(at).into()));
    put("oldestLeaseEnd", consumer.oldest_lease_end.map(|at| date(at).into()));
    put("nextLeaseEnd", consumer.next_lease_end.map(|at| date(at).into()));
    document
}

/// Returns the reports that last. What a newer version writes differently is left out.
pub(crate) async fn list(inner: &Inner) -> Result<Vec<BrokerReport>> {
    let command = doc! { "find": BROKERS, "filter": { "until": { "$gt": date(inner.now()) } } };
    let (mut heads, mut parts) = (Vec::new(), HashMap::new());
    for document in read_documents(&inner.db, command).await? {
        let part = document.get_i32("part").unwrap_or_default();
        let Some(broker) = document.get_str("broker").ok().and_then(parse_broker) else { continue };
        let consumers = document.get_array("consumers").into_iter().flatten();
        let consumers: Vec<_> =
            consumers.filter_map(|of| read_consumer(of.as_document()?)).collect();
        parts.insert((broker, part), consumers);
        if part == 0 {
            heads.push((broker, document));
        }
    }
    let report = |(broker, head): &([u8; 4], Document)| {
        let of_broker = 0..head.get_i32("parts").unwrap_or_default();
        let consumers =
            of_broker.filter_map(|part| parts.remove(&(*broker, part))).flatten().collect();
        read_head(*broker, head, consumers)
    };
    Ok(heads.iter().map(report).collect())
}

fn read_head(broker: [u8; 4], document: &Document, consumers: Vec<ConsumerReport>) -> BrokerReport {
    let text = |name: &str| document.get_str(name).unwrap_or_default().to_owned();
    let is = |name: &str| document.get_bool(name).unwrap_or_default();
    BrokerReport {
        broker,
        version: text("version"),
        host: text("host"),
        address: text("address"),
        start_time: time(document, "started").unwrap_or_default(),
        report_time: time(document, "reported").unwrap_or_default(),
        signals_healthy: is("signalsHealthy"),
        draining: is("draining"),
        consumers,
        left_out: whole(document, "leftOut"),
    }
}

fn read_consumer(document: &Document) -> Option<ConsumerReport> {
    Some(ConsumerReport {
        queue: QueueName::parse("q", document.get_str("q").ok()?).ok()?,
        number: whole(document, "n"),
        kind: match document.get_str("kind").ok()? {
            "stream" => ConsumerKind::Stream,
            "call" => ConsumerKind::Call,
            _ => return None,
        },
        name: ConsumerName::parse("name", document.get_str("name").unwrap_or_default()).ok(),
        peer: document.get_str("peer").ok().and_then(|peer| peer.parse().ok()),
        since: time(document, "since")?,
        max_in_flight: whole(document, "maxInFlight"),
        in_flight: whole(document, "inFlight"),
        oldest_since: time(document, "oldestSince"),
        oldest_lease_end: time(document, "oldestLeaseEnd"),
        next_lease_end: time(document, "nextLeaseEnd"),
        delivered: whole(document, "delivered"),
        committed: whole(document, "committed"),
    })
}

fn time(document: &Document, name: &str) -> Option<Timestamp> {
    document.get_datetime(name).ok().map(|at| Timestamp(at.timestamp_millis()))
}

fn whole(document: &Document, name: &str) -> u64 {
    document.get_i64(name).unwrap_or_default().cast_unsigned()
}
