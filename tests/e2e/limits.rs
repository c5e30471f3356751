//! The cost of one request to the broker, and of streams that nobody reads.

use bytes::{BufMut, Bytes};
use futures_util::{StreamExt, stream};
use sluicegate_proto::v1::{
    PopRequest, PushResponse, WatchQueuesRequest, admin_service_client::AdminServiceClient,
};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use super::access;
use crate::harness::{Backend, Launch, within};

/// Sends raw bytes, and reads no answer.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = PushResponse;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = PushResponse;
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<PushResponse>, Status> {
        Ok(Some(PushResponse::default()))
    }
}

async fn send(channel: Channel, method: &str, message: Bytes) -> Status {
    let path: PathAndQuery = format!("/sluicegate.v1.{method}").parse().expect("a path");
    let mut client = Grpc::new(channel).send_compressed(CompressionEncoding::Gzip);
    client.ready().await.expect("a broker");
    client.unary(Request::new(message), path, Raw).await.expect_err("a request that costs too much")
}

/// Small compressed requests with millions of empty entries are refused, and cost the broker no
/// more memory than their decompressed bytes. Decoded they would take gigabytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_request_cannot_cost_gigabytes() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let address = broker.address.clone();
    let channel = Channel::from_shared(address).expect("an address").connect_lazy();
    // Field 2, length-delimited, empty: an item of a push, a push of a commit-and-push. Field 1: a receipt.
    let entries = |key: u8, count: usize| Bytes::from([key, 0].repeat(count));
    let cases = [
        ("QueueService/Push", entries(0x12, 8_000_000)),
        ("QueueService/CommitAndPush", entries(0x12, 8_000_000)),
        ("QueueService/Commit", entries(0x0a, 2_000_000)),
        ("QueueService/Commit", entries(0x0a, 8_000_000)),
        ("QueueService/Rollback", entries(0x0a, 2_000_000)),
        ("AdminService/WatchQueues", entries(0x0a, 500_000)),
        ("AdminService/WatchQueues", entries(0x0a, 8_000_000)),
    ];
    for (method, message) in cases {
        let status = within(method, send(channel.clone(), method, message)).await;
        let refused = [Code::InvalidArgument, Code::ResourceExhausted].contains(&status.code());
        assert!(refused, "{method}: {status:?}");
    }
    let peak = broker.peak_memory();
    assert!(peak < 250 << 20, "{} MiB", peak >> 20);
    let request = PopRequest { queue: "work".to_owned(), ..Default::default() };
    broker.api().await.queue.pop(request).await.expect("a broker that still answers");
}

/// What is known of queues is in memory once, however many streams tell of it to clients that read nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_figures_that_nobody_reads_take_little_memory() {
    const QUEUES: usize = 2_000;
    let broker = Launch::new().flag("store", "sqlite::memory:").start().await;
    let channel = access::channel(&broker).await;
    let push =
        async |n: usize| access::push(&channel, "none is asked for", &format!("queue-{n}")).await;
    let mut pushes = stream::iter(0..QUEUES).map(&push).buffer_unordered(100);
    while let Some(pushed) = pushes.next().await {
        pushed.expect("a push");
    }
    let mut admin = AdminServiceClient::new(channel.clone());
    let watch = async |admin: &mut AdminServiceClient<Channel>| {
        let watched = admin.watch_queues(WatchQueuesRequest::default()).await;
        watched.expect("a stream").into_inner()
    };
    let mut read = watch(&mut admin).await;
    let mut told = 0;
    while told < QUEUES {
        let message = within("figures", read.message()).await.expect("a stream that goes on");
        told += message.expect("figures").stats.len();
    }
    let before = broker.memory();
    // On a connection of their own: what is not read holds up the others of its connection.
    let mut idle = AdminServiceClient::new(access::channel(&broker).await);
    let mut unread = Vec::new();
    for _ in 0..200 {
        unread.push(watch(&mut idle).await);
    }
    // By then all streams have been told of all queues, as far as their clients read.
    for n in 0..3 {
        push(n).await.expect("a push");
        within("a change", read.message()).await.expect("a stream that goes on");
    }
    let after = broker.memory();
    assert!(after < before + (64 << 20), "{} MiB, then {} MiB", before >> 20, after >> 20);
    broker.stop().await;
}
