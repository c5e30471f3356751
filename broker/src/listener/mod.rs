//! The connections of both servers of the broker. Their number is bounded by the configured places
//! and by the available file descriptors. A connection that never sends a request is closed. gRPC
//! connections use TLS if it is configured.
//!
//! While all places are taken, the connection that has been silent the longest is closed, so that
//! one place is free for the next client. Connections that have begun a gRPC session are exempt:
//! they respond to pings or are closed.
//!
//! One address has at most half of the places, so that it never keeps others out. When it has as many connections as it
//! may, its own most silent connection is closed for its next one. If none of its connections is silent, the next one is
//! closed at once. The console has no such share, because probes and browsers of one machine share an address, and its
//! connections make room when they are silent.
//!
//! When connections of an address are ended again and again because of what came over them, as after too many resets, the
//! next ones of that address wait longer and longer until they are served. A few at a time wait; more are closed at once.

mod frames;
mod places;
#[cfg(test)]
mod tests;
mod tls;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::serve::IncomingStream;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;

use self::{
    frames::Frames,
    places::{Place, Places, Wait},
    tls::Transport,
};
use crate::{
    access::{Peer, Peers, network},
    config::Bounds,
};

pub(crate) use self::tls::{Handshakes, acceptor};

/// The pause after a connection could not be accepted because something ran out.
const PAUSE: Duration = Duration::from_millis(200);
/// A problem that lasts is logged at most once in this time.
const COMPLAINTS: Duration = Duration::from_secs(30);
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
    /// How long the client has for its duty.
    timeout: Duration,
    tls: Option<Handshakes>,
    places: Arc<Places>,
    /// Most connections of one peer.
    most_of_peer: usize,
    peers: Peers,
    complained: Option<Instant>,
}

impl Listener {
    /// Returns the listener for gRPC. It accepts at most as many connections as three quarters of
    /// the files that the process may open. Each connection has to begin as HTTP/2 requires, after
    /// the TLS handshake if `tls` is given.
    pub(crate) fn grpc(listener: TcpListener, tls: Option<Handshakes>, bounds: &Bounds) -> Self {
        let most = unless_zero(bounds.max_connections).min(open_files() / 4 * 3);
        let duty = Duty::FirstBytes(PREFACE_BYTES);
        Self { tls, ..Self::new(listener, "gRPC", duty, most, bounds) }
    }

    /// Returns the listener for the console: a few connections, each of which has to send requests in good time.
    pub(crate) fn console(listener: TcpListener, bounds: &Bounds) -> Self {
        let all = Self::new(listener, "HTTP", Duty::Answers, CONSOLE_CONNECTIONS, bounds);
        Self { most_of_peer: usize::MAX, ..all }
    }

    fn new(
        socket: TcpListener,
        purpose: &'static str,
        duty: Duty,
        most: usize,
        bounds: &Bounds,
    ) -> Self {
        let most_of_peer = unless_zero(bounds.max_connections_per_peer).min(most.div_ceil(2));
        let (places, peers) = (Arc::new(Places::new(most)), Peers::default());
        let timeout = bounds.handshake_timeout;
        let (tls, complained) = (None, None);
        Self { socket, purpose, duty, timeout, tls, places, most_of_peer, peers, complained }
    }

