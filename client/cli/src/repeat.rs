//! Calls that are repeated while nobody knows what became of them. Each carries a `request_id`, so that all of its repetitions
//! together have one effect.

use std::time::Duration;

use sluicegate_client::{
    Error,
    tonic::{Code, Response, Status},
};
use tokio::time::{Instant, sleep};

use crate::{context::Context, failure::Failure};

/// How long a call is repeated: long enough for another broker to take over.
const PATIENCE: Duration = Duration::from_mins(1);
/// The pause before a call is repeated, unless the broker asks for a longer one.
const PAUSE: Duration = Duration::from_millis(300);

/// Returns a `request_id` of its own for one thing that is to be done.
pub(crate) fn new_request_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Makes a call until its outcome is known. All calls that `call` makes have the same `request_id`. Who gives the command again
/// makes calls with another one: `instead` says what to do when it stays unknown.
///
/// # Errors
/// What the broker said; [`Failure::Unknown`] if one of the calls may have taken effect all the same.
pub(crate) async fn until_known<T>(
    context: &Context,
    instead: &'static str,
    call: impl AsyncFnMut() -> Result<Response<T>, Status>,
) -> Result<T, Failure> {
    repeated(call, instead, async |failure| context.explain(failure).await).await
}

async fn repeated<T>(
    mut call: impl AsyncFnMut() -> Result<Response<T>, Status>,
    instead: &'static str,
    explain: impl AsyncFn(Failure) -> Failure,
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
            return Err(if is_first && !may_have_begun(&error) {
                error.into()
            } else {
                Failure::Unknown { source: error, instead }
            });
        }
        is_first = false;
        let pause = error.retry_delay().unwrap_or_default().max(PAUSE);
        // What is no broker does not become one.
        match explain(error.into()).await {
            Failure::Client(_) => sleep(pause).await,
            other => return Err(other),
        }
    }
}

/// Returns true if a call that ended so, and is not repeated, may have taken effect.
fn may_have_begun(error: &Error) -> bool {
    // A broker says so when its work went wrong, and a proxy of a call that it has passed on.
    matches!(error.code(), Some(Code::Unknown | Code::Internal))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTEAD: &str = "look before you start it again";

    /// Returns how calls end that are answered with these statuses, the last one again and again, and how many were made.
    async fn made(answers: &[Status]) -> (Failure, usize) {
        let mut calls = 0;
        let call = async || {
            let answer = answers.get(calls).or(answers.last()).expect("a status").clone();
            calls += 1;
            Err::<Response<()>, _>(answer)
        };
        let failure = repeated(call, INSTEAD, async |failure| failure).await;
        (failure.expect_err("a failure"), calls)
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_says_what_to_do_in_place_of_trying_again() {
        let (failure, calls) = made(&[Status::unavailable("the store is away")]).await;
        assert!(calls > 2, "{calls}");
        assert!(matches!(failure, Failure::Unknown { .. }), "{failure:?}");
        assert_eq!(failure.hint(), Some(INSTEAD));
        assert_eq!(failure.with_causes(), "outcome unknown: the store is away");
        assert_eq!(failure.code(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_tells_the_outcome_unless_an_earlier_call_may_have_taken_effect() {
        let refusal = Status::not_found("queue q does not exist");
        let (failure, calls) = made(std::slice::from_ref(&refusal)).await;
        assert!(matches!(failure, Failure::Client(_)) && calls == 1, "{failure:?}");
        let (failure, calls) = made(&[Status::unavailable("away"), refusal]).await;
        assert!(matches!(failure, Failure::Unknown { .. }) && calls == 2, "{failure:?}");
        assert_eq!(failure.hint(), Some(INSTEAD));
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_that_failed_within_does_not_say_what_it_had_done() {
        for status in [Status::internal("as the test asks"), Status::unknown("as the test asks")] {
            let (failure, calls) = made(std::slice::from_ref(&status)).await;
            assert!(matches!(failure, Failure::Unknown { .. }) && calls == 1, "{failure:?}");
            assert_eq!(failure.hint(), Some(INSTEAD));
        }
    }
}
