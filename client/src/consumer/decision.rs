//! How an item is settled.

use std::{any::Any, error::Error};

use crate::{
    item::to_proto_duration,
    proto::{MoveRequest, PushEntry, RollbackItem},
    retry::Retry,
};

/// The type into which errors of handlers convert: errors, texts, `anyhow::Error`.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// What a handler decided. Moves and forks come from stations only.
#[derive(Debug, Clone)]
pub(crate) enum Decision {
    Commit,
    Rollback(Retry),
    /// `receipt` is still empty.
    Move(MoveRequest),
    Fork(Vec<PushEntry>),
}

impl Decision {
    /// Rolls the item back: as the [`Retry`] inside the error says if there is one, else with the error's text as reason.
    pub(crate) fn from_error<E: Into<BoxError> + 'static>(error: E) -> Self {
        let any: &dyn Any = &error;
        if let Some(error) = any.downcast_ref::<anyhow::Error>() {
            // Only its own `downcast_ref` finds what it wraps; once it is boxed, that is hidden.
            let held = error.downcast_ref::<Retry>();
            let retry = held.or_else(|| error.chain().find_map(|cause| cause.downcast_ref()));
            return Self::Rollback(retry.cloned().unwrap_or_else(|| Retry::new(error.to_string())));
        }
        let error = error.into();
        let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
        while let Some(error) = cause {
            if let Some(retry) = error.downcast_ref::<Retry>() {
                return Self::Rollback(retry.clone());
            }
            cause = error.source();
        }
        Self::Rollback(Retry::new(error.to_string()))
    }

    /// Rolls back the item of a handler that panicked.
    pub(super) fn from_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        Self::Rollback(Retry::new(format!("handler panicked: {text}")))
    }
}

/// A decision, and the receipt of the reservation that it settles.
#[derive(Debug)]
pub(super) struct Settle {
    pub(super) receipt: String,
    pub(super) decision: Decision,
}

/// Most bytes of a reason; the broker truncates there as well.
const MAX_REASON: usize = 1_024;

pub(super) fn rollback_item(receipt: String, retry: Retry) -> RollbackItem {
    let mut reason = retry.reason;
    if reason.len() > MAX_REASON {
        let end = (0..=MAX_REASON).rfind(|&end| reason.is_char_boundary(end));
        reason.truncate(end.unwrap_or(0));
    }
    let delay = retry.delay.map(to_proto_duration);
    let Retry { keep_attempt, dead_letter, .. } = retry;
    RollbackItem { receipt, delay, reason, keep_attempt, dead_letter }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn rolled_back(decision: Decision) -> Retry {
        match decision {
            Decision::Rollback(retry) => retry,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_retry_is_found_as_it_is_and_boxed() {
        let retry = Retry::new("busy").after(Duration::from_secs(3)).keep_attempt();
        assert_eq!(rolled_back(Decision::from_error(retry.clone())), retry);
        let boxed: BoxError = retry.clone().into();
        assert_eq!(rolled_back(Decision::from_error(boxed)), retry);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("could not print")]
    struct Caused(#[source] BoxError);

    /// A retry is honoured, however deeply a handler's error handling has wrapped it.
    #[test]
    fn a_retry_is_found_inside_anyhow_and_along_the_sources() {
        use anyhow::Context as _;
        let retry = Retry::dead_letter("no such address");
        let found = |decision| assert_eq!(rolled_back(decision), retry);
        found(Decision::from_error(anyhow::Error::new(retry.clone())));
        let with_context = Err::<(), _>(retry.clone()).context("printing").unwrap_err();
        found(Decision::from_error(with_context.context("working")));
        found(Decision::from_error(Caused(Box::new(Caused(retry.clone().into())))));
        found(Decision::from_error(anyhow::Error::new(Caused(retry.clone().into())).context("x")));
        let sent = rollback_item("r".into(), retry.clone());
        assert!(sent.dead_letter && !sent.keep_attempt && sent.delay.is_none());
        let again = rollback_item("r".into(), retry.clone().after(Duration::from_secs(1)));
        assert!(!again.dead_letter, "the broker refuses both together");
    }

    #[test]
    fn any_other_error_becomes_the_reason() {
        assert_eq!(rolled_back(Decision::from_error("no paper")), Retry::new("no paper"));
        let panic: Box<dyn Any + Send> = Box::new("index out of bounds");
        let reason = rolled_back(Decision::from_panic(&*panic)).reason;
        assert_eq!(reason, "handler panicked: index out of bounds");
    }

    #[test]
    fn long_reasons_are_cut_between_characters() {
        let item = rollback_item("r".into(), Retry::new("ä".repeat(1_000)));
        assert_eq!(item.reason.len(), 1_024);
        let item = rollback_item("r".into(), Retry::new(format!("x{}", "ä".repeat(1_000))));
        assert_eq!(item.reason.len(), 1_023);
    }
}
