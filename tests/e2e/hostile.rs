//! Clients that mean harm, in raw HTTP/2 or below it. Others are served while they attack, and within a second afterwards,
//! and the memory that an attack took is free again.

use std::{io, time::Instant};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    access,
    neighbour::{ATTACK, elsewhere, socket, survives},
    raw_http2::{CONTINUATION, HEADERS, PING, PREFACE, SETTINGS, begin, call, frame, reset},
};
use crate::harness::{Backend, Launch, until, within};

/// Opens a connection and writes `prelude`, then what `next` adds for each number, without reading anything. Begins anew
/// when the broker ends the connection, until the time is up. Returns how often `next` was called.
async fn flood(address: &str, prelude: &[u8], next: impl Fn(u32, &mut Vec<u8>)) -> u32 {
    let begun = Instant::now();
    let left = || ATTACK.saturating_sub(begun.elapsed());
    let mut total = 0;
    let mut bytes = Vec::new();
    while !left().is_zero() {
        let mut stream = begin(address).await;
        let mut written = timeout(left(), stream.write_all(prelude)).await;
        for first in (0..).step_by(100) {
            if !matches!(written, Ok(Ok(()))) {
                break;
            }
            bytes.clear();
            (first..first + 100).for_each(|n| next(n, &mut bytes));
            written = timeout(left(), stream.write_all(&bytes)).await;
            total += 100;
        }
    }
    total
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_reset_at_once() {
    survives("reset flood", async |address: String| {
        let push = call("/sluicegate.v1.QueueService/Push");
        flood(&address, &[], |n, bytes| bytes.extend(reset(&push, n))).await
    })
    .await;
}

/// An address that resets too much again and again has to wait for each next connection, and is served then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_resets_too_much_waits() {
    let flags = Launch::new().flag("store", "sqlite::memory:").flag("max-resets", "10");
    let broker = flags.start().await;
    let push = call("/sluicegate.v1.QueueService/Push");
    let resets: Vec<u8> = (0..1_000).flat_map(|n| reset(&push, n)).collect();
    until("the address waits", || async {
        let mut stream = begin(&broker.address).await;
        let _ = stream.write_all(&resets).await; // the broker may have ended it
        let mut said = Vec::new();
        let _ = within("the end of the connection", stream.read_to_end(&mut said)).await;
        broker.log().contains("connections of 127.0.0.2 were ended").then_some(())
    })
    .await;
    let other = within("others do not wait", access::channel(&broker)).await;
    access::push(&other, "none is asked for", "work").await.expect("a push");
    let waiting = within("a connection of the address", elsewhere(&broker.address)).await;
    access::push(&waiting, "none is asked for", "work").await.expect("a push");
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pings_whose_answers_are_not_read() {
    survives("ping flood", async |address: String| {
        flood(&address, &[], |_, bytes| bytes.extend(frame(PING, 0, 0, &[7; 8]))).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_never_end() {
    survives("half headers", async |address: String| {
        let headers = frame(HEADERS, 0, 1, &call("/sluicegate.v1.QueueService/Push"));
        flood(&address, &headers, |n, bytes| {
            let name = format!("x-{n:08}");
            let mut block = vec![0, 10];
            block.extend_from_slice(name.as_bytes());
            block.push(100);
            block.extend_from_slice(&[b'x'; 100]);
            bytes.extend(frame(CONTINUATION, 0, 1, &block));
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_without_end() {
    survives("huge settings", async |address: String| {
        // 2,000 unknown settings in each frame; then the header table as large as can be said.
        let mut unknown = [[0xf0, 0x0f, 1, 2, 3, 4]; 2_000].concat();
        unknown.extend_from_slice(&[0, 1, 0xff, 0xff, 0xff, 0xff]);
        let settings = frame(SETTINGS, 0, 0, &unknown);
        flood(&address, &[], |_, bytes| bytes.extend_from_slice(&settings)).await
    })
    .await;
}

/// Connections that say nothing, half of the preface, or the preface and nothing more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_stall() {
    survives("stalled handshakes", async |address: String| {
        let mut stalled = Vec::new();
        for n in 0..300 {
            let mut stream = socket(&address).await;
            let part = &PREFACE[..[0, PREFACE.len() / 2, PREFACE.len()][n % 3]];
            stream.write_all(part).await.expect("to write");
            stalled.push(stream);
        }
        sleep(ATTACK).await;
        u32::try_from(stalled.len()).expect("a small number")
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
