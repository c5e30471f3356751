//! The `sluicegate` binary. All of its code is in the library, so that nothing is compiled twice.

use std::process::ExitCode;

/// Quicker than the C library's, and gives memory back a second after it was used: `.cargo/config.toml` has its settings.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    sluicegate_broker::process::run()
}
