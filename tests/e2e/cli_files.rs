//! What the command line tool writes into files and reads again: `sluice export`, `apply`.

use std::{path::Path, time::Duration};

use sluicegate_proto::v1::{CreateScheduleRequest, Queue, Schedule};

use super::cli::{broker, errors, printed, run};
use crate::harness::{Broker, duration, new_item};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

/// Runs `sluice` and expects success.
async fn done(broker: &Broker, arguments: &[&str]) -> String {
    let output = run(&broker.address, arguments).await;
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", errors(&output));
    printed(&output)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_exported_is_applied_elsewhere_and_then_nothing_is_left_to_do() {
    let (from, to) = (broker().await, broker().await);
    let api = from.api().await;
    let labels = [("team".to_owned(), "a".to_owned())].into();
    let lease = duration(Duration::from_secs(90));
    api.create(Queue { name: "orders".to_owned(), lease, labels, ..Queue::default() }).await;
    api.create(Queue { name: "mail".to_owned(), max_attempts: Some(0), ..Queue::default() }).await;
    let schedule = Schedule {
        name: "nightly".to_owned(),
        queue: "orders".to_owned(),
        cron: "0 3 * * *".to_owned(),
        item: Some(new_item("go")),
        ..Schedule::default()
    };
    let request = CreateScheduleRequest { schedule: Some(schedule) };
    api.schedule.clone().create_schedule(request).await.expect("a schedule");
    let exported = done(&from, &["export"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queues.yaml");
    std::fs::write(&file, &exported).expect("a file");
    let apply = ["apply", "-f", text(&file)];
    let shown = done(&to, &apply).await;
    assert_eq!(shown, "create  queue mail\ncreate  queue orders\ncreate  schedule nightly\n");
    assert_eq!(done(&to, &["export"]).await, exported);
    assert_eq!(done(&to, &apply).await, "", "nothing is left to do");

    done(&to, &["queue", "update", "mail", "--max-attempts", "7"]).await;
    done(&to, &["schedule", "update", "nightly", "--cron", "@daily"]).await;
    let dry = ["apply", "-f", text(&file), "--dry-run"];
    let changes = "change  queue mail  max_attempts: 7 → 0\nchange  schedule nightly  cron: @daily → 0 3 * * *\n";
    assert_eq!(done(&to, &dry).await, changes);
    assert_eq!(done(&to, &apply).await, changes, "the dry run has changed nothing");
    assert_eq!(done(&to, &["export"]).await, exported);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_asks_and_keeps_queues_with_items() {
    let broker = broker().await;
    let api = broker.api().await;
    for queue in ["orders", "orders.dead", "empty", "held"] {
        api.ensure(queue).await;
    }
    api.push("held", &["1", "2"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queues.yaml");
    std::fs::write(&file, "queues:\n  - name: orders\n").expect("a file");
    let refused = run(&broker.address, &["apply", "-f", text(&file), "--prune"]).await;
    assert_eq!(refused.status.code(), Some(2), "{}", errors(&refused));
    let pruned = run(&broker.address, &["apply", "-f", text(&file), "--prune", "--yes"]).await;
    assert_eq!(pruned.status.code(), Some(1), "{}", errors(&pruned));
    assert_eq!(
        printed(&pruned),
        "delete  queue empty\nkeep    queue held  it holds 2 items: see `sluice queue delete held --force`\n"
    );
    let left = done(&broker, &["export"]).await;
    assert_eq!(left, "queues:\n- name: held\n- name: orders\n- name: orders.dead\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_file_changes_nothing() {
    let broker = broker().await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queues.yaml");
    let broken = "queues: [{name: a}]\nschedules: [{name: s, queue: a, cron: '@daily', item: {payload_base64: '?'}}]\n";
    std::fs::write(&file, broken).expect("a file");
    let refused = run(&broker.address, &["apply", "-f", text(&file)]).await;
    assert_eq!(refused.status.code(), Some(1), "{}", errors(&refused));
    assert!(errors(&refused).contains("schedule s: payload_base64"), "{}", errors(&refused));
    assert_eq!(done(&broker, &["queues", "--json"]).await, "");
}
