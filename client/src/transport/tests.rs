//! Calls against an HTTP/2 server that does what brokers and networks do.

use std::{
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use h2::{Reason, RecvStream, server};
use http_body::Frame;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tonic::{Code, codegen::http::HeaderValue};

use super::*;

type Served = server::Connection<TcpStream, Bytes>;
type Call = (Request<RecvStream>, server::SendResponse<Bytes>);

/// A test that waits this long has failed.
const HUNG: Duration = Duration::from_secs(20);

/// A server at an address of its own, and a channel to it.
struct Server {
    listener: TcpListener,
    channel: Arc<Channel>,
}

impl Server {
    async fn start() -> Self {
        Self::start_with(HUNG).await
    }

    async fn start_with(keep_alive: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let endpoint = Endpoint::new(url.parse().unwrap(), None, None, HUNG, keep_alive).unwrap();
        Self { listener, channel: Arc::new(Channel::new(endpoint)) }
    }

    /// Makes a call in a task of its own, and returns the text of its answer.
    fn call(&self, body: Body) -> tokio::task::JoinHandle<Result<String, Status>> {
        self.call_of(request(body))
    }

    fn call_of(&self, request: Request<Body>) -> tokio::task::JoinHandle<Result<String, Status>> {
        let channel = Arc::clone(&self.channel);
        tokio::spawn(async move {
            let answer = timeout(HUNG, channel.call(request)).await.expect("the call hangs")?;
            timeout(HUNG, text(answer.into_body())).await.expect("the answer hangs")
        })
    }

    async fn accepted(&self) -> TcpStream {
        timeout(HUNG, self.listener.accept()).await.expect("no one connected").unwrap().0
    }

    async fn connection(&self) -> Served {
        server::handshake(self.accepted().await).await.unwrap()
    }

    /// Returns a connection on which the client has said this, and the server nothing.
    async fn that_read(&self, text: &str) -> TcpStream {
        let (mut connection, mut all) = (self.accepted().await, Vec::new());
        while !all.windows(text.len()).any(|part| part == text.as_bytes()) {
            let read = timeout(HUNG, connection.read_buf(&mut all)).await;
            let read = read.expect("the text is missing").unwrap();
            assert_ne!(read, 0, "the client has closed the connection");
        }
        connection
    }
}

fn request(body: Body) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = tonic::codegen::http::Method::POST;
    *request.uri_mut() = "/sluicegate.v1.QueueService/Push".parse().unwrap();
    request
}

/// A call that has so much time, as `grpc-timeout` has it.
fn request_within(time: &'static str) -> Request<Body> {
    let mut request = request(message("x"));
    request.headers_mut().insert("grpc-timeout", HeaderValue::from_static(time));
    request
}

fn message(text: &str) -> Body {
    Body::new(text.to_owned())
}

async fn text(mut body: Received) -> Result<String, Status> {
    let mut text = Vec::new();
    while let Some(frame) =
        std::future::poll_fn(|context| http_body::Body::poll_frame(Pin::new(&mut body), context))
            .await
    {
        if let Ok(data) = frame?.into_data() {
            text.extend_from_slice(&data);
        }
    }
    Ok(String::from_utf8(text).unwrap())
}

/// Returns the next call on a connection.
async fn next(connection: &mut Served) -> Call {
    timeout(HUNG, connection.accept()).await.expect("no call came").unwrap().unwrap()
}

/// Returns why the client ends the only call of a connection.
async fn end_of_call(
    connection: &mut Served,
    end: impl Future<Output = Result<Reason, h2::Error>>,
) -> Reason {
    tokio::select! {
        told = timeout(HUNG, end) => told.expect("the server is not told").unwrap(),
        _ = connection.accept() => panic!("another call, or the end"),
    }
}

/// Reads a call and answers it with what it said.
async fn echo((mut request, mut respond): Call) {
    let mut said = Vec::new();
    while let Some(data) = request.body_mut().data().await {
        let Ok(data) = data else { return }; // it was given up
        request.body_mut().flow_control().release_capacity(data.len()).unwrap();
        said.extend_from_slice(&data);
    }
    let mut answer = respond.send_response(Response::new(()), false).unwrap();
    answer.send_data(said.into(), true).unwrap();
}

