//! The services behind a real connection, on a store in memory.

mod access;
mod bounds;
mod fuzz;
mod limits;
mod scaler;
mod stated_limits;
mod streams;

use std::{sync::Arc, time::Duration};

use sluicegate_proto::v1::{
    self as pb, admin_service_client::AdminServiceClient, consume_stream_request::Action,
    consume_stream_response::Event, queue_service_client::QueueServiceClient,
    schedule_service_client::ScheduleServiceClient,
};
use tokio::{
    net::TcpListener,
    sync::{
        mpsc::{self, Sender},
        oneshot,
    },
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt;

use self::scaler::scaled_object;
use super::{
    Api,
    server::{Health, Options, Server},
};
use crate::{
    access::Access,
    config::Bounds,
    domain::Clock,
    engine::{Engine, Limits},
    metrics::Metrics,
    signals::LocalSignals,
    store::{Store, sqlite::SqliteStore},
    tasks::Tasks,
    traces::Traces,
};

struct Broker {
    address: String,
    /// Those of the server.
    metrics: Arc<Metrics>,
    channel: Channel,
    api: Api,
    health: Health,
    shutdown: CancellationToken,
    serving: JoinHandle<()>,
}

async fn broker_with(options: Options) -> Broker {
    broker_within(options, Limits::default()).await
}

async fn broker_within(options: Options, limits: Limits) -> Broker {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    broker_over(Arc::new(store), options, limits).await
}

async fn broker_over(store: Arc<dyn Store>, options: Options, limits: Limits) -> Broker {
    let signals = Arc::new(LocalSignals::new());
    let metrics = Arc::new(Metrics::new());
    let engine = Engine::new(store, signals, metrics, limits);
    crate::engine::background::start(&engine);
    let shutdown = CancellationToken::new();
    let api = Api::new(engine, Tasks::default(), shutdown.clone());
    let metrics = Arc::clone(&options.metrics);
    let server = Server::new(api.clone(), options).await.unwrap();
    let health = server.health();
    health.set_serving(true).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(server.serve(listener));
    let channel = Channel::from_shared(address.clone()).unwrap().connect_lazy();
    Broker { address, metrics, channel, api, health, shutdown, serving }
}

/// Everyone may do everything.
fn open() -> Options {
    Options {
        tls: None,
        max_connection_age: Duration::ZERO,
        access: Access::new(None, 0, Arc::new(Metrics::new())),
        bounds: Bounds::default(),
        metrics: Arc::new(Metrics::new()),
        traces: Traces::default(),
    }
}

impl Broker {
    async fn start() -> Self {
        broker_with(open()).await
    }

    /// Returns how many bytes of answers are not read.
    fn unread_bytes(&self) -> usize {
        let page = self.metrics.encode().unwrap();
        let figure = page.lines().find_map(|l| l.strip_prefix("sluicegate_unread_answer_bytes "));
        figure.unwrap().parse().unwrap()
    }

    fn queues(&self) -> QueueServiceClient<Channel> {
        QueueServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    /// Creates a queue, unless it is there.
    async fn ensure(&self, queue: &str) {
        let wanted = Some(pb::Queue { name: queue.into(), ..Default::default() });
        self.admin().create_queue(pb::CreateQueueRequest { queue: wanted }).await.unwrap();
    }

    async fn push(&self, queue: &str, payloads: Vec<Vec<u8>>) {
        for items in items(payloads).chunks(10) {
            let items = items.to_vec();
            let request = pb::PushRequest { queue: queue.into(), items, ..Default::default() };
            self.queues().push(request).await.unwrap();
        }
    }

    async fn stats(&self, queue: &str) -> pb::QueueStats {
        let request = pb::GetQueueStatsRequest { queue: queue.into() };
        self.admin().get_queue_stats(request).await.unwrap().into_inner().stats.unwrap()
    }

    /// Waits until a condition holds for a queue's stats, for effects of background work.
    async fn until(&self, queue: &str, holds: impl Fn(&pb::QueueStats) -> bool) {
        while !holds(&self.stats(queue).await) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn open(
        &self,
        queue: &str,
    ) -> (Sender<pb::ConsumeStreamRequest>, Streaming<pb::ConsumeStreamResponse>) {
        // A stream whose queue is not there is not opened before it is.
        self.ensure(queue).await;
        let (requests, receiver) = mpsc::channel(100);
        let stream = ReceiverStream::new(receiver);
        // The response must begin before any request was sent.
        let mut events = self.queues().consume_stream(stream).await.unwrap().into_inner();
        let open = pb::ConsumeRequest { queue: queue.into(), ..Default::default() };
        requests.send(act(Action::Open(open))).await.unwrap();
        let Some(Event::Opened(opened)) = next(&mut events).await else { panic!() };
        assert_eq!((opened.max_in_flight, opened.lease.unwrap().seconds), (32, 30));
        (requests, events)
    }
}

fn items(payloads: Vec<Vec<u8>>) -> Vec<pb::NewItem> {
    let item = |payload: Vec<u8>| pb::NewItem { payload: payload.into(), ..Default::default() };
    payloads.into_iter().map(item).collect()
}

fn small(count: u8) -> Vec<Vec<u8>> {
    (0..count).map(|n| vec![n]).collect()
}

fn act(action: Action) -> pb::ConsumeStreamRequest {
    pb::ConsumeStreamRequest { action: Some(action) }
}

async fn next(events: &mut Streaming<pb::ConsumeStreamResponse>) -> Option<Event> {
    events.message().await.unwrap().map(|message| message.event.unwrap())
}

async fn deliveries(
    events: &mut Streaming<pb::ConsumeStreamResponse>,
    count: usize,
) -> Vec<pb::Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        let Some(Event::Deliveries(more)) = next(events).await else { panic!() };
        all.extend(more.deliveries);
    }
    all
}

fn reason(status: &Status) -> String {
    status.get_error_details().error_info().expect("every error has a reason").reason.clone()
}

fn field(status: &Status) -> String {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    status.get_error_details().bad_request().unwrap().field_violations[0].field.clone()
}

#[tokio::test]
async fn an_item_is_pushed_delivered_and_committed() {
    let broker = Broker::start().await;
    broker.push("q", small(3)).await;
    let request = pb::ReserveRequest { queue: "q".into(), max_items: 2, ..Default::default() };
    let reserved = broker.queues().reserve(request).await.unwrap().into_inner().deliveries;
    let payloads: Vec<_> = reserved.iter().map(|d| d.item.clone().unwrap().payload[0]).collect();
    assert_eq!(payloads, [0, 1]);
    let receipts: Vec<_> = reserved.into_iter().map(|d| d.receipt).collect();
    for outcome in [pb::Outcome::Ok, pb::Outcome::Gone] {
        let request = pb::CommitRequest { receipts: receipts.clone() };
        let results = broker.queues().commit(request).await.unwrap().into_inner().results;
        assert_eq!(results.iter().map(|r| r.receipt.clone()).collect::<Vec<_>>(), receipts);
        assert!(results.iter().all(|r| r.outcome() == outcome), "{results:?}");
    }
    let request = pb::PopRequest { queue: "q".into(), ..Default::default() };
    let popped = broker.queues().pop(request).await.unwrap().into_inner().items;
    assert_eq!(popped.iter().map(|item| item.payload[0]).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn large_items_arrive_in_messages_that_every_client_accepts() {
    let broker = Broker::start().await;
    broker.push("q", vec![vec![1; 700_000]; 20]).await;
    // The client's limit is the 4 MiB that gRPC has by default.
    let mut queues = QueueServiceClient::new(broker.channel.clone());
    let request = pb::ConsumeRequest { queue: "q".into(), ..Default::default() };
    let mut stream = queues.consume(request).await.unwrap().into_inner();
    let mut received = 0;
    while received < 20 {
        received += stream.message().await.unwrap().unwrap().deliveries.len();
    }
    drop(stream);
    broker.until("q", |stats| stats.ready == 20).await;
    let request = pb::ReserveRequest { queue: "q".into(), max_items: 20, ..Default::default() };
    let reserved = queues.reserve(request).await.unwrap().into_inner().deliveries;
    assert!((1..20).contains(&reserved.len()), "{}", reserved.len());
}

#[tokio::test]
async fn pages_end_by_number_and_by_bytes() {
    let broker = Broker::start().await;
    broker.push("q", vec![vec![1; 700_000]; 13]).await;
    broker.push("q", small(100)).await;
    let mut admin = AdminServiceClient::new(broker.channel.clone()); // accepts 4 MiB
    let (mut lengths, mut ids, mut page_token) = (Vec::new(), Vec::new(), String::new());
    loop {
        let (queue, page_size) = ("q".to_owned(), 90);
        let request = pb::ListItemsRequest { queue, page_size, page_token, ..Default::default() };
        let page = admin.list_items(request).await.unwrap().into_inner();
        lengths.push(page.items.len());
        ids.extend(page.items.into_iter().map(|item| item.id));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(lengths, [5, 5, 90, 13]);
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 113);
    let request =
        pb::ListItemsRequest { queue: "q".into(), page_token: "?".into(), ..Default::default() };
    assert_eq!(field(&admin.list_items(request).await.unwrap_err()), "page_token");
}

#[tokio::test]
async fn a_waiting_caller_who_hangs_up_takes_no_items() {
    let broker = Broker::start().await;
    let reserve = |seconds| pb::ReserveRequest {
        queue: "q".into(),
        wait: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..Default::default()
    };
    broker.ensure("q").await;
    let mut queues = broker.queues();
    let waiting = tokio::spawn(async move { queues.reserve(reserve(600)).await });
    broker.until("q", |stats| stats.consumers == 1).await;
    waiting.abort();
    broker.until("q", |stats| stats.consumers == 0).await;
    broker.push("q", small(1)).await;
    let reserved = broker.queues().reserve(reserve(0)).await.unwrap().into_inner().deliveries;
    assert_eq!(reserved[0].item.as_ref().unwrap().deliveries, 1);
}

#[tokio::test]
async fn items_taken_when_the_caller_hung_up_are_rolled_back() {
    let broker = Broker::start().await;
    let (found, taking) = oneshot::channel::<u32>();
    let (given, back) = oneshot::channel();
    let (waits, waiting) = oneshot::channel();
    let api = broker.api.clone();
    let caller = tokio::spawn(async move {
        let work = |_| async move {
            waits.send(()).unwrap();
            Ok(taking.await.unwrap())
        };
        let roll_back = |_, taken| async move { given.send(taken).unwrap() };
        api.take(work, roll_back).await
    });
    waiting.await.unwrap();
    // Both happen before any other task runs: this runtime has one thread.
    found.send(7).unwrap();
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    assert_eq!(back.await, Ok(7));
}

#[tokio::test]
async fn errors_of_the_library_have_the_same_form_as_ours() {
    let broker = Broker::start().await;
    let request = pb::PushRequest {
        queue: "q".into(),
        items: items(vec![vec![0; 17 << 20]]),
        ..Default::default()
    };
    let refused = broker.queues().push(request.clone()).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::ResourceExhausted, "REQUEST_TOO_LARGE".into())
    );
    let mut zipped = broker.queues().send_compressed(tonic::codec::CompressionEncoding::Gzip);
    let refused = zipped.push(request).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::ResourceExhausted, "REQUEST_TOO_LARGE".into())
    );
    let stream = tokio_stream::iter([pb::PushStreamRequest {
        items: items(vec![vec![0; 17 << 20]]),
        ..Default::default()
    }]);
    let mut answers = broker.queues().push_stream(stream).await.unwrap().into_inner();
    let refused = answers.message().await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::ResourceExhausted, "REQUEST_TOO_LARGE".into())
    );
    let request = pb::PushRequest {
        queue: "q".into(),
        items: items(vec![vec![0; 5 << 20]]),
        ..Default::default()
    };
    let refused = broker.queues().push(request).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::ResourceExhausted, "PAYLOAD_TOO_LARGE".into())
    );
    let health = HealthCheckRequest { service: "nobody".into() };
    let refused = HealthClient::new(broker.channel.clone()).check(health).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::NotFound, "SERVICE_NOT_FOUND".into()));
}

