//! Clients that ask for as much as they may, from another address: nothing of it is refused. They wait until the broker has seen what
//! they sent, so that it is never far behind, and send the next. `tests/run e2e` shows how long the pushes of a client beside them take;
//! docs/RELIABILITY.md has figures.

use std::time::Instant;

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    neighbour::{ATTACK, survives},
    raw_http2::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, RST_STREAM,
        SETTINGS, WINDOW_UPDATE, begin, call, frame,
    },
};
use crate::harness::within;

/// How many connections an attacker has.
const CONNECTIONS: usize = 4;
/// How many frames it sends before it waits for the broker.
const AT_A_TIME: u32 = 100;

/// Sends a ping, and reads until it is answered: by then the broker has seen all that was sent before.
async fn until_seen(stream: &mut TcpStream) {
    stream.write_all(&frame(PING, 0, 0, &[1; 8])).await.expect("to write");
    let answered = async {
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.expect("a frame");
            let [a, b, c, kind, flags, ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            stream.read_exact(&mut payload).await.expect("a frame");
            assert_ne!(kind, GOAWAY, "the broker ends the connection: {payload:?}");
            if (kind, flags) == (PING, ACK) && payload == [1; 8] {
                return;
            }
        }
    };
    within("the answer to a ping", answered).await;
}

/// Repeats `round` on several connections, each time with the number of the first frame, until the attack is over. Returns how many rounds
/// there were.
async fn repeat(address: &str, round: impl AsyncFn(&mut TcpStream, u32)) -> u32 {
    let begun = Instant::now();
    let attackers = (0..CONNECTIONS).map(async |_| {
        let mut stream = begin(address).await;
        let mut rounds = 0;
        while begun.elapsed() < ATTACK {
            round(&mut stream, rounds * AT_A_TIME).await;
            rounds += 1;
        }
        rounds
    });
    join_all(attackers).await.into_iter().sum()
}

/// The id of the nth call of a connection.
fn id(n: u32) -> u32 {
    2 * n + 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_reset_when_the_broker_has_seen_them() {
    survives("resets within the bound", async |address: String| {
        let push = call("/sluicegate.v1.QueueService/Push");
        repeat(&address, async |stream, first| {
            let calls =
                (first..first + AT_A_TIME).flat_map(|n| frame(HEADERS, END_HEADERS, id(n), &push));
            stream.write_all(&calls.collect::<Vec<u8>>()).await.expect("to write");
            until_seen(stream).await;
            let cancel = 8_u32.to_be_bytes();
            let resets =
                (first..first + AT_A_TIME).flat_map(|n| frame(RST_STREAM, 0, id(n), &cancel));
            stream.write_all(&resets.collect::<Vec<u8>>()).await.expect("to write");
            until_seen(stream).await;
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pings_whose_answers_are_read() {
    survives("pings within the bound", async |address: String| {
        let pings = frame(PING, 0, 0, &[7; 8]).repeat(AT_A_TIME as usize);
        repeat(&address, async |stream, _| {
            stream.write_all(&pings).await.expect("to write");
            until_seen(stream).await;
        })
        .await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_whose_answers_are_read() {
    survives("settings within the bound", async |address: String| {
        let settings = frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]).repeat(AT_A_TIME as usize);
        repeat(&address, async |stream, _| {
            stream.write_all(&settings).await.expect("to write");
            until_seen(stream).await;
        })
        .await
    })
    .await;
}

/// Calls with nearly as much metadata as may be, in several frames. Two at a time, because a debug build takes half a millisecond
/// for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_headers() {
    survives("headers within the bound", async |address: String| {
        let first = call("/grpc.health.v1.Health/Check");
        let field = [&[0, 3][..], b"x-a", &[100], &[b'x'; 100]].concat();
        repeat(&address, async |stream, number| {
            let mut bytes = Vec::new();
            for n in number..number + 2 {
                bytes.extend(frame(HEADERS, 0, id(n), &first));
                // With what HTTP/2 counts for each field, 13 KiB.
                for part in 0..4 {
                    let flags = if part == 3 { END_HEADERS } else { 0 };
                    bytes.extend(frame(CONTINUATION, flags, id(n), &field.repeat(24)));
                }
                bytes.extend(frame(DATA, END_STREAM, id(n), &[0; 5])); // an empty message
            }
            // Room for the answers, which are shorter.
            bytes.extend(frame(WINDOW_UPDATE, 0, 0, &1_000_u32.to_be_bytes()));
            stream.write_all(&bytes).await.expect("to write");
            until_seen(stream).await;
        })
        .await
    })
    .await;
}

/// Connections that begin HTTP/2, are answered, and end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_connections() {
    survives("connections within the bound", async |address: String| {
        let begun = Instant::now();
        let attackers = (0..CONNECTIONS).map(async |_| {
            let mut connections = 0;
            while begun.elapsed() < ATTACK {
                let mut stream = begin(&address).await;
                until_seen(&mut stream).await;
                connections += 1;
            }
            connections
        });
        join_all(attackers).await.into_iter().sum()
    })
    .await;
}
