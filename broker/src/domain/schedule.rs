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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_a_schedule_changes_what_it_names_and_does_no_tick_again() {
        let schedule = Schedule {
            name: ScheduleName::parse("schedule", "s").unwrap(),
            queue: QueueName::parse("queue", "q").unwrap(),
            cron: "0 3 * * *".to_owned(),
            time_zone: "UTC".to_owned(),
            item: NewItem::default(),
            paused: true,
            create_time: Timestamp(1),
            done_until: Timestamp(100),
            last_time: Some(Timestamp(90)),
        };
        let changed = |change: ScheduleChange| {
            let mut changed = schedule.clone();
            change.apply(&mut changed);
            changed
        };
        assert_eq!(changed(ScheduleChange::default()), schedule);
        let other = Schedule {
            queue: QueueName::parse("queue", "other").unwrap(),
            cron: "5 4 * * *".to_owned(),
            time_zone: "Europe/Berlin".to_owned(),
            item: NewItem { payload: "new".into(), ..NewItem::default() },
            done_until: Timestamp(200),
            ..schedule.clone()
        };
        let all = ScheduleChange {
            queue: Some(other.queue.clone()),
            cron: Some(other.cron.clone()),
            time_zone: Some(other.time_zone.clone()),
            item: Some(other.item.clone()),
            done_until: Some(other.done_until),
        };
        assert_eq!(changed(all.clone()), other);
        let earlier = ScheduleChange { done_until: Some(Timestamp(50)), ..all };
        assert_eq!(changed(earlier), Schedule { done_until: schedule.done_until, ..other });
    }
}
