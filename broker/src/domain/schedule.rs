//! Schedules: recurring items.

use super::{NewItem, QueueName, ScheduleName, Timestamp};

/// A schedule and its progress.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Its name.
    pub name: ScheduleName,
    /// The queue that gets the items.
    pub queue: QueueName,
    /// Five fields, or six with the seconds first. Known to parse.
    pub cron: String,
    /// IANA name of the time zone; known to exist.
    pub time_zone: String,
    /// The item to push; its `dedup_id` is empty.
    pub item: NewItem,
    /// If true, the schedule does not tick.
    pub paused: bool,
    /// When it was created.
    pub create_time: Timestamp,
    /// Ticks up to this time are done: pushed, or skipped while the schedule was paused.
    pub done_until: Timestamp,
    /// The last tick that pushed an item.
    pub last_time: Option<Timestamp>,
}
