//! TLS and mutual TLS, with certificates created for the test: who can connect, and how refusals
//! are explained.

use std::{fs, path::PathBuf, process::Output};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
};

use super::probes;
use crate::harness::{Broker, Launch, binary, until, within};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    let key = KeyPair::generate().expect("a key");
    CertifiedIssuer::self_signed(params, key).expect("an authority")
}

/// Files for one test.
struct Files(tempfile::TempDir);

impl Files {
    fn write(&self, name: &str, text: &str) -> String {
        let path: PathBuf = self.0.path().join(name);
        fs::write(&path, text).expect("a file");
        path.to_str().expect("a path").to_owned()
    }

    /// Returns a certificate and its key, signed by the authority.
    fn identity(&self, name: &str, names: &[&str], by: &Authority) -> (String, String) {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(names).expect("names");
        let certificate = params.signed_by(&key, by).expect("a certificate");
        let cert = self.write(&format!("{name}.crt"), &certificate.pem());
        (cert, self.write(&format!("{name}.key"), &key.serialize_pem()))
    }
}

async fn sluice(broker: &Broker, options: &[&str]) -> Output {
    let run = Command::new(binary("sluice"))
        .args(["--server", &broker.address])
        .args(options)
        .args(["push", "q", "text"])
        .env_remove("SLUICE_SERVER")
        .output();
    within("sluice", run).await.expect("sluice to start")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits for a line of the broker's log.
async fn logged(broker: &Broker, what: &str) {
    until(what, || async { broker.log().contains(what).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_tls_only_clients_that_trust_the_broker_connect_and_both_sides_log_the_reason() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let (ours, other) = (authority("ours"), authority("other"));
    let (cert, key) = files.identity("broker", &["queue.example"], &ours);
    let (our_ca, other_ca) =
        (files.write("ours.pem", &ours.pem()), files.write("other.pem", &other.pem()));
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let broker = launch.flag("tls-key", &key).start().await;
    assert!(broker.address.starts_with("https://"), "{}", broker.log());
    assert!(broker.log().contains("sluice --server https://"), "{}", broker.log());

    let good = sluice(&broker, &["--ca", &our_ca, "--tls-server-name", "queue.example"]).await;
    assert!(good.status.success(), "{}", stderr(&good));

    let wrong_name = sluice(&broker, &["--ca", &our_ca]).await;
    assert!(stderr(&wrong_name).contains("not valid for name"), "{}", stderr(&wrong_name));
    let unknown = ["--ca", &other_ca, "--tls-server-name", "queue.example"];
    let unknown = sluice(&broker, &unknown).await;
    assert_eq!(unknown.status.code(), Some(5));
    assert!(stderr(&unknown).contains("UnknownIssuer"), "{}", stderr(&unknown));
    logged(&broker, "a client could not agree on TLS").await;
    logged(&broker, "received fatal alert").await;
    broker.stop().await;
}

/// Probes and Prometheus reach a broker as they did before it had certificates. Who may see metrics is decided by tokens.
/// Whoever cannot agree on TLS does not fill the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_connections_without_tls_is_summed_up() {
    const FLOOD: usize = 200;
    let files = Files(tempfile::tempdir().expect("a directory"));
    let (cert, key) = files.identity("broker", &["localhost"], &authority("ours"));
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let broker = launch.flag("tls-key", &key).start().await;
    let address = broker.address.trim_start_matches("https://").to_owned();
    for _ in 0..FLOOD {
        let mut stream = TcpStream::connect(&address).await.expect("a connection");
        stream.write_all(b"nothing that is TLS").await.expect("to write");
        let mut answer = Vec::new();
        // The connection may end with a reset.
        let _ = within("the end of a connection", stream.read_to_end(&mut answer)).await;
    }
    broker.terminate();
    let log = broker.ended().await.log;
    let told = log.lines().filter(|line| line.contains("could not agree on TLS")).count();
    assert!((1..=50).contains(&told), "{told} of {FLOOD}:\n{log}");
    let counted = log
        .lines()
        .filter(|line| line.contains("TLS_FAILED"))
        .filter_map(|line| line.split_once(" more=")?.1.trim().parse::<usize>().ok());
    assert_eq!(told + counted.sum::<usize>(), FLOOD, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_tls_probes_and_metrics_are_served_without_it() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let ours = authority("ours");
    let (cert, key) = files.identity("broker", &["127.0.0.1"], &ours);
    let ca = files.write("ours.pem", &ours.pem());
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let broker = launch.flag("tls-key", &key).flag("tls-client-ca", &ca).start().await;
    let (client, client_key) = files.identity("client", &["worker"], &ours);
    let pushed = sluice(&broker, &["--ca", &ca, "--cert", &client, "--key", &client_key]).await;
    assert!(pushed.status.success(), "{}", stderr(&pushed));
    assert_eq!(probes::get(&broker, "/readyz").await.0, 200);
    let (status, metrics) = probes::get(&broker, "/metrics").await;
    assert_eq!(status, 200, "{metrics}");
    assert!(metrics.contains("sluicegate_items_pushed_total{queue=\"q\"} 1"), "{metrics}");
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_mutual_tls_only_clients_with_a_certificate_connect() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let (ours, other) = (authority("ours"), authority("other"));
    let (cert, key) = files.identity("broker", &["127.0.0.1"], &ours);
    let ca = files.write("ours.pem", &ours.pem());
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let broker = launch.flag("tls-key", &key).flag("tls-client-ca", &ca).start().await;

    let (client, client_key) = files.identity("client", &["worker"], &ours);
    let good = sluice(&broker, &["--ca", &ca, "--cert", &client, "--key", &client_key]).await;
    assert!(good.status.success(), "{}", stderr(&good));

    let (stranger, stranger_key) = files.identity("stranger", &["worker"], &other);
    let options = ["--ca", &ca, "--cert", &stranger, "--key", &stranger_key];
    for options in [&["--ca", &ca][..], &options] {
        let refused = sluice(&broker, options).await;
        assert!(!refused.status.success());
        assert!(!stderr(&refused).trim().is_empty());
    }
    logged(&broker, "peer sent no certificates").await;
    logged(&broker, "UnknownIssuer").await;

    let half = sluice(&broker, &["--ca", &ca, "--cert", &client]).await;
    assert_eq!(half.status.code(), Some(2), "{}", stderr(&half));
    broker.stop().await;
}

/// An entry for the name in its certificate says what a client may do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_may_do_what_the_entry_for_its_certificate_says() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let ours = authority("ours");
    let (cert, key) = files.identity("broker", &["127.0.0.1"], &ours);
    let ca = files.write("ours.pem", &ours.pem());
    let tokens = files.write(
        "tokens.toml",
        "[[certificate]]\nsan = \"*.workers.example\"\nallow = [\"produce@q\", \"create@q\"]\n\
         [[certificate]]\nsan = \"viewer.example\"\nallow = [\"view@*\"]\n",
    );
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let launch = launch.flag("tls-key", &key).flag("tls-client-ca", &ca);
    let broker = launch.flag("tokens-file", &tokens).start().await;
    let as_client = async |name: &str| {
        let (cert, key) = files.identity("client", &[name], &ours);
        sluice(&broker, &["--ca", &ca, "--cert", &cert, "--key", &key]).await
    };
    let worker = as_client("a.workers.example").await;
    assert!(worker.status.success(), "{}", stderr(&worker));
    let viewer = as_client("viewer.example").await;
    assert!(stderr(&viewer).contains("produce@"), "{}", stderr(&viewer));
    let stranger = as_client("workers.example").await;
    assert!(stderr(&stranger).contains("a token is needed"), "{}", stderr(&stranger));
    broker.stop().await;
}

/// Where certificates are optional, a client shows a certificate or sends a token. One of another authority is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_certificates_are_optional_a_client_shows_one_or_sends_a_token() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let (ours, other) = (authority("ours"), authority("other"));
    let (cert, key) = files.identity("broker", &["127.0.0.1"], &ours);
    let ca = files.write("ours.pem", &ours.pem());
    let tokens = files.write(
        "tokens.toml",
        "[[certificate]]\nsan = \"worker.example\"\nallow = [\"produce@q\", \"create@q\"]\n\
         [[token]]\nname = \"shop\"\ntoken = \"shop-0123456789abcdef\"\nallow = [\"produce@q\"]\n",
    );
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let launch = launch.flag("tls-key", &key).flag("tls-client-ca", &ca);
    let launch = launch.flag("tls-client-auth", "optional").flag("tokens-file", &tokens);
    let broker = launch.start().await;
    let (worker, worker_key) = files.identity("worker", &["worker.example"], &ours);
    let by_certificate = ["--ca", &ca, "--cert", &worker, "--key", &worker_key];
    let by_certificate = sluice(&broker, &by_certificate).await;
    assert!(by_certificate.status.success(), "{}", stderr(&by_certificate));
    let by_token = sluice(&broker, &["--ca", &ca, "--token", "shop-0123456789abcdef"]).await;
    assert!(by_token.status.success(), "{}", stderr(&by_token));
    let neither = sluice(&broker, &["--ca", &ca]).await;
    assert!(stderr(&neither).contains("a token is needed"), "{}", stderr(&neither));
    let (stranger, stranger_key) = files.identity("stranger", &["worker.example"], &other);
    let stranger = ["--ca", &ca, "--cert", &stranger, "--key", &stranger_key];
    assert!(!sluice(&broker, &stranger).await.status.success());
    logged(&broker, "UnknownIssuer").await;
    broker.stop().await;
}

/// The broker takes up a new certificate without a restart. Connections that are open go on, new ones get the new
/// certificate, and no call fails. A key that does not belong to the certificate changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_exchanged_under_load_and_no_call_fails() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let (old, new) = (authority("old"), authority("new"));
    let (cert, key) = files.identity("broker", &["127.0.0.1"], &old);
    let old_ca = files.write("old.pem", &old.pem());
    let new_ca = files.write("new.pem", &new.pem());
    let launch = Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &cert);
    let broker = launch.flag("tls-key", &key).start().await;
    let client = sluicegate_client::Client::builder(&broker.address).ca_certificate(old.pem());
    let client = client.connect().await.expect("a client");
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let load = tokio::spawn({
        let stop = std::sync::Arc::clone(&stop);
        async move {
            let mut calls = 0_u32;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let request = sluicegate_client::proto::PushRequest {
                    queue: "q".to_owned(),
                    items: vec![crate::harness::new_item("x")],
                    ..Default::default()
                };
                client.queue_service().push(request).await.expect("no call fails");
                calls += 1;
            }
            calls
        }
    });
    // First the certificate, then the key: in between the two do not belong together.
    let (next_cert, next_key) = files.identity("next", &["127.0.0.1"], &new);
    fs::copy(&next_cert, &cert).expect("a file");
    logged(&broker, "what was in force stays").await;
    let same = sluice(&broker, &["--ca", &old_ca]).await;
    assert!(same.status.success(), "{}", stderr(&same));
    fs::copy(&next_key, &key).expect("a file");
    until("the new certificate", || async {
        sluice(&broker, &["--ca", &new_ca]).await.status.success().then_some(())
    })
    .await;
    let gone = sluice(&broker, &["--ca", &old_ca]).await;
    assert!(stderr(&gone).contains("UnknownIssuer"), "{}", stderr(&gone));
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(load.await.expect("no call fails") > 0);
    broker.stop().await;
}
