//! One module per subject. Each test is named after the promise it checks.

mod brokers;
mod consume;
mod crash;
mod errors;
mod order;
mod outage;
mod probes;
mod receipts;
mod reserve;
mod shutdown;
mod totals;
