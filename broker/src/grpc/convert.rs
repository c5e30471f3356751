//! From the domain to the wire. No conversion can fail.

use std::{num::NonZeroU64, time::Duration};

use sluicegate_proto::v1 as pb;

use crate::{
    domain::{
        Delivery, Eligibility, Item, ItemState, Limit, NewItem, Outcome, Pushed, Queue,
        QueueTemplate, Receipt, ReceiptKeys, RetryPolicy, Schedule, Timestamp, limits::MAX_BATCH,
    },
    engine::{QueueStats, RevokeReason, Revoked},
};

pub(super) fn duration(span: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
        nanos: span.subsec_nanos() as i32,
    }
}

pub(super) fn timestamp(at: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: at.millis().div_euclid(1000),
        nanos: at.millis().rem_euclid(1000) as i32 * 1_000_000,
    }
}

pub(super) fn pushed(pushed: Vec<Pushed>) -> Vec<pb::PushResult> {
    let result = |pushed: Pushed| pb::PushResult {
        id: pushed.id.to_text(),
        deduplicated: pushed.deduplicated,
        sequence: pushed.sequence.unwrap_or(0),
    };
    pushed.into_iter().map(result).collect()
}

pub(super) fn item_state(state: ItemState) -> pb::ItemState {
    match state {
        ItemState::Ready => pb::ItemState::Ready,
        ItemState::Delayed => pb::ItemState::Delayed,
        ItemState::Reserved => pb::ItemState::Reserved,
        ItemState::Blocked => pb::ItemState::Blocked,
        ItemState::Processed => pb::ItemState::Processed,
    }
}

pub(super) fn item(item: Item) -> pb::Item {
    pb::Item {
        id: item.id.to_text(),
        queue: item.queue.as_str().to_owned(),
        payload: item.payload,
        content_type: item.content_type,
        headers: item.headers.into_iter().collect(),
        priority: i32::from(item.priority.level()),
        state: item_state(item.state).into(),
        attempt: i32::try_from(item.attempt).unwrap_or(i32::MAX),
        deliveries: i32::try_from(item.deliveries).unwrap_or(i32::MAX),
        sequence: item.sequence.unwrap_or(0),
        ordering_key: item.ordering_key.map(String::from).unwrap_or_default(),
        dedup_id: item.dedup_id.map(String::from).unwrap_or_default(),
        create_time: Some(timestamp(item.create_time)),
        eligible_time: item.eligible_time.map(timestamp),
        expire_time: item.expire_time.map(timestamp),
        process_time: item.process_time.map(timestamp),
        producer: item.producer.map(|name| name.as_str().to_owned()).unwrap_or_default(),
        consumer: item.consumer.map(|name| name.as_str().to_owned()).unwrap_or_default(),
        last_reason: item.last_reason,
        origin_queue: item.origin_queue.map(|name| name.as_str().to_owned()).unwrap_or_default(),
        due_time: item.due_time.map(timestamp),
        dead_letter_time: item.dead_letter_time.map(timestamp),
        dead_letter_attempts: i32::try_from(item.dead_letter_attempts).unwrap_or(i32::MAX),
    }
}

/// Converts a delivery. With `auto_commit` the item is no longer reserved, and there is nothing to settle.
pub(super) fn delivery(delivery: Delivery, auto_commit: bool, keys: &ReceiptKeys) -> pb::Delivery {
    let receipt = if auto_commit { String::new() } else { delivery.receipt.encode(keys) };
    let lease_expire_time = (!auto_commit).then(|| timestamp(delivery.lease_expire_time));
    pb::Delivery {
        item: Some(item(*delivery.item)),
        receipt,
        lease_expire_time,
        delivery_tag: delivery.tag as i64,
    }
}

pub(super) fn outcome(outcome: Outcome) -> pb::Outcome {
    match outcome {
        Outcome::Ok => pb::Outcome::Ok,
        Outcome::DeadLettered => pb::Outcome::DeadLettered,
        Outcome::LeaseLost => pb::Outcome::LeaseLost,
        Outcome::Gone => pb::Outcome::Gone,
    }
}

pub(super) fn revoked(revoked: &Revoked, keys: &ReceiptKeys) -> pb::Revoked {
    let reason = match revoked.reason {
        RevokeReason::Deleted => pb::RevokeReason::Deleted,
        RevokeReason::Lapsed => pb::RevokeReason::Lapsed,
        RevokeReason::MaxLease => pb::RevokeReason::MaxLease,
        RevokeReason::Cancelled => pb::RevokeReason::Cancelled,
    };
    pb::Revoked { receipt: revoked.receipt.encode(keys), reason: reason.into() }
}

