//! The faults that happen at a command.

use crate::wire::{Command, ServerError};

const NOT_PRIMARY: ServerError = ServerError { code: 10107, name: "NotWritablePrimary" };
const INTERRUPTED: ServerError =
    ServerError { code: 11602, name: "InterruptedDueToReplStateChange" };
const CONFLICT: ServerError = ServerError { code: 112, name: "WriteConflict" };
const TOO_LATE: ServerError = ServerError { code: 50, name: "MaxTimeMSExpired" };
const CONCERN: ServerError = ServerError { code: 64, name: "WriteConcernFailed" };
const STEPPED_DOWN: ServerError = ServerError { code: 189, name: "PrimarySteppedDown" };
const NO_TRANSACTION: ServerError = ServerError { code: 251, name: "NoSuchTransaction" };

/// What happens at a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The connection ends before the command reaches the server.
    CutBefore,
    /// The connection ends after the command was executed.
    CutAfter,
    /// All connections end before the command reaches the server, and for a while no other can be made.
    OutageBefore,
    /// The same after the command was executed.
    OutageAfter,
    /// The broker is killed before the command reaches the server.
    KillBefore,
    /// The broker is killed after the command was executed.
    KillAfter,
    /// The server refuses the command.
    Refuse(ServerError),
    /// The server executes the command, and does not know whether it will last.
    Unsure(ServerError),
    /// The server executes the command, and refuses it and the next two of the same name: all that a broker repeats.
    RefuseAgain(ServerError),
    /// The server executes half of the statements of the command, and then refuses it.
    Half(ServerError),
}

/// A fault, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) effect: Effect,
}

/// All faults.
pub(crate) const FAULTS: [Fault; 15] = [
    Fault { name: "cut-before", effect: Effect::CutBefore },
    Fault { name: "cut-after", effect: Effect::CutAfter },
    Fault { name: "outage-before", effect: Effect::OutageBefore },
    Fault { name: "outage-after", effect: Effect::OutageAfter },
    Fault { name: "kill-before", effect: Effect::KillBefore },
    Fault { name: "kill-after", effect: Effect::KillAfter },
    Fault { name: "not-primary", effect: Effect::Refuse(NOT_PRIMARY) },
    Fault { name: "interrupted", effect: Effect::Refuse(INTERRUPTED) },
    Fault { name: "too-late", effect: Effect::Refuse(TOO_LATE) },
    Fault { name: "conflict", effect: Effect::Refuse(CONFLICT) },
    Fault { name: "no-transaction", effect: Effect::Refuse(NO_TRANSACTION) },
    Fault { name: "concern", effect: Effect::Unsure(CONCERN) },
    Fault { name: "stepped-down", effect: Effect::Unsure(STEPPED_DOWN) },
    Fault { name: "again", effect: Effect::RefuseAgain(INTERRUPTED) },
    Fault { name: "half", effect: Effect::Half(INTERRUPTED) },
];

impl Fault {
    /// Returns whether the fault can happen at a command: the server gives some errors in transactions alone, and others
    /// only outside.
    pub(crate) fn can_happen_at(self, command: &Command) -> bool {
        let ends = command.name == "commitTransaction";
        match self.effect {
            Effect::Refuse(CONFLICT) => command.in_transaction && command.is_write(),
            Effect::Refuse(NO_TRANSACTION) => command.in_transaction,
            Effect::Refuse(_)
            | Effect::CutBefore
            | Effect::CutAfter
            | Effect::OutageBefore
            | Effect::OutageAfter
            | Effect::KillBefore
            | Effect::KillAfter => true,
            Effect::RefuseAgain(_) => command.is_write() && !command.in_transaction,
            Effect::Unsure(_) => ends || (command.is_write() && !command.in_transaction),
            Effect::Half(_) => {
                matches!(command.name.as_str(), "update" | "delete")
                    && command.statements > 1
                    && !command.in_transaction
            }
        }
    }

    /// Returns whether something else can come of the fault than of another fault, here or at the command before: what
    /// happens after a read is the same as what happens before it, and a broker that is killed before a command leaves
    /// the same behind as one that is killed after the previous one.
    pub(crate) fn makes_a_difference_at(self, at: usize, command: &Command) -> bool {
        let changes =
            command.is_write() || command.is_step() || command.name == "commitTransaction";
        match self.effect {
            Effect::CutAfter
            | Effect::OutageAfter
            | Effect::KillAfter
            | Effect::Refuse(INTERRUPTED | TOO_LATE) => changes,
            Effect::KillBefore => at == 1,
            _ => true,
        }
    }

    pub(crate) fn kills(self) -> bool {
        matches!(self.effect, Effect::KillBefore | Effect::KillAfter)
    }
}

impl Command {
    /// Returns whether this is a step of an SQLite store with its files.
    pub(crate) fn is_step(&self) -> bool {
        self.collection.is_empty() && self.name.contains(' ')
    }

    /// Returns whether the command writes.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self.name.as_str(), "insert" | "update" | "delete" | "findAndModify")
    }
}
