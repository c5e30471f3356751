//! Items that are reserved before anybody asks for them. Where many consumers take few items at a time, each item would otherwise
//! cost a wait for a reserve of few items. So a dispatcher reserves some more than its consumers ask for: what they took in the last
//! [`AHEAD`]. Whoever asks next receives these items at once, and a reserve for many refills them meanwhile.
//!
//! The stock is nobody's: no item in it waits for one consumer while another one is idle. What nobody takes is rolled back soon.

use std::{collections::VecDeque, time::Duration};

use sluicegate_proto::backoff::Backoff;

use super::stream::InFlight;
use crate::domain::{ConsumerName, Delivery, Demand, ItemId, Priority, Timestamp};

/// The time for which items are reserved ahead, at the rate at which they are taken.
const AHEAD: Duration = Duration::from_millis(10);
/// The rate is counted over this time.
const WINDOW: Duration = Duration::from_millis(50);
/// Fewer items are not worth it.
const FEWEST: usize = 4;
/// Most items in stock, and most bytes of their payloads.
pub(super) const MOST: usize = 200;
const MOST_BYTES: usize = 256 << 10;
/// Only consumers that take at most so many items at a time are counted and served.
const FEW: usize = 8;
/// Items that nobody has taken for this long are rolled back.
const KEPT: Duration = Duration::from_millis(100);
/// Shorter leases have no time to spare, if the store stalls before items can be rolled back.
const SHORTEST_LEASE: Duration = Duration::from_secs(10);
/// For how long nothing is reserved ahead after items were not taken, were in the way, or differ in priority: longer and longer if that happens
/// again within [`CALM`].
const PAUSE: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
const CALM: Duration = Duration::from_secs(30);

/// What the items of a stock were reserved for, and a consumer has to ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) lease: Duration,
    pub(super) consumer: Option<ConsumerName>,
}

/// The stock of one queue, with the rate at which consumers take items.
#[derive(Default)]
pub(in crate::engine) struct Stock {
    /// The items in the order of the queue, each with the time at which it was reserved.
    items: VecDeque<(Timestamp, Delivery)>,
    /// Items that are to be rolled back before the next reserve, whether they were in stock or with a consumer that cannot receive them.
    returning: Vec<InFlight>,
    /// The terms of the items in stock.
    reserved_for: Option<Terms>,
    /// The terms of the last demand, until items have come for it.
    demanded: Option<Terms>,
    /// The terms of the consumers that are counted.
    asked_for: Option<Terms>,
    /// When the count began.
    since: Timestamp,
    /// The items that were taken since then, and in the window before.
    taken: usize,
    taken_before: usize,
    /// The priority of the items, as far as they had one in common.
    priority: Option<Priority>,
    /// Nothing is reserved ahead before this time.
    paused_until: Timestamp,
    /// The number of pauses, none of which came long after the one before.
    pauses: u32,
    /// True if what a reserve brings is returned at once, because the queue may have been paused since it began, or items ahead of it
    /// are being returned.
    is_closed: bool,
    /// True while a task returns what nobody takes.
    pub(in crate::engine) is_watched: bool,
}

impl Stock {
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Counts items that a consumer was handed, who takes at most `most` at a time.
    pub(super) fn count(&mut self, terms: &Terms, most: usize, items: usize, now: Timestamp) {
        if most > FEW || terms.lease < SHORTEST_LEASE {
            return;
        }
        if self.asked_for.as_ref() != Some(terms) {
            self.asked_for = Some(terms.clone());
            (self.since, self.taken, self.taken_before) = (now, 0, 0);
        }
        self.turn(now);
        self.taken += items;
    }

    /// Begins a new window if the last one is over.
    fn turn(&mut self, now: Timestamp) {
        let passed = self.since.until(now);
        if passed < WINDOW {
            return;
        }
        self.taken_before = if passed < 2 * WINDOW { self.taken } else { 0 };
        (self.since, self.taken) = (now, 0);
    }

    /// Returns what to reserve ahead, if the stock is half empty.
    pub(super) fn demand(&mut self, now: Timestamp) -> Option<Demand> {
        self.turn(now);
        let target = self.taken_before * AHEAD.as_millis() as usize / WINDOW.as_millis() as usize;
        let target = target.min(MOST);
        let terms = self.asked_for.as_ref()?;
        let is_usable = self.is_empty() || self.reserved_for.as_ref() == Some(terms);
        if target < FEWEST || self.items.len() * 2 > target || !is_usable {
            return None;
        }
        if now < self.paused_until || self.is_closed {
            return None;
        }
        let bytes: usize = self.items.iter().map(|(_, one)| one.item.payload.len()).sum();
        let demand = Demand {
            max_items: target - self.items.len(),
            max_bytes: MOST_BYTES.saturating_sub(bytes),
            may_exceed: false,
            lease: terms.lease,
            consumer: terms.consumer.clone(),
            spare: true,
        };
        self.demanded = Some(terms.clone());
        Some(demand)
    }

