//! Items as they are pushed and as they are delivered.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use crate::{
    proto::{self, new_item::Eligibility},
    retry::Retry,
};

/// An item to push. Each method states the broker's limit; the broker refuses what exceeds it.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_client::NewItem;
///
/// let item = NewItem::new("hello")
///     .content_type("text/plain")
///     .header("trace", "4711")
///     .priority(7)
///     .delay(Duration::from_secs(60));
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[must_use = "an item does nothing until it is pushed"]
pub struct NewItem {
    inner: proto::NewItem,
}

impl NewItem {
    /// Returns an item with this payload: at most the broker's `max_payload_bytes` (3 MiB by default); may be empty.
    pub fn new(payload: impl Into<Bytes>) -> Self {
        Self { inner: proto::NewItem { payload: payload.into(), ..Default::default() } }
    }

    /// Returns an item with `value` as JSON and content type `application/json`.
    ///
    /// # Errors
    /// If `value` cannot be serialized as JSON.
    pub fn json<T: Serialize + ?Sized>(value: &T) -> Result<Self, serde_json::Error> {
        Ok(Self::new(serde_json::to_vec(value)?).content_type("application/json"))
    }

    /// Sets the media type of the payload; at most 255 bytes.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.inner.content_type = content_type.into();
        self
    }

    /// Adds one header; at most 64 entries and 16 KiB in all.
    pub fn header(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.inner.headers.insert(key.into(), value.into());
        self
    }

    /// Sets the priority: 0 (default) to 9; 9 is delivered first.
    pub fn priority(mut self, priority: u8) -> Self {
        self.inner.priority = i32::from(priority);
        self
    }

    /// Delivers the item no earlier than this long after the push; at most 10 years. Replaces [`NewItem::eligible_at`].
    pub fn delay(mut self, delay: Duration) -> Self {
        self.inner.eligibility = Some(Eligibility::Delay(to_proto_duration(delay)));
        self
    }

    /// Delivers the item no earlier than this instant, by the broker's clock. Replaces [`NewItem::delay`].
    pub fn eligible_at(mut self, time: SystemTime) -> Self {
        self.inner.eligibility = Some(Eligibility::EligibleTime(time.into()));
        self
    }

    /// Sets the time to live, counted from the push: an expired item is never delivered. More than zero, at most 10 years.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.inner.ttl = Some(to_proto_duration(ttl));
        self
    }

    /// Sets the ordering key: items of one queue with the same key are delivered one at a time, in push order. At most 255
    /// bytes.
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.inner.ordering_key = key.into();
        self
    }

    /// Sets the deduplication id: a second push with the same id within the queue's `dedup_window` stores nothing. At most
    /// 255 bytes.
    pub fn dedup_id(mut self, id: impl Into<String>) -> Self {
        self.inner.dedup_id = id.into();
        self
    }

    /// Returns the message that is sent to the broker.
    pub fn into_proto(self) -> proto::NewItem {
        self.inner
    }
}

impl From<&str> for NewItem {
    fn from(payload: &str) -> Self {
        Self::new(payload.to_owned())
    }
}

impl From<String> for NewItem {
    fn from(payload: String) -> Self {
        Self::new(payload)
    }
}

impl From<Bytes> for NewItem {
    fn from(payload: Bytes) -> Self {
        Self::new(payload)
    }
}

impl From<NewItem> for proto::NewItem {
    fn from(item: NewItem) -> Self {
        item.inner
    }
}

impl From<proto::NewItem> for NewItem {
    fn from(inner: proto::NewItem) -> Self {
        Self { inner }
    }
}

/// An item that a handler works on, held under a lease until the handler returns.
#[derive(Debug)]
pub struct Delivery {
    item: proto::Item,
    receipt: String,
    lease_expire_time: Option<SystemTime>,
    lost: CancellationToken,
}

impl Delivery {
    /// Returns `None` if the broker left out the item, which it never does.
    pub(crate) fn from_proto(delivery: proto::Delivery) -> Option<Self> {
        Some(Self {
            item: delivery.item?,
            receipt: delivery.receipt,
            lease_expire_time: delivery.lease_expire_time.and_then(|t| t.try_into().ok()),
            lost: CancellationToken::new(),
        })
    }

    pub(crate) fn lost_token(&self) -> CancellationToken {
        self.lost.clone()
    }

    /// Returns the item with all its fields.
    pub fn item(&self) -> &proto::Item {
        &self.item
    }

    /// Returns the item with all its fields, and drops the rest.
    pub fn into_item(self) -> proto::Item {
        self.item
    }

    /// Returns the item's id: opaque, unique in the broker, the same at each delivery and after a move.
    pub fn id(&self) -> &str {
        &self.item.id
    }

    /// Returns the payload, which is cheap to clone.
    pub fn payload(&self) -> &Bytes {
        &self.item.payload
    }

    /// Returns the payload as text.
    ///
    /// # Errors
    /// If it is not UTF-8: a [`Retry::dead_letter`], since another try would not help.
    pub fn text(&self) -> Result<&str, Retry> {
        let refuse = |error| Retry::dead_letter(format!("the payload is not text: {error}"));
        std::str::from_utf8(&self.item.payload).map_err(refuse)
    }

    /// Deserializes the payload from JSON.
    ///
    /// # Errors
    /// If it is not JSON, or not of this form: a [`Retry::dead_letter`], since another try would not help.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Retry> {
        let refuse = |error| Retry::dead_letter(format!("the payload cannot be read: {error}"));
        serde_json::from_slice(&self.item.payload).map_err(refuse)
    }

    /// Returns the headers.
    pub fn headers(&self) -> &HashMap<String, String> {
        &self.item.headers
    }

    /// Returns the number of failed attempts plus one: 1 at first.
    pub fn attempt(&self) -> u32 {
        self.item.attempt.try_into().unwrap_or(0)
    }

    /// Returns the item's sequence number, from 1; 0 if its queue is not sequenced.
    pub fn sequence(&self) -> i64 {
        self.item.sequence
    }

    /// Returns the receipt of this reservation, with which the item can be settled by other means. Empty if the item was
    /// committed on delivery.
    pub fn receipt(&self) -> &str {
        &self.receipt
    }

    /// Returns the end of the lease as of the delivery, by the broker's clock; renewals come on top.
    pub fn lease_expire_time(&self) -> Option<SystemTime> {
        self.lease_expire_time
    }

    /// Completes once this reservation no longer holds the item: the broker has revoked it (the item was deleted or settled
    /// elsewhere, or its lease could not be renewed any more), or the lease has ended without renewal. Another consumer may
    /// have the item by then, so there is no use in finishing the work. Long handlers should `select!` on it.
    pub fn lease_lost(&self) -> WaitForCancellationFuture<'_> {
        self.lost.cancelled()
    }
}

/// Converts a duration to its message; one beyond 10,000 years, which the broker refuses anyway, becomes that long.
pub(crate) fn to_proto_duration(duration: Duration) -> prost_types::Duration {
    duration.try_into().unwrap_or(prost_types::Duration { seconds: 315_576_000_000, nanos: 0 })
}
