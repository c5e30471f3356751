//! What this broker saw of a segment last.

use parking_lot::Mutex;

use crate::domain::ItemId;

/// A segment at the head of a queue, as this broker last saw it: what its next claim must name.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) id: ItemId,
    pub(crate) n: usize,
    /// How many items were left.
    pub(crate) left: usize,
    /// Until when the deduplication ids are remembered, if there are any.
    pub(crate) window: Option<i64>,
    front: Mutex<Front>,
}

/// Where the ready items of a segment begin, and how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Front {
    pub(crate) head: usize,
    pub(crate) ready: usize,
    /// How many claims there were.
    pub(crate) runs: usize,
}

impl Seen {
    pub(crate) fn new(
        id: ItemId,
        (n, left): (usize, usize),
        window: Option<i64>,
        front: Front,
    ) -> Self {
        Self { id, n, left, window, front: Mutex::new(front) }
    }

    pub(crate) fn front(&self) -> Front {
        *self.front.lock()
    }

    /// Notes what a claim of this broker has made of it.
    pub(crate) fn moved(&self, front: Front) {
        *self.front.lock() = front;
    }
}
