//! What is assigned to streams and was not sent: the items of one stream, and how many bytes there are in all.
//!
//! A stream whose client does not read is not polled, and keeps what it was assigned until its leases are about to end. That is little
//! for one stream, and much for thousands of them. So there is a limit for all together: beyond it a stream is assigned nothing more before it is
//! polled again, and what was left for the longest is taken back.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{sync::Notify, time::Instant};

use crate::domain::Delivery;

/// How much is assigned to all streams and was not sent.
pub(in crate::engine) struct UnsentBytes {
    most: usize,
    bytes: AtomicUsize,
    /// Notified when there is more than there may be.
    over: Notify,
}

impl Default for UnsentBytes {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl UnsentBytes {
    /// Returns the count of what may take at most so many bytes.
    pub(in crate::engine) fn new(most: usize) -> Self {
        Self { most, bytes: AtomicUsize::default(), over: Notify::new() }
    }

    /// Returns true if there is more than there may be.
    pub(in crate::engine) fn is_over(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.most
    }

    /// Waits until there is more than there may be.
    pub(in crate::engine) async fn until_over(&self) {
        while !self.is_over() {
            self.over.notified().await;
        }
    }

    fn add(&self, bytes: usize) {
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.most {
            self.over.notify_one();
        }
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The items of one stream that were assigned to it and not sent, in their order.
pub(super) struct Unsent {
    items: VecDeque<Delivery>,
    bytes: usize,
    /// How many of them the count of all streams has been told of.
    told: usize,
    /// Since when the stream has left its items. By no clock that may be set back.
    since: Instant,
    all: Arc<UnsentBytes>,
}

impl Unsent {
    pub(super) fn new(all: Arc<UnsentBytes>) -> Self {
        Self { items: VecDeque::new(), bytes: 0, told: 0, since: Instant::now(), all }
    }

    /// Returns the count of all streams.
    pub(super) fn all(&self) -> &UnsentBytes {
        &self.all
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn first(&self) -> Option<&Delivery> {
        self.items.front()
    }

    /// Returns since when the stream has left its items, if it has any.
    pub(super) fn left_since(&self) -> Option<Instant> {
        (!self.is_empty()).then_some(self.since)
    }

    /// Notes that the stream was polled.
    pub(super) fn looked_at(&mut self) {
        if !self.is_empty() {
            self.since = Instant::now();
        }
        self.tell();
    }

    /// Adds an item behind the others. [`Self::tell`] follows the last one.
    pub(super) fn add(&mut self, delivery: Delivery) {
        if self.is_empty() {
            self.since = Instant::now();
        }
        self.bytes += delivery.item.message_bytes();
        self.items.push_back(delivery);
    }

    /// Takes the first item. [`Self::looked_at`] follows the last one.
    pub(super) fn take_first(&mut self) -> Option<Delivery> {
        let first = self.items.pop_front()?;
        self.bytes -= first.item.message_bytes();
        Some(first)
    }

    /// Takes the last items, beginning with this one.
    pub(super) fn take_from(&mut self, at: usize) -> VecDeque<Delivery> {
        let taken = self.items.split_off(at);
        self.count_again();
        taken
    }

    /// Removes the items of which `stays` says no.
    pub(super) fn retain(&mut self, stays: impl Fn(&Delivery) -> bool) {
        self.items.retain(stays);
        self.count_again();
    }

    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.count_again();
    }

    fn count_again(&mut self) {
        self.bytes = self.items.iter().map(|one| one.item.message_bytes()).sum();
        self.tell();
    }

    /// Tells the count of all streams what has changed.
    pub(super) fn tell(&mut self) {
        let before = std::mem::replace(&mut self.told, self.bytes);
        if self.bytes > before {
            self.all.add(self.bytes - before);
        } else {
            self.all.remove(before - self.bytes);
        }
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.all.remove(self.told);
    }
}
