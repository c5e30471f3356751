//! One module per subject. The name of each test is the promise that it checks.

mod access;
mod brokers;
mod check;
mod connections;
mod consume;
mod crash;
mod dedup;
mod errors;
mod failover;
mod limits;
mod order;
mod outage;
mod pipeline;
mod probes;
mod push_streams;
mod receipts;
mod reserve;
mod retries;
mod schedules;
mod secrets;
mod settings;
mod shutdown;
mod spreading;
mod streams;
mod tls;
mod totals;
