//! Items: as pushed by a producer, as kept by the broker, and as delivered to a consumer.

use std::{collections::BTreeMap, fmt, time::Duration};

use bytes::Bytes;

use super::{
    ConsumerName, DedupId, Eligibility, Invalid, ItemId, ItemSize, LeaseToken, OrderingKey,
    QueueName, Receipt, Timestamp,
    limits::{MAX_HEADER_BYTES, MAX_HEADERS, MAX_REASON_BYTES, PRIORITIES},
};

/// Free-form metadata.
pub type Headers = BTreeMap<String, String>;

/// Checks the headers of an item against the limits; `field` is the caller's name for them.
pub fn check_header_limits<'a, H>(field: &str, headers: H) -> Result<(), Invalid>
where
    H: IntoIterator<Item = (&'a String, &'a String)>,
{
    let sizes = headers.into_iter().map(|(key, value)| key.len() + value.len());
    let (count, bytes) = sizes.fold((0, 0), |(count, bytes), size| (count + 1, bytes + size));
    if count > MAX_HEADERS {
        return Err(Invalid::new(field, format!("{count} entries are more than {MAX_HEADERS}")));
    }
    if bytes > MAX_HEADER_BYTES {
        let why = format!("{bytes} bytes in all are more than {MAX_HEADER_BYTES}");
        return Err(Invalid::new(field, why));
    }
    Ok(())
}

/// A priority from 0 to 9. Items of priority 9 are handed out first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Priority(u8);

impl Priority {
    /// Number of priorities.
    pub const LEVELS: u8 = PRIORITIES;

    /// Checks a priority; `field` is the caller's name for it.
    pub fn parse(field: &str, value: i32) -> Result<Self, Invalid> {
        match u8::try_from(value) {
            Ok(level) if level < Self::LEVELS => Ok(Self(level)),
            _ => Err(Invalid::new(field, format!("{value} is not within 0 to 9"))),
        }
    }

    /// Returns the priority as a number, 0 to 9.
    pub const fn level(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A pushed item, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewItem {
    /// The content of the item.
    pub payload: Bytes,
    /// Media type of the payload; may be empty.
    pub content_type: String,
    /// Metadata for the consumer.
    pub headers: Headers,
    /// The priority at which it is handed out.
    pub priority: Priority,
    /// From when on it is eligible.
    pub eligibility: Eligibility,
    /// Time to live; `None`: the queue's default.
    pub ttl: Option<Duration>,
    /// Items with the same key are delivered one at a time, in order.
    pub ordering_key: Option<OrderingKey>,
    /// The id by which a repeated push is recognised.
    pub dedup_id: Option<DedupId>,
}

impl NewItem {
    /// Returns the size of the item.
    pub fn size(&self) -> ItemSize {
        let key = OrderingKey::text_of(self.ordering_key.as_ref());
        let dedup_id = DedupId::text_of(self.dedup_id.as_ref());
        let texts = self.content_type.len() + key.len() + dedup_id.len();
        let payload = self.payload.len();
        ItemSize { payload, message: message_bytes(payload, texts, &self.headers) }
    }
}

/// The result of pushing one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// The item's id, or the id of the first item if this one is a duplicate.
    pub id: ItemId,
    /// True if an item with the same deduplication id existed and nothing was stored.
    pub deduplicated: bool,
    /// Its sequence number, if it has one.
    pub sequence: Option<i64>,
    /// When the item becomes eligible; `None` if it is blocked or a duplicate.
    pub eligible_time: Option<Timestamp>,
}

/// The state of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ItemState {
    /// Eligible now.
    Ready,
    /// Eligible later.
    Delayed,
    /// Leased.
    Reserved,
    /// An earlier item with the same ordering key is unsettled.
    Blocked,
    /// Kept as history.
    Processed,
}

impl fmt::Display for ItemState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "ready",
            Self::Delayed => "delayed",
            Self::Reserved => "reserved",
            Self::Blocked => "blocked",
            Self::Processed => "processed",
        })
    }
}

