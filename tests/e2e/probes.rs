//! What orchestrators ask: `/healthz`, `/readyz` and `/metrics` over HTTP.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::{Backend, Broker, MongoServer, TestStore, until, within};

/// The status and the whole answer to a GET.
async fn get(broker: &Broker, path: &str) -> (u16, String) {
    let address = broker.http_address.trim_start_matches("http://");
    let exchange = async {
        let mut connection = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = within(path, exchange).await.expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status in {answer}")), answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_broker_is_alive_and_ready_and_counts() {
    let store = Backend::Sqlite.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["x", "y"]).await;
    assert_eq!(get(&broker, "/healthz").await.0, 200);
    assert_eq!(get(&broker, "/readyz").await.0, 200);
    let (status, metrics) = get(&broker, "/metrics").await;
    assert_eq!(status, 200);
    assert!(metrics.contains("# TYPE sluicegate_"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_whose_store_is_gone_is_alive_but_not_ready() {
    let mut server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").start().await;
    assert_eq!(get(&broker, "/readyz").await.0, 200);
    server.kill();
    until("/readyz says no", || async { (get(&broker, "/readyz").await.0 == 503).then_some(()) })
        .await;
    assert_eq!(get(&broker, "/healthz").await.0, 200);
    server.restart().await;
    until("/readyz says yes", || async { (get(&broker, "/readyz").await.0 == 200).then_some(()) })
        .await;
}
