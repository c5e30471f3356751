//! The end-to-end suite: the broker's binary as real processes, spoken to over gRPC, killed, frozen
//! and cut off. `tests/run e2e` starts the servers it needs.

mod e2e;
mod harness;
