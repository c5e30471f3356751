//! Queues that come into being by use have the settings of their template, with every broker.

use sluicegate_proto::v1::{
    CreateTemplateRequest, DeleteTemplateRequest, GetQueueRequest, GetTemplateRequest, Outcome,
    Queue, QueueTemplate, UpdateTemplateRequest,
};
use tonic::Code;

use super::cli;
use crate::harness::{Api, Backend, error_reason, on_both_backends};

on_both_backends!(
    a_template_counts_at_once_with_every_broker,
    one_queue_can_take_the_dead_letters_of_all,
);

fn template(pattern: &str, settings: Queue) -> QueueTemplate {
    let (pattern, settings) = (pattern.to_owned(), Some(settings));
    QueueTemplate { pattern, settings, ..QueueTemplate::default() }
}

fn attempts(max_attempts: i32) -> Queue {
    Queue { max_attempts: Some(max_attempts), ..Queue::default() }
}

impl Api {
    async fn create_template(&self, pattern: &str, settings: Queue) -> QueueTemplate {
        let request = CreateTemplateRequest { template: Some(template(pattern, settings)) };
        let answer = self.template.clone().create_template(request).await.expect("a template");
        answer.into_inner().template.expect("the template in the answer")
    }

    async fn settings(&self, queue: &str) -> Queue {
        let request = GetQueueRequest { name: queue.to_owned() };
        let answer = self.admin.clone().get_queue(request).await.expect(queue);
        answer.into_inner().queue.expect("the queue in the answer")
    }

    /// Pushes to a queue that is not there, and returns the settings that it has then.
    async fn new_queue(&self, queue: &str) -> Queue {
        self.push(queue, &["an item"]).await;
        self.settings(queue).await
    }
}

async fn a_template_counts_at_once_with_every_broker(backend: Backend) {
    let store = backend.store();
    let first = store.broker().await;
    let api = first.api().await;
    // A file has one broker at a time.
    let second = if backend == Backend::Mongo { Some(store.broker().await) } else { None };
    let other = match &second {
        Some(broker) => broker.api().await,
        None => api.clone(),
    };
    for n in 0..5 {
        let pattern = format!("round{n}.*");
        let created = api.create_template(&pattern, attempts(3)).await;
        assert_eq!(other.new_queue(&format!("round{n}.a")).await.max_attempts, Some(3));
        let paths = vec!["settings.max_attempts".to_owned()];
        let request = UpdateTemplateRequest {
            template: Some(template(&pattern, attempts(4))),
            update_mask: Some(prost_types::FieldMask { paths }),
        };
        let changed = other.template.clone().update_template(request).await.expect("a change");
        let changed = changed.into_inner().template.expect("the template");
        assert_eq!(changed.create_time, created.create_time);
        assert_eq!(api.new_queue(&format!("round{n}.b")).await.max_attempts, Some(4));
        assert_eq!(api.settings(&format!("round{n}.a")).await.max_attempts, Some(3));
        let request = DeleteTemplateRequest { pattern: pattern.clone() };
        api.template.clone().delete_template(request).await.expect("a deletion");
        assert_eq!(other.new_queue(&format!("round{n}.c")).await.max_attempts, None);
        let request = GetTemplateRequest { pattern };
        let gone = other.template.clone().get_template(request).await.expect_err("it is gone");
        let what = (gone.code(), error_reason(&gone));
        assert_eq!(what, (Code::NotFound, "TEMPLATE_NOT_FOUND".to_owned()));
    }
    // What was answered outlives the brokers.
    let labels = [("team".to_owned(), "a.$b".to_owned())].into();
    let kept = api.create_template("kept.*", Queue { labels, ..attempts(7) }).await;
    first.kill();
    drop(second);
    let broker = store.broker().await;
    let api = broker.api().await;
    let request = GetTemplateRequest { pattern: "kept.*".to_owned() };
    let found = api.template.clone().get_template(request).await.expect("a template");
    assert_eq!(found.into_inner().template, Some(kept));
    let queue = api.new_queue("kept.a").await;
    assert_eq!((queue.max_attempts, queue.labels.len()), (Some(7), 1));
}

async fn one_queue_can_take_the_dead_letters_of_all(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let settings = Queue { dead_letter_queue: "failed".to_owned(), ..attempts(1) };
    api.create_template("*", settings).await;
    api.create_template("*.dead", attempts(9)).await;
    for queue in ["a", "b"] {
        api.push(queue, &[queue]).await;
        let delivery = api.reserve_one(queue, std::time::Duration::from_mins(1)).await;
        assert_eq!(api.rollback(&delivery.receipt, "why not").await, Outcome::DeadLettered);
    }
    assert_eq!(api.stats("failed").await.ready, 2);
    let failed = api.settings("failed").await;
    assert_eq!((failed.max_attempts, failed.dead_letter_queue.as_str()), (Some(1), ""));
    // Dead letters of dead letters go where its name says, and no further.
    let delivery = api.reserve_one("failed", std::time::Duration::from_mins(1)).await;
    assert_eq!(api.rollback(&delivery.receipt, "again").await, Outcome::DeadLettered);
    assert_eq!(api.settings("failed.dead").await.max_attempts, Some(9));
    assert_eq!(api.stats("failed.dead").await.ready, 1);
    // Settings that an operator says are all there are.
    let queue = Queue { name: "explicit".to_owned(), ..Queue::default() };
    assert_eq!(api.create(queue).await.dead_letter_queue, "");
}

/// Runs `sluice` and expects success.
async fn done(address: &str, arguments: &[&str]) -> String {
    let output = cli::run(address, arguments).await;
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", cli::errors(&output));
    cli::printed(&output)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_are_set_shown_and_deleted_by_commands() {
    let broker = cli::broker().await;
    let at = broker.address.as_str();
    assert_eq!(done(at, &["template", "list", "--json"]).await, "");
    done(at, &["template", "set", "orders.*", "--max-attempts", "3", "--group", "eu"]).await;
    let changed = done(at, &["template", "set", "orders.*", "--lease", "90s", "--json"]).await;
    let changed: serde_json::Value = serde_json::from_str(&changed).expect("JSON");
    assert_eq!(changed["settings"]["max_attempts"], 3, "what is not named stays: {changed}");
    assert_eq!(
        (&changed["settings"]["lease"], &changed["pattern"]),
        (&"1m30s".into(), &"orders.*".into())
    );
    done(at, &["template", "set", "plain"]).await;
    let listed = done(at, &["template", "list"]).await;
    let lines: Vec<String> =
        listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(lines[0], "TEMPLATE SETTINGS");
    assert!(lines[1].starts_with("orders.* ") && lines[1].contains("max_attempts=3"), "{listed}");
    assert!(lines[1].contains("group=eu") && lines[1].contains("lease=1m30s"), "{listed}");
    assert_eq!(lines[2], "plain");
    done(at, &["push", "orders.1", "an item"]).await;
    let queue = done(at, &["queue", "get", "orders.1"]).await;
    assert!(
        queue.lines().any(|line| line.starts_with("max_attempts") && line.ends_with('3')),
        "{queue}"
    );

    let refused = cli::run(at, &["template", "delete", "orders.*"]).await;
    assert_eq!(refused.status.code(), Some(2), "nobody was asked: {}", cli::errors(&refused));
    done(at, &["template", "delete", "orders.*", "--yes"]).await;
    let gone = cli::run(at, &["template", "get", "orders.*"]).await;
    assert_eq!(gone.status.code(), Some(4));
    let said = cli::errors(&gone);
    assert!(said.contains("`sluice template set`") && said.contains("template list"), "{said}");
}
