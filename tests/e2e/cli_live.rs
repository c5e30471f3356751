//! What the command line tool shows live: `sluice top` on a terminal, `sluice tail`.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use sluicegate_proto::v1::ItemState;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::cli::{broker, clean, errors, run, sluice};
use crate::harness::{binary, within};

/// How programs ask a terminal for a second screen, and how they give it back.
const SCREEN: &str = "\u{1b}[?1049h";
const NO_SCREEN: &str = "\u{1b}[?1049l";

/// A shell on a terminal of 30 lines and 120 columns, which `script` makes.
struct Terminal {
    shell: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    /// All that was written to the screen.
    shown: String,
}

impl Terminal {
    fn new(server: &str, line: &str) -> Self {
        let mut command = Command::new("script");
        clean(&mut command);
        let folder = binary("sluice").parent().expect("a folder").display().to_string();
        let line = format!("stty rows 30 cols 120; PATH={folder}:$PATH; {line}");
        command
            .args(["-qefc", &line, "/dev/null"])
            .env("SLUICE_SERVER", server)
            .env("TERM", "xterm-256color")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut shell = command.spawn().expect("script, of bsdutils, to start");
        let keys = shell.stdin.take().expect("stdin");
        let screen = shell.stdout.take().expect("stdout");
        Self { shell, keys, screen, shown: String::new() }
    }

    async fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).await.expect("keys");
        self.keys.flush().await.expect("keys");
    }

    /// Reads what is shown until `text` is.
    async fn until(&mut self, text: &str) {
        let mut bytes = [0; 4_096];
        while !self.shown.contains(text) {
            let read = within(text, self.screen.read(&mut bytes)).await.expect("the screen");
            assert!(read > 0, "the end instead of {text:?}: {:?}", self.shown);
            self.shown.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    }

    /// Waits for the end and returns what was shown.
    async fn ended(mut self) -> String {
        let mut rest = Vec::new();
        within("the end", self.screen.read_to_end(&mut rest)).await.expect("the screen");
        within("the shell", self.shell.wait()).await.expect("the shell");
        self.shown + &String::from_utf8_lossy(&rest)
    }
}

