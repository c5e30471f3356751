//! The question before a command destroys something.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::{failure::Failure, output::harmless};

/// Whether a command asks before it destroys something.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Confirmation {
    /// Do not ask; without a terminal to ask on, the command is refused unless this is given
    #[arg(long, short)]
    yes: bool,
}

impl Confirmation {
    /// Returns true if the command has to ask. Fails if it has to and nobody is there: called before the broker is.
    pub(crate) fn is_needed(self, command: &'static str) -> Result<bool, Failure> {
        if self.yes {
            return Ok(false);
        }
        if io::stdin().is_terminal() && io::stderr().is_terminal() {
            return Ok(true);
        }
        Err(Failure::Unconfirmed(command))
    }
}

/// Asks on the terminal. Anything but yes is a no, the end of the input included.
pub(crate) fn ask(question: &str) -> Result<(), Failure> {
    let agreed = answered(question, &mut io::stdin().lock(), &mut io::stderr().lock())?;
    if agreed { Ok(()) } else { Err(Failure::Declined) }
}

fn answered(question: &str, input: &mut impl BufRead, output: &mut impl Write) -> io::Result<bool> {
    write!(output, "{} [y/N] ", harmless(question, false))?;
    output.flush()?;
    let mut line = String::new();
    input.read_line(&mut line)?;
    Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_yes_is_a_yes() {
        for (line, agreed) in [
            ("y\n", true),
            ("YES\n", true),
            (" y ", true),
            ("n\n", false),
            ("\n", false),
            ("", false),
            ("yeah\n", false),
        ] {
            let mut shown = Vec::new();
            let answer = answered("Delete 3 items?", &mut line.as_bytes(), &mut shown);
            assert_eq!(answer.unwrap(), agreed, "{line:?}");
            assert_eq!(shown, b"Delete 3 items? [y/N] ");
        }
    }
}
