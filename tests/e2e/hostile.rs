//! Clients that mean harm, in raw HTTP/2 or below it. While they attack and afterwards, others are served, and the memory
//! that an attack took is given back.

use std::{
    io,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::harness::{Api, Backend, LIMIT, until, within};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// How long an attack lasts, unless the broker ends it sooner.
const ATTACK: Duration = Duration::from_secs(3);

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The headers of a gRPC call, without compression.
fn call(path: &str) -> Vec<u8> {
    let literal =
        |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    // :method POST and :scheme http are in the static table; the name of :path is its entry 4.
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(literal(path));
    for (name, value) in
        [(":authority", "broker"), ("content-type", "application/grpc"), ("te", "trailers")]
    {
        block.push(0);
        block.extend(literal(name));
        block.extend(literal(value));
    }
    block
}

/// A connection that has begun HTTP/2, to an address.
async fn begin(address: &str) -> TcpStream {
    let address = address.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(PREFACE).await.expect("to write");
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.expect("to write");
    stream
}

/// Writes the bytes again and again, reading nothing, until the time is up, the broker reads no more or it closes the
/// connection. Returns how often that was.
async fn flood(mut stream: TcpStream, mut next: impl FnMut(u32) -> Vec<u8>) -> u32 {
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < ATTACK {
        let bytes: Vec<u8> = (0..100).flat_map(|n| next(count + n)).collect();
        match timeout(ATTACK.saturating_sub(begun.elapsed()), stream.write_all(&bytes)).await {
            Ok(Ok(())) => count += 100,
            Ok(Err(_)) | Err(_) => break,
        }
    }
    count
}

/// Pushes one item at a time while the attack goes on, and returns the median latency in milliseconds.
async fn beside<T>(api: &Api, attack: impl Future<Output = T>) -> (f64, T) {
    let mut latencies = Vec::new();
    tokio::pin!(attack);
    let result = loop {
        let begun = Instant::now();
        tokio::select! {
            biased;
            result = &mut attack => break result,
            pushed = api.try_push("beside", vec![crate::harness::new_item("x")]) => {
                pushed.expect("others are served");
                latencies.push(begun.elapsed().as_secs_f64() * 1000.0);
            }
        }
        sleep(Duration::from_millis(5)).await;
    };
    latencies.sort_by(f64::total_cmp);
    (latencies.get(latencies.len() / 2).copied().unwrap_or(f64::NAN), result)
}

/// Runs an attack beside a client that behaves well, and looks at what is left of it.
async fn survives(name: &str, attack: impl AsyncFnOnce(String) -> u32) {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let (calm, ()) = beside(&api, sleep(Duration::from_secs(1))).await;
    let before = broker.memory();
    let attack = attack(broker.address.clone());
    let (attacked, count) = within(name, beside(&api, attack)).await;
    // A new client is served too.
    let other = within("a connection", Api::connect(&broker.address)).await;
    other.push("beside", &["after"]).await;
    // What the allocator keeps for itself is a few megabytes.
    let allowed = before + before / 10 + (16 << 20);
    until(&format!("{name}: memory is given back"), || async {
        (broker.memory() <= allowed).then_some(())
    })
    .await;
    println!(
        "{name}: {count} times; median push {calm:.1} ms before, {attacked:.1} ms meanwhile; memory {} MiB before, {} MiB after",
        before >> 20,
        broker.memory() >> 20
    );
    assert!(attacked < LIMIT.as_secs_f64() * 1000.0);
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_reset_at_once() {
    survives("reset flood", async |address| {
        let stream = begin(&address).await;
        flood(stream, |n| {
            let id = 2 * n + 1;
            let headers =
                frame(HEADERS, END_HEADERS, id, &call("/sluicegate.v1.QueueService/Push"));
            [headers, frame(RST_STREAM, 0, id, &8_u32.to_be_bytes())].concat()
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pings_whose_answers_are_not_read() {
    survives("ping flood", async |address| {
        flood(begin(&address).await, |_| frame(PING, 0, 0, &[7; 8])).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_never_end() {
    survives("half headers", async |address| {
        let mut stream = begin(&address).await;
        let headers = frame(HEADERS, 0, 1, &call("/sluicegate.v1.QueueService/Push"));
        stream.write_all(&headers).await.expect("to write");
        flood(stream, |n| {
            let name = format!("x-{n:08}");
            let mut block = vec![0, 10];
            block.extend_from_slice(name.as_bytes());
            block.push(100);
            block.extend_from_slice(&[b'x'; 100]);
            frame(CONTINUATION, 0, 1, &block)
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_without_end() {
    survives("huge settings", async |address| {
        // 2,000 unknown settings in each frame; then the header table as large as can be said.
        let mut unknown = [[0xf0, 0x0f, 1, 2, 3, 4]; 2_000].concat();
        unknown.extend_from_slice(&[0, 1, 0xff, 0xff, 0xff, 0xff]);
        flood(begin(&address).await, |_| frame(SETTINGS, 0, 0, &unknown)).await
    })
    .await;
}

/// Connections that say nothing, half of the preface, or the preface and nothing more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_stall() {
    survives("stalled handshakes", async |address| {
        let mut stalled = Vec::new();
        for n in 0..300 {
            let address = address.trim_start_matches("http://");
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            let part = &PREFACE[..[0, PREFACE.len() / 2, PREFACE.len()][n % 3]];
            stream.write_all(part).await.expect("to write");
            stalled.push(stream);
        }
        sleep(ATTACK).await;
        u32::try_from(stalled.len()).expect("a small number")
    })
    .await;
}

/// Calls whose large answers are asked for and never read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read() {
    survives("stalled reader", async |address| {
        let api = Api::connect(&address).await;
        let megabyte = "x".repeat(1 << 20);
        for _ in 0..8 {
            api.push("large", &[&megabyte]).await;
        }
        let mut stalled = Vec::new();
        for _ in 0..10 {
            let mut stream = begin(&address).await;
            for id in (1..40).step_by(2) {
                let path = "/sluicegate.v1.AdminService/ListItems";
                let mut bytes = frame(HEADERS, END_HEADERS, id, &call(path));
                // Field 1, the queue.
                let message = [&[0, 0, 0, 0, 7, 0x0a, 5][..], b"large"].concat();
                bytes.extend(frame(DATA, 1, id, &message));
                stream.write_all(&bytes).await.expect("to write");
            }
            stalled.push(stream);
        }
        sleep(ATTACK).await;
        u32::try_from(stalled.len() * 20).expect("a small number")
    })
    .await;
}

/// What is no HTTP/2 at all is answered by closing the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_other_protocols_are_not_waited_for() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    for bytes in
        [&b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n"[..], &[0x16, 3, 1, 0xff, 0xff], &[0; 64]]
    {
        let address = broker.address.trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(bytes).await.expect("to write");
        let closed = async {
            let mut buffer = [0; 1024];
            loop {
                match stream.read(&mut buffer).await {
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        };
        within("the end of the connection", closed).await.expect("a closed connection");
    }
    let api = broker.api().await;
    api.push("work", &["a"]).await;
    broker.stop().await;
}
