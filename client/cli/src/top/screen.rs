//! The whole screen of the terminal, which is taken and given back.

use std::{io, panic, process};

use crossterm::{cursor, execute};
use ratatui::DefaultTerminal;

use crate::failure::Failure;

/// The exit code of a program that has panicked, as Rust has it.
const PANICKED: i32 = 101;

/// Takes the screen for as long as `shown` runs, and gives the terminal back as it was, however that ends. A panic, of whatever task,
/// is printed after that and ends the program: what goes on would write on a terminal that is no longer its own.
pub(super) async fn with(
    shown: impl AsyncFnOnce(&mut DefaultTerminal) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // Sets a hook that restores the terminal before the panic is printed.
    let mut terminal = ratatui::try_init()?;
    let restore_and_print = panic::take_hook();
    panic::set_hook(Box::new(move |panicked| {
        let _ = execute!(io::stdout(), cursor::Show); // a terminal that is gone shows nothing
        restore_and_print(panicked);
        process::exit(PANICKED);
    }));
    let ended = shown(&mut terminal).await;
    let restored = ratatui::try_restore();
    ended?;
    Ok(restored?)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Set for the process that the test starts: where it is to panic.
    const PLACE: &str = "SLUICE_TEST_PANICS_IN";

    /// Takes the screen and panics, in the task of the screen or in another one.
    async fn panic_in(place: &str) {
        let ended = with(async |terminal| {
            terminal.draw(|frame| frame.render_widget("well", frame.area()))?;
            assert!(place != "the screen", "a panic in {place}");
            let place = place.to_owned();
            let _ = tokio::spawn(async move { panic!("a panic in {place}") }).await;
            Ok(())
        });
        let _ = ended.await;
        println!("it has gone on");
    }

    /// This test is two processes: one looks at the terminal on which the other one panics. `script` makes the terminal.
    #[tokio::test]
    async fn a_panic_gives_the_terminal_back() {
        if let Ok(place) = std::env::var(PLACE) {
            return panic_in(&place).await;
        }
        let test = std::env::current_exe().unwrap().display().to_string();
        let name = "top::screen::tests::a_panic_gives_the_terminal_back";
        for place in ["the screen", "a task beside it"] {
            let line = format!(
                "stty rows 30 cols 120; timeout --foreground 60 '{test}' --exact {name} --nocapture; echo \"left $?\"; stty -a"
            );
            let mut script = Command::new("script");
            script
                .args(["-qefc", &line, "/dev/null"])
                .envs([(PLACE, place), ("TERM", "xterm-256color")])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let mut script = script.spawn().expect("script, of bsdutils, to start");
            let _keys = script.stdin.take(); // open until the end: a terminal that is gone hangs up
            let shown = script.wait_with_output().unwrap().stdout;
            let shown = String::from_utf8_lossy(&shown);
            let (before, after) = shown.split_once("\u{1b}[?1049l").expect(&shown);
            assert!(before.contains("\u{1b}[?1049h") && before.contains("well"), "{shown:?}");
            assert!(shown.rfind("\u{1b}[?25h") > shown.rfind("\u{1b}[?25l"), "a cursor: {shown:?}");
            assert!(
                after.contains(&format!("a panic in {place}")),
                "printed after that: {shown:?}"
            );
            assert!(after.contains("left 101") && !after.contains("gone on"), "{shown:?}");
            for mode in ["icanon", "isig", "echo"] {
                let is_on = after.split_whitespace().any(|word| word == mode);
                assert!(is_on, "stty: {mode} is on again: {shown:?}");
            }
        }
    }
}
