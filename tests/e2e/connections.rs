//! More connections than there are file descriptors.

use std::time::Duration;

use tokio::{net::TcpStream, time::sleep};

use crate::harness::{Api, Backend, until, within};

/// Clients that connect and stay silent use up all connections. The broker logs this, does not
/// spin, and serves others again after closing silent connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_neither_spin_the_broker_nor_stay() {
    let store = Backend::Sqlite.store();
    let broker = store.launch().open_files(60).start().await;
    let api = broker.api().await;
    api.push("work", &["first"]).await; // the store opens its files as it needs them
    let mut silent = Vec::new();
    for address in [&broker.address, &broker.http_address] {
        for _ in 0..60 {
            let address = address.trim_start_matches("http://").to_owned();
            // The system accepts the connections, whether the broker does or not.
            let connecting =
                tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address));
            silent.extend(connecting.await);
        }
    }
    until("the log says so", || async {
        broker.log().contains("cannot take connections").then_some(())
    })
    .await;
    let before = broker.processor_time();
    sleep(Duration::from_secs(2)).await;
    let used = broker.processor_time().saturating_sub(before);
    assert!(used < Duration::from_secs(1), "{used:?} of processor time in two seconds of nothing");
    // Connected clients are served all the time. Silent connections are closed for new ones.
    api.push("work", &["a"]).await;
    let other = within("a connection", Api::connect(&broker.address)).await;
    other.push("work", &["b"]).await;
    drop(silent);
}
