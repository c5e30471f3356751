//! Long work of operators: it survives the broker that runs it, and does nothing twice.

use std::{collections::HashSet, time::Duration};

use sluicegate_proto::v1::{
    CancelOperationRequest, DeleteItemsRequest, GetBrokerRequest, GetOperationRequest, ItemState,
    Operation, OperationState, OperationWork, PurgeQueueRequest, Queue, RedriveItemsRequest,
    RollbackItem, StartOperationRequest, operation_work::Kind,
};

use super::cli;
use crate::harness::{Api, Backend, Broker, on_both_backends, text, until};

on_both_backends!(
    another_broker_continues_what_a_killed_one_began,
    a_cancelled_operation_stops,
    a_broker_that_stops_hands_its_operations_over,
);

const ITEMS: usize = 1_500;

impl Api {
    async fn start(&self, kind: Kind, dry_run: bool) -> Operation {
        let work = Some(OperationWork { kind: Some(kind) });
        let request = StartOperationRequest { work, dry_run, ..Default::default() };
        let answer = self.operation.clone().start_operation(request).await.expect("an operation");
        answer.into_inner().operation.expect("the operation in the answer")
    }

    async fn operation(&self, id: &str) -> Operation {
        let request = GetOperationRequest { id: id.to_owned() };
        let answer = self.operation.clone().get_operation(request).await.expect("an operation");
        answer.into_inner().operation.expect("the operation in the answer")
    }

    async fn until_operation(&self, id: &str, wanted: impl Fn(&Operation) -> bool) -> Operation {
        until("progress of the operation", || async {
            let operation = self.operation(id).await;
            wanted(&operation).then_some(operation)
        })
        .await
    }

    async fn broker_id(&self) -> String {
        let answer = self.admin.clone().get_broker(GetBrokerRequest {}).await.expect("a broker");
        answer.into_inner().broker.expect("the broker in the answer").id
    }
}

fn has_ended(operation: &Operation) -> bool {
    operation.state() != OperationState::Running
}

