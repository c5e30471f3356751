//! Connections that are slow, silent or too many.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, server::ResolvesServerCertUsingSni},
};

use super::{places::MOST_WAITING, *};
use crate::{access::Access, metrics::Metrics};

const SHORT: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_mins(1);

/// Returns a listener all of whose places are for everyone.
async fn listener(duty: Duty, most: usize) -> (Listener, SocketAddr) {
    let (listener, address) = fair_listener(duty, most).await;
    (Listener { most_of_peer: most, ..listener }, address)
}

async fn fair_listener(duty: Duty, most: usize) -> (Listener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bounds = Bounds { handshake_timeout: SHORT, ..Bounds::default() };
    (Listener::new(listener, "tests", duty, most, &bounds), address)
}

async fn read(connection: &mut Connection) -> io::Result<usize> {
    let mut buffer = [0; 100];
    let read = tokio::time::timeout(LIMIT, connection.read(&mut buffer)).await;
    read.expect("a time-out of the connection's own")
}

#[tokio::test]
async fn connections_are_bounded_by_the_places() {
    let (mut listener, address) = listener(Duty::FirstBytes(1), 1).await;
    let mut first = TcpStream::connect(address).await.unwrap();
    let (mut taken, _) = listener.accept().await;
    first.write_all(b"1").await.unwrap();
    read(&mut taken).await.unwrap();
    let _second = TcpStream::connect(address).await.unwrap();
    assert!(tokio::time::timeout(SHORT, listener.accept()).await.is_err());
    drop(taken);
    tokio::time::timeout(LIMIT, listener.accept()).await.expect("there is room");
}

/// The connection that sent something last stays the longest.
#[tokio::test]
async fn the_most_silent_connection_makes_room_for_the_next() {
    let (mut listener, address) = listener(Duty::Answers, 2).await;
    listener.timeout = LIMIT;
    let mut speaking = TcpStream::connect(address).await.unwrap();
    let (mut heard, _) = listener.accept().await;
    let _silent = TcpStream::connect(address).await.unwrap();
    let (mut unheard, _) = listener.accept().await;
    speaking.write_all(b"GET").await.unwrap();
    read(&mut heard).await.unwrap();
    let _next = TcpStream::connect(address).await.unwrap();
    let closed = async move { read(&mut unheard).await.unwrap_err().kind() };
    let (closed, _third) = tokio::join!(closed, listener.accept());
    assert_eq!(closed, io::ErrorKind::ConnectionAborted);
    speaking.write_all(b" /").await.unwrap();
    assert_eq!(read(&mut heard).await.unwrap(), 2);
}

/// An address that has as many connections as it may loses its own silent ones, and gets no others.
#[tokio::test]
async fn one_address_never_has_more_than_its_share_of_the_connections() {
    let (mut listener, address) = fair_listener(Duty::FirstBytes(1), 5).await;
    assert_eq!(listener.most_of_peer, 3, "half of all");
    listener.timeout = LIMIT;
    let mut clients = Vec::new();
    let mut accepted = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).await.unwrap();
        let (mut connection, _) = listener.accept().await;
        if accepted.len() < 2 {
            client.write_all(b"1").await.unwrap();
            read(&mut connection).await.unwrap();
        }
        clients.push(client);
        accepted.push(connection);
    }
    clients.push(TcpStream::connect(address).await.unwrap());
    let (mut fourth, _) = listener.accept().await;
    let mut silent = accepted.remove(2);
    assert_eq!(read(&mut silent).await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    drop(silent);
    clients[3].write_all(b"1").await.unwrap();
    read(&mut fourth).await.unwrap();
    // None of the three is silent any more.
    let mut refused = TcpStream::connect(address).await.unwrap();
    assert!(tokio::time::timeout(SHORT, listener.accept()).await.is_err());
    assert_eq!(refused.read(&mut [0; 9]).await.unwrap(), 0, "closed");
    // Others get what is left.
    let other = tokio::net::TcpSocket::new_v4().unwrap();
    other.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let _other = other.connect(address).await.unwrap();
    let (_, from) = tokio::time::timeout(LIMIT, listener.accept()).await.expect("a place");
    assert_eq!(from.ip().to_string(), "127.0.0.2");
    drop(accepted);
    let _next = TcpStream::connect(address).await.unwrap();
    tokio::time::timeout(LIMIT, listener.accept()).await.expect("a place of a closed connection");
}

#[tokio::test]
async fn a_connection_that_never_begins_is_closed() {
    let (mut listener, address) = listener(Duty::FirstBytes(3), 9).await;
    let mut silent = TcpStream::connect(address).await.unwrap();
    let (mut connection, _) = listener.accept().await;
    silent.write_all(b"12").await.unwrap();
    assert_eq!(read(&mut connection).await.unwrap(), 2);
    let closed = read(&mut connection).await.unwrap_err();
    assert_eq!(closed.kind(), io::ErrorKind::TimedOut);
}

/// Returns a server without certificates, which is enough for clients that never finish the handshake.
fn without_certificates() -> TlsAcceptor {
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let none = ResolvesServerCertUsingSni::new();
    TlsAcceptor::from(Arc::new(config.with_cert_resolver(Arc::new(none))))
}