/// Answers all calls of a connection, until it ends.
async fn serve(mut connection: Served) {
    while let Some(call) = connection.accept().await {
        let Ok(call) = call else { return };
        tokio::spawn(echo(call));
    }
}

#[tokio::test]
async fn all_calls_go_over_one_connection() {
    let server = Server::start().await;
    let calls: Vec<_> = (0..500).map(|n| server.call(message(&n.to_string()))).collect();
    tokio::spawn(serve(server.connection().await));
    for (n, answer) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(answer.unwrap().unwrap(), n.to_string());
    }
    assert!(server.listener.accept().now_or_never().is_none(), "a second connection was made");
}

#[tokio::test]
async fn a_server_with_tls_is_recognised() {
    let server = Server::start().await;
    let call = server.call(message("hello"));
    let mut connection = server.that_read("PRI * HTTP/2.0").await;
    connection.write_all(&[21, 3, 3, 0, 2, 2, 50]).await.unwrap(); // an alert: it cannot be decoded
    connection.shutdown().await.unwrap();
    let error = call.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("https://"), "{error}");
}

/// The frames SETTINGS, and GOAWAY with the number of the last call that was taken.
fn goaway(last: u8) -> Vec<u8> {
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let goaway = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, last, 0, 0, 0, 0];
    [&settings[..], &goaway[..]].concat()
}

#[tokio::test]
async fn a_call_that_came_too_late_for_its_connection_is_made_on_another() {
    let server = Server::start().await;
    let call = server.call(message("hello"));
    let mut old = server.that_read("hello").await;
    old.write_all(&goaway(0)).await.unwrap();
    tokio::spawn(serve(server.connection().await));
    assert_eq!(call.await.unwrap().unwrap(), "hello");
}

#[tokio::test]
async fn a_call_that_its_connection_took_is_not_made_again() {
    let server = Server::start().await;
    let call = server.call(message("hello"));
    let mut old = server.that_read("hello").await;
    old.write_all(&goaway(1)).await.unwrap();
    drop(old);
    let status = call.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(is_broken(&status) && !is_unsent(&status));
    assert!(server.listener.accept().now_or_never().is_none(), "the call was made again");
}

#[tokio::test]
async fn a_call_that_is_refused_each_time_fails_unsent() {
    let server = Server::start().await;
    let call = server.call(message("hello"));
    for _ in 0..TRIES {
        let mut connection = server.connection().await;
        next(&mut connection).await.1.send_reset(Reason::REFUSED_STREAM);
        tokio::spawn(async move { while connection.accept().await.is_some() {} });
    }
    let status = call.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(is_unsent(&status));
}

#[tokio::test]
async fn calls_go_on_after_connections_end_and_while_there_is_none() {
    let server = Server::start().await;
    let calls: Vec<_> = (0..3).map(|_| server.call(message("x"))).collect();
    // A connection that ends before a call was answered.
    drop(server.connection().await);
    for call in calls {
        let status = call.await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    }
    // One that ends between two calls.
    let call = server.call(message("one"));
    let serving = tokio::spawn(serve(server.connection().await));
    assert_eq!(call.await.unwrap().unwrap(), "one");
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    let call = server.call(message("two"));
    tokio::spawn(serve(server.connection().await));
    assert_eq!(call.await.unwrap().unwrap(), "two");
}

#[tokio::test]
async fn without_a_server_all_calls_fail_unsent_and_later_ones_try_again() {
    let Server { listener, channel } = Server::start().await;
    let address = listener.local_addr().unwrap();
    drop(listener);
    for failed in join_all((0..3).map(|_| channel.call(request(message("x"))))).await {
        let status = failed.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(is_unsent(&status));
        let start = format!("cannot connect to http://{address}: ");
        assert!(status.message().starts_with(&start), "{status:?}");
    }
    let server = Server { listener: TcpListener::bind(address).await.unwrap(), channel };
    let call = server.call(message("back"));
    tokio::spawn(serve(server.connection().await));
    assert_eq!(call.await.unwrap().unwrap(), "back");
}

#[test]
fn a_channel_outlives_the_runtime_that_made_its_connection() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let server = first.block_on(Server::start());
    let address = server.listener.local_addr().unwrap();
    let Server { listener, channel } = server;
    first.block_on(async {
        // The connection is being made as the runtime ends.
        let call = channel.call(request(message("x")));
        assert!(timeout(Duration::ZERO, call).await.is_err());
    });
    drop((listener, first));
    runtime().block_on(async {
        let server = Server { listener: TcpListener::bind(address).await.unwrap(), channel };
        let call = server.call(message("again"));
        tokio::spawn(serve(server.connection().await));
        assert_eq!(call.await.unwrap().unwrap(), "again");
    });
}