/// Returns one result per receipt, in order.
pub(super) fn settled(receipts: Vec<String>, outcomes: Vec<Outcome>) -> Vec<pb::SettleResult> {
    let result = |(receipt, of): (String, Outcome)| pb::SettleResult {
        receipt,
        outcome: outcome(of).into(),
    };
    receipts.into_iter().zip(outcomes).map(result).collect()
}

/// Returns how many were committed, and what became of the others, of which as many are named as a settle may name: a message has a limit.
pub(super) fn committed_up_to(
    receipts: &[Receipt],
    outcomes: &[Outcome],
    keys: &ReceiptKeys,
) -> pb::CommitUpToResponse {
    let others = || receipts.iter().zip(outcomes).filter(|(_, of)| **of != Outcome::Ok);
    let result = |(receipt, of): (&Receipt, &Outcome)| pb::SettleResult {
        receipt: receipt.encode(keys),
        outcome: outcome(*of).into(),
    };
    let not_committed_size = others().count();
    pb::CommitUpToResponse {
        committed: (outcomes.len() - not_committed_size) as i32,
        not_committed: others().take(MAX_BATCH).map(result).collect(),
        not_committed_size: not_committed_size as i32,
    }
}

/// Returns one result per receipt, in order.
pub(super) fn extended(
    receipts: Vec<String>,
    outcomes: Vec<(Outcome, Option<Timestamp>)>,
) -> pb::ExtendResponse {
    let result =
        |(receipt, (of, until)): (String, (Outcome, Option<Timestamp>))| pb::ExtendResult {
            receipt,
            outcome: outcome(of).into(),
            lease_expire_time: until.map(timestamp),
        };
    pb::ExtendResponse { results: receipts.into_iter().zip(outcomes).map(result).collect() }
}

fn retry_policy(policy: &RetryPolicy) -> pb::RetryPolicy {
    pb::RetryPolicy {
        initial_delay: Some(duration(policy.initial_delay)),
        multiplier: policy.multiplier,
        max_delay: Some(duration(policy.max_delay)),
        jitter: policy.jitter,
    }
}

/// Converts a limit for the wire, which has no unsigned numbers.
fn limit(limit: Limit) -> i32 {
    i32::try_from(limit.number()).unwrap_or(i32::MAX)
}

pub(super) fn template(template: &QueueTemplate) -> pb::QueueTemplate {
    let settings = pb::Queue { create_time: None, ..queue(&template.settings) };
    pb::QueueTemplate {
        pattern: template.pattern.to_string(),
        settings: Some(settings),
        create_time: Some(timestamp(template.create_time)),
        update_time: Some(timestamp(template.update_time)),
    }
}

pub(super) fn queue(queue: &Queue) -> pb::Queue {
    pb::Queue {
        name: queue.name.to_string(),
        group: queue.group.to_string(),
        lease: queue.lease.map(duration),
        max_attempts: queue.max_attempts.map(limit),
        max_deliveries: queue.max_deliveries.map(limit),
        discard_failed: queue.discard_failed,
        dead_letter_queue: queue
            .dead_letter_queue
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        retry_policy: queue.retry_policy.as_ref().map(retry_policy),
        default_ttl: queue.default_ttl.map(duration),
        retention: Some(duration(queue.retention)),
        dedup_window: Some(duration(queue.dedup_window)),
        max_depth: figure(queue.max_depth.map_or(0, NonZeroU64::get)),
        sequenced: queue.sequenced,
        paused: queue.paused,
        labels: queue.labels.clone().into_iter().collect(),
        create_time: Some(timestamp(queue.create_time)),
    }
}

