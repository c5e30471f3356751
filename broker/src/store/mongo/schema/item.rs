//! Converts items to documents and back. The fields:
//!
//! | field | meaning |
//! |---|---|
//! | `_id`, `q` | id, queue |
//! | `when` | eligible time; while reserved, the end of the lease plus four thousand years; later dates stand for states |
//! | `eligible` | since when a reserved item was eligible, written whenever `when` gets such a time; absent: `created` |
//! | `priority`, `attempt`, `deliveries` | as in [`Item`] |
//! | `earlier` | number of deliveries before the item came into its queue; absent: none |
//! | `lock` | token of the lease; present while reserved, and after a lapse until the item is reserved again |
//! | `settled` | token of the last settle, by which the outcome of a batch is resolved |
//! | `settledBefore` | tokens of the settles before that, the latest first, for settles whose answers were lost |
//! | `producer`, `consumer`, `contentType`, `headers`, `payload`, `reason`, `origin` | as in [`Item`] |
//! | `deadLettered`, `failedAttempts` | when the item was dead-lettered, and how many attempts had failed by then |
//! | `key`, `seq` | ordering key, sequence number |
//! | `turn` | the ordering key again, on the one item of the key that is not blocked |
//! | `due` | eligible time of a blocked item; present only while it is blocked |
//! | `dedup` | `{q, id}`: the queue pushed to and the deduplication id, unique |
//! | `window` | end of the deduplication window |
//! | `created`, `started`, `processed` | dates |
//! | `deadline` | the item's expire time, or the end of its history |
//! | `expires` | when MongoDB may delete the document, at or after `deadline` |
//! | `trace` | until when a settle of this item must leave a tombstone (see `settle`) |
//!
//! Several items may share a document: see [`crate::store::mongo::segment`].

use std::sync::Arc;

use bytes::Bytes;
use mongodb::bson::{
    Binary, Bson, Document, RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf, doc,
    oid::ObjectId,
    raw::{CString, cstr},
    spec::BinarySubtype,
};

use crate::{
    domain::{
        AtHead, ConsumerName, DedupId, Headers, Item, ItemId, ItemSize, ItemState, LeaseToken,
        NewItem, OrderingKey, Priority, QueueName, Timestamp, message_bytes,
    },
    store::{
        Push, Result,
        mongo::{
            schema::layout::{BLOCKED, LEASED, PROCESSED, date, leased, millis},
            segment::seen::Seen,
            server::error::broken,
        },
    },
};

/// Limit of payload and headers in bytes. MongoDB stores no document over 16 MiB. The other fields take far less than
/// the rest, even after moves that add headers.
const MAX_ITEM_BYTES: usize = 16 * 1024 * 1024 - 128 * 1024;

/// Milliseconds that the document of an expired ordered item stays, so that whoever finds it unblocks the next item of
/// its key.
const ORDERED_GRACE: i64 = 600_000;

/// Returns an item id as an object id.
pub(crate) fn oid(id: ItemId) -> ObjectId {
    ObjectId::from_bytes(id.0)
}

/// Returns a lease token as an object id.
pub(crate) fn token_oid(token: LeaseToken) -> ObjectId {
    ObjectId::from_bytes(token.0)
}

/// Returns item ids as an array.
pub(crate) fn oids(ids: impl IntoIterator<Item = ItemId>) -> RawArrayBuf {
    let mut array = RawArrayBuf::new();
    for id in ids {
        array.push(oid(id));
    }
    array
}

/// What the store decides about a new item.
pub(crate) struct Start {
    pub(crate) id: ItemId,
    pub(crate) now: Timestamp,
    /// Sequence number, if the item gets one.
    pub(crate) sequence: Option<i64>,
    /// True if the item waits for an earlier item of its key.
    pub(crate) blocked: bool,
}

/// Returns headers as a document.
pub(crate) fn headers_document(headers: &Headers) -> Result<RawDocumentBuf> {
    let mut document = RawDocumentBuf::new();
    for (name, value) in headers {
        let name = CString::try_from(name.as_str())
            .map_err(|_| broken("MongoDB cannot keep a header name with a zero byte in it"))?;
        document.append(&*name, value.as_str());
    }
    Ok(document)
}

