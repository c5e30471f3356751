//! Each bound, breached by one client while another one behaves well.

use super::*;

/// Returns a broker within these bounds.
async fn bounded(bounds: Bounds) -> Broker {
    broker_with(Options { bounds, ..open() }).await
}

fn too_many(status: &Status, expected_reason: &str, setting: &str) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert_eq!(reason(status), expected_reason);
    let details = status.get_error_details();
    assert_eq!(details.error_info().unwrap().metadata["setting"], setting);
    assert!(details.retry_info().is_some());
}

/// A call of another address than the one that all other clients have.
async fn elsewhere(broker: &Broker) -> Channel {
    let endpoint = Channel::from_shared(broker.address.clone()).unwrap();
    endpoint.local_address(Some([127, 0, 0, 2].into())).connect().await.unwrap()
}

#[tokio::test]
async fn waiting_calls_of_one_address_leave_room_for_others_and_come_to_an_end() {
    let bounds = Bounds { max_requests: 4, max_requests_per_peer: 3, ..Bounds::default() };
    let broker = bounded(bounds).await;
    broker.push("q", small(1)).await;
    // Waits for an item of a queue that is not there.
    let wait = |mut queues: QueueServiceClient<Channel>| {
        tokio::spawn(async move {
            let wait = Some(prost_types::Duration { seconds: 600, nanos: 0 });
            let request = pb::ReserveRequest { queue: "other".into(), wait, ..Default::default() };
            // Other calls of this test may take its place for a moment.
            while queues.reserve(request.clone()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    let waiting: Vec<_> = (0..3).map(|_| wait(broker.queues())).collect();
    let stats = pb::GetQueueStatsRequest { queue: "q".into() };
    let refused = loop {
        match broker.admin().get_queue_stats(stats.clone()).await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(refused) => break refused,
        }
    };
    too_many(&refused, "TOO_MANY_REQUESTS", "max_requests_per_peer");
    let other = elsewhere(&broker).await;
    let mut admin = AdminServiceClient::new(other.clone());
    admin.get_queue_stats(stats.clone()).await.expect("others are served");
    let last = wait(QueueServiceClient::new(other));
    let refused = loop {
        match admin.get_queue_stats(stats.clone()).await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(refused) => break refused,
        }
    };
    too_many(&refused, "TOO_MANY_REQUESTS", "max_requests");
    // Cancelled calls make room.
    for call in waiting {
        call.abort();
    }
    while broker.admin().get_queue_stats(stats.clone()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    last.abort();
}

#[tokio::test]
async fn streams_are_bounded_for_one_address_and_in_all() {
    let bounds = Bounds { max_streams: 3, max_streams_per_peer: 2, ..Bounds::default() };
    let broker = bounded(bounds).await;
    broker.push("q", small(1)).await;
    let consume = || pb::ConsumeRequest { queue: "q".into(), ..Default::default() };
    let watch = pb::WatchQueuesRequest { queues: vec!["q".into()] };
    let first = broker.queues().consume(consume()).await.unwrap();
    let _second = broker.admin().watch_queues(watch).await.unwrap();
    let refused = broker.queues().consume(consume()).await.unwrap_err();
    too_many(&refused, "TOO_MANY_STREAMS", "max_streams_per_peer");
    broker.push("q", small(1)).await;
    let mut others = QueueServiceClient::new(elsewhere(&broker).await);
    let _third = others.consume(consume()).await.expect("others have streams");
    let refused = others.consume(consume()).await.unwrap_err();
    too_many(&refused, "TOO_MANY_STREAMS", "max_streams");
    drop(first);
    while others.consume(consume()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whoever has no token uses up no streams of those who have one, and health is told when others have used up all.
#[tokio::test]
async fn streams_that_need_no_token_are_counted_apart() {
    let bounds = Bounds { max_streams: 2, ..Bounds::default() };
    let broker = bounded(bounds).await;
    broker.push("q", small(1)).await;
    let mut health = HealthClient::new(elsewhere(&broker).await);
    let consume = || pb::ConsumeRequest { queue: "q".into(), ..Default::default() };
    let mut watching = vec![health.watch(HealthCheckRequest::default()).await.unwrap()];
    let _first = broker.queues().consume(consume()).await.unwrap();
    watching.push(health.watch(HealthCheckRequest::default()).await.unwrap());
    let refused = health.watch(HealthCheckRequest::default()).await.unwrap_err();
    too_many(&refused, "TOO_MANY_STREAMS", "max_streams");
    broker.push("q", small(1)).await;
    let _second = broker.queues().consume(consume()).await.expect("a stream of another kind");
    let refused = broker.queues().consume(consume()).await.unwrap_err();
    too_many(&refused, "TOO_MANY_STREAMS", "max_streams");
    drop(watching);
    while health.watch(HealthCheckRequest::default()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// For want of a place a refusal is not held back. Tokens cannot be tried out quickly then either.
#[tokio::test]
async fn an_address_that_was_refused_too_often_is_not_looked_at_while_strangers_have_all_places() {
    let tokens = "[[token]]\nname = 'ann'\ntoken = '0123456789abcdef'\nallow = ['admin@*']\n";
    let tokens = Arc::new(crate::access::tokens::Tokens::parse(tokens).unwrap());
    let access = Access::new(Some(tokens), 1, Arc::new(Metrics::new()));
    let bounds = Bounds { max_streams: 1, ..Bounds::default() };
    let broker = broker_with(Options { access, bounds, ..super::open() }).await;
    let watch = async |mut client: AdminServiceClient<Channel>, token: &str| {
        let mut request = tonic::Request::new(pb::WatchQueuesRequest::default());
        let token = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", token);
        client.watch_queues(request).await
    };
    let (right, wrong) = ("0123456789abcdef", "0123456789abcdeX");
    let health = HealthClient::new(elsewhere(&broker).await);
    let watching = health.clone().watch(HealthCheckRequest::default()).await.unwrap();
    drop(watch(broker.admin(), right).await.expect("a place that is no stranger's"));
    for _ in 0..2 {
        let refused = watch(broker.admin(), wrong).await.unwrap_err();
        too_many(&refused, "TOO_MANY_STREAMS", "max_streams");
    }
    let refused = watch(broker.admin(), right).await.unwrap_err();
    too_many(&refused, "TOO_MANY_STREAMS", "max_streams");
    let other = AdminServiceClient::new(elsewhere(&broker).await);
    while watch(other.clone(), right).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await; // the first one has just ended
    }
    drop(watching);
    while watch(broker.admin(), right).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn queues_are_bounded_and_dead_letter_queues_are_not_refused() {
    let limits = Limits { max_queues: 3, ..Limits::default() };
    let broker = broker_within(open(), limits).await;
    for queue in ["a", "b", "c", "a"] {
        broker.push(queue, small(1)).await;
    }
    let push = |queue: &str| pb::PushRequest {
        queue: queue.into(),
        items: items(small(1)),
        ..Default::default()
    };
    let refused = broker.queues().push(push("d")).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::ResourceExhausted, "TOO_MANY_QUEUES".into())
    );
    let reserve = pb::ReserveRequest { queue: "a".into(), ..Default::default() };
    let reserved = broker.queues().reserve(reserve).await.unwrap().into_inner().deliveries;
    let item = pb::RollbackItem {
        receipt: reserved[0].receipt.clone(),
        dead_letter: true,
        ..Default::default()
    };
    let rollback = pb::RollbackRequest { items: vec![item] };
    let results = broker.queues().rollback(rollback).await.unwrap().into_inner().results;
    assert_eq!(results[0].outcome(), pb::Outcome::DeadLettered);
    let delete = pb::DeleteQueueRequest { name: "c".into(), force: true };
    broker.admin().delete_queue(delete.clone()).await.unwrap();
    assert!(broker.queues().push(push("d")).await.is_err(), "the dead-letter queue counts");
    broker
        .admin()
        .delete_queue(pb::DeleteQueueRequest { name: "b".into(), ..delete })
        .await
        .unwrap();
    broker.queues().push(push("d")).await.expect("there is room again");
}

/// Calls that create queues at the same time do not pass the bound together.
#[tokio::test]
async fn queues_that_are_created_at_the_same_time_are_bounded() {
    let broker = broker_within(open(), Limits { max_queues: 3, ..Limits::default() }).await;
    let push = async |number: usize| {
        let queue = format!("q-{number}");
        let request = pb::PushRequest { queue, items: items(small(1)), ..Default::default() };
        broker.queues().push(request).await.is_ok()
    };
    let created = futures_util::future::join_all((0..20).map(push)).await;
    assert_eq!(created.iter().filter(|created| **created).count(), 3);
}

/// Metadata beyond the limit is refused before anything else is looked at.
#[tokio::test]
async fn metadata_is_bounded() {
    let broker = bounded(Bounds { max_metadata_bytes: 4 << 10, ..Bounds::default() }).await;
    broker.push("q", small(1)).await;
    let call = async |bytes: usize| {
        let request = pb::GetQueueStatsRequest { queue: "q".into() };
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("x-large", "x".repeat(bytes).parse().unwrap());
        broker.admin().get_queue_stats(request).await
    };
    call(3 << 10).await.unwrap();
    call(5 << 10).await.unwrap_err();
    broker.push("q", small(1)).await;
}

/// Returns the beginning of ListItems calls over one connection of whose answers, 4 MiB each, nothing is read.
async fn unread(broker: &Broker, calls: usize) -> UnreadCalls {
    let address = broker.address.trim_start_matches("http://");
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    // One answer that is not read leaves room for the others.
    let mut client = h2::client::Builder::new();
    client.initial_connection_window_size(16 << 20).initial_window_size(64 << 10);
    let (client, connection) = client.handshake(socket).await.unwrap();
    let connection = tokio::spawn(async move { drop(connection.await) });
    let mut client = client.ready().await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..calls {
        let request =
            axum::http::Request::post("http://broker/sluicegate.v1.AdminService/ListItems")
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(())
                .unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        let list = pb::ListItemsRequest { queue: "large".into(), ..Default::default() };
        let message = prost::Message::encode_to_vec(&list);
        let mut frame = vec![0];
        frame.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
        frame.extend_from_slice(&message);
        body.send_data(frame.into(), true).unwrap();
        client = client.ready().await.unwrap();
        answers.push(response.await.unwrap().into_body());
    }
    UnreadCalls { answers, _client: client, connection }
}

struct UnreadCalls {
    answers: Vec<h2::RecvStream>,
    _client: h2::client::SendRequest<prost::bytes::Bytes>,
    connection: JoinHandle<()>,
}

impl UnreadCalls {
    /// Reads an answer to its end. Returns how long it is, or why it ends early.
    async fn read(&mut self, number: usize) -> Result<usize, Option<h2::Reason>> {
        let answer = &mut self.answers[number];
        let mut bytes = 0;
        while let Some(part) = answer.data().await {
            let part = part.map_err(|error| error.reason())?;
            bytes += part.len();
            answer.flow_control().release_capacity(part.len()).unwrap();
        }
        Ok(bytes)
    }
}

/// Fills the queue `large` with one page of 3.9 MB.
async fn with_large_page(bounds: Bounds) -> Broker {
    let broker = bounded(bounds).await;
    broker.push("large", vec![vec![1; 390_000]; 10]).await;
    broker
}

/// Answers that nobody reads are dropped after a while. Whoever reads in time gets all of its answer.
#[tokio::test]
async fn an_answer_that_nobody_reads_is_dropped() {
    let unread_timeout = Duration::from_secs(2);
    let broker = with_large_page(Bounds { unread_timeout, ..Bounds::default() }).await;
    let mut calls = unread(&broker, 3).await;
    assert!(calls.read(1).await.unwrap() > 3_900_000);
    while broker.unread_bytes() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for number in [0, 2] {
        let ended = calls.read(number).await.unwrap_err();
        assert_eq!(ended, Some(h2::Reason::ENHANCE_YOUR_CALM));
    }
    assert!(!calls.connection.is_finished());
    let list = pb::ListItemsRequest { queue: "large".into(), ..Default::default() };
    assert_eq!(broker.admin().list_items(list).await.unwrap().into_inner().items.len(), 10);
}

/// Answers that are not read take no more than their budget. The peer that has left the most loses its own, and waits longer and longer
/// for its next ones.
#[tokio::test]
async fn unread_answers_are_bounded_and_who_reads_is_served() {
    let broker = with_large_page(Bounds { max_unread_bytes: 10 << 20, ..Bounds::default() }).await;
    let begun = std::time::Instant::now();
    let mut calls = unread(&broker, 14).await; // there is room for two
    assert!(begun.elapsed() >= Duration::from_millis(50 + 100 + 200), "{:?}", begun.elapsed());
    assert!(broker.unread_bytes() <= 10 << 20, "{}", broker.unread_bytes());
    let mut admin =
        AdminServiceClient::new(elsewhere(&broker).await).max_decoding_message_size(64 << 20);
    let list = pb::ListItemsRequest { queue: "large".into(), ..Default::default() };
    for _ in 0..5 {
        let page = admin.list_items(list.clone()).await.expect("others are served");
        assert_eq!(page.into_inner().items.len(), 10);
    }
    let ended = calls.read(0).await.unwrap_err();
    assert_eq!(ended, Some(h2::Reason::ENHANCE_YOUR_CALM), "the first is dropped first");
    drop(calls);
    while broker.unread_bytes() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A refusal that is held back does not keep what its client sends: there is room on the connection for more.
#[tokio::test]
async fn a_call_that_is_refused_late_takes_no_memory() {
    let tokens = "[[token]]\nname = 'ann'\ntoken = '0123456789abcdef'\nallow = ['admin@*']\n";
    let tokens = Arc::new(crate::access::tokens::Tokens::parse(tokens).unwrap());
    let access = Access::new(Some(tokens), 1, Arc::new(Metrics::new()));
    let broker = broker_with(Options { access, ..super::open() }).await;
    let call = async || broker.admin().get_queue(pb::GetQueueRequest { name: "q".into() }).await;
    let refused = futures_util::future::join_all((0..7).map(|_| call())).await;
    assert!(refused.iter().all(Result::is_err), "from now on refusals take two seconds");
    let address = broker.address.trim_start_matches("http://");
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut client, connection) = h2::client::handshake(socket).await.unwrap();
    let connection = tokio::spawn(async move { drop(connection.await) });
    let (mut answers, mut bodies) = (Vec::new(), Vec::new());
    // More than the window of the connection, in all.
    for _ in 0..20 {
        client = client.ready().await.unwrap();
        let request = axum::http::Request::post("http://broker/sluicegate.v1.QueueService/Push");
        let request = request.header("content-type", "application/grpc").body(()).unwrap();
        let (response, body) = client.send_request(request, false).unwrap();
        answers.push(response);
        bodies.push(body);
    }
    let send_all = async {
        for body in &mut bodies {
            for _ in 0..8 {
                let part = prost::bytes::Bytes::from(vec![0; 100 << 10]);
                body.reserve_capacity(part.len());
                while body.capacity() < part.len() {
                    std::future::poll_fn(|context| body.poll_capacity(context))
                        .await
                        .expect("a call under way")
                        .expect("capacity");
                }
                body.send_data(part, false).expect("a call under way");
            }
        }
    };
    tokio::select! {
        biased;
        () = send_all => {}
        _ = answers.pop().expect("a call") => panic!("the bodies had to wait for a refusal"),
    }
    connection.abort();
}
