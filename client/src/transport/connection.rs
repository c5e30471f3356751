//! One HTTP/2 connection, in a task of its own.

use std::{future::poll_fn, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::{
    Ping, PingPong, SendStream,
    client::{Builder, ResponseFuture, SendRequest},
};
use hyper_util::client::legacy::connect::HttpConnector;
use sluicegate_proto::gathered::Gathered;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Mutex,
    time::{sleep, timeout},
};
use tonic::codegen::{StdError, http::Request};
use tower::ServiceExt;

use super::{Endpoint, failure::Unanswered};

/// HTTP/2 flow control: how much a broker may send before it is read. Larger for the connection than for a stream: one stream that is
/// not read must not stall the others.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// How many calls may be under way before the broker has said how many it allows.
const FIRST_CALLS: usize = 100;

/// The most bytes of headers in an answer: the details of an error are among them.
const HEADERS: u32 = 64 << 10;

/// A handle on a connection, which ends when it has no handles and no calls.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    /// A call that has no room yet keeps the others waiting, here and not in the connection: those that are given up are then not
    /// sent.
    calls: Arc<Mutex<SendRequest<Bytes>>>,
}

impl Connection {
    /// Makes a connection.
    pub(crate) async fn open(endpoint: &Endpoint) -> Result<Self, StdError> {
        let opened = timeout(endpoint.connect_timeout, async {
            let stream = tcp(endpoint).await?;
            match &endpoint.tls {
                None => Self::start(Gathered::new(stream), endpoint).await,
                Some(tls) => Self::start(tls.connect(Gathered::new(stream)).await?, endpoint).await,
            }
        });
        opened.await.unwrap_or_else(|_| Err("it took too long".into()))
    }

    async fn start<S>(stream: S, endpoint: &Endpoint) -> Result<Self, StdError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (calls, mut connection) = Builder::new()
            .enable_push(false)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .initial_max_send_streams(FIRST_CALLS)
            .max_header_list_size(HEADERS)
            .handshake(stream)
            .await?;
        let pings = connection.ping_pong();
        let keep_alive = endpoint.keep_alive;
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = connection => ended,
                () = unanswered(pings, keep_alive) => {
                    tracing::debug!("a connection did not answer a ping");
                    Ok(())
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended");
            }
        });
        Ok(Self { calls: Arc::new(Mutex::new(calls)) })
    }

    /// Begins a call, whose body is still to be sent, when the broker allows one more.
    pub(super) async fn begin(
        &self,
        call: Request<()>,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), Unanswered> {
        let mut calls = self.calls.lock().await;
        let ready = poll_fn(|context| calls.poll_ready(context)).await;
        ready
            .and_then(|()| calls.send_request(call, false))
            .map_err(|error| Unanswered::refused(&error))
    }

    /// Returns true if both are handles on the same connection.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.calls, &other.calls)
    }
}

async fn tcp(endpoint: &Endpoint) -> Result<TcpStream, StdError> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false); // TLS comes on top
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(endpoint.connect_timeout)); // shared by all addresses of a name
    Ok(tcp.oneshot(endpoint.to.clone()).await?.into_inner())
}

/// Pings the broker now and then, and returns when a ping is not answered.
async fn unanswered(pings: Option<PingPong>, every: Duration) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        sleep(every).await;
        if !matches!(timeout(every, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}
