//! Tokens and certificates of running brokers: who gets in, and what happens when they change.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sluicegate_proto::v1::{
    ConsumeRequest, CreateQueueRequest, GetQueueStatsRequest, PushRequest, Queue,
    RedriveItemsRequest, ReserveRequest, admin_service_client::AdminServiceClient,
    queue_service_client::QueueServiceClient,
};
use tokio::process::Command;
use tonic::{Code, Request, Status, transport::Channel};

use crate::harness::{Broker, Launch, binary, error_reason, until, within};

/// A file of tokens that lives as long as the test.
pub(super) struct TokensFile {
    directory: tempfile::TempDir,
}

impl TokensFile {
    pub(super) fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a directory") }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("tokens.toml")
    }

    /// Makes a token with the broker's own command, which adds it to the file.
    pub(super) async fn add(&self, name: &str, allow: &[&str]) -> String {
        let mut command = Command::new(binary("sluicegate"));
        command.args(["token", "new", name, "--file"]).arg(self.path());
        for permission in allow {
            command.args(["--allow", permission]);
        }
        let output = within("a token", command.output()).await.expect("a command that runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// Exchanges the file as editors and secret managers do: by a rename.
    pub(super) fn replace(&self, text: &str) {
        replace(&self.path(), text);
    }

    pub(super) fn launch(&self) -> Launch {
        Launch::new()
            .flag("store", "sqlite::memory:")
            .flag("tokens-file", self.path().to_str().expect("a path"))
    }
}

fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).expect("a file");
    fs::rename(new, path).expect("a rename");
}

pub(super) fn with_token<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {token}").parse().expect("a header");
    request.metadata_mut().insert("authorization", value);
    request
}

pub(super) async fn push(channel: &Channel, token: &str, queue: &str) -> Result<(), Status> {
    let items = vec![crate::harness::new_item("x")];
    let request = PushRequest { queue: queue.to_owned(), items, ..Default::default() };
    let pushed = QueueServiceClient::new(channel.clone()).push(with_token(token, request)).await;
    pushed.map(|_| ())
}

pub(super) async fn channel(broker: &Broker) -> Channel {
    let endpoint = Channel::from_shared(broker.address.clone()).expect("an address");
    endpoint.connect().await.expect("a broker that answers")
}

