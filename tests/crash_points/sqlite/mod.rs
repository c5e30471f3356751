//! The SQLite store: its file as somebody else sees it, the record of all writes, and what a power loss leaves of them.

mod at_once;
mod disk;
mod failed_sync;
mod file;
mod power_loss;
mod promises;
mod write_log;

pub(crate) use self::{
    at_once::{End, record},
    failed_sync::end_of_a_broker,
    file::{RUN_SQL, StoreFile, run_sql},
    power_loss::examine,
    promises::{Answered, Promises},
    write_log::{FailingSyncs, Position, Recorded, Recording, WriteLog},
};
