//! Which items an operator asks for.

use bytes::Bytes;
use memchr::memmem;

use super::{DedupId, Headers, Item, OrderingKey, QueueName, Timestamp};

/// Conditions on items, all of which must hold. The default matches every item.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ItemFilter {
    /// Only items with this key.
    pub ordering_key: Option<OrderingKey>,
    /// Only items with this deduplication id.
    pub dedup_id: Option<DedupId>,
    /// Only items with these headers.
    pub headers: Headers,
    /// Only items whose `last_reason` contains this text. Empty: all.
    pub reason_contains: String,
    /// Only items dead-lettered from this queue.
    pub origin_queue: Option<QueueName>,
    /// Only items created at or after this time.
    pub created_from: Option<Timestamp>,
    /// Only items created before this time.
    pub created_before: Option<Timestamp>,
    /// Only items with at least so many attempts, those before they were dead-lettered included.
    pub min_attempts: u32,
    /// Only items whose payload contains these bytes. Empty: all.
    pub payload_contains: Bytes,
}

impl ItemFilter {
    /// Returns true if every item matches.
    pub fn matches_all(&self) -> bool {
        *self == Self::default()
    }

    /// Returns true if all conditions hold for the item.
    pub fn matches(&self, item: &Item) -> bool {
        let is_in = |(key, value): (&String, &String)| item.headers.get(key) == Some(value);
        self.ordering_key.as_ref().is_none_or(|key| item.ordering_key.as_ref() == Some(key))
            && self.dedup_id.as_ref().is_none_or(|id| item.dedup_id.as_ref() == Some(id))
            && self
                .origin_queue
                .as_ref()
                .is_none_or(|from| item.origin_queue.as_ref() == Some(from))
            && self.created_from.is_none_or(|from| item.create_time >= from)
            && self.created_before.is_none_or(|before| item.create_time < before)
            && item.attempt.max(item.dead_letter_attempts) >= self.min_attempts
            && self.headers.iter().all(is_in)
            && item.last_reason.contains(&self.reason_contains)
            && memmem::find(&item.payload, &self.payload_contains).is_some()
    }
}