/// Checks that a program that took the screen has given it back, with the terminal as it was.
fn assert_given_back(shown: &str) {
    let after = shown.rsplit(SCREEN).next().expect("the last part");
    assert!(after.len() < shown.len(), "it took the screen: {shown:?}");
    let (_, after) = after.split_once(NO_SCREEN).unwrap_or_else(|| panic!("{shown:?}"));
    assert!(after.contains("\u{1b}[?25h"), "the cursor is shown again: {after:?}");
    for mode in ["icanon", "isig", "echo"] {
        let is_on = after.split_whitespace().any(|word| word == mode);
        assert!(is_on, "stty: {mode} is on again: {after:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_shows_queues_as_they_change_and_gives_the_terminal_back() {
    let broker = broker().await;
    let api = broker.api().await;
    api.push("orders", &["1", "2", "3"]).await;
    let mut terminal = Terminal::new(&broker.address, "sluice top; echo \"left $?\"; stty -a");
    terminal.until("orders").await;
    // Only cells that change are written: this name has no letter where "orders" has it, in whose row it may come.
    api.push("alpha", &["1"]).await;
    terminal.until("alpha").await;
    // Sorted by name, so that the first row is the queue "alpha"; the second one is opened.
    terminal.press("n\u{1b}[B\u{1b}[B\r").await;
    // Words, because only cells that change are written: what is between words may not be.
    for part in ["Settings", "dedup_window", "brokers", "orders.dead"] {
        terminal.until(part).await;
    }
    terminal.press("q").await;
    let shown = terminal.ended().await;
    assert!(shown.contains("left 0"), "{shown:?}");
    assert_given_back(&shown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_gives_the_terminal_back_however_it_ends() {
    let broker = broker().await;
    broker.api().await.push("orders", &["1"]).await;
    // The process that says its number becomes top.
    let line = "sh -c 'echo \"process $$.\"; exec sluice top'; echo \"left $?\"; stty -a";
    let mut terminal = Terminal::new(&broker.address, line);
    terminal.until("orders").await;
    let process = terminal.shown.split("process ").nth(1).and_then(|rest| rest.split('.').next());
    let process = process.expect("a number").to_owned();
    let kill = Command::new("kill").args(["-TERM", &process]).status().await.expect("kill");
    assert!(kill.success());
    assert_given_back(&terminal.ended().await);

    let mut terminal = Terminal::new(&broker.address, "sluice top; echo \"left $?\"; stty -a");
    terminal.until("orders").await;
    terminal.press("\u{3}").await;
    assert_given_back(&terminal.ended().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_says_that_the_broker_is_away() {
    let broker = broker().await;
    broker.api().await.push("orders", &["1"]).await;
    let mut terminal = Terminal::new(&broker.address, "sluice top; echo \"left $?\"; stty -a");
    terminal.until("orders").await;
    broker.kill();
    terminal.until("figures:").await;
    terminal.press("q").await;
    assert_given_back(&terminal.ended().await);
}

#[tokio::test]
async fn top_without_a_terminal_names_what_there_is() {
    let refused = run("http://127.0.0.1:1", &["top"]).await;
    assert_eq!(refused.status.code(), Some(2), "{}", errors(&refused));
    assert!(errors(&refused).contains("needs a terminal"), "{}", errors(&refused));
    assert!(errors(&refused).contains("`sluice watch`"), "{}", errors(&refused));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_shows_each_item_once_and_takes_none() {
    let broker = broker().await;
    let api = broker.api().await;
    api.push("orders", &["before"]).await;
    let mut command = sluice(&broker.address, &["tail", "orders", "--json", "-n", "5"]);
    let mut tail = command.stdout(Stdio::piped()).spawn().expect("sluice to start");
    // Nothing says that the tail has begun: items are pushed until it has shown enough.
    let mut pushed = 0;
    within("the end of the tail", async {
        while tail.try_wait().expect("the tail").is_none() {
            api.push("orders", &[&pushed.to_string()]).await;
            pushed += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    let mut text = String::new();
    let mut stdout = tail.stdout.take().expect("stdout");
    stdout.read_to_string(&mut text).await.expect("text");
    let shown: Vec<u64> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"))
        .map(|item| item["payload"].as_str().and_then(|text| text.parse().ok()).expect("a number"))
        .collect();
    let first = shown[0];
    assert_eq!(shown, (first..first + 5).collect::<Vec<_>>(), "each once, in order");
    let items = api.list("orders", ItemState::Ready).await;
    assert_eq!(items.len(), pushed as usize + 1);
    assert!(items.iter().all(|item| item.deliveries == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_says_how_many_items_it_has_not_seen() {
    let broker = broker().await;
    let api = broker.api().await;
    api.ensure("orders").await;
    let mut command = sluice(&broker.address, &["tail", "orders"]);
    let mut tail =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("sluice to start");
    let mut said = BufReader::new(tail.stderr.take().expect("stderr")).lines();
    let line = tokio::spawn(async move { said.next_line().await.expect("stderr") });
    within("what was not seen", async {
        while !line.is_finished() {
            api.push("orders", &["1", "2", "3"]).await;
            let deliveries = api.reserve_now("orders", 100).await;
            let receipts: Vec<&str> = deliveries.iter().map(|of| of.receipt.as_str()).collect();
            api.commit(&receipts).await;
        }
    })
    .await;
    let line = line.await.expect("the reader").expect("a line");
    assert!(line.contains("passed through orders unseen"), "{line}");
    tail.kill().await.expect("the tail to end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tail_of_no_queue_is_refused() {
    let broker = broker().await;
    let missing = run(&broker.address, &["tail", "no-such-queue"]).await;
    assert_eq!(missing.status.code(), Some(4), "{}", errors(&missing));
}
