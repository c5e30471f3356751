//! Items as pushed: one by one, in batches and in schedules.

use std::collections::HashMap;

use sluicegate_proto::v1 as pb;

use super::{Rules, at_most, batch_length, duration, required, time_to_live, timestamp, within};
use crate::{
    domain::{
        ConsumerName, DedupId, Eligibility, Headers, Invalid, NewItem, OrderingKey, Priority,
        QueueName, Schedule, ScheduleChange, ScheduleName, check_header_limits,
        limits::{
            MAX_CONTENT_TYPE_BYTES, MAX_DEDUP_ID_BYTES, MAX_ORDERING_KEY_BYTES,
            MAX_REQUEST_ID_BYTES, MAX_SPAN,
        },
    },
    engine::check_cron,
    grpc::status::ApiError,
};

/// A checked push.
#[derive(Debug)]
pub(in crate::grpc) struct Batch {
    pub(in crate::grpc) queue: QueueName,
    pub(in crate::grpc) items: Vec<NewItem>,
    pub(in crate::grpc) producer: Option<ConsumerName>,
}

/// Parses the fields that Push and PushStream share. One invalid item makes the whole batch invalid.
pub(in crate::grpc) fn batch(
    queue: &str,
    items: Vec<pb::NewItem>,
    producer: &str,
    rules: &Rules,
) -> Result<Batch, ApiError> {
    let queue = QueueName::parse("queue", queue)?;
    let producer = ConsumerName::parse_optional("producer", producer)?;
    batch_length("items", items.len())?;
    let item = |(i, item)| new_item(item, rules).map_err(within(|| format!("items[{i}]")));
    let items = items.into_iter().enumerate().map(item).collect::<Result<_, _>>()?;
    Ok(Batch { queue, items, producer })
}

/// Parses one item; the paths of fields begin at the item.
pub(in crate::grpc) fn new_item(item: pb::NewItem, rules: &Rules) -> Result<NewItem, ApiError> {
    payload(&item.payload, rules)?;
    at_most("content_type", &item.content_type, MAX_CONTENT_TYPE_BYTES)?;
    at_most("ordering_key", &item.ordering_key, MAX_ORDERING_KEY_BYTES)?;
    at_most("dedup_id", &item.dedup_id, MAX_DEDUP_ID_BYTES)?;
    let eligibility = match item.eligibility {
        Some(pb::new_item::Eligibility::Delay(value)) => {
            let delay = duration("delay", value, MAX_SPAN)?;
            if delay.is_zero() { Eligibility::Immediate } else { Eligibility::After(delay) }
        }
        Some(pb::new_item::Eligibility::EligibleTime(value)) => {
            let at = timestamp("eligible_time", value)?;
            if at > rules.now + MAX_SPAN {
                return Err(Invalid::new("eligible_time", "more than 10 years ahead").into());
            }
            // A past time means immediately, so that an item cannot overtake others.
            if at > rules.now { Eligibility::At(at) } else { Eligibility::Immediate }
        }
        None => Eligibility::Immediate,
    };
    Ok(NewItem {
        headers: headers(item.headers)?,
        priority: Priority::parse("priority", item.priority)?,
        ttl: time_to_live("ttl", item.ttl)?,
        payload: item.payload,
        content_type: item.content_type,
        eligibility,
        ordering_key: OrderingKey::new(item.ordering_key),
        dedup_id: DedupId::new(item.dedup_id),
    })
}

pub(super) fn payload(payload: &[u8], rules: &Rules) -> Result<(), ApiError> {
    let (bytes, limit) = (payload.len(), rules.max_payload_bytes);
    if bytes <= limit {
        return Ok(());
    }
    Err(ApiError::PayloadTooLarge { field: "payload".to_owned(), bytes, limit })
}

pub(super) fn headers(headers: HashMap<String, String>) -> Result<Headers, Invalid> {
    let refuse = |why: String| Err(Invalid::new("headers", why));
    check_header_limits("headers", &headers)?;
    if headers.contains_key("") {
        return refuse("keys must not be empty".to_owned());
    }
    if headers.keys().any(|key| key.contains('\0')) {
        return refuse("keys must not contain zero bytes".to_owned());
    }
    Ok(headers.into_iter().collect())
}

