//! What the command line tool writes into files and reads again: `sluice backup`, `restore`, `export`, `apply`.

use std::{path::Path, time::Duration};

use sluicegate_proto::v1::{
    CreateScheduleRequest, GetQueueRequest, ItemState, NewItem, Queue, Schedule,
    UpdateQueueRequest, new_item::Eligibility,
};

use super::cli::{broker, errors, printed, run};
use crate::harness::{Api, Broker, duration, new_item};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

/// Runs `sluice` and expects success.
async fn done(broker: &Broker, arguments: &[&str]) -> String {
    let output = run(&broker.address, arguments).await;
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", errors(&output));
    printed(&output)
}

async fn settings(api: &Api, queue: &str) -> Queue {
    let request = GetQueueRequest { name: queue.to_owned() };
    let answer = api.admin.clone().get_queue(request).await.expect("the queue");
    answer.into_inner().queue.expect("the queue")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_holds_all_that_a_push_can_store() {
    let (from, to) = (broker().await, broker().await);
    let (api, other) = (from.api().await, to.api().await);
    let keyed = |payload: &str, priority| NewItem {
        ordering_key: "k".to_owned(),
        priority,
        ..new_item(payload)
    };
    let delayed = NewItem {
        eligibility: duration(Duration::from_hours(1)).map(Eligibility::Delay),
        ttl: duration(Duration::from_hours(2)),
        headers: [("a".to_owned(), "b".to_owned())].into(),
        ..new_item("later")
    };
    let bytes = NewItem { payload: vec![0xff, b'\n', 0].into(), ..NewItem::default() };
    let items = vec![keyed("k1", 0), keyed("k2", 9), keyed("k3", 0), delayed, bytes];
    api.push_items("orders", items).await;
    api.reserve_one("orders", Duration::from_mins(1)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("orders.ndjson");
    let backup = ["backup", "orders", text(&file)];
    assert_eq!(done(&from, &backup).await, "5 items of orders backed up\n");
    let refused = run(&from.address, &backup).await;
    assert_eq!(refused.status.code(), Some(2), "it is there already: {}", errors(&refused));
    assert_eq!(api.stats("orders").await.reserved, 1, "the queue stays as it is");

    let restore = ["restore", text(&file), "--to", "copies"];
    assert_eq!(done(&to, &restore).await, "5 items restored to copies\n");
    let later = other.list("copies", ItemState::Delayed).await.remove(0);
    let original = api.list("orders", ItemState::Delayed).await.remove(0);
    assert_eq!(later.eligible_time, original.eligible_time);
    assert_eq!(later.headers, original.headers);
    let seconds = |item: &sluicegate_proto::v1::Item| item.expire_time.expect("an end").seconds;
    assert!(seconds(&later).abs_diff(seconds(&original)) <= 1, "{later:?} {original:?}");
    let ready = other.list("copies", ItemState::Ready).await;
    assert!(ready.iter().any(|item| item.payload.as_ref() == [0xff, b'\n', 0]), "{ready:?}");
    // Items of a key keep their order, whatever their priorities.
    let mut order = Vec::new();
    while order.len() < 3 {
        for delivery in other.reserve_now("copies", 10).await {
            let item = delivery.item.expect("an item");
            if item.ordering_key == "k" {
                order.push(String::from_utf8_lossy(&item.payload).into_owned());
            }
            other.commit(&[&delivery.receipt]).await;
        }
    }
    assert_eq!(order, ["k1", "k2", "k3"]);
    // What was restored is not stored again, although it was committed.
    let again = done(&to, &restore).await;
    assert_eq!(again, "0 items restored to copies, 5 items stored before\n");
    let settings = settings(&other, "copies").await;
    assert_eq!(settings.dedup_window, duration(Duration::from_mins(5)), "as it was");
    assert!(settings.labels.is_empty(), "{settings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_that_was_cut_off_is_repeated_without_doubling() {
    let broker = broker().await;
    let api = broker.api().await;
    for round in 0..3 {
        let items = (0..400).map(|n| new_item(&format!("{round}-{n}"))).collect();
        api.push_items("orders", items).await;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("orders.ndjson");
    done(&broker, &["backup", "orders", text(&file)]).await;
    // Full after the first 500 items.
    let small = Queue { name: "copies".to_owned(), max_depth: 600, ..Queue::default() };
    api.create(small).await;
    let restore = ["restore", text(&file), "--to", "copies"];
    let cut = run(&broker.address, &restore).await;
    assert_eq!(cut.status.code(), Some(1), "{}", errors(&cut));
    assert!(errors(&cut).contains("500 items stored before this"), "{}", errors(&cut));
    assert_eq!(api.stats("copies").await.ready, 500);
    let marked = settings(&api, "copies").await;
    assert!(marked.labels.contains_key("sluicegate.restore"), "{marked:?}");
    assert_eq!(marked.dedup_window, duration(Duration::from_hours(7 * 24)));

    let update_mask = Some(prost_types::FieldMask { paths: vec!["max_depth".to_owned()] });
    let larger = Queue { name: "copies".to_owned(), ..Queue::default() };
    let request = UpdateQueueRequest { queue: Some(larger), update_mask };
    api.admin.clone().update_queue(request).await.expect("a larger queue");
    let again = done(&broker, &restore).await;
    assert_eq!(again, "700 items restored to copies, 500 items stored before\n");
    assert_eq!(api.stats("copies").await.ready, 1_200);
    let settings = settings(&api, "copies").await;
    assert!(settings.labels.is_empty(), "{settings:?}");
    assert_eq!(settings.dedup_window, duration(Duration::from_mins(5)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_that_was_cut_off_is_restored_on_request_only() {
    let broker = broker().await;
    let api = broker.api().await;
    api.push("orders", &["1", "2", "3"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("orders.ndjson");
    let whole = done(&broker, &["backup", "orders", "-"]).await;
    // In the middle of the last item.
    let end = whole.rfind("\"payload\":\"3\"").expect("the last item");
    std::fs::write(&file, &whole[..end]).expect("a file");
    let restore = ["restore", text(&file), "--to", "copies"];
    let refused = run(&broker.address, &restore).await;
    assert_eq!(refused.status.code(), Some(1), "{}", errors(&refused));
    assert!(errors(&refused).contains("was cut off after 2 items"), "{}", errors(&refused));
    let partial = ["restore", text(&file), "--to", "copies", "--partial"];
    assert_eq!(done(&broker, &partial).await, "2 items restored to copies\n");
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
    let template = ["template", "set", "orders.*", "--max-attempts", "3", "--label", "team=a"];
    done(&from, &template).await;
    let exported = done(&from, &["export"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queues.yaml");
    std::fs::write(&file, &exported).expect("a file");
    let apply = ["apply", "-f", text(&file)];
    let shown = done(&to, &apply).await;
    let created = "create  template orders.*\ncreate  queue mail\ncreate  queue orders\ncreate  schedule nightly\n";
    assert_eq!(shown, created);
    assert_eq!(done(&to, &["export"]).await, exported);
    assert_eq!(done(&to, &apply).await, "", "nothing is left to do");

    done(&to, &["queue", "update", "mail", "--max-attempts", "7"]).await;
    done(&to, &["schedule", "update", "nightly", "--cron", "@daily"]).await;
    done(&to, &["template", "set", "orders.*", "--max-attempts", "7", "--sequenced"]).await;
    let dry = ["apply", "-f", text(&file), "--dry-run"];
    let changes = "change  template orders.*  max_attempts: 7 → 3, sequenced: true → default\nchange  queue mail  max_attempts: 7 → 0\nchange  schedule nightly  cron: @daily → 0 3 * * *\n";
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
    for pattern in ["orders.*", "old.*"] {
        done(&broker, &["template", "set", pattern]).await;
    }
    let text_of_file = "queues:\n  - name: orders\ntemplates:\n  - pattern: orders.*\n";
    std::fs::write(&file, text_of_file).expect("a file");
    let refused = run(&broker.address, &["apply", "-f", text(&file), "--prune"]).await;
    assert_eq!(refused.status.code(), Some(2), "{}", errors(&refused));
    let pruned = run(&broker.address, &["apply", "-f", text(&file), "--prune", "--yes"]).await;
    assert_eq!(pruned.status.code(), Some(1), "{}", errors(&pruned));
    assert_eq!(
        printed(&pruned),
        "delete  template old.*\ndelete  queue empty\nkeep    queue held  it holds 2 items: see `sluice queue delete held --force`\n"
    );
    let left = done(&broker, &["export"]).await;
    let expected = "queues:\n- name: held\n- name: orders\n- name: orders.dead\ntemplates:\n- pattern: orders.*\n";
    assert_eq!(left, expected);
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
