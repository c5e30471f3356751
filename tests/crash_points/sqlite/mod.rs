//! The SQLite store: its file as somebody else sees it, the record of all writes, and what a power loss leaves of them.

mod disk;
mod failed_sync;
mod file;
mod power_loss;
mod write_log;

pub(crate) use self::{
    failed_sync::end_of_a_broker,
    file::{RUN_SQL, StoreFile, run_sql},
    power_loss::examine,
    write_log::{Answered, Position, Recording, WriteLog},
};
