//! How an item is settled.

use std::{any::Any, fmt};

use crate::{
    Retry,
    item::to_proto_duration,
    proto::{MoveRequest, PushEntry, RollbackItem},
};

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
    /// Gives the item back, as the error says if it is a [`Retry`], else with its text as reason.
    pub(crate) fn from_error<E: fmt::Display + 'static>(error: &E) -> Self {
        type Boxed = Box<dyn std::error::Error + Send + Sync>;
        let any: &dyn Any = error;
        let retry = any.downcast_ref::<Retry>().or_else(|| {
            any.downcast_ref::<Boxed>().and_then(|boxed| boxed.downcast_ref::<Retry>())
        });
        Self::Rollback(retry.cloned().unwrap_or_else(|| Retry::new(error.to_string())))
    }

    /// A handler that panicked.
    pub(super) fn from_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        Self::Rollback(Retry::new(format!("handler panicked: {text}")))
    }
}

/// A decision and the reservation it is about.
#[derive(Debug)]
pub(super) struct Settle {
    pub(super) receipt: String,
    pub(super) decision: Decision,
}

/// The longest reason that is sent; the broker cuts there too.
const MAX_REASON: usize = 1_024;

pub(super) fn rollback_item(receipt: String, retry: Retry) -> RollbackItem {
    let mut reason = retry.reason;
    if reason.len() > MAX_REASON {
        reason.truncate(reason.floor_char_boundary(MAX_REASON));
    }
    let delay = retry.delay.map(to_proto_duration);
    RollbackItem { receipt, delay, reason, keep_attempt: retry.keep_attempt, dead_letter: false }
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
        assert_eq!(rolled_back(Decision::from_error(&retry)), retry);
        let boxed: Box<dyn std::error::Error + Send + Sync> = retry.clone().into();
        assert_eq!(rolled_back(Decision::from_error(&boxed)), retry);
    }

    #[test]
    fn any_other_error_becomes_the_reason() {
        assert_eq!(rolled_back(Decision::from_error(&"no paper")), Retry::new("no paper"));
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