    /// Adds items that were reserved ahead.
    pub(super) fn add(&mut self, deliveries: Vec<Delivery>, now: Timestamp) {
        self.reserved_for = self.demanded.take();
        for delivery in deliveries {
            // One of a higher priority that is pushed now would be delivered after these.
            if self.priority.is_some_and(|priority| priority != delivery.item.priority) {
                self.pause(now);
            }
            self.priority = Some(delivery.item.priority);
            if self.is_closed {
                self.returning.push(InFlight::unsent(&delivery, now));
            } else {
                self.items.push_back((now, delivery));
            }
        }
    }

    /// Ends a round. `all_seen` says that the round found everything there was.
    pub(super) fn round_ended(&mut self, all_seen: bool, now: Timestamp) {
        if self.demanded.take().is_some() && !all_seen {
            self.pause(now); // the items are too large, or those of other brokers
        }
    }

    /// Returns true if a consumer who takes at most `most` items at a time can be served.
    pub(super) fn suits(&self, terms: &Terms, most: usize) -> bool {
        most <= FEW && self.reserved_for.as_ref() == Some(terms)
    }

    /// Takes the first items: at most `max_items`, as long as `fits` says so of their number and payload bytes.
    pub(super) fn take(
        &mut self,
        max_items: usize,
        fits: impl Fn(usize, usize) -> bool,
    ) -> Vec<Delivery> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some((_, first)) = self.items.front() {
            bytes += first.item.payload.len();
            if taken.len() == max_items || !fits(taken.len() + 1, bytes) {
                break;
            }
            taken.extend(self.items.pop_front().map(|(_, delivery)| delivery));
        }
        taken
    }

    /// Puts items back that a consumer could not receive.
    pub(super) fn put_back(&mut self, deliveries: Vec<Delivery>, now: Timestamp) {
        for delivery in deliveries.into_iter().rev() {
            self.items.push_front((now, delivery));
        }
    }

    /// Adds items that were not in stock to those that are to be rolled back.
    pub(in crate::engine) fn give_back(&mut self, mut items: Vec<InFlight>) {
        self.returning.append(&mut items);
    }

    /// Returns true if items are to be rolled back.
    pub(in crate::engine) fn is_returning(&self) -> bool {
        !self.returning.is_empty()
    }

    /// Takes the items that are to be rolled back.
    pub(super) fn take_returning(&mut self) -> Vec<InFlight> {
        std::mem::take(&mut self.returning)
    }

    /// Removes an item that was deleted.
    pub(super) fn remove(&mut self, item: ItemId) {
        self.items.retain(|(_, delivery)| delivery.item.id != item);
    }

    /// Hands out nothing more, because the queue may have been paused or made anew, or items of it deleted. Nothing is added
    /// before [`Self::open`].
    pub(in crate::engine) fn withdraw(&mut self, now: Timestamp) {
        self.is_closed = true;
        if !self.items.is_empty() {
            self.pause(now);
            let mut items = self.take_items();
            self.returning.append(&mut items);
        }
    }

    /// Notes that the settings of the queue are about to be read.
    pub(in crate::engine) fn open(&mut self) {
        self.is_closed = false;
    }

    /// Takes the items that are to be rolled back, and what nobody has taken in time. What a reserve that
    /// is under way brings is behind them, and is returned too.
    pub(in crate::engine) fn take_unused(&mut self, now: Timestamp) -> Vec<InFlight> {
        let mut unused = self.take_returning();
        if self.items.front().is_some_and(|(since, _)| *since + KEPT <= now) {
            self.pause(now);
            self.is_closed = true;
            unused.append(&mut self.take_items());
        }
        unused
    }

    /// Returns when [`Self::take_unused`] has something to do next.
    pub(in crate::engine) fn next_unused(&self) -> Option<Timestamp> {
        if self.is_returning() {
            return Some(Timestamp::default());
        }
        self.items.front().map(|(since, _)| *since + KEPT)
    }

    /// Takes all items, because they are in the way of other consumers.
    pub(super) fn take_hiding(&mut self, now: Timestamp) -> Vec<InFlight> {
        self.pause(now);
        self.take_all()
    }

    /// Takes all items.
    pub(in crate::engine) fn take_all(&mut self) -> Vec<InFlight> {
        let mut all = self.take_returning();
        all.append(&mut self.take_items());
        all
    }

    fn take_items(&mut self) -> Vec<InFlight> {
        self.items.drain(..).map(|(since, delivery)| InFlight::unsent(&delivery, since)).collect()
    }

    /// Reserves nothing ahead for a while.
    fn pause(&mut self, now: Timestamp) {
        self.pauses = if self.paused_until + CALM < now { 0 } else { self.pauses + 1 };
        self.paused_until = now + PAUSE.delay(self.pauses);
    }
}
