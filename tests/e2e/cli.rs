//! The command line tool as a process, beside what other modules do with it.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Output, Stdio},
};

use serde_json::Value;
use sluicegate_proto::v1::Queue;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    process::{Child, Command},
};

use crate::harness::{Broker, Launch, binary, within};

pub(super) async fn broker() -> Broker {
    Launch::new().flag("store", "sqlite::memory:").start().await
}

/// Returns `sluice` with these arguments and an environment without settings of whoever runs the test.
pub(super) fn sluice(server: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("sluice"));
    clean(&mut command);
    command.env("SLUICE_SERVER", server).args(arguments).kill_on_drop(true);
    command
}

pub(super) fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLUICE_") {
            command.env_remove(name);
        }
    }
    command.env("XDG_CONFIG_HOME", "/nonexistent");
}

pub(super) async fn run(server: &str, arguments: &[&str]) -> Output {
    let mut command = sluice(server, arguments);
    command.stdin(Stdio::null());
    within("sluice", command.output()).await.expect("sluice to start")
}

pub(super) fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(super) fn printed(output: &Output) -> String {
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
    let destructive: [&[&str]; 4] = [
        &["queue", "delete", "q", "--force"],
        &["queue", "purge", "q"],
        &["item", "delete", "q", "an-id"],
        &["schedule", "delete", "s"],
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

/// No command that prints payloads hands a terminal what they hold for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_payload_controls_the_terminal() {
    const HOSTILE: &str = "\u{1b}]0;title\u{7}\u{1b}[2J\u{9b}31m\u{202e}";
    let broker = broker().await;
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("payload");
    fs::write(&file, HOSTILE).expect("a file");
    let file = file.to_str().expect("a path");
    for _ in 0..5 {
        let push = ["push", "q", "--file", file];
        assert!(run(&broker.address, &push).await.status.success());
    }
    for shown in [&["consume", "q", "--count", "1"][..], &["reserve", "q"], &["pop", "q"]] {
        let (_, printed) = typed(&broker.address, shown, "").await;
        assert!(printed.contains("]0;title"), "{shown:?}: {printed:?}");
        let is_harmless =
            |c: char| !c.is_control() && c != '\u{202e}' || matches!(c, '\n' | '\r' | '\t');
        assert!(printed.chars().all(is_harmless), "{shown:?}: {printed:?}");
    }
    broker.stop().await;
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

/// Runs `sluice` with contexts in `folder`, and with `variables` as its only settings.
async fn with_contexts(folder: &Path, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = sluice("", arguments);
    command.env_remove("SLUICE_SERVER").env("XDG_CONFIG_HOME", folder);
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    within("sluice", command.output()).await.expect("sluice to start")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contexts_are_kept_for_their_owner_and_give_way_to_environment_and_options() {
    let directory = tempfile::tempdir().expect("a folder");
    let folder = directory.path();
    let token = "planted-secret-of-a-context";
    let token_file = folder.join("token");
    std::fs::write(&token_file, format!("{token}\n")).expect("a file");
    let token_file = token_file.to_str().expect("a path");
    let tokens = folder.join("tokens.toml");
    let entry = format!("[[token]]\nname = \"ann\"\ntoken = \"{token}\"\nallow = [\"admin@*\"]\n");
    std::fs::write(&tokens, entry).expect("a file");
    let tokens = tokens.to_str().expect("a path");
    let guarded = Launch::new().flag("store", "sqlite::memory:").flag("tokens-file", tokens);
    let (guarded, open) = (guarded.start().await, broker().await);
    let sluice = |variables: Vec<(&'static str, String)>, arguments: Vec<String>| async move {
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let output = with_contexts(folder, &variables, &arguments).await;
        let all = printed(&output) + &errors(&output);
        assert!(!all.contains(token), "{all}");
        (output.status.code(), all)
    };
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let add = format!(
        "context add guarded --server {} --token-file {token_file} --keep-token",
        guarded.address
    );
    let (code, shown) = sluice(vec![], words(&add)).await;
    assert_eq!(code, Some(0), "{shown}");
    std::fs::remove_file(token_file).expect("a file that is no longer needed");
    let file = folder.join("sluice/contexts.toml");
    let mode = std::fs::metadata(&file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(std::fs::read_to_string(&file).expect("its text").contains(token));
    let add = format!("context add open --server {}", open.address);
    assert_eq!(sluice(vec![], words(&add)).await.0, Some(0));
    assert_eq!(sluice(vec![], words(&add)).await.0, Some(2), "it is there already");

    // The first context is the current one until another is chosen.
    let create = |queue: &str| words(&format!("queue create {queue}"));
    let (code, shown) = sluice(vec![], create("by-token")).await;
    assert_eq!(code, Some(0), "{shown}");
    let list = words("context list");
    let (_, shown) = sluice(vec![], list).await;
    assert!(shown.contains("*  guarded") && shown.contains("kept here"), "{shown}");
    assert_eq!(sluice(vec![], words("context use open")).await.0, Some(0));
    let (_, shown) = sluice(vec![], words("queues")).await;
    assert!(!shown.contains("by-token"), "{shown}");
    let (_, shown) = sluice(vec![], words("queues --context guarded")).await;
    assert!(shown.contains("by-token"), "{shown}");
    let named = vec![("SLUICE_CONTEXT", "guarded".to_owned())];
    let (_, shown) = sluice(named.clone(), words("queues")).await;
    assert!(shown.contains("by-token"), "{shown}");
    // Options and the environment win over the context that is named.
    let (_, shown) =
        sluice(named.clone(), words(&format!("queues --server {}", open.address))).await;
    assert!(!shown.contains("by-token"), "{shown}");
    let wrong = vec![named[0].clone(), ("SLUICE_TOKEN", "wrong".to_owned())];
    assert_eq!(sluice(wrong.clone(), words("queues")).await.0, Some(1));
    // A token of the current context is for its own servers.
    assert_eq!(sluice(vec![], words("context use guarded")).await.0, Some(0));
    let server = vec![("SLUICE_SERVER", guarded.address.clone())];
    let (code, shown) = sluice(server, words("queues")).await;
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("token"), "{shown}");

    assert_eq!(sluice(vec![], words("context remove guarded")).await.0, Some(0));
    assert_eq!(sluice(vec![], words("context show guarded")).await.0, Some(2));
    assert!(!std::fs::read_to_string(&file).expect("its text").contains(token));
}

#[tokio::test]
async fn contexts_out_of_reach_are_none() {
    // As in the home of another user; whoever runs the tests may read those of all users.
    let output = with_contexts(Path::new("/dev/null"), &[], &["queues", "--json"]).await;
    assert!(errors(&output).contains("no contexts are used"), "{}", errors(&output));
    assert!(!errors(&output).contains("\"FILE\""), "{}", errors(&output));
    let managed = with_contexts(Path::new("/dev/null"), &[], &["context", "list"]).await;
    assert_eq!(managed.status.code(), Some(1), "{}", errors(&managed));
}

#[tokio::test]
async fn shells_accept_the_completion_and_man_the_pages() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = run("", &["completion", "bash"]).await;
    let file = folder.path().join("sluice.bash");
    std::fs::write(&file, &script.stdout).expect("a file");
    let file = file.to_str().expect("a path");
    let complete = format!(
        ". {file}; COMP_WORDS=(sluice queue pu); COMP_CWORD=2; _sluice sluice pu queue; echo ${{COMPREPLY[*]}}"
    );
    let mut bash = Command::new("bash");
    let output = within("bash", bash.args(["-c", &complete]).output()).await.expect("bash");
    assert_eq!(printed(&output), "purge\n", "{}", errors(&output));
    for shell in ["zsh", "fish"] {
        let script = run("", &["completion", shell]).await;
        assert!(printed(&script).contains("purge"), "{shell}");
    }
    let pages = folder.path().join("man");
    let written = run("", &["man", pages.to_str().expect("a path")]).await;
    assert!(written.status.success(), "{}", errors(&written));
    for page in ["sluice.1", "sluice-queue-purge.1", "sluice-context-add.1"] {
        let text = std::fs::read_to_string(pages.join(page)).expect(page);
        assert!(text.contains(".TH") && text.contains("sluice"), "{page}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_says_what_is_wrong_and_what_to_do() {
    let broker = broker().await;
    let doctor = ["doctor", "--sample", "0"];
    let well = run(&broker.address, &doctor).await;
    let shown = printed(&well);
    assert_eq!(well.status.code(), Some(0), "{shown}{}", errors(&well));
    for part in ["answers in", "clock agrees", "store and signals are well", "in memory"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let api = broker.api().await;
    let full = Queue { name: "full".to_owned(), max_depth: 1, ..Queue::default() };
    api.create(full).await;
    api.push("full", &["1"]).await;
    let endless = Queue { name: "endless".to_owned(), max_attempts: Some(0), ..Queue::default() };
    api.create(endless).await;
    let ill = run(&broker.address, &doctor).await;
    let shown = printed(&ill);
    assert_eq!(ill.status.code(), Some(1), "{shown}{}", errors(&ill));
    assert!(shown.contains("wrong  queue full: full: 1 of at most 1"), "{shown}");
    assert!(shown.contains("sluice queue update full --max-depth N"), "{shown}");
    assert!(shown.contains("note   queue endless: max_attempts is 0"), "{shown}");
    let json = run(&broker.address, &["--json", "doctor", "--sample", "0"]).await;
    let found: Vec<Value> = printed(&json)
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object a line"))
        .collect();
    assert!(found.iter().any(|of| of["level"] == "wrong" && of["subject"] == "queue full"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_finds_the_step_at_which_a_broker_cannot_be_reached() {
    let open = broker().await;
    let directory = tempfile::tempdir().expect("a folder");
    let tokens = directory.path().join("tokens.toml");
    let entry =
        "[[token]]\nname = \"ann\"\ntoken = \"secret-secret-secret\"\nallow = [\"admin@*\"]\n";
    std::fs::write(&tokens, entry).expect("a file");
    let tokens = tokens.to_str().expect("a path");
    let guarded = Launch::new().flag("store", "sqlite::memory:").flag("tokens-file", tokens);
    let guarded = guarded.start().await;
    for (server, finding) in [
        ("http://127.0.0.1:1", "no connection to 127.0.0.1:1"),
        ("http://no-such-host.invalid:7400", "does not resolve"),
        (open.http_address.as_str(), "as a web server does"),
        (guarded.address.as_str(), "give a token that is valid"),
    ] {
        let ill = run(server, &["doctor", "--sample", "0"]).await;
        let shown = printed(&ill);
        assert_eq!(ill.status.code(), Some(1), "{server}: {shown}{}", errors(&ill));
        assert!(shown.contains("wrong") && shown.contains(finding), "{server}: {shown}");
    }
}