#[tokio::test]
async fn a_call_ends_at_its_deadline_and_the_server_is_told() {
    let server = Server::start().await;
    let call = server.call_of(request_within("50m"));
    let mut connection = server.connection().await;
    let (_request, mut respond) = next(&mut connection).await;
    let end = std::future::poll_fn(|context| respond.poll_reset(context));
    assert_eq!(end_of_call(&mut connection, end).await, Reason::CANCEL);
    assert_eq!(call.await.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn an_answer_that_has_begun_ends_at_the_deadline_too() {
    let server = Server::start().await;
    let call = server.call_of(request_within("500m"));
    let mut connection = server.connection().await;
    let (_request, mut respond) = next(&mut connection).await;
    let mut answer = respond.send_response(Response::new(()), false).unwrap();
    answer.send_data("a part".into(), false).unwrap();
    let end = std::future::poll_fn(|context| answer.poll_reset(context));
    assert_eq!(end_of_call(&mut connection, end).await, Reason::CANCEL);
    assert_eq!(call.await.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
}

/// A body that fails after its first message, when it is told to.
struct Failing {
    first: Option<Bytes>,
    fail: oneshot::Receiver<()>,
}

impl http_body::Body for Failing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let told = ready!(Pin::new(&mut self.fail).poll(context));
        Poll::Ready(told.ok().map(|()| Err(Status::out_of_range("too large"))))
    }
}

#[tokio::test]
async fn a_stream_that_fails_says_why_before_its_answer_begins_and_after() {
    for has_begun in [false, true] {
        let server = Server::start().await;
        let (tell, fail) = oneshot::channel();
        let call = server.call(Body::new(Failing { first: Some("first".into()), fail }));
        let mut connection = server.connection().await;
        let (mut request, mut respond) = next(&mut connection).await;
        let serving = tokio::spawn(async move { while connection.accept().await.is_some() {} });
        assert_eq!(request.body_mut().data().await.unwrap().unwrap(), "first");
        let answer = has_begun.then(|| respond.send_response(Response::new(()), false).unwrap());
        tell.send(()).unwrap();
        let status = timeout(HUNG, call).await.expect("the call hangs").unwrap().unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::OutOfRange, "too large"));
        let end = timeout(HUNG, request.body_mut().data()).await.expect("the server is not told");
        assert_eq!(end.unwrap().unwrap_err().reason(), Some(Reason::CANCEL));
        drop(answer);
        serving.abort();
    }
}

#[tokio::test]
async fn a_connection_that_answers_no_ping_is_given_up() {
    let server = Server::start_with(Duration::from_millis(50)).await;
    let call = server.call(message("hello"));
    let _silent = server.that_read("hello").await;
    let status = call.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    // The next call does not wait for the old connection.
    let call = server.call(message("again"));
    tokio::spawn(serve(server.connection().await));
    assert_eq!(call.await.unwrap().unwrap(), "again");
}

/// A body of messages without end, which counts them.
struct Endless(Arc<AtomicUsize>);

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 10_000])))))
    }
}

#[tokio::test]
async fn a_stream_is_sent_no_faster_than_it_is_read_and_ends_with_its_call() {
    let server = Server::start().await;
    let taken = Arc::new(AtomicUsize::new(0));
    let (ended, mut is_ended) = mpsc::channel::<()>(1);
    let body = Endless(Arc::clone(&taken));
    let channel = Arc::clone(&server.channel);
    let calling = tokio::spawn(async move {
        let _ended = ended;
        channel.call(request(Body::new(body))).await
    });
    let mut connection = server.connection().await;
    let (mut request, mut respond) = next(&mut connection).await;
    let serving = tokio::spawn(async move { while connection.accept().await.is_some() {} });
    // h2's window of a server is 65,535 bytes: seven messages, and one that waits for room.
    let mut read = 0;
    while read < 60_000 {
        read += request.body_mut().data().await.unwrap().unwrap().len();
    }
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let sent = taken.load(Ordering::Relaxed);
    assert!(sent <= 9, "{sent} messages were taken though nobody reads them");
    // The server reads on, and so the client sends on.
    request.body_mut().flow_control().release_capacity(read).unwrap();
    while read < 120_000 {
        let data = request.body_mut().data().await.unwrap().unwrap();
        request.body_mut().flow_control().release_capacity(data.len()).unwrap();
        read += data.len();
    }
    // The answer is dropped, with which the call ends.
    let _answer = respond.send_response(Response::new(()), false).unwrap();
    drop(calling.await.unwrap().unwrap());
    assert_eq!(is_ended.recv().await, None);
    let end = async { while let Some(Ok(_)) = request.body_mut().data().await {} };
    timeout(HUNG, end).await.expect("the stream goes on without its call");
    serving.abort();
}

