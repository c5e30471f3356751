//! How the library behaves when connections break and calls fail, seen from the broker's side.
//!
//! The broker here decides nothing: each call goes to the test, which answers it. What the
//! library does with a real broker is tested end to end.

mod addresses;
mod broker;
mod consumer;
mod producer;
#[cfg(feature = "opentelemetry")]
mod traces;