/// Refuses an item that no document can hold. After this check [`encode`] does not fail, so that a bad item does not
/// fail others that share its write.
pub(crate) fn check(item: &NewItem) -> Result<()> {
    if item.headers.keys().any(|name| name.contains('\0')) {
        return Err(broken("MongoDB cannot keep a header name with a zero byte in it"));
    }
    let headers = item.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
    let bytes = item.payload.len() + headers;
    if bytes > MAX_ITEM_BYTES {
        return Err(broken(format!("MongoDB cannot keep an item of {bytes} bytes")));
    }
    Ok(())
}

/// Returns until when the deduplication id of a new item is remembered, if it has one.
pub(crate) fn window(push: &Push, now: Timestamp) -> Option<Timestamp> {
    push.item.remembered_until(&push.queue, push.dedup_window, now)
}

/// Adds the fields of a new item that do not change while it waits.
pub(crate) fn append_content(d: &mut RawDocumentBuf, push: &Push) -> Result<()> {
    let item = &push.item;
    if let Some(producer) = &push.producer {
        d.append(cstr!("producer"), producer.as_str());
    }
    d.append(
        cstr!("payload"),
        mongodb::bson::RawBinaryRef { subtype: BinarySubtype::Generic, bytes: &item.payload },
    );
    if !item.content_type.is_empty() {
        d.append(cstr!("contentType"), item.content_type.as_str());
    }
    if !item.headers.is_empty() {
        d.append(cstr!("headers"), headers_document(&item.headers)?);
    }
    Ok(())
}

/// Returns the document of a new item.
pub(crate) fn encode(push: &Push, start: &Start) -> Result<RawDocumentBuf> {
    let (item, now) = (&push.item, start.now);
    let when = item.eligible_from(now);
    let lease = push.first_lease.as_deref();
    let mut d = RawDocumentBuf::new();
    d.append(cstr!("_id"), oid(start.id));
    d.append(cstr!("q"), push.queue.name.as_str());
    d.append(
        cstr!("when"),
        match lease {
            _ if start.blocked => millis(BLOCKED),
            Some(lease) => leased(now + lease.lasts),
            None => date(when),
        },
    );
    if !start.blocked && when > now {
        d.append(cstr!("eligible"), date(when));
    }
    d.append(cstr!("priority"), i32::from(item.priority.level()));
    d.append(cstr!("attempt"), 1_i32);
    d.append(cstr!("deliveries"), i32::from(lease.is_some()));
    if let Some(lease) = lease {
        d.append(cstr!("lock"), token_oid(lease.token));
        d.append(cstr!("started"), date(now));
        if let Some(consumer) = &lease.consumer {
            d.append(cstr!("consumer"), consumer.as_str());
        }
    }
    if let Some(key) = &item.ordering_key {
        d.append(cstr!("key"), key.as_str());
        if start.blocked {
            d.append(cstr!("due"), date(when));
        } else {
            d.append(cstr!("turn"), key.as_str());
        }
    }
    if let Some(sequence) = start.sequence {
        d.append(cstr!("seq"), sequence);
    }
    let window = window(push, now);
    if let (Some(window), Some(dedup_id)) = (window, &item.dedup_id) {
        let mut dedup = RawDocumentBuf::new();
        dedup.append(cstr!("q"), push.queue.name.as_str());
        dedup.append(cstr!("id"), dedup_id.as_str());
        d.append(cstr!("dedup"), dedup);
        d.append(cstr!("window"), date(window));
    }
    append_content(&mut d, push)?;
    d.append(cstr!("created"), date(now));
    if let Some(deadline) = item.expires(&push.queue, now) {
        let grace = if item.ordering_key.is_some() { ORDERED_GRACE } else { 0 };
        let expires = (deadline.0 + grace).max(window.map_or(0, |window| window.0));
        d.append(cstr!("deadline"), date(deadline));
        d.append(cstr!("expires"), millis(expires));
    }
    Ok(d)
}