/// Parses a schedule to create; the paths of fields begin at the request.
pub(in crate::grpc) fn schedule(
    schedule: Option<pb::Schedule>,
    rules: &Rules,
) -> Result<Schedule, ApiError> {
    let schedule = required("schedule", schedule)?;
    let time_zone =
        if schedule.time_zone.is_empty() { "UTC".to_owned() } else { schedule.time_zone };
    check_cron(&schedule.cron, &time_zone).map_err(|error| error.within("schedule"))?;
    let inner = || -> Result<Schedule, ApiError> {
        Ok(Schedule {
            name: ScheduleName::parse("name", &schedule.name)?,
            queue: QueueName::parse("queue", &schedule.queue)?,
            item: schedule_item(schedule.item, rules)?,
            cron: schedule.cron,
            time_zone,
            paused: schedule.paused,
            create_time: rules.now,
            done_until: rules.now,
            last_time: None,
        })
    };
    inner().map_err(within(|| "schedule".to_owned()))
}

fn schedule_item(item: Option<pb::NewItem>, rules: &Rules) -> Result<NewItem, ApiError> {
    let item = required("item", item)?;
    if !item.dedup_id.is_empty() {
        let why = "must be empty: the broker sets the schedule's name and the tick";
        return Err(Invalid::new("item.dedup_id", why).into());
    }
    new_item(item, rules).map_err(within(|| "item".to_owned()))
}

/// Parses an UpdateSchedule. Whether the times are possible is left to the engine, which knows all of them.
pub(in crate::grpc) fn schedule_change(
    schedule: Option<pb::Schedule>,
    mask: Option<prost_types::FieldMask>,
    rules: &Rules,
) -> Result<(ScheduleName, ScheduleChange), ApiError> {
    let given = required("schedule", schedule)?;
    let name = ScheduleName::parse("schedule.name", &given.name)?;
    let paths = mask.unwrap_or_default().paths;
    if paths.is_empty() {
        let why = "must name the fields to change, for example cron, or * for all";
        return Err(Invalid::new("update_mask", why).into());
    }
    let changes = |field: &str| paths.iter().any(|path| path == field || path == "*");
    if let Some(other) = paths
        .iter()
        .find(|path| !["*", "queue", "cron", "time_zone", "item"].contains(&path.as_str()))
    {
        let why = match other.as_str() {
            "paused" => "paused is changed by PauseSchedule and ResumeSchedule".to_owned(),
            other => format!("{other:?} is not among queue, cron, time_zone and item"),
        };
        return Err(Invalid::new("update_mask", why).into());
    }
    let time_zone = if given.time_zone.is_empty() { "UTC".to_owned() } else { given.time_zone };
    let mut change = ScheduleChange {
        cron: changes("cron").then_some(given.cron),
        time_zone: changes("time_zone").then_some(time_zone),
        ..ScheduleChange::default()
    };
    if changes("queue") {
        change.queue = Some(QueueName::parse("schedule.queue", &given.queue)?);
    }
    if changes("item") {
        let item = schedule_item(given.item, rules).map_err(within(|| "schedule".to_owned()))?;
        change.item = Some(item);
    }
    Ok((name, change))
}