#[tokio::test]
async fn schedules_are_created_listed_paused_and_deleted() {
    let broker = Broker::start().await;
    let mut schedules = ScheduleServiceClient::new(broker.channel.clone());
    let schedule = |name: &str| pb::Schedule {
        name: name.into(),
        queue: "q".into(),
        cron: "0 3 * * *".into(),
        item: Some(pb::NewItem::default()),
        ..Default::default()
    };
    for name in ["a", "b", "c"] {
        let request = pb::CreateScheduleRequest { schedule: Some(schedule(name)) };
        let made = schedules.create_schedule(request).await.unwrap().into_inner().schedule.unwrap();
        assert_eq!((made.time_zone.as_str(), made.next_time.is_some()), ("UTC", true));
    }
    let request = pb::ListSchedulesRequest { page_size: 2, ..Default::default() };
    let page = schedules.list_schedules(request).await.unwrap().into_inner();
    assert_eq!((page.schedules.len(), page.next_page_token.is_empty()), (2, false));
    let request = pb::ListSchedulesRequest { page_size: 2, page_token: page.next_page_token };
    let page = schedules.list_schedules(request).await.unwrap().into_inner();
    assert_eq!((page.schedules[0].name.as_str(), page.next_page_token.as_str()), ("c", ""));
    let request = pb::PauseScheduleRequest { name: "a".into() };
    let paused = schedules.pause_schedule(request).await.unwrap().into_inner().schedule.unwrap();
    assert_eq!((paused.paused, paused.next_time), (true, None));
    let request = || pb::DeleteScheduleRequest { name: "a".into() };
    schedules.delete_schedule(request()).await.unwrap();
    let gone = schedules.delete_schedule(request()).await.unwrap_err();
    assert_eq!((gone.code(), reason(&gone)), (Code::NotFound, "SCHEDULE_NOT_FOUND".into()));
    for (bad, named) in [
        (pb::Schedule { cron: "nonsense".into(), ..schedule("d") }, "schedule.cron"),
        (pb::Schedule { time_zone: "Mars/Base".into(), ..schedule("d") }, "schedule.time_zone"),
        (pb::Schedule { item: None, ..schedule("d") }, "schedule.item"),
        (pb::Schedule { queue: String::new(), ..schedule("d") }, "schedule.queue"),
    ] {
        let request = pb::CreateScheduleRequest { schedule: Some(bad) };
        assert_eq!(field(&schedules.create_schedule(request).await.unwrap_err()), named);
    }
}

