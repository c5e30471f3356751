//! The model: a store in as few words as possible.

use std::collections::{BTreeMap, HashMap};

use super::{B, DEAD, RETENTION};
use crate::domain::{ItemId, ItemState, Outcome};

/// An item in the model.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) id: ItemId,
    pub(super) queue: usize,
    pub(super) level: i32,
    /// The eligible time of the item itself, even while it is blocked.
    pub(super) when: u64,
    pub(super) blocked: bool,
    pub(super) processed: bool,
    /// The receipt that holds the item.
    pub(super) holder: Option<usize>,
    pub(super) attempt: u32,
    pub(super) deliveries: u32,
    pub(super) key: Option<u8>,
    pub(super) sequence: u64,
    pub(super) origin: Option<usize>,
    pub(super) expires: Option<u64>,
}

impl Model {
    pub(super) fn new(id: ItemId, queue: usize, level: i32) -> Self {
        Self {
            id,
            queue,
            level,
            when: 0,
            blocked: false,
            processed: false,
            holder: None,
            attempt: 1,
            deliveries: 0,
            key: None,
            sequence: 0,
            origin: None,
            expires: None,
        }
    }
}

/// The model: items in the order of arrival, with times in milliseconds since the start.
#[derive(Default)]
pub(super) struct World {
    pub(super) now: u64,
    pub(super) items: BTreeMap<usize, Model>,
    pub(super) arrivals: usize,
    pub(super) numbers: u64,
    /// By queue and id: the first item, and until when its id is remembered.
    pub(super) remembered: HashMap<(usize, u8), (ItemId, u64)>,
    /// The item of each receipt.
    pub(super) receipts: Vec<usize>,
}

impl World {
    pub(super) fn after(&self, span: u64) -> u64 {
        self.now + span * 1_000
    }

    pub(super) fn expire(&mut self) {
        let now = self.now;
        self.items.retain(|_, item| item.expires.is_none_or(|end| end > now));
    }

    pub(super) fn key_taken(&self, queue: usize, key: Option<u8>, except: usize) -> bool {
        self.items.iter().any(|(n, item)| {
            *n != except
                && key.is_some()
                && (item.queue, item.key) == (queue, key)
                && !item.processed
                && item.origin.is_none()
        })
    }

    /// Unblocks the next item of a key after an item has left its queue, by its end or by a move.
    pub(super) fn pass_turn(&mut self, left: &Model) {
        if left.key.is_none() || left.blocked || left.processed || left.origin.is_some() {
            return;
        }
        let now = self.now;
        let same =
            |item: &&mut Model| item.blocked && (item.queue, item.key) == (left.queue, left.key);
        if let Some(next) = self.items.values_mut().filter(same).min_by_key(|i| i.sequence) {
            next.blocked = false;
            next.when = next.when.max(now);
        }
    }

    pub(super) fn arrive(&mut self, n: usize, queue: usize, when: u64, stamp: bool) {
        let waits = self.key_taken(queue, self.items[&n].key, n);
        self.numbers += u64::from(stamp);
        let numbers = self.numbers;
        let item = self.items.get_mut(&n).unwrap();
        (item.queue, item.when, item.blocked) = (queue, when, waits);
        (item.attempt, item.holder, item.origin) = (1, None, None);
        if stamp {
            item.sequence = numbers;
        }
    }

    pub(super) fn settle(&mut self, n: usize) {
        let left = self.items[&n].clone();
        if left.queue == B {
            let expires = self.after(RETENTION);
            let item = self.items.get_mut(&n).unwrap();
            (item.processed, item.holder, item.expires) = (true, None, Some(expires));
        } else {
            self.items.remove(&n);
        }
        self.pass_turn(&left);
    }

    pub(super) fn bury(&mut self, n: usize) {
        let (left, now) = (self.items[&n].clone(), self.now);
        let item = self.items.get_mut(&n).unwrap();
        (item.queue, item.when, item.holder) = (DEAD, now, None);
        (item.origin, item.attempt) = (Some(left.queue), 1);
        self.pass_turn(&left);
    }

    /// Returns the item that a receipt holds, or the outcome of its use.
    pub(super) fn holds(&self, receipt: usize) -> Result<usize, Outcome> {
        let n = self.receipts[receipt];
        match self.items.get(&n) {
            Some(item) if item.processed => Err(Outcome::Gone),
            Some(item) if item.holder == Some(receipt) => Ok(n),
            Some(_) => Err(Outcome::LeaseLost),
            None => Err(Outcome::Gone),
        }
    }

    /// Returns the items that can be handed out, in order.
    pub(super) fn ready(&self, queue: usize) -> Vec<usize> {
        let ready = |item: &Model| {
            item.queue == queue && !item.blocked && !item.processed && item.when <= self.now
        };
        let mut ready: Vec<usize> =
            self.items.iter().filter(|(_, item)| ready(item)).map(|(n, _)| *n).collect();
        ready.sort_by_key(|n| (-self.items[n].level, self.items[n].when, *n));
        ready
    }

    pub(super) fn state(&self, item: &Model) -> ItemState {
        match item {
            _ if item.processed => ItemState::Processed,
            _ if item.blocked => ItemState::Blocked,
            _ if item.when <= self.now => ItemState::Ready,
            _ if item.holder.is_some() => ItemState::Reserved,
            _ => ItemState::Delayed,
        }
    }
}
