//! What is stored: items and their order, ordering keys, deduplication ids.
//!
//! Every change of an item takes it out and puts it in again, which keeps the indexes right.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use sluicegate_broker::{
    domain::{
        DedupId, IdMark, ItemId, OrderingKey, Outcome, Pattern, Queue, QueueName, QueueTemplate,
        Receipt, Schedule, ScheduleName, Timestamp, Totals,
    },
    store::{BrokerReport, FiguresPlace, KeptFigures, StoredReceiptKey},
};

use super::{
    operations::Operations,
    stored::{Stored, id_of, row_of},
};

/// The place of an item in the hand-out order of its queue.
pub(super) type Place = (Reverse<u8>, Timestamp, u64);

/// The items of one queue, in the orders in which they are needed.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) handout: BTreeSet<Place>,
    /// Unsettled items by ordering key and sequence number.
    pub(super) keys: BTreeSet<(OrderingKey, i64, u64)>,
    /// Blocked items by sequence number.
    pub(super) blocked: BTreeSet<(i64, u64)>,
    /// Processed items by time.
    pub(super) history: BTreeSet<(Timestamp, u64)>,
}

/// The first item with a deduplication id.
#[derive(Debug)]
pub(super) struct First {
    pub(super) row: u64,
    pub(super) sequence: Option<i64>,
    pub(super) until: Timestamp,
}

/// All that is stored.
#[derive(Debug, Default)]
pub(super) struct World {
    /// The broker whose work is done.
    pub(super) worker: [u8; 4],
    /// Number of rows that brokers were given.
    rows: u32,
    items: BTreeMap<u64, Stored>,
    lanes: BTreeMap<QueueName, Lane>,
    expiry: BTreeSet<(Timestamp, u64)>,
    pub(super) dedup: BTreeMap<(QueueName, DedupId), First>,
    pub(super) counters: BTreeMap<QueueName, i64>,
    pub(super) queues: BTreeMap<QueueName, Queue>,
    /// Raised by each change of a link to a dead-letter queue, and by each deletion.
    pub(super) links: i64,
    /// The queues whose settings changed, in the order of the changes.
    pub(super) changes: Vec<QueueName>,
    pub(super) totals: BTreeMap<QueueName, Totals>,
    pub(super) schedules: BTreeMap<ScheduleName, Schedule>,
    pub(super) templates: BTreeMap<Pattern, QueueTemplate>,
    pub(super) operations: Operations,
    /// The leader of each task, and until when.
    pub(super) leaders: BTreeMap<&'static str, ([u8; 4], Timestamp)>,
    pub(super) receipt_keys: BTreeMap<u32, StoredReceiptKey>,
    /// What each broker reported, and until when it counts.
    pub(super) broker_reports: BTreeMap<[u8; 4], (BrokerReport, Timestamp)>,
    /// Past figures of queues, and until when they last.
    pub(super) figures: BTreeMap<FiguresPlace, (KeptFigures, Timestamp)>,
    /// Number of reservers by queue and broker.
    pub(super) reservers: BTreeMap<(QueueName, [u8; 4]), usize>,
    /// Queues in which the store made items ready, by the broker that is to be told.
    pub(super) unblocked: BTreeMap<[u8; 4], BTreeSet<QueueName>>,
}

impl World {
    /// Returns a new row for the broker. Rows sort as they are given, and end with their broker, as ids on MongoDB do.
    pub(super) fn next_row(&mut self) -> u64 {
        self.rows += 1;
        self.last_row()
    }

    fn last_row(&self) -> u64 {
        u64::from(self.rows) << 32 | u64::from(u32::from_be_bytes(self.worker))
    }

    pub(super) fn get(&self, row: u64) -> Option<&Stored> {
        self.items.get(&row)
    }

