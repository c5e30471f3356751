//! Settles reserved items: commit, roll back, move, extend.

pub(super) mod commit;
pub(super) mod commit_and_push;
pub(super) mod lease;
pub(super) mod move_item;
pub(super) mod receipts;
pub(super) mod rollback;
