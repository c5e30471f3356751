//! The Sluicegate broker.
//!
//! # Layout
//! Dependencies point inward: `grpc | console → engine → domain, store, signals`.
//!
//! * [`domain`]: names, items, queues, receipts and the decisions about them. Pure.
//! * [`store`]: the [`store::Store`] trait, and MongoDB and SQLite behind it.
//! * [`signals`]: the [`signals::Signals`] trait, and Redis, MongoDB and nothing behind it.
//! * [`engine`]: push, dispatch, settle: what happens to an item.
//! * [`grpc`]: the API; [`console`]: HTTP for people and probes; [`listener`]: connections for both.
//! * [`telemetry`]: the log; [`metrics`]: what is counted and measured.
//! * `app`: builds all of it from the [`config`], runs it, drains it.

mod app;
mod config;
mod console;
pub mod domain;
mod engine;
mod grpc;
mod listener;
pub mod metrics;
pub mod process;
mod signals;
pub mod store;
mod telemetry;

#[doc(hidden)]
pub use grpc::bench;
