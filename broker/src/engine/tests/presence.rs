//! What a broker reports about itself.

use super::*;

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
