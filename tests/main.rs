//! The end-to-end suite: the broker's binary as real processes, called over gRPC, killed, frozen
//! and disconnected. `tests/run e2e` starts the servers it needs.

mod e2e;
mod harness;