    pub(super) fn get_id(&self, id: ItemId) -> Option<&Stored> {
        self.get(row_of(id)).filter(|stored| stored.item.id == id)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Stored> {
        self.items.values()
    }

    pub(super) fn lane(&self, queue: &QueueName) -> Option<&Lane> {
        self.lanes.get(queue)
    }

    /// Takes an item out. It is put in again, or gone.
    pub(super) fn take(&mut self, row: u64) -> Option<Stored> {
        let stored = self.items.remove(&row)?;
        if let Some(end) = stored.item.expire_time {
            self.expiry.remove(&(end, row));
        }
        if let Some(lane) = self.lanes.get_mut(&stored.item.queue) {
            let sequence = stored.item.sequence.unwrap_or(0);
            if let Some(when) = stored.when {
                lane.handout.remove(&(Reverse(stored.item.priority.level()), when, row));
            }
            if stored.blocked.is_some() {
                lane.blocked.remove(&(sequence, row));
            }
            if let Some(time) = stored.item.process_time {
                lane.history.remove(&(time, row));
            }
            if let Some(key) = stored.item.ordering_key.clone() {
                lane.keys.remove(&(key, sequence, row));
            }
        }
        Some(stored)
    }

    pub(super) fn put(&mut self, stored: Stored) {
        let row = stored.row;
        if let Some(end) = stored.item.expire_time {
            self.expiry.insert((end, row));
        }
        let lane = match self.lanes.get_mut(&stored.item.queue) {
            Some(lane) => lane,
            None => self.lanes.entry(stored.item.queue.clone()).or_default(),
        };
        let sequence = stored.item.sequence.unwrap_or(0);
        if let Some(when) = stored.when {
            lane.handout.insert((Reverse(stored.item.priority.level()), when, row));
        }
        if stored.blocked.is_some() {
            lane.blocked.insert((sequence, row));
        }
        if let Some(time) = stored.item.process_time {
            lane.history.insert((time, row));
        }
        if stored.is_ordered()
            && let Some(key) = stored.item.ordering_key.clone()
        {
            lane.keys.insert((key, sequence, row));
        }
        self.items.insert(row, stored);
    }

    /// Returns the row that a receipt holds, or the outcome of its use. Removes the item if it has
    /// expired.
    pub(super) fn held(&mut self, receipt: &Receipt, now: Timestamp) -> Result<u64, Outcome> {
        let Some(stored) = self.get_id(receipt.item) else { return Err(Outcome::Gone) };
        let row = stored.row;
        if stored.item.has_expired(now) {
            self.remove_expired(row, now);
            return Err(Outcome::Gone);
        }
        if stored.is_processed() {
            return Err(Outcome::Gone);
        }
        let valid =
            stored.lock == Some(receipt.token) && stored.item.deliveries == receipt.deliveries;
        if valid { Ok(row) } else { Err(Outcome::LeaseLost) }
    }

    /// Returns when the lease of a receipt ends or has ended, if the receipt holds its item.
    pub(super) fn lease_end(&mut self, receipt: &Receipt, now: Timestamp) -> Option<Timestamp> {
        let row = self.held(receipt, now).ok()?;
        self.get(row)?.when
    }

    /// Returns true if an item of the key other than `except` is unsettled, so that this one must
    /// wait.
    pub(super) fn must_wait(
        &mut self,
        queue: &QueueName,
        key: &OrderingKey,
        except: u64,
        now: Timestamp,
    ) -> bool {
        while let Some(row) = self.first_of_key(queue, key, |stored| stored.row != except) {
            if !self.items[&row].item.has_expired(now) {
                return true;
            }
            self.remove_expired(row, now);
        }
        false
    }

    fn first_of_key(
        &self,
        queue: &QueueName,
        key: &OrderingKey,
        wanted: impl Fn(&Stored) -> bool,
    ) -> Option<u64> {
        let from = (key.clone(), i64::MIN, 0);
        let same = self.lanes.get(queue)?.keys.range(from..).take_while(|(other, ..)| other == key);
        same.map(|(_, _, row)| *row).find(|row| self.items.get(row).is_some_and(&wanted))
    }

    /// Unblocks the next item of a key after `left` has left its place. Returns true if there is
    /// one.
    pub(super) fn pass_turn(&mut self, left: &Stored, now: Timestamp) -> bool {
        if !left.has_turn() {
            return false;
        }
        let Some(key) = &left.item.ordering_key else { return false };
        let waits = |stored: &Stored| stored.blocked.is_some() && !stored.item.has_expired(now);
        let Some(row) = self.first_of_key(&left.item.queue, key, waits) else { return false };
        if let Some(mut next) = self.take(row) {
            next.when = next.blocked.take().map(|own| own.max(now));
            self.put(next);
        }
        true
    }

    /// Removes an item. Returns true if another one of its key is ready now.
    pub(super) fn remove(&mut self, row: u64, now: Timestamp) -> bool {
        self.take(row).is_some_and(|left| self.pass_turn(&left, now))
    }

    /// Removes an item whose deduplication id is forgotten with it.
    pub(super) fn erase(&mut self, row: u64, now: Timestamp) -> bool {
        if let Some(stored) = self.items.get(&row)
            && let Some(queue) = stored.dedup_queue.clone()
            && let Some(dedup_id) = stored.item.dedup_id.clone()
        {
            let remembered = (queue, dedup_id);
            if self.dedup.get(&remembered).is_some_and(|first| first.row == row) {
                self.dedup.remove(&remembered);
            }
        }
        self.remove(row, now)
    }

    /// Removes an expired item, counts it, and notes that the next one of its key is ready.
    pub(super) fn remove_expired(&mut self, row: u64, now: Timestamp) {
        let Some(stored) = self.items.get(&row) else { return };
        let (queue, processed) = (stored.item.queue.clone(), stored.is_processed());
        if !processed {
            self.totals.entry(queue.clone()).or_default().expired += 1;
        }
        if self.remove(row, now) {
            self.note_unblocked(&queue);
        }
    }

    fn note_unblocked(&mut self, queue: &QueueName) {
        let from = (queue.clone(), [0; 4]);
        let brokers: Vec<[u8; 4]> = self
            .reservers
            .range(from..)
            .take_while(|((other, _), _)| other == queue)
            .map(|((_, broker), _)| *broker)
            .collect();
        for broker in brokers {
            self.unblocked.entry(broker).or_default().insert(queue.clone());
        }
    }

    /// Removes what has expired: the upkeep of a store.
    pub(super) fn sweep(&mut self, now: Timestamp) {
        while let Some((_, row)) = self.expiry.first().copied().filter(|(end, _)| *end <= now) {
            self.remove_expired(row, now);
        }
        self.dedup.retain(|_, first| first.until > now);
    }

    /// Returns the next sequence number of the queue, if the item gets one.
    pub(super) fn stamp(&mut self, queue: &Queue, keyed: bool) -> Option<i64> {
        if !queue.sequenced && !keyed {
            return None;
        }
        let counter = self.counters.entry(queue.name.clone()).or_default();
        *counter += 1;
        Some(*counter)
    }

    /// Marks the place between the broker's rows and those that it will be given.
    pub(super) fn mark(&self) -> IdMark {
        IdMark::of_broker(id_of(self.last_row()))
    }

    pub(super) fn id(row: u64) -> ItemId {
        id_of(row)
    }

    /// Forgets what belongs to a deleted queue beside its items.
    pub(super) fn forget(&mut self, queue: &QueueName) {
        self.lanes.remove(queue);
        self.dedup.retain(|(of, _), _| of != queue);
        self.counters.remove(queue);
        self.totals.remove(queue);
    }
}
