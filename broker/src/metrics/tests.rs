//! What is counted, and how it reads.

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
