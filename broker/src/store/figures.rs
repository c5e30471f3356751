//! What was known about queues at past times, for charts.

use serde::{Deserialize, Serialize};

use crate::domain::Timestamp;

/// The figures of queues at one time, as one broker knew them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFigures {
    /// When and by whom they were kept.
    pub place: FiguresPlace,
    /// The figures, one entry for each queue.
    pub queues: Vec<QueueFigures>,
}

/// The place of figures in the order in which they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FiguresPlace {
    /// When this was so.
    pub time: Timestamp,
    /// Seconds between these figures and the next ones.
    pub step: u32,
    /// The broker that keeps them, by the first four bytes of its lease tokens.
    pub broker: [u8; 4],
}

/// The figures of a queue at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueFigures {
    /// The queue.
    pub queue: String,
    /// Numbers of items by state.
    pub ready: i64,
    /// The same.
    pub delayed: i64,
    /// The same.
    pub reserved: i64,
    /// The same.
    pub blocked: i64,
    /// How many items had ever been pushed.
    pub pushed: i64,
    /// How many items had ever left the queue, in whatever way.
    pub left: i64,
}
