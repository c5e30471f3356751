//! Runs brokers, signals, a store and clients in one process, on a simulated clock, with faults. All
//! that happens follows from one number, the seed.
//!
//! # Layout
//! * [`store`]: the third store, an in-memory model of what a store promises.

pub mod store;
