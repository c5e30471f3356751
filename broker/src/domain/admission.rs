//! The decisions made about an item when it enters its queue, and when it is found at the queue's
//! head.

use std::time::Duration;

use super::{
    Cause, ConsumerName, FailureOutcome, Item, ItemId, ItemState, LimitReason, NewItem, Queue,
    Timestamp,
};

/// From when on a pushed item is eligible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eligibility {
    /// From its push.
    #[default]
    Immediate,
    /// This long after its push.
    After(Duration),
    /// From this time, but never before its push.
    At(Timestamp),
}

impl NewItem {
    /// Returns when an item pushed now is eligible, which is never before `now`.
    pub fn eligible_from(&self, now: Timestamp) -> Timestamp {
        match self.eligibility {
            Eligibility::Immediate => now,
            Eligibility::After(delay) => now + delay,
            Eligibility::At(time) => time.max(now),
        }
    }

    /// Returns when an item pushed to the queue now expires.
    pub fn expires(&self, queue: &Queue, now: Timestamp) -> Option<Timestamp> {
        self.ttl.or(queue.default_ttl).map(|ttl| now + ttl)
    }

    /// Returns true if nothing tells the item apart from others that are pushed with it into the same queue and with the
    /// same priority: a store may keep them as one until one of them gets a fate of its own.
    pub fn may_share(&self, queue: &Queue) -> bool {
        self.may_start_reserved(queue)
            && queue.retention.is_zero()
            && self.ttl.or(queue.default_ttl).is_none()
    }

    /// Returns true if the item is ready as soon as it is pushed, whatever else is in the queue, so that a store may
    /// take it in as reserved already.
    pub fn may_start_reserved(&self, queue: &Queue) -> bool {
        !queue.sequenced
            && self.ordering_key.is_none()
            && self.eligibility == Eligibility::Immediate
    }

    /// Returns the item as it is in the queue after its push: ready, and never handed out.
    pub fn into_item(
        self,
        queue: &Queue,
        id: ItemId,
        sequence: Option<i64>,
        producer: Option<ConsumerName>,
        now: Timestamp,
    ) -> Item {
        Item {
            id,
            queue: queue.name.clone(),
            expire_time: self.expires(queue, now),
            payload: self.payload,
            content_type: self.content_type,
            headers: self.headers,
            priority: self.priority,
            state: ItemState::Ready,
            attempt: 1,
            deliveries: 0,
            sequence,
            ordering_key: self.ordering_key,
            dedup_id: self.dedup_id,
            create_time: now,
            eligible_time: None,
            process_time: None,
            producer,
            consumer: None,
            last_reason: String::new(),
            origin_queue: None,
            due_time: None,
            dead_letter_time: None,
            dead_letter_attempts: 0,
        }
    }

    /// Returns until when a second item with the same deduplication id is a duplicate. Returns
    /// `None` if this item has no id. `window` is the window given in the push, if
    /// any.
    pub fn remembered_until(
        &self,
        queue: &Queue,
        window: Option<Duration>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        self.dedup_id.as_ref().map(|_| now + window.unwrap_or(queue.dedup_window))
    }
}

/// The properties of an item at the head of its queue that decide what happens to it.
#[derive(Debug, Clone, Copy)]
pub struct AtHead {
    /// When it expires.
    pub expire_time: Option<Timestamp>,
    /// True if the item was reserved and its lease has lapsed.
    pub lapsed: bool,
    /// The number of its attempt. For a lapsed lease, the number of the attempt that lapsed.
    pub attempt: u32,
    /// How often it was handed out.
    pub deliveries: u32,
    /// Number of these deliveries before the item came into this queue.
    pub earlier_deliveries: u32,
}

/// What happens to an item that was found at the head of its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Triage {
    /// It can be handed out.
    Live {
        /// The number that this attempt would have.
        attempt: u32,
    },
    /// Its last allowed attempt lapsed; [`Queue::at_limit`] says where it goes.
    AtLimit {
        /// The limit that was reached.
        reason: LimitReason,
        /// The number of its failed attempts.
        failed_attempts: u32,
    },
    /// It has expired, and is removed.
    Expired,
}

