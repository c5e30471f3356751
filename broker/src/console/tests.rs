use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
};

use axum::body::Body;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tonic::codegen::Service;

use super::*;
use crate::{access::tokens::Tokens, domain::QueueName};

struct Broker {
    store: AtomicBool,
    signals: AtomicBool,
    draining: AtomicBool,
}

impl Broker {
    fn healthy() -> Self {
        let (store, signals) = (AtomicBool::new(true), AtomicBool::new(true));
        Self { store, signals, draining: AtomicBool::new(false) }
    }
}

#[async_trait]
impl Probe for Broker {
    async fn store(&self) -> Result<(), String> {
        if self.store.load(Ordering::Relaxed) { Ok(()) } else { Err("connection refused".into()) }
    }

    fn signals_healthy(&self) -> bool {
        self.signals.load(Ordering::Relaxed)
    }

    fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// Serves the console for as long as `test` runs, which gets the broker and a way to ask.
async fn with_console(test: impl AsyncFnOnce(&Broker, &Metrics, SocketAddr)) {
    with_tokens(None, test).await;
}

async fn with_tokens(
    tokens: Option<Arc<Tokens>>,
    test: impl AsyncFnOnce(&Broker, &Metrics, SocketAddr),
) {
    let probe = Arc::new(Broker::healthy());
    let metrics = Arc::new(Metrics::new());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let access = Access::new(tokens, 0, metrics.clone());
    let state = ConsoleState { probe: probe.clone(), metrics: metrics.clone(), access };
    tokio::select! {
        served = axum::serve(listener, router(state)) => panic!("the console ended: {served:?}"),
        () = test(&probe, &metrics, address) => {}
    }
}

/// Status, head and body.
async fn get_page(address: SocketAddr, path: &str) -> (u16, String, String) {
    get_page_with(address, path, "").await
}

async fn get_page_with(address: SocketAddr, path: &str, headers: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

#[tokio::test]
async fn readiness_follows_store_and_shutdown_but_not_signals() {
    with_console(async |broker, _, address| {
        let ready = async || {
            let (status, _, body) = get_page(address, "/readyz").await;
            (status, serde_json::from_str::<serde_json::Value>(&body).unwrap())
        };
        let (status, body) = ready().await;
        assert_eq!((status, &body["store"], &body["signals"]), (200, &"ok".into(), &"ok".into()));

        broker.signals.store(false, Ordering::Relaxed);
        let (status, body) = ready().await;
        assert_eq!((status, &body["signals"]), (200, &"degraded".into()));

        broker.store.store(false, Ordering::Relaxed);
        let (status, body) = ready().await;
        assert_eq!((status, &body["store"]), (503, &"unavailable".into()));
        assert_eq!(body["reason"], "connection refused");

        broker.store.store(true, Ordering::Relaxed);
        broker.draining.store(true, Ordering::Relaxed);
        let (status, body) = ready().await;
        assert_eq!((status, &body["draining"]), (503, &true.into()));

        assert_eq!(get_page(address, "/healthz").await.0, 200, "alive, though not ready");
    })
    .await;
}

#[tokio::test]
async fn metrics_are_served_as_open_metrics() {
    with_console(async |_, metrics, address| {
        metrics.pushed(&QueueName::parse("queue", "orders").unwrap(), 2);
        let (status, head, body) = get_page(address, "/metrics").await;
        assert_eq!(status, 200);
        assert!(head.contains("application/openmetrics-text"), "{head}");
        assert!(body.contains("sluicegate_items_pushed_total{queue=\"orders\"} 2\n"), "{body}");
        assert!(body.ends_with("# EOF\n"));
        assert_eq!(get_page(address, "/nothing").await.0, 404);
    })
    .await;
}

#[tokio::test]
async fn with_tokens_metrics_are_for_those_who_may_view_all_queues_and_probes_for_all() {
    let text = r#"
        [[token]]
        name = "prometheus"
        token = "prometheus-0123456789"
        allow = ["view@*"]

        [[token]]
        name = "shop"
        token = "shop-0123456789abcdef"
        allow = ["view@orders.*"]
    "#;
    let tokens = Arc::new(Tokens::parse(text).unwrap());
    with_tokens(Some(tokens), async |_, _, address| {
        let status = async |path: &str, token: &str| {
            let header = match token {
                "" => String::new(),
                token => format!("Authorization: Bearer {token}\r\n"),
            };
            get_page_with(address, path, &header).await.0
        };
        assert_eq!(status("/metrics", "").await, 401);
        assert_eq!(status("/metrics", "guess").await, 401);
        assert_eq!(status("/metrics", "shop-0123456789abcdef").await, 403);
        assert_eq!(status("/metrics", "prometheus-0123456789").await, 200);
        for probe in ["/healthz", "/readyz"] {
            assert_eq!(status(probe, "").await, 200, "{probe}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_is_counted_and_comes_later_and_later() {
    let tokens = "[[token]]\nname = \"a\"\ntoken = \"a-0123456789abcdef\"\nallow = [\"view@q\"]\n";
    for (path, authorization, status, reason) in [
        ("/nothing", "", 404, "UNIMPLEMENTED"),
        ("/metrics", "", 401, "TOKEN_MISSING"),
        ("/metrics", "Bearer guess", 401, "TOKEN_UNKNOWN"),
        ("/metrics", "Bearer a-0123456789abcdef", 403, "PERMISSION_MISSING"),
    ] {
        let metrics = Arc::new(Metrics::new());
        let tokens = Some(Arc::new(Tokens::parse(tokens).unwrap()));
        let access = Access::new(tokens, 1, Arc::clone(&metrics));
        let probe = Arc::new(Broker::healthy());
        let console = router(ConsoleState { probe, metrics: Arc::clone(&metrics), access });
        let ask = async |path: &str| {
            let address = Some(SocketAddr::from(([192, 0, 2, 1], 4000)));
            let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
            request.extensions_mut().insert(ConnectInfo(Peer { address, ..Peer::default() }));
            if !authorization.is_empty() {
                let value = HeaderValue::from_str(authorization).unwrap();
                request.headers_mut().insert(header::AUTHORIZATION, value);
            }
            let begin = Instant::now();
            let response = console.clone().call(request).await.unwrap();
            (response.status().as_u16(), begin.elapsed())
        };
        let mut waits = Vec::new();
        for _ in 0..4 {
            let (found, waited) = ask(path).await;
            assert_eq!(found, status, "{path} {authorization}");
            waits.push(waited);
        }
        assert_eq!(waits, [0, 50, 100, 200].map(Duration::from_millis), "{path} {authorization}");
        assert_eq!(ask("/healthz").await, (200, Duration::ZERO));
        let counted = format!("sluicegate_calls_refused_total{{reason=\"{reason}\"}} 4\n");
        assert!(metrics.encode().unwrap().contains(&counted), "{counted}");
    }
}
