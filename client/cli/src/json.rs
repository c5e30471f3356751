//! Messages as JSON. Fields that are not set are left out; instants are RFC 3339, durations as on the command line.

use std::collections::{BTreeMap, HashMap};

use base64::{Engine, engine::general_purpose::STANDARD};
use prost_types::{Duration, Timestamp};
use serde_json::{Map, Value, json};
use sluicegate_client::proto::{
    Broker, Consumer, ConsumerKind, Delivery, Item, ItemState, NewItem, Operation, OperationState,
    Outcome, PushResult, Queue, QueueStats, QueueTemplate, Schedule, new_item::Eligibility,
    operation_work::Kind,
};

use crate::values;

/// An object under construction that leaves out what is not set.
#[derive(Default)]
struct Object(Map<String, Value>);

impl Object {
    fn put(&mut self, name: &str, value: impl Into<Value>) -> &mut Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    fn text(&mut self, name: &str, value: &str) -> &mut Self {
        if !value.is_empty() {
            self.put(name, value);
        }
        self
    }

    fn time(&mut self, name: &str, value: Option<&Timestamp>) -> &mut Self {
        if let Some(value) = value {
            self.put(name, value.to_string());
        }
        self
    }

    fn duration(&mut self, name: &str, value: Option<&Duration>) -> &mut Self {
        if let Some(value) = value {
            self.put(name, values::show_duration(value));
        }
        self
    }

    fn map(&mut self, name: &str, value: &HashMap<String, String>) -> &mut Self {
        if !value.is_empty() {
            // Sorted, so that the same map always looks the same.
            let sorted: BTreeMap<_, _> = value.iter().collect();
            self.put(name, json!(sorted));
        }
        self
    }

    fn payload(&mut self, payload: &[u8]) -> &mut Self {
        match std::str::from_utf8(payload) {
            Ok(text) => self.put("payload", text),
            Err(_) => self.put("payload_base64", STANDARD.encode(payload)),
        }
    }

    fn done(&mut self) -> Value {
        Value::Object(std::mem::take(&mut self.0))
    }
}

pub(crate) fn item(item: &Item) -> Value {
    item_object(item).done()
}

fn item_object(item: &Item) -> Object {
    let mut object = Object::default();
    object
        .put("id", item.id.as_str())
        .put("queue", item.queue.as_str())
        .put("state", state(item.state()))
        .payload(&item.payload)
        .text("content_type", &item.content_type)
        .map("headers", &item.headers)
        .put("priority", item.priority)
        .put("attempt", item.attempt)
        .put("deliveries", item.deliveries);
    if item.sequence != 0 {
        object.put("sequence", item.sequence);
    }
    object
        .text("ordering_key", &item.ordering_key)
        .text("dedup_id", &item.dedup_id)
        .time("create_time", item.create_time.as_ref())
        .time("eligible_time", item.eligible_time.as_ref())
        .time("expire_time", item.expire_time.as_ref())
        .time("process_time", item.process_time.as_ref())
        .text("producer", &item.producer)
        .text("consumer", &item.consumer)
        .text("last_reason", &item.last_reason)
        .text("origin_queue", &item.origin_queue)
        .time("due_time", item.due_time.as_ref())
        .time("dead_letter_time", item.dead_letter_time.as_ref());
    if item.dead_letter_attempts != 0 {
        object.put("dead_letter_attempts", item.dead_letter_attempts);
    }
    object
}

/// The item with its receipt beside its fields.
pub(crate) fn delivery(delivery: &Delivery) -> Value {
    let mut object = delivery.item.as_ref().map(item_object).unwrap_or_default();
    object
        .put("receipt", delivery.receipt.as_str())
        .time("lease_expire_time", delivery.lease_expire_time.as_ref())
        .done()
}

pub(crate) fn push_result(queue: &str, result: &PushResult) -> Value {
    let mut object = Object::default();
    object
        .put("id", result.id.as_str())
        .put("queue", queue)
        .put("deduplicated", result.deduplicated);
    if result.sequence != 0 {
        object.put("sequence", result.sequence);
    }
    object.done()
}