    /// Returns the next connection. May be dropped and called again.
    pub(crate) async fn accept(&mut self) -> (Connection, SocketAddr) {
        if self.places.free.available_permits() == 0 {
            self.complain(
                "as many connections are open as may be: silent ones are closed, others wait",
            );
            self.places.close_most_silent();
        }
        let mut place = Place::take(&self.places).await;
        loop {
            match self.socket.accept().await {
                Ok((stream, address)) => {
                    let usage = self.peers.usage(address.ip());
                    let (delay, mut wait) = (self.delay(address.ip()), None);
                    if !delay.is_zero() {
                        wait = Wait::begin(&usage, delay);
                        if wait.is_none() {
                            continue;
                        }
                    }
                    if !usage.connections.take(self.most_of_peer) {
                        self.complain("an address has as many connections as it may have");
                        if !self.places.close_most_silent_of(&usage) {
                            continue;
                        }
                        // One more for a moment, until the silent connection is closed.
                        usage.connections.take(usize::MAX);
                    }
                    place.usage = Some(usage);
                    let _ = stream.set_nodelay(true); // without it, the connection is only slower
                    let duty = (self.duty, self.timeout);
                    let connection = Connection::new(stream, self.tls.as_ref(), duty, place, wait);
                    return (connection, address);
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

    /// Returns how long the next connection of an address has to wait.
    fn delay(&mut self, address: IpAddr) -> Duration {
        let delay = self.places.ended.delay(network(address));
        if !delay.is_zero() {
            self.complain(&format!(
                "connections of {address} were ended because of what came over them: its next ones wait"
            ));
        }
        delay
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

impl axum::extract::connect_info::Connected<IncomingStream<'_, Listener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Self {
        stream.io().peer.clone()
    }
}

/// Returns true for an error of one connection, after which the next one can usually be accepted immediately.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Returns a limit of which zero means that there is none.
fn unless_zero(limit: u32) -> usize {
    if limit == 0 { usize::MAX } else { limit as usize }
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

/// One connection. Dropping it makes room for another.
pub(crate) struct Connection {
    transport: Transport,
    peer: Peer,
    duty: Option<Duty>,
    timeout: Duration,
    /// When the wait is over; after that, when the connection is closed unless the client does its duty.
    deadline: Pin<Box<Sleep>>,
    wait: Option<Wait>,
    /// What is written to a connection of gRPC.
    frames: Option<Frames>,
    place: Place,
    /// Done when the place is wanted for another connection.
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn new(
        stream: TcpStream,
        tls: Option<&Handshakes>,
        (duty, timeout): (Duty, Duration),
        mut place: Place,
        wait: Option<Wait>,
    ) -> Self {
        place.sign_of_life();
        let closing = Box::pin(place.closing.clone().cancelled_owned());
        let deadline = Box::pin(sleep(wait.as_ref().map_or(timeout, |wait| wait.delay)));
        let frames = matches!(duty, Duty::FirstBytes(_)).then(Frames::default);
        let address = stream.peer_addr().ok();
        let usage = place.usage.clone().unwrap_or_default();
        let peer = Peer { address, names: Arc::default(), usage };
        let transport = Transport::new(stream, tls, &peer);
        let duty = Some(duty);
        Self { transport, peer, duty, timeout, deadline, wait, frames, place, closing }
    }

    /// Returns the other end.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether the connection is served, and an error if it is to be closed.
    fn poll_served(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.duty.is_none() {
            return Poll::Ready(Ok(()));
        }
        if self.closing.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if self.wait.is_some() {
            ready!(self.deadline.as_mut().poll(context));
            self.wait = None;
            self.deadline.as_mut().reset(Instant::now() + self.timeout);
        }
        if self.deadline.as_mut().poll(context).is_ready() {
            self.transport.too_slow();
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Ready(Ok(()))
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

    fn written(&mut self, bytes: &[u8]) {
        if let Some(frames) = &mut self.frames
            && frames.end_for_abuse(bytes)
            && let Some(network) = self.peer.network()
        {
            self.place.count_end(network);
        }
    }

    fn answered(&mut self) {
        if let Some(Duty::Answers) = self.duty {
            self.deadline.as_mut().reset(Instant::now() + self.timeout);
            self.place.sign_of_life();
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_served(context))?;
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
        ready!(self.poll_served(context))?;
        let transport = ready!(self.transport.poll_ready(context))?;
        let written = ready!(transport.poll_write(context, bytes))?;
        self.written(&bytes[..written]);
        self.answered();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_served(context))?;
        let transport = ready!(self.transport.poll_ready(context))?;
        let written = ready!(transport.poll_write_vectored(context, parts))?;
        let mut left = written;
        for part in parts {
            let part = &part[..left.min(part.len())];
            left -= part.len();
            self.written(part);
        }
        self.answered();
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true // TCP and TLS alike
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_served(context))?;
        ready!(self.transport.poll_ready(context))?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.transport.poll_shutdown(context)
    }
}
