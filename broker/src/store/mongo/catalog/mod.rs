//! Queues, schedules, templates, brokers and operations, and what happens when a queue is deleted.

pub(super) mod deleted;
pub(super) mod deletion;
pub(super) mod figures;
pub(super) mod named;
pub(super) mod operations;
pub(super) mod orphaned_items;
pub(super) mod queues;
pub(super) mod receipt_keys;
pub(super) mod reports;
pub(super) mod schedules;
pub(super) mod settings_watch;
pub(super) mod templates;
