//! The command line tool as a process, beside what other modules do with it.

use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    process::{Child, Command},
};

use crate::harness::{Broker, Launch, binary, within};

async fn broker() -> Broker {
    Launch::new().flag("store", "sqlite::memory:").start().await
}

/// Returns `sluice` with these arguments and an environment without settings of whoever runs the test.
fn sluice(server: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("sluice"));
    clean(&mut command);
    command.env("SLUICE_SERVER", server).args(arguments).kill_on_drop(true);
    command
}

fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLUICE_") {
            command.env_remove(name);
        }
    }
    command.env("XDG_CONFIG_HOME", "/nonexistent");
}

async fn run(server: &str, arguments: &[&str]) -> Output {
    let mut command = sluice(server, arguments);
    command.stdin(Stdio::null());
    within("sluice", command.output()).await.expect("sluice to start")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Starts `sluice` on a terminal, which `script` makes.
fn on_a_terminal(server: &str, arguments: &[&str]) -> Child {
    let words: Vec<String> = [binary("sluice").to_str().expect("a path")]
        .iter()
        .chain(arguments)
        .map(|word| format!("'{word}'"))
        .collect();
    let mut command = Command::new("script");
    clean(&mut command);
    command
        .args(["-qefc", &words.join(" "), "/dev/null"])
        .env("SLUICE_SERVER", server)
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("script, of bsdutils, to start")
}

/// Types `keys` on the terminal, and returns the exit code and what was shown.
async fn typed(server: &str, arguments: &[&str], keys: &str) -> (Option<i32>, String) {
    let mut child = on_a_terminal(server, arguments);
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(keys.as_bytes()).await.expect("keys");
    stdin.flush().await.expect("keys");
    // Open until the end: a terminal that is gone hangs up.
    let output = within("sluice on a terminal", child.wait_with_output()).await.expect("script");
    drop(stdin);
    (output.status.code(), printed(&output))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_terminal_nothing_is_destroyed_unless_yes_is_given() {
    let broker = broker().await;
    let api = broker.api().await;
    api.push("q", &["1", "2"]).await;
    let destructive: [&[&str]; 6] = [
        &["queue", "delete", "q", "--force"],
        &["queue", "purge", "q"],
        &["item", "delete", "q", "an-id"],
        &["schedule", "delete", "s"],
        &["redrive", "q.dead"],
        &["replay", "q", "--all"],
    ];
    for arguments in destructive {
        let refused = run(&broker.address, arguments).await;
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {}", errors(&refused));
        assert!(errors(&refused).contains("no terminal to ask on"), "{}", errors(&refused));
        assert!(errors(&refused).contains("--yes"), "{}", errors(&refused));
        // Refused before anything else: no broker is needed.
        let refused = run("http://127.0.0.1:1", arguments).await;
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {}", errors(&refused));
    }
    let purged = run(&broker.address, &["queue", "purge", "q", "--yes"]).await;
    assert_eq!(printed(&purged), "2 items deleted from q\n", "{}", errors(&purged));
    let deleted = run(&broker.address, &["queue", "delete", "q", "-y"]).await;
    assert_eq!(printed(&deleted), "q deleted, with 0 items\n", "{}", errors(&deleted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_terminal_the_question_names_the_count() {
    let broker = broker().await;
    let api = broker.api().await;
    api.push("q", &["1", "2", "3"]).await;
    let purge = ["queue", "purge", "q"];
    let (code, shown) = typed(&broker.address, &purge, "n\n").await;
    assert!(shown.contains("Delete 3 items of queue q? (3 ready)"), "{shown}");
    assert!(shown.contains("nothing was changed"), "{shown}");
    assert_eq!(code, Some(1));
    let delete = ["queue", "delete", "q", "--force"];
    let (code, shown) = typed(&broker.address, &delete, "\n").await;
    assert!(shown.contains("Delete queue q and 3 items in it?"), "{shown}");
    assert_eq!(code, Some(1));
    let (code, shown) = typed(&broker.address, &purge, "y\n").await;
    assert!(shown.contains("3 items deleted from q"), "{shown}");
    assert_eq!(code, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_as_json_have_code_reason_message_and_hint() {
    let broker = broker().await;
    let json = |output: &Output| -> Value {
        serde_json::from_slice(&output.stderr).unwrap_or_else(|_| panic!("{}", errors(output)))
    };
    let missing = run(&broker.address, &["--json", "queue", "get", "q"]).await;
    let error = json(&missing);
    assert_eq!(error["error"]["code"], "NOT_FOUND", "{error}");
    assert_eq!(error["error"]["reason"], "QUEUE_NOT_FOUND", "{error}");
    let message = error["error"]["message"].as_str().expect("a message");
    assert!(
        message.contains("`sluice queue create`") && !message.contains("CreateQueue"),
        "{error}"
    );
    assert_eq!(missing.status.code(), Some(4));
    let usage = run(&broker.address, &["push", "--json", "--no-such-option"]).await;
    assert_eq!(json(&usage)["error"]["code"], "USAGE");
    assert_eq!(usage.status.code(), Some(2));
    let gone = run("http://127.0.0.1:1", &["--json", "queues"]).await;
    assert_eq!(json(&gone)["error"]["code"], "UNREACHABLE");
    assert_eq!(gone.status.code(), Some(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_no_broker_is_named_as_such() {
    let broker = broker().await;
    let console = run(&broker.http_address, &["queues"]).await;
    assert!(errors(&console).contains("as a web server does"), "{}", errors(&console));
    assert!(errors(&console).contains("port of the console"), "{}", errors(&console));
    assert_eq!(console.status.code(), Some(5));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let http1 = format!("http://{}", listener.local_addr().expect("its address"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1_024];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let http1 = run(&http1, &["queues"]).await;
    assert!(errors(&http1).contains("speaks HTTP/1 only"), "{}", errors(&http1));
    assert_eq!(http1.status.code(), Some(5));
    let tls = run(&broker.address.replace("http://", "https://"), &["queues"]).await;
    assert!(errors(&tls).contains("speaks HTTP/2 without TLS"), "{}", errors(&tls));
}