/// An item as kept by the broker.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Its id.
    pub id: ItemId,
    /// The queue it is in.
    pub queue: QueueName,
    /// The content of the item.
    pub payload: Bytes,
    /// Media type of the payload; may be empty.
    pub content_type: String,
    /// Metadata.
    pub headers: Headers,
    /// The priority at which it is handed out.
    pub priority: Priority,
    /// Its state when it was read.
    pub state: ItemState,
    /// Failed attempts plus one.
    pub attempt: u32,
    /// How often it has been handed out.
    pub deliveries: u32,
    /// Its number in its queue, if it has one.
    pub sequence: Option<i64>,
    /// Its ordering key.
    pub ordering_key: Option<OrderingKey>,
    /// Its deduplication id.
    pub dedup_id: Option<DedupId>,
    /// When it was first pushed.
    pub create_time: Timestamp,
    /// When it may next be handed out; for a reserved item, the end of its lease; `None` if blocked
    /// or processed.
    pub eligible_time: Option<Timestamp>,
    /// It is never delivered after this time.
    pub expire_time: Option<Timestamp>,
    /// When it was committed, if processed.
    pub process_time: Option<Timestamp>,
    /// Name of the producer.
    pub producer: Option<ConsumerName>,
    /// Name of its last consumer.
    pub consumer: Option<ConsumerName>,
    /// The reason why its last attempt failed; may be empty.
    pub last_reason: String,
    /// The queue it was dead-lettered from.
    pub origin_queue: Option<QueueName>,
    /// When it became eligible for its current or next delivery; `None` if blocked or processed.
    pub due_time: Option<Timestamp>,
    /// When it was dead-lettered.
    pub dead_letter_time: Option<Timestamp>,
    /// Number of failed attempts when it was dead-lettered.
    pub dead_letter_attempts: u32,
}

impl Item {
    /// Returns true if the item has reached its `expire_time`.
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expire_time.is_some_and(|end| end <= now)
    }

    /// Returns the most bytes that the item takes in a message, including its receipt and headers.
    pub fn message_bytes(&self) -> usize {
        let key = OrderingKey::text_of(self.ordering_key.as_ref());
        let dedup_id = DedupId::text_of(self.dedup_id.as_ref());
        let texts = [&self.content_type, key, dedup_id, &self.last_reason];
        let texts = texts.iter().map(|text| text.len()).sum();
        message_bytes(self.payload.len(), texts, &self.headers)
    }
}

/// Returns the most bytes that an item takes in a message. `texts` is the total length of content
/// type, ordering key, deduplication id and reason.
pub fn message_bytes(payload: usize, texts: usize, headers: &Headers) -> usize {
    /// Names, ids, numbers, times, the receipt, and the encoding of the fields, each at its
    /// longest.
    const ENVELOPE: usize = 1_440;
    /// The encoding of one header.
    const HEADER: usize = 12;
    let headers: usize = headers.iter().map(|(key, value)| key.len() + value.len() + HEADER).sum();
    payload + texts + headers + ENVELOPE
}

/// An item that a consumer holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    /// The item, reserved. Apart, because a delivery passes through many hands.
    pub item: Box<Item>,
    /// Identifies the reservation.
    pub receipt: Receipt,
    /// End of the lease.
    pub lease_expire_time: Timestamp,
    /// The item's place before it was reserved. An item that was never sent returns to this place.
    pub previous_eligible_time: Timestamp,
    /// The lease under which the item was held before, and which had lapsed. An item that was never
    /// sent returns to it.
    pub former_lease: Option<LeaseToken>,
    /// Its place among the items sent on its stream, from 1; 0 before it is sent, and elsewhere.
    pub tag: u64,
}

/// The result of using a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The request was carried out.
    Ok,
    /// The item was at a limit or was rejected. It is in the dead-letter queue, or was discarded if
    /// its queue is set to discard.
    DeadLettered,
    /// The item exists, but under another lease or none. Nothing was changed.
    LeaseLost,
    /// The item no longer exists, or is processed. Nothing was changed.
    Gone,
}

