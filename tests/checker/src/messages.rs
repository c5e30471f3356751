//! Messages of the API as parts of a history, and the other way round.

use std::time::Duration;

use sluicegate_proto::v1 as pb;

use crate::history::{
    Consume, Delivery, Figures, Listed, NewItem, OnDisconnect, Outcome, PushEntry, Pushed, Request,
    Response, RollbackItem, Settings, Span, State,
};

/// Returns a length of time as a message.
pub fn duration(span: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: span.as_secs() as i64,
        nanos: span.subsec_nanos().cast_signed(),
    }
}

/// Returns a length of time of a history.
pub fn micros(span: Duration) -> Span {
    span.as_micros() as Span
}

/// Returns an outcome.
pub fn outcome(number: i32) -> Outcome {
    match pb::Outcome::try_from(number) {
        Ok(pb::Outcome::Ok) => Outcome::Ok,
        Ok(pb::Outcome::DeadLettered) => Outcome::DeadLettered,
        Ok(pb::Outcome::LeaseLost) => Outcome::LeaseLost,
        _ => Outcome::Gone,
    }
}

/// Returns the answers to pushed items.
pub fn pushed(results: Vec<pb::PushResult>) -> Vec<Pushed> {
    let one = |result: pb::PushResult| Pushed {
        id: result.id,
        deduplicated: result.deduplicated,
        sequence: result.sequence.cast_unsigned(),
    };
    results.into_iter().map(one).collect()
}

/// The payload of what schedules push. The name of such an item is its deduplication id, which names schedule and tick.
pub const TICK: &str = "tick";

/// Returns the name of an item: its payload, or its deduplication id if a schedule has pushed it.
pub fn name(payload: &[u8], dedup_id: &str) -> String {
    if payload == TICK.as_bytes() {
        return dedup_id.to_owned();
    }
    String::from_utf8_lossy(payload).trim_end().to_owned()
}

/// Returns the message for an item whose name is its payload.
pub fn new_item(item: &NewItem) -> pb::NewItem {
    let delay = Duration::from_micros(item.delay);
    let delay = (!delay.is_zero()).then(|| pb::new_item::Eligibility::Delay(duration(delay)));
    pb::NewItem {
        payload: format!("{:<1$}", item.name, item.bytes).into(),
        priority: i32::from(item.priority),
        eligibility: delay,
        ttl: item.ttl.map(|ttl| duration(Duration::from_micros(ttl))),
        ordering_key: item.ordering_key.clone(),
        dedup_id: item.dedup_id.clone(),
        ..pb::NewItem::default()
    }
}

/// Returns the message for an item of a `CommitAndPush`.
pub fn push_entry(entry: &PushEntry) -> pb::PushEntry {
    pb::PushEntry { queue: entry.queue.clone(), item: Some(new_item(&entry.item)) }
}

/// Returns the message for the settings of a queue. Failed items are soon tried again.
pub fn queue(name: &str, settings: &Settings, lease: Duration) -> pb::Queue {
    pb::Queue {
        name: name.to_owned(),
        lease: Some(duration(lease)),
        max_attempts: Some(settings.max_attempts.cast_signed()),
        max_deliveries: Some(settings.max_deliveries.cast_signed()),
        dead_letter_queue: settings.dead_letter_queue.clone(),
        discard_failed: settings.discard_failed,
        retention: settings.retention.then(|| duration(Duration::from_hours(1))),
        dedup_window: Some(duration(Duration::from_micros(settings.dedup_window))),
        sequenced: settings.sequenced,
        retry_policy: Some(pb::RetryPolicy {
            initial_delay: Some(duration(Duration::from_millis(200))),
            multiplier: 2.0,
            max_delay: Some(duration(Duration::from_secs(2))),
            jitter: 0.5,
        }),
        ..pb::Queue::default()
    }
}