/// Fills the dead-letter queue of `work`.
async fn dead_letters(api: &Api) {
    let queue =
        Queue { name: "work".to_owned(), dead_letter_queue: "dead".to_owned(), ..Queue::default() };
    api.create(queue).await;
    let names: Vec<String> = (0..ITEMS).map(|n| n.to_string()).collect();
    for batch in names.chunks(500) {
        api.push("dead", &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
}

fn redrive(rate: i32) -> Kind {
    Kind::Redrive(RedriveItemsRequest {
        queue: "dead".to_owned(),
        to_queue: "work".to_owned(),
        rate,
        ..RedriveItemsRequest::default()
    })
}

async fn another_broker_continues_what_a_killed_one_began(backend: Backend) {
    let store = backend.store();
    let mut brokers: Vec<(String, Broker, Api)> = Vec::new();
    // A file has one broker at a time.
    for _ in 0..if backend == Backend::Mongo { 2 } else { 1 } {
        let broker = store.broker().await;
        let api = broker.api().await;
        brokers.push((api.broker_id().await, broker, api));
    }
    let api = brokers[0].2.clone();
    dead_letters(&api).await;
    let dry = api.start(redrive(0), true).await;
    let counted = api.until_operation(&dry.id, has_ended).await;
    assert_eq!((counted.state(), counted.processed_items), (OperationState::Succeeded, 1_500));
    assert_eq!(api.stats("dead").await.ready, 1_500, "a dry run changes nothing");

    let id = api.start(redrive(250), false).await.id;
    let under_way = api.until_operation(&id, |operation| operation.processed_items >= 300).await;
    assert_eq!((under_way.state(), under_way.total_items), (OperationState::Running, 1_500));
    // Items that fail again while the operation runs are not moved again.
    let mut failed = HashSet::new();
    for delivery in api.reserve_now("work", 20).await {
        failed.insert(text(&delivery));
        let item =
            RollbackItem { receipt: delivery.receipt, dead_letter: true, ..Default::default() };
        api.rollback_item(item).await;
    }
    assert_eq!(failed.len(), 20);
    let at = brokers.iter().position(|(broker, ..)| *broker == under_way.broker);
    let (_, runner, _) = brokers.swap_remove(at.expect("one of our brokers runs it"));
    runner.kill();

    let (other, _broker, api) = if let Some(other) = brokers.pop() {
        other
    } else {
        let broker = store.broker().await;
        let api = broker.api().await;
        (api.broker_id().await, broker, api)
    };
    let ended = api.until_operation(&id, has_ended).await;
    assert_eq!((ended.state(), &ended.broker), (OperationState::Succeeded, &other));
    // What the killed broker had done in its last second and could not say is missing.
    let said = ended.processed_items;
    assert!((300..=1_500).contains(&said) && said >= 1_500 - 1_000, "{said}");
    let moved: Vec<String> = names(&api, "work").await;
    let left: HashSet<String> = names(&api, "dead").await.into_iter().collect();
    assert_eq!(left, failed, "exactly what failed again is left");
    let all: HashSet<String> = moved.iter().cloned().chain(left).collect();
    assert_eq!((moved.len(), all.len()), (ITEMS - 20, ITEMS), "each item was moved once");
}

async fn names(api: &Api, queue: &str) -> Vec<String> {
    let items = api.list(queue, ItemState::Unspecified).await;
    items.iter().map(|item| String::from_utf8_lossy(&item.payload).into_owned()).collect()
}

async fn a_cancelled_operation_stops(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    dead_letters(&api).await;
    let delete = DeleteItemsRequest { queue: "dead".to_owned(), rate: 50, ..Default::default() };
    let id = api.start(Kind::Delete(delete), false).await.id;
    api.until_operation(&id, |operation| operation.processed_items >= 20).await;
    let request = CancelOperationRequest { id: id.clone() };
    let cancelled = api.operation.clone().cancel_operation(request).await.expect("an answer");
    let cancelled = cancelled.into_inner().operation.expect("the operation in the answer");
    assert_eq!(cancelled.state(), OperationState::Cancelled);
    // The broker learns of it within about a second, and then says how many items it had deleted by then. What it said before may be
    // right by chance, while it goes on.
    let time = |operation: &Operation| operation.update_time.map(|at| (at.seconds, at.nanos));
    let is_counted = || async {
        let said = api.operation(&id).await;
        let left = api.list("dead", ItemState::Unspecified).await.len() as i64;
        let is_last = time(&said) > time(&cancelled);
        (is_last && left + said.processed_items == ITEMS as i64).then_some(left)
    };
    assert!(until("the last word of the broker", is_counted).await > 0);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(is_counted().await.is_some(), "it goes on");
}

async fn a_broker_that_stops_hands_its_operations_over(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    dead_letters(&api).await;
    let id = api.start(redrive(100), false).await.id;
    api.until_operation(&id, |operation| operation.processed_items >= 50).await;
    broker.stop().await;
    let broker = store.broker().await;
    let api = broker.api().await;
    let runs = api.broker_id().await;
    api.until_operation(&id, |operation| operation.broker == runs).await;
    let purge = Kind::Purge(PurgeQueueRequest { name: "dead".to_owned() });
    let purge = api.start(purge, false).await.id;
    let purged = api.until_operation(&purge, has_ended).await;
    let redriven = api.until_operation(&id, has_ended).await;
    assert_eq!(redriven.state(), OperationState::Succeeded);
    assert_eq!(
        redriven.processed_items + purged.processed_items,
        ITEMS as i64,
        "nothing is missing"
    );
    assert_eq!(api.stats("work").await.ready, redriven.processed_items);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_starts_operations_and_waits_for_them() {
    let broker = cli::broker().await;
    let api = broker.api().await;
    dead_letters(&api).await;
    let run = async |line: &[&str]| {
        let output = cli::run(&broker.address, line).await;
        (output.status.code(), cli::printed(&output), cli::errors(&output))
    };
    let dry = run(&["redrive", "dead", "--to", "work", "--max", "700", "--dry-run"]).await;
    assert_eq!((dry.0, dry.1.trim()), (Some(0), "700 items would be moved back"), "{}", dry.2);
    assert_eq!(api.stats("dead").await.ready, 1_500);
    let redrive = ["redrive", "dead", "--to", "work", "--max", "700", "--background", "--json"];
    let (code, started, errors) = run(&redrive).await;
    assert_eq!(code, Some(0), "{errors}");
    let started: serde_json::Value = serde_json::from_str(&started).expect("JSON");
    let id = started["id"].as_str().expect("an id");
    let (code, waited, errors) = run(&["operation", "wait", id]).await;
    assert_eq!((code, waited.trim()), (Some(0), "700 items moved back"), "{errors}");
    let unasked = run(&["item", "delete-all", "dead", "--contains", "9"]).await;
    assert_eq!(unasked.0, Some(2), "{}", unasked.2);
    let deleted = run(&["item", "delete-all", "dead", "--max", "50", "--yes"]).await;
    assert_eq!((deleted.0, deleted.1.trim()), (Some(0), "50 items deleted"), "{}", deleted.2);
    let slow =
        run(&["item", "delete-all", "dead", "--rate", "1", "--background", "--yes", "--json"]);
    let slow: serde_json::Value = serde_json::from_str(&slow.await.1).expect("JSON");
    let slow = slow["id"].as_str().expect("an id");
    assert_eq!(run(&["operation", "cancel", slow]).await.0, Some(0));
    let (code, _, errors) = run(&["operation", "wait", slow]).await;
    assert!(code == Some(1) && errors.contains("was cancelled"), "{errors}");
    let (_, listed, _) = run(&["operation", "list"]).await;
    let lines: Vec<&str> = listed.lines().collect();
    assert!(lines.len() == 5 && lines[1].starts_with(slow), "{listed}");
    assert!(lines[1].contains("delete") && lines[1].contains("cancelled"), "{listed}");
    let missing = run(&["operation", "get", &"0".repeat(24)]).await;
    assert!(missing.0 == Some(4) && missing.2.contains("no operation"), "{}", missing.2);
}
