//! TLS and mutual TLS, with certificates created for the test: who can connect, and how refusals
//! are explained.

use std::{fs, path::PathBuf, process::Output};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::process::Command;

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