pub(crate) fn queue(queue: &Queue) -> Value {
    let mut object = Object::default();
    object
        .put("name", queue.name.as_str())
        .text("group", &queue.group)
        .duration("lease", queue.lease.as_ref())
        .text("dead_letter_queue", &queue.dead_letter_queue);
    if let Some(limit) = queue.max_attempts {
        object.put("max_attempts", limit);
    }
    if let Some(limit) = queue.max_deliveries {
        object.put("max_deliveries", limit);
    }
    if queue.discard_failed {
        object.put("discard_failed", true);
    }
    if let Some(policy) = &queue.retry_policy {
        let mut retry = Object::default();
        retry
            .duration("initial_delay", policy.initial_delay.as_ref())
            .put("multiplier", policy.multiplier)
            .duration("max_delay", policy.max_delay.as_ref())
            .put("jitter", policy.jitter);
        object.put("retry_policy", retry.done());
    }
    object
        .duration("default_ttl", queue.default_ttl.as_ref())
        .duration("retention", queue.retention.as_ref())
        .duration("dedup_window", queue.dedup_window.as_ref())
        .put("max_depth", queue.max_depth)
        .put("sequenced", queue.sequenced)
        .put("paused", queue.paused)
        .map("labels", &queue.labels)
        .time("create_time", queue.create_time.as_ref())
        .done()
}

/// Returns a template, with its settings as those of a queue without a name.
pub(crate) fn template(template: &QueueTemplate) -> Value {
    let mut settings = template.settings.as_ref().map(queue).unwrap_or_default();
    if let Some(fields) = settings.as_object_mut() {
        fields.remove("name");
    }
    let mut object = Object::default();
    object
        .put("pattern", template.pattern.as_str())
        .put("settings", settings)
        .time("create_time", template.create_time.as_ref())
        .time("update_time", template.update_time.as_ref())
        .done()
}

pub(crate) fn stats(stats: &QueueStats) -> Value {
    let mut object = Object::default();
    object
        .put("queue", stats.queue.as_str())
        .put("ready", stats.ready)
        .put("delayed", stats.delayed)
        .put("reserved", stats.reserved)
        .put("blocked", stats.blocked)
        .put("processed", stats.processed)
        .duration("oldest_ready_age", stats.oldest_ready_age.as_ref())
        .time("next_eligible_time", stats.next_eligible_time.as_ref())
        .put("consumers", stats.consumers)
        .put("consumers_of_all_brokers", stats.consumers_of_all_brokers)
        .put("pushed", stats.pushed)
        .put("delivered", stats.delivered)
        .put("committed", stats.committed)
        .put("rolled_back", stats.rolled_back)
        .put("moved", stats.moved)
        .put("dead_lettered", stats.dead_lettered)
        .put("expired", stats.expired)
        .put("popped", stats.popped)
        .put("discarded", stats.discarded)
        .done()
}

pub(crate) fn schedule(schedule: &Schedule) -> Value {
    let mut object = Object::default();
    object
        .put("name", schedule.name.as_str())
        .put("queue", schedule.queue.as_str())
        .put("cron", schedule.cron.as_str())
        .text("time_zone", &schedule.time_zone)
        .put("paused", schedule.paused)
        .put("item", schedule.item.as_ref().map(new_item).unwrap_or_default())
        .time("create_time", schedule.create_time.as_ref())
        .time("next_time", schedule.next_time.as_ref())
        .time("last_time", schedule.last_time.as_ref())
        .text("last_error", &schedule.last_error)
        .done()
}

pub(crate) fn broker(broker: &Broker) -> Value {
    let mut object = Object::default();
    object
        .put("id", broker.id.as_str())
        .put("version", broker.version.as_str())
        .text("host", &broker.host)
        .text("address", &broker.address)
        .time("start_time", broker.start_time.as_ref())
        .time("report_time", broker.report_time.as_ref())
        .put("store_healthy", broker.store_healthy)
        .put("signals_healthy", broker.signals_healthy)
        .put("draining", broker.draining)
        .put("consumers", broker.consumers)
        .put("consumers_left_out", broker.consumers_left_out)
        .done()
}

