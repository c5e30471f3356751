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

/// A change of some of a schedule's settings.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ScheduleChange {
    /// The new queue.
    pub queue: Option<QueueName>,
    /// The new cron expression.
    pub cron: Option<String>,
    /// The new time zone.
    pub time_zone: Option<String>,
    /// The new item.
    pub item: Option<NewItem>,
    /// Ticks up to this time count as done, because those of the new times begin later.
    pub done_until: Option<Timestamp>,
}

impl ScheduleChange {
    /// Makes the change.
    pub fn apply(&self, schedule: &mut Schedule) {
        let Self { queue, cron, time_zone, item, done_until } = self.clone();
        if let Some(queue) = queue {
            schedule.queue = queue;
        }
        if let Some(cron) = cron {
            schedule.cron = cron;
        }
        if let Some(time_zone) = time_zone {
            schedule.time_zone = time_zone;
        }
        if let Some(item) = item {
            schedule.item = item;
        }
        if let Some(until) = done_until {
            schedule.done_until = schedule.done_until.max(until);
        }
    }
}