/// Parses the id of a request; empty: none.
pub(in crate::grpc) fn request_id(id: &str) -> Result<(), Invalid> {
    if id.contains('\0') {
        return Err(Invalid::new("request_id", "must not contain zero bytes"));
    }
    at_most("request_id", id, MAX_REQUEST_ID_BYTES)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost_types::Timestamp as PbTimestamp;

    use super::super::tests::{RULES, span};
    use super::*;
    use crate::{domain::Timestamp, engine::EngineError};

    fn push(items: Vec<pb::NewItem>) -> Result<Batch, ApiError> {
        batch("orders", items, "", &RULES)
    }

    /// Returns the field for which a push of this item, as the fourth of its batch, is refused.
    fn refused(item: pb::NewItem) -> String {
        let fine = || pb::NewItem { payload: "x".into(), ..Default::default() };
        match push(vec![fine(), fine(), fine(), item]).unwrap_err() {
            ApiError::Engine(EngineError::Invalid(invalid)) => invalid.field,
            ApiError::PayloadTooLarge { field, .. } => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_full_item_is_accepted_unchanged() {
        let item = pb::NewItem {
            payload: vec![7; 100].into(),
            content_type: "x".repeat(255),
            headers: [("k".to_owned(), "v".to_owned())].into(),
            priority: 9,
            eligibility: Some(pb::new_item::Eligibility::Delay(span(1, 0))),
            ttl: Some(span(0, 1)),
            ordering_key: "k".repeat(255),
            dedup_id: "d".repeat(255),
        };
        let batch = batch("orders", vec![item], "worker-1", &RULES).unwrap();
        let [item] = &batch.items[..] else { panic!() };
        assert_eq!(batch.producer.unwrap().as_str(), "worker-1");
        assert_eq!((item.payload.len(), item.priority.level()), (100, 9));
        assert_eq!(item.eligibility, Eligibility::After(Duration::from_secs(1)));
        assert_eq!(item.ttl, Some(Duration::from_nanos(1)));
        assert_eq!(item.headers["k"], "v");
    }

    #[test]
    fn by_default_an_item_is_empty_and_eligible_immediately() {
        let batch = push(vec![pb::NewItem::default()]).unwrap();
        assert_eq!(batch.items, [NewItem::default()]);
    }

    #[test]
    fn an_eligible_time_in_the_past_means_immediately() {
        let at = |seconds| pb::NewItem {
            eligibility: Some(pb::new_item::Eligibility::EligibleTime(PbTimestamp {
                seconds,
                nanos: 0,
            })),
            ..Default::default()
        };
        let eligible = |seconds| push(vec![at(seconds)]).unwrap().items[0].eligibility;
        assert_eq!(eligible(0), Eligibility::Immediate);
        assert_eq!(eligible(-5), Eligibility::Immediate);
        let ahead = Timestamp(1_700_000_001_000);
        assert_eq!(eligible(1_700_000_001), Eligibility::At(ahead));
        assert_eq!(refused(at(1_700_000_000 + 3_700 * 24 * 3_600)), "items[3].eligible_time");
    }

    #[test]
    fn each_bad_field_is_named() {
        use pb::new_item::Eligibility::{Delay, EligibleTime};
        let item = pb::NewItem::default;
        let header = |n: usize, bytes: usize| pb::NewItem {
            headers: (0..n).map(|i| (format!("{i:04}"), "v".repeat(bytes))).collect(),
            ..item()
        };
        let cases = [
            (pb::NewItem { payload: vec![0; 101].into(), ..item() }, "payload"),
            (pb::NewItem { content_type: "x".repeat(256), ..item() }, "content_type"),
            (pb::NewItem { ordering_key: "x".repeat(256), ..item() }, "ordering_key"),
            (pb::NewItem { dedup_id: "x".repeat(256), ..item() }, "dedup_id"),
            (pb::NewItem { priority: 10, ..item() }, "priority"),
            (pb::NewItem { priority: -1, ..item() }, "priority"),
            (pb::NewItem { ttl: Some(span(0, 0)), ..item() }, "ttl"),
            (pb::NewItem { ttl: Some(span(-1, 0)), ..item() }, "ttl"),
            (pb::NewItem { eligibility: Some(Delay(span(-1, 0))), ..item() }, "delay"),
            (pb::NewItem { eligibility: Some(Delay(span(1 << 40, 0))), ..item() }, "delay"),
            (
                pb::NewItem {
                    eligibility: Some(EligibleTime(PbTimestamp { seconds: 0, nanos: -1 })),
                    ..item()
                },
                "eligible_time",
            ),
            (
                pb::NewItem { headers: [(String::new(), "v".to_owned())].into(), ..item() },
                "headers",
            ),
            (
                pb::NewItem { headers: [("a\0b".to_owned(), "v".to_owned())].into(), ..item() },
                "headers",
            ),
            (header(65, 1), "headers"),
            (header(64, 253), "headers"),
        ];
        for (item, field) in cases {
            assert_eq!(refused(item), format!("items[3].{field}"));
        }
        assert!(push(vec![header(64, 252)]).is_ok());
    }

    #[test]
    fn batches_hold_one_to_a_thousand_items() {
        let field = |result: Result<Batch, ApiError>| match result.unwrap_err() {
            ApiError::Engine(EngineError::Invalid(invalid)) => invalid.field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(push(vec![])), "items");
        assert_eq!(field(push(vec![pb::NewItem::default(); 1001])), "items");
        assert!(push(vec![pb::NewItem::default(); 1000]).is_ok());
        assert_eq!(field(batch("", vec![], "", &RULES)), "queue");
        assert_eq!(field(batch("q", vec![], "a b", &RULES)), "producer");
    }
}