/// Waits until a push with the token ends like this.
async fn until_answered(channel: &Channel, token: &str, expected: Option<&str>) {
    until(&format!("a push answered with {expected:?}"), || async {
        let answer = push(channel, token, "q").await;
        let reason = answer.err().map(|status| error_reason(&status));
        (reason.as_deref() == expected).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_exchanged_under_load_and_no_call_fails() {
    let file = TokensFile::new();
    let first = file.add("worker", &["produce@q", "create@q", "consume@q"]).await;
    let broker = file.launch().flag("max-refusals", "0").start().await;
    let token = Arc::new(std::sync::Mutex::new(first.clone()));
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut load = Vec::new();
    for _ in 0..4 {
        let channel = channel(&broker).await;
        let (token, stop, calls) = (Arc::clone(&token), Arc::clone(&stop), Arc::clone(&calls));
        load.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let now = token.lock().expect("no panic inside").clone();
                push(&channel, &now, "q").await.expect("no call fails");
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    let probe = channel(&broker).await;
    let mut old = first;
    for _ in 0..3 {
        let before = fs::read_to_string(file.path()).expect("the file");
        let new = file.add("worker", &["produce@q", "create@q", "consume@q"]).await;
        until_answered(&probe, &new, None).await;
        token.lock().expect("no panic inside").clone_from(&new);
        // Calls that began with the token of before have ended when each caller has begun two others.
        let seen = calls.load(Ordering::Relaxed);
        until("calls with the new token", || async {
            (calls.load(Ordering::Relaxed) > seen + 50).then_some(())
        })
        .await;
        let both = fs::read_to_string(file.path()).expect("the file");
        file.replace(&both[before.len()..]);
        until_answered(&probe, &old, Some("TOKEN_UNKNOWN")).await;
        old = new;
    }
    stop.store(true, Ordering::Relaxed);
    for caller in load {
        caller.await.expect("no call fails");
    }
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_file_keeps_the_old_tokens_and_says_so() {
    let file = TokensFile::new();
    let token = file.add("worker", &["produce@q", "create@q"]).await;
    let good = fs::read_to_string(file.path()).expect("the file");
    let broker = file.launch().flag("max-refusals", "0").start().await;
    let channel = channel(&broker).await;
    file.replace("[[token]]\nname = \"worker\"\ntokn = \"a-secret-that-is-not-shown\"\n");
    until("the log says what is wrong", || async {
        broker.log().contains("line 3: unknown field").then_some(())
    })
    .await;
    push(&channel, &token, "q").await.expect("the old token");
    assert!(!broker.log().contains("a-secret-that-is-not-shown"), "{}", broker.log());
    file.replace("");
    until("an empty file is refused", || async {
        broker.log().contains("there is no [[token]]").then_some(())
    })
    .await;
    push(&channel, &token, "q").await.expect("the old token");
    file.replace(&good.replace("produce@q", "produce@other"));
    until_answered(&channel, &token, Some("PERMISSION_MISSING")).await;
    // SIGHUP reads the file in any case.
    let before = broker.log().matches("read again").count();
    broker.signal("HUP");
    until("the file is read again", || async {
        (broker.log().matches("read again").count() > before).then_some(())
    })
    .await;
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_whose_token_is_withdrawn_holds_nothing_any_more() {
    let file = TokensFile::new();
    let admin = file.add("admin", &["admin@*"]).await;
    let only_admin = fs::read_to_string(file.path()).expect("the file");
    let worker = file.add("worker", &["consume@q"]).await;
    let broker = file.launch().start().await;
    let channel = channel(&broker).await;
    push(&channel, &admin, "q").await.expect("a push");
    let request = ConsumeRequest {
        queue: "q".to_owned(),
        lease: crate::harness::duration(Duration::from_mins(10)),
        ..Default::default()
    };
    let mut queues = QueueServiceClient::new(channel.clone());
    let mut stream =
        queues.consume(with_token(&worker, request)).await.expect("a stream").into_inner();
    assert!(within("an item", stream.message()).await.is_ok_and(|message| message.is_some()));
    file.replace(&only_admin);
    let end = within("the end", stream.message()).await.expect_err("the stream ends");
    assert_eq!((end.code(), error_reason(&end)), (Code::Unauthenticated, "TOKEN_UNKNOWN".into()));
    let request = ReserveRequest {
        queue: "q".to_owned(),
        wait: crate::harness::duration(crate::harness::LIMIT),
        ..Default::default()
    };
    let reserved = queues.reserve(with_token(&admin, request)).await.expect("an answer");
    let deliveries = reserved.into_inner().deliveries;
    assert_eq!(deliveries[0].item.as_ref().expect("an item").attempt, 1, "no failed attempt");
    broker.stop().await;
}

#[tokio::test]
async fn beyond_this_machine_a_broker_needs_tokens_or_a_word() {
    let open = || Launch::new().flag("store", "sqlite::memory:").flag("listen", "0.0.0.0:0");
    let ended = open().run_to_end().await;
    assert!(!ended.status.success());
    assert!(
        ended.log.contains("insecure = true") && ended.log.contains("sluicegate token new"),
        "{}",
        ended.log
    );
    let file = TokensFile::new();
    file.add("admin", &["admin@*"]).await;
    let path = file.path();
    open().flag("tokens-file", path.to_str().expect("a path")).start().await.stop().await;
    let insecure = open().flag("insecure", "true").start().await;
    assert!(insecure.log().contains("everyone who reaches this broker may do everything"));
    insecure.stop().await;
}

#[tokio::test]
async fn tokens_of_the_version_before_are_refused_with_what_to_write_instead() {
    let old = "shop:0123456789abcdef:produce";
    let ended = Launch::new().flag("tokens", old).run_to_end().await;
    assert!(!ended.status.success());
    let expected = "[[token]]\nname = \"shop\"\ntoken = \"THE TOKEN OF NOW\"\nallow = [\"produce@*\", \"create@*\"]";
    assert!(ended.log.contains(expected), "{}", ended.log);
    assert!(!ended.log.contains("0123456789abcdef"), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_and_what_operators_do_are_in_the_audit_log() {
    let file = TokensFile::new();
    let admin = file.add("ann", &["admin@*"]).await;
    let broker = file.launch().start().await;
    let channel = channel(&broker).await;
    let queue = Queue { name: "q".to_owned(), ..Default::default() };
    let request = CreateQueueRequest { queue: Some(queue) };
    let mut operators = AdminServiceClient::new(channel.clone());
    operators.create_queue(with_token(&admin, request)).await.expect("a queue");
    push(&channel, "a-guess", "q").await.expect_err("a refusal");
    let line = |needles: &[&str]| {
        broker.log().lines().any(|line| {
            line.contains("audit") && needles.iter().all(|needle| line.contains(needle))
        })
    };
    let peer = "peer=127.0.0.1:";
    assert!(
        line(&["token=\"ann\"", peer, "AdminService/CreateQueue", "queue=\"q\"", "outcome=\"Ok\""]),
        "{}",
        broker.log()
    );
    assert!(line(&[peer, "QueueService/Push", "outcome=\"TOKEN_UNKNOWN\""]), "{}", broker.log());
    assert!(
        !broker.log().contains("a-guess") && !broker.log().contains(&admin),
        "{}",
        broker.log()
    );
    broker.stop().await;
}

/// What an operator asks for is carried out when the operator leaves before the answer, and the log says who asked for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_who_leaves_before_the_answer_is_in_the_audit_log() {
    let file = TokensFile::new();
    let admin = file.add("ann", &["admin@*"]).await;
    let broker = file.launch().start().await;
    let channel = channel(&broker).await;
    for _ in 0..5 {
        push(&channel, &admin, "q").await.expect("a push");
    }
    let operators = AdminServiceClient::new(channel.clone());
    let request = RedriveItemsRequest {
        queue: "q".to_owned(),
        to_queue: "other".to_owned(),
        rate: 1,
        ..Default::default()
    };
    let redriving = {
        let (mut operators, request) = (operators.clone(), with_token(&admin, request));
        tokio::spawn(async move { operators.redrive_items(request).await })
    };
    until("the first item is moved", || async {
        let request = GetQueueStatsRequest { queue: "other".to_owned() };
        let stats = operators.clone().get_queue_stats(with_token(&admin, request)).await;
        stats
            .is_ok_and(|stats| stats.into_inner().stats.is_some_and(|of| of.ready > 0))
            .then_some(())
    })
    .await;
    redriving.abort();
    until("the line of the call", || async {
        let is_it = |line: &str| {
            ["audit", "token=\"ann\"", "RedriveItems", "queue=\"q\"", "outcome=\"Cancelled\""]
                .iter()
                .all(|part| line.contains(part))
        };
        broker.log().lines().any(is_it).then_some(())
    })
    .await;
    broker.stop().await;
}

/// Returns the sum of what lines of the audit log with all of these give for `more`.
fn counted(log: &str, needles: &[&str]) -> u64 {
    let lines = log.lines().filter(|line| {
        line.contains("audit") && needles.iter().all(|needle| line.contains(needle))
    });
    lines.filter_map(|line| line.split_once(" more=")?.1.trim().parse::<u64>().ok()).sum()
}

/// Whoever has no token neither fills the audit log nor hides in it what is done with a token that is known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_refusals_is_summed_up_and_hides_none_of_a_known_token() {
    const FLOOD: u64 = 500;
    let file = TokensFile::new();
    let token = file.add("shop", &["produce@orders"]).await;
    let broker = file.launch().flag("max-refusals", "0").start().await;
    let channel = channel(&broker).await;
    for _ in 0..FLOOD {
        push(&channel, "a-guess", "orders").await.expect_err("a refusal");
    }
    for _ in 0..3 {
        push(&channel, &token, "mail").await.expect_err("a refusal");
    }
    let mut operators = AdminServiceClient::new(channel.clone());
    let queue = Queue { name: "mail".to_owned(), ..Queue::default() };
    let request = with_token(&token, CreateQueueRequest { queue: Some(queue) });
    operators.create_queue(request).await.expect_err("a refusal");
    drop((channel, operators));
    broker.terminate();
    let log = broker.ended().await.log;

    let told = |needles: &[&str]| {
        let is_told = |line: &&str| {
            line.contains("audit")
                && !line.contains(" more=")
                && needles.iter().all(|needle| line.contains(needle))
        };
        log.lines().filter(is_told).count() as u64
    };
    let unknown = told(&["peer=127.0.0.1:", "TOKEN_UNKNOWN"]);
    assert!((1..=50).contains(&unknown), "{unknown} of {FLOOD}:\n{log}");
    assert_eq!(counted(&log, &["peer=127.0.0.1 ", "TOKEN_UNKNOWN"]), FLOOD - unknown, "{log}");
    let known = "token=\"shop\"";
    assert_eq!(told(&[known, "QueueService/Push", "queue=\"mail\"", "PERMISSION_MISSING"]), 3);
    assert_eq!(told(&[known, "AdminService/CreateQueue", "PERMISSION_MISSING"]), 1, "{log}");
    assert_eq!(counted(&log, &["PERMISSION_MISSING"]), 0, "{log}");
}