/// A parsed document of `items.<group>`. Names are checked by [`Stored::into_item`] and not before, so that an item with
/// a damaged name is set aside by itself and does not fail the others of its find.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    id: [u8; 12],
    pub(crate) queue: Arc<str>,
    /// Eligible time, or end of the lease.
    pub(crate) when: i64,
    /// True if the item stands among the reserved ones: nobody has found its lease lapsed.
    pub(crate) leased: bool,
    pub(crate) eligible: Option<i64>,
    pub(crate) priority: i32,
    pub(crate) attempt: u32,
    pub(crate) deliveries: u32,
    pub(crate) earlier: u32,
    pub(crate) lock: Option<LeaseToken>,
    pub(crate) settled: Option<ObjectId>,
    pub(crate) settled_before: Vec<ObjectId>,
    pub(crate) producer: Option<String>,
    pub(crate) consumer: Option<String>,
    pub(crate) key: Option<OrderingKey>,
    pub(crate) sequence: Option<i64>,
    pub(crate) turn: bool,
    pub(crate) due: Option<i64>,
    pub(crate) dedup_id: Option<DedupId>,
    pub(crate) window: Option<i64>,
    pub(crate) payload: Bytes,
    pub(crate) content_type: String,
    pub(crate) headers: Headers,
    pub(crate) created: i64,
    pub(crate) processed: Option<i64>,
    pub(crate) deadline: Option<i64>,
    pub(crate) tombstone_until: Option<i64>,
    pub(crate) reason: String,
    pub(crate) origin: Option<String>,
    pub(crate) dead_lettered: Option<i64>,
    pub(crate) failed_attempts: u32,
    /// This is no item but a document in which several items are, of which so many are ready.
    pub(crate) ready_inside: Option<usize>,
    /// The segment at the head of its queue in which it was read, if it has no document of its own.
    pub(crate) segment: Option<Arc<Seen>>,
}

impl Stored {
    /// Parses a document. Unknown fields are ignored.
    pub(crate) fn read(document: &RawDocument) -> Result<Self> {
        let mut stored = Self::default();
        stored.add(document)?;
        Ok(stored)
    }

    /// An item of which nothing but its id is known.
    pub(crate) fn new(id: ItemId) -> Self {
        Self { id: id.0, ..Self::default() }
    }

    /// Adds fields from a document.
    pub(crate) fn add(&mut self, document: &RawDocument) -> Result<()> {
        for element in document {
            let (name, value) = element.map_err(|e| broken(format!("unreadable item: {e}")))?;
            self.take(name.as_str(), value);
        }
        Ok(())
    }

    fn take(&mut self, name: &str, value: RawBsonRef<'_>) {
        let text = || value.as_str().unwrap_or_default().to_owned();
        let at = || value.as_datetime().map(mongodb::bson::DateTime::timestamp_millis);
        match name {
            "_id" => self.id = value.as_object_id().map_or([0; 12], |id| id.bytes()),
            "q" => self.queue = value.as_str().unwrap_or_default().into(),
            "when" => {
                let at = at().unwrap_or_default();
                self.leased = (LEASED..BLOCKED).contains(&at);
                self.when = if self.leased { at - LEASED } else { at };
            }
            "eligible" => self.eligible = at(),
            "priority" => self.priority = number(value) as i32,
            "attempt" => self.attempt = number(value) as u32,
            "deliveries" => self.deliveries = number(value) as u32,
            "earlier" => self.earlier = number(value) as u32,
            "lock" => self.lock = value.as_object_id().map(|id| LeaseToken(id.bytes())),
            "settled" => self.settled = value.as_object_id(),
            "settledBefore" => {
                let tokens = value.as_array().into_iter().flatten().flatten();
                self.settled_before = tokens.filter_map(RawBsonRef::as_object_id).collect();
            }
            "producer" => self.producer = Some(text()),
            "consumer" => self.consumer = Some(text()),
            "key" => self.key = OrderingKey::new(text()),
            "seq" => self.sequence = Some(number(value)),
            "turn" => self.turn = true,
            "due" => self.due = at(),
            "dedup" => {
                if let Some(Ok(id)) = value.as_document().map(|dedup| dedup.get_str("id")) {
                    self.dedup_id = DedupId::new(id);
                }
            }
            "window" => self.window = at(),
            "payload" => {
                if let Some(payload) = value.as_binary() {
                    self.payload = Bytes::copy_from_slice(payload.bytes);
                }
            }
            "contentType" => self.content_type = text(),
            "headers" => {
                for header in value.as_document().into_iter().flatten().flatten() {
                    if let Some(text) = header.1.as_str() {
                        self.headers.insert(header.0.as_str().to_owned(), text.to_owned());
                    }
                }
            }
            "created" => self.created = at().unwrap_or_default(),
            "processed" => self.processed = at(),
            "deadline" => self.deadline = at(),
            "trace" => self.tombstone_until = at(),
            "reason" => self.reason = text(),
            "origin" => self.origin = Some(text()),
            "deadLettered" => self.dead_lettered = at(),
            "ready" => self.ready_inside = Some(number(value) as usize),
            "failedAttempts" => self.failed_attempts = number(value) as u32,
            _ => {}
        }
    }

