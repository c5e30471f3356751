//! The Sluicegate broker.
//!
//! # Layout
//! Dependencies point inward: `grpc | console → engine → domain, store, signals`.
//!
//! * [`domain`]: names, items, queues, receipts and the decisions about them. Pure.
//! * [`store`]: the [`store::Store`] trait, and behind it MongoDB and SQLite.
//! * [`signals`]: the [`signals::Signals`] trait, and behind it Redis, MongoDB, or nothing for a broker alone.
//! * [`engine`]: what happens to an item: push, dispatch, settle.
//! * [`grpc`]: the API; [`console`]: HTTP for probes and metrics; [`listener`]: connections for both.
//! * [`telemetry`]: the log; [`metrics`]: what is counted and measured.
//! * [`app`]: builds all of these from the [`config`], runs them and drains them.

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
