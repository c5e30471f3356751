//! More connections than there are file descriptors.

use std::time::Duration;

use tokio::{net::TcpStream, time::sleep};

use crate::harness::{Api, Backend, until, within};

/// Clients that connect and say nothing take all there are: the broker says so, does not spin, and serves
/// others again when it has closed those.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_neither_spin_the_broker_nor_stay() {
    let store = Backend::Sqlite.store();
    let broker = store.launch().open_files(60).start().await;
    let api = broker.api().await;
    let mut silent = Vec::new();
    for address in [&broker.address, &broker.http_address] {
        for _ in 0..60 {
            let address = address.trim_start_matches("http://").to_owned();
            // The system takes them, whether the broker does or not.
            let connecting =
                tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address));
            silent.extend(connecting.await);
        }
    }
    until("it says so", || async {
        broker.log().contains("cannot take connections").then_some(())
    })
    .await;
    let before = broker.processor_time();
    sleep(Duration::from_secs(2)).await;
    let used = broker.processor_time().saturating_sub(before);
    assert!(used < Duration::from_secs(1), "{used:?} of processor time in two seconds of nothing");
    // Who is connected is served all the while; for others silent ones are closed.
    api.push("work", &["a"]).await;
    let other = within("a connection", Api::connect(&broker.address)).await;
    other.push("work", &["b"]).await;
    drop(silent);
}