    /// Returns the item's id.
    pub(crate) fn id(&self) -> ItemId {
        ItemId(self.id)
    }

    /// Returns the id of the document that it is in.
    pub(crate) fn document(&self) -> ItemId {
        self.segment.as_ref().map_or_else(|| self.id(), |seen| seen.id)
    }

    /// Returns the size of the item.
    pub(crate) fn size(&self) -> ItemSize {
        let key = OrderingKey::text_of(self.key.as_ref());
        let dedup_id = DedupId::text_of(self.dedup_id.as_ref());
        let texts = [&self.content_type, key, dedup_id, &self.reason];
        let texts = texts.iter().map(|text| text.len()).sum();
        let payload = self.payload.len();
        ItemSize { payload, message: message_bytes(payload, texts, &self.headers) }
    }

    /// Returns what decides about the item at the head of its queue.
    pub(crate) fn at_head(&self) -> AtHead {
        AtHead {
            expire_time: self.deadline.map(Timestamp),
            lapsed: self.lock.is_some(),
            attempt: self.attempt,
            deliveries: self.deliveries,
            earlier_deliveries: self.earlier,
        }
    }

    /// Returns true if the item has expired, or its history has ended.
    pub(crate) fn is_over(&self, now: Timestamp) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now.0)
    }

    /// Returns true if this lease, lapsed or not, holds the item.
    pub(crate) fn is_held_by(&self, token: LeaseToken, now: Timestamp) -> bool {
        self.lock == Some(token) && !self.is_over(now)
    }

    /// Returns true if the settle with this token took effect, even if others followed it.
    pub(crate) fn was_settled_by(&self, token: ObjectId) -> bool {
        self.settled == Some(token) || self.settled_before.contains(&token)
    }

    /// Returns the state of the item at `now`.
    pub(crate) fn state(&self, now: Timestamp) -> ItemState {
        match self.when {
            BLOCKED => ItemState::Blocked,
            PROCESSED => ItemState::Processed,
            when if when <= now.0 => ItemState::Ready,
            _ if self.leased => ItemState::Reserved,
            _ => ItemState::Delayed,
        }
    }

    /// Converts the document to an item as of `now`. `queue` saves parsing the queue's name.
    pub(crate) fn into_item(self, queue: &QueueName, now: Timestamp) -> Result<Item> {
        let state = self.state(now);
        let consumer = |name: Option<String>| {
            name.map(|name| ConsumerName::parse("consumer", &name)).transpose()
        };
        let bad = |e: crate::domain::Invalid| broken(format!("unreadable item: {e}"));
        let due_time = match state {
            ItemState::Blocked | ItemState::Processed => None,
            ItemState::Reserved => Some(self.eligible.unwrap_or(self.created)),
            ItemState::Ready | ItemState::Delayed => Some(self.when),
        };
        let waits = matches!(state, ItemState::Blocked | ItemState::Processed);
        Ok(Item {
            id: self.id(),
            queue: if *self.queue == *queue.as_str() {
                queue.clone()
            } else {
                QueueName::parse("q", &self.queue).map_err(bad)?
            },
            payload: self.payload,
            content_type: self.content_type,
            headers: self.headers,
            priority: Priority::parse("priority", self.priority).map_err(bad)?,
            state,
            attempt: self.attempt,
            deliveries: self.deliveries,
            sequence: self.sequence,
            ordering_key: self.key,
            dedup_id: self.dedup_id,
            create_time: Timestamp(self.created),
            eligible_time: (!waits).then_some(Timestamp(self.when)),
            expire_time: self.deadline.map(Timestamp),
            process_time: self.processed.map(Timestamp),
            producer: consumer(self.producer).map_err(bad)?,
            consumer: consumer(self.consumer).map_err(bad)?,
            last_reason: self.reason,
            origin_queue: self
                .origin
                .map(|name| QueueName::parse("origin", &name))
                .transpose()
                .map_err(bad)?,
            due_time: due_time.map(Timestamp),
            dead_letter_time: self.dead_lettered.map(Timestamp),
            dead_letter_attempts: self.failed_attempts,
        })
    }
}