impl Queue {
    /// Decides what happens to an item at the queue's head. A lapsed lease counts as a failed
    /// attempt.
    pub fn triage(&self, item: AtHead, now: Timestamp) -> Triage {
        if item.expire_time.is_some_and(|end| end <= now) {
            return Triage::Expired;
        }
        if !item.lapsed {
            return Triage::Live { attempt: item.attempt };
        }
        let deliveries = item.deliveries.saturating_sub(item.earlier_deliveries);
        match self.failure_outcome(Cause::Lapse, item.attempt, deliveries, 0.0) {
            FailureOutcome::Retry { attempt, .. } => Triage::Live { attempt },
            FailureOutcome::Limit { reason, failed_attempts } => {
                Triage::AtLimit { reason, failed_attempts }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{DedupId, Limit, OrderingKey, QueueName};

    const NOW: Timestamp = Timestamp(1_000_000);

    fn queue() -> Queue {
        Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), Timestamp(0))
    }

    #[test]
    fn an_item_is_never_eligible_before_its_push() {
        let item = NewItem::default();
        assert_eq!(item.eligible_from(NOW), NOW);
        let from = |eligibility| NewItem { eligibility, ..item.clone() }.eligible_from(NOW);
        assert_eq!(from(Eligibility::After(Duration::from_secs(1))), Timestamp(1_001_000));
        assert_eq!(from(Eligibility::At(Timestamp(5))), NOW);
        assert_eq!(from(Eligibility::At(Timestamp(1_000_500))), Timestamp(1_000_500));
    }

    #[test]
    fn an_items_own_times_override_those_of_the_queue() {
        let queue = Queue { default_ttl: Some(Duration::from_secs(2)), ..queue() };
        let item = NewItem { dedup_id: DedupId::new("d"), ..NewItem::default() };
        assert_eq!(item.expires(&queue, NOW), Some(Timestamp(1_002_000)));
        let own = NewItem { ttl: Some(Duration::from_secs(1)), ..item.clone() };
        assert_eq!(own.expires(&queue, NOW), Some(Timestamp(1_001_000)));
        assert_eq!(item.remembered_until(&queue, None, NOW), Some(NOW + queue.dedup_window));
        let none = Some(Duration::ZERO);
        assert_eq!(item.remembered_until(&queue, none, NOW), Some(NOW));
        assert_eq!(NewItem::default().remembered_until(&queue, None, NOW), None);
    }

    #[test]
    fn an_item_with_a_fate_of_its_own_is_kept_apart() {
        let (queue, item, second) = (queue(), NewItem::default(), Duration::from_secs(1));
        assert!(item.may_start_reserved(&queue) && item.may_share(&queue));
        let delayed = NewItem { eligibility: Eligibility::After(second), ..item.clone() };
        let ordered = NewItem { ordering_key: OrderingKey::new("k"), ..item.clone() };
        let sequenced = Queue { sequenced: true, ..queue.clone() };
        for (item, queue) in [(&delayed, &queue), (&ordered, &queue), (&item, &sequenced)] {
            assert!(
                !item.may_start_reserved(queue) && !item.may_share(queue),
                "{item:?} {queue:?}"
            );
        }
        let mortal = NewItem { ttl: Some(second), ..item.clone() };
        let expiring = Queue { default_ttl: Some(second), ..queue.clone() };
        let keeping = Queue { retention: second, ..queue.clone() };
        for (item, queue) in [(&mortal, &queue), (&item, &expiring), (&item, &keeping)] {
            assert!(item.may_start_reserved(queue) && !item.may_share(queue), "{item:?} {queue:?}");
        }
    }

    #[test]
    fn an_item_at_the_head_is_live_at_a_limit_or_expired() {
        let queue = Queue {
            max_attempts: Some(Limit::of(3)),
            max_deliveries: Some(Limit::of(5)),
            ..queue()
        };
        let item = AtHead {
            expire_time: None,
            lapsed: false,
            attempt: 3,
            deliveries: 9,
            earlier_deliveries: 5,
        };
        let triage = |item| queue.triage(item, NOW);
        assert_eq!(triage(item), Triage::Live { attempt: 3 }, "nothing lapsed");
        let lapsed = AtHead { lapsed: true, ..item };
        let at_limit = |reason, failed_attempts| Triage::AtLimit { reason, failed_attempts };
        assert_eq!(triage(lapsed), at_limit(LimitReason::MaxAttempts, 3));
        let second = AtHead { attempt: 2, ..lapsed };
        assert_eq!(triage(second), Triage::Live { attempt: 3 });
        let often = AtHead { earlier_deliveries: 4, ..second };
        assert_eq!(triage(often), at_limit(LimitReason::MaxDeliveries, 2));
        assert_eq!(triage(AtHead { expire_time: Some(NOW), ..lapsed }), Triage::Expired);
    }
}