pub(crate) fn consumer(consumer: &Consumer) -> Value {
    let mut object = Object::default();
    object
        .put("id", consumer.id.as_str())
        .put("queue", consumer.queue.as_str())
        .put("broker", consumer.broker.as_str())
        .put("kind", consumer_kind(consumer.kind()))
        .text("name", &consumer.name)
        .text("peer", &consumer.peer)
        .time("since", consumer.since.as_ref())
        .put("max_in_flight", consumer.max_in_flight)
        .put("in_flight", consumer.in_flight)
        .time("oldest_since", consumer.oldest_since.as_ref())
        .time("oldest_lease_end_time", consumer.oldest_lease_end_time.as_ref())
        .time("next_lease_end_time", consumer.next_lease_end_time.as_ref())
        .put("delivered", consumer.delivered)
        .put("committed", consumer.committed)
        .time("report_time", consumer.report_time.as_ref())
        .done()
}

pub(crate) fn operation(operation: &Operation) -> Value {
    let mut object = Object::default();
    object
        .put("id", operation.id.as_str())
        .put("work", work(operation))
        .put("state", operation_state(operation.state()))
        .put("processed_items", operation.processed_items)
        .put("total_items", operation.total_items)
        .put("dry_run", operation.dry_run)
        .text("error", &operation.error);
    match operation.work.as_ref().and_then(|work| work.kind.as_ref()) {
        Some(Kind::Redrive(redrive)) => object
            .text("queue", &redrive.queue)
            .text("to_queue", &redrive.to_queue)
            .put("max_items", redrive.max_items)
            .put("rate", redrive.rate),
        Some(Kind::Replay(replay)) => {
            object.text("queue", &replay.queue).put("max_items", replay.max_items)
        }
        Some(Kind::Purge(purge)) => object.text("queue", &purge.name),
        Some(Kind::Delete(delete)) => object
            .text("queue", &delete.queue)
            .put("max_items", delete.max_items)
            .put("rate", delete.rate),
        None => &mut object,
    };
    object
        .time("create_time", operation.create_time.as_ref())
        .time("update_time", operation.update_time.as_ref())
        .text("started_by", &operation.started_by)
        .text("broker", &operation.broker)
        .done()
}

/// The word for what an operation does.
pub(crate) fn work(operation: &Operation) -> &'static str {
    match operation.work.as_ref().and_then(|work| work.kind.as_ref()) {
        Some(Kind::Redrive(_)) => "redrive",
        Some(Kind::Replay(_)) => "replay",
        Some(Kind::Purge(_)) => "purge",
        Some(Kind::Delete(_)) => "delete",
        None => "other",
    }
}

/// The state without its prefix, in lower case.
pub(crate) fn operation_state(state: OperationState) -> String {
    state.as_str_name().trim_start_matches("OPERATION_STATE_").to_lowercase()
}

/// The kind without its prefix, in lower case.
pub(crate) fn consumer_kind(kind: ConsumerKind) -> String {
    kind.as_str_name().trim_start_matches("CONSUMER_KIND_").to_lowercase()
}

fn new_item(item: &NewItem) -> Value {
    let mut object = Object::default();
    object
        .payload(&item.payload)
        .text("content_type", &item.content_type)
        .map("headers", &item.headers)
        .put("priority", item.priority)
        .duration("ttl", item.ttl.as_ref())
        .text("ordering_key", &item.ordering_key);
    match &item.eligibility {
        Some(Eligibility::Delay(delay)) => object.duration("delay", Some(delay)),
        Some(Eligibility::EligibleTime(time)) => object.time("eligible_time", Some(time)),
        None => &mut object,
    };
    object.done()
}

/// The state without its prefix, in lower case.
pub(crate) fn state(state: ItemState) -> String {
    state.as_str_name().trim_start_matches("ITEM_STATE_").to_lowercase()
}

/// The outcome without its prefix, in lower case.
pub(crate) fn outcome(outcome: Outcome) -> String {
    outcome.as_str_name().trim_start_matches("OUTCOME_").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_that_are_not_text_are_base64() {
        let text = item(&Item { payload: "grüß".into(), ..Default::default() });
        assert_eq!(text["payload"], "grüß");
        let bytes = item(&Item { payload: vec![0xff, 0x00].into(), ..Default::default() });
        assert_eq!(bytes["payload_base64"], "/wA=");
        assert!(bytes.get("payload").is_none());
    }
}
