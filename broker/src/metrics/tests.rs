//! What is counted, and how it reads.

use std::{fs, path::Path};

use super::*;
use crate::domain::Timestamp;

fn queue(name: &str) -> QueueName {
    QueueName::parse("queue", name).unwrap()
}

fn has(metrics: &Metrics, line: &str) -> bool {
    metrics.encode().unwrap().lines().any(|l| l == line)
}

#[test]
fn recorded_values_are_shown() {
    let metrics = Metrics::new();
    metrics.pushed(&queue("orders"), 3);
    metrics.pushed(&queue("orders"), 2);
    metrics.store_call("push", Duration::from_millis(1), true);
    metrics.batch("push", 5);
    metrics.signal_received(Topic::Insert);
    metrics.woken(Wake::Poll);
    let stream = metrics.stream_opened("Consume");
    for line in [
        "sluicegate_items_pushed_total{queue=\"orders\"} 5",
        "sluicegate_store_call_duration_seconds_count{call=\"push\"} 1",
        "sluicegate_store_errors_total{call=\"push\"} 1",
        "sluicegate_store_batch_items_sum{call=\"push\"} 5.0",
        "sluicegate_signals_heard_total{topic=\"insert\"} 1",
        "sluicegate_dispatcher_wakes_total{cause=\"poll\"} 1",
        "sluicegate_streams_open{rpc=\"Consume\"} 1",
        "# EOF",
    ] {
        assert!(has(&metrics, line), "{line} in {}", metrics.encode().unwrap());
    }
    drop(stream);
    assert!(has(&metrics, "sluicegate_streams_open{rpc=\"Consume\"} 0"));
}

#[test]
fn the_number_of_queue_labels_is_bounded() {
    let metrics = Metrics::new();
    for n in 0..MAX_QUEUE_LABELS + 10 {
        metrics.pushed(&queue(&format!("q{n}")), 1);
        metrics.depth(&queue(&format!("q{n}")), &Depth::default());
    }
    let lines = metrics.encode().unwrap();
    let pushed = lines.lines().filter(|l| l.starts_with("sluicegate_items_pushed_total{"));
    assert_eq!(pushed.count(), MAX_QUEUE_LABELS + 1);
    assert!(has(&metrics, "sluicegate_items_pushed_total{queue=\"other\"} 10"));
    assert!(!lines.contains("sluicegate_queue_items{queue=\"other\""));
}

#[test]
fn a_deleted_queue_frees_its_label() {
    let metrics = Metrics::new();
    let orders = queue("orders");
    metrics.pushed(&orders, 1);
    let depth = Depth { ready: 7, oldest_ready: Some(Timestamp(1_500)), ..Depth::default() };
    metrics.depth(&orders, &depth);
    let ready = "sluicegate_queue_items{queue=\"orders\",state=\"ready\"} 7";
    assert!(has(&metrics, ready), "{}", metrics.encode().unwrap());
    let oldest = "sluicegate_queue_oldest_ready_timestamp_seconds{queue=\"orders\"} 1.5";
    assert!(has(&metrics, oldest), "{}", metrics.encode().unwrap());
    metrics.forget(&orders);
    assert!(!metrics.encode().unwrap().contains("orders"));
    assert!(metrics.queues.read().is_empty());
}

/// Counts one item in each way in which items of a queue are counted without a reason.
pub(crate) fn count_one_of_each(metrics: &Metrics, queue: &QueueName) {
    for count in [
        Metrics::pushed,
        Metrics::deduplicated,
        Metrics::delivered,
        Metrics::committed,
        Metrics::rolled_back,
        Metrics::moved,
        Metrics::expired,
        Metrics::damaged,
    ] {
        count(metrics, queue, 1);
    }
}

/// Returns metrics of which each has a value.
pub(crate) fn recorded() -> Metrics {
    let metrics = Metrics::new();
    let orders = queue("orders");
    count_one_of_each(&metrics, &orders);
    metrics.dead_lettered(&orders, LimitReason::Rejected, 1);
    metrics.discarded(&orders, LimitReason::Rejected, 1);
    metrics.depth(&orders, &Depth { oldest_ready: Some(Timestamp(1)), ..Depth::default() });
    metrics.delivery_delays(&orders, [Duration::ZERO].into_iter());
    metrics.store_call("push", Duration::ZERO, true);
    metrics.batch("push", 1);
    drop(metrics.stream_opened("Consume"));
    metrics.woken(Wake::Poll);
    for record in [
        Metrics::signal_sent,
        Metrics::signal_coalesced,
        Metrics::signal_received,
        Metrics::signal_dropped,
    ] {
        record(&metrics, Topic::Insert);
    }
    metrics.call_refused("UNAUTHENTICATED");
    metrics
}

/// Returns one line per metric: its name as Prometheus stores it, kind, unit, labels, meaning.
fn table() -> String {
    let page = recorded().encode().unwrap();
    let mut text =
        String::from("| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|\n");
    for (help, rest) in page.split("# HELP ").skip(1).filter_map(|part| part.split_once('\n')) {
        let (name, help) = help.split_once(' ').unwrap();
        let kind = rest.lines().find_map(|line| line.strip_prefix("# TYPE ")).unwrap();
        let kind = kind.rsplit_once(' ').unwrap().1;
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let unit = ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(unit));
        let sample = rest.lines().find(|line| !line.starts_with('#')).unwrap();
        let labels = sample.split_once('{').and_then(|(_, labels)| labels.split_once('}'));
        let labels: Vec<String> = labels
            .into_iter()
            .flat_map(|(labels, _)| labels.split(','))
            .filter_map(|label| label.split_once('='))
            .filter(|(label, _)| *label != "le")
            .map(|(label, _)| format!("`{label}`"))
            .collect();
        let (unit, labels) = (unit.unwrap_or_default(), labels.join(", "));
        writeln!(text, "| `{name}{suffix}` | {kind} | {unit} | {labels} | {help} |").unwrap();
    }
    text
}

/// To write the table anew: `SLUICEGATE_TEST_WRITE_DOCS=1 cargo test -p sluicegate-broker --lib metrics`.
#[test]
fn the_documentation_has_every_metric() {
    const BEGIN: &str = "<!-- begin: generated from broker/src/metrics -->\n";
    const END: &str = "<!-- end: generated -->\n";
    let expected = table();
    // A metric without a value is on no page: `recorded` has to give each of them one.
    let source = include_str!("mod.rs");
    let registered: usize = ["registry.register(", "new.metric(", "new.seconds(", "new.given("]
        .iter()
        .map(|call| source.matches(call).count())
        .sum();
    assert_eq!(expected.lines().count(), registered + 2, "{expected}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/METRICS.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (there, after) = rest.split_once(END).unwrap();
    if std::env::var_os("SLUICEGATE_TEST_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
        return;
    }
    assert!(
        there == expected,
        "docs/METRICS.md is not as the metrics are; see this test's comment"
    );
}
