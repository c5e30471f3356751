//! The end-to-end suite: the broker's binary as real processes, called over gRPC, killed, frozen
//! and disconnected. `tests/run e2e` starts the servers it needs.

mod e2e;
#[allow(dead_code)] // shared with the fault campaign, which uses what the suite does not
mod harness;
