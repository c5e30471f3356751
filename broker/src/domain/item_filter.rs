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
    /// Only items whose `last_reason` is this.
    pub reason: Option<String>,
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
            && self.reason.as_ref().is_none_or(|reason| item.last_reason == *reason)
            && memmem::find(&item.payload, &self.payload_contains).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{IdSource, NewItem, Queue};

    fn item() -> Item {
        let queue = Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), Timestamp(0));
        let new = NewItem {
            payload: "some payload".into(),
            headers: [("a", "1"), ("b", "2")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            ordering_key: OrderingKey::new("key"),
            dedup_id: DedupId::new("id"),
            ..NewItem::default()
        };
        let id = IdSource::new().next(Timestamp(5));
        Item {
            last_reason: "timed out".to_owned(),
            origin_queue: Some(QueueName::parse("queue", "origin").unwrap()),
            attempt: 2,
            dead_letter_attempts: 4,
            ..new.into_item(&queue, id, None, None, Timestamp(5))
        }
    }

    /// Each condition by itself: one that holds, and the nearest one that does not.
    #[test]
    fn an_item_matches_if_every_condition_holds() {
        let (item, all) = (item(), ItemFilter::default());
        assert!(all.matches_all() && all.matches(&item));
        let header = |key: &str, value: &str| ItemFilter {
            headers: [(key.to_owned(), value.to_owned())].into(),
            ..ItemFilter::default()
        };
        let key = |key| ItemFilter { ordering_key: OrderingKey::new(key), ..all.clone() };
        let id = |id| ItemFilter { dedup_id: DedupId::new(id), ..all.clone() };
        let reason = |text: &str| ItemFilter { reason_contains: text.to_owned(), ..all.clone() };
        let exactly = |text: &str| ItemFilter { reason: Some(text.to_owned()), ..all.clone() };
        let from = |queue| ItemFilter {
            origin_queue: Some(QueueName::parse("queue", queue).unwrap()),
            ..all.clone()
        };
        let since = |at| ItemFilter { created_from: Some(Timestamp(at)), ..all.clone() };
        let before = |at| ItemFilter { created_before: Some(Timestamp(at)), ..all.clone() };
        let attempts = |min_attempts| ItemFilter { min_attempts, ..all.clone() };
        let payload = |text: &'static str| ItemFilter {
            payload_contains: Bytes::from_static(text.as_bytes()),
            ..all.clone()
        };
        let pairs = [
            (header("b", "2"), header("b", "1")),
            (key("key"), key("other")),
            (id("id"), id("other")),
            (reason("timed"), reason("Timed")),
            (exactly("timed out"), exactly("timed")),
            (from("origin"), from("q")),
            (since(5), since(6)),
            (before(6), before(5)),
            (attempts(4), attempts(5)),
            (payload("load"), payload("loud")),
        ];
        for (holds, fails) in pairs {
            assert!(!holds.matches_all() && holds.matches(&item), "{holds:?}");
            assert!(!fails.matches(&item), "{fails:?}");
        }
    }
}