#[tokio::test]
async fn a_shutdown_ends_every_kind_of_call() {
    let broker = Broker::start().await;
    let (_requests, mut consuming) = broker.open("q").await;
    broker.push("q", small(1)).await;
    deliveries(&mut consuming, 1).await;
    let (_batches, receiver) = mpsc::channel::<pb::PushStreamRequest>(1);
    let mut pushing =
        broker.queues().push_stream(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    let mut watching =
        broker.admin().watch_queues(pb::WatchQueuesRequest::default()).await.unwrap().into_inner();
    watching.message().await.unwrap().unwrap();
    let mut scaling =
        broker.scaler().stream_is_active(scaled_object("q")).await.unwrap().into_inner();
    assert!(scaling.message().await.unwrap().unwrap().result);
    let request = HealthCheckRequest { service: "sluicegate.v1.QueueService".into() };
    let mut health =
        HealthClient::new(broker.channel.clone()).watch(request).await.unwrap().into_inner();
    assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    broker.ensure("empty").await;
    let mut queues = broker.queues();
    let waiting = tokio::spawn(async move {
        let wait = Some(prost_types::Duration { seconds: 600, nanos: 0 });
        queues.pop(pb::PopRequest { queue: "empty".into(), wait, ..Default::default() }).await
    });
    broker.until("empty", |stats| stats.consumers == 1).await;
    let missing = pb::ConsumeRequest { queue: "missing".into(), ..Default::default() };
    let mut missing = broker.queues().consume(missing).await.unwrap().into_inner();

    broker.health.set_serving(false).await;
    assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    broker.shutdown.cancel();
    let mut ends = vec![waiting.await.unwrap().unwrap_err(), pushing.message().await.unwrap_err()];
    ends.push(missing.message().await.unwrap_err());
    ends.push(scaling.message().await.unwrap_err());
    ends.push(loop {
        if let Err(end) = consuming.message().await {
            break end;
        }
    });
    ends.push(loop {
        if let Err(end) = watching.message().await {
            break end;
        }
    });
    for end in ends {
        assert_eq!((end.code(), reason(&end)), (Code::Unavailable, "SHUTTING_DOWN".into()));
        assert!(end.get_error_details().retry_info().is_some());
    }
    assert_eq!(health.message().await.unwrap(), None);
    broker.serving.await.unwrap();
}
