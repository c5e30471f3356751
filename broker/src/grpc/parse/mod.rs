//! From the wire to the domain, with every check of every request. Nothing is checked again after this.
//!
//! Each failure is an [`Invalid`] that names the field as the proto does, with its path in the request:
//! `items[3].priority`. The limits are those that the comments of the proto state.

mod admin;
mod item;
mod operation;
mod queue;
mod scaler;
mod settle;
mod take;
mod template;

use std::time::Duration;

use sluicegate_proto::v1 as pb;

use crate::{
    domain::{
        FOREVER, Invalid, ItemId, Timestamp,
        limits::{MAX_BATCH, MAX_SPAN},
    },
    engine::Engine,
    grpc::status::ApiError,
};

pub(super) use admin::{
    PageRequest, TOKEN_BYTES, item_filter, item_state, max_items, prefix, queue_batch, rate,
    redrive, replay, watched,
};
pub(super) use item::{Batch, batch, request_id, schedule, schedule_change};
pub(super) use operation::{operation_id, operation_place, work};
pub(super) use queue::{change, check_labels, new_queue};
pub(super) use scaler::{Figure, Scaler, figure, scaler};
pub(super) use settle::{
    CommitAndPush, commit_and_push, extend, move_item, named, receipts, rollbacks,
};
pub(super) use take::{Take, consume, consumer, flow, lease, take};
pub(super) use template::{pattern, template, template_change};

/// The limits against which requests are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// The most bytes of one payload.
    pub(super) max_payload_bytes: usize,
    /// The longest lease.
    pub(super) max_lease: Duration,
    /// The store's time.
    pub(super) now: Timestamp,
}

impl Rules {
    /// Returns the rules that are in force now.
    pub(super) fn of(engine: &Engine) -> Self {
        let limits = engine.limits();
        Self {
            max_payload_bytes: limits.max_payload_bytes,
            max_lease: limits.max_lease,
            now: engine.now(),
        }
    }
}

/// Adds the outer part of the path to the field of an error.
fn within(outer: impl FnOnce() -> String) -> impl FnOnce(ApiError) -> ApiError {
    use crate::engine::EngineError;
    move |error| match error {
        ApiError::Engine(EngineError::Invalid(invalid)) => invalid.within(&outer()).into(),
        ApiError::PayloadTooLarge { field, bytes, limit } => {
            ApiError::PayloadTooLarge { field: format!("{}.{field}", outer()), bytes, limit }
        }
        other => other,
    }
}

/// Parses a span of time from zero to `max`.
fn duration(field: &str, value: prost_types::Duration, max: Duration) -> Result<Duration, Invalid> {
    let prost_types::Duration { seconds, nanos } = value;
    let opposed = (seconds > 0 && nanos < 0) || (seconds < 0 && nanos > 0);
    if opposed || nanos.unsigned_abs() > 999_999_999 {
        let why = "not a duration: nanos must be within 999,999,999 and have the sign of seconds";
        return Err(Invalid::new(field, why));
    }
    let (Ok(whole), Ok(part)) = (u64::try_from(seconds), u32::try_from(nanos)) else {
        return Err(Invalid::new(field, "must not be negative"));
    };
    let span = Duration::new(whole, part);
    if span > max {
        return Err(Invalid::new(field, format!("{span:?} is more than the limit of {max:?}")));
    }
    Ok(span)
}

/// Parses a span of time that may be left out, which means zero.
fn duration_or_zero(
    field: &str,
    value: Option<prost_types::Duration>,
    max: Duration,
) -> Result<Duration, Invalid> {
    value.map_or(Ok(Duration::ZERO), |value| duration(field, value, max))
}

/// Parses a time to live, which must be longer than zero.
fn time_to_live(
    field: &str,
    value: Option<prost_types::Duration>,
) -> Result<Option<Duration>, Invalid> {
    match value.map(|value| duration(field, value, MAX_SPAN)).transpose()? {
        Some(Duration::ZERO) => Err(Invalid::new(field, "must be longer than zero")),
        span => Ok(span),
    }
}

/// Parses an instant. Parts of a millisecond are rounded up, so that nothing is early.
fn timestamp(field: &str, value: prost_types::Timestamp) -> Result<Timestamp, Invalid> {
    const FIRST: i64 = -62_135_596_800; // 0001-01-01T00:00:00Z
    const LAST: i64 = 253_402_300_799; // 9999-12-31T23:59:59Z
    let prost_types::Timestamp { seconds, nanos } = value;
    if !(FIRST..=LAST).contains(&seconds) || !(0..1_000_000_000).contains(&nanos) {
        let why = "not a timestamp: years 1 to 9999, nanos 0 to 999,999,999";
        return Err(Invalid::new(field, why));
    }
    let millis = seconds * 1000 + i64::from(nanos).div_euclid(1_000_000);
    let part = i64::from(nanos % 1_000_000 != 0);
    Ok(Timestamp((millis + part).min(FOREVER.0)))
}

/// Parses a number that must not be negative.
fn not_negative<T, U: TryFrom<T>>(field: &str, value: T) -> Result<U, Invalid> {
    U::try_from(value).map_err(|_| Invalid::new(field, "must not be negative"))
}

/// Parses a number from 1 to `most`; 0 means `default`.
fn count(field: &str, value: i32, default: usize, most: usize) -> Result<usize, Invalid> {
    match usize::try_from(value) {
        Ok(0) => Ok(default),
        Ok(count) if count <= most => Ok(count),
        _ => Err(Invalid::new(field, format!("{value} is not within 0 to {most}"))),
    }
}

