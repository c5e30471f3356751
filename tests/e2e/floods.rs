//! Each bound on what a client may use, breached without end by a client of another address, while one that behaves well
//! pushes. `tests/run e2e` shows how long its pushes take; docs/RELIABILITY.md has the figures of a release build.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use h2::client::SendRequest;
use prost::Message;
use sluicegate_proto::v1::{
    ConsumeRequest, GetQueueStatsRequest, ListItemsRequest, NewItem, PushRequest, ReserveRequest,
    admin_service_client::AdminServiceClient, queue_service_client::QueueServiceClient,
};
use tokio::{io::AsyncReadExt, task::JoinSet, time::sleep};
use tonic::{Code, Request, Status};

use super::{
    access::{self, TokensFile},
    neighbour::{ATTACK, elsewhere, serves_and_stores, serves_others, socket},
};
use crate::harness::{Launch, duration, within};

/// How many calls an attacker has under way.
const AT_A_TIME: usize = 16;

/// Runs an attack that breaches a bound.
async fn breaches<F: Future<Output = u32>>(
    setting: &str,
    value: &str,
    attack: impl Fn(String) -> F + Copy + Send + 'static,
) {
    let launch = Launch::new().flag("store", "sqlite::memory:").flag(setting, value);
    let name = format!("{setting} = {value}, breached");
    serves_others(&name, &launch, "none is asked for", attack).await;
}

