//! What is asked for again, because the answer was lost or a form was sent twice, is done once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::Request as Call,
    response::Response,
};
use sluicegate_proto::v1::{ItemState, ListOperationsRequest};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{
    Status,
    service::Routes,
    transport::{Channel, Endpoint, Server},
};
use tower::ServiceExt;

use super::{cli, console::Browser};
use crate::harness::{Api, Broker};

/// The calls whose first answer is lost.
const LOSSES: [&str; 2] = [
    "/sluicegate.v1.OperationService/StartOperation",
    "/sluicegate.v1.ScheduleService/TriggerSchedule",
];

/// Passes calls on to a broker, and loses the first answer to each call of [`LOSSES`].
struct Lossy {
    address: String,
    calls: Calls,
    _serving: AbortOnDropHandle<()>,
}

/// How often each call was made.
type Calls = Arc<Mutex<HashMap<String, usize>>>;

impl Lossy {
    async fn to(broker: &Broker) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let channel = Endpoint::from_shared(broker.address.clone()).expect("a URL").connect_lazy();
        let calls = Calls::default();
        let router = Router::new().fallback(pass_on).with_state((channel, Arc::clone(&calls)));
        let serving = Server::builder()
            .add_routes(Routes::from(router))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let serving = tokio::spawn(async move { serving.await.expect("calls are passed on") });
        Self { address, calls, _serving: AbortOnDropHandle::new(serving) }
    }

    fn calls(&self, path: &str) -> usize {
        self.calls.lock().expect("no panic").get(path).copied().unwrap_or_default()
    }
}

async fn pass_on(State((channel, calls)): State<(Channel, Calls)>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let (head, body) = request.into_parts();
    let call = Call::from_parts(head, tonic::body::Body::new(body));
    let answer = channel.oneshot(call).await.expect("an answer of the broker");
    let calls = {
        let mut calls = calls.lock().expect("no panic");
        let calls = calls.entry(path.clone()).or_default();
        *calls += 1;
        *calls
    };
    if calls == 1 && LOSSES.contains(&path.as_str()) {
        return Status::unavailable("the answer is lost").into_http();
    }
    answer.map(Body::new)
}

async fn operations(api: &Api) -> usize {
    let answer = api.operation.clone().list_operations(ListOperationsRequest::default()).await;
    answer.expect("operations").into_inner().operations.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_starts_one_operation_if_the_answer_is_lost() {
    let broker = cli::broker().await;
    let api = broker.api().await;
    api.push("work", &["1", "2", "3"]).await;
    let lossy = Lossy::to(&broker).await;
    let delete = ["item", "delete-all", "work", "--max", "2", "--yes"];
    let deleted = cli::run(&lossy.address, &delete).await;
    let (said, errors) = (cli::printed(&deleted), cli::errors(&deleted));
    assert_eq!((said.trim(), errors.as_str()), ("2 items deleted", ""));
    assert_eq!((lossy.calls(LOSSES[0]), operations(&api).await), (2, 1));
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_runs_a_schedule_once_if_the_answer_is_lost() {
    let broker = cli::broker().await;
    let api = broker.api().await;
    let create = ["schedule", "create", "rare", "work", "0 0 1 1 *", "payload"];
    let created = cli::run(&broker.address, &create).await;
    assert!(created.status.success(), "{}", cli::errors(&created));
    let lossy = Lossy::to(&broker).await;
    let pushed = cli::run(&lossy.address, &["schedule", "run", "rare"]).await;
    assert!(pushed.status.success(), "{}", cli::errors(&pushed));
    let items = api.list("work", ItemState::Ready).await;
    assert_eq!((lossy.calls(LOSSES[1]), items.len()), (2, 1));
    assert_eq!(items[0].id, cli::printed(&pushed).trim());
}

/// Two commands are two operations, whatever they do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_command_again_is_another_operation() {
    let broker = cli::broker().await;
    let api = broker.api().await;
    api.push("work", &["1", "2", "3"]).await;
    for _ in 0..2 {
        let delete = ["item", "delete-all", "work", "--max", "1", "--yes"];
        assert!(cli::run(&broker.address, &delete).await.status.success());
    }
    assert_eq!(operations(&api).await, 2);
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_form_of_the_console_that_is_sent_twice_starts_one_operation() {
    let broker = cli::broker().await;
    let api = broker.api().await;
    api.push("work", &["1", "2"]).await;
    let browser = Browser::new(&broker);
    let id_of = async |path: &str| {
        let form = browser.get(path).await.body;
        let id = form.split(r#"name="request_id" value=""#).nth(1).expect(&form);
        id.split('"').next().expect("an id").to_owned()
    };
    let id = id_of("/queues/work/purge").await;
    assert_eq!(id.len(), 32, "{id}");
    for _ in 0..2 {
        let answer = browser.post("/queues/work/purge", &format!("request_id={id}")).await;
        assert!(answer.head.contains("notice=purged.2"), "{}", answer.head);
        // What comes in between stays: the second form is known again.
        api.push("work", &["later"]).await;
    }
    assert_eq!(operations(&api).await, 1);
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 2);
    let mut ids = vec![id];
    for path in ["/queues/work/purge", "/queues/work/redrive", "/queues/work/replay"] {
        ids.push(id_of(path).await);
    }
    ids.dedup();
    assert_eq!(ids.len(), 4, "each form has an id of its own");
}