#[tokio::test]
async fn calls_that_are_given_up_while_they_wait_for_room_are_not_sent() {
    let server = Server::start().await;
    let call = server.call(message("the broker has said how many calls it allows"));
    let accepted = server.accepted().await;
    let mut builder = server::Builder::new();
    let handshake = builder.max_concurrent_streams(1).handshake::<_, Bytes>(accepted);
    let mut connection = handshake.await.unwrap();
    let (coming, mut calls) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(call)) = connection.accept().await {
            coming.send(call).unwrap();
        }
    });
    echo(calls.recv().await.unwrap()).await;
    call.await.unwrap().unwrap();

    let long = server.call(message("long"));
    let held = calls.recv().await.unwrap();
    let given_up = (0..20).map(|_| server.call_of(request_within("20m")));
    for status in join_all(given_up).await {
        assert_eq!(status.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
    }
    let last = server.call(message("last"));
    echo(held).await;
    assert_eq!(long.await.unwrap().unwrap(), "long");
    let mut sent = 0;
    while !last.is_finished() {
        match timeout(Duration::from_millis(50), calls.recv()).await {
            Ok(call) => {
                sent += 1;
                tokio::spawn(echo(call.unwrap()));
            }
            Err(_) => assert!(sent > 0, "nothing is sent any more"),
        }
    }
    assert_eq!(last.await.unwrap().unwrap(), "last");
    assert!(sent <= 2, "{sent} calls were sent; one of them may have been next as it was given up");
}

#[test]
fn a_call_on_a_runtime_that_has_ended_fails() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint =
            Endpoint::new("http://127.0.0.1:1".parse().unwrap(), None, None, HUNG, HUNG).unwrap();
        let (channel, handle) = (Channel::new(endpoint), runtime.handle().clone());
        runtime.shutdown_background();
        done.send(handle.block_on(channel.call(request(message("x")))).map(drop)).unwrap();
    });
    let failed = is_done.recv_timeout(HUNG).expect("the call hangs").unwrap_err();
    assert_eq!(failed.code(), Code::Unavailable);
}

#[tokio::test]
async fn a_call_whose_answer_has_begun_is_never_unsent() {
    let server = Server::start().await;
    let call = server.call(message("hello"));
    let mut connection = server.connection().await;
    let (_request, mut respond) = next(&mut connection).await;
    let mut answer = respond.send_response(Response::new(()), false).unwrap();
    // The head goes out by itself before the reset.
    assert!(timeout(Duration::from_millis(100), connection.accept()).await.is_err());
    answer.send_reset(Reason::REFUSED_STREAM);
    tokio::spawn(async move { while connection.accept().await.is_some() {} });
    let status = call.await.unwrap().unwrap_err();
    assert!(is_broken(&status) && !is_unsent(&status), "{status:?}");
}

#[tokio::test]
async fn a_large_call_is_sent_though_the_server_has_little_room() {
    let server = Server::start().await;
    let large = "0123456789".repeat(1_000_000);
    let call = server.call(message(&large));
    tokio::spawn(serve(server.connection().await));
    assert!(call.await.unwrap().unwrap() == large);
}

#[tokio::test]
async fn a_connection_ends_when_nobody_uses_it() {
    let server = Server::start().await;
    let call = server.call(message("x"));
    let mut connection = server.connection().await;
    let first = next(&mut connection).await;
    let Server { listener: _listener, channel } = server;
    drop(channel); // the call goes on
    tokio::spawn(echo(first));
    assert!(timeout(HUNG, connection.accept()).await.expect("it stays open").is_none());
    assert_eq!(call.await.unwrap().unwrap(), "x");
}
