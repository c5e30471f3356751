//! The Sluicegate broker.
//!
//! # Layout
//! Dependencies point inward: `grpc | console → access, traces, engine → domain, store,
//! signals`.
//!
//! * [`domain`]: names, items, queues, receipts and the decisions about them. Pure.
//! * [`store`]: the [`store::Store`] trait, and its backends MongoDB and SQLite.
//! * [`signals`]: the [`signals::Signals`] trait, over Redis, over MongoDB, or local for a single
//!   broker.
//! * [`engine`]: the life of an item: push, dispatch, settle.
//! * [`access`]: who may do what, for both edges.
//! * [`grpc`]: the API; [`console`]: HTTP for probes and metrics; [`listener`]: connections for
//!   both.
//! * [`telemetry`]: the log; [`metrics`]: counters and measurements; [`traces`]: spans of calls.
//! * [`otlp`]: spans and metrics for a collector of OpenTelemetry.
//! * [`reload`]: files that are read again when they change.
//! * [`essential`]: tasks whose panic ends the process.
//! * [`folder`]: names of files that outlive a crash of the machine.
//! * [`long_work`]: work that takes long, beside the threads that serve calls.
//! * [`healthcheck`]: asks a running broker whether it takes requests.
//! * `simulation`: a broker without network interfaces, for simulations (feature `simulation`).
//! * [`app`]: builds all of these from the [`config`], runs them and drains them.

mod access;
mod app;
mod config;
mod console;
pub mod domain;
mod engine;
mod essential;
mod folder;
#[cfg(test)]
mod fuzz;
mod grpc;
mod healthcheck;
mod listener;
mod long_work;
pub mod metrics;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(not(feature = "otlp"))]
#[path = "otlp/off.rs"]
mod otlp;
pub mod process;
mod reload;
mod signals;
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod store;
mod tasks;
mod telemetry;
#[cfg(test)]
#[path = "../../tests/harness/port.rs"]
mod test_port;
mod traces;

#[doc(hidden)]
pub use grpc::bench;