/// Cuts a reason to [`MAX_REASON_BYTES`], at a character boundary.
pub fn cut_reason(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
    reason
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{IdSource, Queue};

    fn item(new: NewItem) -> Item {
        let queue = Queue::with_defaults(QueueName::parse("queue", "q").unwrap(), Timestamp(0));
        new.into_item(&queue, IdSource::new().next(Timestamp(5)), None, None, Timestamp(5))
    }

    #[test]
    fn headers_have_64_entries_and_16_kib_in_all_at_most() {
        let check = |headers: &Headers| check_header_limits("headers", headers);
        let entries = |count: usize| (0..count).map(|n| (n.to_string(), String::new())).collect();
        assert_eq!(check(&entries(64)), Ok(()));
        assert_eq!(check(&entries(65)).unwrap_err().field, "headers");
        let bytes = |sizes: &[(usize, usize)]| -> Headers {
            let letters = ["a", "b", "c"].iter().zip(sizes);
            letters.map(|(a, (key, value))| (a.repeat(*key), a.repeat(*value))).collect()
        };
        for sizes in [&[(384, 16_000)][..], &[(16_000, 384)], &[(1, 8_000), (100, 1), (82, 8_200)]]
        {
            assert_eq!(check(&bytes(sizes)), Ok(()), "{sizes:?}");
            let mut more = sizes.to_vec();
            more[0].1 += 1;
            assert_eq!(check(&bytes(&more)).unwrap_err().field, "headers", "{more:?}");
        }
    }

    #[test]
    fn priorities_are_0_to_9() {
        for level in 0..=9_u8 {
            let priority = Priority::parse("priority", i32::from(level)).unwrap();
            assert_eq!((priority.level(), priority.to_string()), (level, level.to_string()));
        }
        for wrong in [-1, 10, 11, 256, 265, i32::MIN, i32::MAX] {
            assert_eq!(Priority::parse("priority", wrong).unwrap_err().field, "priority");
        }
    }

    /// What is limited by bytes counts every byte of an item, before its push as after it.
    #[test]
    fn every_byte_of_an_item_counts() {
        let new = NewItem {
            payload: "payload".into(),
            content_type: "text".to_owned(),
            headers: [("key".to_owned(), "some value".to_owned())].into(),
            ordering_key: OrderingKey::new("k"),
            dedup_id: DedupId::new("no"),
            ..NewItem::default()
        };
        let empty = NewItem::default().size();
        let size = new.size();
        assert_eq!((empty.payload, size.payload), (0, 7));
        assert!(empty.message > 1_024, "a receipt and names take {empty:?}");
        let one_header = message_bytes(0, 0, &[(String::new(), String::new())].into());
        assert!(one_header > empty.message);
        assert_eq!(size.message, one_header + 7 + 4 + 3 + 10 + 1 + 2);
        let item = item(new);
        assert_eq!(item.message_bytes(), size.message);
        let failed = Item { last_reason: "timed out".to_owned(), ..item };
        assert_eq!(failed.message_bytes(), size.message + 9);
    }

    #[test]
    fn an_item_has_expired_from_its_expire_time_on() {
        let item = Item { expire_time: Some(Timestamp(10)), ..item(NewItem::default()) };
        assert_eq!([9, 10, 11].map(|now| item.has_expired(Timestamp(now))), [false, true, true]);
        let lasting = Item { expire_time: None, ..item };
        assert!(!lasting.has_expired(Timestamp(i64::MAX)));
    }

    #[test]
    fn of_a_reason_1024_bytes_are_kept_in_whole_characters() {
        let longest = "x".repeat(1_024);
        assert_eq!(cut_reason(longest.clone()), longest);
        assert_eq!(cut_reason(format!("{longest}y")), longest);
        assert_eq!(cut_reason(format!("{}\u{e4}", &longest[1..])), longest[1..]);
    }

    #[test]
    fn states_are_named_as_documented() {
        let states = [
            (ItemState::Ready, "ready"),
            (ItemState::Delayed, "delayed"),
            (ItemState::Reserved, "reserved"),
            (ItemState::Blocked, "blocked"),
            (ItemState::Processed, "processed"),
        ];
        for (state, name) in states {
            assert_eq!(state.to_string(), name);
        }
    }
}