/// A client that is silent in its handshake neither stays nor delays others.
#[tokio::test]
async fn a_connection_that_does_not_finish_the_tls_handshake_is_closed() {
    let (mut listener, address) = listener(Duty::FirstBytes(3), 9).await;
    let tls = watch::Sender::new(without_certificates());
    let access = Access::new(None, 0, Arc::new(Metrics::new()));
    listener.tls = Some(Handshakes { acceptor: tls.subscribe(), access });
    let _silent = TcpStream::connect(address).await.unwrap();
    let (mut silent, _) = listener.accept().await;
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let (mut refused, _) = listener.accept().await;
    assert_eq!(read(&mut refused).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(read(&mut refused).await.unwrap_err().kind(), io::ErrorKind::NotConnected);
    assert_eq!(read(&mut silent).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn a_connection_that_has_begun_may_be_silent() {
    let (mut listener, address) = listener(Duty::FirstBytes(3), 9).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let (mut connection, _) = listener.accept().await;
    client.write_all(b"123").await.unwrap();
    assert_eq!(read(&mut connection).await.unwrap(), 3);
    assert!(tokio::time::timeout(3 * SHORT, connection.read(&mut [0; 9])).await.is_err());
}

#[tokio::test]
async fn an_incomplete_request_is_timed_out() {
    let (mut listener, address) = listener(Duty::Answers, 9).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let (mut connection, _) = listener.accept().await;
    connection.write_all(b"an answer").await.unwrap();
    let dripping = tokio::spawn(async move {
        while client.write_all(b"x").await.is_ok() {
            sleep(SHORT / 10).await;
        }
    });
    let closed = loop {
        if let Err(closed) = read(&mut connection).await {
            break closed;
        }
    };
    assert_eq!(closed.kind(), io::ErrorKind::TimedOut);
    drop(connection);
    dripping.await.unwrap();
}

/// What the broker writes when too much was reset.
const CALM_DOWN: [u8; 17] = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 11];

async fn connect(address: SocketAddr, from: &str) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    let mut client = socket.connect(address).await.unwrap();
    client.write_all(b"1").await.unwrap();
    client
}

/// Whoever goes too far is served again, but not at once, and keeps nobody else waiting.
#[tokio::test]
async fn an_address_whose_connections_are_ended_for_abuse_waits_for_the_next_one() {
    let (mut listener, address) = listener(Duty::FirstBytes(1), 99).await;
    for (nth, cut) in [(1, 17), (2, 16)] {
        let _client = connect(address, "127.0.0.1").await;
        let (mut connection, _) = listener.accept().await;
        assert!(connection.wait.is_none(), "no wait for the connection number {nth}");
        assert_eq!(read(&mut connection).await.unwrap(), 1);
        let (one, rest) = CALM_DOWN.split_at(cut);
        connection.write_all(one).await.unwrap();
        let parts = [io::IoSlice::new(rest), io::IoSlice::new(b"")];
        std::future::poll_fn(|context| {
            Pin::new(&mut connection).poll_write_vectored(context, &parts)
        })
        .await
        .unwrap();
    }
    let _client = connect(address, "127.0.0.1").await;
    let (mut waiting, _) = listener.accept().await;
    let delay = waiting.wait.as_ref().expect("a wait").delay;
    let (begun, usage) = (Instant::now(), Arc::clone(&waiting.peer.usage));
    let _other = connect(address, "127.0.0.2").await;
    let (mut other, _) = listener.accept().await;
    assert!(other.wait.is_none(), "others do not wait");
    assert_eq!(read(&mut other).await.unwrap(), 1);
    assert!(usage.waiting.take(2) && !usage.waiting.take(2), "one waits");
    usage.waiting.release();
    assert_eq!(read(&mut waiting).await.unwrap(), 1);
    assert!(begun.elapsed() >= delay);
    assert!(usage.waiting.take(1), "it does not wait any more");
    assert!(tokio::time::timeout(3 * SHORT, waiting.read(&mut [0; 9])).await.is_err(), "open");
}

#[tokio::test]
async fn few_connections_of_an_address_wait_and_more_are_closed() {
    let (mut listener, address) = listener(Duty::FirstBytes(1), 99).await;
    let network = "127.0.0.1".parse().unwrap();
    while listener.places.ended.failed(network) < Duration::from_secs(2) {}
    let mut waiting = Vec::new();
    for _ in 0..MOST_WAITING {
        let client = connect(address, "127.0.0.1").await;
        waiting.push((client, listener.accept().await));
    }
    let mut closed = connect(address, "127.0.0.1").await;
    let _other = connect(address, "127.0.0.2").await;
    let (_, from) = tokio::time::timeout(LIMIT, listener.accept()).await.expect("another one");
    assert_eq!(from.ip().to_string(), "127.0.0.2");
    assert!(closed.read(&mut [0; 9]).await.map_or(true, |read| read == 0), "closed");
    waiting.pop();
    let _next = connect(address, "127.0.0.1").await;
    let (next, _) = tokio::time::timeout(LIMIT, listener.accept()).await.expect("the next one");
    assert!(next.wait.is_some());
}
