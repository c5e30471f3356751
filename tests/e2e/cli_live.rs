//! What the command line tool shows live: `sluice top` on a terminal.

use std::process::Stdio;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::cli::{broker, clean, errors, run};
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
    api.push("fresh", &["1"]).await;
    terminal.until("fresh").await;
    // Sorted by name, so that the first row is the queue "fresh"; the second one is opened.
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