/// Repeats a call, several at a time, until the attack is over. Returns how often it was refused.
async fn repeat(refusal: Code, call: impl AsyncFn(usize) -> Result<(), Status>) -> u32 {
    let begun = Instant::now();
    let callers = (0..AT_A_TIME).map(async |caller| {
        let mut refused = 0;
        while begun.elapsed() < ATTACK {
            if call(caller).await.is_err_and(|status| status.code() == refusal) {
                refused += 1;
            }
        }
        refused
    });
    join_all(callers).await.into_iter().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_connections() {
    breaches("max-connections-per-peer", "50", async |address: String| {
        let mut held = VecDeque::new();
        for _ in 0..50 {
            held.push_back(socket(&address).await);
        }
        let begun = Instant::now();
        let mut refused = 0;
        while begun.elapsed() < ATTACK {
            held.push_back(socket(&address).await);
            // The one that has been silent the longest is closed.
            let mut silent = held.pop_front().expect("a connection");
            let end = async { while matches!(silent.read(&mut [0; 64]).await, Ok(1..)) {} };
            within("the end of a connection", end).await;
            refused += 1;
        }
        refused
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_calls() {
    breaches("max-requests-per-peer", "50", async |address: String| {
        let queues = QueueServiceClient::new(elsewhere(&address).await);
        let wait = |time| ReserveRequest {
            queue: "empty".to_owned(),
            wait: duration(Duration::from_secs(time)),
            ..ReserveRequest::default()
        };
        let mut waiting = JoinSet::new();
        for _ in 0..50 {
            let mut queues = queues.clone();
            // Again and again: the callers below may be there first, and the bound would never be reached.
            waiting.spawn(async move { while queues.reserve(wait(600)).await.is_err() {} });
        }
        repeat(Code::ResourceExhausted, async |_| queues.clone().reserve(wait(0)).await.map(drop))
            .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_streams() {
    breaches("max-streams-per-peer", "50", async |address: String| {
        let queues = QueueServiceClient::new(elsewhere(&address).await);
        let consume = || ConsumeRequest { queue: "empty".to_owned(), ..ConsumeRequest::default() };
        let mut held = Vec::new();
        for _ in 0..50 {
            held.push(queues.clone().consume(consume()).await.expect("a stream"));
        }
        repeat(Code::ResourceExhausted, async |_| queues.clone().consume(consume()).await.map(drop))
            .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_queues() {
    breaches("max-queues", "5", async |address: String| {
        let queues = QueueServiceClient::new(elsewhere(&address).await);
        repeat(Code::ResourceExhausted, async |caller| {
            let (queue, items) = (format!("another-{caller}"), vec![NewItem::default()]);
            let request = PushRequest { queue, items, ..PushRequest::default() };
            queues.clone().push(request).await.map(drop)
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_metadata() {
    breaches("max-metadata-bytes", "4KiB", async |address: String| {
        let admin = AdminServiceClient::new(elsewhere(&address).await);
        let large = "x".repeat(8 << 10);
        let mut refused = 0;
        let begun = Instant::now();
        while begun.elapsed() < ATTACK {
            let mut request = Request::new(GetQueueStatsRequest { queue: "beside".to_owned() });
            request.metadata_mut().insert("x-large", large.parse().expect("metadata"));
            refused += u32::from(admin.clone().get_queue_stats(request).await.is_err());
        }
        refused
    })
    .await;
}

/// The frame of a message of which only the first `sent` bytes are sent.
fn message(bytes: &[u8], sent: usize) -> Bytes {
    let length = u32::try_from(bytes.len()).expect("a short message").to_be_bytes();
    [&[0], &length[..], &bytes[..sent]].concat().into()
}

/// An HTTP/2 connection whose answers are not read, except for their headers. It ends with the set.
async fn raw(address: &str, connections: &mut JoinSet<()>) -> SendRequest<Bytes> {
    let mut builder = h2::client::Builder::new();
    builder.initial_connection_window_size(16 << 20).initial_window_size(64 << 10);
    let (client, connection) = builder.handshake(socket(address).await).await.expect("HTTP/2");
    connections.spawn(async move { drop(connection.await) });
    client
}

fn post(method: &str) -> axum::http::Request<()> {
    axum::http::Request::post(format!("http://broker/sluicegate.v1.{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .expect("a request")
}

/// Large messages of which the last byte does not come hold what room there is for large messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_bytes_that_come() {
    breaches("max-incoming-bytes", "8MiB", async |address: String| {
        let mut connections = JoinSet::new();
        let whole = vec![0; 4 << 20];
        let mut calls = Vec::new();
        for _ in 0..4 {
            let client = raw(&address, &mut connections).await;
            for _ in 0..8 {
                let mut client = client.clone().ready().await.expect("a connection");
                let (answer, mut body) =
                    client.send_request(post("QueueService/Push"), false).expect("a call");
                body.send_data(message(&whole, whole.len() - 1), false).expect("a part");
                calls.push((answer, body));
            }
        }
        sleep(ATTACK).await;
        u32::try_from(calls.len()).expect("a small number")
    })
    .await;
}

/// Reads an answer. Returns true if its call was ended, which only shows when something is read.
async fn is_ended(mut answer: h2::RecvStream) -> bool {
    while let Some(part) = within("a part of an answer", answer.data()).await {
        let Ok(part) = part else { return true };
        answer.flow_control().release_capacity(part.len()).expect("room for more");
    }
    false
}

/// Most calls whose answers nobody reads are ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_bytes_that_nobody_reads() {
    const LARGE: usize = 390_000;
    const ITEMS: usize = 10;
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("max-unread-bytes", "16MiB");
    let name = "max-unread-bytes = 16MiB, breached";
    serves_and_stores(
        name,
        &launch,
        "none is asked for",
        ITEMS * LARGE,
        async |address: String| {
            let mut queues = QueueServiceClient::new(elsewhere(&address).await);
            let large = NewItem { payload: Bytes::from(vec![1; LARGE]), ..NewItem::default() };
            let (queue, items) = ("large".to_owned(), vec![large; ITEMS]);
            let request = PushRequest { queue: queue.clone(), items, ..PushRequest::default() };
            queues.push(request).await.expect("a push");
            let list = ListItemsRequest { queue, ..ListItemsRequest::default() }.encode_to_vec();
            let begun = Instant::now();
            let mut connections = JoinSet::new();
            let mut unread = Vec::new();
            while begun.elapsed() < ATTACK {
                let client = raw(&address, &mut connections).await;
                for _ in 0..8 {
                    let mut client = client.clone().ready().await.expect("a connection");
                    let (answer, mut body) =
                        client.send_request(post("AdminService/ListItems"), false).expect("a call");
                    body.send_data(message(&list, list.len()), true).expect("a message");
                    unread.push(within("an answer", answer).await.expect("an answer").into_body());
                }
            }
            let ended = join_all(unread.into_iter().map(is_ended)).await;
            u32::try_from(ended.into_iter().filter(|ended| *ended).count()).expect("a small number")
        },
    )
    .await;
}

/// Calls that are not there are answered later and later too, and do not fill the audit log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_unknown_calls() {
    breaches("max-refusals", "20", async |address: String| {
        let mut connections = JoinSet::new();
        let client = raw(&address, &mut connections).await;
        repeat(Code::Unimplemented, async |_| {
            let mut client = client.clone().ready().await.expect("a connection");
            let (answer, _) =
                client.send_request(post("QueueService/Nothing"), true).expect("a call");
            let answer = within("an answer", answer).await.expect("an answer");
            let code = answer.headers().get("grpc-status").expect("a code");
            Err(Status::new(Code::from_bytes(code.as_bytes()), ""))
        })
        .await
    })
    .await;
}

/// Calls with a wrong token are answered later and later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_refused_tokens() {
    let file = TokensFile::new();
    let token = file.add("worker", &["produce@beside", "create@beside"]).await;
    let attack = async |address: String| {
        let channel = elsewhere(&address).await;
        repeat(Code::Unauthenticated, async |_| access::push(&channel, "wrong", "beside").await)
            .await
    };
    serves_others("max-refusals = 20, breached", &file.launch(), &token, attack).await;
}
