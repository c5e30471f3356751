//! Secrets are planted wherever a broker or a client gets them, and searched for in everything that they print.

use std::{fs, path::PathBuf};

use sluicegate_client::Client;
use sluicegate_proto::v1::{
    CreateScheduleRequest, PushRequest, Schedule, queue_service_client::QueueServiceClient,
    schedule_service_client::ScheduleServiceClient,
};
use tokio::process::Command;
use tonic::{Request, transport::Channel};

use crate::harness::{Launch, binary, new_item, within};

/// Begins every secret of this test.
const PLANTED: &str = "planted-secret";

struct Files(tempfile::TempDir);

impl Files {
    fn write(&self, name: &str, text: &str) -> String {
        let path: PathBuf = self.0.path().join(name);
        fs::write(&path, text).expect("a file");
        path.to_str().expect("a path").to_owned()
    }
}

fn assert_clean(what: &str, text: &str) {
    let shown = text.lines().find(|line| line.contains(PLANTED));
    assert!(shown.is_none(), "{what} shows a secret: {shown:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_payload_and_no_token_is_in_the_log_of_a_broker() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let token = format!("{PLANTED}-of-the-admin");
    let entry = |allow: &str| {
        format!("[[token]]\nname = \"ann\"\ntoken = \"{token}\"\nallow = [\"{allow}\"]\n")
    };
    let tokens = files.write("tokens.toml", &entry("admin@*"));
    // Everything that the broker itself can log; libraries log what they were given as well, at levels that are off here.
    let broker = Launch::new()
        .flag("store", "sqlite::memory:")
        .flag("tokens-file", &tokens)
        .flag("log-level", "info,sluicegate_broker=trace,audit=trace")
        .start()
        .await;
    let channel = Channel::from_shared(broker.address.clone()).expect("an address");
    let channel = channel.connect().await.expect("a broker");
    let by = |token: &str| format!("Bearer {token}").parse().expect("a header");
    let secret_item = || {
        let mut item = new_item(&format!("{PLANTED}-payload"));
        item.headers.insert("note".to_owned(), format!("{PLANTED}-header"));
        item
    };
    for (token, queue) in
        [(token.as_str(), "q"), ("planted-secret-guess", "q"), (token.as_str(), "not a queue")]
    {
        let items = vec![secret_item()];
        let message = PushRequest { queue: queue.to_owned(), items, ..Default::default() };
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", by(token));
        let _ = QueueServiceClient::new(channel.clone()).push(request).await;
    }
    let schedule = Schedule {
        name: "nightly".to_owned(),
        queue: "q".to_owned(),
        cron: "0 0 1 1 *".to_owned(),
        item: Some(secret_item()),
        ..Default::default()
    };
    let mut request = Request::new(CreateScheduleRequest { schedule: Some(schedule) });
    request.metadata_mut().insert("authorization", by(&token));
    ScheduleServiceClient::new(channel.clone()).create_schedule(request).await.expect("a schedule");
    files.write("tokens.toml", &entry("nothing"));
    crate::harness::until("the bad file is noticed", || async {
        broker.log().contains("what was in force stays").then_some(())
    })
    .await;
    broker.terminate();
    let log = broker.ended().await.log;
    assert!(log.contains("CreateSchedule") && log.contains("TOKEN_UNKNOWN"), "{log}");
    assert_clean("the log", &log);
}

/// Settings with secrets in them, each wrong in some way: the broker says what is wrong without showing them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_does_not_start_shows_no_secret() {
    let files = Files(tempfile::tempdir().expect("a directory"));
    let key = format!("-----BEGIN PRIVATE KEY-----\n{PLANTED}\n-----END PRIVATE KEY-----\n");
    let key = files.write("key.pem", &key);
    let old = files.write("old-tokens", &format!("ann:{PLANTED}-0123456789:admin\n"));
    let tokens =
        files.write("tokens.toml", &format!("[[token]]\ntoken = \"{PLANTED}-0123456789\n"));
    let address = files.write("store", &format!("mongodb://u:{PLANTED}@127.0.0.1:port/"));
    let wrong = [
        Launch::new().flag("store", &format!("mongodb://u:{PLANTED}@127.0.0.1:port/")),
        Launch::new().flag("store-file", &address),
        Launch::new().flag("signals", &format!("redis://u:{PLANTED}@127.0.0.1:port/")),
        Launch::new().flag("tokens", &format!("ann:{PLANTED}-0123456789:admin")),
        Launch::new().flag("tokens-file", &old),
        Launch::new().flag("tokens-file", &tokens),
        Launch::new().flag("store", "sqlite::memory:").flag("tls-cert", &key).flag("tls-key", &key),
    ];
    for launch in wrong {
        let ended = within("the end", launch.run_to_end()).await;
        assert!(!ended.status.success(), "{}", ended.log);
        assert!(!ended.log.trim().is_empty());
        assert_clean("the log", &ended.log);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_show_no_secret() {
    let secret = |of: &str| format!("{PLANTED}-{of}");
    let builder = Client::builder("http://127.0.0.1:1")
        .bearer_token(secret("token"))
        .client_certificate("a certificate", secret("key"));
    assert_clean("the builder", &format!("{builder:?} {builder:#?}"));
    let error = Client::builder("http://127.0.0.1:1").bearer_token(secret("token\u{0}")).connect();
    let error = error.await.expect_err("a token that cannot be sent");
    assert_clean("the error", &format!("{error} {error:?}"));
    let files = Files(tempfile::tempdir().expect("a directory"));
    let file = files.write("token", &secret("token"));
    for arguments in [["--token-file", file.as_str()], ["--token", &secret("argument")]] {
        let mut command = Command::new(binary("sluice"));
        command.args(["--server", "http://127.0.0.1:1"]).args(arguments).args(["stats", "q"]);
        let output =
            command.env("SLUICE_LOG", "info,sluicegate_client=trace,sluice=trace").output();
        let output = within("sluice", output).await.expect("sluice to start");
        assert!(!output.status.success());
        assert_clean("sluice", &String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
    }
}