/// Refuses an empty list and a list longer than [`MAX_BATCH`].
fn batch_length(field: &str, length: usize) -> Result<(), Invalid> {
    if (1..=MAX_BATCH).contains(&length) {
        return Ok(());
    }
    Err(Invalid::new(field, format!("must hold 1 to {MAX_BATCH} entries, not {length}")))
}

/// Refuses text that is longer than its limit.
fn at_most(field: &str, text: &str, bytes: usize) -> Result<(), Invalid> {
    if text.len() <= bytes {
        return Ok(());
    }
    Err(Invalid::new(field, format!("{} bytes are more than the limit of {bytes}", text.len())))
}

/// Returns a message inside the request that must be given.
fn required<T>(field: &str, value: Option<T>) -> Result<T, Invalid> {
    value.ok_or_else(|| Invalid::new(field, "must be given"))
}

/// Parses an item's id.
pub(super) fn item_id(field: &str, text: &str) -> Result<ItemId, Invalid> {
    let why = "not an item id: pass it on exactly as it was received";
    text.parse().map_err(|()| Invalid::new(field, why))
}

fn item_ids(field: &str, ids: &[String]) -> Result<Vec<ItemId>, Invalid> {
    let id = |(i, id): (usize, &String)| {
        item_id("", id).map_err(|e| Invalid::new(format!("{field}[{i}]"), e.description))
    };
    ids.iter().enumerate().map(id).collect()
}

/// Parses a span of time that may be open at both ends. Returns its start, included, and its end, excluded.
fn time_range(
    field: &str,
    range: pb::TimeRange,
) -> Result<(Option<Timestamp>, Option<Timestamp>), Invalid> {
    let instant = |name: &str, value: Option<prost_types::Timestamp>| {
        value.map(|value| timestamp(&format!("{field}.{name}"), value)).transpose()
    };
    let start = instant("start_time", range.start_time)?;
    let end = instant("end_time", range.end_time)?;
    if let (Some(start), Some(end)) = (start, end)
        && end < start
    {
        return Err(Invalid::new(format!("{field}.end_time"), "must not be before start_time"));
    }
    Ok((start, end))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rules at a fixed time, with a small limit for payloads.
    pub(crate) const RULES: Rules = Rules {
        max_payload_bytes: 100,
        max_lease: Duration::from_mins(1),
        now: Timestamp(1_700_000_000_000),
    };

    pub(crate) fn span(seconds: i64, nanos: i32) -> prost_types::Duration {
        prost_types::Duration { seconds, nanos }
    }

    #[test]
    fn durations_are_whole_positive_and_bounded() {
        let max = Duration::from_secs(10);
        assert_eq!(duration("d", span(0, 0), max), Ok(Duration::ZERO));
        assert_eq!(duration("d", span(1, 500_000_000), max), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("d", span(10, 0), max), Ok(max));
        for (seconds, nanos) in [
            (10, 1),
            (i64::MAX, 0),
            (-1, 0),
            (0, -1),
            (i64::MIN, 0),
            (1, -1),
            (-1, 1),
            (0, 1_000_000_000),
            (0, i32::MAX),
            (0, i32::MIN),
        ] {
            let error = duration("d", span(seconds, nanos), max).unwrap_err();
            assert_eq!(error.field, "d", "{seconds} {nanos}");
        }
    }

    #[test]
    fn instants_are_bounded_and_never_early() {
        let at = |seconds, nanos| {
            timestamp("t", prost_types::Timestamp { seconds, nanos }).map(Timestamp::millis)
        };
        assert_eq!(at(1, 0), Ok(1000));
        assert_eq!(at(1, 1), Ok(1001));
        assert_eq!(at(-1, 999_000_000), Ok(-1));
        assert_eq!(at(253_402_300_799, 999_999_999), Ok(FOREVER.0));
        for (seconds, nanos) in [
            (253_402_300_800, 0),
            (-62_135_596_801, 0),
            (i64::MAX, 0),
            (i64::MIN, 0),
            (0, -1),
            (0, 1_000_000_000),
        ] {
            assert_eq!(at(seconds, nanos).unwrap_err().field, "t", "{seconds} {nanos}");
        }
    }

    #[test]
    fn a_range_must_not_end_before_it_starts() {
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let range = |start_time, end_time| {
            time_range("process_time", pb::TimeRange { start_time, end_time })
        };
        assert_eq!(range(None, None), Ok((None, None)));
        assert_eq!(range(at(1), at(1)), Ok((Some(Timestamp(1000)), Some(Timestamp(1000)))));
        assert_eq!(range(at(2), at(1)).unwrap_err().field, "process_time.end_time");
        let start_time = Some(prost_types::Timestamp { seconds: 0, nanos: -1 });
        assert_eq!(range(start_time, None).unwrap_err().field, "process_time.start_time");
    }

    proptest! {
        /// Every request is accepted or refused; none leads to a panic or an overflow.
        #[test]
        fn any_duration_and_time_is_accepted_or_refused(seconds: i64, nanos: i32) {
            if let Ok(span) = duration("d", span(seconds, nanos), MAX_SPAN) {
                prop_assert!(span <= MAX_SPAN);
            }
            if let Ok(at) = timestamp("t", prost_types::Timestamp { seconds, nanos }) {
                prop_assert!(at <= FOREVER);
            }
        }
    }
}
