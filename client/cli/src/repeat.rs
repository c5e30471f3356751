//! Calls that are repeated while nobody knows what became of them. Each carries a `request_id`, so that all of its repetitions
//! together have one effect.

use std::time::{Duration, Instant};

use sluicegate_client::{
    Error,
    tonic::{Response, Status},
};

use crate::{context::Context, failure::Failure};

/// How long a call is repeated: long enough for another broker to take over.
const PATIENCE: Duration = Duration::from_mins(1);
/// The pause before a call is repeated, unless the broker asks for a longer one.
const PAUSE: Duration = Duration::from_millis(300);

/// Returns a `request_id` of its own for one thing that is to be done.
pub(crate) fn new_request_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Makes a call until its outcome is known. All calls that `call` makes have the same `request_id`.
///
/// # Errors
/// What the broker said; if that took too long, why the last call was not answered.
pub(crate) async fn until_known<T>(
    context: &Context,
    mut call: impl AsyncFnMut() -> Result<Response<T>, Status>,
) -> Result<T, Failure> {
    let begun = Instant::now();
    let mut is_first = true;
    loop {
        let error = match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => Error::from(status),
        };
        // One call may take longer than all patience, and is repeated all the same.
        let is_late = !is_first && begun.elapsed() > PATIENCE;
        if is_late || !error.is_unavailable() {
            return Err(error.into());
        }
        is_first = false;
        let pause = error.retry_delay().unwrap_or_default().max(PAUSE);
        // What is no broker does not become one.
        match context.explain(error.into()).await {
            Failure::Client(_) => tokio::time::sleep(pause).await,
            other => return Err(other),
        }
    }
}
