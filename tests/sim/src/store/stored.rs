//! An item as the model keeps it.

use sluicegate_broker::domain::{
    AtHead, Item, ItemId, ItemSize, ItemState, LeaseToken, QueueName, Timestamp,
};

/// An item, and what its public form does not show.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) row: u64,
    /// The item. Its state and its times are those of [`Stored::view`], not these.
    pub(super) item: Item,
    /// The place in the hand-out order: the eligible time, or the end of the lease. `None` if the
    /// item is blocked or processed.
    pub(super) when: Option<Timestamp>,
    /// The eligible time of a blocked item.
    pub(super) blocked: Option<Timestamp>,
    /// The lease, lapsed or not.
    pub(super) lock: Option<LeaseToken>,
    /// When the last extension of a lease was asked for.
    pub(super) extended: Timestamp,
    /// When the item became eligible for its current delivery.
    pub(super) due: Option<Timestamp>,
    /// Number of deliveries before the item came into its queue.
    pub(super) earlier: u32,
    /// The queue in which the deduplication id counts.
    pub(super) dedup_queue: Option<QueueName>,
}

impl Stored {
    pub(super) fn size(&self) -> ItemSize {
        ItemSize { payload: self.item.payload.len(), message: self.item.message_bytes() }
    }

    pub(super) fn is_processed(&self) -> bool {
        self.item.process_time.is_some()
    }

    /// Returns true if the item is unsettled and has a place among those of its ordering key.
    pub(super) fn is_ordered(&self) -> bool {
        self.item.ordering_key.is_some() && !self.is_processed() && self.item.origin_queue.is_none()
    }

    /// Returns true if the next item of its key waits for this one.
    pub(super) fn has_turn(&self) -> bool {
        self.is_ordered() && self.blocked.is_none()
    }

    pub(super) fn state(&self, now: Timestamp) -> ItemState {
        match self.when {
            _ if self.is_processed() => ItemState::Processed,
            _ if self.blocked.is_some() => ItemState::Blocked,
            Some(when) if when > now && self.lock.is_some() => ItemState::Reserved,
            Some(when) if when > now => ItemState::Delayed,
            _ => ItemState::Ready,
        }
    }

    /// Returns the item as it is at `now`.
    pub(super) fn view(&self, now: Timestamp) -> Item {
        let state = self.state(now);
        let due_time = match state {
            ItemState::Blocked | ItemState::Processed => None,
            ItemState::Reserved => self.due,
            ItemState::Ready | ItemState::Delayed => self.when,
        };
        Item { state, eligible_time: self.when, due_time, ..self.item.clone() }
    }

    pub(super) fn at_head(&self) -> AtHead {
        let Item { attempt, deliveries, expire_time, .. } = self.item;
        let (lapsed, earlier_deliveries) = (self.lock.is_some(), self.earlier);
        AtHead { expire_time, lapsed, attempt, deliveries, earlier_deliveries }
    }
}

/// The first bytes of every id.
const TAG: [u8; 4] = *b"sim\0";

pub(super) fn id_of(row: u64) -> ItemId {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&TAG);
    bytes[4..].copy_from_slice(&row.to_be_bytes());
    ItemId(bytes)
}

/// Returns the row of an id; a row that does not exist if the id was invented.
pub(super) fn row_of(id: ItemId) -> u64 {
    match id.0.split_first_chunk() {
        Some((&TAG, row)) => row.try_into().map_or(0, u64::from_be_bytes),
        _ => 0,
    }
}