/// A number of whatever width.
pub(crate) fn number(value: RawBsonRef<'_>) -> i64 {
    match value {
        RawBsonRef::Int32(n) => i64::from(n),
        RawBsonRef::Int64(n) => n,
        RawBsonRef::Double(n) => n as i64,
        _ => 0,
    }
}

/// Returns a value that an update pipeline does not take for an expression.
pub(crate) fn literal(value: impl Into<Bson>) -> Document {
    doc! { "$literal": value.into() }
}

/// Returns texts by name as a document.
pub(crate) fn texts(map: &std::collections::BTreeMap<String, String>) -> Document {
    map.iter().map(|(name, text)| (name.clone(), Bson::String(text.clone()))).collect()
}

/// Returns a payload as BSON.
pub(crate) fn binary(payload: &[u8]) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: payload.to_vec() })
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::domain::{DedupId, Eligibility, NewItem, OrderingKey, Queue};

    #[test]
    fn an_item_survives_its_document() {
        let queue = QueueName::parse("queue", "orders").unwrap();
        let push = Push {
            queue: Arc::new(Queue::with_defaults(queue.clone(), Timestamp(0))),
            item: NewItem {
                payload: Bytes::from_static(b"\0work"),
                content_type: "text/plain".into(),
                headers: [("a.b", "1"), ("$c", ""), ("", "x")]
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .into(),
                priority: Priority::parse("priority", 7).unwrap(),
                eligibility: Eligibility::After(Duration::from_secs(1)),
                ttl: Some(Duration::from_mins(1)),
                ordering_key: OrderingKey::new("key"),
                dedup_id: DedupId::new("once"),
            },
            producer: ConsumerName::parse_optional("producer", "me").unwrap(),
            dedup_window: None,
            first_lease: None,
            id: None,
        };
        let start = Start {
            id: ItemId(*b"0123456789ab"),
            now: Timestamp(5_000),
            sequence: Some(3),
            blocked: false,
        };
        let stored = Stored::read(&encode(&push, &start).unwrap()).unwrap();
        assert!(stored.turn);
        assert_eq!(stored.window, Some(305_000));
        let item = stored.into_item(&queue, start.now).unwrap();
        assert_eq!(item.payload, push.item.payload);
        assert_eq!(item.headers, push.item.headers);
        assert_eq!((item.priority.level(), item.sequence, item.attempt), (7, Some(3), 1));
        assert_eq!(item.ordering_key, push.item.ordering_key);
        assert_eq!(item.dedup_id, push.item.dedup_id);
        assert_eq!(item.eligible_time, Some(Timestamp(6_000)));
        assert_eq!(item.expire_time, Some(Timestamp(65_000)));
        assert_eq!(item.state, ItemState::Delayed);
        assert_eq!(item.producer, push.producer);
    }
}