/// Converts a number for the wire, which has no unsigned numbers.
pub(super) fn figure(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn stats(stats: &QueueStats, now: Timestamp) -> pb::QueueStats {
    let QueueStats { queue, depth, totals, consumers, consumers_of_all_brokers } = stats;
    pb::QueueStats {
        queue: queue.to_string(),
        ready: figure(depth.ready),
        delayed: figure(depth.delayed),
        reserved: figure(depth.reserved),
        blocked: figure(depth.blocked),
        processed: figure(depth.processed),
        oldest_ready_age: depth.oldest_ready.map(|since| duration(since.until(now))),
        next_eligible_time: depth.next_eligible.map(timestamp),
        consumers: i32::try_from(*consumers).unwrap_or(i32::MAX),
        pushed: figure(totals.pushed),
        delivered: figure(totals.delivered),
        committed: figure(totals.committed),
        rolled_back: figure(totals.rolled_back),
        moved: figure(totals.moved),
        dead_lettered: figure(totals.dead_lettered),
        expired: figure(totals.expired),
        popped: figure(totals.popped),
        discarded: figure(totals.discarded),
        consumers_of_all_brokers: i32::try_from(*consumers_of_all_brokers).unwrap_or(i32::MAX),
    }
}

fn new_item(item: NewItem) -> pb::NewItem {
    let eligibility = match item.eligibility {
        Eligibility::Immediate => None,
        Eligibility::After(delay) => Some(pb::new_item::Eligibility::Delay(duration(delay))),
        Eligibility::At(time) => Some(pb::new_item::Eligibility::EligibleTime(timestamp(time))),
    };
    pb::NewItem {
        payload: item.payload,
        content_type: item.content_type,
        headers: item.headers.into_iter().collect(),
        priority: i32::from(item.priority.level()),
        eligibility,
        ttl: item.ttl.map(duration),
        ordering_key: item.ordering_key.map(String::from).unwrap_or_default(),
        dedup_id: item.dedup_id.map(String::from).unwrap_or_default(),
    }
}

/// Converts a schedule. `next` are its next ticks; `last_error` says why the tick that is due could not be pushed so far.
pub(super) fn schedule(
    schedule: Schedule,
    next: Vec<Timestamp>,
    last_error: String,
) -> pb::Schedule {
    pb::Schedule {
        name: schedule.name.to_string(),
        queue: schedule.queue.to_string(),
        cron: schedule.cron,
        time_zone: schedule.time_zone,
        item: Some(new_item(schedule.item)),
        paused: schedule.paused,
        create_time: Some(timestamp(schedule.create_time)),
        next_time: next.first().copied().map(timestamp),
        last_time: schedule.last_time.map(timestamp),
        next_times: next.into_iter().map(timestamp).collect(),
        last_error,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::{
        domain::{
            ConsumerName, DedupId, Depth, GroupName, ItemId, LeaseToken, OrderingKey, Priority,
            QueueName, Receipt, Totals,
        },
        grpc::parse,
    };

    fn queue_name() -> QueueName {
        QueueName::parse("queue", "orders").unwrap()
    }

    fn an_item(payload: usize) -> Item {
        let name = |text: &str| ConsumerName::parse("name", text).unwrap();
        Item {
            id: ItemId([1; 12]),
            queue: queue_name(),
            payload: Bytes::from(vec![0; payload]),
            content_type: "text/plain".into(),
            headers: [("k".to_owned(), "v".to_owned())].into(),
            priority: Priority::parse("priority", 7).unwrap(),
            state: ItemState::Reserved,
            attempt: 2,
            deliveries: 3,
            sequence: Some(4),
            ordering_key: OrderingKey::new("key"),
            dedup_id: DedupId::new("id"),
            create_time: Timestamp(1_001),
            eligible_time: Some(Timestamp(2_002)),
            expire_time: Some(Timestamp(3_003)),
            process_time: Some(Timestamp(-1)),
            producer: Some(name("p")),
            consumer: Some(name("c")),
            last_reason: "boom".into(),
            origin_queue: Some(queue_name()),
            due_time: Some(Timestamp(4_004)),
            dead_letter_time: Some(Timestamp(5_005)),
            dead_letter_attempts: 6,
        }
    }

    fn a_delivery(payload: usize) -> Delivery {
        Delivery {
            item: Box::new(an_item(payload)),
            receipt: Receipt {
                item: ItemId([1; 12]),
                token: LeaseToken([2; 12]),
                deliveries: 3,
                earlier_deliveries: 0,
                attempt: 2,
                queue: queue_name(),
                group: GroupName::default(),
                keyed: false,
            },
            lease_expire_time: Timestamp(2_002),
            previous_eligible_time: Timestamp(0),
            former_lease: None,
            tag: 0,
        }
    }

    fn at(seconds: i64, nanos: i32) -> prost_types::Timestamp {
        prost_types::Timestamp { seconds, nanos }
    }

    #[test]
    fn every_field_of_an_item_is_converted() {
        let expected = pb::Item {
            id: "01".repeat(12),
            queue: "orders".into(),
            payload: vec![0; 3].into(),
            content_type: "text/plain".into(),
            headers: [("k".to_owned(), "v".to_owned())].into(),
            priority: 7,
            state: pb::ItemState::Reserved.into(),
            attempt: 2,
            deliveries: 3,
            sequence: 4,
            ordering_key: "key".into(),
            dedup_id: "id".into(),
            create_time: Some(at(1, 1_000_000)),
            eligible_time: Some(at(2, 2_000_000)),
            expire_time: Some(at(3, 3_000_000)),
            process_time: Some(at(-1, 999_000_000)),
            producer: "p".into(),
            consumer: "c".into(),
            last_reason: "boom".into(),
            origin_queue: "orders".into(),
            due_time: Some(at(4, 4_000_000)),
            dead_letter_time: Some(at(5, 5_000_000)),
            dead_letter_attempts: 6,
        };
        assert_eq!(item(an_item(3)), expected);
    }

    fn keys() -> ReceiptKeys {
        ReceiptKeys::new([crate::domain::ReceiptKey::new(1, &[1; 32])])
    }

    #[test]
    fn a_delivery_has_a_receipt_unless_there_is_nothing_to_settle() {
        let reserved = delivery(a_delivery(1), false, &keys());
        let receipt = parse::receipts(&[reserved.receipt], &keys()).unwrap();
        assert_eq!(receipt, [a_delivery(1).receipt]);
        assert_eq!(reserved.lease_expire_time, Some(at(2, 2_000_000)));
        let committed = delivery(a_delivery(1), true, &keys());
        assert_eq!((committed.receipt.as_str(), committed.lease_expire_time), ("", None));
    }

    /// The size that is counted for an item is never less than the size that it takes.
    #[test]
    fn no_item_takes_more_than_is_counted_for_it() {
        let longest = || "x".repeat(128);
        let name = || QueueName::parse("queue", &longest()).unwrap();
        let consumer = || ConsumerName::parse("name", &longest()).unwrap();
        let mut large = a_delivery(3 << 20);
        let item = &mut large.item;
        item.queue = name();
        item.content_type = "x".repeat(255);
        item.headers = (0..64).map(|n| (format!("{n:03}"), "x".repeat(253))).collect();
        (item.attempt, item.deliveries, item.sequence) = (u32::MAX, u32::MAX, Some(i64::MAX));
        item.ordering_key = OrderingKey::new("x".repeat(255));
        item.dedup_id = DedupId::new("x".repeat(255));
        let time = Timestamp(253_402_300_799_999);
        item.create_time = time;
        (item.eligible_time, item.expire_time) = (Some(time), Some(time));
        item.process_time = Some(Timestamp(-1));
        (item.producer, item.consumer) = (Some(consumer()), Some(consumer()));
        item.last_reason = "x".repeat(1_024);
        item.origin_queue = Some(name());
        large.receipt.queue = name();
        large.receipt.group = GroupName::parse("group", &longest()).unwrap();
        let counted = large.item.message_bytes();
        let mut sent = delivery(large, false, &keys());
        let item = sent.item.as_mut().unwrap();
        // Fields that are not filled from every store.
        (item.due_time, item.dead_letter_time) =
            (Some(at(-1, 999_999_999)), Some(at(-1, 999_999_999)));
        item.dead_letter_attempts = i32::MAX;
        let message = pb::ReserveResponse { deliveries: vec![sent] };
        let sent = prost::Message::encoded_len(&message);
        assert!(sent <= counted && counted < sent + 1_000, "{sent} of {counted}");
        assert!(counted < 4 << 20, "the largest item fits a message by default");
        let message =
            pb::ReserveResponse { deliveries: vec![delivery(a_delivery(0), false, &keys())] };
        assert!(prost::Message::encoded_len(&message) <= an_item(0).message_bytes());
    }

    #[test]
    fn results_name_their_receipts() {
        let receipts = || vec!["a".to_owned(), "b".to_owned()];
        let results = settled(receipts(), vec![Outcome::Ok, Outcome::Gone]);
        assert_eq!((results[0].receipt.as_str(), results[0].outcome()), ("a", pb::Outcome::Ok));
        assert_eq!((results[1].receipt.as_str(), results[1].outcome()), ("b", pb::Outcome::Gone));
        let until = Some(Timestamp(1_500));
        let outcomes = vec![(Outcome::Ok, until), (Outcome::LeaseLost, None)];
        let results = extended(receipts(), outcomes).results;
        assert_eq!(results[0].lease_expire_time, Some(at(1, 500_000_000)));
        assert_eq!(results[1].outcome(), pb::Outcome::LeaseLost);
    }

    #[test]
    fn the_oldest_items_age_is_counted_from_now() {
        let depth = Depth { oldest_ready: Some(Timestamp(1_000)), ready: 1, ..Default::default() };
        let totals = Totals { pushed: u64::MAX, ..Default::default() };
        let of_queue = QueueStats {
            queue: queue_name(),
            depth,
            totals,
            consumers: 2,
            consumers_of_all_brokers: 5,
        };
        let told = stats(&of_queue, Timestamp(3_500));
        let age = prost_types::Duration { seconds: 2, nanos: 500_000_000 };
        assert_eq!(told.oldest_ready_age, Some(age));
        assert_eq!((told.ready, told.pushed), (1, i64::MAX));
        assert_eq!((told.consumers, told.consumers_of_all_brokers), (2, 5));
    }
}
