//! Queues, schedules, and agreements among brokers.

use std::{ops::Bound, time::Duration};

use sluicegate_broker::{
    domain::{Queue, QueueName, QueueTemplate, Schedule, ScheduleName, Timestamp, Totals},
    store::{
        BrokerReport, Created, Deleted, FiguresPlace, KeptFigures, Links, RECEIPT_KEYS,
        SettingsChanges, StoredReceiptKey,
    },
};

use super::world::World;

impl World {
    fn settings_changed(&mut self, queue: &QueueName) {
        self.changes.push(queue.clone());
    }

    pub(super) fn create_queue(&mut self, queue: &Queue) -> Created<Queue> {
        if let Some(existing) = self.queues.get(&queue.name) {
            return Created::Existing(existing.clone());
        }
        let new = Queue { revision: 1, ..plain(queue) };
        self.links += i64::from(new.dead_letter_queue.is_some());
        self.queues.insert(new.name.clone(), new.clone());
        self.settings_changed(&new.name);
        Created::New(new)
    }

    pub(super) fn update_queue(&mut self, queue: &Queue) -> Option<Queue> {
        let existing = self.queues.get(&queue.name)?;
        if existing.revision != queue.revision {
            return None;
        }
        let relinked = existing.dead_letter_queue != queue.dead_letter_queue;
        self.links += i64::from(relinked);
        let new = Queue { revision: queue.revision + 1, ..plain(queue) };
        self.queues.insert(new.name.clone(), new.clone());
        self.settings_changed(&new.name);
        Some(new)
    }

    pub(super) fn link_queue(&mut self, queue: &Queue, links: Links) -> Option<Queue> {
        if self.links != links.0 {
            return None;
        }
        let linked = if queue.revision > 0 {
            self.update_queue(queue)?
        } else {
            match self.create_queue(queue) {
                Created::New(queue) => queue,
                Created::Existing(_) => return None,
            }
        };
        self.links = links.0 + 1;
        Some(linked)
    }

    /// Creates a queue again that was deleted after somebody read its settings.
    pub(super) fn restore_queue(&mut self, queue: &Queue, now: Timestamp) {
        if self.queues.contains_key(&queue.name) {
            return;
        }
        let mut again = Queue { create_time: now, ..queue.clone() };
        if again.dead_letter_queue.as_ref().is_some_and(|to| !self.queues.contains_key(to)) {
            again.dead_letter_queue = None;
        }
        self.create_queue(&again);
    }

    /// Creates the dead-letter queue of a queue if it is not there.
    pub(super) fn restore_dead_letter_queue(
        &mut self,
        name: &QueueName,
        from: &Queue,
        now: Timestamp,
    ) {
        let templates = self.templates.values();
        let queue = QueueTemplate::dead_letter_queue(templates, name.clone(), from, now);
        self.create_queue(&queue);
    }

    pub(super) fn delete_queue(
        &mut self,
        queue: &Queue,
        force: bool,
        links: Links,
        now: Timestamp,
    ) -> Deleted {
        let is_current = |there: &Queue| there.revision == queue.revision;
        if self.links != links.0 || !self.queues.get(&queue.name).is_some_and(is_current) {
            return Deleted::Overtaken;
        }
        if !force && self.holds_items(&queue.name, now) {
            return Deleted::NotEmpty;
        }
        let items = self.purge(&queue.name, true, now);
        self.forget(&queue.name);
        self.queues.remove(&queue.name);
        self.links += 1;
        self.settings_changed(&queue.name);
        Deleted::Done(items)
    }

    /// Returns the queues whose settings have changed since `seen`, which is brought up to date.
    pub(super) fn settings_since(&self, seen: &mut Option<usize>) -> SettingsChanges {
        let Some(before) = seen.replace(self.changes.len()) else {
            return SettingsChanges::Unknown;
        };
        let mut changed = self.changes[before..].to_vec();
        changed.sort_unstable();
        changed.dedup();
        SettingsChanges::Of(changed)
    }

    pub(super) fn add_totals(&mut self, changes: Vec<(QueueName, Totals)>) {
        for (queue, more) in changes {
            self.totals.entry(queue).or_default().add(&more);
        }
    }

    pub(super) fn lead(
        &mut self,
        task: &'static str,
        broker: [u8; 4],
        lasting: Duration,
        now: Timestamp,
    ) -> bool {
        let taken = |(leader, until): &([u8; 4], Timestamp)| *leader != broker && *until > now;
        if self.leaders.get(task).is_some_and(taken) {
            return false;
        }
        if lasting.is_zero() {
            self.leaders.remove(task);
            return false;
        }
        self.leaders.insert(task, (broker, now + lasting));
        true
    }

    pub(super) fn create_schedule(&mut self, schedule: &Schedule) -> Created<Schedule> {
        if let Some(existing) = self.schedules.get(&schedule.name) {
            return Created::Existing(existing.clone());
        }
        self.schedules.insert(schedule.name.clone(), schedule.clone());
        Created::New(schedule.clone())
    }

    pub(super) fn pause_schedule(
        &mut self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Option<Schedule> {
        let schedule = self.schedules.get_mut(name)?;
        schedule.paused = paused;
        schedule.done_until = schedule.done_until.max(done_until);
        Some(schedule.clone())
    }

    pub(super) fn tick_done(&mut self, name: &ScheduleName, tick: Timestamp) {
        if let Some(schedule) = self.schedules.get_mut(name)
            && schedule.last_time.is_none_or(|last| last < tick)
        {
            schedule.last_time = Some(tick);
            schedule.done_until = schedule.done_until.max(tick);
        }
    }

    pub(super) fn add_receipt_key(&mut self, key: &StoredReceiptKey) {
        self.receipt_keys.entry(key.number).or_insert_with(|| key.clone());
        let last = key.number.saturating_sub(RECEIPT_KEYS);
        self.receipt_keys.retain(|number, _| *number > last);
    }

    pub(super) fn report_broker(
        &mut self,
        report: &BrokerReport,
        lasting: Duration,
        now: Timestamp,
    ) {
        self.broker_reports.insert(report.broker, (report.clone(), now + lasting));
    }

    pub(super) fn broker_reports(&mut self, now: Timestamp) -> Vec<BrokerReport> {
        self.broker_reports.retain(|_, (_, until)| *until > now);
        self.broker_reports.values().map(|(report, _)| report.clone()).collect()
    }

    pub(super) fn keep_figures(&mut self, figures: &KeptFigures, lasting: Duration) {
        let until = figures.place.time + lasting;
        self.figures.insert(figures.place, (figures.clone(), until));
    }

    pub(super) fn kept_figures(
        &mut self,
        after: Option<FiguresPlace>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<KeptFigures> {
        self.figures.retain(|_, (_, until)| *until > now);
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let kept = self.figures.range((after, Bound::Unbounded));
        kept.take(limit).map(|(_, (kept, _))| kept.clone()).collect()
    }
}

/// Returns the settings without what a broker adds, which is never stored.
fn plain(queue: &Queue) -> Queue {
    let bare = Queue::with_defaults(queue.name.clone(), queue.create_time);
    Queue { defaults: bare.defaults, at_limit: bare.at_limit, ..queue.clone() }
}
