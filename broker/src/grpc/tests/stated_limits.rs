//! The limits as the comments of the proto and the documentation state them.

use std::time::Duration;

use crate::{
    domain::{Queue, RetryPolicy, limits::*},
    engine::{Limits, operations::MAX_RUNNING},
};

const ITEM: &str = include_str!("../../../../proto/sluicegate/v1/item.proto");
const QUEUE: &str = include_str!("../../../../proto/sluicegate/v1/queue.proto");
const QUEUE_SERVICE: &str = include_str!("../../../../proto/sluicegate/v1/queue_service.proto");
const ADMIN_SERVICE: &str = include_str!("../../../../proto/sluicegate/v1/admin_service.proto");
const SCHEDULE_SERVICE: &str =
    include_str!("../../../../proto/sluicegate/v1/schedule_service.proto");
const OPERATION_SERVICE: &str =
    include_str!("../../../../proto/sluicegate/v1/operation_service.proto");
const TEMPLATE_SERVICE: &str =
    include_str!("../../../../proto/sluicegate/v1/template_service.proto");
const SEMANTICS: &str = include_str!("../../../../docs/SEMANTICS.md");

fn thousands(number: usize) -> String {
    match number / 1_000 {
        0 => number.to_string(),
        whole => format!("{whole},{:03}", number % 1_000),
    }
}

fn span(span: Duration) -> String {
    const MINUTE: u64 = 60;
    const DAY: u64 = 24 * 60 * MINUTE;
    match span.as_secs() {
        0 => format!("{} ms", span.as_millis()),
        seconds if seconds >= 365 * DAY => format!("{} years", seconds / (365 * DAY)),
        seconds if seconds >= DAY => format!("{} days", seconds / DAY),
        seconds if seconds >= 60 * MINUTE => format!("{} h", seconds / (60 * MINUTE)),
        seconds => format!("{} minutes", seconds / MINUTE),
    }
}

fn bytes(bytes: usize) -> String {
    match bytes {
        bytes if bytes % (1 << 20) == 0 => format!("{} MiB", bytes >> 20),
        bytes if bytes % (1 << 10) == 0 && bytes >= 16 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{} bytes", thousands(bytes)),
    }
}

/// Every line of `text` that contains `about` must contain `limit` too, and there must be such a line.
fn assert_stated(text: &str, about: &str, limit: &str) {
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(about)).collect();
    assert!(!lines.is_empty(), "no line contains {about:?}");
    for line in lines {
        assert!(line.contains(limit), "not {limit:?}: {line}");
    }
}

#[test]
fn the_limits_of_items_are_stated() {
    let defaults = Limits::default();
    assert_stated(ITEM, "`max_payload_bytes`", &bytes(defaults.max_payload_bytes));
    assert_stated(ITEM, "// Media type of `payload`, for", &bytes(MAX_CONTENT_TYPE_BYTES));
    let headers = format!("{MAX_HEADERS} entries and {} in all", bytes(MAX_HEADER_BYTES));
    assert_stated(ITEM, "// Free-form metadata handed", &headers);
    assert_stated(ITEM, "with the same key are delivered", &bytes(MAX_ORDERING_KEY_BYTES));
    assert_stated(ITEM, "returns the id of the first", &bytes(MAX_DEDUP_ID_BYTES));
    assert_stated(ITEM, "// Why its last attempt failed", &bytes(MAX_REASON_BYTES));
    assert_stated(QUEUE_SERVICE, "kept as `last_reason`", &bytes(MAX_REASON_BYTES));
    for about in ["// Not before this", "the queue's `default_ttl`"] {
        assert_stated(ITEM, about, &span(MAX_SPAN));
    }
    let priorities = format!("to {}", PRIORITIES - 1);
    assert_stated(ITEM, "is handed out first.", &priorities);
    assert_stated(QUEUE_SERVICE, "The new priority", &priorities);
}

#[test]
fn the_limits_of_queues_are_stated() {
    for about in ["after the first failed attempt", "// Upper bound of the delay"] {
        assert_stated(QUEUE, about, &span(MAX_RETRY_DELAY));
    }
    assert_stated(QUEUE, "// Upper bound of the delay", "1 hour");
    assert_eq!(RetryPolicy::default().max_delay, Duration::from_hours(1));
    assert_stated(QUEUE, "// How long a `dedup_id` is remembered", &span(MAX_DEDUP_WINDOW));
    let window = span(Queue::DEFAULT_DEDUP_WINDOW);
    assert_stated(QUEUE, "// How long a `dedup_id` is remembered", &window);
    for about in ["// Time to live of items", "// How long a committed item is kept"] {
        assert_stated(QUEUE, about, &span(MAX_SPAN));
    }
    assert_stated(QUEUE, "`max_lease`", &span(MIN_LEASE));
    let labels = format!(
        "At most {MAX_LABELS} entries; keys at most {MAX_LABEL_KEY_BYTES} bytes, none of them zero, \
         values at most {MAX_LABEL_VALUE_BYTES}."
    );
    assert_stated(QUEUE, "// Free-form labels", &labels);
}

