//! What a broker reports about itself.

use std::collections::HashMap;

use tokio::time::Instant;

use super::*;
use crate::{
    domain::Timestamp,
    engine::presence::by_queue,
    store::{BrokerReport, ConsumerKind, ConsumerReport},
};

/// Returns how many reports were written.
fn written(bench: &Bench) -> usize {
    let page = bench.engine.metrics.encode().unwrap();
    let count = "sluicegate_store_call_duration_seconds_count{call=\"report_broker\"} ";
    page.lines().find_map(|line| line.strip_prefix(count)).map_or(0, |count| count.parse().unwrap())
}

/// An idle broker costs its store next to nothing.
#[tokio::test(start_paused = true)]
async fn a_report_is_written_if_it_has_changed_or_was_written_long_ago() {
    let bench = bench().await;
    for expected in [1, 1] {
        bench.engine.report_presence().await.unwrap();
        assert_eq!(written(&bench), expected);
    }
    bench.engine.draining.cancel();
    for expected in [2, 2] {
        bench.engine.report_presence().await.unwrap();
        assert_eq!(written(&bench), expected, "something has changed");
    }
    tokio::time::advance(Duration::from_secs(16)).await;
    for expected in [3, 3] {
        bench.engine.report_presence().await.unwrap();
        assert_eq!(written(&bench), expected, "the others are told that the broker lives");
    }
}

fn consumer(queue: &str, number: u64) -> ConsumerReport {
    ConsumerReport {
        queue: name(queue),
        number,
        kind: ConsumerKind::Stream,
        name: None,
        peer: None,
        since: Timestamp(0),
        max_in_flight: 1,
        in_flight: 0,
        oldest_since: None,
        oldest_lease_end: None,
        next_lease_end: None,
        delivered: 0,
        committed: 0,
    }
}

#[tokio::test]
async fn consumers_of_other_brokers_are_counted_once() {
    let bench = bench().await;
    let of = |broker, consumers: &[(&str, u64)]| BrokerReport {
        broker: [broker; 4],
        consumers: consumers.iter().map(|(queue, number)| consumer(queue, *number)).collect(),
        ..bench.engine.this_broker()
    };
    let reports = [
        of(1, &[("a", 1), ("a", 2), ("b", 3)]),
        // Of a report that was read while it was written.
        of(2, &[("a", 1), ("b", 2), ("a", 1)]),
        of(3, &[("a", 1), ("c", 2)]),
    ];
    let expected: HashMap<_, _> = [(name("a"), 3), (name("b"), 2)].into();
    assert_eq!(by_queue(&reports, [3; 4]), expected);
}

/// Has the consumers of other brokers counted at the next question, or not for a long time.
fn count_again(bench: &Bench, is_due: bool) {
    let later = Instant::now() + Duration::from_hours(1);
    bench.engine.presence.elsewhere.lock().due = (!is_due).then_some(later);
}

/// Who asks for figures of all queues, again and again, causes one read in three seconds.
#[tokio::test]
async fn the_consumers_of_other_brokers_are_read_for_all_queues_at_once() {
    let bench = bench().await;
    let names: Vec<_> = (0..200).map(|n| name(&format!("q{n}"))).collect();
    for name in &names {
        let queue = Queue::with_defaults(name.clone(), bench.store.now());
        bench.store.create_queue(&queue).await.unwrap();
    }
    for reads in 1..4 {
        count_again(&bench, true);
        bench.engine.batch_stats(&names).await.unwrap();
        let due = bench.engine.presence.elsewhere.lock().due;
        assert!(due.is_some_and(|due| due > Instant::now() + Duration::from_secs(1)));
        count_again(&bench, false);
        bench.engine.batch_stats(&names).await.unwrap();
        bench.engine.queue_stats(&names[7]).await.unwrap();
        assert_eq!(bench.faults.begun("broker_reports"), reads);
    }
}

/// Figures do not wait long for what other brokers report, and are there without it.
#[tokio::test]
async fn figures_are_there_while_the_consumers_of_others_are_not_known() {
    let bench = bench().await;
    for fault in [Fault::Fails, Fault::HeldBefore] {
        bench.faults.set("broker_reports", fault);
        count_again(&bench, true);
        let stats = within("figures", bench.engine.queue_stats(&name("q"))).await.unwrap();
        assert_eq!((stats.consumers, stats.consumers_of_all_brokers), (0, 0));
    }
    assert_eq!(bench.faults.begun("broker_reports"), 2);
}

/// Consumers that come and go elsewhere are told, and the items are not counted for them.
#[tokio::test]
async fn watchers_hear_of_consumers_elsewhere() {
    let bench = bench().await;
    let mut watch = bench.engine.watch_queues(Vec::new()).await.unwrap();
    assert_eq!(watch.next(1_000, |_| true).await.unwrap()[0].consumers_of_all_brokers, 0);
    count_again(&bench, false);
    let _stream = bench.stream().await;
    let told = watch.next(1_000, |_| true).await.unwrap();
    assert_eq!((told[0].consumers, told[0].consumers_of_all_brokers), (1, 1));
    let counted = bench.faults.begun("depth");
    // Again and again: a count serves for a second.
    for elsewhere in 5..8 {
        bench.engine.presence.elsewhere.lock().by_queue = [(name("q"), elsewhere)].into();
        let told = watch.next(1_000, |_| true).await.unwrap();
        assert_eq!((told[0].consumers, told[0].consumers_of_all_brokers), (1, 1 + elsewhere));
    }
    assert_eq!(bench.faults.begun("depth"), counted);
}
