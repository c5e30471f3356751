//! The connections of both servers of the broker. Their number is bounded by the configured places
//! and by the available file descriptors. A connection that never sends a request is closed. gRPC
//! connections use TLS if it is configured.
//!
//! While all places are taken, the connection that has been silent the longest is closed, so that
//! one place is free for the next client. Connections that have begun a gRPC session are exempt:
//! they respond to pings or are closed.

mod tls;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, TcpConnectInfo};

use self::tls::Transport;

pub(crate) use self::tls::{TlsError, acceptor};

/// The pause after a connection could not be accepted because something ran out.
const PAUSE: Duration = Duration::from_millis(200);
/// A problem that lasts is logged at most once in this time.
const COMPLAINTS: Duration = Duration::from_secs(30);
/// A connection without a request is closed after this time, which includes the TLS handshake.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The length of the preface, which an HTTP/2 client sends first.
const PREFACE_BYTES: usize = 24;
/// The most connections of the console, which needs few at a time.
const CONSOLE_CONNECTIONS: usize = 64;

/// What a client has to do to keep its connection.
#[derive(Debug, Clone, Copy)]
enum Duty {
    /// Send this many bytes in good time. After these the HTTP/2 server watches the connection.
    FirstBytes(usize),
    /// Send requests that are answered, again and again.
    Answers,
}

/// Accepts connections of a TCP listener.
pub(crate) struct Listener {
    socket: TcpListener,
    /// What the connections are for, in the log.
    purpose: &'static str,
    duty: Duty,
    timeout: Duration,
    tls: Option<TlsAcceptor>,
    places: Arc<Places>,
    complained: Option<Instant>,
}

impl Listener {
    /// Returns the listener for gRPC. It accepts at most as many connections as three quarters of
    /// the files that the process may open. Each connection has to begin as HTTP/2 requires, after
    /// the TLS handshake if `tls` is given.
    pub(crate) fn grpc(listener: TcpListener, tls: Option<TlsAcceptor>) -> Self {
        let most = open_files() / 4 * 3;
        let duty = Duty::FirstBytes(PREFACE_BYTES);
        Self { tls, ..Self::new(listener, "gRPC", duty, most, REQUEST_TIMEOUT) }
    }

    /// Returns the listener for the console: a few connections, each of which has to send requests in good time.
    pub(crate) fn console(listener: TcpListener) -> Self {
        Self::new(listener, "HTTP", Duty::Answers, CONSOLE_CONNECTIONS, REQUEST_TIMEOUT)
    }

    fn new(
        socket: TcpListener,
        purpose: &'static str,
        duty: Duty,
        most: usize,
        timeout: Duration,
    ) -> Self {
        let places = Arc::new(Places::new(most));
        Self { socket, purpose, duty, timeout, tls: None, places, complained: None }
    }