#[test]
fn the_limits_of_calls_are_stated() {
    for service in [QUEUE_SERVICE, ADMIN_SERVICE] {
        for entries in ["items", "receipts", "ids"] {
            let entries = format!(" {entries}");
            for line in service.lines().filter(|line| line.contains("// 1 to ")) {
                if line.contains(&entries) {
                    assert!(
                        line.contains(&format!("1 to {}{entries}", thousands(MAX_BATCH))),
                        "{line}"
                    );
                }
            }
        }
    }
    assert_stated(QUEUE_SERVICE, "; 0 means 1.", &format!("1 to {}", thousands(MAX_BATCH)));
    assert_stated(ADMIN_SERVICE, "// Only these items.", &thousands(MAX_BATCH));
    assert_stated(QUEUE_SERVICE, "// How long to wait", &span(MAX_WAIT));
    assert_stated(QUEUE_SERVICE, "items may be unsettled", &thousands(MAX_IN_FLIGHT));
    assert_stated(QUEUE_SERVICE, "to the broker's `max_lease`", &span(MIN_LEASE));
    for about in ["// When it may be handed out again", "// When it may be handed out. "] {
        assert_stated(QUEUE_SERVICE, about, &span(MAX_SPAN));
    }
    let page = format!("more than {0} is taken as {0}", thousands(MAX_PAGE));
    for service in [ADMIN_SERVICE, SCHEDULE_SERVICE, OPERATION_SERVICE, TEMPLATE_SERVICE] {
        assert_stated(service, "// At most this many; 0 means", &page);
    }
    assert_stated(OPERATION_SERVICE, "// Starts an operation.", &MAX_RUNNING.to_string());
    assert_stated(TEMPLATE_SERVICE, "// there are ", &format!("{MAX_TEMPLATES} templates"));
    let pattern = format!("1 to {MAX_NAME_BYTES} letters");
    assert_stated(TEMPLATE_SERVICE, "// Names of queues, in which", &pattern);
    assert_stated(ADMIN_SERVICE, "Pages also end", &bytes(MAX_MESSAGE_BYTES));
    assert_eq!(MAX_BATCH, sluicegate_proto::codec::MAX_ENTRIES, "what the codec lets through");
}

#[test]
fn the_documentation_states_the_limits() {
    let defaults = Limits::default();
    let rest = MAX_NAME_BYTES - 1;
    assert_stated(SEMANTICS, "| names of", &format!("{{0,{rest}}}`"));
    let payload = format!("{}; ", bytes(defaults.max_payload_bytes));
    assert_stated(SEMANTICS, "| payload |", &payload);
    assert_stated(SEMANTICS, "| payload |", &bytes(LARGEST_MAX_PAYLOAD_BYTES));
    assert_stated(SEMANTICS, "| message with several items |", &bytes(MAX_MESSAGE_BYTES));
    assert_stated(SEMANTICS, "| items per push", &thousands(MAX_BATCH));
    let headers = format!("{MAX_HEADERS} entries, {} in all", bytes(MAX_HEADER_BYTES));
    assert_stated(SEMANTICS, "| headers |", &headers);
    for most in [MAX_CONTENT_TYPE_BYTES, MAX_ORDERING_KEY_BYTES, MAX_DEDUP_ID_BYTES] {
        assert_stated(SEMANTICS, "| content type, ordering key, dedup id |", &bytes(most));
    }
    assert_stated(SEMANTICS, "| reason of a failure", &bytes(MAX_REASON_BYTES));
    assert_stated(SEMANTICS, "| delay, time to live, retention |", &span(MAX_SPAN));
    for most in [MAX_RETRY_DELAY, MAX_DEDUP_WINDOW] {
        assert_stated(SEMANTICS, "| delay of a retry policy, dedup window |", &span(most));
    }
    let lease = format!("{} to `max_lease` ({})", span(MIN_LEASE), span(defaults.max_lease));
    assert_stated(SEMANTICS, "to `max_lease` (", &lease);
    assert_stated(SEMANTICS, "| wait for items |", &span(MAX_WAIT));
    assert_stated(SEMANTICS, "| max_in_flight |", &thousands(MAX_IN_FLIGHT));
    let labels = format!(
        "{MAX_LABELS} entries, keys of {MAX_LABEL_KEY_BYTES} bytes, values of {MAX_LABEL_VALUE_BYTES}"
    );
    assert_stated(SEMANTICS, "| labels of a queue |", &labels);
    assert_stated(SEMANTICS, "| templates |", &MAX_TEMPLATES.to_string());
    assert_stated(SEMANTICS, "| schedules |", &thousands(MAX_SCHEDULES));
    assert_stated(SCHEDULE_SERVICE, "// there are ", &thousands(MAX_SCHEDULES));
    assert_stated(SEMANTICS, "| page of a list |", &thousands(MAX_PAGE));
}
