//! Working on items: a handler is run for each, and its result settles the item.
//!
//! ```text
//! broker ──▶ feed (Consume, or ConsumeStream) ──▶ runner ──▶ handlers
//!    ▲                                               │
//!    └───────────── settler (Commit, Rollback, …) ◀──┘
//! ```
//! The *feed* keeps a stream open and opens another one when it breaks. The *runner* starts handlers and renews leases.
//! The *settler* puts everything that was decided during its last call into the next one.

mod builder;
mod decision;
mod feed;
mod options;
mod runner;
mod settle;
mod stream;

pub(crate) use self::decision::Decision;
pub use self::{builder::Consumer, options::Renewal, settle::Summary};
