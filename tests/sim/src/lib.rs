//! Runs brokers, signals, a store and clients in one process, on a simulated clock, with faults. All
//! that happens follows from one number, the seed.
//!
//! # Layout
//! * `run`: one simulation, from its seed to the report of the checker. `plan`: what the seed decides.
//! * `clients`: what is asked of the brokers, and recorded. `cluster`: the brokers.
//! * `net`: the ways between brokers and the store, and all that goes wrong on them.
//! * [`store`]: the third store, an in-memory model of what a store promises.
//! * `entropy`, `dice`: randomness that follows from the seed.

mod clients;
mod cluster;
mod dice;
mod entropy;
mod net;
mod plan;
mod run;
pub mod store;

pub use plan::Weather;
pub use run::{Outcome, simulate};