    /// Returns the next connection. May be dropped and called again.
    pub(crate) async fn accept(&mut self) -> (Connection, SocketAddr) {
        if self.places.free.available_permits() == 0 {
            self.complain(
                "as many connections are open as may be: silent ones are closed, others wait",
            );
            self.places.close_most_silent();
        }
        let place = Place::take(&self.places).await;
        loop {
            match self.socket.accept().await {
                Ok((stream, address)) => {
                    let _ = stream.set_nodelay(true); // without it, the connection is only slower
                    let duty = (self.duty, self.timeout);
                    return (Connection::new(stream, self.tls.as_ref(), duty, place), address);
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    self.complain(&error.to_string());
                    self.places.close_most_silent(); // its file descriptor is wanted
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Returns streams that receive all connections from now on, in turn. All of them have to be
    /// polled, because each waits for its turn.
    pub(crate) fn in_turn(self, hands: usize) -> Vec<BoxStream<'static, io::Result<Connection>>> {
        let listener = Arc::new(tokio::sync::Mutex::new(self));
        let hand = |listener| {
            stream::unfold(listener, |listener: Arc<tokio::sync::Mutex<Self>>| async move {
                // The lock is fair: the stream that has just got a connection is the last to get another.
                let (connection, _) = listener.lock().await.accept().await;
                Some((Ok(connection), listener))
            })
            .boxed()
        };
        (0..hands).map(|_| hand(Arc::clone(&listener))).collect()
    }

    fn complain(&mut self, reason: &str) {
        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAINTS) {
            self.complained = Some(Instant::now());
            tracing::warn!(purpose = self.purpose, reason, "cannot take connections just now");
        }
    }
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        Self::accept(self).await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// Returns true for an error of one connection, after which the next one can usually be accepted immediately.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Returns how many files this process may open.
fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Lets the process open as many files as the system allows, because each connection is one.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the broker serves fewer connections.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The connections that may be open at a time.
struct Places {
    free: Arc<Semaphore>,
    silent: Mutex<Silent>,
}

/// The connections that may be closed for others, those that have been silent the longest first.
#[derive(Default)]
struct Silent {
    connections: BTreeMap<u64, CancellationToken>,
    /// How many signs of life there have been so far.
    signs: u64,
}

impl Places {
    fn new(most: usize) -> Self {
        let free = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
        Self { free, silent: Mutex::default() }
    }

    /// Closes the connection that has been silent the longest, if there is one that may be closed.
    fn close_most_silent(&self) {
        if let Some((_, closing)) = self.silent.lock().connections.pop_first() {
            closing.cancel();
        }
    }
}

/// The place of one connection. Dropping it makes room for another.
struct Place {
    places: Arc<Places>,
    /// The number of its last sign of life, if it may be closed for others.
    silent_since: Option<u64>,
    closing: CancellationToken,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Place {
    async fn take(places: &Arc<Places>) -> Self {
        let permit = Arc::clone(&places.free).acquire_owned().await.ok(); // never closed
        let places = Arc::clone(places);
        Self { places, silent_since: None, closing: CancellationToken::new(), _permit: permit }
    }

    /// Puts the connection behind all others that may be closed.
    fn sign_of_life(&mut self) {
        let mut silent = self.places.silent.lock();
        if let Some(since) = self.silent_since
            && silent.connections.remove(&since).is_none()
        {
            return; // the connection is being closed
        }
        silent.signs += 1;
        let signs = silent.signs;
        silent.connections.insert(signs, self.closing.clone());
        self.silent_since = Some(signs);
    }

    /// Exempts the connection from being closed for others from now on.
    fn keep(&mut self) {
        if let Some(since) = self.silent_since.take() {
            self.places.silent.lock().connections.remove(&since);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.keep();
    }
}

/// One connection. Dropping it makes room for another.
pub(crate) struct Connection {
    transport: Transport,
    peer: TcpConnectInfo,
    duty: Option<Duty>,
    timeout: Duration,
    /// When the connection is closed unless the client does its duty.
    deadline: Pin<Box<Sleep>>,
    place: Place,
    /// Done when the place is wanted for another connection.
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn new(
        stream: TcpStream,
        tls: Option<&TlsAcceptor>,
        (duty, timeout): (Duty, Duration),
        mut place: Place,
    ) -> Self {
        place.sign_of_life();
        let closing = Box::pin(place.closing.clone().cancelled_owned());
        let deadline = Box::pin(sleep(timeout));
        let peer = stream.connect_info();
        let transport = Transport::new(stream, tls);
        Self { transport, peer, duty: Some(duty), timeout, deadline, place, closing }
    }

    fn check_deadline(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.duty.is_none() {
            return Ok(());
        }
        if self.deadline.as_mut().poll(context).is_ready() {
            self.transport.too_slow();
            return Err(io::ErrorKind::TimedOut.into());
        }
        if self.closing.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    fn received(&mut self, bytes: usize) {
        match &mut self.duty {
            Some(Duty::FirstBytes(left)) => {
                *left = left.saturating_sub(bytes);
                if *left == 0 {
                    self.duty = None;
                    self.place.keep();
                }
            }
            Some(Duty::Answers) => self.place.sign_of_life(),
            None => {}
        }
    }

    fn answered(&mut self) {
        if let Some(Duty::Answers) = self.duty {
            self.deadline.as_mut().reset(Instant::now() + self.timeout);
            self.place.sign_of_life();
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_deadline(context)?;
        let before = buffer.filled().len();
        ready!(ready!(self.transport.poll_ready(context))?.poll_read(context, buffer))?;
        self.received(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(context)?;
        let transport = ready!(self.transport.poll_ready(context))?;
        let written = ready!(transport.poll_write(context, bytes))?;
        self.answered();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(context)?;
        let transport = ready!(self.transport.poll_ready(context))?;
        let written = ready!(transport.poll_write_vectored(context, parts))?;
        self.answered();
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true // TCP and TLS alike
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_deadline(context)?;
        ready!(self.transport.poll_ready(context))?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.transport.poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::rustls::{ServerConfig, crypto::ring, server::ResolvesServerCertUsingSni};

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const LIMIT: Duration = Duration::from_mins(1);

    async fn listener(duty: Duty, most: usize) -> (Listener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (Listener::new(listener, "tests", duty, most, SHORT), address)
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
        listener.tls = Some(without_certificates());
        let _silent = TcpStream::connect(address).await.unwrap();
        let (mut silent, _) = listener.accept().await;
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let (mut refused, _) = listener.accept().await;
        assert_eq!(read(&mut refused).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read(&mut refused).await.unwrap_err().kind(), io::ErrorKind::NotConnected);
        assert_eq!(read(&mut silent).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// Each age of connections gets its share of the connections.
    #[tokio::test]
    async fn connections_are_distributed_in_turn() {
        let (listener, address) = listener(Duty::Answers, 9).await;
        let mut hands = listener.in_turn(3);
        for _ in 0..2 {
            for hand in &mut hands {
                let _client = TcpStream::connect(address).await.unwrap();
                let assigned = tokio::time::timeout(LIMIT, hand.next()).await;
                assigned.expect("a connection").expect("more to come").unwrap();
            }
        }
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
}