/// Returns how a stream consumes.
pub fn consume(consume: &Consume) -> pb::ConsumeRequest {
    let on_disconnect = match consume.on_disconnect {
        OnDisconnect::Count => pb::OnDisconnect::Count,
        OnDisconnect::KeepLease => pb::OnDisconnect::KeepLease,
        OnDisconnect::Release => pb::OnDisconnect::Release,
    };
    pb::ConsumeRequest {
        queue: consume.queue.clone(),
        max_in_flight: consume.max_in_flight.cast_signed(),
        max_in_flight_bytes: consume.max_in_flight_bytes.cast_signed(),
        lease: Some(duration(Duration::from_micros(consume.lease))),
        auto_commit: consume.auto_commit,
        renew: consume.renew,
        on_disconnect: on_disconnect.into(),
        ..pb::ConsumeRequest::default()
    }
}

/// Returns a reserve for the history, and its message.
pub fn reserve(
    queue: &str,
    max_items: u32,
    wait: Duration,
    lease: Duration,
) -> (Request, pb::ReserveRequest) {
    let request = Request::Reserve {
        queue: queue.to_owned(),
        max_items,
        wait: micros(wait),
        lease: micros(lease),
    };
    let message = pb::ReserveRequest {
        queue: queue.to_owned(),
        max_items: max_items.cast_signed(),
        wait: Some(duration(wait)),
        lease: Some(duration(lease)),
        consumer: String::new(),
    };
    (request, message)
}

/// Returns a pop for the history, and its message.
pub fn pop(queue: &str, max_items: u32, wait: Duration) -> (Request, pb::PopRequest) {
    let request = Request::Pop { queue: queue.to_owned(), max_items, wait: micros(wait) };
    let message = pb::PopRequest {
        queue: queue.to_owned(),
        max_items: max_items.cast_signed(),
        wait: Some(duration(wait)),
    };
    (request, message)
}

/// Returns the message for an item that is rolled back, without a reason.
pub fn rollback_item(item: RollbackItem) -> pb::RollbackItem {
    pb::RollbackItem {
        receipt: item.receipt,
        delay: item.delay.map(|delay| duration(Duration::from_micros(delay))),
        reason: String::new(),
        keep_attempt: item.keep_attempt,
        dead_letter: item.dead_letter,
    }
}

/// Returns an item of a list.
pub fn listed(item: pb::Item) -> Listed {
    Listed {
        state: match item.state() {
            pb::ItemState::Delayed => State::Delayed,
            pb::ItemState::Reserved => State::Reserved,
            pb::ItemState::Blocked => State::Blocked,
            pb::ItemState::Processed => State::Processed,
            pb::ItemState::Ready | pb::ItemState::Unspecified => State::Ready,
        },
        id: item.id,
        name: name(&item.payload, &item.dedup_id),
    }
}

/// Returns the answer to settles.
pub fn settled(results: &[pb::SettleResult]) -> Response {
    Response::Settled(results.iter().map(|result| outcome(result.outcome)).collect())
}

/// Returns the delivery of an item that is committed already.
pub fn popped(item: pb::Item) -> Delivery {
    Delivery {
        receipt: String::new(),
        id: item.id,
        name: name(&item.payload, &item.dedup_id),
        bytes: item.payload.len(),
        queue: item.queue,
        attempt: item.attempt.cast_unsigned(),
        deliveries: item.deliveries.cast_unsigned(),
        sequence: item.sequence.cast_unsigned(),
        lease_end: 0,
        sent: None,
        origin_queue: item.origin_queue,
        dead_letter_attempts: item.dead_letter_attempts.cast_unsigned(),
        tick: None,
    }
}

/// Returns the figures of a queue.
pub fn figures(stats: &pb::QueueStats) -> Figures {
    let count = i64::cast_unsigned;
    Figures {
        ready: count(stats.ready),
        delayed: count(stats.delayed),
        reserved: count(stats.reserved),
        blocked: count(stats.blocked),
        processed: count(stats.processed),
        pushed: count(stats.pushed),
        delivered: count(stats.delivered),
        committed: count(stats.committed),
        rolled_back: count(stats.rolled_back),
        moved: count(stats.moved),
        dead_lettered: count(stats.dead_lettered),
        expired: count(stats.expired),
        popped: count(stats.popped),
        discarded: count(stats.discarded),
    }
}
