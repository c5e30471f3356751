//! The `sluicegate` binary. All of its code is in the library, so that nothing is compiled twice.

use std::process::ExitCode;

fn main() -> ExitCode {
    sluicegate_broker::process::run()
}
