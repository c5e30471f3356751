//! The terms of Sluicegate: names, items, queues, receipts, and the decisions that depend on
//! nothing but their arguments. This module uses no runtime, wire format or driver.
//!
//! Values are parsed and checked once, at the edge. Past the edge nothing is checked twice.

mod admission;
mod assign;
mod failure;
#[cfg(test)]
mod fuzz;
mod id;
mod invalid;
mod item;
mod item_filter;
mod key;
pub mod limits;
mod name;
mod pattern;
mod permission;
mod priority_set;
mod queue;
mod receipt;
mod receipt_key;
mod schedule;
mod sealed;
mod signal;
mod template;
mod time;

pub use admission::{AtHead, Eligibility, Triage};
pub use assign::{Demand, ItemSize, assign};
pub use failure::{AtLimit, Cause, FailureDefaults, FailureOutcome, Limit, LimitReason};
pub use id::{IdHash, IdMap, IdMark, IdSet, IdSource, ItemId, LeaseToken, OperationId};
pub use invalid::Invalid;
pub use item::{
    Delivery, Headers, Item, ItemState, NewItem, Outcome, Priority, Pushed, check_header_limits,
    cut_reason, message_bytes,
};
pub use item_filter::ItemFilter;
pub use key::{DedupId, OrderingKey};
pub use name::{ConsumerName, GroupName, QueueName, ScheduleName};
pub use pattern::Pattern;
pub use permission::{Action, Permission};
pub use priority_set::PrioritySet;
pub use queue::{Depth, Queue, RetryPolicy, Totals};
pub use receipt::Receipt;
pub use receipt_key::{ReceiptKey, ReceiptKeys};
pub use schedule::{Schedule, ScheduleChange};
pub use signal::{Signal, Topic};
pub use template::QueueTemplate;
pub use time::{Clock, FOREVER, Timestamp};
