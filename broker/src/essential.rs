//! Work without which the broker would seem to run, and hang.
//!
//! A panic ends only its own task. If that task is the dispatcher of a queue or the writer of the store, what depends on
//! it waits for ever, and nothing outside tells. So such a panic ends the process. Its supervisor starts it again,
//! and nothing is lost, because the store is the truth. A panic in one call or one stream fails that call or stream alone.

use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::FutureExt;

/// The exit code of a process that ends because of a defect: `EX_SOFTWARE` of sysexits.h.
pub(crate) const EXIT_CODE: i32 = 70;
/// The exit code of a process that ends because of a failing disk: `EX_IOERR` of sysexits.h.
const EXIT_CODE_IO: i32 = 74;

/// Runs a task. The process ends if the task panics.
pub(crate) async fn essential<T>(name: &str, task: impl Future<Output = T>) -> T {
    // What the task left half done is not looked at any more.
    AssertUnwindSafe(task).catch_unwind().await.unwrap_or_else(|_| end(name))
}

/// Runs the work of a thread in the same way.
pub(crate) fn essential_thread<T>(name: &str, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| end(name))
}

/// Ends the process after an error with which it must not go on.
pub(crate) fn end_because(error: &dyn std::error::Error, what: &str) -> ! {
    tracing::error!(%error, "{what}; the process ends, to be started again");
    std::process::exit(EXIT_CODE_IO)
}

fn end(name: &str) -> ! {
    // The panic itself is on standard error already.
    tracing::error!(
        task = name,
        "a task without which the broker hangs has panicked: this is a defect; the process ends, to be started again"
    );
    std::process::exit(EXIT_CODE)
}
