//! Communication with the server: connections, errors, statements, transactions, group commit, time limits, the clock.

pub(super) mod clock;
pub(super) mod connect;
pub(super) mod error;
pub(super) mod group_commit;
pub(super) mod insert;
pub(super) mod leader;
pub(super) mod orphaned_transactions;
pub(super) mod places;
pub(super) mod sessions;
pub(super) mod statement;
pub(super) mod time_limit;
pub(super) mod transaction;
